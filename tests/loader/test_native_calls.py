"""The native call of a GEMV and of a bound one: what goes past Python, and what must not."""

from __future__ import annotations

import json

from gemv_launches import issued


def test_ways_to_write_a_call_are_one(plain_call):
    outcome = plain_call(
        "k.gemv(x, weight, out=out)\n"
        "bias = made(100); k.gemv(x, weight, bias, out)\n"
        "first = len(slow)\n"
        "for found in (k.gemv(x, weight, None, out), k.gemv(x, weight, bias=None, out=out),\n"
        "    k.gemv(out=out, weight=weight, x=x), k.gemv(x, weight, bias, out),\n"
        "    k.gemv(x, weight=weight, bias=bias, out=out, batch_invariant=False)):\n"
        "    assert found is out\n"
        "say([first, len(slow)])"
    )
    assert outcome.value == [2, 2]
    assert len(issued(outcome)) == 7


def test_what_no_call_takes_is_a_type_error(plain_call):
    wrong = [
        "k.gemv()", "k.gemv(x)", "k.gemv(x, weight, None, out, False)", "k.gemv(x, weight, y=1)",
        "k.gemv(x, weight, x=x)", "k.gemv(*[x] * 20)", "b()", "b(x, out, out)", "b(x, y=1)",
    ]  # fmt: skip
    script = "b = k.gemv.bind(weight)\nk.gemv(x, weight, out=out); b(x, out)\n"
    script += "".join(f"say(failure(lambda: {each}))\n" for each in wrong)
    outcome = plain_call(script)
    kinds = [json.loads(line)["type"] for line in outcome.stdout.splitlines()]
    assert kinds == ["TypeError"] * len(wrong)
    assert len(issued(outcome)) == 2


def test_the_stream_is_asked_for_at_every_call(plain_call):
    outcome = plain_call(
        "for stream in (7, 8, 0, 7):\n    STREAMS.append(stream); k.gemv(x, weight, out=out)\n"
        "say(len(slow))"
    )
    assert outcome.value == 1
    assert [each["stream"] for each in issued(outcome)] == [7, 8, 0, 7]
    assert {each["context"] for each in issued(outcome)} == {4096 + 1}


def test_an_output_is_allocated_where_that_is_direct(plain_call):
    """By torch's own function on the current device, else through its dispatcher."""
    outcome = plain_call(
        """
asked = []
def empty(shape, strides, dtype):
    asked.append([list(shape), list(strides), str(dtype)])
    return torch.empty_strided(shape, strides, dtype=dtype)
can = [True]
direct.empty, direct.can_make = empty, lambda device: can[0] and device == 1
first = k.gemv(x, weight)
second = k.gemv(x, weight)
assert second.shape == (2, 100) and second._version == 0 and second is not first
b = k.gemv.bind(weight)
for _ in range(3): b(x)
before = len(slow)
can[0] = False
k.gemv(x, weight)
say([asked, before, len(slow)])
"""
    )
    asked, before, after = outcome.value
    # The first bound call on a stream is in order, and checked; then the other is known.
    assert asked == [[[2, 100], [100, 1], "torch.bfloat16"]] * 3
    assert (before, after) == (2, 3)
    assert len(issued(outcome)) == 6


def test_gradients_that_are_asked_for_later_are_refused(plain_call):
    outcome = plain_call(
        """
b = k.gemv.bind(weight, out=out)
for _ in range(2): b(x); k.gemv(x, weight, out=out)
for one in (x, weight, out):
    one.requires_grad_()
    say([failure(b, x), failure(k.gemv, x, weight, out=out)])
    with torch.no_grad(): b(x); k.gemv(x, weight, out=out)
    with torch.inference_mode(): b(x); k.gemv(x, weight, out=out)
    one.requires_grad_(False)
say(len(slow))
"""
    )
    *refused, python = map(json.loads, outcome.stdout.splitlines())
    for name, errors in zip(("x", "weight", "out"), refused, strict=True):
        assert all(f"{name} requires grad" in error["message"] for error in errors), name
    assert python == 2 + 2  # an output is checked last
    assert len(issued(outcome)) == 4 + 3 * 4


def test_what_is_not_plain_goes_to_python(plain_call):
    outcome = plain_call(
        """
class Sub(torch.Tensor): pass
b = k.gemv.bind(weight, out=out)
for _ in range(2): b(x); k.gemv(x, weight, out=out)
before = len(slow)
negated = torch._neg_view(x)
say([failure(b, negated), failure(k.gemv, negated, weight, out=out)])
other = OnDevice(x, "cuda:1")
for _ in range(2): b(other); k.gemv(other, weight, out=out)
say([before, len(slow)])
"""
    )
    refused, counts = map(json.loads, outcome.stdout.splitlines())
    assert all("x is a negated view" in error["message"] for error in refused)
    assert counts == [2, 6]


def test_a_failed_launch_of_a_known_call_is_the_same_error(plain_call):
    outcome = plain_call(
        """
b = k.gemv.bind(weight, out=out)
for _ in range(2): b(x); k.gemv(x, weight, out=out)
os.environ["SONATA_TEST_CUDA_FAIL"] = "cuLaunchKernel=700;cuLaunchKernelEx=700"
before = out._version
say([failure(k.gemv, x, weight, out=out), failure(b, x), out._version - before])
"""
    )
    plain, early, counted = outcome.value
    assert counted == 0
    for error in (plain, early):
        assert (error["type"], error["sonata"]) == ("DriverError", True)
        for words in (
            "CUDA_ERROR_ILLEGAL_ADDRESS",
            "gemv[dtype=bf16,m=2",
            "grid (",
            "stream 0x7",
            "on device 1",
        ):
            assert words in error["message"], words


def test_threads_launch_what_they_are_given(plain_call):
    """A launch releases the GIL; nothing that a call prepares is shared between threads."""
    outcome = plain_call(
        """
import threading
k.gemv(x, weight, out=out); b = k.gemv.bind(weight); b(x, out)
streams = threading.local()
runtime.current_stream = lambda device: getattr(streams, "own", 7)
barrier = threading.Barrier(8)
owned = {}
def work(number):
    streams.own = 100 + number
    mine, result = made(2, 64), made(2, 100)
    owned[100 + number] = mine.data_ptr(), result.data_ptr()
    barrier.wait()
    for _ in range(50):
        assert k.gemv(mine, weight, out=result) is result
        assert b(mine, result) is result
    kept.append((mine, result))
kept = []
threads = [threading.Thread(target=work, args=(n,)) for n in range(8)]
for thread in threads: thread.start()
for thread in threads: thread.join()
say([len(slow), len(kept), owned])
"""
    )
    python, finished, owned = outcome.value
    assert (python, finished) == (2, 8)
    found = [each for each in issued(outcome) if each["stream"] >= 100]
    assert len(found) == 800
    for each in found:
        words = bytes.fromhex(each["params"])
        addresses = [int.from_bytes(words[at : at + 8], "little") for at in (0, 24)]
        assert addresses == owned[str(each["stream"])]


def test_a_forked_child_is_refused_natively(plain_call):
    outcome = plain_call(
        """
import warnings
warnings.simplefilter("ignore", DeprecationWarning)
b = k.gemv.bind(weight, out=out)
for _ in range(2): b(x); k.gemv(x, weight, out=out)
reader, writer = os.pipe()
child = os.fork()
if child == 0:
    with os.fdopen(writer, "w") as answer:
        json.dump([failure(b, x), failure(k.gemv, x, weight, out=out)], answer)
    os._exit(0)
os.close(writer)
with os.fdopen(reader) as answer: say(json.load(answer))
os.waitpid(child, 0)
"""
    )
    assert [error["type"] for error in outcome.value] == ["ForkedProcess"] * 2
    assert len(issued(outcome)) == 4


def test_without_views_calls_go_to_python(plain_call):
    outcome = plain_call(
        "direct.make_reader = lambda: None\n"
        "k = loader.load(ARTIFACTS, devices=[0, 1]); b = k.gemv.bind(weight, out=out)\n"
        "for _ in range(3): k.gemv(x, weight, out=out); b(x)\n"
        "say([len(slow), b.constant])"
    )
    assert outcome.value == [6, True]
    early = [each["call"] == "cuLaunchKernelEx" for each in issued(outcome)]
    assert early == [False, False, False, True, False, True]


NVTX = """
marks = []
torch.cuda.nvtx.range_push = lambda name: marks.append(name)
torch.cuda.nvtx.range_pop = lambda: marks.append(None)
"""


def test_ranges_surround_each_call_where_asked_for(plain_call):
    outcome = plain_call(
        NVTX
        + """
k = loader.load(ARTIFACTS, devices=[0, 1], nvtx=True)
b = k.gemv.bind(weight, out=out)
marks.clear()
for _ in range(2): k.gemv(x, weight, out=out); b(x)
say(failure(k.gemv, x, None))
say(marks)
"""
    )
    gemv, bound = ["sonata_aot.gemv", None], ["sonata_aot.gemv.bound", None]
    assert outcome.value == [*gemv, *bound, *gemv, *bound, *gemv]
    assert "ArgumentError" in outcome.stdout.splitlines()[0]
    assert len(issued(outcome)) == 4


def test_a_torch_without_ranges_says_so(plain_call):
    outcome = plain_call("say(failure(loader.load, ARTIFACTS, devices=[0], nvtx=True))")
    assert outcome.value["type"] == "MissingDependency"
    assert "without NVTX" in outcome.value["message"]
