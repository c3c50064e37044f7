"""Fixtures of the build tool's tests: its command line, and throw-away kernels to build."""

from __future__ import annotations

import importlib
import itertools
import os
import shutil
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType

import pytest
from click.testing import CliRunner, Result

sys.path.insert(0, str(Path(__file__).parent))  # for the helper beside this file

from canned import Canned

from sonata_aot.aot import build, cache, plan, pool, provenance, sources, toolchain
from sonata_aot.aot.cli import main

SCRIPT = Path(sys.executable).with_name("sonata-aot")
STEERING = (
    *("SONATA_AOT_", "SONATA_TEST_", "CUTE_DSL_", "GIT_"),
    *("MAX_JOBS", "TORCH_CUDA_ARCH_LIST", "NO_COLOR"),
)
MODULES = (build, cache, plan, pool, provenance, sources, toolchain)
_numbers = itertools.count()

Cli = Callable[..., subprocess.CompletedProcess[str]]
Invoke = Callable[..., Result]


def forget_everything() -> None:
    """Clear what the tool remembers in this process: sources, compiler versions, recipe."""
    importlib.invalidate_caches()
    for module in MODULES:
        for value in vars(module).values():
            if hasattr(value, "cache_clear") and value.__module__ == module.__name__:
                value.cache_clear()


@pytest.fixture(autouse=True)
def isolated(
    monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[None]:
    """No setting of the developer reaches a test, and no test the developer's cache."""
    for name in list(os.environ):
        if name.startswith(STEERING):
            monkeypatch.delenv(name)
    monkeypatch.setenv("SONATA_AOT_CACHE_DIR", str(tmp_path_factory.mktemp("cache")))
    forget_everything()
    yield
    forget_everything()


@pytest.fixture
def forget() -> Callable[[], None]:
    return forget_everything


@pytest.fixture
def cli() -> Cli:
    """Runs the installed `sonata-aot` in a process of its own: `cli("list", NAME="value")`."""

    def run(
        *arguments: str | Path, cwd: Path | None = None, **environ: str | Path
    ) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [SCRIPT, *arguments],
            env={**os.environ, **{name: str(value) for name, value in environ.items()}},
            cwd=cwd,
            capture_output=True,
            text=True,
            errors="surrogateescape",
            check=False,
            timeout=120,
        )

    return run


@pytest.fixture
def invoke() -> Invoke:
    """Runs the command line in this process: quicker, for what needs no process."""

    def run(*arguments: str | Path, **environ: str | Path) -> Result:
        return CliRunner(env={name: str(value) for name, value in environ.items()}).invoke(
            main, [str(argument) for argument in arguments]
        )

    return run


@pytest.fixture
def own_cache(warm_cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of the warm cache, in use, that a test may damage; without what is published in it."""
    copy = tmp_path / "own-cache"
    shutil.copytree(warm_cache, copy, ignore=shutil.ignore_patterns("artifacts"))
    monkeypatch.setenv("SONATA_AOT_CACHE_DIR", str(copy))
    return copy


@pytest.fixture
def copied(built: Path, tmp_path: Path) -> Path:
    """A copy of the shared artifact directory that a test may damage."""
    return Path(shutil.copytree(built, tmp_path / "artifacts"))


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Path]:
    """Writes a tree of files under a folder on sys.path: `package({"pkg/a.py": "..."})`."""
    root = tmp_path / "on-sys-path"
    root.mkdir()
    monkeypatch.syspath_prepend(root)

    def write(files: dict[str, str]) -> Path:
        for name, text in files.items():
            path = root / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(textwrap.dedent(text))
        forget_everything()
        return root

    return write


_SPECS = """
from sonata_aot.artifacts import Budget, Declaration, Parameter
from sonata_aot.kernels import KernelSpec, product


def spec(function, module="{package}.device", **changes):
    parts = dict(
        name=function,
        parameters=(Parameter("out", "pointer", element="f32", align=4), Parameter("n", "i32")),
        choices=("m",),
        selectors=("m",),
        block=("64", "1", "1"),
        grid=("1", "1", "1"),
    )
    return KernelSpec(Declaration(**parts | changes), product(m=[1]), f"{{module}}:{{function}}")


SPECS = [{specs}]
"""
_RUN = """
import signal
from sonata_aot.aot import plan
from {package}.specs import SPECS

# Ctrl-C is ignored in a process whose ancestor a shell put into the background.
signal.signal(signal.SIGINT, signal.default_int_handler)

plan.builtin = lambda: {{spec.name: spec for spec in SPECS}}

from sonata_aot.aot.cli import main

main(prog_name="sonata-aot")
"""
_DEVICE = """
import cutlass
from cutlass import Float32, Int32, Int64, cute

@cute.kernel
def good(out: cute.Pointer, n: Int32, *, m: cutlass.Constexpr):
    i = cute.arch.thread_idx()[0]
    if i < n:
        (out + i).store(Float32(m))
"""


@dataclass
class Toys:
    """Throw-away kernels in a package of their own, and the real command line over them."""

    root: Path
    package: str
    environ: dict[str, str] = field(default_factory=dict)

    @property
    def cache(self) -> Path:
        return self.root / "cache"

    @property
    def device(self) -> Path:
        """The file of the device code."""
        return self.root / self.package / "device.py"

    @property
    def scratch(self) -> list[Path]:
        """What builds have left behind."""
        scratch = self.cache / ".sonata-aot-scratch"
        return list(scratch.iterdir()) if scratch.exists() else []

    def write(self, specs: str, device: str = "", **modules: str) -> None:
        """`specs`: calls of `spec(...)`; `device`: kernels beside `good`; further modules."""
        texts = {
            "device": _DEVICE + textwrap.dedent(device),
            "specs": _SPECS.format(package=self.package, specs=specs),
            "__init__": "",
            **{name: textwrap.dedent(text) for name, text in modules.items()},
        }
        for name, text in texts.items():
            path = self.root / self.package / f"{name}.py"
            path.parent.mkdir(exist_ok=True)
            path.write_text(text)
        (self.root / "run.py").write_text(_RUN.format(package=self.package))

    def start(self, *arguments: str, before: Sequence[str] = ()) -> subprocess.Popen[str]:
        """`before`: words to put before the command."""
        command = [sys.executable, str(self.root / "run.py"), "build", "--arch=sm86", *arguments]
        return subprocess.Popen(
            [*before, *command],
            env={
                **{n: v for n, v in os.environ.items() if not n.startswith(STEERING)},
                "PYTHONPATH": str(self.root),
                "SONATA_AOT_CACHE_DIR": str(self.cache),
                **self.environ,
            },
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def build(
        self, *arguments: str, before: Sequence[str] = ()
    ) -> subprocess.CompletedProcess[str]:
        process = self.start(*arguments, before=before)
        out, err = process.communicate(timeout=120)
        return subprocess.CompletedProcess(process.args, process.returncode, out, err)


@pytest.fixture(scope="session")
def make_toys(tmp_path_factory: pytest.TempPathFactory) -> Callable[[], Toys]:
    def make() -> Toys:
        return Toys(tmp_path_factory.mktemp("toys"), f"toys{next(_numbers)}")

    return make


@pytest.fixture
def toys(make_toys: Callable[[], Toys]) -> Toys:
    return make_toys()


@pytest.fixture
def canned(warm_cache: Path, tmp_path: Path) -> Canned:
    """Builds whose compiler hands out what is in the warm cache."""
    root = tmp_path / "canned"
    root.mkdir()
    return Canned(root, warm_cache)


@pytest.fixture(scope="session")
def without_build_extra(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """For PYTHONPATH with `python -S`: the product and what it requires, and nothing else."""
    root = tmp_path_factory.mktemp("bare")

    def link(module: ModuleType | str, target: Path) -> None:
        (root / str(module)).parent.mkdir(exist_ok=True)
        (root / str(module)).symlink_to(target)

    for name in ("click", "platformdirs"):
        link(name, Path(importlib.import_module(name).__path__[0]))
    for room in ("aot", "kernels", "artifacts", "loader"):
        home = importlib.import_module(f"sonata_aot.{room}").__path__[0]
        link(f"sonata_aot/{room}", Path(home))
    return root
