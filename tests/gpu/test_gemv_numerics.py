"""The GEMV against float64: fresh random data, poisoned outputs, NaN around everything it reads."""

from __future__ import annotations

import pytest

from gemv_cases import (
    DTYPES,
    NAN,
    Answer,
    Verdicts,
    guarded,
    output,
    random,
    settled,
    spoiled,
    torch,
)
from sonata_aot.aot.measure.shapes import DEFAULT_SHAPES, Shape
from sonata_aot.loader import Kernels

# Less than, as many as and more than what a vector, a chunk and a step of a block have.
DEPTHS = (1, 2, 7, 8, 9, 15, 16, 248, 1016, 2056, 4096, 14336)
WIDTHS = (1, 2, 3, 5, 7, 9, 33, 255, 2048)
ROWS = range(1, 9)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("k", DEPTHS)
def test_every_number_of_rows_width_and_depth(kernels: Kernels, dtype: str, k: int):
    kind, verdicts = DTYPES[dtype], Verdicts()
    for n in WIDTHS:
        x, weight, bias = guarded(8, k, kind), guarded(n, k, kind), guarded(1, n, kind)[0]
        answers = {None: Answer.of(x, weight), "bias": Answer.of(x, weight, bias)}
        for m in ROWS:
            for given, answer in answers.items():
                buffer, out = output(m, n, kind)
                returned = kernels.gemv(x[:m], weight, bias if given else None, out=out)
                assert returned is out
                verdicts.add(f"M={m} N={n} {given}", answer.wrong(out))
                verdicts.add(f"M={m} N={n} {given}, around the output", spoiled(buffer, out))
    verdicts.check()


@pytest.mark.parametrize("dtype", DTYPES)
def test_an_output_of_its_own(kernels: Kernels, dtype: str):
    x, weight = guarded(3, 264, DTYPES[dtype]), guarded(100, 264, DTYPES[dtype])
    y = kernels.gemv(x, weight)
    assert (tuple(y.shape), y.dtype, y.device) == ((3, 100), x.dtype, x.device)
    assert y.is_contiguous()
    assert not Answer.of(x, weight).wrong(y).any()


def operands(kind: str, dtype: str, shape: Shape):
    """Normal data; or with means far from zero; or with columns much greater than the others.

    Scaled so that a float16 holds the results.
    """
    scale = shape.k**-0.5
    x = torch.randn(8, shape.k, device="cuda")
    weight = torch.randn(shape.n, shape.k, device="cuda")
    if kind == "large means":
        x, weight = x + 8, weight + 4
    elif kind == "outliers":
        x[:, 5] *= 100
        weight[:, 77] *= 1000
    return x.to(DTYPES[dtype]), (weight * scale).to(DTYPES[dtype])


@pytest.mark.parametrize("kind", ["normal", "large means", "outliers"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", DEFAULT_SHAPES, ids=str)
def test_real_shapes_are_as_exact_as_cublas(kernels: Kernels, shape: Shape, dtype: str, kind: str):
    x, weight = operands(kind, dtype, shape)
    answer, verdicts, errors = Answer.of(x, weight), Verdicts(), []
    call = settled(kernels.gemv.bind(weight), x)
    for m in (1, 2, 4, 8):
        _, out = output(m, shape.n, x.dtype)
        kernels.gemv(x[:m], weight, out=out)
        bound = call(x[:m])
        verdicts.add(f"M={m}", answer.wrong(out))
        verdicts.add(f"M={m} bound", answer.wrong(bound))
        errors += [answer.error(y) for y in (x[:m] @ weight.T, out, bound)]
    verdicts.check()
    found = torch.stack(errors).view(-1, 3).tolist()
    for m, (cublas, ours, bound) in zip((1, 2, 4, 8), found, strict=True):
        assert ours <= 1.05 * cublas, f"M={m}"
        assert bound <= 1.05 * cublas, f"M={m} bound"


# (K, start of x past a 16-byte boundary): the fast path, and both forms of the other one.
PATHS = ((72, 0), (72, 1), (71, 1))


def in_float64(x, weight):
    """Products one by one: a library might leave out those with zero."""
    return (x.double()[:, None] * weight.double()[None]).sum(-1)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("k", "start"), PATHS)
def test_infinities_and_nans_travel_to_where_they_belong(
    kernels: Kernels, dtype: str, k: int, start: int
):
    inf = float("inf")
    for m in ROWS:
        x, weight = guarded(m, k, DTYPES[dtype], start=start), guarded(40, k, DTYPES[dtype])
        x.copy_(x.abs() + 0.5)
        weight.copy_(weight.abs() + 0.5)
        clean = kernels.gemv(x, weight)
        weight[0, 3], weight[1, k - 1], weight[2, 8] = inf, -inf, NAN
        weight[3, 0], weight[3, 70], weight[39, k - 1] = inf, -inf, inf
        x[m - 1, 9] = inf
        if m > 1:
            x[0, 1] = NAN
        y, expected = kernels.gemv(x, weight), in_float64(x, weight)
        for same in (torch.isnan, torch.isposinf, torch.isneginf):
            assert torch.equal(same(y), same(expected)), f"M={m} {same.__name__}"
        # What is finite has the very bits that it has beside finite numbers.
        finite = expected.isfinite()
        assert torch.equal(y[finite], clean[finite])


@pytest.mark.parametrize(("k", "start"), PATHS)
def test_what_is_too_large_for_the_dtype_is_infinite(kernels: Kernels, k: int, start: int):
    x = guarded(2, k, torch.float16, start=start).fill_(64.0)
    weight = guarded(3, k, torch.float16).fill_(8.0)
    weight[1] *= -2
    weight[2] *= 4
    # Sums of 512, -1024 and 2048, k of them.
    expected = torch.tensor([512.0 * k, -float("inf"), float("inf")], device="cuda").half()
    assert torch.equal(kernels.gemv(x, weight), expected.expand(2, 3))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("k", "start"), PATHS)
def test_subnormal_inputs_count(kernels: Kernels, dtype: str, k: int, start: int):
    least = torch.finfo(DTYPES[dtype]).smallest_normal
    x, weight = guarded(2, k, DTYPES[dtype], start=start), guarded(5, k, DTYPES[dtype])
    x.copy_(x.double() * least / 16)
    weight.copy_(weight.double() * (2.0**40 if dtype == "bf16" else 64))
    answer = Answer.of(x, weight)
    assert answer.expected.abs().min() > 0
    assert not answer.wrong(kernels.gemv(x, weight)).any()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("k", "start"), PATHS)
def test_a_bias_decides_where_the_sum_is_small(kernels: Kernels, dtype: str, k: int, start: int):
    # Rounding the sum before the bias is added would leave nothing of it, or far too much.
    x, weight = guarded(4, k, DTYPES[dtype], start=start), guarded(65, k, DTYPES[dtype])
    bias = -kernels.gemv(x[:1], weight)[0]
    answer = Answer.of(x[:1], weight, bias)
    y = kernels.gemv(x[:1], weight, bias)
    assert not answer.wrong(y).any()
    assert y.count_nonzero() > 32


def test_equal_inputs_give_equal_bits(kernels: Kernels):
    verdicts = Verdicts()
    for m in (1, 2, 3, 8):
        for start in (0, 1):
            x = guarded(m, 4096, torch.bfloat16, start=start)
            weight = random(2048, 4096, dtype=torch.bfloat16)
            first = kernels.gemv(x, weight)
            for _ in range(20):
                verdicts.same(f"M={m} start={start}", kernels.gemv(x, weight), first)
    verdicts.check()
