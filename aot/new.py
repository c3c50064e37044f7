"""Writes a small project with a kernel of its own, to start from."""

from __future__ import annotations

import builtins
import contextlib
import importlib.util
import keyword
import re
import sys
from pathlib import Path
from string import Template

from ..artifacts.errors import StoreError, UsageError
from ..artifacts.files import explained
from ..kernels import builtin

_TEMPLATE = Path(__file__).with_name("template")
# Where a file of the template goes; `{}` is the kernel's name.
_PLACES = {
    "README.md.in": "README.md",
    "gitignore.in": ".gitignore",
    "pyproject.toml.in": "pyproject.toml",
    "package/__init__.py.in": "{}/__init__.py",
    "package/device.py.in": "{}/device.py",
    "package/spec.py.in": "{}/spec.py",
    "tests/test_kernel.py.in": "tests/test_kernel.py",
    "workflows/ci.yml.in": ".github/workflows/ci.yml",
}
# What the template's own code calls something else, or its files do.
_TAKEN = {
    *("artifacts", "build", "device", "dist", "spec", "cute", "cutlass", "loader", "pytest"),
    *("sonata_aot", "torch", "open_artifacts", "product", "arch", "archs", "arguments", "binary"),
    *("block", "built", "command", "done", "dtype", "first", "i", "kernels", "out", "scale"),
    *("size", "threads", "tmp_path_factory", "value", "x", "y"),
}


def new(name: str, directory: Path) -> list[Path]:
    """Write the project for a kernel `name` into `directory`; returns its files.

    Raises:
        UsageError: `name` cannot be that of a kernel and a package.
        StoreError: there is something in `directory`, or it cannot be written.
    """
    _check_name(name)
    written: list[Path] = []
    with explained(directory, "write the project in"):
        existed = directory.exists()
        if existed and any(directory.iterdir()):
            raise StoreError(
                f"{directory} is not empty", remedy="name another directory with --out"
            )
        try:
            for source, place in _PLACES.items():
                template = Template((_TEMPLATE / source).read_text(encoding="utf-8"))
                path = directory / place.format(name)
                path.parent.mkdir(parents=True, exist_ok=True)
                text = template.substitute(name=name, distribution=name.replace("_", "-"))
                written.append(path)
                path.write_text(text, encoding="utf-8")
        except BaseException:
            # Else the directory, no longer empty, could not be named again.
            _remove(written, directory, itself=not existed)
            raise
    return written


def _remove(files: list[Path], directory: Path, *, itself: bool) -> None:
    """Remove files, and the folders up to `directory` that nobody else has put anything into."""
    for path in files:
        path.unlink(missing_ok=True)
    folders = {folder for path in files for folder in path.parents if directory in folder.parents}
    if itself:
        folders.add(directory)
    for folder in sorted(folders, key=lambda folder: len(folder.parts), reverse=True):
        with contextlib.suppress(OSError):
            folder.rmdir()


def _check_name(name: str) -> None:
    reason = None
    if not re.fullmatch(r"[a-z][a-z0-9_]{0,63}", name, re.ASCII) or name.endswith("_"):
        reason = "must be lower-case letters, digits and underscores, a letter first"
    elif keyword.iskeyword(name) or keyword.issoftkeyword(name) or re.match("tests?_|tests$", name):
        reason = "means something else in Python, or to pytest"
    elif hasattr(builtins, name) or name in _TAKEN:
        reason = "has another meaning in the project's own code"
    elif name in builtin():
        reason = "is a kernel of sonata-aot itself"
    elif name in sys.builtin_module_names or importlib.util.find_spec(name) is not None:
        reason = "is a module that is installed here"
    if reason is not None:
        raise UsageError(f"{name!r} {reason}", remedy="choose another name, such as my_kernel")
