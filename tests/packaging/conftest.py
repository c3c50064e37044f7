"""Wheels that the tests share, and clean environments with them installed.

A launcher takes a minute of one core to compile, so there are few: for 3.11 one out of the sdist
and one out of the tree, which must be the same, and for 3.12 on one out of the tree.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import sys
from collections.abc import Callable
from importlib.metadata import distribution
from pathlib import Path

import pytest

from packaging_runs import (
    BUILDERS,
    STRAY,
    Environment,
    Install,
    Once,
    compiler_path,
    copy_tree,
    link,
    link_all,
    make_environment,
    pip_wheel,
    run,
)
from sonata_aot.aot.wheel_base import installed_wheel


@pytest.fixture(scope="session")
def once(shared_directory: Path) -> Once:
    """`once(name, make)`: a folder that `make` has filled in one of this test run's processes."""

    def get(name: str, make: Callable[[Path], None]) -> Path:
        folder, done = shared_directory / name, shared_directory / f"{name}.done"
        with open(shared_directory / f"{name}.lock", "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not done.exists():
                shutil.rmtree(folder, ignore_errors=True)  # of a try that failed
                folder.mkdir(mode=0o700)
                make(folder)
                done.touch()
        return folder

    return get


@pytest.fixture(scope="session")
def compile_cache(once: Once, warm_cache: Path) -> Path:
    """A copy of the warm cache for builds of wheels."""
    return once("wheel-cache", lambda folder: _copy(warm_cache, folder))


def _copy(source: Path, folder: Path) -> None:
    shutil.copytree(source, folder, dirs_exist_ok=True)


@pytest.fixture(scope="session")
def builder(once: Once) -> Environment:
    """A Python 3.11 with what builds launcher and kernels, but not this tool."""

    def make(folder: Path) -> None:
        make_environment(folder, "3.11", pip=False).add_path(*compiler_path())

    return Environment(once("builder-3.11", make))


@pytest.fixture(scope="session")
def sdist(once: Once, builder: Environment) -> Path:
    """The source distribution, built out of a copy of the tree."""

    def make(folder: Path) -> None:
        tree = copy_tree(folder / "tree")
        for name in STRAY:
            (tree / name).parent.mkdir(exist_ok=True)
            (tree / name).write_text("nobody else's business\n")
        script = f"import sonata_backend as b; b.build_sdist({str(folder)!r})"
        environ = {**os.environ, "PYTHONPATH": str(tree / "aot" / "backend")}
        run(builder.python, "-c", script, cwd=tree, env=environ)

    (path,) = once("sdist", make).glob("*.tar.gz")
    return path


@pytest.fixture(scope="session")
def wheel_311(once: Once, builder: Environment, sdist: Path, compile_cache: Path) -> Path:
    """The wheel for Python 3.11 and sm86, out of the sdist."""

    def make(folder: Path) -> None:
        shutil.unpack_archive(sdist, folder / "from-sdist", filter="data")
        (tree,) = (folder / "from-sdist").iterdir()
        pip_wheel(builder, tree, folder, "arch=sm86", cache=compile_cache)

    return _only(once("wheel-3.11", make))


@pytest.fixture(scope="session")
def base_312(once: Once) -> Path:
    """The wheel for Python 3.12 on without artifacts: with nothing but what builds the launcher."""

    def make(folder: Path) -> None:
        environment = make_environment(folder / "builder", "3.12", pip=False)
        tools = folder / "tools"
        tools.mkdir()
        for name in BUILDERS:
            link(distribution(name), tools)
        environment.add_path(tools)
        tree = copy_tree(folder / "tree")
        pip_wheel(environment, tree, folder)

    return _only(once("wheel-3.12", make))


@pytest.fixture(scope="session")
def requirements(once: Once) -> Path:
    """A folder with wheels of what the product requires, made of what is installed here."""

    def make(folder: Path) -> None:
        for name in ("click", "platformdirs"):
            wheel = installed_wheel(distribution(name))
            (folder / wheel.file_name).write_bytes(wheel.to_bytes())

    return once("requirements", make)


@pytest.fixture(scope="session")
def wheel_312(once: Once, base_312: Path, compile_cache: Path) -> Path:
    """The wheel for Python 3.12 on and sm86: the one without artifacts, with some put in."""

    def make(folder: Path) -> None:
        script = Path(sys.executable).with_name("sonata-aot")
        environ = {**os.environ, "SONATA_AOT_CACHE_DIR": str(compile_cache)}
        command = [script, "wheel", "--quiet", "--arch=sm86", "--base", base_312, "--out", folder]
        run(*command, env=environ)

    return _only(once("wheel-3.12-sm86", make))


@pytest.fixture(scope="session")
def data_wheel(once: Once, compile_cache: Path) -> Path:
    """The wheel of artifacts alone for sm86."""

    def make(folder: Path) -> None:
        script = Path(sys.executable).with_name("sonata-aot")
        environ = {**os.environ, "SONATA_AOT_CACHE_DIR": str(compile_cache)}
        command = [script, "wheel", "--quiet", "--arch=sm86", "--only-artifacts", "--out", folder]
        run(*command, env=environ)

    return _only(once("data-wheel", make))


@pytest.fixture(scope="session")
def torch_path(once: Once) -> Path:
    """A folder with torch and what it requires, and nothing else."""
    return once("torch", lambda folder: link_all("torch", folder))


@pytest.fixture(scope="session")
def install(once: Once, requirements: Path) -> Install:
    return Install(once, requirements)


def _only(folder: Path) -> Path:
    (path,) = folder.glob("*.whl")
    return path
