"""`Kernels.linear`: the skinny GEMV where it applies, torch.nn.functional.linear elsewhere."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from .gemv import Gemv
from .gemv_plan import MOST_ROWS
from .tensors import DTYPES, LARGEST

# Subclasses may mean something else by the same numbers.
_PLAIN = (Tensor, torch.nn.Parameter)

# Why a call is torch's.
WATCHED = "compiled, traced or transformed by torch"
SUBCLASS = "tensor subclasses"
ELSEWHERE = "tensors not on a device with kernels"
DTYPE = "dtypes without kernels, or mixed"
MISFIT = "sizes that do not fit"
ROWS = f"more than {MOST_ROWS} rows, or none"
LAYOUT = "layouts that kernels do not read"
AUTOCAST = "autocast"
GRADIENT = "a gradient was asked for"
COMPUTED = "a weight or bias that is computed, or is no parameter"
REPLACED = "the class's forward was replaced"


def is_plain(tensor: object) -> bool:
    """Whether an argument is a tensor that is nothing but its elements."""
    return type(tensor) in _PLAIN


def device_of(tensor: Tensor) -> int | None:
    """The number of the CUDA device that a tensor is on."""
    return tensor.get_device() if tensor.is_cuda else None


def choose_linear(
    gemv: Gemv | None, devices: frozenset[int], x: Tensor, weight: Tensor, bias: Tensor | None
) -> Tensor:
    """See `Kernels.linear`."""
    if gemv is None or why_not(devices, x, weight, bias) is not None:
        return torch.nn.functional.linear(x, weight, bias)
    if x.dim() == 2 and x.stride(1) == 1:
        return gemv(x, weight, bias)
    return gemv(as_rows(x), weight, bias).view(*x.shape[:-1], weight.shape[0])


def as_rows(x: Tensor) -> Tensor:
    """X as (M, K) whose rows are contiguous.

    Few rows, so a copy costs little where they do not lie as the kernel needs them.
    """
    return x.reshape(-1, x.shape[-1]).contiguous()


def why_not(devices: frozenset[int], x: Tensor, weight: Tensor, bias: Tensor | None) -> str | None:
    """Why the GEMV would not compute what F.linear would; None if it would.

    What is wrong with a call F.linear says.
    """
    if is_watched():
        return WATCHED
    if not (is_plain(x) and is_plain(weight) and (bias is None or is_plain(bias))):
        return SUBCLASS
    if device_of(x) not in devices:
        return ELSEWHERE
    if x.dtype not in DTYPES:
        return DTYPE
    if x.is_nested or x.dim() == 0 or weight.dim() != 2:
        return MISFIT
    k, (n, weight_k) = x.shape[-1], weight.shape
    if not (k == weight_k and 1 <= n <= LARGEST and 1 <= k <= LARGEST):
        return MISFIT
    if not 1 <= x.numel() // k <= MOST_ROWS:
        return ROWS
    if bias is not None and bias.shape != (n,):
        return MISFIT
    for tensor in (x, weight) if bias is None else (x, weight, bias):
        if tensor.dtype is not x.dtype:
            return DTYPE
        if device_of(tensor) != device_of(x):
            return ELSEWHERE
        if not _is_readable(tensor):
            return LAYOUT
    if weight.stride(1) != 1 or (bias is not None and n != 1 and bias.stride(0) != 1):
        return LAYOUT
    if torch.is_autocast_enabled("cuda"):
        return AUTOCAST
    if torch.is_grad_enabled() and (
        x.requires_grad or weight.requires_grad or (bias is not None and bias.requires_grad)
    ):
        return GRADIENT
    return None


def fits_program(devices: frozenset[int], x: Tensor, weight: Tensor, bias: Tensor | None) -> bool:
    """What `why_not` asks, as far as it is known where a program is traced; without its reasons."""
    if x.dim() == 0 or weight.dim() != 2 or weight.stride(1) != 1:
        return False
    n, k = weight.shape
    if x.shape[-1] != k or not (1 <= n <= LARGEST and 1 <= k <= LARGEST):
        return False
    if bias is not None and (bias.shape != (n,) or (n != 1 and bias.stride(0) != 1)):
        return False
    if device_of(x) not in devices or x.dtype not in DTYPES or torch.is_autocast_enabled("cuda"):
        return False
    grad = torch.is_grad_enabled()
    for one in (x, weight) if bias is None else (x, weight, bias):
        if one.device != x.device or one.dtype != x.dtype or (grad and one.requires_grad):
            return False
        if is_traceable_wrapper_subclass(one):  # of no other subclass is anything seen
            return False
    return 1 <= row_count(x) <= MOST_ROWS


def row_count(x: Tensor) -> int:
    """M of (..., K); in a loop, which a program with unknown sizes can be traced through."""
    rows = 1
    for size in x.shape[:-1]:
        rows = rows * size
    return rows


def is_watched() -> bool:
    """Whether torch is to see the operation itself: to compile, trace or transform it."""
    return (
        torch.compiler.is_compiling()
        or torch._C._len_torch_dispatch_stack() > 0
        or torch._C._get_tracing_state() is not None
        or torch._C._functorch.peek_interpreter_stack() is not None  # pyright: ignore[reportAttributeAccessIssue]
        or forward_ad._current_level >= 0
    )


def _is_readable(tensor: Tensor) -> bool:
    """Whether a tensor has elements in memory that a kernel can read as they are."""
    return (
        tensor.layout is torch.strided
        and not tensor.is_neg()
        and tensor.data_ptr() != 0
        and tensor.data_ptr() % tensor.element_size() == 0
    )
