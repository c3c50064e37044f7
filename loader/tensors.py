"""What a kernel's launcher asks of its tensors before it takes their addresses.

Runs at every launch, so each step counts: `tensor.device.type`, say, takes ten times what
`tensor.is_cuda` does.
"""

from __future__ import annotations

from typing import NoReturn

import torch
from torch import Tensor

from ..artifacts.errors import ArgumentError

LINEAR = "use torch.nn.functional.linear"
# Sizes are 32-bit in kernels.
LARGEST = 2**31 - 1
# The dtypes that there are kernels for, as declarations name them.
DTYPES = {torch.bfloat16: "bf16", torch.float16: "f16"}

_strided = torch.strided
_grad_is_enabled = torch.is_grad_enabled


def check_dense(name: str, tensor: Tensor, dimensions: int, meaning: str) -> int:
    """The address of a dense tensor with memory on a CUDA device that no gradient is asked of.

    Raises:
        ArgumentError: it is something else.
    """
    if not isinstance(tensor, Tensor):
        fail(f"{name} is a {type(tensor).__name__}", "pass a torch.Tensor")
    if tensor.dim() != dimensions:
        fail(f"{name} has {tensor.dim()} dimensions", f"pass {dimensions}: {meaning}")
    if not tensor.is_cuda or tensor.layout is not _strided:
        fail(
            f"{name} is {tensor.layout} on {tensor.device}", "pass a dense tensor on a CUDA device"
        )
    address = tensor.data_ptr()
    if address == 0 and tensor.numel():
        fail(f"{name} has no memory: a fake tensor, or freed storage", "pass a real tensor")
    if tensor.is_neg():
        fail(f"{name} is a negated view", f"pass {name}.resolve_neg()")
    if tensor.requires_grad and _grad_is_enabled():
        fail(
            f"{name} requires grad, and gemv has no backward",
            f"call it under torch.inference_mode() or torch.no_grad(), or {LINEAR}",
        )
    if address % tensor.element_size():
        fail(f"{name} starts between two elements", "pass an aligned tensor")
    return address


def row_stride(name: str, tensor: Tensor) -> int:
    """The stride of the first dimension; elements of the last must lie side by side.

    Raises:
        ArgumentError: they do not.
    """
    strides = tensor.stride()
    if strides[-1] != 1 and tensor.shape[-1] > 1:
        fail(
            f"{name} has strides {strides}: its rows are not contiguous",
            f"pass {name}.contiguous()",
        )
    return strides[0]


def check_like(name: str, tensor: Tensor, other_name: str, other: Tensor) -> None:
    """Require the same dtype and device of two tensors on CUDA devices.

    Raises:
        ArgumentError: they differ.
    """
    if tensor.dtype is not other.dtype:
        fail(f"{name} is {tensor.dtype}, {other_name} {other.dtype}", "convert one of them")
    if tensor.get_device() != other.get_device():
        fail(f"{name} is on {tensor.device}, {other_name} on {other.device}", "move one of them")


def check_out(out: Tensor, m: int, n: int, like: Tensor, **inputs: Tensor | None) -> None:
    """Require an output of shape (m, n) whose rows do not overlap one another or an input.

    Raises:
        ArgumentError: it is something else.
    """
    start = check_dense("out", out, 2, "(M, N)")
    if out.shape != (m, n) or out.dtype is not like.dtype or out.get_device() != like.get_device():
        fail(
            f"out is {tuple(out.shape)} {out.dtype} on {out.device}",
            f"pass {(m, n)} {like.dtype} on {like.device}, or leave it out",
        )
    row, column = out.stride()
    if (column != 1 and n > 1) or (m > 1 and row < n):
        fail(
            f"out has strides {(row, column)}: its rows are not contiguous, or overlap",
            "pass a tensor of torch.empty, or leave it out",
        )
    past = end(out)
    for name, other in inputs.items():
        if other is not None and start < end(other) and other.data_ptr() < past:
            fail(f"out overlaps {name} in memory", "pass memory of its own, or leave it out")


def end(tensor: Tensor) -> int:
    """Address just past the last element; strides are not negative in torch."""
    elements = 1
    for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
        elements += (size - 1) * stride
    return tensor.data_ptr() + elements * tensor.element_size()


def fail(what: str, remedy: str) -> NoReturn:
    """Refuse a call of the GEMV.

    Raises:
        ArgumentError: always.
    """
    raise ArgumentError(f"gemv: {what}", remedy=remedy)
