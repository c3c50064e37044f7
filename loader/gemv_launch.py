"""What a launch of the GEMV needs of checked tensors, and the launch itself."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor
from torch.autograd.graph import increment_version

from . import direct, runtime, tensors
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

    @property
    def sizes(self) -> tuple[int, int, int]:
        """N, K and rows of x."""
        return self.weight.n, self.weight.k, self.rows

    def strides(self, out: Tensor) -> tuple[int, int, int]:
        """Those of rows: of x, weight and out."""
        return self.stride, self.weight.stride, out.stride()[0]


def allocation(operands: Operands, x: Tensor) -> direct.Allocation:
    """A new output."""
    return direct.Allocation.of((operands.rows, operands.weight.n), x.dtype)


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
    rows, address, _, (n, _, _, device, weight_address, _, bias_address), _ = operands
    result = x.new_empty((rows, n)) if out is None else out
    if out is not None:
        tensors.check_out(out, rows, n, x, x=x, weight=weight, bias=bias)
    result_address = result.data_ptr()
    if result_address == 0:  # a mode of torch that makes fake tensors is on
        fail("out has no memory: a fake tensor", "leave the mode, or use real tensors")
    plan.launch(
        runtime.current_stream(device),
        (address, weight_address, bias_address, result_address),
        operands.sizes,
        operands.strides(result),
        upcoming,
    )
    if out is not None:
        # As torch's own operations count a write: for autograd, and for a weight that is bound.
        increment_version(out)
    return result
