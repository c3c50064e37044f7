"""A GEMV whose weight is declared constant, and when that ends."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

from . import _native, direct, runtime, tensors
from .gemv_launch import allocation, run
from .log import logger

if TYPE_CHECKING:
    from .gemv import Gemv


class BoundGemv(_native.BoundCall):
    """`bound(x, out=None)`; `Gemv.bind` makes it and says what it promises.

    The call is native, as that of `Gemv` is; so are the rules by which the weight is constant, and
    a launch may start before what precedes it on the stream has ended.
    """

    def __init__(
        self,
        gemv: Gemv,
        weight: Tensor,
        bias: Tensor | None,
        out: Tensor | None,
        upcoming: Tensor | None,
        *,
        batch_invariant: bool,
    ) -> None:
        """Check what is bound, and remember the weight's version.

        Raises:
            ArgumentError: an argument is not what a call takes.
        """
        n = gemv.check_weight(weight, bias).n
        if out is not None:
            tensors.check_dense("out", out, 2, "(M, N)")
            tensors.check_out(out, out.shape[0], n, weight, weight=weight, bias=bias)
        if upcoming is not None:
            tensors.check_dense("upcoming", upcoming, 2, "(N, K)")
            tensors.check_like("upcoming", upcoming, "weight", weight)
        self._gemv = gemv
        self._batch_invariant = batch_invariant
        # Torch does not count the changes of an inference tensor.
        constant = not weight.is_inference()
        ranges = None if gemv.ranges is None else gemv.ranges.named("gemv.bound")
        self._set_up(*direct.equipment(), ranges, weight, bias, out, upcoming, constant)

    def _call(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        """Out = x @ weight.T + bias, with x (M, K) and out (M, N) as for `Gemv._call`.

        Raises:
            ArgumentError, VariantMissing, DriverError: as for `Gemv._call`.
        """
        gemv, weight, bias = self._gemv, self.weight, self.bias
        out = self.out if out is None else out
        operands = gemv.check(x, weight, bias)
        plan = gemv.plan(operands, constant=True, batch_invariant=self._batch_invariant)
        device = operands.weight.device
        used = plan
        if not self._may_start_early(runtime.current_stream(device), plan.loaded.kernel()):
            # The same binary and grid, so that the bits of the results stay the same.
            used = plan.in_order
        upcoming = self._next() if used.upcoming_bytes else (0, 0)
        result = run(used, operands, x, weight, bias, out, upcoming)

        def planned() -> _native.Planned:
            sizes, strides = operands.sizes, operands.strides(result)
            in_order = plan.in_order.sequence(sizes, strides)
            early = (
                in_order if plan.in_order is plan else plan.sequence(sizes, strides, self._ahead())
            )
            return in_order, early, allocation(operands, x) if out is None else None

        self._remember(x, out, device, planned)
        return result

    def _ended(self) -> None:
        """Called once, when the weight no longer counts as constant."""
        logger.info(
            "the bound weight of shape %s was written to: it is read in stream order from now "
            "on; bind it again once it is constant",
            tuple(self.weight.shape),
        )

    def _next(self) -> tuple[int, int]:
        """Address, 16-byte aligned, and size in bytes of what may be asked of the L2.

        Nothing where that has been freed or moved since: the hardware faults on such addresses.
        """
        upcoming = self.upcoming
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

    def _ahead(self) -> tuple[int, int] | None:
        """The same as `Plan.sequence` takes it."""
        start, most = self._next()
        if self.upcoming is None or not start:
            return None
        return start - self.upcoming.data_ptr(), most
