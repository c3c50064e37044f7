"""Plain tensors of torch, read and made without its Python bindings' argument parsers.

Half of the host time of a call can go there: reading a tensor's layout takes 0.6 us by properties
and 0.1 us through DLPack's C functions, making one 3 us by `new_empty` and 0.7 us by what
TorchInductor's own code uses. Neither is there in every torch, or applies to every tensor: each
user has another way, too.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple, cast

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from . import _native, runtime

if TYPE_CHECKING:
    from ._native import TensorReader

# A subclass may answer anything, and has its answers asked for.
_PLAIN = (Tensor, torch.nn.Parameter)

_modes = torch._C._len_torch_dispatch_stack


class Allocation(NamedTuple):
    """A contiguous tensor to be made, on the device of a call."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype

    @staticmethod
    def of(shape: tuple[int, ...], dtype: torch.dtype) -> Allocation:
        """One of a shape; strides are those that torch gives it."""
        strides = [1]
        for size in reversed(shape[1:]):
            strides.append(strides[-1] * max(size, 1))
        return Allocation(tuple(shape), tuple(reversed(strides)), dtype)


def new_empty(
    like: Tensor, shape: tuple[int, ...], _: tuple[int, ...], dtype: torch.dtype
) -> Tensor:
    """A contiguous tensor on the device of another, through torch's dispatcher."""
    return like.new_empty(shape, dtype=dtype)


def make_reader() -> TensorReader | None:
    """What reads plain tensors, where this torch has DLPack's C functions."""
    try:
        return _native.TensorReader(getattr(Tensor, "__dlpack_c_exchange_api__", None), _PLAIN)
    except (TypeError, ValueError):
        return None


def make_torch() -> _native.Torch:
    """What native calls ask of torch, for which it has C functions or, where not, these."""
    # Looked up at each call, where torch cannot be asked directly.
    stream = getattr(torch._C, "_cuda_getCurrentRawStream", None) or (
        lambda device: runtime.current_stream(device)
    )
    # Not as they would be by themselves, so that nothing is taken for something else.
    samples = torch.empty(3, 2).t(), torch.nn.Parameter(torch.empty(4, 1, 5), requires_grad=False)
    return _native.Torch(torch.is_grad_enabled, stream, _find_increment(), samples)


def _find_increment() -> Callable[[tuple[Tensor, ...]], object]:
    """What counts writes to tensors: torch's own function within the public one, if it does."""
    own: Callable[[tuple[Tensor, ...]], object] | None
    own = getattr(torch._C, "_increment_version", None)
    sample = torch.empty(0)
    if own is not None:
        with contextlib.suppress(TypeError, RuntimeError):  # an older torch's takes one tensor
            own((sample,))
            if sample._version == 1:
                return own
    return increment_version


def _find_empty() -> Callable[..., Tensor] | None:
    try:
        from torch._C._dynamo import guards
    except ImportError:
        return None
    return cast("Callable[..., Tensor] | None", getattr(guards, "_empty_strided_cuda", None))


# Shape, strides and dtype in; a tensor on the current CUDA device.
empty: Callable[..., Tensor] | None = _find_empty()
_current_device: Callable[[], int] | None = getattr(torch._C, "_cuda_getDevice", None)


def can_make(device: int) -> bool:
    """Whether `empty` makes what torch would make on a device: no mode is to see it being made."""
    return (
        empty is not None
        and not _modes()
        and _current_device is not None
        and _current_device() == device
    )


def make(device: int, allocation: Allocation) -> Tensor | None:
    """A new tensor; None where only torch's dispatcher may make it."""
    return empty(*allocation) if empty is not None and can_make(device) else None


def equipment() -> tuple[
    TensorReader | None, _native.Torch, Callable[[int, Allocation], Tensor | None]
]:
    """What a native call reads tensors, asks torch and makes outputs by."""
    return make_reader(), make_torch(), make
