"""The stages' kernels, run through their PTX by a machine in numpy, against float64."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import Tensor

import ssd_reference
import ssd_stage_reference as reference
from sonata_aot.artifacts import open_artifacts
from sonata_aot.artifacts.declaration import Variant
from sonata_aot.loader import runtime
from stage_machine import OnMachine, cases

if TYPE_CHECKING:
    from tests.conftest import BuildCases

NAN = float("nan")
DTYPES = {"bf16": torch.bfloat16, "f16": torch.float16}
# What one rounding to the dtype leaves, as a relative L2 error, with room for three of them.
ROUNDED = {torch.bfloat16: 4e-3, torch.float16: 5e-4}
EXACT = 1e-6
# Every headdim and dstate, and both ways in which a state is cut, come up.
SIZES: tuple[Variant, ...] = (
    {"dtype": "bf16", "headdim": 64, "dstate": 128},
    {"dtype": "f16", "headdim": 80, "dstate": 16},
    {"dtype": "f16", "headdim": 32, "dstate": 32},
    {"dtype": "bf16", "headdim": 96, "dstate": 64},
    {"dtype": "bf16", "headdim": 128, "dstate": 256},
)
SMALL = SIZES[2]
# (tokens, size of a chunk): part of a chunk and of a tile, many chunks, odd ones, one of each.
CUTS = ((150, 100), (70, 256), (129, 40), (101, 50), (67, 7), (9, 1), (1, 64))
# Every cut of the smallest state, two of the others.
STAGES = [
    *((SMALL, cut, sequences) for cut in CUTS for sequences in (False, True)),
    *((sizes, (95, 80), sizes["dtype"] == "bf16") for sizes in SIZES if sizes is not SMALL),
    *((sizes, (70, 31), sizes["dtype"] == "f16") for sizes in SIZES if sizes is not SMALL),
]


def name_of(value: Any) -> str | None:
    """How a test calls sizes."""
    return "-".join(map(str, value.values())) if isinstance(value, dict) else None


only_small = pytest.mark.parametrize("sizes", [SMALL], ids=name_of, indirect=True)


class Problem:
    """Random arguments with NaN between rows, before and after the sequence."""

    def __init__(
        self,
        sizes: Variant,
        seqlen: int,
        *,
        seed: int = 0,
        batch: int = 2,
        groups: int = 2,
        ratio: int = 1,
    ) -> None:
        self.generator = torch.Generator().manual_seed(seed)
        self.dtype = DTYPES[str(sizes["dtype"])]
        headdim, dstate = int(sizes["headdim"]), int(sizes["dstate"])
        heads = groups * ratio
        self.state = (batch, heads, headdim, dstate)
        self.x = self.slice(self.dtype, batch, seqlen, heads, headdim)
        self.z = self.slice(self.dtype, batch, seqlen, heads, headdim)
        self.b = self.slice(self.dtype, batch, seqlen, groups, dstate)
        self.c = self.slice(self.dtype, batch, seqlen, groups, dstate)
        self.dt = self.slice(self.dtype, batch, seqlen, heads)
        self.rates = -self.normal(heads).exp() / 4
        self.bias = self.normal(heads).to(torch.float16)
        self.d = self.normal(heads, headdim)
        self.initial = self.normal(*self.state)
        ends = torch.tensor([seqlen // 3, seqlen // 2, seqlen - 1])
        tokens = torch.arange(seqlen)
        self.sequences = (tokens >= ends.unsqueeze(1)).sum(0, dtype=torch.int32).repeat(batch, 1)

    def normal(self, *shape: int) -> Tensor:
        return torch.randn(*shape, generator=self.generator)

    def slice(self, dtype: torch.dtype, batch: int, seqlen: int, *row: int) -> Tensor:
        """A part of the rows and columns of a buffer of NaN; rows are aligned to 16 bytes."""
        values = self.normal(batch, seqlen, *row).to(dtype)
        width = values[0, 0].numel()
        buffer = torch.full((batch, seqlen + 2, -(-width // 8) * 8 + 16), NAN, dtype=dtype)
        part = buffer[:, 1:-1, 8 : 8 + width].unflatten(2, row)
        return part.copy_(values)

    def __getitem__(self, names: str) -> list[Any]:
        return [getattr(self, name) for name in names.split()]


def error(found: Tensor, expected: Tensor) -> float:
    """Relative L2 error; what is not a number is infinitely wrong."""
    assert found.shape == expected.shape
    difference = (found.double() - expected).nan_to_num(nan=torch.inf).norm()
    scale = expected.norm()
    return float(difference / scale) if scale else float(difference)


@pytest.fixture(scope="module")
def sizes(request: pytest.FixtureRequest) -> Variant:
    return request.param


@pytest.fixture(scope="module")
def machine(build_cases: BuildCases, sizes: Variant) -> OnMachine:
    wanted = cases(sizes)
    return OnMachine(open_artifacts(build_cases(f"stages-{name_of(sizes)}", wanted)), wanted)


@pytest.fixture(autouse=True)
def _no_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runtime, "current_stream", lambda device: 0)


@pytest.mark.parametrize(("sizes", "cut", "sequences"), STAGES, ids=name_of, indirect=["sizes"])
def test_each_stage(
    machine: OnMachine, sizes: Variant, cut: tuple[int, int], sequences: bool
) -> None:
    """Each gets what the kernels before it made, as its reference does."""
    seqlen, chunk_size = cut
    problem = Problem(sizes, seqlen, batch=2 if sizes is SMALL else 1)
    x, b, c, rates, bias, d, z, initial = problem["x b c rates bias d z initial"]
    rounded = ROUNDED[problem.dtype]
    seq = problem.sequences if sequences else None

    given = (problem.dt, rates, chunk_size, bias, True, (0.01, 5.0))
    decay, steps = machine.run("chunk_cumsum", *given)
    for found, expected in zip((decay, steps), reference.chunk_cumsum(*given), strict=True):
        assert error(found, expected) < EXACT

    products = reference.bmm_chunk(c, b, chunk_size, seq)
    full = machine.run("bmm_chunk", c, b, chunk_size, seq, False, torch.float32)
    assert error(full, products) < EXACT
    assert error(machine.run("bmm_chunk", c, b, chunk_size, seq), products) < rounded
    causal = machine.run("bmm_chunk", c, b, chunk_size, seq, True, torch.float32)
    assert error(causal.tril(), products.tril()) < EXACT

    added = machine.run("chunk_state", b, x, steps, decay, seq)
    assert error(added, reference.chunk_state(b, x, steps, decay, seq)) < rounded

    ends = decay[..., -1]
    states, final = machine.run("state_passing", added, ends, initial, seq, chunk_size)
    passed = reference.state_passing(added, ends, initial, seq, chunk_size)
    assert error(states, passed[0]) < EXACT
    assert error(final, passed[1]) < EXACT
    halves, _ = machine.run(
        "state_passing", added, ends, initial, seq, chunk_size, out_dtype=problem.dtype
    )
    assert torch.equal(halves, states.to(problem.dtype))

    out = machine.run("chunk_scan", causal, x, steps, decay, c, states, d, z, seq)
    given = (products, x, steps, decay, c, states, d, z, seq)
    assert error(out, reference.chunk_scan(*given)) < rounded
    again = machine.run("chunk_scan", causal, x, steps, decay, c, halves, d, z, seq)
    assert torch.equal(again, out)


OPTIONS = {
    "least": {},
    "gated": {"D": "d", "z": "z"},
    "all": {"D": "rates", "z": "z", "dt_bias": "bias", "initial_states": "initial"},
}


COMBINED = [
    *((SMALL, cut, name) for cut in ((90, 40), (130, 64)) for name in OPTIONS),
    *((sizes, (70, 40), "all") for sizes in SIZES if sizes is not SMALL),
]


@pytest.mark.parametrize(("sizes", "cut", "options"), COMBINED, ids=name_of, indirect=["sizes"])
def test_the_scan_made_of_them(
    machine: OnMachine, sizes: Variant, cut: tuple[int, int], options: str
) -> None:
    seqlen, chunk_size = cut
    problem = Problem(sizes, seqlen, batch=1, groups=1, ratio=2)
    x, dt, rates, b, c = problem["x dt rates b c"]
    given = {name: getattr(problem, source) for name, source in OPTIONS[options].items()}
    given |= {"dt_softplus": options == "all", "return_final_states": True}
    out, final = machine.run("combined", x, dt, rates, b, c, chunk_size, **given)
    expected = ssd_reference.scan(x, dt, rates, b, c, chunk_size, **given)
    assert error(out, expected[0]) < ROUNDED[problem.dtype]
    assert error(final, expected[1]) < ROUNDED[problem.dtype]


# Indices that come back, within a chunk and in another; padding inside and at the end; a start
# with another index than 0.
INDICES = {
    "comes back": [0] * 10 + [1] * 9 + [0] * 30 + [1] * 21,
    "padding": [0] * 30 + [-1] * 12 + [1] * 28,
    "padding at the end": [0] * 20 + [1] * 35 + [-1] * 15,
    "starts with another": [3] * 40 + [4] * 30,
    "one each": list(range(70)),
}


@pytest.mark.parametrize("indices", INDICES.values(), ids=list(INDICES))
@pytest.mark.parametrize("chunk_size", [24, 100])
@only_small
def test_corners_of_sequences(
    machine: OnMachine, sizes: Variant, indices: list[int], chunk_size: int
) -> None:
    problem = Problem(sizes, len(indices), batch=1)
    x, dt, rates, b, c = problem["x dt rates b c"]
    seq = torch.tensor([indices], dtype=torch.int32)
    given = {
        "initial_states": problem.initial.to(torch.bfloat16),
        "seq_idx": seq,
        "dt_softplus": True,
        "return_final_states": True,
    }
    out, final = machine.run("combined", x, dt, rates, b, c, chunk_size, **given)
    expected = ssd_reference.scan(x, dt, rates, b, c, chunk_size, **given)
    counts = seq[0] >= 0
    assert error(out[:, counts], expected[0][:, counts]) < ROUNDED[problem.dtype]
    assert error(final, expected[1]) < ROUNDED[problem.dtype]


@only_small
class TestCorners:
    def test_no_state_crosses_into_another_sequence_by_a_factor_of_zero(
        self, machine: OnMachine, sizes: Variant
    ) -> None:
        problem = Problem(sizes, 100, batch=1)
        x, rates, b, c = problem["x rates b c"]
        seq = (torch.arange(100) >= 50).to(torch.int32).unsqueeze(0)
        decay, steps = machine.run("chunk_cumsum", problem.dt, rates, 50, None, True)
        added = machine.run("chunk_state", b, x, steps, decay, seq)
        added[:, 0], expected = NAN, added[:, 1].clone()
        states, final = machine.run("state_passing", added, decay[..., -1], None, seq, 50)
        assert torch.equal(final, expected)
        products = machine.run("bmm_chunk", c, b, 50, seq, True, torch.float32)
        out = machine.run("chunk_scan", products, x, steps, decay, c, states, seq_idx=seq)
        assert not out.isnan().any()

    def test_decays_underflow_and_step_sizes_are_large(
        self, machine: OnMachine, sizes: Variant
    ) -> None:
        problem = Problem(sizes, 90)
        x, b, c = problem["x b c"]
        dt = problem.dt.abs().clamp(1e-4) * 8
        rates = torch.tensor([-1e-6, -40.0])
        given = (x, dt, rates, b, c, 64)
        out, final = machine.run("combined", *given, return_final_states=True)
        expected = ssd_reference.scan(*given, return_final_states=True)
        assert error(out, expected[0]) < ROUNDED[problem.dtype]
        assert error(final, expected[1]) < ROUNDED[problem.dtype]

    def test_blocks_that_share_a_chunk(self, machine: OnMachine, sizes: Variant) -> None:
        """On a large GPU a block takes one tile, and here a whole chunk: the same bits."""
        problem = Problem(sizes, 300, batch=1)
        x, dt, rates, b, c, d = problem["x dt rates b c d"]
        given = (x, dt, rates, b, c, 200, d)
        few = machine.run("combined", *given, dt_softplus=True)
        many = machine.on(1000).run("combined", *given, dt_softplus=True)
        assert torch.equal(few, many)

    @pytest.mark.parametrize("shape", [(0, 5), (2, 0)])
    def test_nothing_to_do(self, machine: OnMachine, sizes: Variant, shape: tuple[int, int]):
        problem = Problem(sizes, 5)
        batch, seqlen = shape
        parts = [tensor[:batch, :seqlen] for tensor in problem["x dt b c initial"]]
        x, dt, b, c, _ = parts
        initial = problem.initial[:batch]
        out, final = machine.run(
            "combined", x, dt, problem.rates, b, c, 4, initial_states=initial,
            return_final_states=True,
        )  # fmt: skip
        assert out.shape == x.shape
        assert torch.equal(final, initial)

    def test_rows_that_are_not_aligned_and_strides_within_rows(
        self, machine: OnMachine, sizes: Variant
    ) -> None:
        problem = Problem(sizes, 60)
        x, dt, rates, b, c = problem["x dt rates b c"]
        odd = torch.cat([x.flatten(2), x.flatten(2)], 2)[..., 3:]
        odd = odd[..., : x.shape[2] * x.shape[3]].unflatten(2, x.shape[2:])
        odd.copy_(x)
        turned = b.transpose(2, 3).contiguous().transpose(2, 3)
        uneven = c.new_full((*c.shape[:2], c.shape[2] * c.shape[3] + 3), NAN)
        uneven = uneven[..., :-3].unflatten(2, c.shape[2:]).copy_(c)
        assert odd.data_ptr() % 16
        assert turned.stride(-1) != 1
        # Only the first row is aligned.
        assert (uneven.data_ptr() % 16, uneven.stride(1) % 8) == (0, 3)
        expected = machine.run("combined", x, dt, rates, b, c, 33, dt_softplus=True)
        for first, *others in ((odd, turned, c), (x, b, uneven)):
            found = machine.run("combined", first, dt, rates, *others, 33, dt_softplus=True)
            assert torch.equal(found, expected)

    def test_steps_decays_and_products_with_other_strides(
        self, machine: OnMachine, sizes: Variant
    ) -> None:
        problem = Problem(sizes, 60)
        x, rates, b, c = problem["x rates b c"]
        decay, steps = machine.run("chunk_cumsum", problem.dt, rates, 25, None, True)
        added = machine.run("chunk_state", b, x, steps, decay)
        states, _ = machine.run("state_passing", added, decay[..., -1])
        products = machine.run("bmm_chunk", c, b, 25, None, True, torch.float32)
        assert products.stride(-2) == 26
        expected = machine.run("chunk_scan", products, x, steps, decay, c, states)
        turned = [t.mT.contiguous().mT for t in (products, steps, decay, states)]
        cb, steps, decay, states = turned
        assert torch.equal(machine.run("chunk_scan", cb, x, steps, decay, c, states), expected)
        assert torch.equal(machine.run("chunk_state", b, x, steps, decay), added)

    @pytest.mark.parametrize(("name", "by"), [("far", 5 * 2**32 + 64), ("apart", 2**31 + 1000)])
    def test_offsets_of_more_than_32_bits(
        self,
        machine: OnMachine,
        sizes: Variant,
        monkeypatch: pytest.MonkeyPatch,
        name: str,
        by: int,
    ) -> None:
        """Of a second batch, or of each token: a wrong address would be that of no buffer."""
        problem = Problem(sizes, 70)
        x, dt, rates, b, c, d, z = problem["x dt rates b c d z"]
        options: dict[str, Any] = {
            "initial_states": problem.initial,
            "seq_idx": problem.sequences,
            "dt_softplus": True,
            "return_final_states": True,
        }
        near = machine.run("combined", x, dt, rates, b, c, 40, d, z, **options)
        monkeypatch.setattr(machine.storages, name, by)
        far = machine.run("combined", x, dt, rates, b, c, 40, d, z, **options)
        for one, other in zip(near, far, strict=True):
            assert torch.equal(one, other)
