"""Driver failures: each names the call, the driver's own words, and what was being done."""

from __future__ import annotations

from typing import Any

import pytest

from recording_libcuda import Recorder

LOAD = "native.load(IMAGE, 'gemv', 0)"
RESOLVE = "library.kernel('first_kernel', 60000)"
LAUNCH = "kernel.launch((3, 4, 5), (32, 2, 1), 0xABC, bytes(24))"
PREPARE = {
    LOAD: "",
    "native.devices()": "",
    RESOLVE: f"library = {LOAD}",
    LAUNCH: f"kernel = {LOAD}.kernel('first_kernel', 60000)",
    "kernel.attributes()": f"kernel = {LOAD}.kernel('first_kernel', 60000)",
}


def failure(recorder: Recorder, fail: str, action: str, **env: str) -> dict[str, Any]:
    outcome = recorder.native(
        f"""
        {PREPARE[action]}
        inject({fail!r})
        say(failure(lambda: {action}))
        """,
        env=env,
    )
    assert outcome.value is not None, "nothing was raised"
    return outcome.value


@pytest.mark.parametrize(
    ("call", "action", "context"),
    [
        ("cuDeviceGetCount", "native.devices()", ["counting the devices"]),
        ("cuDeviceGet", "native.devices()", ["device 0"]),
        ("cuDeviceGetName", "native.devices()", ["device 0"]),
        ("cuDeviceGetAttribute", "native.devices()", ["device 0"]),
        ("cuDeviceGetCount", LOAD, ["'gemv'"]),
        ("cuDeviceGet", LOAD, ["device 0", "'gemv'"]),
        ("cuDevicePrimaryCtxRetain", LOAD, ["device 0", "'gemv'", "Recording GPU 0", "sm90"]),
        ("cuCtxGetCurrent", LOAD, ["device 0", "'gemv'"]),
        ("cuCtxPushCurrent", LOAD, ["device 0", "'gemv'"]),
        ("cuCtxPopCurrent", LOAD, ["device 0", "'gemv'"]),
        ("cuLibraryLoadData", LOAD, ["device 0", "'gemv'", "Recording GPU 0", "sm90"]),
        ("cuLibraryGetKernel", RESOLVE, ["device 0", "'gemv'", "'first_kernel'"]),
        ("cuKernelGetFunction", RESOLVE, ["device 0", "'gemv'", "'first_kernel'"]),
        ("cuFuncLoad", RESOLVE, ["device 0", "'gemv'", "'first_kernel'"]),
        ("cuFuncSetAttribute", RESOLVE, ["device 0", "'gemv'", "'first_kernel'", "60000 bytes"]),
        ("cuFuncGetAttribute", "kernel.attributes()", ["device 0", "'gemv'", "'first_kernel'"]),
        *(
            (
                call,
                LAUNCH,
                [
                    "'first_kernel' of 'gemv' on device 0",
                    "grid (3, 4, 5)",
                    "block (32, 2, 1)",
                    "stream 0xabc",
                    "60000 bytes of dynamic shared memory",
                    "24 bytes of parameters",
                ],
            )
            for call in ("cuLaunchKernel", "cuCtxGetCurrent", "cuCtxPushCurrent", "cuCtxPopCurrent")
        ),
    ],
)
def test_every_call(recorder: Recorder, call: str, action: str, context: list[str]) -> None:
    error = failure(recorder, f"{call}=2", action)
    assert error["type"] == "DriverError"
    assert "SonataError" in error["kinds"]
    assert (error["code"], error["name"]) == (2, "CUDA_ERROR_OUT_OF_MEMORY")
    assert error["text"] == "out of memory"
    for text in [call, "CUDA_ERROR_OUT_OF_MEMORY (2): out of memory", *context]:
        assert text in error["what"]
    assert "free GPU memory" in error["remedy"]


@pytest.mark.parametrize(
    ("code", "action", "name", "remedy"),
    [
        (200, LOAD, "CUDA_ERROR_INVALID_IMAGE", "rebuild"),
        (209, LOAD, "CUDA_ERROR_NO_BINARY_FOR_GPU", "sonata-aot build --arch sm86"),
        (218, LOAD, "CUDA_ERROR_INVALID_PTX", "sonata-aot build --arch sm86"),
        (222, LOAD, "CUDA_ERROR_UNSUPPORTED_PTX_VERSION", "older than the PTX ISA"),
        (222, LOAD, "CUDA_ERROR_UNSUPPORTED_PTX_VERSION", "sonata-aot build --arch sm86"),
        (700, LAUNCH, "CUDA_ERROR_ILLEGAL_ADDRESS", "an earlier kernel on this context failed"),
        (701, LAUNCH, "CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES", "smaller block"),
        (400, LAUNCH, "CUDA_ERROR_INVALID_HANDLE", "stream"),
    ],
)
def test_remedies(recorder: Recorder, code: int, action: str, name: str, remedy: str) -> None:
    call = "cuLaunchKernel" if action == LAUNCH else "cuLibraryLoadData"
    error = failure(recorder, f"{call}={code}", action, SONATA_TEST_CUDA_CC="8.6")
    assert (error["type"], error["code"], error["name"]) == ("DriverError", code, name)
    assert remedy in error["remedy"]


def test_a_code_that_the_driver_does_not_know(recorder: Recorder) -> None:
    error = failure(recorder, "cuLaunchKernel=12345", LAUNCH)
    assert (error["code"], error["name"]) == (12345, "CUDA_ERROR_12345")
    assert error["text"]
    assert error["remedy"]


def test_an_entry_that_is_not_there(recorder: Recorder) -> None:
    outcome = recorder.native("say(failure(native.load(IMAGE, 'gemv', 0).kernel, 'third_kernel'))")
    assert outcome.value["name"] == "CUDA_ERROR_NOT_FOUND"
    assert "'third_kernel' of 'gemv'" in outcome.value["what"]
    assert "rebuild" in outcome.value["remedy"]


def test_more_shared_memory_than_the_device_has(recorder: Recorder) -> None:
    outcome = recorder.native(
        "say(failure(native.load(IMAGE, 'gemv', 0).kernel, 'first_kernel', 300000))"
    )
    assert "300000 bytes" in outcome.value["what"]
    assert "at most 232448 bytes" in outcome.value["remedy"]


def test_a_failed_shared_memory_request_is_not_remembered(recorder: Recorder) -> None:
    outcome = recorder.native(
        """
        library = native.load(IMAGE, "gemv", 0)
        inject("cuFuncSetAttribute=2")
        assert failure(library.kernel, "first_kernel", 60000)
        inject("")
        library.kernel("first_kernel", 60000).launch((1, 1, 1), (1, 1, 1), 0, b"")
        """
    )
    assert [call["result"] for call in outcome.named("cuFuncSetAttribute")] == [2, 0]
    assert [call["result"] for call in outcome.named("cuLaunchKernel")] == [0]


def test_the_first_failure_wins_over_the_pop(recorder: Recorder) -> None:
    error = failure(recorder, "cuLaunchKernel=700;cuCtxPopCurrent=201", LAUNCH)
    assert error["code"] == 700


@pytest.mark.parametrize("ptx", [True, False])
def test_the_ptx_compilers_log(recorder: Recorder, ptx: bool) -> None:
    outcome = recorder.native(
        f"""
        inject("cuLibraryLoadData=218")
        say(failure(native.load, IMAGE, "gemv.ptx", 0, ptx={ptx}))
        """,
        env={"SONATA_TEST_CUDA_JITLOG": "ptxas line 7\n  : error: unknown opcode\n"},
    )
    assert outcome.value["name"] == "CUDA_ERROR_INVALID_PTX"
    assert "'gemv.ptx'" in outcome.value["what"]
    assert ("ptxas line 7   : error: unknown opcode" in outcome.value["what"]) is ptx
    assert "\n" not in outcome.value["message"]


def test_a_log_of_any_bytes_and_length(recorder: Recorder) -> None:
    outcome = recorder.native(
        """
        inject("cuLibraryLoadData=218")
        os.environb[b"SONATA_TEST_CUDA_JITLOG"] = b"\\xff\\xfe bad " + b"x" * 20000
        say(failure(native.load, IMAGE, "gemv.ptx", 0, ptx=True))
        """
    )
    assert outcome.value["type"] == "DriverError"
    assert " bad xxx" in outcome.value["what"]
    assert 8000 < outcome.value["what"].count("x") < 8300


def test_launches_go_on_after_a_failure(recorder: Recorder) -> None:
    outcome = recorder.native(
        """
        kernel = first_kernel()
        inject("cuLaunchKernel=1")
        assert failure(kernel.launch, (1, 1, 1), (1, 1, 1), 0, b"")["code"] == 1
        inject("")
        kernel.launch((1, 1, 1), (1, 1, 1), 0, b"")
        """
    )
    assert [call["result"] for call in outcome.named("cuLaunchKernel")] == [1, 0]
