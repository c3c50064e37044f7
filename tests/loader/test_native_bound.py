"""Native calls of a GEMV with a bound weight: the rules of constancy, and what else is bound."""

from __future__ import annotations

import json

from gemv_launches import issued


def test_a_bound_output_is_written_by_one_native_call(plain_call):
    outcome = plain_call(
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
    found = issued(outcome)
    assert [each["call"] for each in found] == ["cuLaunchKernel"] + ["cuLaunchKernelEx"] * 4


BOUND_OUT = {
    "(2, 99)": "out is (2, 99)",
    "(0, 100)": None,
    "(2, 100, 1)": "out has 3 dimensions",
}


def test_a_bound_output_is_checked_once(plain_call):
    script = "".join(
        f"say(failure(lambda: k.gemv.bind(weight, out=made(*{shape}))))\n" for shape in BOUND_OUT
    )
    script += "both = made(110, 64).view(-1)\n"
    script += "last = both[6300:6400].view(1, 100)\n"
    script += "say(failure(lambda: k.gemv.bind(both[:6400].view(100, 64), out=last)))\n"
    outcome = plain_call(script)
    *found, overlaps = map(json.loads, outcome.stdout.splitlines())
    for error, words in zip(found, BOUND_OUT.values(), strict=True):
        assert (error is None) == (words is None)
        assert words is None or words in error["message"]
    assert "out overlaps weight" in overlaps["message"]


def test_the_rules_of_a_bound_weight_hold_natively(plain_call):
    """First on a stream in order, captures, and the end with a write, all past Python."""
    outcome = plain_call(
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
    early = [each["call"] == "cuLaunchKernelEx" for each in issued(outcome)]
    #       7, 7    8, 8    captured    9, 9    written
    assert early == [
        *(False, True), *(False, True), *(True, True), *(False, True), *(False, False)
    ]  # fmt: skip
    streams = [7, 7, 8, 8, 9, 9, 9, 9, 9, 7]
    assert [each["stream"] for each in issued(outcome)] == streams


def test_a_capture_before_any_launch_stays_in_order(plain_call):
    outcome = plain_call(
        "os.environ['SONATA_TEST_CUDA_CAPTURING'] = '7'\n"
        "b = k.gemv.bind(weight, out=out)\n"
        "for _ in range(116): b(x)\n"
        "say(len(slow))"
    )
    assert outcome.value == 1
    assert [each["call"] for each in issued(outcome)] == ["cuLaunchKernel"] * 116


def test_other_memory_of_what_is_bound_is_noticed(plain_call):
    outcome = plain_call(
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
    found = issued(outcome)
    assert [each["call"][14:] for each in found] == ["", "Ex", "", "", ""]
    assert [
        int.from_bytes(bytes.fromhex(each["params"])[8:16], "little") for each in found[2:]
    ] == [address] * 3


def test_upcoming_is_asked_for_natively_as_by_python(plain_call):
    outcome = plain_call(
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
    found = issued(outcome)
    assert len(found) == 18
    for start in range(0, 18, 6):
        for native, python in zip(
            found[start : start + 3], found[start + 3 : start + 6], strict=True
        ):
            assert native["call"] == python["call"]
            assert native["params"] == python["params"]
    counts = [json.loads(line)[:2] for line in outcome.stdout.splitlines()]
    assert counts == [[1, 4], [5, 8], [9, 12]]


def test_calls_are_collected_with_what_they_hold(plain_call):
    outcome = plain_call(
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
