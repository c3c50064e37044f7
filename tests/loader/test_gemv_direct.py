"""`kernels.gemv(out=)` on plain tensors: what is launched natively is what the checks led to."""

from __future__ import annotations

import pytest

HOPPER = {"SONATA_TEST_CUDA_CC": "9.0", "SONATA_TEST_CUDA_DEVICES": "2"}
# Plain tensors, of the CPU, for the driver's stand-in: who checks them is told that they are on a
# device. `runs` counts the calls that were checked.
SETUP = """
k = loader.load(ARTIFACTS, devices=[0, 1])
from sonata_aot.loader import gemv
plain_check, plain_run, runs = k.gemv.check, gemv.run, []

def there(tensor):
    return None if tensor is None else OnDevice(tensor, "cuda:1")

def run(plan, operands, *given):
    runs.append(1)
    plain_run(plan, operands, *map(there, given))
    return given[-1]

k.gemv.check = lambda *given: plain_check(*map(there, given))
gemv.run = run
made = lambda *shape: torch.zeros(shape, dtype=torch.bfloat16)
"""


@pytest.fixture
def plain(recorder, artifacts):
    """Runs a script after `SETUP`."""
    return lambda script: recorder.loader(artifacts, SETUP + script, env=HOPPER)


def test_a_repeated_call_launches_the_same(plain):
    outcome = plain(
        "for rows, k_size in ((1, 64), (2, 64), (8, 72), (3, 63)):\n"
        "    for bias in (None, made(100)):\n"
        "        x, weight, out = made(rows, k_size), made(100, k_size), made(rows, 108)[:, :100]\n"
        "        for invariant in (False, True):\n"
        "            for _ in range(3):\n"
        "                before = out._version\n"
        "                found = k.gemv(x, weight, bias, out, batch_invariant=invariant)\n"
        "                assert found is out\n"
        "                if _: assert out._version == before + 1\n"
        "say(len(runs))"
    )
    assert outcome.value == 4 * 2 * 2
    found = outcome.named("cuLaunchKernel")
    assert len(found) == 3 * 4 * 2 * 2
    for first, second, third in zip(found[::3], found[1::3], found[2::3], strict=True):
        assert first == second == third


def test_other_memory_takes_the_same_launch_unless_it_overlaps(plain):
    outcome = plain(
        "x, weight, out = made(2, 64), made(100, 64), made(2, 100)\n"
        "k.gemv(x, weight, out=out)\n"
        "other = made(2, 100)\n"
        "k.gemv(x, weight, out=other)\n"
        "answers = [len(runs)]\n"
        "both = made(100, 64).view(-1)\n"
        "answers.append(failure(k.gemv, x, both.view(100, 64), None, both[:200].view(2, 100)))\n"
        "answers.append(failure(k.gemv, x, weight.clone().requires_grad_(), None, out))\n"
        "with torch.no_grad():\n"
        "    answers.append(failure(k.gemv, x, weight.clone().requires_grad_(), None, out))\n"
        "say([answers[0], *[a and a['message'] for a in answers[1:]]])"
    )
    count, overlaps, needs, free = outcome.value
    assert count == 1
    assert "out overlaps weight" in overlaps
    assert "weight requires grad" in needs
    assert free is None
    _, second, *_ = outcome.named("cuLaunchKernel")
    assert second["entry"] == outcome.named("cuLaunchKernel")[0]["entry"]
    assert second["params"] != outcome.named("cuLaunchKernel")[0]["params"]
