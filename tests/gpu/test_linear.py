"""`linear` on the device: the GEMV where it applies, and `torch.nn.functional.linear` elsewhere."""

from __future__ import annotations

from typing import Any

import pytest

from gemv_cases import DTYPES, Answer, bits, random, torch
from sonata_aot import loader
from sonata_aot.loader import Kernels

N, K = 192, 1024


@pytest.fixture
def seen(kernels: Kernels, monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """Shapes of x of the calls that reach the GEMV."""
    shapes: list[tuple[int, ...]] = []
    gemv = type(kernels.gemv)
    call = gemv.__call__

    def record(self: Any, x: Any, *others: Any, **more: Any) -> Any:
        shapes.append(tuple(x.shape))
        return call(self, x, *others, **more)

    monkeypatch.setattr(gemv, "__call__", record)
    return shapes


def operands(*shape: int, dtype: Any = torch.bfloat16) -> tuple[Any, Any, Any]:
    """X, weight and bias."""
    x = random(*shape, K, dtype=dtype)
    return x, random(N, K, dtype=dtype, scale=K**-0.5), random(N, dtype=dtype)


def same(found: Any, expected: Any) -> bool:
    return (found.shape, found.dtype) == (expected.shape, expected.dtype) and bool(
        torch.equal(found, expected)
    )


@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(), (1,), (8,), (2, 3), (2, 1, 4), (1, 1, 1, 5)])
def test_up_to_eight_rows_take_the_gemv(
    kernels: Kernels, seen: list[tuple[int, ...]], shape: tuple[int, ...], dtype: str, with_bias
):
    x, weight, bias = operands(*shape, dtype=DTYPES[dtype])
    given = bias if with_bias else None
    y = kernels.linear(x, weight, given)
    rows = x.reshape(-1, K)
    assert seen == [tuple(rows.shape)]
    assert y.shape == torch.nn.functional.linear(x, weight, given).shape
    assert same(y, kernels.gemv(rows, weight, given).view(*shape, N))
    assert not Answer.of(rows, weight, given).wrong(y.view(-1, N)).any()


def test_layouts_that_the_gemv_takes(kernels: Kernels, seen: list[tuple[int, ...]]):
    x, weight, bias = operands(2, 4)
    wide = random(2, 4, K + 3, dtype=x.dtype)
    cases = {
        "columns of a wider x": (wide[..., 1 : K + 1], weight),
        "dimensions swapped": (x.transpose(0, 1), weight),
        "x whose elements are apart": (random(2, 4, 2 * K, dtype=x.dtype)[..., ::2], weight),
        "weight off by one": (x, random(N, K + 1, dtype=x.dtype)[:, 1:]),
        "one x for all": (x[:1, :1].expand(2, 4, K), weight),
    }
    for name, (given, matrix) in cases.items():
        y = kernels.linear(given, matrix, bias)
        assert y.shape == (*given.shape[:2], N), name
        assert not Answer.of(given.reshape(8, K), matrix, bias).wrong(y.view(8, N)).any(), name
    assert len(seen) == len(cases)


def test_what_the_gemv_does_not_take_goes_to_torch(kernels: Kernels, seen: list[tuple[int, ...]]):
    x, weight, bias = operands(2)
    transposed = weight.T.contiguous().T
    cases = {
        "nine rows": (random(3, 3, K, dtype=x.dtype), weight, bias),
        "no rows": (x[:0], weight, bias),
        "no rows among dimensions": (random(2, 0, K, dtype=x.dtype), weight, bias),
        "float32": (x.float(), weight.float(), bias.float()),
        "on the cpu": (x.cpu(), weight.cpu(), bias.cpu()),
        "transposed weight": (x, transposed, bias),
        "a vector for a weight": (x, weight[0], None),
        "no K": (x[:, :0], weight[:, :0], bias),
    }
    for name, arguments in cases.items():
        expected = torch.nn.functional.linear(*arguments)
        assert same(kernels.linear(*arguments), expected), name
    assert seen == []


@pytest.mark.parametrize("leading", [(), (2,)])
def test_what_torch_refuses_is_refused_as_by_torch(
    kernels: Kernels, seen: list[tuple[int, ...]], leading: tuple[int, ...]
):
    x, weight, bias = operands(*leading)
    for arguments in (
        (x[..., :-8], weight, bias),
        (x, weight, bias[:-1]),
        (x.half(), weight, bias),
        (x, weight, bias.cpu()),
    ):
        with pytest.raises(RuntimeError) as raised:
            torch.nn.functional.linear(*arguments)
        with pytest.raises(type(raised.value)) as ours:
            kernels.linear(*arguments)
        assert str(ours.value) == str(raised.value)
    assert seen == []


@pytest.mark.parametrize("given", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("target", [torch.bfloat16, torch.float16])
def test_autocast_is_torchs(kernels: Kernels, seen: list[tuple[int, ...]], given: Any, target: Any):
    x, weight, bias = operands(2, dtype=given)
    with torch.autocast("cuda", dtype=target):
        expected = torch.nn.functional.linear(x, weight, bias)
        y = kernels.linear(x, weight, bias)
    assert y.dtype == target
    assert same(y, expected)
    assert seen == []
    with torch.autocast("cuda", enabled=False):
        kernels.linear(x, weight, bias)
    assert len(seen) == (given != torch.float32)


@pytest.mark.parametrize("which", [0, 1, 2])
def test_gradients_are_torchs(kernels: Kernels, seen: list[tuple[int, ...]], which: int):
    tensors = operands(2)
    gradients = []
    for function in (torch.nn.functional.linear, kernels.linear):
        leaf = tensors[which].clone().requires_grad_()
        arguments = [leaf if i == which else tensor for i, tensor in enumerate(tensors)]
        function(*arguments).square().sum().backward()
        gradients.append(leaf.grad)
    assert same(gradients[1], gradients[0])
    assert seen == []
    leaf = [tensor.clone().requires_grad_() for tensor in tensors]
    for quiet in (torch.no_grad(), torch.inference_mode()):
        with quiet:
            y = kernels.linear(*leaf)
        assert not y.requires_grad
    assert len(seen) == 2


def test_a_module_whose_forward_it_is(kernels: Kernels, seen: list[tuple[int, ...]]):
    linear = torch.nn.Linear(K, N, device="cuda", dtype=torch.bfloat16).requires_grad_(False)
    x = random(1, 2, K, dtype=torch.bfloat16)
    y = kernels.linear(x, linear.weight, linear.bias)
    assert not Answer.of(x[0], linear.weight, linear.bias).wrong(y[0]).any()
    assert len(seen) == 1


def test_inside_a_graph(kernels: Kernels):
    x, weight, bias = operands(1, 2)
    kernels.linear(x, weight, bias)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = kernels.linear(x, weight, bias)
    x.normal_()
    graph.replay()
    assert torch.equal(bits(y), bits(kernels.linear(x, weight, bias)))


def test_that_of_the_loader_is_that_of_the_kernels_loaded_first(
    kernels: Kernels, seen: list[tuple[int, ...]]
):
    x, weight, bias = operands(2, 2)
    y = loader.linear(x, weight, bias)
    assert seen == [(4, K)]
    assert not Answer.of(x.view(4, K), weight, bias).wrong(y.view(4, N)).any()
