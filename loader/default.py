"""The process's kernels: those that it loaded first."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..artifacts.errors import SonataError

if TYPE_CHECKING:
    from torch import Tensor

    from .kernels import Kernels

_default: Kernels | None = None


def offer_default(kernels: Kernels) -> None:
    """Make these the process's kernels, unless it has some."""
    global _default
    if _default is None:
        _default = kernels


def set_default(kernels: Kernels) -> None:
    """Make these the kernels of `loader.linear`, `loader.patch` and `torch.ops.sonata_aot`.

    The first `load` has done so. As compiled programs may hold operators, it cannot be changed.

    Raises:
        SonataError: others are the default.
    """
    offer_default(kernels)
    if get_default("set_default") is not kernels:
        raise SonataError(
            f"set_default: this process's kernels are {_default!r}, not {kernels!r}",
            remedy="load what the operators shall use first, or pass kernels explicitly",
        )


def is_default(kernels: Kernels) -> bool:
    """Whether operators use these kernels."""
    return kernels is _default


def get_default(user: str) -> Kernels:
    """The process's kernels, for `user` to name in the error.

    Raises:
        SonataError: nothing was loaded.
    """
    if _default is None:
        raise SonataError(f"{user}: no kernels are loaded", remedy="call loader.load() first")
    return _default


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """X @ weight.T + bias, by the kernels that the process loaded first; see `Kernels.linear`.

    Raises:
        SonataError: nothing was loaded.
    """
    return get_default("linear").linear(x, weight, bias)
