"""Inputs and outputs of the GEMVs that are measured, and whether an output is right."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ...artifacts.errors import SonataError
from . import timing
from .shapes import Shape

DTYPES = {"bf16": torch.bfloat16, "f16": torch.float16}
# Rounding to bf16 once moves each element by at most this much of itself.
WORST_ERROR = 2**-8
# Elements between the starts of two weights in the buffer are a multiple of this.
_ALIGNMENT = 128


class WrongResult(SonataError):
    """What was measured computed something else."""


class Rotation:
    """One buffer of random numbers, in which weights of any shape lie one after another.

    A pass over the weights of a shape reads at least `rotation` bytes, so that none of them is
    still in the L2 cache when its turn comes again, but for a share of at most the cache's size.
    """

    def __init__(
        self, shapes: Sequence[Shape], dtype: str, device: str, rotation: int = timing.FULL.rotation
    ) -> None:
        """Fill a buffer that is large enough for each of the shapes."""
        self._rotation = rotation
        elements = max(self._count(shape) * self._stride(shape) for shape in shapes)
        self._buffer = torch.empty(elements, dtype=DTYPES[dtype], device=device).normal_()

    def _count(self, shape: Shape, rotation: int | None = None) -> int:
        return timing.copies(shape.bytes, rotation or self._rotation)

    @staticmethod
    def _stride(shape: Shape) -> int:
        return -(-shape.n * shape.k // _ALIGNMENT) * _ALIGNMENT

    def weights(self, shape: Shape, rotation: int | None = None) -> list[torch.Tensor]:
        """The weights of a shape, over the whole rotation or a smaller one."""
        count, stride = self._count(shape, rotation), self._stride(shape)
        size = shape.n * shape.k
        return [
            self._buffer[i * stride : i * stride + size].view(shape.n, shape.k)
            for i in range(count)
        ]

    def activations(self, m: int, k: int) -> torch.Tensor:
        """Random x."""
        return torch.randn(m, k, device=self._buffer.device, dtype=self._buffer.dtype)

    def bias(self, n: int) -> torch.Tensor:
        """A random bias, as large as what it is added to."""
        return 10 * torch.randn(n, device=self._buffer.device, dtype=self._buffer.dtype)


class Outputs:
    """One output for each weight, NaN until it is written."""

    def __init__(self, x: torch.Tensor, n: int, count: int) -> None:
        """Allocate and poison."""
        self.all = x.new_empty((count, x.shape[0], n))
        self.each = list(self.all)
        self.poison()

    def poison(self) -> None:
        """Forget what was written: only what comes from now on counts."""
        self.all.fill_(float("nan"))


class References:
    """x @ weight.T + bias of each weight in float64."""

    def __init__(
        self, x: torch.Tensor, weights: Sequence[torch.Tensor], bias: torch.Tensor | None = None
    ) -> None:
        """Compute them."""
        wide = x.double()
        self._all = torch.stack([wide @ weight.double().T for weight in weights])
        if bias is not None:
            self._all += bias.double()

    def error(self, found: torch.Tensor, case: str) -> float:
        """Relative L2 error over all outputs, stacked.

        Raises:
            WrongResult: one of them was not written, or is further off than rounding explains.
        """
        off = torch.linalg.vector_norm(found.double() - self._all, dim=(1, 2))
        of = torch.linalg.vector_norm(self._all, dim=(1, 2))
        worst = float((off / of).max())  # NaN where any is
        if not worst <= WORST_ERROR:
            raise WrongResult(
                f"{case}: a replay left something wrong: relative error {worst:.3g}",
                remedy="the kernel or the measurement is wrong: please report it with this message",
            )
        return float(torch.linalg.vector_norm(off) / torch.linalg.vector_norm(of))
