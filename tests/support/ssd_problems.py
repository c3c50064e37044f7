"""Scans for tests on a GPU: data among NaN, the answer in float64, and how far a result is off."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import pytest

from sonata_aot.aot.measure.ssd_chunked import scan_in_chunks
from sonata_aot.loader.ssd_occupancy import Cut

torch: Any = pytest.importorskip("torch")

NAN = float("nan")
DTYPES = {"bf16": torch.bfloat16, "f16": torch.float16}
# Relative L2 errors, of out and of states. Rounding once gives 1.66e-3 in bfloat16, and at most
# 2^-7 / sqrt(12), which is 2.26e-3: where all that counts is just above a power of two. Out may
# come of three roundings that do not know of each other: of weights, of the state and of itself.
BOUNDS = {torch.bfloat16: (2.9e-3, 2.3e-3), torch.float16: (4e-4, 3.5e-4)}
# How much further off a result of few elements may be by chance.
SMALL = 1.3


def among_nan(*shape: int, dtype: Any, after: int = 8) -> Any:
    """A tensor to be filled, with NaN before and after it and after each of its rows' tokens."""
    batch, tokens, *inner = shape
    padded = (batch, tokens + 3, *inner[:-1], inner[-1] + after)
    whole = torch.full(padded, NAN, device="cuda", dtype=dtype)
    return whole[:, :tokens, ..., : inner[-1]]


def problem(
    batch: int = 2,
    seqlen: int = 128,
    heads: int = 4,
    headdim: int = 64,
    dstate: int = 128,
    groups: int = 1,
    dtype: Any = torch.bfloat16,
    **options: Any,
) -> dict[str, Any]:
    """Arguments by name, random, each among NaN; `options` are made if they name a tensor.

    `D=True` is per head and `D="channels"` per channel; `initial_states` is a dtype.
    """

    def normal(*shape: int, kind: Any = dtype) -> Any:
        tensor = among_nan(*shape, dtype=kind)
        return tensor.copy_(torch.randn(shape, device="cuda"))

    made = {
        "x": normal(batch, seqlen, heads, headdim),
        "dt": normal(batch, seqlen, heads, kind=torch.float32),
        "A": -torch.empty(heads, device="cuda").uniform_(1.0, 16.0),
        "B": normal(batch, seqlen, groups, dstate),
        "C": normal(batch, seqlen, groups, dstate),
        "chunk_size": 64,
        "dt_bias": torch.empty(heads, device="cuda").uniform_(-6.9, -2.3),
        "dt_softplus": True,
        "return_final_states": True,
    }
    if options.pop("z", False):
        made["z"] = normal(batch, seqlen, heads, headdim)
    if (shape := options.pop("D", None)) is not None:
        made["D"] = torch.randn(
            (heads, headdim) if shape == "channels" else (heads,), device="cuda"
        )
    if (kind := options.pop("initial_states", None)) is not None:
        states = torch.randn(batch, heads, headdim, dstate, device="cuda")
        made["initial_states"] = (states / 4).to(kind)
    return {**made, **options}


def sequences(*lengths: int) -> dict[str, Any]:
    """seq_idx and cu_seqlens of one row with sequences of so many tokens."""
    counts = torch.tensor(lengths, device="cuda")
    index = torch.arange(len(lengths), device="cuda", dtype=torch.int32)
    bounds = torch.nn.functional.pad(counts.cumsum(0), (1, 0)).int()
    return {"seq_idx": index.repeat_interleave(counts)[None], "cu_seqlens": bounds}


def tuple_of(returned: Any) -> tuple[Any, ...]:
    return returned if isinstance(returned, tuple) else (returned,)


def error(found: Any, wanted: Any) -> float:
    """Relative L2 error; infinite where anything is not finite."""
    size = wanted.double().norm()
    apart = (found.double() - wanted.double()).norm()
    value = float(apart / size) if size else float(apart)
    return value if value == value else float("inf")


def errors(returned: Any, arguments: Mapping[str, Any]) -> list[float]:
    """The error of each result, in order."""
    wanted = tuple_of(scan_in_chunks(**arguments))
    found = tuple_of(returned)
    assert [tuple(t.shape) for t in found] == [tuple(t.shape) for t in wanted]
    return [error(f, w) for f, w in zip(found, wanted, strict=True)]


def check(
    kernels: Any,
    arguments: Mapping[str, Any],
    case: object = "",
    slack: float = 1.0,
    more: float = 0.0,
) -> Any:
    """Run a scan, hold its dtypes and errors against what they must be, and return its results.

    Errors may be `slack` times the usual ones, and `more`.
    """
    returned = kernels.mamba_chunk_scan_combined(**arguments)
    found = tuple_of(returned)
    x = arguments["x"]
    assert found[0].dtype is x.dtype
    assert found[0].is_contiguous()
    if arguments.get("return_final_states"):
        assert found[1].dtype is torch.float32
    out, states = BOUNDS[x.dtype]
    few = SMALL if x.numel() < 2**16 else 1.0
    for number, wrong in enumerate(errors(returned, arguments)):
        # States at the ends of sequences are rounded once more.
        rounded = 1.4 if number and found[number].dtype is x.dtype else 1.0
        bound = (states if number else out) * few * slack * rounded + more
        assert wrong <= bound, f"{case}: result {number} is off by {wrong:.2e}, over {bound:.2e}"
    return returned


@contextmanager
def segments(kernels: Any, count: int, ratio: int = 1) -> Iterator[None]:
    """Have sequences cut into `count` segments, of `ratio` parts, as far as they have tiles."""
    scan = kernels.mamba_chunk_scan_combined
    planner, kept = scan._planner, scan._planner.cut
    planner.cut = lambda blocks, tiles, room: Cut.of(tiles, min(count, tiles), ratio)
    scan._plans.clear()
    try:
        yield
    finally:
        planner.cut = kept
        scan._plans.clear()


def pairs(kernels: Any, dtype: str) -> list[tuple[int, int]]:
    """Headdim and dstate of what was built."""
    found = kernels.table("ssd_scan").all().values()
    variants = [loaded.binary.variant for loaded in found]
    return sorted({(v["headdim"], v["dstate"]) for v in variants if v["dtype"] == dtype})
