"""Patched `nn.Linear`: which calls the GEMV answers, and with which weight."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable

import pytest
import torch
from torch import nn

from patched_block import Block, K, N, block, counts, x_of
from plain_kernels import PlainKernels
from sonata_aot import loader
from sonata_aot.loader import fallback


@pytest.fixture
def model() -> Block:
    return block()


@pytest.mark.parametrize("shape", [(1,), (8,), (), (2, 1), (8, 1), (1, 5), (2, 2, 2)])
def test_up_to_eight_rows_run_on_the_kernel(
    kernels: PlainKernels, model: Block, shape: tuple[int, ...]
) -> None:
    x = x_of(*shape)
    expected = model(x)
    report = loader.patch(model)
    assert torch.equal(model(x), expected)
    rows = x.numel() // K
    assert kernels.gemv_rows == [rows, rows]
    assert counts(report, "up") == counts(report, "down") == (1, {})


@pytest.mark.parametrize("shape", [(9,), (2, 5), (0,)])
def test_other_calls_run_the_original_code(
    kernels: PlainKernels, model: Block, shape: tuple[int, ...]
) -> None:
    x = x_of(*shape)
    expected = model(x)
    report = loader.patch(model)
    kernels.gemv.offset = 1.0
    assert torch.equal(model(x), expected)
    assert counts(report, "up") == (0, {fallback.ROWS: 1})


def test_rows_that_are_apart(kernels: PlainKernels, model: Block) -> None:
    for x in (x_of(4, 3)[:, 1], torch.randn(K, 4, dtype=torch.bfloat16).T):
        expected = model(x)
        with loader.patch(model):
            assert torch.equal(model(x), expected)
    assert kernels.gemv_rows == [4] * 4


def replaced(model: Block) -> None:
    model.up.weight = nn.Parameter(torch.randn_like(model.up.weight), requires_grad=False)


def assigned(model: Block) -> None:
    state = {name: torch.randn_like(value) for name, value in model.state_dict().items()}
    model.load_state_dict(state, assign=True)


def loaded(model: Block) -> None:
    state = {name: torch.randn_like(value) for name, value in model.state_dict().items()}
    model.load_state_dict(state)


def swapped(model: Block) -> None:
    model.up.weight.data = torch.randn_like(model.up.weight)


def bias_swapped(model: Block) -> None:
    model.up.bias.data = torch.randn_like(model.up.bias)


def bias_replaced(model: Block) -> None:
    model.up.bias = nn.Parameter(torch.randn_like(model.up.bias), requires_grad=False)


def bias_removed(model: Block) -> None:
    model.up.bias = None  # pyright: ignore[reportAttributeAccessIssue]


def moved(model: Block) -> None:
    kept = model.up.weight.data
    model.up.to(torch.float64).to(torch.bfloat16)
    assert model.up.weight.data_ptr() != kept.data_ptr()
    kept.zero_()
    model.up.weight.data.normal_()


def cast_to_half(model: Block) -> None:
    model.half()


CHANGES = [
    *(replaced, assigned, loaded, swapped, bias_swapped, bias_replaced, bias_removed, moved),
    cast_to_half,
]


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_changed_weights_are_noticed(
    kernels: PlainKernels, model: Block, change: Callable[[Block], None]
) -> None:
    report = loader.patch(model)
    x = x_of(2)
    before = model(x)
    model(x)
    change(model)
    x = x.to(model.up.weight.dtype)
    found = model(x)
    assert counts(report, "up")[0] == 3
    report.undo()
    assert torch.equal(found, model(x))
    assert not torch.equal(found, before.to(found.dtype))


def test_weights_that_no_kernel_takes_any_more(kernels: PlainKernels, model: Block) -> None:
    report = loader.patch(model)
    model(x_of(2))
    model.float()
    x = x_of(2).float()
    found = model(x)
    assert counts(report, "up") == (1, {fallback.DTYPE: 1})
    assert torch.equal(found, nn.functional.linear(model.up(x), model.down.weight))


def test_a_replaced_weight_is_not_kept_alive(kernels: PlainKernels, model: Block) -> None:
    loader.patch(model)
    for _ in range(4):
        model(x_of(1))
    old = weakref.ref(model.down.weight)
    model.down.weight = nn.Parameter(torch.randn(K, N, dtype=torch.bfloat16), requires_grad=False)
    model(x_of(1))
    gc.collect()
    assert old() is None


def test_what_is_written_to_an_inference_tensor_counts(kernels: PlainKernels) -> None:
    with torch.inference_mode():
        model = nn.Linear(K, N, dtype=torch.bfloat16)
        loader.patch(model)
        x = x_of(1)
        model(x)
        model.weight.zero_()
        assert torch.equal(model(x), model.bias[None])
    assert kernels.gemv_rows == [1, 1]


def test_gradients_run_the_original_code(kernels: PlainKernels, model: Block) -> None:
    report = loader.patch(model.requires_grad_())
    kernels.gemv.offset = 1.0
    model(x_of(2)).sum().backward()
    assert model.up.weight.grad is not None
    assert counts(report, "up") == (0, {fallback.GRADIENT: 1})
    assert fallback.GRADIENT in str(report)
    with torch.no_grad():
        model(x_of(2))
    assert counts(report, "up") == (1, {fallback.GRADIENT: 1})
