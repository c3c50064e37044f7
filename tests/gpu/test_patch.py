"""Patched models on the device, with random weights."""

from __future__ import annotations

import copy
import importlib
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import small_models
from mamba2_reference import error as relative_error
from mamba2_reference import expected as mamba2_expected
from small_models import generate, make, tokens
from sonata_aot import loader
from sonata_aot.aot.measure import mamba_opponent
from sonata_aot.artifacts.errors import MissingDependency
from sonata_aot.loader import default, fallback

K, N = 512, 384
HEADDIM, DSTATE, HIDDEN = 64, 128, 256


@pytest.fixture(autouse=True)
def as_default(kernels: loader.Kernels, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernels under test are the process's."""
    monkeypatch.setattr(default, "_default", kernels)


def x_of(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, K, device="cuda").to(torch.bfloat16)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(K, N)
        self.down = nn.Linear(N, K, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.up(x))


@pytest.fixture
def model() -> Block:
    return Block().to("cuda", torch.bfloat16).requires_grad_(False)


def error(model: Block, x: torch.Tensor, found: torch.Tensor) -> float:
    """Relative error of a Block's result against float64, rounded to bfloat16 in between."""
    weights = [model.up.weight, model.up.bias, model.down.weight]
    up, bias, down = (weight.double() for weight in weights)
    inner = (x.double() @ up.T + bias).to(torch.bfloat16).double()
    wanted = inner @ down.T
    return ((found.double() - wanted).norm() / wanted.norm()).item()


def counts(report: Any, name: str) -> tuple[int, dict[str, int]]:
    entry = next(entry for entry in report if entry.module == name)
    return entry.calls, dict(entry.original_calls)


@pytest.mark.parametrize("shape", [(1,), (8,), (2, 1), (8, 1), (1, 3)])
def test_decode_shapes_run_on_the_gemv(model: Block, shape: tuple[int, ...]):
    x = x_of(*shape)
    report = loader.patch(model)
    for _ in range(3):
        assert error(model, x, model(x)) < 2**-7
    assert counts(report, "up") == counts(report, "down") == (3, {})


def test_prefill_is_torchs(model: Block):
    x = x_of(2, 100)
    expected = model(x)
    report = loader.patch(model)
    assert torch.equal(model(x), expected)
    assert counts(report, "up") == (0, {fallback.ROWS: 1})


def replaced(model: Block) -> None:
    model.up.weight = nn.Parameter(torch.randn_like(model.up.weight), requires_grad=False)


def assigned(model: Block) -> None:
    state = {name: torch.randn_like(value) for name, value in model.state_dict().items()}
    model.load_state_dict(state, assign=True)


def loaded(model: Block) -> None:
    state = {name: torch.randn_like(value) for name, value in model.state_dict().items()}
    model.load_state_dict(state)


def swapped(model: Block) -> None:
    for tensor in (model.up.weight, model.up.bias):
        tensor.data = torch.randn_like(tensor)


def moved(model: Block) -> None:
    model.cpu()
    for tensor in model.parameters():
        tensor.normal_()
    model.cuda()


def cast(model: Block) -> None:
    model.half()


@pytest.mark.parametrize(
    "change", [replaced, assigned, loaded, swapped, moved, cast], ids=lambda one: one.__name__
)
def test_changed_weights_are_noticed(model: Block, change: Callable[[Block], None]):
    report = loader.patch(model)
    x = x_of(2)
    for _ in range(3):
        model(x)
    change(model)
    x = x.to(model.up.weight.dtype)
    found = model(x)
    assert counts(report, "up") == (4, {})
    report.undo()
    expected = model(x).double()
    assert (found.double() - expected).norm() < 2**-6 * expected.norm()


def test_a_captured_step_follows_its_input(model: Block):
    x = x_of(2, 1)
    report = loader.patch(model)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            model(x)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = model(x)
    seen = set()
    for _ in range(4):
        x.copy_(x_of(2, 1))
        graph.replay()
        assert error(model, x, y) < 2**-7
        seen.add(y.sum().item())
    assert len(seen) == 4
    assert counts(report, "up")[0] == 4


def test_undo_copies_pickles_and_disabling(model: Block, monkeypatch: pytest.MonkeyPatch):
    x = x_of(2)
    expected = model(x)
    with loader.patch(model) as report:
        model(x)
        for made in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
            assert type(made.up) is nn.Linear
            assert torch.equal(made(x), expected)
        monkeypatch.setenv("SONATA_AOT_DISABLE", "1")
        assert torch.equal(model(x), expected)
        assert counts(report, "up") == (1, {"SONATA_AOT_DISABLE is set": 1})
        monkeypatch.delenv("SONATA_AOT_DISABLE")
    assert type(model.up) is nn.Linear
    assert torch.equal(model(x), expected)


def test_gradients_are_torchs(model: Block):
    report = loader.patch(model.requires_grad_())
    model(x_of(2)).sum().backward()
    assert model.up.weight.grad is not None
    assert counts(report, "up") == (0, {fallback.GRADIENT: 1})


def test_a_compiled_model(model: Block):
    x = x_of(2, 1)
    loader.patch(model)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    assert error(model, x, compiled(x)) < 2**-7
    program = torch.export.export(model, (x,))
    assert str(program.graph).count("torch.ops.sonata_aot.gemv.default") == 2


def test_compare_mode(model: Block):
    report = loader.patch(model, compare=1.0)
    model(x_of(2))
    assert [entry.compared for entry in report] == [1, 1]
    assert all(0 <= entry.largest_error < 2**-7 for entry in report)


def language_model_errors(family: str) -> tuple[Any, float, float]:
    """The report, and the errors of patched and unpatched first logits against float32."""
    model = make(family, HEADDIM, DSTATE, hidden=HIDDEN).cuda()
    ids = tokens(2, 100, "cuda")
    _, original = generate(model, ids, 3)
    with loader.patch(model) as report:
        _, found = generate(model, ids, 3)
        print(report)
    _, again = generate(model, ids, 3)
    assert torch.equal(again, original)
    _, exact = generate(model.float(), ids, 3)

    def error(logits: torch.Tensor) -> float:
        return ((logits[0] - exact[0]).norm() / exact[0].norm()).item()

    return report, error(found), error(original)


def check_language_model(family: str) -> None:
    report, ours, theirs = language_model_errors(family)
    assert not report.left_alone
    mixers = [entry for entry in report if entry.kernel == "mamba_chunk_scan_combined"]
    assert [entry.calls for entry in mixers] == [1] * small_models.FAMILIES[family]
    assert all(entry.calls for entry in report)
    # Both round to bfloat16 throughout; the original's scan, without mamba_ssm, is in float32.
    assert ours < 2 * theirs + 2**-8, (ours, theirs)


def test_a_language_model(kernels: loader.Kernels):
    pytest.importorskip("transformers")
    check_language_model("mamba2")


@pytest.mark.parametrize("kernels", ["sm90"], indirect=True)
@pytest.mark.parametrize("family", [name for name in small_models.FAMILIES if name != "mamba2"])
def test_every_family(kernels: loader.Kernels, family: str):
    pytest.importorskip("transformers")
    check_language_model(family)


@pytest.mark.parametrize("kernels", ["sm90"], indirect=True)
@pytest.mark.parametrize("options", [{}, {"rmsnorm": False}, {"D_has_hdim": True}])
def test_mamba_ssm(kernels: loader.Kernels, options: dict[str, Any]):
    """The fused function of mamba_ssm's own module; no Triton kernel runs."""
    try:
        mamba_opponent.load()
    except MissingDependency as missing:
        pytest.skip(str(missing))
    # Its packages are empty stand-ins by now, that know no version.
    vars(importlib.import_module("mamba_ssm"))["__version__"] = mamba_opponent.VERSION
    try:
        mamba2 = importlib.import_module("mamba_ssm.modules.mamba2").Mamba2
    except ImportError as missing:
        pytest.skip(str(missing))
    module = mamba2(HIDDEN, d_state=DSTATE, headdim=HEADDIM, ngroups=1, **options)
    module = module.to("cuda", torch.bfloat16).requires_grad_(False)
    u = torch.randn(2, 70, HIDDEN, device="cuda").to(torch.bfloat16)
    report = loader.patch(module)
    assert relative_error(module(u), mamba2_expected(module, u)) < 2**-6
    assert report.entries[0].calls == 1
