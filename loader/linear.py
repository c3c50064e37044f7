"""`linear`: the skinny GEMV where it applies, and `torch.nn.functional.linear` elsewhere."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..artifacts.errors import SonataError
from . import runtime
from .gemv import DTYPES, Gemv
from .gemv_plan import MOST_ROWS

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


def choose_linear(
    gemv: Gemv | None, devices: tuple[int, ...], x: Tensor, weight: Tensor, bias: Tensor | None
) -> Tensor:
    """See `Kernels.linear`."""
    import torch

    rows = x.numel() // x.shape[-1] if x.dim() and x.shape[-1] else 0
    if gemv is None or not _applies(torch, devices, rows, x, weight, bias):
        return torch.nn.functional.linear(x, weight, bias)
    flat = x.reshape(rows, x.shape[-1])
    # Elements of a row that lie apart: rare, and a copy of x is small beside the weight.
    out = gemv(flat if flat.stride(1) == 1 else flat.contiguous(), weight, bias)
    return out.view(*x.shape[:-1], weight.shape[0])


def _applies(
    torch: runtime.Torch,
    devices: tuple[int, ...],
    rows: int,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
) -> bool:
    """Whether the GEMV computes what F.linear would; what is wrong with a call F.linear says."""
    if torch.compiler.is_compiling() or torch.is_autocast_enabled(x.device.type):
        return False
    given = [x, weight] if bias is None else [x, weight, bias]
    return (
        1 <= rows <= MOST_ROWS
        and weight.dim() == 2
        and weight.shape[0] > 0
        and weight.shape[1] == x.shape[-1]
        and (bias is None or bias.shape == weight.shape[:1])
        and x.device.type == "cuda"
        and x.device.index in devices
        and runtime.dtype_name(x.dtype) in DTYPES
        and all(
            # Subclasses may mean something else by the same numbers.
            type(tensor) in (torch.Tensor, torch.nn.Parameter)
            and tensor.dtype == x.dtype
            and tensor.device == x.device
            and tensor.layout == torch.strided
            and not tensor.is_neg()
            and tensor.data_ptr() != 0
            and (tensor.stride(-1) == 1 or tensor.shape[-1] == 1)
            for tensor in given[1:]
        )
        and type(x) in (torch.Tensor, torch.nn.Parameter)
        and x.layout == torch.strided
        and not x.is_neg()
        and not (torch.is_grad_enabled() and any(tensor.requires_grad for tensor in given))
    )
