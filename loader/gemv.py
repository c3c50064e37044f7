"""`kernels.gemv`: checks a call's tensors and launches the skinny GEMV."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from torch import Tensor

from ..artifacts.errors import VariantMissing
from ..artifacts.manifest import Binary
from . import _native, direct, runtime, tensors
from .bound import BoundGemv
from .gemv_launch import Operands, Weight, allocation, run
from .gemv_plan import MOST_ROWS, Plan, Planner
from .tensors import DTYPES, LARGEST, LINEAR, fail

# Elements in the 16 bytes that the fast path reads at once.
_VECTOR = 8
_ALIGNMENT = 16


class Gemv(_native.GemvCall):
    """y = x W^T + bias for decode batches; see `_call` for what a call takes.

    The call is native: operands of layouts that were launched before are checked, and launched, at
    once; others come to `_call`.
    """

    def __init__(self, planner: Planner, ranges: runtime.Ranges | None = None) -> None:
        """Launch what `planner` finds; `ranges` mark calls for a profiler."""
        self._planner = planner
        self._devices = frozenset(planner.devices)
        self.ranges = ranges
        self._set_up(*direct.equipment(), None if ranges is None else ranges.named("gemv"))

    def _call(
        self,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None = None,
        out: Tensor | None = None,
        *,
        batch_invariant: bool = False,
    ) -> Tensor:
        """Launch out = x @ weight.T + bias on torch's current stream of the tensors' device.

        Sums in fp32 and rounds once. Never synchronises; can be captured in a CUDA graph. Fastest
        where K is a multiple of 8 and the rows of x and weight start 16-byte aligned.

        Args:
            x: (M, K) bfloat16 or float16, M from 1 to 8. The elements of a row lie side by side;
                rows have any stride.
            weight: (N, K), the layout of `torch.nn.Linear.weight`; dtype and rows as for x.
            bias: (N,) of the same dtype, contiguous.
            out: (M, N) of the same dtype, rows contiguous, any row stride; allocated if None. Must
                not overlap the others.
            batch_invariant: Make a row of the result independent of M and of the other rows of x,
                bit for bit, among calls with the same weight, bias and alignment of rows. Without
                it M decides the order of the sums. Costs what M = 8 costs.

        Returns:
            out.

        Raises:
            ArgumentError: an argument breaks one of these conditions, is on another device than the
                others or one that `load` was not given, or requires grad.
            VariantMissing: no binary for this dtype.
            DriverError: the driver refused the launch, or an earlier one had failed.
        """
        operands = self.check(x, weight, bias)
        plan = self.plan(operands, constant=False, batch_invariant=batch_invariant)
        result = run(plan, operands, x, weight, bias, out)

        def planned() -> _native.Planned:
            sequence = plan.sequence(operands.sizes, operands.strides(result))
            return sequence, sequence, allocation(operands, x) if out is None else None

        device = operands.weight.device
        self._remember((x, weight, bias, out), bool(batch_invariant), device, planned)
        return result

    def bind(
        self,
        weight: Tensor,
        bias: Tensor | None = None,
        *,
        out: Tensor | None = None,
        upcoming: Tensor | None = None,
        batch_invariant: bool = False,
    ) -> BoundGemv:
        """A GEMV with a weight that is declared constant: `bound(x, out=None)`.

        What is bound is checked once. A call whose x and output are laid out as before is one
        native call, which reads their addresses and launches.

        From sm90 on such a GEMV starts while the kernel before it in the stream still runs, and
        reads its first weights then (programmatic dependent launch). The first launch on a stream
        is an ordinary one, as the stream may still be writing the weight; so launch once before
        capturing a graph, in which all are ordinary otherwise. It is over with the first
        change of the weight by torch, such as an in-place operation or `load_state_dict`: launches
        after that wait, with equal results, until the weight is bound anew. What torch does not see
        breaks the declaration: writes through `weight.data`, by a replayed CUDA graph, or by other
        libraries. An inference tensor, whose changes torch does not count, is not taken as
        constant.

        Args:
            weight: (N, K), as for a call.
            bias: (N,), as for a call; it may change.
            out: (M, N), as for a call; where calls write that are not given another output.
            upcoming: What the next GEMV of the stream reads, its weight: while this one ends, the
                first part of that is fetched into the L2. A hint; results do not depend on it.
            batch_invariant: As for a call.

        Raises:
            ArgumentError: an argument breaks the conditions of a call.
        """
        return BoundGemv(self, weight, bias, out, upcoming, batch_invariant=batch_invariant)

    def binary(
        self,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None = None,
        *,
        constant: bool = False,
        batch_invariant: bool = False,
    ) -> Binary:
        """The binary that such a call runs; `constant` as if `weight` were bound.

        Raises:
            ArgumentError, VariantMissing: as for the call.
        """
        operands = self.check(x, weight, bias)
        plan = self.plan(operands, constant=constant, batch_invariant=batch_invariant)
        return plan.loaded.binary

    def using(
        self, variant: Mapping[str, int | str], launch: Mapping[str, int], *, constant: bool = False
    ) -> Callable[..., Tensor]:
        """A call that runs one very variant, for measuring: `call(x, weight, bias=None, out=None)`.

        `variant` has a value for each choice of the kernel `gemv`, and `launch` is what rules call
        so. With `constant` the weight is taken as constant, without a check.
        """
        plans: dict[tuple[int, int, int], Plan] = {}

        def call(
            x: Tensor, weight: Tensor, bias: Tensor | None = None, out: Tensor | None = None
        ) -> Tensor:
            operands = self.check(x, weight, bias)
            n, k, dtype, device, *_ = operands.weight
            plan = plans.get((device, n, k))
            if plan is None:
                plan = self._planner.exact(device, dict(variant), launch, n, k, constant)
                plans[device, n, k] = plan
            if dtype != variant["dtype"] or operands.rows > int(variant["m"]):
                fail(
                    f"x is {x.dtype} with {operands.rows} rows, not for {dict(variant)}",
                    "pass others",
                )
            if operands.layout != "aligned":
                fail("rows are not aligned", "pass rows that start 16-byte aligned")
            return run(plan, operands, x, weight, bias, out)

        return call

    def check(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Operands:
        """What a launch needs of inputs that fit together.

        Raises:
            ArgumentError: they do not.
            VariantMissing: there is no kernel for their dtype.
        """
        address = tensors.check_dense("x", x, 2, "(M, K)")
        checked = self.check_weight(weight, bias)
        n, k = checked.n, checked.k
        rows, x_k = x.shape
        if k != x_k:
            fail(
                f"weight has shape {(n, k)}, x {(rows, x_k)}",
                "pass x as (M, K) and weight as (N, K) with one K",
            )
        tensors.check_like("weight", weight, "x", x)
        if not 1 <= rows <= MOST_ROWS:
            fail(f"x has {rows} rows", f"pass 1 to {MOST_ROWS}, or {LINEAR}")
        stride = tensors.row_stride("x", x)
        # The stride of a single row means nothing.
        if k % _VECTOR or checked.address % _ALIGNMENT or (n > 1 and checked.stride % _VECTOR):
            layout = "any"
        elif address % _ALIGNMENT or (rows > 1 and stride % _VECTOR):
            layout = "wide"
        else:
            layout = "aligned"
        return Operands(rows, address, stride, checked, layout)

    def check_weight(self, weight: Tensor, bias: Tensor | None) -> Weight:
        """What a launch needs of a weight, and of a bias that fits it.

        Raises:
            ArgumentError: they are something else.
            VariantMissing: there is no kernel for their dtype.
        """
        address = tensors.check_dense("weight", weight, 2, "(N, K)")
        n, k = weight.shape
        if not 1 <= n <= LARGEST or not 1 <= k <= LARGEST:
            fail(f"N = {n}, K = {k}", f"pass N and K from 1 to 2**31 - 1, or {LINEAR}")
        stride = tensors.row_stride("weight", weight)
        device = weight.get_device()
        if device not in self._devices:
            fail(
                f"weight is on {weight.device}, and kernels were loaded on {sorted(self._devices)}",
                f"load them there too: load(devices=[..., {device}])",
            )
        dtype = DTYPES.get(weight.dtype)
        if dtype is None:
            raise VariantMissing(
                f"gemv: weight is {weight.dtype}, and kernels are for bfloat16 and float16",
                remedy=f"{LINEAR} for other dtypes",
            )
        bias_address = 0
        if bias is not None:
            bias_address = tensors.check_dense("bias", bias, 1, "(N,)")
            if bias.shape[0] != n:
                fail(f"bias has {bias.shape[0]} elements, weight {n} rows", "pass one for each row")
            tensors.check_like("bias", bias, "weight", weight)
            tensors.row_stride("bias", bias)
        return Weight(n, k, dtype, device, address, stride, bias_address)

    def plan(self, operands: Operands, *, constant: bool, batch_invariant: bool) -> Plan:
        """The binary and launch of a checked call.

        Raises:
            VariantMissing: there is none.
        """
        rows, _, _, (n, k, dtype, device, *_), layout = operands
        most = MOST_ROWS if batch_invariant else rows
        return self._planner.find(device, dtype, most, n, k, layout, constant)
