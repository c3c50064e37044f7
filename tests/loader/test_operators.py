"""`torch.ops.sonata_aot`: what compiled and exported programs call, with kernels that are torch."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from plain_kernels import PlainKernels, ssd_operands
from sonata_aot import loader
from sonata_aot.artifacts.errors import ArgumentError, SonataError
from sonata_aot.loader import default, operators

SCAN: Any = operators.mamba_chunk_scan_combined


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> Iterator[PlainKernels]:
    """The process's kernels; the operators run them on the CPU too."""
    found = PlainKernels()
    monkeypatch.setattr(default, "_default", found)
    library = torch.library.Library(operators.NAMESPACE, "IMPL")
    library.impl("gemv", operators._run_gemv, "CPU")
    library.impl("mamba_chunk_scan_combined", operators._run_scan, "CPU")
    yield found
    library._destroy()


def gemv_operands() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return torch.randn(2, 16), torch.randn(8, 16), torch.randn(8)


class Projection(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = torch.nn.Linear(16, 8).requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return operators.gemv(x, self.inner.weight, self.inner.bias).relu()


class Scan(torch.nn.Module):
    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.options = options

    def forward(self, *tensors: torch.Tensor) -> Any:
        return SCAN(*tensors, 64, **self.options)


def same(found: Any, expected: Any) -> bool:
    torch.testing.assert_close(found, expected)
    return True


def test_a_compiled_module_keeps_the_gemv(kernels: PlainKernels) -> None:
    x, *_ = gemv_operands()
    module = Projection()
    expected = module.inner(x).relu()
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
    assert same(compiled(x), expected)
    assert kernels.gemv_rows == [2]
    assert same(compiled(x), expected)
    assert kernels.gemv_rows == [2, 2]  # called by the program, not while it was traced


def test_an_exported_module_keeps_the_gemv(kernels: PlainKernels, tmp_path: Path) -> None:
    x, *_ = gemv_operands()
    module = Projection()
    program = torch.export.export(module, (x,))
    assert "torch.ops.sonata_aot.gemv.default" in str(program.graph)
    torch.export.save(program, tmp_path / "program.pt2")
    loaded = torch.export.load(tmp_path / "program.pt2").module()
    assert kernels.gemv_rows == []
    assert same(loaded(x), module.inner(x).relu())
    assert kernels.gemv_rows == [2]


def test_the_number_of_rows_may_stay_open(kernels: PlainKernels) -> None:
    rows = torch.export.Dim("rows", min=1, max=8)
    module = Projection()
    program = torch.export.export(module, (torch.randn(2, 16),), dynamic_shapes=({0: rows},))
    for count in (1, 2, 5):
        x = torch.randn(count, 16)
        assert same(program.module()(x), module.inner(x).relu())
    assert kernels.gemv_rows == [1, 2, 5]


def test_programs_know_the_device_of_what_is_returned() -> None:
    with FakeTensorMode():
        x, weight = torch.empty(2, 16, device="cuda"), torch.empty(8, 16, device="cuda")
        found = torch.ops.sonata_aot.gemv(x, weight, None)
        assert (found.shape, found.device.type) == ((2, 8), "cuda")


@pytest.mark.parametrize("final", [False, True])
@pytest.mark.parametrize("varlen", [False, True])
def test_the_scan_returns_what_was_asked_for(
    kernels: PlainKernels, final: bool, varlen: bool
) -> None:
    tensors = ssd_operands(batch=1)
    options: dict[str, Any] = {
        "D": torch.randn(4),
        "dt_softplus": True,
        "dt_limit": (0.01, 2.0),
        "return_final_states": final,
        "return_varlen_states": varlen,
        "seq_idx": torch.tensor([[0] * 3 + [1] * 9], dtype=torch.int32),
        "cu_seqlens": torch.tensor([0, 3, 12], dtype=torch.int32),
    }
    expected = kernels.mamba_chunk_scan_combined(*tensors, 64, **options)
    assert kernels.scans[-1]["dt_limit"] == (0.01, 2.0)
    module = Scan(**options)
    calls: list[Any] = [module]
    if final and varlen:  # tracing takes its time
        calls.append(torch.compile(module, fullgraph=True, backend="aot_eager"))
        calls.append(torch.export.export(module, tensors).module())
    for each in calls:
        found = each(*tensors)
        assert type(found) is type(expected)
        assert same(found, expected)
        assert kernels.scans[-1]["dt_limit"] == (0.01, 2.0)
    assert len(kernels.scans) == 1 + len(calls)


def test_torchs_own_check_of_operators(kernels: PlainKernels) -> None:
    x, weight, bias = gemv_operands()
    torch.library.opcheck(torch.ops.sonata_aot.gemv.default, (x, weight, bias))
    arguments = (*ssd_operands(), 64)
    states = {"return_final_states": True}
    scan = torch.ops.sonata_aot.mamba_chunk_scan_combined.default
    torch.library.opcheck(scan, arguments)
    torch.library.opcheck(scan, arguments, states)


def test_programs_know_the_dtypes_of_what_is_returned(kernels: PlainKernels) -> None:
    """In bfloat16, where those of the output and of the final states differ."""
    x, dt, a, b, c = ssd_operands(batch=1)
    half = [one.bfloat16() for one in (x, dt, b, c)]
    options: dict[str, Any] = {
        "return_final_states": True,
        "return_varlen_states": True,
        "seq_idx": torch.zeros(1, 12, dtype=torch.int32),
        "cu_seqlens": torch.tensor([0, 12], dtype=torch.int32),
    }
    real = SCAN(half[0], half[1], a, *half[2:], 64, **options)
    options = {
        name: one.to("meta") if isinstance(one, torch.Tensor) else one
        for name, one in options.items()
    }
    meta = [one.to("meta") for one in (half[0], half[1], a, *half[2:])]
    fake = SCAN(*meta, 64, **options)
    assert [(one.shape, one.dtype) for one in fake] == [(one.shape, one.dtype) for one in real]
    assert [one.dtype for one in fake] == [torch.bfloat16, torch.float32, torch.bfloat16]


def test_gradients_are_a_clear_error(kernels: PlainKernels) -> None:
    x, weight, bias = gemv_operands()
    for place in range(3):
        given = [x, weight, bias]
        given[place] = given[place].clone().requires_grad_()
        with pytest.raises(ArgumentError, match=r"gemv.*requires grad.*no_grad"):
            operators.gemv(*given)
        with torch.no_grad():
            operators.gemv(*given)
    tensors = list(ssd_operands())
    tensors[2].requires_grad_()
    with pytest.raises(ArgumentError, match=r"mamba_chunk_scan_combined.*requires grad"):
        SCAN(*tensors, 64)
    with torch.inference_mode():
        SCAN(*tensors, 64)


def test_without_kernels_they_say_so(
    kernels: PlainKernels, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(default, "_default", None)
    with pytest.raises(SonataError, match=r"torch\.ops\.sonata_aot\.gemv.*loader\.load"):
        operators.gemv(*gemv_operands())


def test_a_second_default_is_an_error(kernels: PlainKernels) -> None:
    loader.set_default(kernels)  # pyright: ignore[reportArgumentType]
    with pytest.raises(SonataError, match="set_default"):
        loader.set_default(PlainKernels())  # pyright: ignore[reportArgumentType]
    assert default._default is kernels


@pytest.mark.parametrize("first", ["torch", "sonata_aot.loader"])
def test_defining_them_imports_no_compiler(first: str) -> None:
    script = f"""
import sys
import {first}
import torch, sonata_aot.loader, sonata_aot.loader.operators
torch.ops.sonata_aot.gemv
heavy = {{"triton", "torch._dynamo", "torch._inductor"}} & set(sys.modules)
assert not heavy, heavy
"""
    subprocess.run([sys.executable, "-c", script], check=True)
