"""Offsets and sizes that 32 bits do not hold, or only just."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from gemv_cases import (
    AROUND,
    DTYPES,
    Answer,
    Verdicts,
    guarded,
    need_memory,
    output,
    random,
    settled,
    torch,
)
from sonata_aot.loader import Kernels

GIB = 2**30


@pytest.fixture(autouse=True)
def _give_back() -> Iterator[None]:
    yield
    torch.cuda.empty_cache()


def far_apart(rows: int, columns: int, stride: int, start: int):
    flat = torch.empty(start + (rows - 1) * stride + columns, device="cuda", dtype=torch.bfloat16)
    view = flat.as_strided((rows, columns), (stride, 1), start)
    return view.copy_(random(rows, columns, dtype=torch.bfloat16))


@pytest.mark.parametrize("start", [0, 1])
@pytest.mark.parametrize("odd", [0, 1])
@pytest.mark.parametrize("which", ["weight", "x", "out"])
def test_offsets_past_2_to_the_31_elements(kernels: Kernels, which: str, odd: int, start: int):
    need_memory(20 * GIB)
    stride, m, n, k = GIB + 8 + odd, 4, 9, 264
    x = guarded(m, k, torch.bfloat16)
    weight = guarded(n, k, torch.bfloat16)
    out = None
    if which == "weight":
        weight = far_apart(n, k, stride, start)
    elif which == "x":
        x = far_apart(m, k, stride, start)
    else:
        out = far_apart(m, n, stride, start).fill_(float("nan"))
    answer = Answer.of(x, weight)
    assert not answer.wrong(kernels.gemv(x, weight, out=out)).any()
    bound = settled(kernels.gemv.bind(weight), x)
    if out is not None:
        out.fill_(float("nan"))
    assert not answer.wrong(bound(x, out)).any()


@pytest.mark.parametrize("odd", [0, 1])
def test_a_stride_past_2_to_the_31_elements(kernels: Kernels, odd: int):
    need_memory(14 * GIB)
    x = guarded(1, 264, torch.bfloat16)
    weight = far_apart(3, 264, 2**31 + 8 + odd, 0)
    assert not Answer.of(x, weight).wrong(kernels.gemv(x, weight)).any()


def signs(rows: int, columns: int):
    """-1 and 1 at random, in place: any other way takes several times the memory."""
    tensor = torch.empty(rows, columns, device="cuda", dtype=torch.bfloat16)
    return tensor.random_(0, 2).mul_(2).sub_(1)


def exact(x, weight) -> list[float]:
    """Products of signs summed, which float64 holds exactly; in pieces, to save memory."""
    piece = 2**28
    return [
        sum(
            float((x[0, i : i + piece] * row[i : i + piece]).sum(dtype=torch.float64))
            for i in range(0, row.shape[0], piece)
        )
        for row in weight
    ]


@pytest.mark.parametrize(
    "k", [2**31 - 8, 2**31 - 1], ids=["most K of the fast path", "most K of all"]
)
def test_k_just_below_2_to_the_31(kernels: Kernels, k: int):
    """Every one of the products counts, once.

    They are signs, so that fp32 sums are exact. The bias takes all of the sum but the last few
    units, which the output then shows.
    """
    need_memory(20 * GIB)
    x, weight = signs(1, k), signs(2, k)
    sums = torch.tensor(exact(x, weight), device="cuda", dtype=torch.float64)
    bias = -sums.to(torch.bfloat16)
    expected = (sums + bias.double()).to(torch.bfloat16)
    _, out = output(1, 2, torch.bfloat16)
    kernels.gemv(x, weight, bias, out=out)
    assert out.tolist() == [expected.tolist()]
    # One block goes through all of it, which takes a second: only where it is not the same again.
    if kernels.gemv.binary(x, weight, constant=True).variant.get("pdl"):
        bound = settled(kernels.gemv.bind(weight, bias), x)
        assert bound(x).tolist() == [expected.tolist()]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("k", [7, 8])
def test_many_short_rows(kernels: Kernels, k: int, dtype: str):
    n, verdicts = 200_003, Verdicts()
    x, weight = guarded(8, k, DTYPES[dtype]), guarded(n, k, DTYPES[dtype])
    bias = guarded(1, n, DTYPES[dtype])[0]
    answer, bound = Answer.of(x, weight, bias), settled(kernels.gemv.bind(weight, bias), x)
    for m in range(1, 9):
        for name, call in (("plain", None), ("bound", bound)):
            buffer, out = output(m, n, DTYPES[dtype])
            call(x[:m], out) if call else kernels.gemv(x[:m], weight, bias, out=out)
            verdicts.add(f"M={m} {name}", answer.wrong(out))
            out.fill_(AROUND)
            verdicts.add(f"M={m} {name}, around the output", buffer != AROUND)
    verdicts.check()
