"""A forked child of a process that used the driver must not use it, and need not."""

from __future__ import annotations

import textwrap

from recording_libcuda import Outcome, Recorder

FORK = """
def in_child(work):
    # What the work returns in a forked child, and the child's exit status.
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reader)
        with open(writer, "w") as out:
            json.dump(work(), out)
        sys.exit(0)  # the interpreter's whole shutdown, not os._exit
    os.close(writer)
    with open(reader) as answer:
        value = answer.read()
    return json.loads(value) if value else None, os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
"""


def forked(script: str) -> str:
    return FORK + textwrap.dedent(script)


def child_calls(outcome: Outcome, parent: int) -> list[str]:
    return [call["call"] for call in outcome.calls if call["pid"] != parent]


def test_a_child_that_uses_the_driver_is_told(recorder: Recorder) -> None:
    outcome = recorder.native(
        forked(
            """
            library = native.load(IMAGE, "gemv", 0)
            kernel = library.kernel("first_kernel")
            def work():
                return [failure(action) for action in (
                    native.devices,
                    lambda: native.load(IMAGE, "gemv", 0),
                    lambda: library.kernel("second_kernel"),
                    kernel.attributes,
                    lambda: kernel.launch((1, 1, 1), (1, 1, 1), 0, b""),
                )] + [native.driver_state()]
            say([os.getpid(), *in_child(work)])
            kernel.launch((1, 1, 1), (1, 1, 1), 0, b"")  # the parent goes on
            """
        )
    )
    parent, (*errors, state), status = outcome.value
    assert status == 0
    for error in errors:
        assert error["type"] == "ForkedProcess"
        assert "SonataError" in error["kinds"]
        assert "does not survive a fork" in error["what"]
        assert "'spawn'" in error["remedy"]
        assert "load() in the child" in error["remedy"]
    assert state["available"] is False
    assert "fork" in state["reason"]
    assert child_calls(outcome, parent) == []
    assert [call["result"] for call in outcome.named("cuLaunchKernel")] == [0]


def test_a_child_that_does_not_use_it_exits_cleanly(recorder: Recorder) -> None:
    outcome = recorder.native(
        forked(
            """
            kernel = first_kernel()
            def work():
                global kernel
                kernel = None
                return "done"
            say([os.getpid(), *in_child(work)])
            """
        )
    )
    parent, value, status = outcome.value
    assert (value, status) == ("done", 0)
    assert child_calls(outcome, parent) == []
    assert outcome.stderr == ""


def test_a_child_may_be_the_first_to_use_it(recorder: Recorder) -> None:
    outcome = recorder.native(
        forked(
            """
            def work():
                first_kernel().launch((1, 1, 1), (1, 1, 1), 0, b"child")
                return in_child(lambda: failure(first_kernel)["type"])
            child = in_child(work)
            first_kernel().launch((1, 1, 1), (1, 1, 1), 0, b"parent")
            say([os.getpid(), *child])
            """
        )
    )
    parent, grandchild, status = outcome.value
    assert (grandchild, status) == (["ForkedProcess", 0], 0)
    launches = outcome.named("cuLaunchKernel")
    assert [bytes.fromhex(call["params"]) for call in launches] == [b"child", b"parent"]
    assert [call["pid"] == parent for call in launches] == [False, True]
    assert {call["result"] for call in launches} == {0}


def test_a_parent_that_found_no_device_leaves_its_child_free(recorder: Recorder) -> None:
    outcome = recorder.native(
        forked(
            """
            inject("cuInit=100")
            assert not native.driver_state()["available"]
            def work():
                inject("")
                first_kernel()
                return "loaded"
            say(in_child(work))
            """
        )
    )
    assert outcome.value == ["loaded", 0]


def test_a_fork_during_initialisation_does_not_hang(recorder: Recorder) -> None:
    """The child inherits a lock that nobody in it will release."""
    outcome = recorder.native(
        forked(
            """
            os.environ["SONATA_TEST_CUDA_DELAY"] = "cuInit=1000"
            starter = threading.Thread(target=first_kernel)
            starter.start()
            time.sleep(0.3)
            child = in_child(lambda: [failure(first_kernel)["type"], native.driver_state()])
            starter.join()
            say(child)
            """
        ),
        timeout=30,
    )
    (kind, state), status = outcome.value
    assert (kind, state["available"], status) == ("ForkedProcess", False, 0)


def test_another_library_used_the_driver_before_the_fork(recorder: Recorder) -> None:
    """Then the driver itself refuses, and the message says what may have happened."""
    outcome = recorder.native(
        forked(
            """
            assert driver().cuInit(0) == 0
            say(in_child(lambda: failure(first_kernel)))
            """
        )
    )
    error, status = outcome.value
    assert (error["type"], status) == ("DriverUnavailable", 0)
    assert "CUDA_ERROR_NOT_INITIALIZED (3)" in error["what"]
    assert "forked" in error["remedy"]
    assert "'spawn'" in error["remedy"]
