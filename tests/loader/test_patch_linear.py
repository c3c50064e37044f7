"""Patched `nn.Linear`: which calls the GEMV answers, and with which weight."""

from __future__ import annotations

import copy
import gc
import logging
import pickle
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from plain_kernels import PlainKernels
from sonata_aot import loader
from sonata_aot.artifacts.errors import ArgumentError, SonataError
from sonata_aot.loader import default, fallback, operators

K, N = 16, 8


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> PlainKernels:
    """Kernels that patched models take for the process's, on CPU tensors."""
    found = PlainKernels()
    monkeypatch.setattr(default, "_default", found)
    monkeypatch.setattr(fallback, "device_of", lambda tensor: 0 if tensor.is_cpu else None)
    return found


class Block(nn.Module):
    """Two projections after one another, and one that nobody calls."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(K, N)
        self.down = nn.Linear(N, K, bias=False)
        self.wide = nn.Linear(K, N, dtype=torch.float32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.up(x))


@pytest.fixture
def model() -> Block:
    made = Block().to(torch.bfloat16).requires_grad_(False)
    made.wide.float()
    return made


def x_of(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, K, dtype=torch.bfloat16)


def counts(report: Any, module: str) -> tuple[int, dict[str, int]]:
    entry = next(entry for entry in report if entry.module == module)
    return entry.calls, dict(entry.original_calls)


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


def test_a_weight_is_bound_once_and_knows_the_next(kernels: PlainKernels, model: Block) -> None:
    loader.patch(model)
    for _ in range(6):
        model(x_of(1))
    # Once with what comes next unknown, and once with it known.
    up, down = model.up.weight, model.down.weight
    assert [bound.weight is up for bound in kernels.gemv.bound] == [True, False, True, False]
    assert [bound.upcoming for bound in kernels.gemv.bound[:2]] == [None, None]
    assert kernels.gemv.bound[2].upcoming is down
    assert kernels.gemv.bound[3].upcoming is up


def test_a_replaced_weight_is_not_kept_alive(kernels: PlainKernels, model: Block) -> None:
    loader.patch(model)
    for _ in range(4):
        model(x_of(1))
    kernels.gemv.bound.clear()
    old = weakref.ref(model.down.weight)
    model.down.weight = nn.Parameter(torch.randn(K, N, dtype=torch.bfloat16), requires_grad=False)
    for _ in range(2):
        model(x_of(1))
    kernels.gemv.bound.clear()
    gc.collect()
    assert old() is None


def test_an_inference_tensor_is_never_bound(kernels: PlainKernels) -> None:
    with torch.inference_mode():
        model = nn.Linear(K, N, dtype=torch.bfloat16)
        loader.patch(model)
        x = x_of(1)
        model(x)
        model.weight.zero_()
        assert torch.equal(model(x), model.bias[None])
    assert kernels.gemv.bound == []
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
