"""What a launch of the GEMV needs of checked tensors, and the launch itself."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor
from torch.autograd.graph import increment_version

from . import runtime, tensors
from .gemv_plan import Plan
from .tensors import fail


class Weight(NamedTuple):
    """What a launch needs of a weight and its bias that have been checked."""

    n: int
    k: int
    dtype: str
    device: int
    address: int
    stride: int
    bias: int


class Operands(NamedTuple):
    """What a launch needs of inputs that have been checked.

    `layout` is `aligned`, `wide` (only x is not aligned) or `any`.
    """

    rows: int
    address: int
    stride: int
    weight: Weight
    layout: str


def run(
    plan: Plan,
    operands: Operands,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    out: Tensor | None,
    upcoming: tuple[int, int] = (0, 0),
) -> Tensor:
    """Launch a plan on checked inputs; allocates `out` if None.

    Raises:
        ArgumentError: `out` cannot be written to.
        DriverError: the driver refused the launch, or an earlier one had failed.
    """
    rows, address, stride, (n, k, _, device, weight_address, weight_stride, bias_address), _ = (
        operands
    )
    result = x.new_empty((rows, n)) if out is None else out
    if out is not None:
        tensors.check_out(out, rows, n, x, x=x, weight=weight, bias=bias)
    result_address = result.data_ptr()
    if result_address == 0:  # a mode of torch that makes fake tensors is on
        fail("out has no memory: a fake tensor", "leave the mode, or use real tensors")
    plan.launch(
        runtime.current_stream(device),
        (address, weight_address, bias_address, result_address),
        (n, k, rows),
        (stride, weight_stride, result.stride()[0]),
        upcoming,
    )
    if out is not None:
        # As torch's own operations count a write: for autograd, and for a weight that is bound.
        increment_version(out)
    return result
