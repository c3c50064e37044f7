"""Patched models that are switched off, compared or compiled."""

from __future__ import annotations

import logging
import random
from typing import Any

import pytest
import torch
from torch import nn

from patched_block import Block, N, block, counts, x_of
from plain_kernels import PlainKernels
from sonata_aot import loader
from sonata_aot.artifacts.errors import ArgumentError, SonataError
from sonata_aot.loader import default, operators


@pytest.fixture
def model() -> Block:
    return block()


def test_disabled_models_run_their_original_code(
    kernels: PlainKernels, model: Block, monkeypatch: pytest.MonkeyPatch
) -> None:
    x = x_of(1)
    expected = model(x)
    report = loader.patch(model)
    kernels.gemv.offset = 1.0
    monkeypatch.setenv("SONATA_AOT_DISABLE", "1")
    assert torch.equal(model(x), expected)
    assert counts(report, "up") == (0, {"SONATA_AOT_DISABLE is set": 1})
    monkeypatch.setenv("SONATA_AOT_DISABLE", "0")
    assert not torch.equal(model(x), expected)


def test_a_disabled_process_needs_no_kernels(
    kernels: PlainKernels, model: Block, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(default, "_default", None)
    monkeypatch.setenv("SONATA_AOT_DISABLE", "1")
    with loader.patch(model) as report:
        assert "SONATA_AOT_DISABLE" in str(report)
        assert type(model.up) is nn.Linear


def test_compare_mode_logs_the_error(
    kernels: PlainKernels, model: Block, caplog: pytest.LogCaptureFixture
) -> None:
    report = loader.patch(model, compare=1.0)
    kernels.gemv.offset = 2.0
    x = x_of(1)
    with caplog.at_level(logging.INFO, logger="sonata_aot"):
        ours = model.up(x)
    original = nn.functional.linear(x, model.up.weight, model.up.bias)
    assert not torch.equal(ours, original)
    error = (ours.float() - original.float()).norm() / original.float().norm()
    entry = report.entries[0]
    assert entry.compared == 1
    assert entry.largest_error == pytest.approx(error.item())
    assert f"up by gemv: relative error {error:.2e}" in caplog.text
    assert f"largest relative error {error:.2e}, in up" in str(report)


def test_compare_mode_samples_a_share(kernels: PlainKernels, model: Block) -> None:
    report = loader.patch(model, compare=0.25)
    state = torch.get_rng_state()
    x = x_of(1)
    torch.set_rng_state(state)
    for _ in range(100):
        model.up(x)
    assert 10 < report.entries[0].compared < 45
    assert torch.equal(torch.get_rng_state(), state)


def test_compare_mode_draws_from_no_generator_of_the_model(
    kernels: PlainKernels, model: Block
) -> None:
    loader.patch(model, compare=0.5)
    state = random.getstate()
    for _ in range(10):
        model.up(x_of(1))
    assert random.getstate() == state


def test_nothing_is_compared_while_a_graph_is_captured(
    kernels: PlainKernels, model: Block, monkeypatch: pytest.MonkeyPatch
) -> None:
    report = loader.patch(model, compare=1.0)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    model.up(x_of(1))
    assert (report.entries[0].calls, report.entries[0].compared) == (1, 0)


def test_compare_mode_takes_the_difference_where_nothing_was_expected(
    kernels: PlainKernels, model: Block
) -> None:
    model.up.weight.zero_()
    model.up.bias.zero_()
    report = loader.patch(model, compare=1.0)
    kernels.gemv.offset = 1.0
    model.up(x_of(1))
    entry = report.entries[0]
    assert (entry.compared, entry.largest_error) == (1, pytest.approx(N**0.5))


def test_another_share_patches_anew(kernels: PlainKernels, model: Block) -> None:
    first = loader.patch(model)
    second = loader.patch(model, compare=1.0)
    model.up(x_of(1))
    assert counts(first, "up")[0] == 0
    assert (second.entries[0].calls, second.entries[0].compared) == (1, 1)
    first.undo()
    assert type(model.up) is not nn.Linear


def test_compare_mode_keeps_a_nan(kernels: PlainKernels, model: Block) -> None:
    report = loader.patch(model, compare=1.0)
    kernels.gemv.offset = float("nan")
    model.up(x_of(1))
    kernels.gemv.offset = 0.5
    model.up(x_of(1))
    assert report.entries[0].largest_error != report.entries[0].largest_error


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((3,), "Module"),
        ((nn.Linear(1, 1), None, 2.0), "share"),
        ((nn.Linear(1, 1), None, True), "share"),
    ],
)
def test_wrong_arguments(kernels: PlainKernels, arguments: Any, words: str) -> None:
    model, *more = arguments
    options = {"compare": more[1]} if more else {}
    with pytest.raises(ArgumentError, match=words):
        loader.patch(model, **options)


def test_nothing_loaded(kernels: PlainKernels, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(default, "_default", None)
    with pytest.raises(SonataError, match=r"patch: no kernels.*load"):
        loader.patch(nn.Linear(1, 1))


@pytest.fixture
def programs(kernels: PlainKernels) -> Any:
    """The GEMV's operator on the CPU."""
    library = torch.library.Library(operators.NAMESPACE, "IMPL")
    library.impl("gemv", operators._run_gemv, "CPU")
    yield library
    library._destroy()


def test_a_compiled_model_calls_the_operator(
    kernels: PlainKernels, programs: Any, model: Block
) -> None:
    x, long = x_of(2, 1), x_of(2, 30)
    expected, expected_long = model(x), model(long)
    report = loader.patch(model)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager", dynamic=False)
    assert torch.equal(compiled(x), expected)
    assert kernels.gemv_rows == [2, 2]
    assert torch.equal(compiled(long), expected_long)
    assert kernels.gemv_rows == [2, 2]
    program = torch.export.export(model, (x,))
    assert str(program.graph).count("torch.ops.sonata_aot.gemv.default") == 2
    report.undo()
    # What was compiled while it was patched is not run any more.
    kernels.gemv.offset = 1.0
    assert torch.equal(compiled(x), expected)


def test_a_model_that_is_compiled_while_disabled_or_in_autocast_does_not(
    kernels: PlainKernels, programs: Any, model: Block, monkeypatch: pytest.MonkeyPatch
) -> None:
    x = x_of(2)
    loader.patch(model)
    monkeypatch.setenv("SONATA_AOT_DISABLE", "1")
    torch.compile(model, fullgraph=True, backend="aot_eager")(x)
    monkeypatch.delenv("SONATA_AOT_DISABLE")
    torch._dynamo.reset()
    torch.set_autocast_enabled("cuda", True)
    try:
        torch.compile(model, fullgraph=True, backend="aot_eager")(x)
    finally:
        torch.set_autocast_enabled("cuda", False)
    assert kernels.gemv_rows == []
    torch._dynamo.reset()
    torch.compile(model, fullgraph=True, backend="aot_eager")(x)
    assert kernels.gemv_rows == [2, 2]


def test_a_compiled_model_with_gradients_or_other_kernels_does_not(
    kernels: PlainKernels, programs: Any, model: Block
) -> None:
    x = x_of(2)
    loader.patch(model.requires_grad_())
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    compiled(x).sum().backward()
    assert model.up.weight.grad is not None
    torch._dynamo.reset()
    loader.patch(model.requires_grad_(False), PlainKernels())  # pyright: ignore
    torch.compile(model, fullgraph=True, backend="aot_eager")(x)
    assert kernels.gemv_rows == []


def test_compare_mode_survives_the_original_code(
    kernels: PlainKernels, model: Block, monkeypatch: pytest.MonkeyPatch, caplog: Any
) -> None:
    report = loader.patch(model, compare=1.0)
    x = x_of(1)
    found = model.up(x)

    def fail(*_: Any) -> Any:
        raise RuntimeError("out of memory")

    monkeypatch.setattr(nn.functional, "linear", fail)
    assert torch.equal(model.up(x), found)
    assert (report.entries[0].calls, report.entries[0].compared) == (2, 1)
    assert "compare: up: the original code failed: out of memory" in caplog.text
