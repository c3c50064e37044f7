"""`loader.linear`: the linear of the kernels that the process loaded first."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..artifacts.errors import SonataError

if TYPE_CHECKING:
    from torch import Tensor

    from .kernels import Kernels

_default: Kernels | None = None


def set_default(kernels: Kernels) -> None:
    """Make these the process's kernels, unless it has some."""
    global _default
    if _default is None:
        _default = kernels


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """X @ weight.T + bias, by the kernels that the process loaded first; see `Kernels.linear`.

    Raises:
        SonataError: nothing was loaded.
    """
    if _default is None:
        raise SonataError("linear: no kernels are loaded", remedy="call loader.load() first")
    return _default.linear(x, weight, bias)
