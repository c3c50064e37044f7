"""The stages of the SSD scan on a GPU: against float64, and against mamba_ssm's own stages.

Inputs are slices of buffers of NaN. Stages of mamba_ssm are compared with where it is installed, in
its deterministic mode, which spares the minute that its autotuning takes.
"""

from __future__ import annotations

import importlib
import warnings
from dataclasses import dataclass
from typing import Any

import pytest

import ssd_reference
import ssd_stage_reference as reference
from gemv_cases import DTYPES, NAN, need_memory, torch
from sonata_aot.aot.measure import mamba_opponent
from sonata_aot.artifacts.errors import MissingDependency
from sonata_aot.loader import Kernels

# What one rounding to the dtype leaves, as a relative L2 error, with room for three of them.
ROUNDED = {torch.bfloat16: 4e-3, torch.float16: 5e-4}
EXACT = 1e-6


def random(*shape: int, dtype: Any = torch.float32) -> Any:
    return torch.randn(*shape, device="cuda").to(dtype)


def slice_of(dtype: Any, batch: int, seqlen: int, *row: int, width: int = 0) -> Any:
    """Random rows, aligned to 16 bytes, in a buffer of NaN that has `width` more columns."""
    values = random(batch, seqlen, *row, dtype=dtype)
    columns = values[0, 0].numel()
    whole = -(-columns // 8) * 8 + 16 + width
    buffer = torch.full((batch, seqlen + 2, whole), NAN, device="cuda", dtype=dtype)
    part = buffer[:, 1:-1, 8 : 8 + columns].unflatten(2, row)
    return part.copy_(values)


@dataclass
class Problem:
    """Random arguments of a scan."""

    dtype: Any
    headdim: int
    dstate: int
    seqlen: int
    batch: int = 2
    heads: int = 4
    groups: int = 2

    def __post_init__(self) -> None:
        rows = (self.dtype, self.batch, self.seqlen)
        self.x = slice_of(*rows, self.heads, self.headdim)
        self.z = slice_of(*rows, self.heads, self.headdim)
        self.b = slice_of(*rows, self.groups, self.dstate)
        self.c = slice_of(*rows, self.groups, self.dstate)
        self.dt = slice_of(*rows, self.heads)
        self.rates = -random(self.heads).exp() / 4
        self.bias = random(self.heads) - 2
        self.d = random(self.heads)
        self.initial = random(self.batch, self.heads, self.headdim, self.dstate)

    def sequences(self, count: int) -> Any:
        tokens = torch.arange(self.seqlen, device="cuda")
        index = (tokens * count // self.seqlen).to(torch.int32)
        return index.expand(self.batch, -1).contiguous()


def error(found: Any, expected: Any) -> float:
    """Relative L2 error; what is not a number is infinitely wrong."""
    assert found.shape == expected.shape
    difference = (found.double() - expected).nan_to_num(nan=torch.inf).norm()
    return float(difference / expected.norm())


def sizes(kernels: Kernels) -> list[tuple[str, int, int]]:
    """Every dtype, headdim and dstate that were built."""
    found = kernels.table("ssd_chunk_scan").all().values()
    variants = [loaded.binary.variant for loaded in found]
    return sorted({(str(v["dtype"]), int(v["headdim"]), int(v["dstate"])) for v in variants})


@pytest.mark.parametrize("chunk_size", [256, 50])
@pytest.mark.parametrize("sequences", [1, 3])
def test_each_stage_of_every_size(kernels: Kernels, chunk_size: int, sequences: int):
    for dtype, headdim, dstate in sizes(kernels):
        problem = Problem(DTYPES[dtype], headdim, dstate, 700)
        seq = None if sequences == 1 else problem.sequences(sequences)
        case = f"{dtype} {headdim} {dstate}"
        for stage, found, expected, bound in answers(kernels.ssd, problem, chunk_size, seq):
            assert error(found, expected) < bound, f"{case} {stage}"


def answers(ssd: Any, problem: Problem, chunk_size: int, seq: Any):
    """Of each stage what it gives, what it should, and how far from it that may be."""
    x, b, c, rounded = problem.x, problem.b, problem.c, ROUNDED[problem.dtype]
    given = (problem.dt, problem.rates, chunk_size, problem.bias, True)
    decay, steps = ssd.chunk_cumsum(*given)
    sums, sizes = reference.chunk_cumsum(*given)
    yield "chunk_cumsum", decay, sums, EXACT
    yield "chunk_cumsum, dt", steps, sizes, EXACT
    products = ssd.bmm_chunk(c, b, chunk_size, seq, output_dtype=torch.float32)
    yield "bmm_chunk", products, reference.bmm_chunk(c, b, chunk_size, seq), EXACT
    added = ssd.chunk_state(b, x, steps, decay, seq)
    yield "chunk_state", added, reference.chunk_state(b, x, steps, decay, seq), rounded
    given = (added, decay[..., -1], problem.initial, seq, chunk_size)
    states, final = ssd.state_passing(*given)
    passed, ended = reference.state_passing(*given)
    yield "state_passing", states, passed, EXACT
    yield "state_passing, final", final, ended, EXACT
    given = (x, steps, decay, c, states, problem.d, problem.z, seq)
    causal = ssd.bmm_chunk(c, b, chunk_size, seq, True, torch.float32)
    out = ssd.chunk_scan(causal, *given)
    yield "chunk_scan", out, reference.chunk_scan(products, *given), rounded


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("chunk_size", [1, 40, 256])
def test_the_scan_made_of_them(kernels: Kernels, dtype: str, chunk_size: int):
    problem = Problem(DTYPES[dtype], 64, 128, 300)
    for options in (
        {},
        {"D": problem.d, "z": problem.z},
        {"initial_states": problem.initial.bfloat16(), "seq_idx": problem.sequences(4)},
    ):
        given = (problem.x, problem.dt, problem.rates, problem.b, problem.c, chunk_size)
        options |= {"dt_bias": problem.bias, "dt_softplus": True, "return_final_states": True}
        found = kernels.ssd.combined(*given, **options)
        for one, expected in zip(found, ssd_reference.scan(*given, **options), strict=True):
            assert error(one, expected) < ROUNDED[problem.dtype]


def test_equal_inputs_give_equal_bits(kernels: Kernels):
    problem = Problem(torch.bfloat16, 64, 128, 1000)
    given = (problem.x, problem.dt, problem.rates, problem.b, problem.c, 256, problem.d)
    first = kernels.ssd.combined(*given, dt_softplus=True)
    for _ in range(20):
        assert torch.equal(kernels.ssd.combined(*given, dt_softplus=True), first)


def test_a_graph_takes_new_inputs(kernels: Kernels):
    problem, other = (Problem(torch.bfloat16, 64, 128, 500) for _ in range(2))
    given = (problem.x, problem.dt, problem.rates, problem.b, problem.c, 256, problem.d)
    seq = problem.sequences(3)
    options = {"z": problem.z, "seq_idx": seq, "dt_softplus": True, "return_final_states": True}
    kernels.ssd.combined(*given, **options)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = kernels.ssd.combined(*given, **options)
    for name in ("x", "dt", "b", "c", "z"):
        getattr(problem, name).copy_(getattr(other, name))
    seq.copy_(problem.sequences(5))
    graph.replay()
    for found, expected in zip(captured, kernels.ssd.combined(*given, **options), strict=True):
        assert torch.equal(found, expected)


def test_offsets_of_600_000_tokens_in_a_projection(kernels: Kernels):
    """Against the same tokens in two parts, of which the second lies elsewhere."""
    need_memory(24 << 30)
    seqlen, last, heads = 600_000, 3_000, 2
    rows = torch.zeros(seqlen, 8512, device="cuda", dtype=torch.bfloat16)
    assert rows.numel() > 2**31
    rows[:, 4096:4864].normal_()
    x = rows[:, 4096:4224].view(1, seqlen, heads, 64)
    b = rows[:, 4352:4480].view(1, seqlen, 1, 128)
    c = rows[:, 4608:4736].view(1, seqlen, 1, 128)
    dt = rows[:, 4800:4802].unsqueeze(0)
    rates = -random(heads).exp()
    tensors = (x, dt, b, c)

    def scan(tensors: Any, initial: Any = None) -> Any:
        x, dt, b, c = tensors
        options = {"initial_states": initial, "dt_softplus": True, "return_final_states": True}
        return kernels.ssd.combined(x, dt, rates, b, c, 256, **options)

    out, final = scan(tensors)
    _, before = scan([t[:, :-last] for t in tensors])
    copies = [t[:, -last:].contiguous() for t in tensors]
    out_after, final_after = scan(copies, before)
    assert error(out[:, -last:], out_after.double()) < ROUNDED[torch.bfloat16]
    assert error(final, final_after.double()) < ROUNDED[torch.bfloat16]
    x, dt, b, c = copies
    options = {"initial_states": before, "dt_softplus": True, "return_final_states": True}
    expected = ssd_reference.scan(x, dt, rates, b, c, **options)
    assert error(out[:, -last:], expected[0]) < ROUNDED[torch.bfloat16]


@pytest.fixture(scope="module")
def mamba() -> dict[str, Any]:
    """mamba_ssm's stages by our names."""
    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings():
        patch.setenv("MAMBA_DETERMINISTIC", "1")
        warnings.simplefilter("ignore")
        try:
            mamba_opponent.load()
        except MissingDependency as error:
            pytest.skip(str(error))
        found = {}
        for name, module in (
            ("chunk_cumsum", "ssd_chunk_state"),
            ("bmm_chunk", "ssd_bmm"),
            ("chunk_state", "ssd_chunk_state"),
            ("state_passing", "ssd_state_passing"),
            ("chunk_scan", "ssd_chunk_scan"),
        ):
            imported = importlib.import_module(f"mamba_ssm.ops.triton.{module}")
            found[name] = getattr(imported, f"_{name}_fwd")
    return found


@pytest.mark.parametrize("sequences", [1, 3])
def test_no_stage_is_less_exact_than_mamba_ssms(
    kernels: Kernels, mamba: dict[str, Any], sequences: int
):
    problem = Problem(torch.bfloat16, 64, 128, 900, heads=8, groups=1)
    x, b, c, z = (t.contiguous() for t in (problem.x, problem.b, problem.c, problem.z))
    seq, ssd = None if sequences == 1 else problem.sequences(sequences), kernels.ssd
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        given = (problem.dt, problem.rates, 256, problem.bias, True)
        expected = reference.chunk_cumsum(*given)
        theirs = mamba["chunk_cumsum"](*given)
        for one, other, exact in zip(ssd.chunk_cumsum(*given), theirs, expected, strict=True):
            compare("chunk_cumsum", one, other, exact, least=2e-7)
        decay, steps = ssd.chunk_cumsum(*given)

        exact = reference.bmm_chunk(c, b, 256, seq)
        other = mamba["bmm_chunk"](c, b, 256, seq_idx=seq, output_dtype=torch.float32)
        products = ssd.bmm_chunk(c, b, 256, seq, output_dtype=torch.float32)
        compare("bmm_chunk", products, other, exact, least=2e-7)

        other = mamba["chunk_state"](b, x, steps, decay, seq_idx=seq)
        exact = reference.chunk_state(b, x, steps, decay, seq)
        added = ssd.chunk_state(b, x, steps, decay, seq)
        compare("chunk_state", added, other, exact)

        ends, initial = decay[..., -1], problem.initial
        other = mamba["state_passing"](
            added.flatten(3), ends, initial.flatten(2), seq_idx=seq, chunk_size=256
        )
        exact = reference.state_passing(added, ends, initial, seq, 256)
        found = ssd.state_passing(added, ends, initial, seq, 256)
        compare("state_passing", found[0], other[0].view_as(found[0]), exact[0], least=2e-7)
        compare("state_passing", found[1], other[1].view_as(found[1]), exact[1], least=2e-7)

        states = found[0].bfloat16()
        given = (x, steps, decay, c, states)
        other, _ = mamba["chunk_scan"](products, *given, D=problem.d, z=z, seq_idx=seq)
        out = ssd.chunk_scan(products, *given, problem.d, z, seq)
        exact = reference.chunk_scan(products, *given, problem.d, z, seq)
        compare("chunk_scan", out, other, exact)


def compare(stage: str, ours: Any, theirs: Any, exact: Any, *, least: float = 0.0) -> None:
    """No less exact; what is left of fp32 sums in another order does not count."""
    assert error(ours, exact) <= max(1.02 * error(theirs, exact), least), stage
