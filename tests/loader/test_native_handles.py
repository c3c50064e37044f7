"""Calls of a bound GEMV with a bound output, where something has changed since the last call."""

from __future__ import annotations

from gemv_launches import issued, launches

BOUND = """
torch.set_grad_enabled(False)
assert direct.make_torch().has_handles
bias = made(100)
b = k.gemv.bind(weight, bias, out=out)
x = made(2, 64)
for _ in range(3):
    assert b(x) is out
python = len(slow)
"""

# What a test does to an operand, and whether the next call has to look at everything anew.
CHANGES = {
    "nothing": ("pass", False),
    "another x": ("x = made(2, 64)", False),
    "x of other strides": ("x = made(2, 128)[:, :64]", True),
    "x of other rows": ("x = made(1, 64); out.resize_(1, 100)", True),
    "out has other memory": ("out.set_(made(2, 100))", False),
    "out by data": ("out.data = made(2, 100)", False),
    "out has other strides": ("out.set_(made(2, 128)[:, :100])", True),
    "weight by data": ("weight.data = made(100, 64)", False),
    "weight has other strides": ("weight.data = made(100, 128)[:, :64]", True),
    "bias by data": ("bias.data = made(100)", False),
    "swapped": ("torch.utils.swap_tensors(weight, made(100, 64))", False),
}


def test_what_has_changed_is_launched(plain_call):
    """All in one process, which takes seconds to start."""
    outcome = plain_call(
        f"""
BOUND, CHANGES = {BOUND!r}, {[code for code, _ in CHANGES.values()]!r}
found = []
for code in CHANGES:
    names = dict(globals(), weight=made(100, 64), out=made(2, 100))
    exec(BOUND + code + "\\nassert b(x) is out\\nb(x)", names)
    operands = [names[name].data_ptr() for name in ("x", "weight", "bias", "out")]
    found.append([len(slow) - names["python"], operands])
say(found)
"""
    )
    launched = launches(outcome)
    each = len(launched) // len(CHANGES)
    assert each == 5
    for i, (name, (_, is_new)) in enumerate(CHANGES.items()):
        count, operands = outcome.value[i]
        assert count == int(is_new), name
        for launch in launched[each * i + 3 : each * (i + 1)]:
            params = launch["params"]
            assert [params[key] for key in ("x", "weight", "bias", "out")] == operands, name


def test_a_weight_that_was_written_to_is_read_in_order(plain_call):
    outcome = plain_call(
        BOUND + "weight.add_(1)\nb(x); b(x)\nsay([len(slow) - python, b.constant])"
    )
    assert outcome.value == [0, False]
    assert [each["call"] for each in issued(outcome)[-2:]] == ["cuLaunchKernel"] * 2


def test_writes_are_counted_once_each(plain_call):
    outcome = plain_call(BOUND + "before = out._version\nb(x); b(x)\nsay(out._version - before)")
    assert outcome.value == 2


def test_freed_memory_is_not_launched_on(plain_call):
    for tensor in ("weight", "out"):
        outcome = plain_call(
            BOUND
            + f"{tensor}.untyped_storage().resize_(0)\n"
            + "say([failure(lambda: b(x)) is not None, len(slow) - python])"
        )
        assert outcome.value[0] is True
        assert len(issued(outcome)) == 3


def test_an_output_that_overlaps_is_refused(plain_call):
    outcome = plain_call(
        """
both = made(400)
out = both[:200].view(2, 100)
b = k.gemv.bind(weight, out=out)
for _ in range(2):
    b(both[200:328].view(2, 64))
say(failure(lambda: b(both[136:264].view(2, 64))))
"""
    )
    assert "out overlaps x" in outcome.value["message"]
    assert len(issued(outcome)) == 2


def test_where_gradients_are_asked_for_all_is_checked(plain_call):
    outcome = plain_call(
        BOUND
        + """
weight.requires_grad_()
b(x)
torch.set_grad_enabled(True)
say(failure(lambda: b(x)))
"""
    )
    assert "requires" in outcome.value["message"]
    assert len(issued(outcome)) == 4


def test_inference_tensors_are_launched_on(plain_call):
    outcome = plain_call(
        """
with torch.inference_mode():
    x, weight, out = made(2, 64), made(100, 64), made(2, 100)
    b = k.gemv.bind(weight, out=out)
    for _ in range(4):
        assert b(x) is out
    weight.add_(1)
    b(x)
say([len(slow), b.constant])
"""
    )
    assert outcome.value == [1, False]
    assert [each["call"] for each in issued(outcome)] == ["cuLaunchKernel"] * 5


def test_handles_are_used_where_samples_agree(plain_call):
    outcome = plain_call(
        """
from sonata_aot.loader import _native as native

class Lying(torch.Tensor):
    _version = 3

def usable(*samples):
    stream = lambda device: 7
    return native.Torch(torch.is_grad_enabled, stream, lambda tensors: None, samples).has_handles

say([
    direct.make_torch().has_handles,
    usable(torch.ones(2, 3), torch.ones(3)),
    usable(),
    usable(torch.ones(0)),
    usable(5),
    usable(torch.ones(2), torch.ones(2).as_subclass(Lying)),
])
"""
    )
    assert outcome.value == [True, True, False, False, False, False]
