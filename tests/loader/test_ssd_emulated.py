"""Whole scans, as the loader plans them, run through the PTX of their kernels with no GPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from sonata_aot.artifacts import open_artifacts
from sonata_aot.loader.ssd_occupancy import Cut
from ssd_cases import indices
from ssd_emulated import Emulated
from ssd_reference import scan

BF16 = torch.bfloat16
# Relative L2 errors of out and states; few elements are sometimes further off.
BOUND = 4e-3


@pytest.fixture(scope="module")
def emulated(ssd_artifacts: Path) -> Emulated:
    return Emulated(open_artifacts(ssd_artifacts), "sm90")


def problem(
    batch: int = 1, seqlen: int = 70, heads: int = 2, headdim: int = 64, dstate: int = 128
) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(seqlen)

    def normal(*shape: int, dtype: torch.dtype = BF16) -> Tensor:
        return torch.randn(*shape, generator=generator).to(dtype)

    return {
        "x": normal(batch, seqlen, heads, headdim),
        "dt": normal(batch, seqlen, heads),
        # So slow that what is handed on from tile to tile counts.
        "A": -normal(heads, dtype=torch.float32).exp() / 100,
        "B": normal(batch, seqlen, 1, dstate),
        "C": normal(batch, seqlen, 1, dstate),
        "dt_bias": normal(heads, dtype=torch.float32) - 2,
        "dt_softplus": True,
        "return_final_states": True,
    }


def check(emulated: Emulated, arguments: dict[str, Any], *launched: str) -> None:
    found = emulated(**arguments)
    wanted = scan(**arguments)
    assert isinstance(wanted, tuple)
    for number, (mine, its) in enumerate(zip(found, wanted, strict=True)):
        error = (mine.double() - its).norm() / its.norm().clamp(min=1e-9)
        assert error <= BOUND, f"result {number} is off by {error:.1e}"
    if launched:
        assert emulated.launched == [f"ssd_{name}" for name in launched]


def test_a_plain_scan(emulated: Emulated):
    check(emulated, problem(2, 70), "prepare", "scan")


def test_options(emulated: Emulated):
    arguments = problem(1, 66)
    arguments["D"] = torch.randn(2, 64)
    arguments["z"] = torch.randn(1, 66, 2, 64).to(BF16)
    arguments["initial_states"] = torch.randn(1, 2, 64, 128).half()
    arguments["dt_limit"] = (0.01, 0.5)
    check(emulated, arguments, "prepare", "scan")


def test_a_head_in_slices(emulated: Emulated):
    check(emulated, problem(1, 40, headdim=128, dstate=16), "prepare", "scan")


def test_rows_that_are_not_aligned(emulated: Emulated):
    rows = torch.full((2, 40, 420), float("nan"), dtype=BF16)
    parts = rows[..., 3:387].normal_().split([128, 128, 128], dim=-1)
    arguments = problem(2, 40)
    arguments["x"] = parts[0].unflatten(-1, (2, 64))
    arguments["B"], arguments["C"] = (part.unsqueeze(2) for part in parts[1:])
    arguments["A"] = arguments["A"].repeat_interleave(3)[::3]
    check(emulated, arguments, "copy", "copy", "copy", "prepare", "scan")


def cut(emulated: Emulated, monkeypatch: pytest.MonkeyPatch, segments: int, ratio: int = 1) -> None:
    monkeypatch.setattr(
        emulated.planner, "cut", lambda blocks, tiles, room: Cut.of(tiles, segments, ratio)
    )


@pytest.mark.parametrize(("segments", "ratio"), [(3, 1), (2, 2), (3, 2)])
@pytest.mark.parametrize("initial", [False, True])
def test_segments(
    emulated: Emulated,
    monkeypatch: pytest.MonkeyPatch,
    segments: int,
    ratio: int,
    initial: bool,
):
    cut(emulated, monkeypatch, segments, ratio)
    arguments = problem(2, 64 * segments * ratio - 40)
    if initial:
        arguments["initial_states"] = torch.randn(2, 2, 64, 128)
    check(emulated, arguments, "prepare", "scan", "pass", "scan")


def test_errors_would_show(emulated: Emulated, monkeypatch: pytest.MonkeyPatch):
    """What these tests compare depends on the state that goes from segment to segment."""
    cut(emulated, monkeypatch, 3)
    monkeypatch.setattr(emulated, "left_out", "ssd_pass")
    with pytest.raises(AssertionError, match="is off by"):
        check(emulated, problem(1, 150))


@pytest.mark.parametrize("segments", [1, 2])
def test_sequences(emulated: Emulated, monkeypatch: pytest.MonkeyPatch, segments: int):
    cut(emulated, monkeypatch, segments)
    lengths = (5, 0, 60, 35)
    arguments = problem(1, 100) | {"return_varlen_states": True}
    arguments["seq_idx"] = indices(*lengths)
    arguments["cu_seqlens"] = torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0).int()
    arguments["initial_states"] = torch.randn(1, 2, 64, 128).to(BF16)
    check(emulated, arguments)


def test_no_tokens(emulated: Emulated):
    arguments = problem(1, 0) | {"initial_states": torch.randn(1, 2, 64, 128)}
    check(emulated, arguments, "scan")
