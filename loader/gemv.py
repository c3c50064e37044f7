"""`kernels.gemv`: checks a call's tensors and launches the skinny GEMV."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from ..artifacts.errors import VariantMissing
from ..artifacts.manifest import Binary
from . import runtime, tensors
from .bound import BoundGemv
from .gemv_plan import MOST_ROWS, Plan, Planner
from .tensors import LARGEST, LINEAR, fail

if TYPE_CHECKING:
    from torch import Tensor

DTYPES = ("bf16", "f16")
# Elements in the 16 bytes that the fast path reads at once.
_VECTOR = 8
_ALIGNMENT = 16


class Gemv:
    """y = x W^T + bias for decode batches; see `__call__`."""

    def __init__(self, planner: Planner) -> None:
        """Launch what `planner` finds."""
        self._planner = planner

    def __call__(
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
        rows, n, k = self.check(x, weight, bias)
        plan = self.plan(x, weight, rows, n, k, constant=False, batch_invariant=batch_invariant)
        return run(plan, x, weight, bias, out)

    def bind(
        self,
        weight: Tensor,
        bias: Tensor | None = None,
        *,
        upcoming: Tensor | None = None,
        batch_invariant: bool = False,
    ) -> BoundGemv:
        """A GEMV with a weight that is declared constant: `bound(x, out=None)`.

        From sm90 on such a GEMV starts while the kernel before it in the stream still runs, and
        reads its first weights then (programmatic dependent launch). That is over with the first
        change of the weight by torch, such as an in-place operation or `load_state_dict`: launches
        after that wait, with equal results, until the weight is bound anew. What torch does not see
        breaks the declaration: writes through `weight.data`, by a replayed CUDA graph, or by other
        libraries. An inference tensor, whose changes torch does not count, is not taken as
        constant.

        Args:
            weight: (N, K), as for a call.
            bias: (N,), as for a call; it may change.
            upcoming: What the next GEMV of the stream reads, its weight: while this one ends, the
                first part of that is fetched into the L2. A hint; results do not depend on it.
            batch_invariant: As for a call.

        Raises:
            ArgumentError: an argument breaks the conditions of a call.
        """
        return BoundGemv(self, weight, bias, upcoming, batch_invariant=batch_invariant)

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
        rows, n, k = self.check(x, weight, bias)
        plan = self.plan(x, weight, rows, n, k, constant=constant, batch_invariant=batch_invariant)
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
            rows, n, k = self.check(x, weight, bias)
            key = (x.device.index, n, k)
            if key not in plans:
                plans[key] = self._planner.exact(key[0], dict(variant), launch, n, k, constant)
            if runtime.dtype_name(x.dtype) != variant["dtype"] or rows > int(variant["m"]):
                fail(f"x is {x.dtype} with {rows} rows, not for {dict(variant)}", "pass others")
            if _layout(x, weight, rows, n, k) != "aligned":
                fail("rows are not aligned", "pass rows that start 16-byte aligned")
            return run(plans[key], x, weight, bias, out)

        return call

    def check(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[int, int, int]:
        """Rows of x, N and K of a call whose inputs fit together.

        Raises:
            ArgumentError: they do not.
        """
        tensors.check_dense("x", x, 2, "(M, K)")
        self.check_weight(weight, bias)
        (rows, k), (n, weight_k) = x.shape, weight.shape
        if weight_k != k:
            fail(
                f"weight has shape {(n, weight_k)}, x {(rows, k)}",
                "pass x as (M, K) and weight as (N, K) with one K",
            )
        tensors.check_like("weight", weight, "x", x)
        if not 1 <= rows <= MOST_ROWS:
            fail(f"x has {rows} rows", f"pass 1 to {MOST_ROWS}, or {LINEAR}")
        tensors.check_rows("x", x)
        return rows, n, k

    def check_weight(self, weight: Tensor, bias: Tensor | None) -> None:
        """Require a weight, and a bias that fits it.

        Raises:
            ArgumentError: they are something else.
        """
        tensors.check_dense("weight", weight, 2, "(N, K)")
        n, k = weight.shape
        if not 1 <= n <= LARGEST or not 1 <= k <= LARGEST:
            fail(f"N = {n}, K = {k}", f"pass N and K from 1 to 2**31 - 1, or {LINEAR}")
        tensors.check_rows("weight", weight)
        if weight.device.index not in self._planner.devices:
            fail(
                f"weight is on {weight.device}, and kernels were loaded on "
                f"{sorted(self._planner.devices)}",
                f"load them there too: load(devices=[..., {weight.device.index}])",
            )
        if runtime.dtype_name(weight.dtype) not in DTYPES:
            raise VariantMissing(
                f"gemv: weight is {weight.dtype}, and kernels are for bfloat16 and float16",
                remedy=f"{LINEAR} for other dtypes",
            )
        if bias is not None:
            tensors.check_dense("bias", bias, 1, "(N,)")
            if bias.shape[0] != n:
                fail(f"bias has {bias.shape[0]} elements, weight {n} rows", "pass one for each row")
            tensors.check_like("bias", bias, "weight", weight)
            tensors.check_rows("bias", bias)

    def plan(
        self,
        x: Tensor,
        weight: Tensor,
        rows: int,
        n: int,
        k: int,
        *,
        constant: bool,
        batch_invariant: bool,
    ) -> Plan:
        """The binary and launch of a checked call.

        Raises:
            VariantMissing: there is none.
        """
        return self._planner.find(
            x.device.index,
            runtime.dtype_name(x.dtype),
            MOST_ROWS if batch_invariant else rows,
            n,
            k,
            _layout(x, weight, rows, n, k),
            constant,
        )


def run(
    plan: Plan,
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
    (rows, k), n = x.shape, weight.shape[0]
    given = out is not None
    if out is None:
        out = x.new_empty((rows, n))
        if out.data_ptr() == 0:  # a mode of torch that makes fake tensors is on
            fail("out has no memory: a fake tensor", "leave the mode, or use real tensors")
    else:
        tensors.check_out(out, rows, n, x, x=x, weight=weight, bias=bias)
    plan.launch(
        runtime.current_stream(x.device.index),
        (
            x.data_ptr(),
            weight.data_ptr(),
            0 if bias is None else bias.data_ptr(),
            out.data_ptr(),
        ),
        (n, k, rows),
        (x.stride(0), weight.stride(0), out.stride(0)),
        upcoming,
    )
    if given:
        # As torch's own operations count a write: for autograd, and for a weight that is bound.
        runtime.count_write(out)
    return out


def _layout(x: Tensor, weight: Tensor, rows: int, n: int, k: int) -> str:
    if k % _VECTOR or not _aligned(weight, n):
        return "any"
    return "aligned" if _aligned(x, rows) else "wide"


def _aligned(tensor: Tensor, rows: int) -> bool:
    """Whether every row starts 16-byte aligned; the stride of a single row means nothing."""
    return tensor.data_ptr() % _ALIGNMENT == 0 and (rows == 1 or tensor.stride(0) % _VECTOR == 0)
