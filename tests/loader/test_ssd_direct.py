"""The scan on plain tensors: they are read natively, and what a call launches stays the same."""

from __future__ import annotations

from typing import Any

import pytest

from ssd_launches import launches

# Plain tensors, of the CPU, for the driver's stand-in: who checks and plans is told that they are
# on a device. `path` lists how results were made.
SETUP = """
k = loader.load(ARTIFACTS, devices=[0, 1])
from sonata_aot.loader import direct, ssd
from torch._C._dynamo.guards import _empty_strided_cpu
scan = k.mamba_chunk_scan_combined
plain_check, plain_new = ssd.check, direct.new_empty
checks, path = [], []

def check(tensors, options, devices):
    checks.append(1)
    there = [None if t is None else OnDevice(t, f"cuda:{planned}") for t in tensors]
    return plain_check(there, options, devices)

def empty(*allocation):
    path.append("direct")
    return _empty_strided_cpu(*allocation)

def new_empty(like, *allocation):
    path.append("dispatched")
    return plain_new(like, *allocation)

planned = current = 0
ssd.check, direct.empty, direct.new_empty = check, empty, new_empty
direct._current_device = lambda: current
made = {
    **{name: torch.zeros(4) for name in ("A", "D", "dt_bias")},
    **{name: torch.zeros(2, 128, 1, 128, dtype=torch.bfloat16) for name in ("B", "C")},
    "x": torch.zeros(2, 128, 4, 64, dtype=torch.bfloat16),
    "dt": torch.zeros(2, 128, 4),
}
kept = []

def call(**changes):
    path.clear()
    returned = scan(**{**made, "chunk_size": 256, "return_final_states": True, **changes})
    kept.append(returned)
    return returned
"""


@pytest.fixture
def plain(recorder, ssd_artifacts):
    """Runs a script after `SETUP`."""

    def run(script: str):
        env = {"SONATA_TEST_CUDA_CC": "9.0", "SONATA_TEST_CUDA_DEVICES": "3"}
        return recorder.loader(ssd_artifacts, SETUP + script, env=env)

    return run


def shown(launch: dict[str, Any]) -> dict[str, Any]:
    """A launch but for addresses: those of results differ, as results are kept."""
    return {
        **launch,
        "params": {
            name: "address" if isinstance(value, int) and value > 2**32 else value
            for name, value in launch["params"].items()
        },
    }


def test_both_paths_launch_the_same(plain, ssd_artifacts):
    """Also where tensors are copied first, or become dense."""
    outcome = plain(
        "z = torch.zeros(2, 128, 4, 80, dtype=torch.bfloat16)[..., 3:67]\n"
        "cases = [{}, {'return_final_states': False}, {'z': z}, {'A': torch.zeros(1).expand(4)},\n"
        "         {'dt_softplus': True, 'D': torch.nn.Parameter(made['D'], requires_grad=False)}]\n"
        "def results(y):\n"
        "    some = y if isinstance(y, tuple) else (y,)\n"
        "    return [[list(t.shape), str(t.dtype), list(t.stride()), str(type(t))] for t in some]\n"
        "answers = []\n"
        "for case in cases:\n"
        "    reader = scan._reader\n"
        "    first = [results(call(**case)), results(call(**case)), path[:]]\n"
        "    scan._reader = None\n"
        "    answers.append([*first, results(call(**case)), path[:]])\n"
        "    scan._reader = reader\n"
        "say([answers, len(checks)])"
    )
    answers, checks = outcome.value
    assert checks == 2 * len(answers)  # once for each path
    for first, second, native, python, dispatched in answers:
        assert first == second == python
        assert {*native} == {"direct"}
        assert {*dispatched} == {"dispatched"}
    found = launches(outcome, ssd_artifacts)
    count = 0
    while count < len(found):
        size = 3 if found[count]["kernel"] == "ssd_copy" else 2
        runs = [found[count + size * i : count + size * (i + 1)] for i in range(3)]
        for one, *others in zip(*runs, strict=True):
            assert [shown(other) for other in others] == [shown(one)] * 2
        for name in ("x", "b", "c", "d"):
            assert len({run[-1]["params"][name] for run in runs}) == 1
        count += 3 * size


def test_a_mode_or_another_device_takes_torchs_way(plain):
    outcome = plain(
        "from torch.utils._python_dispatch import TorchDispatchMode\n"
        "class Mode(TorchDispatchMode):\n"
        "    def __torch_dispatch__(self, function, types, args=(), kwargs=None):\n"
        "        return function(*args, **(kwargs or {}))\n"
        "answers = []\n"
        "call(); answers.append(path[:])\n"
        "with Mode(): call()\n"
        "answers.append(path[:])\n"
        "current = 1; call(); answers.append(path[:])\n"
        "current, direct.empty = 0, None; call(); answers.append(path[:])\n"
        "say([answers, len(checks)])"
    )
    answers, checks = outcome.value
    assert answers == [["direct"] * 3] + [["dispatched"] * 3] * 3
    assert checks == 1


def test_what_was_accepted_once_is_refused_when_it_changes(plain):
    outcome = plain(
        "call()\n"
        "A = made['A']\n"
        "answers = [failure(call, A=A.clone().requires_grad_())]\n"
        "with torch.no_grad(): answers.append(failure(call, A=A.clone().requires_grad_()))\n"
        "freed = torch.zeros(4); freed.untyped_storage().resize_(0)\n"
        "answers.append(failure(call, A=freed))\n"
        "answers.append(failure(call, A=A.double()))\n"
        "answers.append(failure(call, chunk_size=0))\n"
        "answers.append(failure(call, dt_limit=([], {})))\n"
        "from torch._subclasses.fake_tensor import FakeTensorMode\n"
        "mode = FakeTensorMode(allow_non_fake_inputs=True)\n"
        "with mode: answers.append(failure(call))\n"
        "say([a and a['message'] for a in answers])"
    )
    needs, free, freed, double, size, limit, fake = outcome.value
    assert "A requires grad" in needs
    assert free is None
    assert "A has no memory" in freed
    assert "A is torch.float64" in double
    assert "chunk_size is 0" in size
    assert "dt_limit is" in limit
    assert "out has no memory" in fake
