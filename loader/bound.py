"""A GEMV whose weight is declared constant, and when that ends."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

from . import runtime, tensors
from .gemv_launch import run
from .log import logger

if TYPE_CHECKING:
    from .gemv import Gemv


class BoundGemv:
    """`bound(x, out=None)`; `Gemv.bind` makes it and says what it promises."""

    def __init__(
        self,
        gemv: Gemv,
        weight: Tensor,
        bias: Tensor | None,
        upcoming: Tensor | None,
        *,
        batch_invariant: bool,
    ) -> None:
        """Check the weight, and remember its version.

        Raises:
            ArgumentError: an argument is not what a call takes.
        """
        gemv.check_weight(weight, bias)
        if upcoming is not None:
            tensors.check_dense("upcoming", upcoming, 2, "(N, K)")
            tensors.check_like("upcoming", upcoming, "weight", weight)
        self._gemv = gemv
        self.weight = weight
        self.bias = bias
        self._upcoming = upcoming
        self._batch_invariant = batch_invariant
        self._state = _state(weight)
        self._constant = self._state is not None
        # Streams on which a launch was in order: what they did before, they have done.
        self._ordered: set[int] = set()

    @property
    def constant(self) -> bool:
        """Whether the weight still counts as constant; once False, it stays so."""
        if self._constant and _state(self.weight) != self._state:
            self._constant = False
            logger.info(
                "the bound weight of shape %s was written to: it is read in stream order from now "
                "on; bind it again once it is constant",
                tuple(self.weight.shape),
            )
        return self._constant

    def __call__(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        """Out = x @ weight.T + bias, with x (M, K) and out (M, N) as for `Gemv.__call__`.

        Raises:
            ArgumentError, VariantMissing, DriverError: as for `Gemv.__call__`.
        """
        gemv, weight, bias = self._gemv, self.weight, self.bias
        operands = gemv.check(x, weight, bias)
        plan = gemv.plan(operands, constant=True, batch_invariant=self._batch_invariant)
        if not self._may_start_early(operands.weight.device):
            # The same binary and grid, so that the bits of the results stay the same.
            plan = plan.in_order
        upcoming = self._next() if plan.upcoming_bytes else (0, 0)
        return run(plan, operands, x, weight, bias, out, upcoming)

    def _may_start_early(self, device: int) -> bool:
        """Whether the kernel before on the current stream cannot be writing the weight.

        It could be, from before `bind`, at the first launch on a stream: that one is in order. In
        a graph that is captured, what precedes was captured too, and writes since `bind` count.
        """
        if not self.constant:
            return False
        stream = runtime.current_stream(device)
        if stream in self._ordered:
            return True
        if runtime.is_capturing():
            return bool(self._ordered)
        self._ordered.add(stream)
        return False

    def _next(self) -> tuple[int, int]:
        """Address, 16-byte aligned, and size in bytes of what may be asked of the L2.

        Nothing where that has been freed or moved since: the hardware faults on such addresses.
        """
        upcoming = self._upcoming
        if (
            upcoming is None
            or not upcoming.is_cuda
            or (upcoming.get_device() != self.weight.get_device())
        ):
            return 0, 0
        address = upcoming.data_ptr()
        if address == 0:
            return 0, 0
        start = -(-address // 16) * 16
        return start, max(0, tensors.end(upcoming) - start)


def _state(weight: Tensor) -> tuple[int, int] | None:
    """What changes when torch writes to a tensor, or gives it other memory; None if untold."""
    if weight.is_inference():
        return None
    return weight._version, weight.data_ptr()
