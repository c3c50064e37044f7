"""Rows that lie anyhow in memory: which binary a layout gets, and that it reads only the rows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from gemv_cases import DTYPES, Answer, Verdicts, bits, guarded, output, random, spoiled, torch
from sonata_aot.loader import Kernels

Layout = Callable[[int, int, int, Any], tuple[Any, Any]]


def overlapping(rows: int, columns: int, stride: int, dtype: Any, start: int = 0) -> Any:
    """Rows that lie less than their length apart; `guarded` could not fill them one by one."""
    flat = random(start + (rows - 1) * stride + columns, dtype=dtype)
    return flat.as_strided((rows, columns), (stride, 1), start)


# Which binary takes it: `gemv`, `gemv_any` with weights 16 bytes at a time, or one by one.
ALIGNED, WIDE, ANY = ("gemv", None), ("gemv_any", 1), ("gemv_any", 0)
LAYOUTS: dict[str, tuple[Layout, tuple[str, int | None]]] = {
    "rows apart": (
        lambda m, n, k, d: (guarded(m, k, d, stride=k + 40), guarded(n, k, d, stride=k + 72)),
        ALIGNED,
    ),
    "columns of a wider x": (
        lambda m, n, k, d: (random(m, k + 16, dtype=d)[:, 8 : 8 + k], guarded(n, k, d)),
        ALIGNED,
    ),
    "one row of x for all": (
        lambda m, n, k, d: (guarded(1, k, d).expand(m, k), guarded(n, k, d)),
        ALIGNED,
    ),
    "one row of weight for all": (
        lambda m, n, k, d: (guarded(m, k, d), guarded(1, k, d).expand(n, k)),
        ALIGNED,
    ),
    "one row of each for all": (
        lambda m, n, k, d: (guarded(1, k, d).expand(m, k), guarded(1, k, d).expand(n, k)),
        ALIGNED,
    ),
    "overlapping rows, aligned": (
        lambda m, n, k, d: (overlapping(m, k, 8, d), overlapping(n, k, 16, d)),
        ALIGNED,
    ),
    "x off by one element": (
        lambda m, n, k, d: (guarded(m, k, d, start=1), guarded(n, k, d)),
        WIDE,
    ),
    "x off by seven elements, expanded": (
        lambda m, n, k, d: (guarded(1, k, d, start=7).expand(m, k), guarded(n, k, d)),
        WIDE,
    ),
    "x off, one row of weight for all": (
        lambda m, n, k, d: (guarded(m, k, d, start=4), guarded(1, k, d).expand(n, k)),
        WIDE,
    ),
    "weight off by one element": (
        lambda m, n, k, d: (guarded(m, k, d), guarded(n, k, d, start=1)),
        ANY,
    ),
    "both off by an odd number": (
        lambda m, n, k, d: (guarded(m, k, d, start=3), guarded(n, k, d, start=5)),
        ANY,
    ),
    "weight off, one row for all": (
        lambda m, n, k, d: (guarded(m, k, d), guarded(1, k, d, start=1).expand(n, k)),
        ANY,
    ),
    "odd stride of weight": (
        lambda m, n, k, d: (guarded(m, k, d), guarded(n, k, d, stride=k + 17)),
        ANY,
    ),
    "odd strides of both": (
        lambda m, n, k, d: (guarded(m, k, d, stride=k + 33), guarded(n, k, d, stride=k + 19)),
        ANY,
    ),
    "overlapping rows, one element apart": (
        lambda m, n, k, d: (overlapping(m, k, 1, d, 1), overlapping(n, k, 1, d, 1)),
        ANY,
    ),
    "odd K": (
        lambda m, n, k, d: (guarded(m, k - 1, d), guarded(n, k - 1, d)),
        ANY,
    ),
    "odd K, side by side": (
        lambda m, n, k, d: (
            guarded(m, k - 1, d, stride=k - 1),
            guarded(n, k - 1, d, stride=k - 1),
        ),
        ANY,
    ),
}


def check(kernels: Kernels, verdicts: Verdicts, name: str, m: int, n: int, k: int, dtype: Any):
    """One layout, with a bias and without: the right binary, numbers and surroundings."""
    build, (kernel, wide) = LAYOUTS[name]
    x, weight = build(m, n, k, dtype)
    bias = guarded(1, n, dtype, start=1)[0]
    binary = kernels.gemv.binary(x, weight)
    # The stride of a single row means nothing, so that some layouts are aligned there.
    if m > 1 and n > 1:
        assert (binary.kernel, binary.variant.get("wide")) == (kernel, wide), name
    case = f"{name}: M={m} N={n} K={k}"
    for given in (None, bias):
        buffer, out = output(m, n, dtype, start=m % 3, gap=m % 4)
        kernels.gemv(x, weight, given, out=out)
        verdicts.add(case, Answer.of(x, weight, given).wrong(out))
        verdicts.add(f"{case}, around the output", spoiled(buffer, out))
    return binary


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", LAYOUTS)
def test_any_layout(kernels: Kernels, name: str, dtype: str):
    verdicts = Verdicts()
    for m in range(1, 9):
        for n, k in ((1, 16), (37, 264), (100, 2056), (1030, 88)):
            check(kernels, verdicts, name, m, n, k, DTYPES[dtype])
    verdicts.check()


@pytest.mark.parametrize("dtype", DTYPES)
def test_layouts_run_every_binary_of_the_general_kernel(kernels: Kernels, dtype: str):
    verdicts, run = Verdicts(), set()
    for name in LAYOUTS:
        for m in (1, 2, 4, 8):
            run.add(check(kernels, verdicts, name, m, 70, 520, DTYPES[dtype]).label)
    verdicts.check()
    loaded = [item.binary for item in kernels.table("gemv_any").all().values()]
    assert {binary.label for binary in loaded if binary.variant["dtype"] == dtype} <= run


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("k", [1, 3, 8])
def test_strides_without_meaning(kernels: Kernels, k: int, dtype: str):
    flat = random(64, dtype=DTYPES[dtype])
    alone = kernels.gemv(flat.as_strided((1, k), (3, 1)), flat.as_strided((1, k), (5, 1), 16))
    assert torch.equal(alone, kernels.gemv(flat[:k][None], flat[16 : 16 + k][None]))
    # With one element a row, that of the columns means nothing.
    x, weight = flat.as_strided((3, 1), (2, 9)), flat.as_strided((7, 1), (3, 5), 16)
    assert not Answer.of(x, weight).wrong(kernels.gemv(x, weight)).any()


@pytest.mark.parametrize("start", [0, 1, 3])
@pytest.mark.parametrize("gap", [0, 1, 8])
@pytest.mark.parametrize("x_start", [0, 1])
@pytest.mark.parametrize("k", [264, 263])
def test_an_output_of_any_alignment_and_stride(
    kernels: Kernels, k: int, x_start: int, gap: int, start: int
):
    kind, verdicts = torch.bfloat16, Verdicts()
    for n in (1, 2, 37, 263):
        x, weight = guarded(8, k, kind, start=x_start), guarded(n, k, kind)
        answer = Answer.of(x, weight)
        for m in range(1, 9):
            buffer, out = output(m, n, kind, start=start, gap=gap)
            kernels.gemv(x[:m], weight, out=out)
            verdicts.add(f"M={m} N={n}", answer.wrong(out))
            verdicts.add(f"M={m} N={n}, around the output", spoiled(buffer, out))
    verdicts.check()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("start", [0, 1])
def test_the_layout_of_x_decides_no_more_than_rounding(kernels: Kernels, start: int, dtype: str):
    # The same numbers through both paths: a wrong order of K would give something else altogether.
    weight = guarded(64, 1032, DTYPES[dtype], start=start)
    x = guarded(5, 1032, DTYPES[dtype])
    moved = guarded(5, 1032, DTYPES[dtype], start=1)
    moved.copy_(x)
    answer = Answer.of(x, weight)
    assert not answer.wrong(kernels.gemv(x, weight)).any()
    assert not answer.wrong(kernels.gemv(moved, weight)).any()


@pytest.mark.parametrize("start", [0, 1])
@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_of_x_do_not_meet(kernels: Kernels, dtype: str, start: int):
    # What is in one row of x changes no bit of the others' results.
    verdicts = Verdicts()
    for m in range(2, 9):
        x, weight = guarded(m, 520, DTYPES[dtype], start=start), guarded(70, 520, DTYPES[dtype])
        before = kernels.gemv(x, weight)
        for row in range(m):
            changed = guarded(m, 520, DTYPES[dtype], start=start)
            changed.copy_(x)
            changed[row] = float("inf")
            y = kernels.gemv(changed, weight)
            others = [i for i in range(m) if i != row]
            verdicts.same(f"M={m} row {row}", y[others], before[others])
            verdicts.add(f"M={m} row {row} itself", bits(y[row]) == bits(before[row]))
    verdicts.check()
