"""The repository's shape: which room may import what, and that files stay readable."""

from __future__ import annotations

import ast
import importlib
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = "sonata_aot"
ROOMS = ("artifacts", "kernels", "aot", "loader")
MAY_IMPORT = {
    "artifacts": {"platformdirs"},
    "kernels": {"sonata_aot.artifacts"},
    "aot": {"sonata_aot.artifacts", "sonata_aot.kernels", "click"},
    "loader": {"sonata_aot.artifacts", "torch"},
}
# The one part of the tool that measures, and so needs what it measures.
MEASURES = ROOT / "aot" / "measure"
# What pip runs to build this, before it is installed.
BACKEND = ROOT / "aot" / "backend"
# The only files that load the compiler; only its worker processes import them.
COMPILER = {"cutlass", "cuda"}


HOST_FILES = {"__init__.py", "spec.py"}
# What device code of several kernels shares.
DEVICE_FILES = {"loads.py", "scalars.py", "tensor_core.py"}


def loads_compiler(path: Path) -> bool:
    # In a kernel's folder, all but the declaration is device code.
    in_kernel = path.parent.parent == ROOT / "kernels" and path.name not in HOST_FILES
    shared = path.parent == ROOT / "kernels" and path.name in DEVICE_FILES
    return in_kernel or shared or path == ROOT / "aot" / "recipe.py"


MOST_LINES = 420


def python_files(*folders: str) -> list[Path]:
    found = [path for folder in folders for path in (ROOT / folder).rglob("*.py")]
    return sorted(path for path in found if "__pycache__" not in path.parts)


def relative(path: Path) -> str:
    return str(path.relative_to(ROOT))


def imports(path: Path) -> Iterator[str]:
    """Absolute names of all modules that a file imports, nested imports included."""
    parts = [PACKAGE, *path.relative_to(ROOT).with_suffix("").parts]
    for node in ast.walk(ast.parse(path.read_bytes())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = [*parts[: len(parts) - node.level]] if node.level else []
            base += node.module.split(".") if node.module else []
            if base == [PACKAGE]:
                yield from (f"{PACKAGE}.{alias.name}" for alias in node.names)
            else:
                yield ".".join(base)


def owner(module: str) -> str:
    """What an import counts as: a room of this package, or a top-level module."""
    parts = module.split(".")
    return ".".join(parts[:2]) if parts[0] == PACKAGE else parts[0]


@pytest.mark.parametrize("path", python_files(*ROOMS), ids=relative)
def test_a_room_imports_only_what_it_may(path: Path) -> None:
    room = path.relative_to(ROOT).parts[0]
    allowed = {f"{PACKAGE}.{room}"} | MAY_IMPORT[room] | set(sys.stdlib_module_names)
    if loads_compiler(path):
        allowed |= COMPILER
    if path.parent == BACKEND:
        allowed |= {"scikit_build_core"}
    if path.parent == MEASURES:
        allowed |= {"torch", f"{PACKAGE}.loader"}
    assert {owner(module) for module in imports(path)} - allowed == set()


@pytest.mark.parametrize(
    "path", python_files(*ROOMS, "tests", "benchmarks", "examples"), ids=relative
)
def test_nobody_imports_a_room_by_its_bare_name(path: Path) -> None:
    tree = ast.parse(path.read_bytes())
    absolute = [a.name for n in ast.walk(tree) if isinstance(n, ast.Import) for a in n.names]
    absolute += [
        node.module or ""
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and not node.level
    ]
    assert {name.partition(".")[0] for name in absolute} & set(ROOMS) == set()


@pytest.mark.parametrize(
    ("module", "forbidden"),
    [
        ("loader", {"torch", "cutlass", "triton", "click"}),
        ("artifacts", {"torch", "cutlass", "click"}),
        ("kernels", {"torch", "cutlass", "click"}),
        ("aot.cli", {"torch", "cutlass"}),
        ("aot.measure.gpu", {"torch", "cutlass"}),
        ("aot.measure.render", {"torch", "cutlass", "matplotlib"}),
        ("aot.measure.table", {"torch", "cutlass"}),
        ("aot.build", {"torch", "cutlass"}),
    ],
)
def test_what_an_import_brings_along(module: str, forbidden: set[str]) -> None:
    program = f"import sys, {PACKAGE}.{module}; print(' '.join(sys.modules))"
    printed = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    ).stdout
    assert {name.partition(".")[0] for name in printed.split()} & forbidden == set()


@pytest.mark.parametrize("room", ROOMS)
def test_a_room_is_installed_from_here_and_typed(room: str) -> None:
    module = importlib.import_module(f"{PACKAGE}.{room}")
    assert Path(str(module.__file__)).resolve() == ROOT / room / "__init__.py"
    assert (ROOT / room / "py.typed").exists()
    assert (ROOT / "typings" / PACKAGE / room).resolve() == ROOT / room


@pytest.mark.parametrize("name", ["README.md", "CHANGELOG.md", "LICENSE", "Makefile", ".ci/run"])
def test_the_repository_has(name: str) -> None:
    assert (ROOT / name).read_text().strip()


def test_ci_runs_what_the_readme_says() -> None:
    script = ROOT / ".ci" / "run"
    commands = [line for line in script.read_text().splitlines() if not line.startswith("#")]
    assert "make test" in commands[-1]
    assert script.stat().st_mode & 0o111
    readme = (ROOT / "README.md").read_text()
    for target in ("build", "test"):
        assert f"make {target}" in readme
        assert f"\n{target}:" in (ROOT / "Makefile").read_text()


@pytest.mark.parametrize(
    "path",
    [
        *python_files(*ROOMS, "tests", "benchmarks", "examples"),
        *sorted(ROOT.glob("loader/native/*.[ch]pp")),
        *sorted(ROOT.glob("tests/support/recording_libcuda/*.[ch]pp")),
    ],
    ids=relative,
)
def test_no_file_is_too_long_to_read(path: Path) -> None:
    assert len(path.read_text().splitlines()) <= MOST_LINES
