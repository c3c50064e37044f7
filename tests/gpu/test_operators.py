"""`torch.ops.sonata_aot` on the device: compiled, exported, captured."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from sonata_aot import loader
from sonata_aot.artifacts.errors import ArgumentError
from sonata_aot.loader import default, operators

N, K = 192, 256


@pytest.fixture(autouse=True)
def as_default(kernels: loader.Kernels, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernels under test are the process's."""
    monkeypatch.setattr(default, "_default", kernels)


def random(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.randn(*shape, device="cuda").to(dtype)


class Projection(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        inner = torch.nn.Linear(K, N, device="cuda", dtype=torch.bfloat16)
        self.inner = inner.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return operators.gemv(x, self.inner.weight, self.inner.bias).relu()


def scan_operands(seqlen: int = 96) -> tuple[torch.Tensor, ...]:
    heads = 4
    return (
        random(2, seqlen, heads, 64),
        random(2, seqlen, heads),
        -torch.rand(heads, device="cuda"),
        random(2, seqlen, 1, 128),
        random(2, seqlen, 1, 128),
    )


# Torch 2.11's own, of its compiler's imports and of how it reads its archive.
@pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")
def test_a_compiled_module(kernels: loader.Kernels):
    module, x = Projection(), random(2, K)
    compiled = torch.compile(module, fullgraph=True)
    expected = kernels.gemv(x, module.inner.weight, module.inner.bias).relu()
    assert torch.equal(compiled(x), expected)
    x.normal_()
    assert not torch.equal(compiled(x), expected)


@pytest.mark.filterwarnings("ignore:The given buffer is not writable:UserWarning")
def test_an_exported_module(kernels: loader.Kernels, tmp_path: Path):
    module, x = Projection(), random(2, K)
    torch.export.save(torch.export.export(module, (x,)), tmp_path / "program.pt2")
    program = torch.export.load(tmp_path / "program.pt2")
    assert "torch.ops.sonata_aot.gemv.default" in str(program.graph)
    expected = kernels.gemv(x, module.inner.weight, module.inner.bias).relu()
    assert torch.equal(program.module()(x), expected)


@pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")
def test_the_scan_compiled(kernels: loader.Kernels):
    options: dict[str, Any] = {"dt_softplus": True, "return_final_states": True}
    call: Any = operators.mamba_chunk_scan_combined
    tensors: Any = scan_operands()
    direct: Any = kernels.mamba_chunk_scan_combined
    expected = direct(*tensors, 64, **options)
    compiled = torch.compile(
        lambda *given: call(*given, 64, **options), fullgraph=True, backend="aot_eager"
    )
    for found in (call(*tensors, 64, **options), compiled(*tensors)):
        assert all(map(torch.equal, found, expected))


def test_torchs_own_check(kernels: loader.Kernels):
    arguments = (random(2, K), random(N, K), random(N))
    checks = ("test_schema", "test_faketensor")
    torch.library.opcheck(torch.ops.sonata_aot.gemv.default, arguments, test_utils=checks)
    scan = torch.ops.sonata_aot.mamba_chunk_scan_combined.default
    states = {"return_final_states": True}
    torch.library.opcheck(scan, (*scan_operands(), 64), states, test_utils=checks)


def test_a_gradient_is_an_error(kernels: loader.Kernels):
    x = random(2, K).requires_grad_()
    with pytest.raises(ArgumentError, match="requires grad"):
        operators.gemv(x, random(N, K))
    with torch.no_grad():
        operators.gemv(x, random(N, K))


def test_inside_a_graph(kernels: loader.Kernels):
    x, weight = random(2, K), random(N, K)
    operators.gemv(x, weight)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = operators.gemv(x, weight)
    x.normal_()
    graph.replay()
    assert torch.equal(y, operators.gemv(x, weight))
