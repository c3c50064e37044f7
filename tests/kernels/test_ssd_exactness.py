"""Where the one-pass scan is more exact than its rounding, and what no gate may spoil.

Run without a GPU, against the scan in float64.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch
from ssd_errors import BOUNDS, check, errors

from sonata_aot.artifacts import open_artifacts
from ssd_machine import Launcher, Problem, variant

if TYPE_CHECKING:
    from tests.conftest import BuildCases

USUAL = {"dtype": "bf16", "headdim": 64, "dstate": 128}


@pytest.fixture(scope="module")
def on_sm86(build_cases: BuildCases) -> Launcher:
    cases = []
    half = {**USUAL, "dtype": "f16"}
    for sizes, packed in ((USUAL, 0), (USUAL, 1), ({**USUAL, "dstate": 256}, 0), (half, 0)):
        scan = variant("ssd_scan", **sizes, packed=packed, outputs=1, pdl=0)
        prepare = variant("ssd_prepare", **{**sizes, "tile": scan["tile"], "pdl": 0})
        cases += [("sm86", "ssd_prepare", prepare), ("sm86", "ssd_scan", scan)]
    # For segments.
    cases.append(("sm86", "ssd_scan", variant("ssd_scan", **USUAL, packed=0, outputs=0, pdl=0)))
    cases.append(("sm86", "ssd_pass", variant("ssd_pass")))
    unique = [case for place, case in enumerate(cases) if case not in cases[:place]]
    return Launcher(open_artifacts(build_cases("ssd-exactness", unique)))


class TestFinalStates:
    """What rounding takes from the last tokens of the last tile, final states have."""

    @pytest.mark.parametrize("seqlen", [1, 16, 20, 32])
    def test_of_a_few_tokens_they_are_those_of_fp32(self, on_sm86: Launcher, seqlen: int) -> None:
        problem = Problem.random(seqlen=seqlen, **USUAL)
        assert errors(on_sm86.run(problem), problem.wanted())["final"] < 1e-5

    def test_in_tiles_of_32(self, on_sm86: Launcher) -> None:
        problem = Problem.random(seqlen=30, **{**USUAL, "dstate": 256})
        assert errors(on_sm86.run(problem), problem.wanted())["final"] < 1e-5

    def test_of_the_last_sequence_alone(self, on_sm86: Launcher) -> None:
        problem = Problem.random(seqlen=50, sequences=(33, 17), **USUAL)
        assert errors(on_sm86.run(problem), problem.wanted())["final"] < 1e-5

    def test_where_steps_are_long_they_are_much_more_exact(self, on_sm86: Launcher) -> None:
        """Of tokens further back there is nothing left."""
        problem = Problem.random(seqlen=128, **USUAL)
        problem.arguments["A"].fill_(-8.0)
        problem.arguments["dt_bias"].fill_(-1.0)
        assert errors(on_sm86.run(problem), problem.wanted())["final"] < 1e-5

    @pytest.mark.parametrize(("seqlen", "segments"), [(192, 1), (192, 2), (148, 2)])
    def test_of_the_last_of_several_tiles_and_segments(
        self, on_sm86: Launcher, seqlen: int, segments: int
    ) -> None:
        problem = Problem.random(seqlen=seqlen, segments=segments, **USUAL)
        problem.arguments["A"].fill_(-4.0)
        problem.arguments["dt_bias"].fill_(-1.0)
        assert errors(on_sm86.run(problem), problem.wanted())["final"] < 2e-5

    @pytest.mark.parametrize("dtype", ["bf16", "f16"])
    @pytest.mark.parametrize("name", ["x", "B"])
    def test_what_overflows_stays_infinite(self, on_sm86: Launcher, dtype: str, name: str) -> None:
        problem = Problem.random(seqlen=20, **{**USUAL, "dtype": dtype})
        problem.arguments[name][:, 7, :, ::2] = torch.inf
        problem.arguments[name][:, 7, :, 1::2] = -torch.inf
        final = on_sm86.run(problem)["final"]
        assert final.isinf().all()
        assert torch.equal(final.sign(), problem.wanted()["final"].sign().float())

    def test_one_infinite_channel_spoils_no_other(self, on_sm86: Launcher) -> None:
        problem = Problem.random(seqlen=20, **USUAL)
        clean = on_sm86.run(problem)["final"]
        problem.arguments["x"][:, 7, :, 5] = torch.inf
        final = on_sm86.run(problem)["final"]
        assert final[:, :, 5].isinf().all()
        others = [channel for channel in range(final.shape[2]) if channel != 5]
        assert torch.equal(final[:, :, others], clean[:, :, others])


def test_z_of_any_size(on_sm86: Launcher) -> None:
    """silu of four channels of a token is made of one reciprocal: none may spoil the others."""
    problem = Problem.random(seqlen=70, z=True, **USUAL)
    for first, value in enumerate((-3e38, 3e4, -1e30, -25.0, -15.0, -torch.inf)):
        problem.arguments["z"][..., first::16] = value
    found, wanted = on_sm86.run(problem)["out"].double(), problem.wanted()["out"]
    assert found.isfinite().all()
    rest = [channel for channel in range(64) if channel % 16 > 5 or channel % 16 == 1]
    apart = (found - wanted)[..., rest].flatten(0, 2).norm(dim=0)
    assert (apart / wanted[..., rest].flatten(0, 2).norm(dim=0)).max() < 5 * BOUNDS["bf16"]["out"]
    for first in (0, 2, 3, 5):
        assert found[..., first::16].abs().max() < 1e-5
    relative = (found - wanted)[..., 4::16].norm() / wanted[..., 4::16].norm()
    assert relative < 5 * BOUNDS["bf16"]["out"]


def test_the_least_z_beside_others_that_count(on_sm86: Launcher) -> None:
    """Of the channels that share a reciprocal three are as low as can be."""
    problem = Problem.random(seqlen=20, z=True, **USUAL)
    problem.arguments["z"][:] = -50.0
    problem.arguments["z"][..., 40] = 1.0
    found, wanted = on_sm86.run(problem)["out"].double(), problem.wanted()["out"]
    apart = (found - wanted)[..., 40].norm() / wanted[..., 40].norm()
    assert apart < 2 * BOUNDS["bf16"]["out"]


@pytest.mark.parametrize("lengths", [(70, 60, 70), (64, 64, 1)])
def test_z_with_sequences(on_sm86: Launcher, lengths: tuple[int, ...]) -> None:
    problem = Problem.random(
        seqlen=sum(lengths), sequences=lengths, z=True, D="channel", initial="f32", **USUAL
    )
    check(on_sm86, problem)
