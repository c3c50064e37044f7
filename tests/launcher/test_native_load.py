"""Loading images and resolving their kernels."""

from __future__ import annotations

import hashlib

import pytest

from recording_libcuda import FIRST_CONTEXT, Recorder


def test_the_driver_gets_the_callers_own_bytes(recorder: Recorder) -> None:
    image = b"\x7fPTX first_kernel " + bytes(range(1, 256)) * 40
    outcome = recorder.native(
        f"""
        image = {image!r}
        before = sys.getrefcount(image)
        library = native.load(image, "gemv", 0)
        # CPython keeps the bytes at the end of the object, before the NUL.
        say([id(image) + bytes.__basicsize__ - 1, sys.getrefcount(image) - before])
        """
    )
    (load,) = outcome.named("cuLibraryLoadData")
    assert load["address"] == outcome.value[0]
    assert (load["size"], load["sha256"]) == (len(image), hashlib.sha256(image).hexdigest())
    assert bytes.fromhex(load["head"]) == image[:16]
    assert load["context"] == FIRST_CONTEXT
    assert load["options"] == []
    assert outcome.value[1] == 0, "the driver has its own copy; nothing may keep the image"


def test_ptx_is_loaded_with_an_error_log(recorder: Recorder) -> None:
    outcome = recorder.native("native.load(IMAGE, 'gemv', 0, ptx=True).kernel('first_kernel')")
    (load,) = outcome.named("cuLibraryLoadData")
    assert (load["result"], load["options"]) == (0, [5, 6])


def test_a_devices_context_is_retained_once(recorder: Recorder) -> None:
    outcome = recorder.native(
        """
        for device in (0, 1, 0, 1, 0):
            first_kernel(device=device)
        """,
        env={"SONATA_TEST_CUDA_DEVICES": "2"},
    )
    retained = outcome.named("cuDevicePrimaryCtxRetain")
    assert [call["device"] for call in retained] == [0, 1]
    assert len(outcome.named("cuInit")) == 1
    loads = outcome.named("cuLibraryLoadData")
    assert [x["context"] - FIRST_CONTEXT for x in loads] == [0, 1, 0, 1, 0]


def test_concurrent_first_uses_initialise_once(recorder: Recorder) -> None:
    outcome = recorder.native(
        """
        barrier = threading.Barrier(8)
        def work():
            barrier.wait()
            first_kernel(60000).launch((1, 1, 1), (1, 1, 1), 0, b"")
        workers = [threading.Thread(target=work) for _ in range(8)]
        for worker in workers: worker.start()
        for worker in workers: worker.join()
        """,
        env={"SONATA_TEST_CUDA_DELAY": "cuInit=100;cuDevicePrimaryCtxRetain=100"},
    )
    assert len(outcome.named("cuInit")) == 1
    assert len(outcome.named("cuDevicePrimaryCtxRetain")) == 1
    assert [call["result"] for call in outcome.named("cuLaunchKernel")] == [0] * 8


def test_only_the_device_asked_for_gets_a_context(recorder: Recorder) -> None:
    outcome = recorder.native("first_kernel(device=2)", env={"SONATA_TEST_CUDA_DEVICES": "4"})
    assert [call["device"] for call in outcome.named("cuDevicePrimaryCtxRetain")] == [2]


def test_resolving_loads_the_code_at_once(recorder: Recorder) -> None:
    outcome = recorder.native("first_kernel()")
    names = outcome.names
    assert names.index("cuLibraryGetKernel") < names.index("cuKernelGetFunction")
    assert names.index("cuKernelGetFunction") < names.index("cuFuncLoad")
    assert outcome.named("cuFuncSetAttribute") == []


def test_small_shared_memory_is_set_too(recorder: Recorder) -> None:
    outcome = recorder.native("first_kernel(16).launch((1, 1, 1), (1, 1, 1), 0, b'')")
    (call,) = outcome.named("cuFuncSetAttribute")
    assert (call["attribute"], call["value"]) == (8, 16)
    assert [call["shared"] for call in outcome.named("cuLaunchKernel")] == [16]


def test_a_smaller_request_does_not_shrink_an_earlier_kernel(recorder: Recorder) -> None:
    """The limit belongs to the driver's function, which the kernels of one entry share."""
    outcome = recorder.native(
        """
        library = native.load(IMAGE, "gemv", 0)
        kernels = [library.kernel("first_kernel", n) for n in (90000, 60000, 0, 120000)]
        for kernel in kernels:
            kernel.launch((1, 1, 1), (1, 1, 1), 0, b"")
        """
    )
    launches = outcome.named("cuLaunchKernel")
    assert [(call["shared"], call["result"]) for call in launches] == [
        (90000, 0),
        (60000, 0),
        (0, 0),
        (120000, 0),
    ]
    assert [call["value"] for call in outcome.named("cuFuncSetAttribute")] == [90000, 120000]


def test_attributes(recorder: Recorder) -> None:
    outcome = recorder.native("say(first_kernel().attributes())")
    assert outcome.value == {
        "registers": 40,
        "local_bytes": 16,
        "static_shared_bytes": 2048,
        "max_threads": 1024,
    }


@pytest.mark.parametrize("end", ["", "os._exit(0)"])
def test_libraries_are_never_unloaded(recorder: Recorder, end: str) -> None:
    outcome = recorder.native(
        f"""
        import gc
        kernel = first_kernel()
        for _ in range(3):
            native.load(IMAGE, "dropped", 0)
        gc.collect()
        kernel.launch((1, 1, 1), (1, 1, 1), 0, b"")  # its library is gone, its code is not
        held = kernel
        del kernel
        {end}
        """
    )
    assert len(outcome.named("cuLibraryLoadData")) == 4
    assert [call["result"] for call in outcome.named("cuLaunchKernel")] == [0]
    assert outcome.named("cuLibraryUnload") == []
    assert outcome.stderr == ""


def test_what_objects_say_of_themselves(recorder: Recorder) -> None:
    outcome = recorder.native(
        """
        library = native.load(IMAGE, "gemv-é", 0)
        say([repr(library), repr(library.kernel("first_kernel"))])
        """
    )
    assert outcome.value == [
        "<Library 'gemv-é' on device 0>",
        "<Kernel 'first_kernel' of 'gemv-é' on device 0>",
    ]
