"""Launches: what reaches the driver, in which context, from which thread."""

from __future__ import annotations

from collections import Counter

import pytest

from recording_libcuda import FIRST_CONTEXT, Recorder

LAUNCH = ["cuCtxGetCurrent", "cuCtxPushCurrent_v2", "cuLaunchKernel", "cuCtxPopCurrent_v2"]


def test_every_argument_reaches_the_driver_unchanged(recorder: Recorder) -> None:
    params = bytes(range(256)) + b"\x00\x00tail"
    outcome = recorder.native(
        f"""
        kernel = first_kernel(shared_bytes=70000)
        kernel.launch((3, 5, 7), (32, 4, 2), 0x7F00DEADBEE8, {params!r})
        """
    )
    (launch,) = outcome.named("cuLaunchKernel")
    assert launch["result"] == 0
    assert launch["entry"] == "first_kernel"
    assert launch["grid"] == [3, 5, 7]
    assert launch["block"] == [32, 4, 2]
    assert launch["shared"] == 70000
    assert launch["stream"] == 0x7F00DEADBEE8
    assert bytes.fromhex(launch["params"]) == params
    assert launch["kernel_params"] is False
    assert launch["context"] == FIRST_CONTEXT


def test_a_programmatic_launch_differs_in_its_attribute_alone(recorder: Recorder) -> None:
    outcome = recorder.native(
        """
        kernel = first_kernel(shared_bytes=70000)
        for programmatic in (True, False):
            kernel.launch((3, 5, 7), (32, 4, 2), 0x7F00DEADBEE8, b"parameters", programmatic)
        """
    )
    (extended,) = outcome.named("cuLaunchKernelEx")
    (plain,) = outcome.named("cuLaunchKernel")
    assert extended.pop("attributes") == [[6, 1]]  # programmatic stream serialization: allowed
    assert {**extended, "call": "cuLaunchKernel"} == plain


def test_a_failed_programmatic_launch_is_explained(recorder: Recorder) -> None:
    outcome = recorder.native(
        """
        kernel = first_kernel()
        inject("cuLaunchKernelEx=700")
        say(failure(kernel.launch, (1, 1, 1), (1, 1, 1), 0, b"", programmatic=True))
        """
    )
    assert outcome.value["type"] == "DriverError"
    assert "cuLaunchKernelEx failed with CUDA_ERROR_ILLEGAL_ADDRESS" in outcome.value["what"]


@pytest.mark.parametrize("stream", [0, 1, 2, 2**31, 2**32 + 8, 2**63, 2**64 - 1])
def test_stream_handles_are_exact(recorder: Recorder, stream: int) -> None:
    outcome = recorder.native(f"first_kernel().launch((1, 1, 1), (1, 1, 1), {stream}, b'')")
    assert [call["stream"] for call in outcome.named("cuLaunchKernel")] == [stream]


@pytest.mark.parametrize("size", [0, 1, 4, 4095, 4096])
def test_parameter_blocks_of_any_legal_size(recorder: Recorder, size: int) -> None:
    outcome = recorder.native(
        f"first_kernel().launch((1, 1, 1), (1, 1, 1), 0, bytes(i % 251 for i in range({size})))"
    )
    (launch,) = outcome.named("cuLaunchKernel")
    assert bytes.fromhex(launch["params"]) == bytes(i % 251 for i in range(size))


def test_keyword_arguments(recorder: Recorder) -> None:
    outcome = recorder.native(
        "first_kernel().launch(params=b'ab', stream=6, block=(4, 1, 1), grid=(2, 1, 1))"
    )
    (launch,) = outcome.named("cuLaunchKernel")
    assert (launch["grid"], launch["block"]) == ([2, 1, 1], [4, 1, 1])
    assert (launch["stream"], launch["params"]) == (6, b"ab".hex())


@pytest.mark.parametrize(
    ("grid", "block"),
    [
        ((2**31 - 1, 65535, 65535), (1024, 1, 1)),
        ((1, 1, 1), (1, 1024, 1)),
        ((1, 1, 1), (4, 4, 64)),
    ],
)
def test_the_largest_grids_and_blocks(
    recorder: Recorder, grid: tuple[int, int, int], block: tuple[int, int, int]
) -> None:
    outcome = recorder.native(f"first_kernel().launch({grid}, {block}, 0, b'')")
    (launch,) = outcome.named("cuLaunchKernel")
    assert (launch["grid"], launch["block"]) == (list(grid), list(block))


def test_a_launch_does_nothing_but_launch(recorder: Recorder) -> None:
    """No synchronisation, no query of the stream: it must be legal under graph capture."""
    outcome = recorder.native(
        """
        kernel = first_kernel()
        launch = kernel.launch
        before = sum(1 for _ in open(os.environ["SONATA_TEST_CUDA_LOG"]))
        launch((1, 1, 1), (1, 1, 1), 0, b"")
        say(before)
        """
    )
    assert outcome.names[outcome.value :] == LAUNCH


def test_no_push_when_the_context_is_current(recorder: Recorder) -> None:
    outcome = recorder.native(
        f"""
        kernel = first_kernel()
        set_context({FIRST_CONTEXT})
        before = sum(1 for _ in open(os.environ["SONATA_TEST_CUDA_LOG"]))
        kernel.launch((1, 1, 1), (1, 1, 1), 0, b"")
        say([before, current_context()])
        """
    )
    before, context = outcome.value
    assert outcome.names[before:] == ["cuCtxGetCurrent", "cuLaunchKernel", "cuCtxGetCurrent"]
    assert context == FIRST_CONTEXT


@pytest.mark.parametrize("fail", ["", "cuLaunchKernel=700"])
def test_the_callers_context_is_restored(recorder: Recorder, fail: str) -> None:
    outcome = recorder.native(
        f"""
        set_context(777)  # another library's
        seen = []
        library = native.load(IMAGE, "gemv", 0)
        seen.append(current_context())
        kernel = library.kernel("first_kernel", 60000)
        seen.append(current_context())
        kernel.attributes()
        seen.append(current_context())
        inject({fail!r})
        error = failure(kernel.launch, (1, 1, 1), (1, 1, 1), 0, b"")
        seen.append(current_context())
        say([seen, error is not None])
        """
    )
    assert outcome.value == [[777] * 4, bool(fail)]
    needing_context = (
        "cuLibraryLoadData",
        "cuKernelGetFunction",
        "cuFuncLoad",
        "cuFuncSetAttribute",
        "cuFuncGetAttribute",
        "cuLaunchKernel",
    )
    assert {call["context"] for call in outcome.named(*needing_context)} == {FIRST_CONTEXT}


def test_a_fresh_thread_launches_and_is_left_without_a_context(recorder: Recorder) -> None:
    outcome = recorder.native(
        f"""
        kernel = first_kernel()
        set_context({FIRST_CONTEXT})
        seen = []
        def work():
            kernel.launch((1, 1, 1), (1, 1, 1), 8, b"thread")
            seen.append(current_context())
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
        say(seen)
        """
    )
    assert outcome.value == [0]
    (launch,) = outcome.named("cuLaunchKernel")
    assert launch["context"] == FIRST_CONTEXT
    assert launch["thread"] != launch["pid"]


def test_two_devices(recorder: Recorder) -> None:
    outcome = recorder.native(
        """
        first, second = first_kernel(device=0), first_kernel(device=1)
        set_context(4096)
        second.launch((1, 1, 1), (1, 1, 1), 0, b"1")
        first.launch((1, 1, 1), (1, 1, 1), 0, b"0")
        say(current_context())
        """,
        env={"SONATA_TEST_CUDA_DEVICES": "2"},
    )
    launches = outcome.named("cuLaunchKernel")
    assert [(x["context"], bytes.fromhex(x["params"])) for x in launches] == [
        (FIRST_CONTEXT + 1, b"1"),
        (FIRST_CONTEXT, b"0"),
    ]
    assert [call["result"] for call in launches] == [0, 0]
    assert outcome.value == FIRST_CONTEXT


def test_concurrent_launches_keep_their_own_parameters(recorder: Recorder) -> None:
    threads, launches = 8, 150
    outcome = recorder.native(
        f"""
        kernels = [first_kernel(), first_kernel(device=1)]
        barrier = threading.Barrier({threads})
        def work(number):
            barrier.wait()
            for i in range({launches}):
                block = number.to_bytes(4, "little") + i.to_bytes(4, "little") * 5
                kernels[i % 2].launch((number + 1, 1, 1), (i + 1, 1, 1), number, block)
        workers = [threading.Thread(target=work, args=(n,)) for n in range({threads})]
        for worker in workers: worker.start()
        for worker in workers: worker.join()
        """,
        env={"SONATA_TEST_CUDA_DEVICES": "2"},
    )
    calls = outcome.named("cuLaunchKernel")
    assert Counter(call["stream"] for call in calls) == dict.fromkeys(range(threads), launches)
    for call in calls:
        params = bytes.fromhex(call["params"])
        number, i = call["stream"], int.from_bytes(params[4:8], "little")
        assert params == number.to_bytes(4, "little") + i.to_bytes(4, "little") * 5
        assert call["grid"] == [number + 1, 1, 1]
        assert call["block"] == [i + 1, 1, 1]
        assert (call["result"], call["context"]) == (0, FIRST_CONTEXT + i % 2)
    assert len({call["params"] for call in calls}) == threads * launches


@pytest.mark.parametrize(
    ("delayed", "action"),
    [
        ("cuInit", "native.driver_state()"),
        ("cuLibraryLoadData", "native.load(IMAGE, 'gemv', 0)"),
        ("cuKernelGetFunction", "library.kernel('second_kernel')"),
        ("cuFuncGetAttribute", "kernel.attributes()"),
        ("cuLaunchKernel", "kernel.launch((1, 1, 1), (1, 1, 1), 0, b'')"),
    ],
)
def test_the_gil_is_free_while_the_driver_works(
    recorder: Recorder, delayed: str, action: str
) -> None:
    prepare = "" if delayed == "cuInit" else "library = native.load(IMAGE, 'gemv', 0)"
    if delayed in ("cuFuncGetAttribute", "cuLaunchKernel"):
        prepare += "; kernel = library.kernel('first_kernel')"
    outcome = recorder.native(
        f"""
        {prepare}
        os.environ["SONATA_TEST_CUDA_DELAY"] = "{delayed}=400"
        worker = threading.Thread(target=lambda: {action})
        worker.start()
        ticks = 0
        while worker.is_alive():
            time.sleep(0.01)
            ticks += 1
        say(ticks)
        """
    )
    assert outcome.value > 10


def test_launches_keep_no_references(recorder: Recorder) -> None:
    outcome = recorder.native(
        """
        kernel = first_kernel()
        grid, block, params = (1, 1, int("1")), (1, int("1"), 1), bytes(range(64))
        stream = int("94520968041104")
        def counts():
            return [sys.getrefcount(x) for x in (kernel, grid, block, params, stream)]
        before = counts()
        for attempt in ("", "cuLaunchKernel=700"):
            inject(attempt)
            for _ in range(100):
                failure(kernel.launch, grid, block, stream, params)
                failure(kernel.launch, grid, (2, 2, 2000), stream, params)
                failure(kernel.launch, grid, block, -1, params)
        say([before, counts()])
        """
    )
    before, after = outcome.value
    assert before == after


def test_daemon_threads_may_be_launching_while_the_process_exits(recorder: Recorder) -> None:
    """They come back from the driver when there is no interpreter to come back to."""
    outcome = recorder.native(
        """
        kernel = first_kernel()
        class Lingers:
            def __del__(self, sleep=time.sleep):
                sleep(0.5)
        sys.lingers = Lingers()  # until the interpreter is taken apart
        def work(launch=kernel.launch):
            while True:
                launch((1, 1, 1), (1, 1, 1), 0, b"")
        os.environ["SONATA_TEST_CUDA_DELAY"] = "cuLaunchKernel=100"
        for _ in range(4):
            threading.Thread(target=work, daemon=True).start()
        time.sleep(0.05)
        """
    )
    assert outcome.stderr == ""
    assert outcome.named("cuLaunchKernel"), "no launch returned while the process was alive"
