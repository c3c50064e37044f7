"""The compiler's packages and tools, found without importing them."""

from __future__ import annotations

import functools
import importlib.metadata
import os
import re
import subprocess
import sys
from pathlib import Path

from ..artifacts.errors import BuildError, MissingDependency

_DSL = re.compile(r"(nvidia[-_.]cutlass[-_.]dsl[\w.]*?)-([\w.!+]+)\.dist-info", re.I)
_REINSTALL = "reinstall 'sonata-aot[build]'"
# Seconds; the largest kernels disassemble in under one.
_PATIENCE = 120
_INSTALL = "install it with `pip install 'sonata-aot[build]'`"


@functools.cache
def compiler_versions() -> dict[str, str]:
    """Every installed `nvidia-cutlass-dsl*` package with its version, sorted.

    Read off the folder names: importing the compiler takes seconds.

    Raises:
        MissingDependency: there is none.
        BuildError: packages of two CUDA flavours, or of different versions, lie side by side: which
            one would compile is then a matter of luck.
    """
    found: dict[str, str] = {}
    for entry in sys.path:
        try:
            names = os.listdir(entry or ".")
        except OSError:
            continue
        for match in filter(None, map(_DSL.fullmatch, names)):
            found.setdefault(re.sub(r"[-_.]+", "-", match[1]).lower(), match[2])
    if "nvidia-cutlass-dsl" not in found:
        raise MissingDependency("the compiler nvidia-cutlass-dsl is not installed", remedy=_INSTALL)
    versions = dict(sorted(found.items()))
    flavours = [name for name in versions if re.search(r"-cu\d+$", name)]
    if flavours != ["nvidia-cutlass-dsl-libs-cu12"] or len(set(versions.values())) > 1:
        shown = ", ".join(f"{name} {version}" for name, version in versions.items())
        raise BuildError(
            f"compiler packages that do not belong together: {shown}",
            remedy="make a fresh environment and install 'sonata-aot[build]' alone "
            "(one version, the CUDA 12 flavour)",
        )
    return versions


@functools.cache
def tool(name: str) -> Path:
    """The path of `nvdisasm` or `cuobjdump`, as their packages install them.

    Raises:
        MissingDependency: the package is not installed.
    """
    package = f"nvidia-cuda-{name}"
    try:
        distribution = importlib.metadata.distribution(package)
    except importlib.metadata.PackageNotFoundError:
        raise MissingDependency(f"{package} is not installed", remedy=_INSTALL) from None
    for file in distribution.files or ():
        if file.name == name and file.parent.name == "bin":
            return Path(str(distribution.locate_file(file)))
    raise MissingDependency(f"{package} has no program {name}", remedy=_INSTALL)


def run_tool(name: str, *arguments: str) -> str:
    """Output of one of the tools.

    Raises:
        BuildError: it failed; the message carries its own words.
    """
    command = [str(tool(name)), *arguments]
    try:
        result = subprocess.run(
            command,
            capture_output=True,
            text=True,
            errors="replace",
            check=False,
            timeout=_PATIENCE,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise BuildError(f"{name} failed: {error}", remedy=_REINSTALL) from None
    if result.returncode != 0:
        said = (result.stderr or result.stdout).strip().splitlines()
        raise BuildError(
            f"{name} failed: {said[0] if said else f'exit status {result.returncode}'}",
            remedy=_REINSTALL,
        )
    return result.stdout
