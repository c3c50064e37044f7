"""Patching modules whose weights, classes or copies are not as `nn.Linear` makes them."""

from __future__ import annotations

import copy
import pickle
import sys
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize, prune

import small_models
from patched_block import K, N, counts, x_of
from plain_kernels import PlainKernels
from sonata_aot import loader
from sonata_aot.artifacts.errors import ArgumentError, VariantMissing
from sonata_aot.loader import fallback, operators

THE_MODEL = "(the model)"


class Doubled(nn.Module):
    def forward(self, value: Tensor) -> Tensor:
        return 2 * value


class OwnReduce(nn.Linear):
    def __reduce__(self) -> Any:
        return self.__class__, (K, N), self.__dict__


class OwnDeepcopy(nn.Linear):
    def __deepcopy__(self, memo: dict[int, Any]) -> OwnDeepcopy:
        made = type(self).__new__(type(self))
        made.__dict__.update(copy.deepcopy(self.__dict__, memo))
        return made


class Named(nn.Linear):
    def __init_subclass__(cls, *, name: str) -> None:
        cls.name = name


class Moody(nn.Module):
    def __getattr__(self, name: str) -> Any:
        raise RuntimeError(name)


class ShiftedBias(nn.Linear):
    """Has a property where the parameters hold something else."""

    def __init__(self) -> None:
        nn.Module.__init__(self)
        self.in_features, self.out_features = K, N
        self.weight = nn.Parameter(torch.randn(N, K))
        self._parameters["bias"] = nn.Parameter(torch.randn(N))

    @property
    def bias(self) -> Tensor:  # pyright: ignore
        held = self._parameters["bias"]
        assert held is not None
        return held + 1


def linear(kind: type[nn.Linear] = nn.Linear, k: int = K, n: int = N) -> Any:
    return kind(k, n).to(torch.bfloat16).requires_grad_(False)


def parametrized(model: nn.Linear, name: str) -> None:
    parametrize.register_parametrization(model, name, Doubled())


def pruned(model: nn.Linear, name: str) -> None:
    prune.l1_unstructured(model, name, 0.5)  # pyright: ignore[reportPrivateImportUsage]


def a_buffer(model: nn.Linear, name: str) -> None:
    value = getattr(model, name).detach() + 1
    delattr(model, name)
    model.register_buffer(name, value)


def a_plain_tensor(model: nn.Linear, name: str) -> None:
    value = getattr(model, name).detach() + 1
    delattr(model, name)
    setattr(model, name, value)


def shadowed(model: nn.Linear, name: str) -> None:
    object.__setattr__(model, name, getattr(model, name).detach() + 1)


@pytest.mark.parametrize("name", ["weight", "bias"])
@pytest.mark.parametrize(
    "change",
    [parametrized, pruned, a_buffer, a_plain_tensor, shadowed],
    ids=lambda change: change.__name__,
)
def test_what_is_no_parameter_is_left_to_the_original_code(
    kernels: PlainKernels, change: Callable[[nn.Linear, str], None], name: str
) -> None:
    x = x_of(2)
    model = linear()
    plain = model(x)
    report = loader.patch(model)
    change(model, name)
    found = model(x)
    assert counts(report, THE_MODEL) == (0, {fallback.COMPUTED: 1})
    report.undo()
    assert torch.equal(found, model(x))
    assert not torch.equal(found, plain)
    (entry,) = loader.patch(model)
    assert "computed" in (entry.reason or "")
    assert torch.equal(found, model(x))


def test_a_bias_that_is_a_property(kernels: PlainKernels) -> None:
    model = ShiftedBias().to(torch.bfloat16).requires_grad_(False)
    (entry,) = loader.patch(model)
    assert "computed" in (entry.reason or "")


def test_a_parametrization_of_a_patched_module_and_its_end(kernels: PlainKernels) -> None:
    model, x = linear(), x_of(2)
    plain = model(x)
    first = loader.patch(model)
    parametrized(model, "weight")
    copied = copy.deepcopy(model)
    assert torch.equal(copied(x), model(x))
    first.undo()
    parametrize.remove_parametrizations(model, "weight", leave_parametrized=False)
    assert torch.equal(model(x), plain)
    second = loader.patch(model)
    model(x_of(9))
    assert counts(second, THE_MODEL) == (0, {fallback.ROWS: 1})
    second.undo()
    assert type(model) is nn.Linear


def test_a_class_that_is_derived_from_a_patched_one(kernels: PlainKernels) -> None:
    """As FSDP does, which changes the class of a module."""
    model = linear()
    first = loader.patch(model)
    sharded = type("Sharded", (type(model),), {})
    model.__class__ = sharded
    first.undo()
    second = loader.patch(model)
    model(x_of(2))
    model(x_of(9))
    assert counts(first, THE_MODEL) == (0, {})
    assert counts(second, THE_MODEL) == (1, {fallback.ROWS: 1})
    second.undo()
    model(x_of(2))
    assert kernels.gemv_rows == [2]
    assert type(model) is sharded


@pytest.mark.parametrize("kind", [OwnReduce, OwnDeepcopy])
def test_classes_that_copy_themselves(kernels: PlainKernels, kind: type[nn.Linear]) -> None:
    model, x = linear(kind), x_of(2)
    expected = model(x)
    loader.patch(model)
    kernels.gemv.offset = 1.0
    for made in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert isinstance(made, kind)
        assert torch.equal(made(x), expected)
        loader.patch(made)
        assert not torch.equal(made(x), expected)
    assert not torch.equal(model(x), expected)


def test_the_argument_by_its_name(kernels: PlainKernels) -> None:
    model = linear()
    report = loader.patch(model)
    model(input=x_of(2))
    assert counts(report, THE_MODEL) == (1, {})
    with pytest.raises(TypeError):
        model(x=x_of(2))


def test_a_class_that_gets_another_forward(
    kernels: PlainKernels, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = linear()
    report = loader.patch(model)
    monkeypatch.setattr(nn.Linear, "forward", lambda self, x: "another")
    assert model(x_of(2)) == "another"
    assert counts(report, THE_MODEL) == (0, {fallback.REPLACED: 1})


def test_a_variant_that_was_not_built(
    kernels: PlainKernels, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def lacking(*_: Any) -> Any:
        raise VariantMissing("gemv: no binary for f16", remedy="build it")

    monkeypatch.setattr(kernels, "gemv", lacking)
    model, x = linear(), x_of(2)
    expected = model(x)
    report = loader.patch(model)
    assert torch.equal(model(x), expected)
    model(x)
    assert counts(report, THE_MODEL) == (0, {"gemv: no binary for f16": 2})
    assert caplog.text.count("no binary for f16") == 1


def test_modules_that_cannot_be_looked_at_or_derived_from(kernels: PlainKernels) -> None:
    class Final(Named, name="final"):
        pass

    model = nn.Sequential(Moody(), linear(Final), linear())
    reasons = [(entry.module, entry.reason) for entry in loader.patch(model)]
    assert [name for name, _ in reasons] == ["1", "2"]
    assert "cannot be extended" in (reasons[0][1] or "")
    assert reasons[1][1] is None
    assert type(model[1]) is Final


def test_a_part_that_was_patched_before_has_its_name_in_the_whole(kernels: PlainKernels) -> None:
    model = nn.Sequential(linear(), linear(nn.Linear, N, K))
    part = loader.patch(model[0])
    whole = loader.patch(model)
    model(x_of(2))
    assert [entry.module for entry in part] == [THE_MODEL]
    assert [entry.module for entry in whole] == ["0", "1"]
    assert counts(part, THE_MODEL) == counts(whole, "0") == (1, {})


def test_something_else_for_kernels(kernels: PlainKernels) -> None:
    with pytest.raises(ArgumentError, match=r"kernels is a str; pass what loader\.load"):
        loader.patch(linear(), "sm90")  # pyright: ignore[reportArgumentType]


def test_threads_that_patch_call_and_undo_at_once(kernels: PlainKernels) -> None:
    model = nn.Sequential(*(linear(nn.Linear, K, K) for _ in range(20)))
    x = x_of(2)
    expected = model(x)
    wrong: list[Any] = []

    def work() -> None:
        for _ in range(5):
            report = loader.patch(model)
            if not torch.equal(model(x), expected):
                wrong.append("result")
            # Linear, Module, object, and one class over them.
            wrong.extend(type(module) for module in model if len(type(module).__mro__) > 4)
            report.undo()

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        threads = [threading.Thread(target=work) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(interval)
    assert not wrong
    assert all(type(module) is nn.Linear for module in model)


@pytest.fixture
def programs(kernels: PlainKernels) -> Any:
    """The operators on the CPU."""
    library = torch.library.Library(operators.NAMESPACE, "IMPL")
    library.impl("gemv", operators._run_gemv, "CPU")
    library.impl("mamba_chunk_scan_combined", operators._run_scan, "CPU")
    yield library
    library._destroy()
    torch._dynamo.reset()


def only_the_bias_learns(model: nn.Linear) -> None:
    model.bias.requires_grad_()


def transposed(model: nn.Linear) -> None:
    weight = torch.randn(K, N, dtype=torch.bfloat16).T
    model.weight = nn.Parameter(weight, requires_grad=False)


def bias_with_gaps(model: nn.Linear) -> None:
    bias = torch.randn(N, 2, dtype=torch.bfloat16)[:, 0]
    model.bias = nn.Parameter(bias, requires_grad=False)


@pytest.mark.parametrize(
    "change", [only_the_bias_learns, transposed, bias_with_gaps], ids=lambda change: change.__name__
)
def test_a_program_takes_the_original_code_where_a_call_would(
    kernels: PlainKernels, programs: Any, change: Callable[[nn.Linear], None]
) -> None:
    model, x = linear(), x_of(2)
    change(model)
    loader.patch(model)
    found = torch.compile(model, fullgraph=True, backend="aot_eager")(x)
    assert torch.equal(found, model(x))
    assert kernels.gemv_rows == []


def mixer() -> Any:
    return small_models.make("mamba2", 8, 16).backbone.layers[0].mixer


@pytest.mark.filterwarnings("ignore")
def test_a_program_of_a_mixer_that_was_made_wider(kernels: PlainKernels, programs: Any) -> None:
    model = mixer()
    loader.patch(model)
    ids = torch.randn(1, 20, 32, dtype=torch.bfloat16)
    torch.compile(model, backend="aot_eager")(ids)
    assert len(kernels.scans) == 1
    torch._dynamo.reset()
    model.float()
    torch.compile(model, backend="aot_eager")(ids.float())
    assert len(kernels.scans) == 1


def test_a_mixer_that_was_moved_to_another_device(
    kernels: PlainKernels, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = mixer()
    report = loader.patch(model)
    monkeypatch.setattr(fallback, "device_of", lambda tensor: 1)
    model(torch.randn(1, 20, 32, dtype=torch.bfloat16))
    assert counts(report, THE_MODEL) == (0, {fallback.ELSEWHERE: 1})
    assert kernels.scans == []


class Quantised(nn.Module):
    qweight = torch.zeros(1, dtype=torch.int32)


def test_a_mixer_whose_projection_is_quantised(kernels: PlainKernels) -> None:
    model = mixer()
    model.in_proj = Quantised()
    assert loader.patch(model).entries[0].kernel == "mamba_chunk_scan_combined"
    del model.conv1d.weight
    report = loader.patch(copy.deepcopy(model))
    assert "floating point" in (report.entries[0].reason or "")


def test_a_mixer_without_what_its_class_has(
    kernels: PlainKernels, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = mixer()
    del model.n_groups
    assert "n_groups" in (loader.patch(model).entries[0].reason or "")
    monkeypatch.setattr("transformers.__version__", "6.0.0")
    assert "6.0.0 was not tested" in (loader.patch(model).entries[0].reason or "")
