"""The native call of a GEMV and of a bound one: what goes past Python, and what must not."""

from __future__ import annotations

import json

import pytest

HOPPER = {"SONATA_TEST_CUDA_CC": "9.0", "SONATA_TEST_CUDA_DEVICES": "2"}
# Plain tensors, of the CPU, for the driver's stand-in: who checks them is told that they are on a
# device. `slow` has an entry for each call that went to Python.
SETUP = """
from sonata_aot.loader import bound, direct, gemv, tensors
from gemv_launches import launches
runtime.current_stream = lambda device: STREAMS[-1]
STREAMS = [7]
slow = []

def there(tensor):
    plain = type(tensor) in (torch.Tensor, torch.nn.Parameter)
    return OnDevice(tensor, "cuda:1", negated=tensor.is_neg()) if plain else tensor

def seen(function):
    return lambda *given, **named: function(
        *map(there, given), **{name: there(value) for name, value in named.items()}
    )

for name in ("check_dense", "check_out", "check_like", "end"):
    setattr(tensors, name, seen(getattr(tensors, name)))
for name in ("check", "check_weight"):
    setattr(gemv.Gemv, name, seen(getattr(gemv.Gemv, name)))
plain_run = gemv.run

def run(plan, operands, x, weight, bias, out, *more):
    slow.append(1)
    made = out if out is not None else torch.empty(operands.rows, weight.shape[0], dtype=x.dtype)
    plain_run(plan, operands, *map(there, (x, weight, bias, made)), *more)
    return made

gemv.run = bound.run = run
k = loader.load(ARTIFACTS, devices=[0, 1])
made = lambda *shape: torch.zeros(shape, dtype=torch.bfloat16)
x, weight, out = made(2, 64), made(100, 64), made(2, 100)
"""


@pytest.fixture
def call(recorder, artifacts):
    """Runs a script after `SETUP`."""
    return lambda script, **env: recorder.loader(artifacts, SETUP + script, env={**HOPPER, **env})


def kernels(outcome):
    return outcome.named("cuLaunchKernel", "cuLaunchKernelEx")


def test_ways_to_write_a_call_are_one(call):
    outcome = call(
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
    assert len(kernels(outcome)) == 7


def test_what_no_call_takes_is_a_type_error(call):
    wrong = [
        "k.gemv()", "k.gemv(x)", "k.gemv(x, weight, None, out, False)", "k.gemv(x, weight, y=1)",
        "k.gemv(x, weight, x=x)", "k.gemv(*[x] * 20)", "b()", "b(x, out, out)", "b(x, y=1)",
    ]  # fmt: skip
    script = "b = k.gemv.bind(weight)\nk.gemv(x, weight, out=out); b(x, out)\n"
    script += "".join(f"say(failure(lambda: {each}))\n" for each in wrong)
    outcome = call(script)
    kinds = [json.loads(line)["type"] for line in outcome.stdout.splitlines()]
    assert kinds == ["TypeError"] * len(wrong)
    assert len(kernels(outcome)) == 2


def test_the_stream_is_asked_for_at_every_call(call):
    outcome = call(
        "for stream in (7, 8, 0, 7):\n    STREAMS.append(stream); k.gemv(x, weight, out=out)\n"
        "say(len(slow))"
    )
    assert outcome.value == 1
    assert [each["stream"] for each in kernels(outcome)] == [7, 8, 0, 7]
    assert {each["context"] for each in kernels(outcome)} == {4096 + 1}


def test_an_output_is_allocated_where_that_is_direct(call):
    """By torch's own function on the current device, else through its dispatcher."""
    outcome = call(
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
    assert len(kernels(outcome)) == 6


def test_a_bound_output_is_written_by_one_native_call(call):
    outcome = call(
        """
bias = made(100)
b = k.gemv.bind(weight, bias, out=out)
b(x)
for _ in range(2):
    before = out._version
    assert b(x) is out
    assert out._version == before + 1
other = made(2, 100)
assert b(x, other) is other and b(made(2, 64), out=other) is other
say([len(slow), b.constant, b.out is out, b.weight is weight, b.bias is bias])
"""
    )
    assert outcome.value == [1, True, True, True, True]
    found = kernels(outcome)
    assert [each["call"] for each in found] == ["cuLaunchKernel"] + ["cuLaunchKernelEx"] * 4


BOUND_OUT = {
    "(2, 99)": "out is (2, 99)",
    "(0, 100)": None,
    "(2, 100, 1)": "out has 3 dimensions",
}


def test_a_bound_output_is_checked_once(call):
    script = "".join(
        f"say(failure(lambda: k.gemv.bind(weight, out=made(*{shape}))))\n" for shape in BOUND_OUT
    )
    script += "both = made(110, 64).view(-1)\n"
    script += "last = both[6300:6400].view(1, 100)\n"
    script += "say(failure(lambda: k.gemv.bind(both[:6400].view(100, 64), out=last)))\n"
    outcome = call(script)
    *found, overlaps = map(json.loads, outcome.stdout.splitlines())
    for error, words in zip(found, BOUND_OUT.values(), strict=True):
        assert (error is None) == (words is None)
        assert words is None or words in error["message"]
    assert "out overlaps weight" in overlaps["message"]


def test_the_rules_of_a_bound_weight_hold_natively(call):
    """First on a stream in order, captures, and the end with a write, all past Python."""
    outcome = call(
        """
b = k.gemv.bind(weight, out=out)
b(x); b(x)
def on(stream):
    STREAMS.append(stream); b(x)
on(8); on(8)
os.environ["SONATA_TEST_CUDA_CAPTURING"] = "9"
on(9); on(9)
os.environ["SONATA_TEST_CUDA_CAPTURING"] = ""
on(9); on(9)
python = len(slow)
weight.add_(1)
on(9); on(7)
say([python, len(slow), b.constant])
"""
    )
    assert outcome.value == [1, 1, False]
    early = [each["call"] == "cuLaunchKernelEx" for each in kernels(outcome)]
    #       7, 7    8, 8    captured    9, 9    written
    assert early == [
        *(False, True), *(False, True), *(True, True), *(False, True), *(False, False)
    ]  # fmt: skip
    streams = [7, 7, 8, 8, 9, 9, 9, 9, 9, 7]
    assert [each["stream"] for each in kernels(outcome)] == streams


def test_a_capture_before_any_launch_stays_in_order(call):
    outcome = call(
        "os.environ['SONATA_TEST_CUDA_CAPTURING'] = '7'\n"
        "b = k.gemv.bind(weight, out=out)\n"
        "for _ in range(116): b(x)\n"
        "say(len(slow))"
    )
    assert outcome.value == 1
    assert [each["call"] for each in kernels(outcome)] == ["cuLaunchKernel"] * 116


def test_other_memory_of_what_is_bound_is_noticed(call):
    outcome = call(
        """
b = k.gemv.bind(weight, out=out)
for _ in range(2): b(x)
weight.data = made(100, 64)
for _ in range(2): b(x)
out.data = made(2, 100)
b(x)
out.data = made(2, 99)
say([b.constant, len(slow), weight.data_ptr(), out.data_ptr(), failure(lambda: b(x))])
"""
    )
    constant, python, address, _, error = outcome.value
    assert (constant, python) == (False, 1)
    assert "out is (2, 99)" in error["message"]
    found = kernels(outcome)
    assert [each["call"][14:] for each in found] == ["", "Ex", "", "", ""]
    assert [
        int.from_bytes(bytes.fromhex(each["params"])[8:16], "little") for each in found[2:]
    ] == [address] * 3


def test_gradients_that_are_asked_for_later_are_refused(call):
    outcome = call(
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
    assert len(kernels(outcome)) == 4 + 3 * 4


def test_what_is_not_plain_goes_to_python(call):
    outcome = call(
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


def test_upcoming_is_asked_for_natively_as_by_python(call):
    outcome = call(
        """
memory = made(100 * 64 + 8).view(-1)
for start in (0, 1, 8):
    upcoming = memory[start : start + 6400].view(100, 64)
    b = k.gemv.bind(weight, out=out, upcoming=upcoming)
    for _ in range(3): b(x)   # in order, early by native code, early
    known = len(slow)
    b2 = k.gemv.bind(weight, out=out, upcoming=upcoming)
    b2._set_up(None, *direct.equipment()[1:], None, weight, None, out, upcoming, True)
    for _ in range(3): b2(x)  # the same by Python
    say([known, len(slow), upcoming.data_ptr()])
"""
    )
    found = kernels(outcome)
    assert len(found) == 18
    for start in range(0, 18, 6):
        for native, python in zip(
            found[start : start + 3], found[start + 3 : start + 6], strict=True
        ):
            assert native["call"] == python["call"]
            assert native["params"] == python["params"]
    counts = [json.loads(line)[:2] for line in outcome.stdout.splitlines()]
    assert counts == [[1, 4], [5, 8], [9, 12]]


def test_a_failed_launch_of_a_known_call_is_the_same_error(call):
    outcome = call(
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


def test_threads_launch_what_they_are_given(call):
    """A launch releases the GIL; nothing that a call prepares is shared between threads."""
    outcome = call(
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
    found = [each for each in kernels(outcome) if each["stream"] >= 100]
    assert len(found) == 800
    for each in found:
        words = bytes.fromhex(each["params"])
        addresses = [int.from_bytes(words[at : at + 8], "little") for at in (0, 24)]
        assert addresses == owned[str(each["stream"])]


def test_a_forked_child_is_refused_natively(call):
    outcome = call(
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
    assert len(kernels(outcome)) == 4


def test_calls_are_collected_with_what_they_hold(call):
    outcome = call(
        """
import gc, weakref
def work():
    held = made(100, 64)
    b = k.gemv.bind(held, out=out); b.itself = b
    for _ in range(3): b(x)
    return weakref.ref(b), weakref.ref(held)
found = work()
gc.collect()
say([one() is None for one in found])
"""
    )
    assert outcome.value == [True, True]


def test_without_views_calls_go_to_python(call):
    outcome = call(
        "direct.make_reader = lambda: None\n"
        "k = loader.load(ARTIFACTS, devices=[0, 1]); b = k.gemv.bind(weight, out=out)\n"
        "for _ in range(3): k.gemv(x, weight, out=out); b(x)\n"
        "say([len(slow), b.constant])"
    )
    assert outcome.value == [6, True]
    early = [each["call"] == "cuLaunchKernelEx" for each in kernels(outcome)]
    assert early == [False, False, False, True, False, True]


NVTX = """
marks = []
torch.cuda.nvtx.range_push = lambda name: marks.append(name)
torch.cuda.nvtx.range_pop = lambda: marks.append(None)
"""


def test_ranges_surround_each_call_where_asked_for(call):
    outcome = call(
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
    assert len(kernels(outcome)) == 4


def test_a_torch_without_ranges_says_so(call):
    outcome = call("say(failure(loader.load, ARTIFACTS, devices=[0], nvtx=True))")
    assert outcome.value["type"] == "MissingDependency"
    assert "without NVTX" in outcome.value["message"]
