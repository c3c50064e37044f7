"""The one-pass scan's kernels, run without a GPU, against the scan in float64.

What a launch leaves out of its operands is NaN: rows past the end, what lies between rows, results
before they are written, and shared memory that nobody has filled is a fault.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import pytest
import torch
from ssd_errors import BOUNDS, check, errors, excess

from ptx_machine import Fault
from sonata_aot.artifacts import ArtifactSet, open_artifacts
from sonata_aot.kernels.models import MODELS
from ssd_machine import Launcher, Problem, variant

if TYPE_CHECKING:
    from tests.conftest import BuildCases

DTYPES = ("bf16", "f16")
# Sizes that ship, and others: a head in slices, 16 of dstate, tiles of 32 with half the channels.
OTHERS = {("f16", 32, 16), ("bf16", 96, 128), ("bf16", 80, 256), ("f16", 128, 32)}
SIZES = sorted({(dtype, *pair) for dtype in DTYPES for pair in MODELS} | OTHERS)
# Where everything that a call may have is tried.
USUAL = {"dtype": "bf16", "headdim": 64, "dstate": 128}
SMALL = {"dtype": "bf16", "headdim": 32, "dstate": 16}
NAN = float("nan")


def cases() -> list[tuple[str, str, dict[str, Any]]]:
    """The variants that these tests run; each once."""
    wanted: list[tuple[str, str, dict[str, Any]]] = []

    def add(arch: str, sizes: dict[str, Any], packed: int, outputs: int) -> None:
        pdl = int(arch == "sm90")
        scan = variant("ssd_scan", **sizes, packed=packed, outputs=outputs, pdl=pdl)
        prepare = variant("ssd_prepare", **{**sizes, "tile": scan["tile"], "pdl": pdl})
        wanted.extend([(arch, "ssd_prepare", prepare), (arch, "ssd_scan", scan)])

    for dtype, headdim, dstate in SIZES:
        add("sm86", {"dtype": dtype, "headdim": headdim, "dstate": dstate}, 0, 1)
    for packed in (0, 1):
        for outputs in (0, 1):
            add("sm86", USUAL, packed, outputs)
        add("sm86", {**USUAL, "dstate": 256}, packed, 1)
        add("sm90", USUAL, packed, 1)
    for packed in (0, 1):
        add("sm86", SMALL, packed, 1)
    wanted.append(("sm86", "ssd_pass", variant("ssd_pass")))
    return [case for place, case in enumerate(wanted) if case not in wanted[:place]]


@pytest.fixture(scope="module")
def artifacts(build_cases: BuildCases) -> ArtifactSet:
    return open_artifacts(build_cases("ssd-numerics", cases()))


@pytest.fixture(scope="module")
def on_sm86(artifacts: ArtifactSet) -> Launcher:
    return Launcher(artifacts)


@pytest.mark.parametrize(("dtype", "headdim", "dstate"), SIZES)
def test_sizes(on_sm86: Launcher, dtype: str, headdim: int, dstate: int) -> None:
    """All that ship and some others, over a whole tile and a part of one."""
    problem = Problem.random(
        dtype=dtype, headdim=headdim, dstate=dstate, seqlen=67, D="head", initial="f32"
    )
    check(on_sm86, problem)


@pytest.mark.parametrize("seqlen", [1, 15, 16, 17, 63, 64, 65, 130])
def test_lengths(on_sm86: Launcher, seqlen: int) -> None:
    check(on_sm86, Problem.random(seqlen=seqlen, D="head"))


@pytest.mark.parametrize("seqlen", [1, 31, 32, 33, 70])
def test_lengths_in_tiles_of_32(on_sm86: Launcher, seqlen: int) -> None:
    check(on_sm86, Problem.random(seqlen=seqlen, dstate=256, z=True))


@pytest.mark.parametrize("kind", ["f32", "bf16", "f16"])
@pytest.mark.parametrize("D", ["", "head", "channel"])
def test_options_and_their_dtypes(on_sm86: Launcher, D: str, kind: str) -> None:  # noqa: N803
    """What may have any dtype has this one; initial states another."""
    initial = {"f32": "f16", "bf16": "f32", "f16": "bf16"}[kind]
    check(on_sm86, Problem.random(seqlen=70, D=D, kind=kind, initial=initial, z=bool(D)))


@pytest.mark.parametrize(("heads", "groups"), [(4, 1), (4, 2), (3, 3)])
def test_heads_and_groups(on_sm86: Launcher, heads: int, groups: int) -> None:
    check(on_sm86, Problem.random(batch=2, seqlen=20, heads=heads, groups=groups, D="channel"))


def test_more_heads_than_a_block_prepares(on_sm86: Launcher) -> None:
    check(on_sm86, Problem.random(seqlen=18, heads=12, **SMALL))


@pytest.mark.parametrize("limit", [(0.0, 0.05), (0.1, 0.2)])
def test_limits_of_steps(on_sm86: Launcher, limit: tuple[float, float]) -> None:
    problem = Problem.random(seqlen=33)
    problem.arguments |= {"dt_limit": limit, "dt_softplus": limit[0] > 0}
    check(on_sm86, problem)


@pytest.mark.parametrize("rate", [-1e-6, -1.0, -1e3])
def test_steps_of_all_sizes_and_rates_near_zero_and_large(on_sm86: Launcher, rate: float) -> None:
    """Decays within a tile that neither overflow nor leave anything that is no number."""
    problem = Problem.random(seqlen=130, heads=2)
    spread = torch.rand(1, 130, 2, generator=torch.Generator().manual_seed(1))
    steps = 1e-4 * (20 / 1e-4) ** spread
    problem.arguments |= {"A": torch.full((2,), rate), "dt": steps, "dt_softplus": False}
    del problem.arguments["dt_bias"]
    # Sums over the tokens of a tile are rounded to fp32, and their differences are exponents.
    tiles = torch.nn.functional.pad(steps, (0, 0, 0, 62)).unflatten(1, (3, 64))
    more = 2**-23 * abs(rate) * math.log2(math.e) * tiles.sum(2).max().item()
    for name, error in errors(on_sm86.run(problem), problem.wanted()).items():
        assert error <= BOUNDS["bf16"][name] + more, f"{name} is off by {error:.2e}"


@pytest.mark.parametrize("options", [{}, {"segments": 2}, {"dstate": 256}], ids=str)
def test_offsets_of_more_than_32_bits(on_sm86: Launcher, options: dict[str, Any]) -> None:
    """Tokens lie more than 4 GiB apart, as the last of 600 000 do: a cut offset meets nothing."""
    problem = Problem.random(
        batch=2, seqlen=66, heads=2, z=True, D="head", apart=2**31 + 1000, **options
    )
    check(on_sm86, problem)


# Ends within tiles, at their ends, and several in one; and sequences without tokens.
LENGTHS = [(70,), (30, 40), (64, 6), (5, 1, 58, 66), (0, 3, 0, 0, 70, 0)]


class TestSequences:
    @pytest.mark.parametrize("lengths", LENGTHS, ids=str)
    @pytest.mark.parametrize("initial", ["", "bf16"])
    def test_ends(self, on_sm86: Launcher, lengths: tuple[int, ...], initial: str) -> None:
        check(
            on_sm86,
            Problem.random(seqlen=sum(lengths), sequences=lengths, ends=True, initial=initial),
        )

    def test_in_tiles_of_32(self, on_sm86: Launcher) -> None:
        lengths = (33, 20, 20)
        problem = Problem.random(seqlen=73, sequences=lengths, ends=True, dstate=256, z=True)
        check(on_sm86, problem)

    def test_an_index_at_a_time(self, on_sm86: Launcher) -> None:
        """Each batch its own, one starting with another index than 0, which drops the states."""
        problem = Problem.random(batch=2, seqlen=70, initial="f32", D="head")
        index = torch.zeros(2, 70, dtype=torch.int32)
        index[0, 17:], index[1] = 5, 2
        problem.arguments["seq_idx"] = index
        check(on_sm86, problem)

    def test_without_indices_ends_alone(self, on_sm86: Launcher) -> None:
        problem = Problem.random(seqlen=40, sequences=(40,), ends=True, initial="f32")
        del problem.arguments["seq_idx"]
        check(on_sm86, problem)

    def test_padding(self, on_sm86: Launcher) -> None:
        """Adds nothing to states, whatever stands there; what out has there is unspecified."""
        problem = Problem.random(seqlen=140, initial="f32")
        index = torch.zeros(1, 140, dtype=torch.int32)
        index[0, 20:90], index[0, 90:] = -1, 2
        problem.arguments["seq_idx"] = index
        wanted = problem.wanted()
        problem.arguments["x"][:, 20:90] = NAN
        problem.arguments["B"][:, 25:80] = NAN
        found = on_sm86.run(problem)
        away = [*range(16), *range(128, 140)]
        found["out"], wanted["out"] = found["out"][:, away], wanted["out"][:, away]
        assert excess(found, wanted) <= 1

    @pytest.mark.parametrize("start", [10, 64, 70, 100])
    def test_padding_at_the_end_leaves_a_state_of_zeros(
        self, on_sm86: Launcher, start: int
    ) -> None:
        problem = Problem.random(seqlen=100 + start % 64, initial="f32")
        index = torch.zeros(1, problem.arguments["x"].shape[1], dtype=torch.int32)
        index[0, start:] = -3
        problem.arguments["seq_idx"] = index
        problem.arguments["x"][:, start:] = NAN
        if (index < 0).any():
            assert not on_sm86.run(problem)["final"].any()


class TestSegments:
    @pytest.mark.parametrize(("segments", "ratio"), [(2, 1), (3, 2), (2, 4)])
    @pytest.mark.parametrize("initial", ["", "f16"])
    def test_without_sequences(
        self, on_sm86: Launcher, segments: int, ratio: int, initial: str
    ) -> None:
        seqlen = 64 * segments * ratio - 50
        check(
            on_sm86,
            Problem.random(seqlen=seqlen, segments=segments, ratio=ratio, initial=initial),
        )

    @pytest.mark.parametrize("lengths", [(330,), (70, 100, 160), (192, 0, 138)], ids=str)
    def test_with_sequences(self, on_sm86: Launcher, lengths: tuple[int, ...]) -> None:
        problem = Problem.random(
            seqlen=330, sequences=lengths, ends=True, initial="f32", segments=3, ratio=2
        )
        check(on_sm86, problem)

    def test_several_heads_and_batches(self, on_sm86: Launcher) -> None:
        problem = Problem.random(batch=2, heads=2, seqlen=130, segments=3, initial="f32")
        check(on_sm86, problem)


class TestProgrammaticLaunch:
    """The code for sm90, which is other code."""

    @pytest.fixture
    def on_sm90(self, artifacts: ArtifactSet) -> Launcher:
        return Launcher(artifacts, "sm90")

    def test_without_sequences(self, on_sm90: Launcher) -> None:
        check(on_sm90, Problem.random(seqlen=130, z=True, D="channel", initial="bf16"))

    def test_with_sequences(self, on_sm90: Launcher) -> None:
        check(on_sm90, Problem.random(seqlen=130, sequences=(10, 60, 60), ends=True, initial="f32"))


class TestNan:
    """How far one reaches: states of other sequences never, out of others within a tile."""

    LENGTHS = (20, 50, 70)

    def problem(self, **options: Any) -> Problem:
        return Problem.random(seqlen=140, sequences=self.LENGTHS, ends=True, **options)

    @pytest.mark.parametrize("name", ["x", "B", "C", "dt"])
    @pytest.mark.parametrize("sequence", [0, 1, 2])
    def test_it_stays_in_its_sequence(self, on_sm86: Launcher, name: str, sequence: int) -> None:
        problem = self.problem()
        wanted = problem.wanted()
        first = sum(self.LENGTHS[:sequence])
        token = first + 10
        problem.arguments[name][:, token] = NAN
        found = on_sm86.run(problem)
        # States of its own sequence have it; those of others do not.
        ends = [found["ends"][i].isnan().any().item() for i in range(3)]
        assert ends == [i == sequence and name != "C" for i in range(3)]
        assert found["final"].isnan().any().item() == (sequence == 2 and name != "C")
        others = [i for i in range(3) if i != sequence]
        states = {"ends": found["ends"][others]}
        assert excess(states, {"ends": wanted["ends"][others]}) <= 1
        # Out has it within its sequence, and at most up to the ends of the tiles of that.
        clean = torch.ones(140, dtype=torch.bool)
        clean[token // 64 * 64 : -(-(first + self.LENGTHS[sequence]) // 64) * 64] = False
        out = {"out": found["out"][:, clean]}
        assert excess(out, {"out": wanted["out"][:, clean]}) <= 1
        assert found["out"][:, token].isnan().any()

    @pytest.mark.parametrize("name", ["B", "C", "dt"])
    def test_out_of_earlier_tokens_has_none(self, on_sm86: Launcher, name: str) -> None:
        problem = Problem.random(seqlen=64)
        problem.arguments[name][:, 9] = NAN
        out = on_sm86.run(problem)["out"]
        assert not out[:, :9].isnan().any()
        assert out[:, 9].isnan().all()

    def test_one_of_x_may_reach_the_tokens_of_its_tile(self, on_sm86: Launcher) -> None:
        problem = Problem.random(seqlen=130)
        problem.arguments["x"][:, 70] = NAN
        out = on_sm86.run(problem)["out"]
        assert not out[:, :64].isnan().any()
        assert out[:, 70:].isnan().all()

    @pytest.mark.parametrize("name", ["x", "dt", "initial_states"])
    def test_it_ends_with_its_sequence_in_segments_too(self, on_sm86: Launcher, name: str) -> None:
        lengths = (150, 180)
        problem = Problem.random(
            seqlen=330, sequences=lengths, ends=True, initial="f32", segments=3, ratio=2
        )
        wanted = problem.wanted()
        problem.arguments[name][:, 0] = NAN
        found = on_sm86.run(problem)
        assert found["ends"][0].isnan().any()
        later = {"final": found["final"], "ends": found["ends"][1:]}
        assert excess(later, {"final": wanted["final"], "ends": wanted["ends"][1:]}) <= 1


# Places in the PTX of a scan that keep its warps in order.
ORDER = re.compile(
    r"^\s*(bar\.sync|bar\.arrive|cp\.async\.(?:wait_group|commit_group))\b.*;$", re.M
)
PLACES = 14
# So that each stage of each buffer is used again.
FIVE_TILES = {**SMALL, "seqlen": 300, "D": "head"}


def without(place: int) -> Callable[[str], str]:
    """PTX without one of those instructions."""

    def edit(ptx: str) -> str:
        found = list(ORDER.finditer(ptx))
        assert len(found) == PLACES, [match[0] for match in found]
        return ptx[: found[place].start()] + ptx[found[place].end() :]

    return edit


def unawaited(place: int) -> Callable[[str], str]:
    """PTX in which warps arrive at one of the barriers and do not wait there."""

    def edit(ptx: str) -> str:
        match = list(ORDER.finditer(ptx))[place]
        return ptx[: match.start()] + match[0].replace("sync", "arrive") + ptx[match.end() :]

    return edit


class TestOrder:
    """A barrier or a wait that is missing would be seen here, if not on a GPU."""

    def fails(self, artifacts: ArtifactSet, edit: Callable[[str], str]) -> None:
        launcher = Launcher(artifacts, edit={"ssd_scan": edit})

        def wrong(z: bool) -> bool:
            problem = Problem.random(**FIVE_TILES, z=z)
            try:
                found = launcher.run(problem)
            except Fault:
                return True
            return excess(found, problem.wanted()) > 10

        # The walk with z has barriers of its own.
        assert wrong(False) or wrong(True)

    @pytest.mark.parametrize("z", [False, True])
    def test_all_is_well_as_it_is(self, on_sm86: Launcher, z: bool) -> None:
        check(on_sm86, Problem.random(**FIVE_TILES, z=z))

    @pytest.mark.parametrize("place", range(PLACES))
    def test_none_can_be_left_out(self, artifacts: ArtifactSet, place: int) -> None:
        self.fails(artifacts, without(place))

    # All but the first, at which all threads meet.
    @pytest.mark.parametrize("place", [1, 3, 7, 12])
    def test_each_is_waited_at(self, artifacts: ArtifactSet, place: int) -> None:
        self.fails(artifacts, unawaited(place))
