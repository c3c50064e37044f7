"""The GEMV against float64, on fresh random data, with poisoned outputs and padding."""

from __future__ import annotations

import pytest

from sonata_aot.loader import Kernels

torch = pytest.importorskip("torch")

NAN = float("nan")
# Below, at and above what a block covers in one step, with rests of every kind; and real shapes.
DEPTHS = (8, 16, 248, 256, 264, 1016, 1024, 2048, 2056, 4096, 14336)
WIDTHS = (1, 2, 3, 4, 5, 7, 8, 9, 33, 255, 2048)
ZONOS = ((2048, 4096), (8512, 2048), (16384, 2048))


def reference(x, weight):
    return x.double() @ weight.double().T


def assert_close(y, x, weight):
    """One rounding to bf16, and fp32 sums of k products, away from float64 at most."""
    expected = reference(x, weight)
    magnitude = x.double().abs() @ weight.double().abs().T
    bound = 2**-8 * expected.abs() + 2**-18 * magnitude
    wrong = ~((y.double() - expected).abs() <= bound)  # NaN is wrong
    assert not wrong.any(), (
        f"{int(wrong.sum())} of {wrong.numel()} elements, first {wrong.nonzero()[0]}"
    )


def random(*shape, scale=1.0):
    return (torch.randn(*shape, device="cuda") * scale).to(torch.bfloat16)


def padded(rows, columns, left, right):
    """Random rows inside a buffer of NaN, so that reading past a row shows."""
    buffer = torch.full(
        (rows + 2, left + columns + right), NAN, device="cuda", dtype=torch.bfloat16
    )
    view = buffer[1:-1, left : left + columns]
    view.copy_(random(rows, columns))
    return view


@pytest.fixture(autouse=True)
def _fresh_data():
    torch.seed()


@pytest.mark.parametrize("m", [1, 2])
@pytest.mark.parametrize("k", DEPTHS)
def test_every_width_and_depth(kernels: Kernels, m: int, k: int):
    for n in WIDTHS:
        x, weight = padded(m, k, 8, 16), padded(n, k, 16, 8)
        out = torch.full((m, n), NAN, device="cuda", dtype=torch.bfloat16)
        assert kernels.gemv(x, weight, out=out) is out
        assert_close(out, x, weight)


@pytest.mark.parametrize("m", [1, 2])
@pytest.mark.parametrize(("n", "k"), ZONOS)
def test_zonos_shapes_are_as_exact_as_cublas(kernels: Kernels, m: int, n: int, k: int):
    x, weight = random(m, k), random(n, k, scale=k**-0.5)
    expected = reference(x, weight)

    def error(y):
        return float((y.double() - expected).norm() / expected.norm())

    assert error(kernels.gemv(x, weight)) <= 1.05 * error(x @ weight.T)


@pytest.mark.parametrize("m", [1, 2])
def test_large_means_and_outlier_columns(kernels: Kernels, m: int):
    x, weight = random(m, 2048) + 8.0, random(512, 2048) + 4.0
    weight[:, 77] *= 1000.0
    assert_close(kernels.gemv(x, weight), x, weight)


def test_infinities_and_nans_travel(kernels: Kernels):
    x, weight = random(1, 64), random(4, 64)
    weight[0, 3], weight[1, 63], weight[2, 8] = float("inf"), -float("inf"), NAN
    x[0, 3] = x[0, 63] = 1.0
    y = kernels.gemv(x, weight).float().cpu()[0]
    assert y[0] == float("inf")
    assert y[1] == -float("inf")
    assert y[2].isnan()
    assert y[3].isfinite()


@pytest.mark.parametrize("m", [1, 2])
@pytest.mark.parametrize("offset", [0, 1, 3])
def test_out_of_any_alignment_and_stride_leaves_its_surroundings(
    kernels: Kernels, m: int, offset: int
):
    n, k = 37, 264
    x, weight = random(m, k), random(n, k)
    buffer = torch.full((m + 2, n + 7), 7.0, device="cuda", dtype=torch.bfloat16)
    out = buffer[1 : m + 1, offset : offset + n]
    out.fill_(NAN)
    kernels.gemv(x, weight, out=out)
    assert_close(out, x, weight)
    out.fill_(7.0)
    assert (buffer == 7.0).all()


def test_offsets_past_2_to_the_31_elements(kernels: Kernels):
    stride, n, k = 2**30 + 8, 5, 64
    if torch.cuda.mem_get_info()[0] < 3 * n * stride:
        pytest.skip("needs 16 GB of free device memory")
    flat = torch.empty((n - 1) * stride + k, device="cuda", dtype=torch.bfloat16)
    weight = flat.as_strided((n, k), (stride, 1))
    weight.copy_(random(n, k))
    x = random(2, k)
    assert_close(kernels.gemv(x, weight), x, weight)


def test_equal_inputs_give_equal_bits(kernels: Kernels):
    x, weight = random(2, 4096), random(2048, 4096)
    first = kernels.gemv(x, weight)
    for _ in range(20):
        assert torch.equal(kernels.gemv(x, weight), first)
