"""Which source files a kernel's device code consists of, found without importing them.

A cache key must cover the module and all that it imports, but importing it would load the DSL and
take seconds. So imports are read off the syntax tree and followed, except into the standard library
and the compiler's own packages, whose version stands in the key.
"""

from __future__ import annotations

import ast
import functools
import hashlib
import sys
from collections.abc import Iterator
from importlib.machinery import ModuleSpec
from pathlib import Path

from ..artifacts.errors import BuildError
from ..artifacts.schema import digest

# Top-level names that the compiler's packages install.
_COMPILER = {"cutlass", "nvidia_cutlass_dsl", "cuda"}


@functools.cache
def source_files(module: str) -> dict[str, Path]:
    """The module and everything that it imports, by module name, sorted.

    A package's `__init__` counts where it is imported by name, not for merely lying above a module:
    it runs, but puts nothing into the kernel. An import that cannot be found (optional, or made at
    run time) is left out; a compiled extension counts like a source file.

    Raises:
        BuildError: the module itself cannot be found or parsed.
    """
    found: dict[str, Path] = {}
    pending = [module]
    while pending:
        name = pending.pop()
        if name in found or _skipped(name):
            continue
        spec = _find(name)
        if spec is None or spec.origin is None or not spec.has_location:
            if name == module:
                raise BuildError(
                    f"device module {name!r} not found",
                    remedy="correct the spec's `device`, or install the package it is in",
                )
            continue
        path = Path(spec.origin)
        found[name] = path
        if path.suffix == ".py":
            pending += _imports(name, path, is_package=spec.submodule_search_locations is not None)
    return dict(sorted(found.items()))


def source_digests(module: str) -> dict[str, str]:
    """SHA-256 of each of `source_files(module)`, by module name."""
    return {
        name: hashlib.sha256(path.read_bytes()).hexdigest()
        for name, path in source_files(module).items()
    }


def source_digest(module: str) -> str:
    """SHA-256 over the names and bytes of `source_files(module)`."""
    return digest(source_digests(module))


def _skipped(name: str) -> bool:
    top = name.partition(".")[0]
    return top in _COMPILER or top in sys.stdlib_module_names


@functools.cache
def _find(name: str) -> ModuleSpec | None:
    """Like `importlib.util.find_spec`, but it imports no parent package."""
    parent, _, _ = name.rpartition(".")
    path = None
    if parent:
        above = _find(parent)
        if above is None or above.submodule_search_locations is None:
            return None
        path = list(above.submodule_search_locations)
    for finder in sys.meta_path:
        spec = finder.find_spec(name, path)
        if spec is not None:
            return spec
    return None


@functools.cache
def _imports(module: str, path: Path, *, is_package: bool) -> tuple[str, ...]:
    # Most kernels share most of what they import.
    return tuple(_find_imports(module, path, is_package=is_package))


# Where statements are that belong to another one.
_BLOCKS = ("body", "orelse", "finalbody", "handlers", "cases")


def _statements(tree: ast.Module) -> Iterator[ast.AST]:
    """Every statement, nested ones too, and none of the many expressions: none imports anything."""
    pending: list[ast.AST] = [tree]
    while pending:
        node = pending.pop()
        yield node
        for name in _BLOCKS:
            pending += getattr(node, name, ())


def _find_imports(module: str, path: Path, *, is_package: bool) -> Iterator[str]:
    try:
        tree = ast.parse(path.read_bytes(), str(path))
    except SyntaxError as error:
        raise BuildError(
            f"{path}:{error.lineno}: {error.msg}", remedy="correct the syntax and build again"
        ) from None
    package = module if is_package else module.rpartition(".")[0]
    for node in _statements(tree):
        if isinstance(node, ast.Import):
            # `import a.b` binds `a`: whatever `a/__init__` defines is then within reach.
            for alias in node.names:
                parts = alias.name.split(".")
                yield from (".".join(parts[:end]) for end in range(1, len(parts) + 1))
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                above = package.rsplit(".", node.level - 1)[0] if node.level > 1 else package
                base = f"{above}.{base}" if base else above
            if _skipped(base):
                continue
            # `from package import name`: the name is a module, or something in `__init__`.
            submodules = [f"{base}.{alias.name}" for alias in node.names]
            modules = [name for name in submodules if _find(name) is not None]
            yield from modules
            if len(modules) < len(submodules):
                yield base
