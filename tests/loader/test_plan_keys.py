"""What is kept of a call is used for calls that it was planned for, and for no other.

Each call is made after another one that differs from it in one thing, and by something that has
kept nothing: both must launch the same, or be refused with the same words. Other calls than these
differ in more than one thing.
"""

from __future__ import annotations

import json
from typing import Any

import pytest

import ssd_launches
from gemv_launches import issued, launches, seen
from ssd_launches import NAMES

# `compare(name, base, other)` makes the call `base`, then `other`, then `base` again, and both anew
# after `forget()`; answers say how many launches each made, and how it was refused.
COMPARE = """
def issued():
    with open(os.environ["SONATA_TEST_CUDA_LOG"]) as log:
        return sum('"cuLaunchKernel' in line for line in log)

def made_by(call):
    before = issued()
    refused = failure(call)
    return [issued() - before, refused and refused["message"]]

def compare(name, base, other):
    found = []
    for calls in ((base, other, base), (other, base, other), (base,), (other,)):
        found.append([made_by(call) for call in (forget, *calls)])
    say([name, found])
"""


def answers(outcome: Any, shown: list[Any]) -> dict[str, tuple[Any, Any]]:
    """For each comparison, what `base` and `other` do; requires that it is the same throughout."""
    rest = iter(shown)
    found = {}
    for line in outcome.stdout.splitlines():
        name, runs = json.loads(line)
        one, two, (base,), (other,) = [
            [([next(rest) for _ in range(count)], refused) for count, refused in run][1:]
            for run in runs
        ]
        assert one == [base, other, base], name
        assert two == [other, base, other], name
        found[name] = base, other
    assert next(rest, None) is None
    return found


# The scan. `part` makes a tensor; `changed` has the operands with one of them made otherwise.
SCAN = """
f = torch.float32
SHAPES = {
    "x": (1, 128, 4, 64), "dt": (1, 128, 4), "A": (4,), "B": (1, 128, 1, 128),
    "C": (1, 128, 1, 128), "D": (4,), "z": (1, 128, 4, 64), "dt_bias": (4,),
    "initial_states": (1, 4, 64, 128), "seq_idx": (1, 128), "cu_seqlens": (3,),
}
KINDS = {name: torch.bfloat16 for name in SHAPES} | {"A": f, "D": f, "dt_bias": f}
KINDS |= {"initial_states": f, "seq_idx": torch.int32, "cu_seqlens": torch.int32}
OTHERS = {torch.bfloat16: torch.float16, f: torch.bfloat16, torch.int32: torch.int64}

def apart(shape):
    # Strides of a tensor whose elements lie further apart: rows have 8 more, one row every other.
    *outer, last = shape
    if max(outer, default=1) == 1: return (*(2 * last for _ in outer), 2)
    steps = [1, last + 8]
    for size in reversed(outer[1:]): steps.append(steps[-1] * size)
    return tuple(reversed(steps))

BASE = {name: part(name) for name in SHAPES}
OPTIONS = {"return_final_states": True, "return_varlen_states": True, "chunk_size": 256}

def call(changes):
    return lambda: kept.append(scan(**{**BASE, **OPTIONS, **changes}))

def changed(name, what, change):
    compare(f"{name}: {what}", call({}), call({name: change}))

for name, shape in SHAPES.items():
    changed(name, "strides", part(name, stride=apart(shape)))
    changed(name, "dtype", part(name, dtype=OTHERS[KINDS[name]]))
    changed(name, "shape", part(name, shape=(*shape[:-1], shape[-1] + 1)))
    changed(name, "dimensions", part(name, shape=(*shape, 1)))
    changed(name, "remainder", part(name, offset=8))
    changed(name, "freed", freed(name))
    changed(name, "negated", negated(name))
    changed(name, "None", None)
    if KINDS[name].is_floating_point:
        changed(name, "grad", part(name, grad=True))
changed("D", "of channels", part("D", shape=(4, 64)))
changed("seq_idx", "batch", part("seq_idx", shape=(2, 128)))
for name, value in (
    ("dt_softplus", True), ("dt_limit", (0.5, float("inf"))), ("dt_limit", (0.0, 2.0)),
    ("return_final_states", False), ("return_varlen_states", False), ("dt_softplus", A_TENSOR),
    ("return_final_states", A_TENSOR), ("return_varlen_states", A_TENSOR),
):
    changed(name, str(value), value)
compare(
    "f16", call({}), call({name: part(name, dtype=torch.float16) for name in ("x", "B", "C", "z")})
)
short = {"x": (1, 64, 4, 64), "dt": (1, 64, 4), "z": (1, 64, 4, 64), "seq_idx": (1, 64)}
short |= {"B": (1, 64, 1, 128), "C": (1, 64, 1, 128)}
compare("tokens", call({}), call({name: part(name, shape=s) for name, s in short.items()}))

# Whether gradients are asked for.
wanted = call({"A": part("A", grad=True)})
def unasked():
    with torch.no_grad(): wanted()
compare("gradients", unasked, wanted)
"""
ON_DEVICE = """
A_TENSOR, kept = torch.ones(()), []
scan = k.mamba_chunk_scan_combined
forget = scan._plans.clear

def part(name, shape=None, dtype=None, stride=None, offset=0, grad=False, **options):
    made = at(name, *(shape or SHAPES[name]), dtype=dtype or KINDS[name], stride=stride,
              **{"address": PLACES[name] + offset, **options})
    return OnDevice(made.memory.requires_grad_(), "cuda:0", made.address) if grad else made

freed = lambda name: part(name, address=0)
negated = lambda name: part(name, negated=True)
"""
# Devices cannot differ among plain tensors of a torch without CUDA.
DEVICES = """
for name in SHAPES:
    changed(name, "device", part(name, device="cuda:1"))
    changed(name, "another kind of device", part(name, device="xpu:0"))
compare("device", call({}), call({name: part(name, device="cuda:1") for name in SHAPES}))
"""
# As in test_ssd_direct.py: plain tensors, of which those who check and plan are told that they are
# on a device.
PLAIN_SCAN = """
A_TENSOR, kept = torch.ones(()), []
from sonata_aot.loader import direct, ssd
from torch._C._dynamo.guards import _empty_strided_cpu
k = loader.load(ARTIFACTS, devices=[0])
scan, plain_check = k.mamba_chunk_scan_combined, ssd.check
forget = scan._plans.clear

def there(one):
    return OnDevice(one, negated=one.is_neg()) if isinstance(one, torch.Tensor) else one

ssd.check = lambda tensors, *given: plain_check([there(t) for t in tensors], *given)
direct.empty, direct._current_device = _empty_strided_cpu, lambda: 0

def part(name, shape=None, dtype=None, stride=None, offset=0, grad=False):
    dtype, shape = dtype or KINDS[name], shape or SHAPES[name]
    memory = torch.zeros(2**17, dtype=dtype)
    assert memory.data_ptr() % 16 == 0
    stride = stride or torch.empty(shape, device="meta").stride()
    made = memory.as_strided(shape, stride, offset // dtype.itemsize)
    return made.requires_grad_() if grad else made

def freed(name):
    made = part(name).clone()
    made.untyped_storage().resize_(0)
    return made

negated = lambda name: torch._neg_view(part(name))
"""


def shown(found: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Launches; addresses of what was allocated for them are the next best each time."""

    def value(number: Any) -> Any:
        if not isinstance(number, int) or number < 2**32:
            return number
        operand, offset = divmod(number, 2**40)
        return number if operand <= len(NAMES) and offset < 2**20 else "allocated"

    return [
        {**one, "params": {name: value(number) for name, number in one["params"].items()}}
        for one in found
    ]


@pytest.mark.parametrize("path", ["python", "native"])
def test_a_plan_of_the_scan_is_for_calls_like_the_one_it_was_made_for(
    recorder, ssd_artifacts, path
):
    script = (
        ssd_launches.SETUP + ON_DEVICE + COMPARE + SCAN + DEVICES
        if path == "python"
        else PLAIN_SCAN + COMPARE + SCAN
    )
    outcome = recorder.loader(ssd_artifacts, script, env=ssd_launches.ENVIRONMENT)
    found = answers(outcome, shown(ssd_launches.launches(outcome, ssd_artifacts)))
    if path == "python":  # plain tensors' addresses are not told apart
        assert {name for name, (base, other) in found.items() if base == other} == set()
    base, other = found["gradients"]
    assert base[1] is None
    assert "A requires grad" in other[1]
    assert len(found) > 100


# Each kind of a call, by all that a plan of the GEMV depends on.
KINDS_OF_CALLS = """
import itertools
k = loader.load(ARTIFACTS, devices=[0, 1])
kinds = list(itertools.product(
    (0, 1), (torch.bfloat16, torch.float16), (1, 2, 8), (600, 6000), (2048, 4096),
    ("aligned", "wide", "any"), (False, True), (False, True),
))

def run(device, dtype, rows, n, size, layout, bound, invariant):
    options = {"dtype": dtype, "device": f"cuda:{device}"}
    x = tensor(rows, size, address=(1 << 40) + 2 * (layout == "wide"), **options)
    weight = tensor(n, size, address=(1 << 50) + 2 * (layout == "any"), **options)
    out = tensor(rows, n, address=1 << 36, **options)
    if bound:
        settled(k.gemv.bind(weight, batch_invariant=invariant))(x, out)
    else:
        k.gemv(x, weight, out=out, batch_invariant=invariant)

k.gemv._planner._plans.clear()
for kind in kinds: run(*kind)
for kind in kinds:
    k.gemv._planner._plans.clear()
    run(*kind)
say(len(kinds))
"""


def test_a_plan_of_the_gemv_is_for_calls_like_the_one_it_was_made_for(recorder, artifacts):
    env = {"SONATA_TEST_CUDA_CC": "9.0", "SONATA_TEST_CUDA_DEVICES": "2"}
    env["SONATA_TEST_CUDA_MULTIPROCESSORS"] = "132,16"
    outcome = recorder.loader(artifacts, KINDS_OF_CALLS, env=env)
    found, count = launches(outcome), outcome.value
    assert len(found) == 2 * count
    assert found[:count] == found[count:]


def test_a_variant_to_measure_is_planned_for_each_size_and_device(recorder, artifacts, manifest):
    variant = next(
        b["variant"]
        for b in manifest["binaries"]
        if (b["kernel"], b["arch"], b["variant"].get("persistent")) == ("gemv", "sm90", 1)
        and b["variant"]["m"] == 2
        and b["variant"]["dtype"] == "bf16"
    )
    env = {"SONATA_TEST_CUDA_CC": "9.0", "SONATA_TEST_CUDA_DEVICES": "2"}
    env["SONATA_TEST_CUDA_MULTIPROCESSORS"] = "132,16"
    outcome = recorder.loader(
        artifacts,
        f"""
import itertools
k = loader.load(ARTIFACTS, devices=[0, 1])
launch = {{"blocks_per_sm": 2, "ahead_kb": 256, "skip_blocks_per_sm": 0}}
kinds = list(itertools.product((0, 1), (600, 6000), (2048, 4096)))
fresh = lambda: k.gemv.using({variant}, launch, constant=True)
for call in (fresh(), None):
    for device, n, size in kinds:
        on = {{"device": f"cuda:{{device}}"}}
        x, weight = tensor(2, size, **on), tensor(n, size, address=1 << 50, **on)
        (call or fresh())(x, weight, out=tensor(2, n, address=1 << 36, **on))
say(len(kinds))
""",
        env=env,
    )
    found, count = launches(outcome), outcome.value
    assert found[:count] == found[count:]
    assert len({str(launch) for launch in found[:count]}) == count


# Native calls of the GEMV, after the prelude `PLAIN` of conftest.py.
NATIVE = """
def part(*shape, stride=None, offset=0, dtype=torch.bfloat16, grad=False):
    memory = torch.zeros(2**15, dtype=dtype)
    assert memory.data_ptr() % 16 == 0
    stride = stride or torch.empty(shape, device="meta").stride()
    made_ = memory.as_strided(shape, stride, offset // dtype.itemsize)
    return made_.requires_grad_() if grad else made_

BASE = {"x": part(2, 64), "weight": part(100, 64), "bias": part(100), "out": part(2, 100)}
f16 = {"dtype": torch.float16}
CHANGES = {
    "rows": {"x": part(3, 64), "out": part(3, 100)},
    "x": {"x": part(2, 64)},
    "x: rows apart": {"x": part(2, 64, stride=(72, 1))},
    "x: odd rows": {"x": part(2, 64, stride=(65, 1))},
    "x: remainder": {"x": part(2, 64, offset=2)},
    "x: other elements": {"x": part(2, 64, stride=(64, 2))},
    "x: dtype": {"x": part(2, 64, **f16)},
    "x: dimensions": {"x": part(2, 64, 1)},
    "x: negated": {"x": torch._neg_view(part(2, 64))},
    "x: grad": {"x": part(2, 64, grad=True)},
    "out: rows apart": {"out": part(2, 100, stride=(108, 1))},
    "out: other elements": {"out": part(2, 100, stride=(200, 2))},
    "out: rows": {"out": part(3, 100)},
    "out: dtype": {"out": part(2, 100, **f16)},
    "out: grad": {"out": part(2, 100, grad=True)},
}
PLAIN_CHANGES = {
    "dtype": {"x": part(2, 64, **f16), "weight": part(100, 64, **f16), "bias": part(100, **f16),
              "out": part(2, 100, **f16)},
    "n": {"weight": part(50, 64), "bias": part(50), "out": part(2, 50)},
    "k": {"x": part(2, 32), "weight": part(100, 32)},
    "weight: rows apart": {"weight": part(100, 64, stride=(72, 1))},
    "weight: remainder": {"weight": part(100, 64, offset=8)},
    "weight: rows": {"weight": part(101, 64)},
    "weight: dtype": {"weight": part(100, 64, **f16)},
    "weight: grad": {"weight": part(100, 64, grad=True)},
    "bias: None": {"bias": None},
    "bias: apart": {"bias": part(100, stride=(2,))},
    "bias: elements": {"bias": part(99)},
    "bias: dtype": {"bias": part(100, dtype=torch.float32)},
    "bias: remainder of no matter": {"bias": part(100, offset=2)},
    "invariant": {"batch_invariant": True},
}
planner = k.gemv._planner
"""
CALLS = """
def forget():
    global call
    call = gemv.Gemv(planner)

def twice(changes):
    # The second time it is known, if it may be.
    def run():
        for _ in range(2): call(**{**BASE, **changes})
    return run

for name, changes in {**CHANGES, **PLAIN_CHANGES}.items():
    compare(name, twice({}), twice(changes))
"""
BOUND = """
def forget():
    global bound
    bound = k.gemv.bind(BASE["weight"], BASE["bias"], out=BASE["out"])
    bound(BASE["x"])  # which is in order, as the first on its stream

def twice(changes):
    given = [{**BASE, **changes}[name] for name in GIVEN]
    def run():
        for _ in range(3): bound(*given)
    return run

for GIVEN in (("x",), ("x", "out")):
    for name, changes in CHANGES.items():
        if "out" in changes and "out" not in GIVEN: continue
        changes = dict(changes)
        compare(f"{name} {GIVEN}", twice({}), twice(changes))
"""


# Without gradients, the last call with the bound output is repeated by a shorter way.
NO_GRADIENTS = "torch.set_grad_enabled(False)\n" + BOUND


@pytest.mark.parametrize(
    "script", [CALLS, BOUND, NO_GRADIENTS], ids=["calls", "bound", "bound-without-gradients"]
)
def test_a_known_layout_of_a_native_call_is_that_of_its_tensors(plain_call, script):
    outcome = plain_call(COMPARE + NATIVE + script)
    found = answers(outcome, [seen(launch) for launch in issued(outcome)])
    assert {name for name, (base, other) in found.items() if base == other} == set()


def test_a_known_call_asks_for_the_stream_of_its_own_device(plain_call):
    outcome = plain_call("""
asked = []
runtime.current_stream = lambda device: asked.append(device) or 7
b, free = k.gemv.bind(weight, out=out), k.gemv.bind(weight)
for _ in range(3): k.gemv(x, weight, out=out); b(x); free(x, out)
say([asked, len(slow)])
""")
    asked, python = outcome.value
    assert set(asked) == {1}
    assert python == 3
    assert len(issued(outcome)) == 9


def test_what_is_bound_may_be_given_other_strides_in_place(plain_call):
    """At the same address and of the same sizes, on the shorter way too."""
    outcome = plain_call(
        NATIVE
        + """
torch.set_grad_enabled(False)
b = k.gemv.bind(BASE["weight"], BASE["bias"], out=BASE["out"])
for _ in range(3): b(BASE["x"])
BASE["weight"].as_strided_((100, 64), (72, 1))
for _ in range(3): b(BASE["x"])
BASE["out"].as_strided_((2, 100), (108, 1))
for _ in range(3): b(BASE["x"])
BASE["bias"].as_strided_((100,), (2,))
say(failure(b, BASE["x"]))
"""
    )
    found = [seen(launch)["params"] for launch in issued(outcome)]
    assert [each["weight_stride"] for each in found] == [64] * 3 + [72] * 6
    assert [each["out_stride"] for each in found] == [100] * 6 + [108] * 3
    assert "bias" in outcome.value["message"]
