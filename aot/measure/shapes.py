"""The shapes that are measured."""

from __future__ import annotations

import re
from dataclasses import dataclass

from ...artifacts.errors import UsageError


@dataclass(frozen=True)
class Shape:
    """A weight matrix of `n` rows of `k` 16-bit elements."""

    n: int
    k: int

    @property
    def bytes(self) -> int:
        """What reading it once moves."""
        return 2 * self.n * self.k

    def __str__(self) -> str:
        return f"{self.n}x{self.k}"

    @classmethod
    def parse(cls, text: str) -> Shape:
        """From `2048x4096`.

        Raises:
            UsageError: it is not of that form.
        """
        match = re.fullmatch(r"([1-9][0-9]{0,9})x([1-9][0-9]{0,9})", text.strip().lower())
        if match is None:
            raise UsageError(f"shape {text!r}", remedy="write N x K as 2048x4096")
        return cls(int(match[1]), int(match[2]))


# Projections of Mamba2, Zonos and Llama-like layers, a vocabulary, and two small ones.
DEFAULT_SHAPES = tuple(
    Shape(n, k)
    for n, k in (
        (256, 2048),
        (1024, 2048),
        (2048, 4096),
        (2048, 8192),
        (4096, 4096),
        (8512, 2048),
        (16384, 2048),
        (4096, 14336),
        (14336, 4096),
        (50288, 2560),
    )
)
DEFAULT_BATCHES = (1, 2, 4, 8)
