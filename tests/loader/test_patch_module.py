"""Patching a model: what is patched, what it looks like then, and how it ends."""

from __future__ import annotations

import copy
import pickle
from typing import Any

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


def test_a_report_says_what_was_done(kernels: PlainKernels, model: Block) -> None:
    report = loader.patch(model)
    assert [(entry.module, entry.shape, entry.kernel) for entry in report] == [
        ("up", f"{K} -> {N}, bias", "gemv"),
        ("down", f"{N} -> {K}", "gemv"),
        ("wide", f"{K} -> {N}, bias", None),
    ]
    assert "float32" in (report.left_alone[0].reason or "")
    model(x_of(2))
    model(x_of(20))
    text = str(report)
    assert "2 of 3 modules patched" in text
    assert f"1: {fallback.ROWS}" in text
    assert max(map(len, text.splitlines())) < 160


def test_modules_of_one_kind_share_a_line(kernels: PlainKernels) -> None:
    layers = nn.Sequential(*(nn.Linear(K, K, dtype=torch.bfloat16) for _ in range(30)))
    report = loader.patch(layers.requires_grad_(False))
    layers(x_of(1))
    lines = str(report).splitlines()
    assert len(lines) == 3
    assert lines[1].split() == ["30", "x", "*", "16", "->", "16,", "bias", "gemv", "30"]


def test_undo_and_with(kernels: PlainKernels, model: Block) -> None:
    class_before = type(model.up)
    kernels.gemv.offset = 1.0
    x = x_of(1)
    original = model(x)
    with loader.patch(model) as report:
        assert not torch.equal(model(x), original)
        assert isinstance(model.up, nn.Linear)
    assert torch.equal(model(x), original)
    assert type(model.up) is class_before
    assert vars(model.up).keys() == vars(nn.Linear(1, 1)).keys()
    report.undo()
    with pytest.raises(ZeroDivisionError), loader.patch(model):
        raise ZeroDivisionError
    assert torch.equal(model(x), original)


def test_a_method_taken_before_undo_is_the_original_after(
    kernels: PlainKernels, model: Block
) -> None:
    report = loader.patch(model)
    kernels.gemv.offset = 1.0
    forward = model.up.forward
    report.undo()
    assert torch.equal(forward(x := x_of(1)), model.up(x))
    assert kernels.gemv_rows == []


def test_patching_twice_is_patching_once(kernels: PlainKernels, model: Block) -> None:
    first = loader.patch(model)
    second = loader.patch(model)
    model(x_of(1))
    assert kernels.gemv_rows == [1, 1]
    assert counts(first, "up") == counts(second, "up") == (1, {})
    second.undo()
    model(x_of(1))
    assert kernels.gemv_rows == [1, 1]
    assert type(model.up) is nn.Linear


def test_other_kernels_patch_anew(kernels: PlainKernels, model: Block) -> None:
    other = PlainKernels()
    first = loader.patch(model)
    second = loader.patch(model, other)  # pyright: ignore[reportArgumentType]
    model(x_of(1))
    assert (kernels.gemv_rows, other.gemv_rows) == ([], [1, 1])
    assert "not the default" in str(second)
    first.undo()
    model(x_of(1))
    assert other.gemv_rows == [1, 1, 1, 1]
    second.undo()
    assert type(model.up) is nn.Linear


def test_another_model_is_not_affected(kernels: PlainKernels, model: Block) -> None:
    other = Block().to(torch.bfloat16).requires_grad_(False)
    loader.patch(model)
    other(x_of(1))
    assert kernels.gemv_rows == []
    assert type(other.up) is nn.Linear


def test_copies_and_pickles_are_of_the_original(kernels: PlainKernels, model: Block) -> None:
    x = x_of(1)
    expected = model(x)
    report = loader.patch(model)
    model(x)
    kernels.gemv.offset = 1.0
    for made in (
        copy.deepcopy(model),
        pickle.loads(pickle.dumps(model)),
        pickle.loads(pickle.dumps(model, protocol=1)),
    ):
        assert type(made.up) is nn.Linear
        assert vars(made.up).keys() == vars(nn.Linear(1, 1)).keys()
        assert torch.equal(made(x), expected)
        assert torch.equal(loader.patch(made).entries[0].calls * x, 0 * x)
        assert not torch.equal(made(x), expected)
    assert type(copy.copy(model.up)) is nn.Linear
    assert "sonata" not in pickle.dumps(model).decode("latin-1")
    assert not torch.equal(model(x), expected)
    report.undo()


def test_the_state_dict_stays_what_it_was(kernels: PlainKernels, model: Block) -> None:
    before = {name: value.clone() for name, value in model.state_dict().items()}
    text = repr(model)
    loader.patch(model)
    model(x_of(1))
    after = model.state_dict()
    assert list(before) == list(after)
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert repr(model) == text
    model.load_state_dict(before)


def test_hooks_run(kernels: PlainKernels, model: Block) -> None:
    seen: list[str] = []
    model.up.register_forward_hook(lambda *_: seen.append("old"))
    loader.patch(model)
    model.up.register_forward_pre_hook(lambda *_: seen.append("new"))
    model(x_of(1))
    assert seen == ["new", "old"]


class OwnForward(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:  # pyright: ignore
        return super().forward(x) + 1


class OwnName(nn.Linear):
    pass


def test_which_modules_are_left_alone(kernels: PlainKernels) -> None:
    half: dict[str, Any] = {"dtype": torch.bfloat16}
    hooked = nn.Linear(K, N, **half)
    hooked.forward = hooked.forward
    shaped = nn.utils.parametrizations.weight_norm(nn.Linear(K, N, **half))
    model = nn.ModuleDict(
        {
            "own_forward": OwnForward(K, N, **half),
            "own_name": OwnName(K, N, **half),
            "hooked": hooked,
            "shaped": shaped,
            "elsewhere": nn.Linear(K, N, device="meta", **half),
            "wide": nn.Linear(K, N),
            "attention": nn.MultiheadAttention(K, 2, **half),
            "not_linear": nn.Conv1d(1, 1, 1),
        }
    )
    reasons = {entry.module: entry.reason or entry.kernel for entry in loader.patch(model)}
    words = {
        "own_forward": "OwnForward has a forward of its own",
        "own_name": "gemv",
        "hooked": "replaced already",
        "shaped": "computed",
        "elsewhere": "meta",
        "wide": "float32",
        "attention.out_proj": "gemv",
    }
    assert reasons.keys() == words.keys()
    for name, word in words.items():
        assert word in (reasons[name] or ""), (name, reasons[name])
