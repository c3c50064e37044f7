"""The kernel of docs/own-kernels.md on a real device: built as the page says, called as it says.

Needs the compiler, unlike the other tests here.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from types import ModuleType

import pytest

import tutorial
from gemv_cases import torch
from sonata_aot import loader
from sonata_aot.artifacts.errors import ArgumentError, VariantMissing


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("cutlass")
    folder = tmp_path_factory.mktemp("tutorial")
    tutorial.write(folder)
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    tutorial.run(folder, {**os.environ, "PATH": path, "SONATA_AOT_CACHE_DIR": str(folder / "c")})
    return folder


@pytest.fixture(scope="module")
def rms_gate(folder: Path) -> ModuleType:
    module = ModuleType("rms_gate")
    exec((folder / "rms_gate" / "__init__.py").read_text(), vars(module))
    return module


@pytest.fixture(scope="module", params=["sm86", "sm90"])
def own(request: pytest.FixtureRequest, folder: Path) -> loader.Kernels:
    try:
        return loader.load(folder / "artifacts", arch=request.param, allow_ptx=True)
    except VariantMissing as error:
        pytest.skip(str(error))


def expected(x, gate, weight, eps=1e-5):
    u = x.double() * torch.nn.functional.silu(gate.double())
    return u / (u.square().mean(-1, keepdim=True) + eps).sqrt() * weight.double()


def inputs(rows: int, columns: int, dtype):
    x, gate = (torch.randn(rows, columns, device="cuda", dtype=dtype) for _ in range(2))
    return x, gate, torch.randn(columns, device="cuda", dtype=dtype)


def right(y, *given, **options) -> bool:
    exact = expected(*given, **options)
    bound = 2**-8 if y.dtype is torch.bfloat16 else 2**-11
    off = (y.double() - exact).abs()
    return bool((off <= (bound + 2**-15) * exact.abs() + 2**-24).all())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("columns", [2048, 4096])
@pytest.mark.parametrize("rows", [1, 7, 4096])
def test_results(own: loader.Kernels, rms_gate: ModuleType, rows: int, columns: int, dtype):
    given = inputs(rows, columns, dtype)
    for eps in (1e-5, 0.5, 1e-5):  # the third is a call that is known
        assert right(rms_gate.rms_norm_gate(own, *given, eps=eps), *given, eps=eps)


def test_views(own: loader.Kernels, rms_gate: ModuleType):
    both, _, weight = inputs(5, 8192, torch.bfloat16)
    x, gate = both.chunk(2, dim=1)
    given = (x, gate, weight[:4096])
    assert right(rms_gate.rms_norm_gate(own, *given), *given)


def test_in_a_graph_on_another_stream(own: loader.Kernels, rms_gate: ModuleType):
    given = inputs(3, 2048, torch.bfloat16)
    rms_gate.rms_norm_gate(own, *given)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = rms_gate.rms_norm_gate(own, *given)
    for _ in range(2):
        given[0].normal_()
        graph.replay()
        torch.cuda.synchronize()
        assert right(y, *given)


def test_does_not_synchronise(own: loader.Kernels, rms_gate: ModuleType):
    given = inputs(3, 2048, torch.bfloat16)
    rms_gate.rms_norm_gate(own, *given)
    torch.cuda.synchronize()
    torch.cuda._sleep(200_000_000)
    done = torch.cuda.Event()
    rms_gate.rms_norm_gate(own, *given)
    done.record()
    assert not done.query()
    torch.cuda.synchronize()


def test_what_is_refused(own: loader.Kernels, rms_gate: ModuleType):
    x, gate, weight = inputs(3, 2048, torch.bfloat16)
    with pytest.raises(VariantMissing, match="columns=1024"):
        rms_gate.rms_norm_gate(own, x[:, :1024], gate[:, :1024], weight[:1024])
    with pytest.raises(ArgumentError, match="multiple of 16"):
        own["rms_norm_gate"](x[:, 1:], gate, weight, x, 3, 2048, 2048, 1e-5, columns=2048)
    with pytest.raises(ArgumentError, match=r"gate is torch\.float16"):
        own["rms_norm_gate"](x, gate.half(), weight, x, 3, 2048, 2048, 1e-5, columns=2048)
    with pytest.raises(ArgumentError, match=r"grid\.x = 0"):
        own["rms_norm_gate"](x, gate, weight, x, 0, 2048, 2048, 1e-5, columns=2048)


def test_the_server_of_the_page(folder: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(folder)
    monkeypatch.syspath_prepend(folder)
    names: dict[str, object] = {}
    exec((folder / "serve.py").read_text(), names)
    assert right(names["y"], names["x"], names["gate"], names["weight"])
