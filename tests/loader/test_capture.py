"""Graphs, as far as the driver's stand-in goes: where launches land, and what else is asked of it.

tests/gpu/test_launch_path.py captures and replays real ones.
"""

from __future__ import annotations

import pytest

from gemv_launches import issued

# A stream of each thread's own, `streams.own`; 9 is the one that is captured.
STREAMS = """
import threading
from types import SimpleNamespace
streams = threading.local()
runtime.current_stream = lambda device: getattr(streams, "own", 7)

def capture():
    streams.own = 9
    os.environ["SONATA_TEST_CUDA_CAPTURING"] = "9"

def in_thread(work):
    failed = []
    def run():
        try: work()
        except BaseException as error: failed.append(error)
    thread = threading.Thread(target=run)
    thread.start(); thread.join()
    if failed: raise failed[0]
"""
# What may be asked of the driver during a capture besides launches: nothing that a capture forbids,
# such as memory, loading or waiting.
HARMLESS = {
    "cuCtxGetCurrent",
    "cuCtxPushCurrent_v2",
    "cuCtxPopCurrent_v2",
    "cuStreamIsCapturing",
}
LAUNCHES = {"cuLaunchKernel", "cuLaunchKernelEx"}


def captured(outcome):
    """The launches on the captured stream, and all calls of the thread that made them."""
    found = [each for each in issued(outcome) if each["stream"] == 9]
    (thread,) = {each["thread"] for each in found}
    return found, [each for each in outcome.calls if each["thread"] == thread]


@pytest.mark.parametrize("warm", [True, False])
def test_a_capture_on_another_thread_than_the_one_that_loaded(plain_call, warm):
    """Warmed up there or never called before: the calls go to its stream, and nothing else is done.

    The thread has no context of its own, and none afterwards.
    """
    outcome = plain_call(
        STREAMS
        + f"""
b = k.gemv.bind(weight)
def calls():
    for _ in range(3):
        k.gemv(x, weight, out=out)
        b(x, out)

def work():
    streams.own = 8
    if {warm}: calls()
    capture()
    calls()
    import ctypes
    current = ctypes.c_void_p()
    assert ctypes.CDLL("libcuda.so.1").cuCtxGetCurrent(ctypes.byref(current)) == 0
    say(current.value or 0)

in_thread(work)
"""
    )
    assert outcome.value == 0
    found, calls = captured(outcome)
    assert len(found) == 6
    assert {each["context"] for each in found} == {4096 + 1}
    # Bound calls are early only where a launch in order was seen before the capture.
    assert [each["call"] == "cuLaunchKernelEx" for each in found] == [False, warm] * 3
    assert {each["call"] for each in calls} <= HARMLESS | LAUNCHES
    assert all(each["result"] == 0 for each in calls)
    loaders = {each["thread"] for each in outcome.named("cuInit")}
    assert found[0]["thread"] not in loaders


def test_a_scan_that_is_first_called_in_a_capture_on_another_thread(call, ssd_artifacts):
    """All its launches, those between segments too, are on the stream that is captured."""
    outcome = call(
        STREAMS
        + """
def work():
    capture()
    for _ in range(2): call("D z initial_states", dict(b=1, l=6400), return_final_states=True)
in_thread(work)
say(0)
"""
    )
    found, calls = captured(outcome)
    assert len(found) == len(issued(outcome)) == 8
    names = {each["call"] for each in calls}
    # The first call asks what the devices are.
    assert names <= HARMLESS | LAUNCHES | {
        "cuDeviceGetCount",
        "cuDeviceGet",
        "cuDeviceGetName",
        "cuDeviceGetAttribute",
    }


def test_all_launches_of_a_capture_are_on_its_stream_while_others_launch(plain_call):
    """116 of them, as many as a decode step of a hybrid stack has, beside another thread's."""
    outcome = plain_call(
        STREAMS
        + """
b = k.gemv.bind(weight)
for _ in range(2):
    k.gemv(x, weight, out=out); b(x, out)
start, end, others = threading.Barrier(2), threading.Event(), []

def serve():
    streams.own = 8
    mine, result = made(2, 64), made(2, 100)
    start.wait()
    while not end.is_set():
        k.gemv(mine, weight, out=result); b(mine, result); others.append(result)

server = threading.Thread(target=serve); server.start()
def work():
    start.wait()
    while len(others) < 10: pass  # both are at it
    capture()
    for _ in range(58):
        k.gemv(x, weight, out=out); b(x, out)
    streams.own = 7
    before = len(others)
    while len(others) < before + 10: pass
    end.set()
in_thread(work)
server.join()
say([x.data_ptr(), len(others), len(slow)])
"""
    )
    address, others, python = outcome.value
    assert python == 2
    found, calls = captured(outcome)
    assert len(found) == 116
    assert {each["params"][:16] for each in found} == {address.to_bytes(8, "little").hex()}
    assert [each["call"] for each in found] == ["cuLaunchKernel", "cuLaunchKernelEx"] * 58
    beside = [each for each in issued(outcome) if each["stream"] == 8]
    assert len(beside) == 2 * others
    assert {each["thread"] for each in beside}.isdisjoint(each["thread"] for each in found)
    assert {each["call"] for each in calls} <= HARMLESS | LAUNCHES
