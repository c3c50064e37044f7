"""Patched models of transformers: whose scans and projections run where, and what comes out."""

from __future__ import annotations

import copy
import logging
import pickle
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest
import torch

import small_models
from plain_kernels import PlainKernels
from small_models import generate, make, tokens
from sonata_aot import loader
from sonata_aot.loader import fallback, operators, patch_families

pytest.importorskip("transformers")

HEADDIM, DSTATE = 8, 16


@pytest.fixture
def model() -> Any:
    return make("mamba2", HEADDIM, DSTATE)


def mixers(report: Any) -> list[Any]:
    return [entry for entry in report if entry.kernel == "mamba_chunk_scan_combined"]


def error(found: torch.Tensor, expected: torch.Tensor) -> float:
    return ((found - expected).norm() / expected.norm()).item()


@pytest.mark.parametrize("family", small_models.FAMILIES)
def test_every_family_runs_on_the_kernels(kernels: PlainKernels, family: str) -> None:
    model = make(family, HEADDIM, DSTATE)
    ids = tokens(2, 5)
    _, expected = generate(model, ids, 3)
    with loader.patch(model) as report:
        _, found = generate(model, ids, 3)
    # The first logits are of the same tokens for sure. bfloat16 keeps 8 bits.
    assert error(found[0], expected[0]) < 2**-6
    assert not report.left_alone
    assert [entry.calls for entry in mixers(report)] == [1] * small_models.FAMILIES[family]
    for entry in report:
        if entry.kernel == "gemv":
            prompt = 0 if entry.module == "lm_head" else 1  # that sees the last token only
            assert entry.calls == 3 - prompt, entry
            assert dict(entry.original_calls) == ({fallback.ROWS: 1} if prompt else {}), entry
    assert all(len(scan["x"].shape) == 4 and scan["return_final_states"] for scan in kernels.scans)
    _, again = generate(model, ids, 3)
    assert torch.equal(again, expected)


def test_another_model_of_the_class_is_not_affected(kernels: PlainKernels, model: Any) -> None:
    other = make("mamba2", HEADDIM, DSTATE)
    loader.patch(model)
    generate(other, tokens(1, 9))
    assert kernels.scans == []
    assert kernels.gemv_rows == []


def test_each_mixer_counts_its_own_calls(kernels: PlainKernels, model: Any) -> None:
    report = loader.patch(model)
    model.backbone.layers[1].mixer(torch.randn(1, 9, 32, dtype=torch.bfloat16))
    assert [entry.calls for entry in mixers(report)] == [0, 1]


def test_gradients_run_the_original_code(kernels: PlainKernels, model: Any) -> None:
    report = loader.patch(model.requires_grad_())
    model(tokens(1, 20)).logits.sum().backward()
    assert kernels.scans == []
    assert [dict(entry.original_calls) for entry in mixers(report)] == [{fallback.GRADIENT: 1}] * 2
    assert model.backbone.layers[0].mixer.A_log.grad is not None


def test_what_has_no_kernel_is_left_alone(kernels: PlainKernels) -> None:
    report = loader.patch(make("mamba2", 4, DSTATE))
    reasons = [entry.reason for entry in report if "8 x" in entry.shape or "16 x" in entry.shape]
    assert len(reasons) == 2
    assert set(reasons) == {"no scan 4x16"}
    report = loader.patch(make("mamba2", HEADDIM, DSTATE).float())
    assert not report.patched
    assert "float32" in str(report)


def test_a_call_without_a_kernel_runs_the_original_code(
    kernels: PlainKernels,
    model: Any,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    report = loader.patch(model)
    expected = model(ids := tokens(1, 9)).logits
    monkeypatch.setattr("plain_kernels.PAIRS", set())
    with caplog.at_level(logging.WARNING, logger="sonata_aot"):
        found = [model(ids).logits for _ in range(3)][-1]
    assert error(found.float(), expected.float()) < 2**-6
    assert dict(mixers(report)[0].original_calls) == {"no scan 8x16": 3}
    assert caplog.text.count("backbone.layers.0.mixer: a call runs") == 1


def test_untested_versions_are_left_alone(
    kernels: PlainKernels, model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("transformers.__version__", "6.1.0")
    report = loader.patch(model)
    assert mixers(report) == []
    reasons = {entry.reason for entry in report.left_alone}
    assert reasons == {"transformers 6.1.0 was not tested; tested: 5.17, 5.24"}


def test_classes_that_are_not_known_are_left_alone(kernels: PlainKernels, model: Any) -> None:
    own = model.backbone.layers[0].mixer

    class Derived(type(own)):
        def forward(self, *arguments: Any, **named: Any) -> Any:
            return super().forward(*arguments, **named)

    class Stranger(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.A_log = self.dt_bias = self.D = torch.nn.Parameter(torch.zeros(1))
            self.conv1d = torch.nn.Conv1d(1, 1, 1)

    own.__class__ = Derived
    other = model.backbone.layers[1].mixer
    other.forward = other.forward
    model.stranger = Stranger()
    reasons = [entry.reason for entry in loader.patch(model).left_alone]
    assert [str(reason).split()[0] for reason in reasons] == ["Derived", "its", "no"]


def test_undo_copies_and_pickles(kernels: PlainKernels, model: Any) -> None:
    mixer = type(model.backbone.layers[0].mixer)
    ids = tokens(1, 9)
    expected = model(ids).logits
    report = loader.patch(model)
    loader.patch(model)
    for made in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert type(made.backbone.layers[0].mixer) is mixer
        assert torch.equal(made(ids).logits, expected)
    assert kernels.scans == []
    report.undo()
    assert type(model.backbone.layers[0].mixer) is mixer
    assert torch.equal(model(ids).logits, expected)
    assert kernels.scans == []


def test_disabled_and_compared(
    kernels: PlainKernels, model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    ids = tokens(1, 9)
    report = loader.patch(model, compare=1)
    model(ids)
    first = mixers(report)[0]
    assert (first.calls, first.compared) == (1, 1)
    assert 0 < first.largest_error < 2**-6  # the original returns fp32
    monkeypatch.setenv("SONATA_AOT_DISABLE", "1")
    model(ids)
    assert dict(first.original_calls) == {"SONATA_AOT_DISABLE is set": 1}


def test_a_compiled_mixer_calls_the_operators(kernels: PlainKernels, model: Any) -> None:
    library = torch.library.Library(operators.NAMESPACE, "IMPL")
    library.impl("mamba_chunk_scan_combined", operators._run_scan, "CPU")
    mixer = model.backbone.layers[0].mixer
    x = torch.randn(1, 20, 32, dtype=torch.bfloat16)
    expected = mixer(x)
    loader.patch(model)
    try:
        compiled = torch.compile(mixer, fullgraph=True, backend="aot_eager")
        compiled(x)
        with torch._dynamo.config.patch(error_on_recompile=True):
            found = compiled(x)
    finally:
        library._destroy()
    assert len(kernels.scans) == 2
    assert error(found.float(), expected.float()) < 2**-6


STUB = """
import torch
calls = []


def mamba_chunk_scan_combined(
    x, dt, A, B, C, chunk_size, D=None, z=None, dt_bias=None, initial_states=None, seq_idx=None,
    cu_seqlens=None, dt_softplus=False, dt_limit=(0.0, float("inf")), return_final_states=False,
    return_varlen_states=False,
):
    calls.append("mamba_ssm")
    out = torch.zeros_like(x)
    final = torch.zeros(x.shape[0], *x.shape[2:], B.shape[3])
    return (out, final) if return_final_states else out
"""


def test_functions_of_mamba_ssm_that_were_bound_at_import(tmp_path: Path) -> None:
    """transformers takes mamba_ssm's functions where it is installed: here a stand-in."""
    package = tmp_path / "mamba_ssm" / "ops" / "triton"
    package.mkdir(parents=True)
    (tmp_path / "mamba_ssm" / "__init__.py").write_text("from .ops.triton import ssd_combined")
    (package / "ssd_combined.py").write_text(STUB)
    script = """
    import sys
    import plain_kernels, small_models, mamba_ssm
    from mamba_ssm.ops.triton import ssd_combined
    from sonata_aot import loader
    from sonata_aot.loader import default, fallback
    kernels = default._default = plain_kernels.PlainKernels()
    fallback.device_of = lambda tensor: 0 if tensor.is_cpu else None
    for family in ("mamba2", "bamba"):
        models = [small_models.make(family, 8, 16) for _ in range(2)]
        report = loader.patch(models[0])
        ids = small_models.tokens(1, 9)
        models[0](ids)
        assert len(kernels.scans) == 2 and not ssd_combined.calls, family
        models[1](ids)
        assert len(kernels.scans) == 2 and len(ssd_combined.calls) == 2, family
        report.undo()
        models[0](ids)
        assert len(kernels.scans) == 2 and len(ssd_combined.calls) == 4, family
        kernels.scans.clear()
        ssd_combined.calls.clear()
    """
    support = Path(small_models.__file__).parent
    result = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)],
        cwd=tmp_path,
        env={"PYTHONPATH": f"{tmp_path}:{support}", "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr


def test_every_family_is_tested() -> None:
    known = {family.module.split(".")[2] for family in patch_families.FAMILIES[1:]}
    assert known == set(small_models.FAMILIES)
