"""`verify --sources`: was a directory built from the kernels that are installed here?"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from sonata_aot.aot import origin, plan, toolchain
from sonata_aot.artifacts import Manifest, open_artifacts, publish
from sonata_aot.kernels import KernelSpec, builtin

if TYPE_CHECKING:
    from tests.aot.conftest import Invoke


@pytest.fixture
def small(invoke: Invoke, warm_cache: Path, tmp_path: Path) -> Path:
    """A directory with one kernel."""
    out = tmp_path / "small"
    chosen = ("build", "--arch=sm86", "--kernel=gemv_any", "--out", out)
    assert invoke(*chosen, SONATA_AOT_CACHE_DIR=warm_cache).exit_code == 0
    return out


def replaced(directory: Path, **changes: Any) -> Path:
    """The same directory with other fields in its manifest, which is whole in itself."""
    artifacts = open_artifacts(directory)
    objects = {p.file_name: artifacts.read(p) for _, p in artifacts.manifest.payloads()}
    publish(directory, dataclasses.replace(artifacts.manifest, **changes), objects)
    return directory


def problems(invoke: Invoke, directory: Path) -> list[str]:
    assert invoke("verify", directory).exit_code == 0  # nothing else is wrong
    result = invoke("verify", "--sources", "--json", directory)
    printed = json.loads(result.stdout)
    assert result.exit_code == (not printed["ok"])
    return [item["problem"] for item in printed["outcomes"] if item["outcome"] == "failed"]


def test_what_is_built_here_is_of_these_sources(invoke: Invoke, small: Path) -> None:
    assert problems(invoke, small) == []
    assert "ok    sources\n" in invoke("verify", "--sources", small).stdout
    assert "sources" not in invoke("verify", small).stdout


def test_the_compiler_need_not_be_installed(
    invoke: Invoke, small: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails() -> None:
        raise AssertionError

    monkeypatch.setattr(toolchain, "compiler_versions", fails)
    monkeypatch.setattr(plan, "compiler_versions", fails)
    assert problems(invoke, small) == []


def test_a_false_source_digest(invoke: Invoke, small: Path) -> None:
    source = dataclasses.replace(open_artifacts(small).manifest.source, digest="0" * 64)
    (problem,) = problems(invoke, replaced(small, source=source))
    assert "not 000000000000" in problem


def test_a_false_compiler(invoke: Invoke, small: Path) -> None:
    manifest: Manifest = open_artifacts(small).manifest
    compiler = dict.fromkeys(manifest.compiler, "4.8.0")
    found = problems(invoke, replaced(small, compiler=compiler))
    assert found == [f"{binary.label} has another cache key" for binary in manifest.binaries]


def test_a_false_key(invoke: Invoke, small: Path) -> None:
    first, *others = open_artifacts(small).manifest.binaries
    first = dataclasses.replace(first, key="0" * 64)
    found = problems(invoke, replaced(small, binaries=(first, *others)))
    assert found == [f"{first.label} has another cache key"]


def test_a_declaration_that_has_changed_since(
    invoke: Invoke, small: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = builtin()["gemv_any"]
    budget = dataclasses.replace(spec.declaration.budget, registers=17)
    other = KernelSpec(
        dataclasses.replace(spec.declaration, budget=budget), spec.variants, spec.device
    )
    monkeypatch.setattr(origin, "known_kernels", lambda modules: {"gemv_any": other})
    assert "another declaration of gemv_any" in problems(invoke, small)


def test_a_kernel_that_is_not_installed(
    invoke: Invoke, small: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(origin, "known_kernels", lambda modules: {})
    assert problems(invoke, small) == ["kernels that are not installed here: gemv_any"]


def test_a_commit_without_a_dirty_flag_is_refused(invoke: Invoke, small: Path) -> None:
    source = open_artifacts(small).manifest.source
    for half in ({"commit": None, "dirty": True}, {"commit": "c" * 40, "dirty": None}):
        data = open_artifacts(small).manifest
        with pytest.raises(Exception, match="only one of commit and dirty"):
            dataclasses.replace(data, source=dataclasses.replace(source, **half))
