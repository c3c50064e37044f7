"""`Kernels.linear`: the skinny GEMV where it applies, torch.nn.functional.linear elsewhere."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.autograd import forward_ad

from .gemv import Gemv
from .gemv_plan import MOST_ROWS
from .tensors import DTYPES, LARGEST

# Subclasses may mean something else by the same numbers.
_PLAIN = (Tensor, torch.nn.Parameter)


def is_plain(tensor: object) -> bool:
    """Whether an argument is a tensor that is nothing but its elements."""
    return type(tensor) in _PLAIN


def choose_linear(
    gemv: Gemv | None, devices: frozenset[int], x: Tensor, weight: Tensor, bias: Tensor | None
) -> Tensor:
    """See `Kernels.linear`."""
    if gemv is None or not _applies(devices, x, weight, bias):
        return torch.nn.functional.linear(x, weight, bias)
    if x.dim() == 2 and x.stride(1) == 1:
        return gemv(x, weight, bias)
    # Few rows, so a copy costs little where they do not lie as the kernel needs them.
    out = gemv(x.reshape(-1, x.shape[-1]).contiguous(), weight, bias)
    return out.view(*x.shape[:-1], weight.shape[0])


def _applies(devices: frozenset[int], x: Tensor, weight: Tensor, bias: Tensor | None) -> bool:
    """Whether the GEMV computes what F.linear would; what is wrong with a call F.linear says."""
    if _is_watched() or not (is_plain(x) and is_plain(weight) and (bias is None or is_plain(bias))):
        return False
    if not x.is_cuda or x.get_device() not in devices or x.dtype not in DTYPES:
        return False
    if x.is_nested or x.dim() == 0 or weight.dim() != 2:
        return False
    k, (n, weight_k) = x.shape[-1], weight.shape
    return (
        k == weight_k
        and 1 <= n <= LARGEST
        and 1 <= k <= LARGEST
        and 1 <= x.numel() // k <= MOST_ROWS
        and (bias is None or bias.shape == (n,))
        and _is_readable(x, x)
        and _is_readable(weight, x)
        and weight.stride(1) == 1
        and (bias is None or (_is_readable(bias, x) and (n == 1 or bias.stride(0) == 1)))
        and not torch.is_autocast_enabled("cuda")
        and not (
            torch.is_grad_enabled()
            and (
                x.requires_grad or weight.requires_grad or (bias is not None and bias.requires_grad)
            )
        )
    )


def _is_watched() -> bool:
    """Whether torch is to see the operation itself: to compile, trace or transform it."""
    return (
        torch.compiler.is_compiling()
        or torch._C._len_torch_dispatch_stack() > 0
        or torch._C._get_tracing_state() is not None
        or torch._C._functorch.peek_interpreter_stack() is not None  # pyright: ignore[reportAttributeAccessIssue]
        or forward_ad._current_level >= 0
    )


def _is_readable(tensor: Tensor, x: Tensor) -> bool:
    """Whether a tensor like x has elements in memory that a kernel can read as they are."""
    return (
        tensor.dtype is x.dtype
        and tensor.is_cuda
        and tensor.get_device() == x.get_device()
        and tensor.layout is torch.strided
        and not tensor.is_neg()
        and tensor.data_ptr() != 0
        and tensor.data_ptr() % tensor.element_size() == 0
    )
