"""mamba_ssm's Triton half is loaded from a tree whose packages fail when they are imported."""

from __future__ import annotations

import importlib
import importlib.metadata
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from sonata_aot.aot.measure import mamba_opponent as opponent
from sonata_aot.artifacts.errors import MissingDependency

ROOT = Path(__file__).resolve().parents[2]
FAKES = ("mamba_ssm", "selective_scan_cuda", "einops", "triton")

KERNELS = """
import einops
import packaging
import torch
import triton
import selective_scan_cuda
from mamba_ssm.ops.triton.ssd_bmm import NAME
from mamba_ssm.utils.determinism import WORD
einops.check()
def mamba_chunk_scan_combined(x):
    return NAME, WORD, x
"""
FAILS = "raise ImportError('no such extension')\n"
TREE = {
    "einops/__init__.py": "def check(): pass\n",
    "triton/__init__.py": "",
    "mamba_ssm/__init__.py": FAILS,
    "mamba_ssm/ops/__init__.py": FAILS,
    "mamba_ssm/ops/triton/__init__.py": FAILS,
    "mamba_ssm/ops/triton/ssd_bmm.py": "NAME = 'bmm'\n",
    "mamba_ssm/ops/triton/ssd_combined.py": KERNELS,
    "mamba_ssm/utils/__init__.py": FAILS,
    "mamba_ssm/utils/determinism.py": "WORD = 'determined'\n",
}


def forget() -> None:
    for name in list(sys.modules):
        if name.partition(".")[0] in FAKES:
            del sys.modules[name]


def write(tree: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        path = tree / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    importlib.invalidate_caches()


def set_version(tree: Path, package: str, version: str) -> None:
    text = f"Metadata-Version: 2.1\nName: {package}\nVersion: {version}\n"
    write(tree, {f"{package.replace('-', '_')}-0.dist-info/METADATA": text})


@pytest.fixture
def tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder of installed packages; this process knows them only during the test."""
    pytest.importorskip("torch")
    # torch asks once whether there is triton, and must not ask while it is this one.
    importlib.import_module("torch.utils._triton").has_triton_package()
    kept = {name: module for name, module in sys.modules.items() if name.split(".")[0] in FAKES}
    forget()
    write(tmp_path, TREE)
    set_version(tmp_path, "mamba-ssm", opponent.VERSION)
    set_version(tmp_path, "einops", "0.8")
    set_version(tmp_path, "triton", "3.9")
    monkeypatch.syspath_prepend(tmp_path)
    yield tmp_path
    monkeypatch.undo()  # first, since it puts back modules that a test has replaced
    forget()
    sys.modules.update(kept)


@pytest.mark.usefixtures("tree")
def test_the_kernels_load_where_the_package_does_not() -> None:
    with pytest.raises(ImportError, match="no such extension"):
        importlib.import_module("mamba_ssm")
    forget()
    loaded = opponent.load()
    assert loaded.scan(3) == ("bmm", "determined", 3)
    versions = loaded.versions
    assert (versions["mamba_ssm"], versions["einops"]) == (opponent.VERSION, "0.8")
    assert set(versions) == {"mamba_ssm", "einops", "triton", "torch", "packaging"}


@pytest.mark.usefixtures("tree")
def test_loading_again_is_the_same() -> None:
    assert opponent.load().scan is opponent.load().scan
    again = importlib.import_module("mamba_ssm")
    assert again.ops.triton.ssd_combined.mamba_chunk_scan_combined is opponent.load().scan


@pytest.mark.parametrize("name", ["torch", "triton", "einops", "packaging", "mamba_ssm"])
@pytest.mark.usefixtures("tree")
def test_what_is_missing_is_named(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(MissingDependency, match=f"^{name} is not installed; .*pip install"):
        opponent.load()
    assert not [loaded for loaded in sys.modules if loaded.startswith("mamba_ssm.")]


def test_another_version_is_no_opponent(tree: Path) -> None:
    set_version(tree, "mamba-ssm", "2.2.4")
    with pytest.raises(MissingDependency, match=r"version 2\.2\.4.* 2\.3\.2\.post1; .*mamba-ssm=="):
        opponent.load()


@pytest.mark.usefixtures("tree")
def test_a_version_that_cannot_be_told_is_no_opponent(monkeypatch: pytest.MonkeyPatch) -> None:
    def none(name: str) -> str:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", none)
    with pytest.raises(MissingDependency, match="version unknown"):
        opponent.load()


@pytest.mark.usefixtures("tree")
def test_a_failure_leaves_nothing_behind() -> None:
    einops: Any = importlib.import_module("einops")
    good = einops.check

    def bad() -> None:
        raise RuntimeError("0 active drivers")

    einops.check = bad
    with pytest.raises(
        MissingDependency, match=r"RuntimeError: 0 active drivers.*'einops': '0\.8'"
    ):
        opponent.load()
    left = [name for name in sys.modules if name.split(".")[0] in FAKES[:2]]
    assert left == []
    einops.check = good
    assert opponent.load().scan(1)[2] == 1


def test_an_extension_that_is_there_is_used(tree: Path) -> None:
    write(tree, {"selective_scan_cuda.py": "REAL = True\n"})
    opponent.load()
    assert sys.modules["selective_scan_cuda"].REAL


def test_a_whole_mamba_ssm_that_is_in_use_is_left_alone(tree: Path) -> None:
    names = ("", "ops/", "ops/triton/", "utils/")
    write(tree, {f"mamba_ssm/{name}__init__.py": f"HERE = {name!r}\n" for name in names})
    write(tree, {"selective_scan_cuda.py": ""})
    whole = importlib.import_module("mamba_ssm")
    opponent.load()
    assert sys.modules["mamba_ssm"] is whole
    assert sys.modules["mamba_ssm.ops.triton"].HERE == "ops/triton/"


@pytest.mark.usefixtures("tree")
def test_what_was_tuned_for_one_length_is_forgotten() -> None:
    loaded = opponent.load()
    kernels: Any = importlib.import_module("mamba_ssm.ops.triton.ssd_bmm")
    tuned = SimpleNamespace(cache={"key": "configuration"}, configs=[1, 2])
    compiled = SimpleNamespace(cache={"key": "binary"})
    kernels.tuned, kernels.compiled = tuned, compiled
    loaded.retune()
    assert (tuned.cache, compiled.cache) == ({}, {"key": "binary"})


@pytest.mark.usefixtures("tree")
def test_the_command_says_what_it_found(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    opponent.main()
    assert f"mamba_ssm {opponent.VERSION}" in capsys.readouterr().out
    monkeypatch.setitem(sys.modules, "triton", None)
    with pytest.raises(SystemExit, match="triton is not installed"):
        opponent.main()


def test_the_extra_asks_for_the_same_version() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["optional-dependencies"]["mamba"] == [f"mamba-ssm=={opponent.VERSION}"]
