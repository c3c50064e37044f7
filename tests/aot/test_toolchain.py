"""Which compiler packages are accepted, and how the tools are found."""

from __future__ import annotations

import importlib.metadata
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from sonata_aot.aot.toolchain import compiler_versions, run_tool, tool
from sonata_aot.artifacts.errors import BuildError, MissingDependency

GOOD = (
    "nvidia_cutlass_dsl-4.8.1",
    "nvidia_cutlass_dsl_libs_base-4.8.1",
    "nvidia_cutlass_dsl_libs_cu12-4.8.1",
)


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Makes sys.path consist of folders with these packages installed, and nothing else."""

    def install(*folders: tuple[str, ...]) -> None:
        path = []
        for number, names in enumerate(folders):
            folder = tmp_path / str(number)
            for name in names:
                (folder / f"{name}.dist-info").mkdir(parents=True)
            path.append(str(folder))
        monkeypatch.setattr(sys, "path", path)

    return install


def test_this_environment() -> None:
    versions = compiler_versions()
    assert versions["nvidia-cutlass-dsl"] == importlib.metadata.version("nvidia-cutlass-dsl")
    assert list(versions) == sorted(versions)


def test_every_package_with_its_version(installed: Callable[..., None]) -> None:
    installed((*GOOD, "click-8.1", "nvidia_cutlass-3.0", "nvidia_cutlass_dsl_libs_cu12"))
    assert compiler_versions() == {
        "nvidia-cutlass-dsl": "4.8.1",
        "nvidia-cutlass-dsl-libs-base": "4.8.1",
        "nvidia-cutlass-dsl-libs-cu12": "4.8.1",
    }


def test_spelling_and_place_do_not_matter(installed: Callable[..., None]) -> None:
    installed(
        ("click-8.1",), ("NVIDIA.cutlass-DSL-4.8.1",), ("nvidia_cutlass_dsl.libs_cu12-4.8.1",)
    )
    assert list(compiler_versions()) == ["nvidia-cutlass-dsl", "nvidia-cutlass-dsl-libs-cu12"]


def test_what_python_would_not_import_does_not_count(installed: Callable[..., None]) -> None:
    installed(GOOD, tuple(name.replace("4.8.1", "4.7.0") for name in GOOD))
    assert set(compiler_versions().values()) == {"4.8.1"}


def test_odd_entries_of_the_path(installed: Callable[..., None], tmp_path: Path) -> None:
    installed(GOOD)
    (tmp_path / "file").write_text("")
    sys.path[:0] = ["", str(tmp_path / "absent"), str(tmp_path / "file")]
    assert len(compiler_versions()) == 3


@pytest.mark.parametrize(
    "packages",
    [
        pytest.param((*GOOD, "nvidia_cutlass_dsl_libs_cu13-4.8.1"), id="both flavours"),
        pytest.param((*GOOD[:2], "nvidia_cutlass_dsl_libs_cu13-4.8.1"), id="another flavour"),
        pytest.param(GOOD[:2], id="no flavour"),
        pytest.param((*GOOD[:2], "nvidia_cutlass_dsl_libs_cu12-4.8.0"), id="another version"),
        pytest.param(("nvidia_cutlass_dsl-4.8.2", *GOOD[1:]), id="newer front end"),
    ],
)
def test_a_mixture_is_refused(installed: Callable[..., None], packages: tuple[str, ...]) -> None:
    installed(packages)
    with pytest.raises(BuildError, match="do not belong together") as raised:
        compiler_versions()
    for name in packages:
        distribution, _, version = name.replace("_", "-").rpartition("-")
        assert f"{distribution} {version}" in str(raised.value)


@pytest.mark.parametrize("packages", [(), ("click-8.1",), GOOD[1:]])
def test_none_is_a_missing_dependency(
    installed: Callable[..., None], packages: tuple[str, ...]
) -> None:
    installed(packages)
    with pytest.raises(MissingDependency, match=r"pip install 'sonata-aot\[build\]'"):
        compiler_versions()


@pytest.mark.parametrize("name", ["nvdisasm", "cuobjdump"])
def test_the_tools_run(name: str) -> None:
    assert tool(name).is_file()
    assert "NVIDIA" in run_tool(name, "--version")


def test_a_missing_tool(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [])
    with pytest.raises(MissingDependency, match=r"nvidia-cuda-nvdisasm.*sonata-aot\[build\]"):
        tool("nvdisasm")


def test_a_package_without_its_tool(installed: Callable[..., None], tmp_path: Path) -> None:
    installed(("nvidia_cuda_nvdisasm-1.0",))
    metadata = tmp_path / "0" / "nvidia_cuda_nvdisasm-1.0.dist-info"
    (metadata / "METADATA").write_text("Name: nvidia-cuda-nvdisasm\nVersion: 1.0\n")
    (metadata / "RECORD").write_text("nvidia/lib/nvdisasm,,\n")
    with pytest.raises(MissingDependency, match="no program nvdisasm"):
        tool("nvdisasm")


def test_a_tools_own_words_reach_the_user(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"no cubin")
    with pytest.raises(BuildError, match=r"nvdisasm failed: .*file"):
        run_tool("nvdisasm", "-c", str(tmp_path / "file"))
