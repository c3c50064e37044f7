"""A small module to patch, and what tests of that ask of reports."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

K, N = 16, 8


class Block(nn.Module):
    """Two projections after one another, and one that nobody calls."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(K, N)
        self.down = nn.Linear(N, K, bias=False)
        self.wide = nn.Linear(K, N, dtype=torch.float32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.up(x))


def x_of(*shape: int) -> torch.Tensor:
    """Random rows for a Block."""
    return torch.randn(*shape, K, dtype=torch.bfloat16)


def counts(report: Any, module: str) -> tuple[int, dict[str, int]]:
    """Calls that a kernel answered, and the others by reason."""
    entry = next(entry for entry in report if entry.module == module)
    return entry.calls, dict(entry.original_calls)


def block() -> Block:
    """One in bfloat16 but for what is not called, without gradients."""
    made = Block().to(torch.bfloat16).requires_grad_(False)
    made.wide.float()
    return made
