"""Whether a row of the result depends on the other rows of x."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from gemv_cases import DTYPES, NAN, Verdicts, bits, guarded, random, torch
from sonata_aot.aot.measure.shapes import DEFAULT_SHAPES, Shape
from sonata_aot.loader import Kernels


def calls(kernels: Kernels, weight: Any) -> dict[str, Callable[[Any], Any]]:
    """Batch-invariant ones: plain, bound, and bound to a weight that has changed since."""
    changed = kernels.gemv.bind(weight, batch_invariant=True)
    weight.mul_(1)
    return {
        "plain": lambda x: kernels.gemv(x, weight, batch_invariant=True),
        "bound": kernels.gemv.bind(weight, batch_invariant=True),
        "bound before": changed,
    }


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", DEFAULT_SHAPES, ids=str)
def test_batch_invariant_rows(kernels: Kernels, shape: Shape, dtype: str):
    x, weight = (random(rows, shape.k, dtype=DTYPES[dtype]) for rows in (8, shape.n))
    verdicts = Verdicts()
    for name, call in calls(kernels, weight).items():
        check_invariant(verdicts, name, call, x)
    verdicts.check()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("k", "x_start", "weight_start"), [(520, 1, 0), (520, 0, 1), (521, 0, 0)])
def test_batch_invariant_rows_of_other_layouts(
    kernels: Kernels, k: int, x_start: int, weight_start: int, dtype: str
):
    weight = guarded(300, k, DTYPES[dtype], start=weight_start)
    x = guarded(8, k, DTYPES[dtype], start=x_start)
    verdicts = Verdicts()

    def at_start(rows: Any) -> Any:
        """The same rows with x's alignment, which decides the kernel."""
        moved = guarded(len(rows), k, DTYPES[dtype], start=x_start)
        return moved.copy_(rows)

    for name, call in calls(kernels, weight).items():
        check_invariant(verdicts, name, lambda rows, call=call: call(at_start(rows)), x)
    verdicts.check()


def check_invariant(verdicts: Verdicts, name: str, call: Callable[[Any], Any], x: Any) -> None:
    full = call(x)
    for m in range(1, 8):
        verdicts.same(f"{name}: the first {m} rows", call(x[:m]), full[:m])
    for row in range(8):
        verdicts.same(f"{name}: row {row} alone", call(x[row : row + 1])[0], full[row])
    order = torch.randperm(8, device=x.device)
    verdicts.same(f"{name}: rows in the order {order.tolist()}", call(x[order]), full[order])
    others = x.clone()
    others[1::2] = NAN
    verdicts.same(f"{name}: beside others", call(others)[::2], full[::2])


def test_bound_and_plain_calls_are_each_invariant_through_a_graph(kernels: Kernels):
    x, weight = random(8, 2048, dtype=torch.bfloat16), random(2048, 2048, dtype=torch.bfloat16)
    verdicts = Verdicts()
    for name, call in calls(kernels, weight).items():
        full = call(x)
        graph, parts = torch.cuda.CUDAGraph(), []
        with torch.cuda.graph(graph):
            parts = [call(x[:m]) for m in range(1, 9)]
        graph.replay()
        for m, part in enumerate(parts, 1):
            verdicts.same(f"{name}: {m} rows", part, full[:m])
    verdicts.check()


def test_without_it_bits_depend_on_the_number_of_rows(kernels: Kernels):
    """What the documentation says: else the option would be for nothing."""
    differ = []
    for shape in DEFAULT_SHAPES:
        x, weight = (random(rows, shape.k, dtype=torch.bfloat16) for rows in (8, shape.n))
        full = kernels.gemv(x, weight)
        differ += [(bits(kernels.gemv(x[:m], weight)) != bits(full[:m])).any() for m in (1, 2, 4)]
    assert torch.stack(differ).any()
