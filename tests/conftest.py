"""Fixtures of every room's tests: one build of the product's own kernels, shared by all."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import pytest

from recording_libcuda import build
from sonata_aot.aot import build as tool
from sonata_aot.aot.plan import Job
from sonata_aot.artifacts import Arch
from sonata_aot.kernels import Variant, builtin

# Architecture, kernel, variant.
Case = tuple[str, str, Variant]
BuildCases = Callable[[str, Iterable[Case]], Path]

SHARED_ARCHS = ("sm86", "sm90")


def clean_environment(**changes: str) -> dict[str, str]:
    """This process's environment without what steers the product, plus `changes`."""
    steering = ("SONATA_AOT_", "CUTE_DSL_", "GIT_")
    names = {"MAX_JOBS", "TORCH_CUDA_ARCH_LIST", "NO_COLOR", "PYTHONHASHSEED", "PYTHONPATH"}
    kept = {
        name: value
        for name, value in os.environ.items()
        if name not in names and not name.startswith(steering)
    }
    return {**kept, **changes}


@pytest.fixture(autouse=True)
def same_search_path() -> Iterator[None]:
    """`--from` adds the current directory: later tests would find our rooms by bare names."""
    kept = list(sys.path)
    yield
    sys.path[:] = kept


@pytest.fixture(scope="session")
def clean_environ() -> Callable[..., dict[str, str]]:
    """`clean_environment`, for tests in folders below."""
    return clean_environment


@pytest.fixture(scope="session")
def shared_directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder common to all processes of this test run."""
    base = tmp_path_factory.getbasetemp()
    base = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base
    shared = base / "shared-build"
    shared.mkdir(mode=0o700, exist_ok=True)
    return shared


@pytest.fixture(scope="session")
def recording_library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The recording stand-in for the CUDA driver."""
    return build(tmp_path_factory.mktemp("recording"))


@pytest.fixture(scope="session")
def warm_cache(shared_directory: Path) -> Path:
    """A compile cache with the default kernels for SHARED_ARCHS. Tests must not change it.

    SONATA_TEST_CACHE may name one, for whoever wants to use it afterwards.
    """
    cache = Path(os.environ.get("SONATA_TEST_CACHE", shared_directory / "cache"))
    script = Path(sys.executable).with_name("sonata-aot")
    archs = [f"--arch={arch}" for arch in SHARED_ARCHS]
    result = subprocess.run(
        [script, "build", *archs, "--jobs=2", "--out", shared_directory / "artifacts"],
        env=clean_environment(SONATA_AOT_CACHE_DIR=str(cache), PYTHONHASHSEED="1"),
        cwd=shared_directory,
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    return cache


@pytest.fixture(scope="session")
def built(shared_directory: Path, warm_cache: Path) -> Path:
    """An artifact directory with the default kernels for SHARED_ARCHS. Tests must not change it."""
    return shared_directory / "artifacts"


@pytest.fixture(scope="session")
def build_cases(shared_directory: Path, warm_cache: Path) -> BuildCases:
    """`build_cases("name", cases)`: an artifact directory with just these variants.

    For any declared ones; each is compiled once in a test run. As a table names variants that are
    not there, the directory has no rules.
    """
    cache = shared_directory / "more-cache"
    if not cache.exists():
        copy = Path(tempfile.mkdtemp(dir=shared_directory)) / "cache"
        shutil.copytree(warm_cache, copy)
        with contextlib.suppress(OSError):  # another process was first
            copy.rename(cache)

    def run(name: str, cases: Iterable[Case]) -> Path:
        jobs = [Job(builtin()[name], variant, Arch.parse(arch)) for arch, name, variant in cases]
        specs = {job.spec.name: job.spec for job in jobs}
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("SONATA_AOT_CACHE_DIR", str(cache))
            patch.setattr(tool, "rules", lambda spec, arch: ())
            patch.setattr(tool, "jobs", lambda specs, archs, **options: jobs)
            archs = [job.arch for job in jobs]
            out = shared_directory / name
            return tool.build(list(specs.values()), archs, out=out).directory

    return run
