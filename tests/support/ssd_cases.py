"""Arguments of the SSD scan, random and small, by name."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ssd_reference import scan


def operands(
    *,
    batch: int = 2,
    seqlen: int = 11,
    groups: int = 2,
    ratio: int = 2,
    headdim: int = 3,
    dstate: int = 5,
    seed: int = 0,
) -> dict[str, Any]:
    """Random required arguments in float64, by name; dt is positive."""
    generator = torch.Generator().manual_seed(seed)
    heads = groups * ratio

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    return {
        "x": normal(batch, seqlen, heads, headdim),
        "dt": normal(batch, seqlen, heads).exp() / 4,
        "A": -normal(heads).exp(),
        "B": normal(batch, seqlen, groups, dstate),
        "C": normal(batch, seqlen, groups, dstate),
    }


def options(required: dict[str, Any], *, seed: int = 1) -> dict[str, Any]:
    """Random optional tensors that fit, by name."""
    batch, seqlen, heads, headdim = required["x"].shape
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    return {
        "D": normal(heads),
        "z": normal(batch, seqlen, heads, headdim),
        "dt_bias": normal(heads),
        "initial_states": normal(batch, heads, headdim, required["B"].shape[-1]),
    }


def run(**arguments: Any) -> tuple[Tensor, Tensor]:
    """Out and final states."""
    out, final = scan(**arguments, return_final_states=True)
    return out, final


def indices(*lengths: int) -> Tensor:
    """seq_idx of one row: 0, 1, ... for so many tokens each."""
    parts = [torch.full((length,), i, dtype=torch.int32) for i, length in enumerate(lengths)]
    return torch.cat(parts).unsqueeze(0)


def tokens(arguments: dict[str, Any], start: int, end: int) -> dict[str, Any]:
    """The arguments of a stretch of tokens."""
    per_token = {"x", "dt", "B", "C", "z", "seq_idx"}
    return {k: v[:, start:end] if k in per_token else v for k, v in arguments.items()}
