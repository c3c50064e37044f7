"""What a kernel's launcher asks of its tensors before it takes their addresses."""

from __future__ import annotations

from typing import TYPE_CHECKING, NoReturn

from ..artifacts.errors import ArgumentError

if TYPE_CHECKING:
    from torch import Tensor

LINEAR = "use torch.nn.functional.linear"
# Sizes are 32-bit in kernels.
LARGEST = 2**31 - 1


def check_dense(name: str, tensor: Tensor, dimensions: int, meaning: str) -> None:
    """Require a dense tensor with memory on a CUDA device that no gradient is asked of.

    Raises:
        ArgumentError: it is something else.
    """
    import torch

    if not isinstance(tensor, torch.Tensor):
        fail(f"{name} is a {type(tensor).__name__}", "pass a torch.Tensor")
    if tensor.dim() != dimensions:
        fail(f"{name} has {tensor.dim()} dimensions", f"pass {dimensions}: {meaning}")
    if tensor.device.type != "cuda" or tensor.layout != torch.strided:
        fail(
            f"{name} is {tensor.layout} on {tensor.device}", "pass a dense tensor on a CUDA device"
        )
    if tensor.data_ptr() == 0 and tensor.numel():
        fail(f"{name} has no memory: a fake tensor, or freed storage", "pass a real tensor")
    if tensor.is_neg():
        fail(f"{name} is a negated view", f"pass {name}.resolve_neg()")
    if tensor.requires_grad and torch.is_grad_enabled():
        fail(
            f"{name} requires grad, and gemv has no backward",
            f"call it under torch.inference_mode() or torch.no_grad(), or {LINEAR}",
        )
    if tensor.data_ptr() % tensor.element_size():
        fail(f"{name} starts between two elements", "pass an aligned tensor")


def check_rows(name: str, tensor: Tensor) -> None:
    """Require rows whose elements lie side by side.

    Raises:
        ArgumentError: they do not.
    """
    if tensor.stride(-1) != 1 and tensor.shape[-1] > 1:
        fail(
            f"{name} has strides {tuple(tensor.stride())}: its rows are not contiguous",
            f"pass {name}.contiguous()",
        )


def check_like(name: str, tensor: Tensor, other_name: str, other: Tensor) -> None:
    """Require the same dtype and device.

    Raises:
        ArgumentError: they differ.
    """
    if tensor.dtype != other.dtype:
        fail(f"{name} is {tensor.dtype}, {other_name} {other.dtype}", "convert one of them")
    if tensor.device != other.device:
        fail(f"{name} is on {tensor.device}, {other_name} on {other.device}", "move one of them")


def check_out(out: Tensor, m: int, n: int, like: Tensor, **inputs: Tensor | None) -> None:
    """Require an output of shape (m, n) whose rows do not overlap one another or an input.

    Raises:
        ArgumentError: it is something else.
    """
    check_dense("out", out, 2, "(M, N)")
    if tuple(out.shape) != (m, n) or out.dtype != like.dtype or out.device != like.device:
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
    for name, other in inputs.items():
        if other is not None and _overlap(out, other):
            fail(f"out overlaps {name} in memory", "pass memory of its own, or leave it out")


def end(tensor: Tensor) -> int:
    """Address just past the last element; strides are not negative in torch."""
    last = sum(
        (size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True)
    )
    return tensor.data_ptr() + (last + 1) * tensor.element_size()


def _overlap(left: Tensor, right: Tensor) -> bool:
    return left.data_ptr() < end(right) and right.data_ptr() < end(left)


def fail(what: str, remedy: str) -> NoReturn:
    """Refuse a call of the GEMV.

    Raises:
        ArgumentError: always.
    """
    raise ArgumentError(f"gemv: {what}", remedy=remedy)
