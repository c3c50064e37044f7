"""The opponent of the SSD scan: mamba_ssm's Triton kernels, without mamba_ssm's CUDA extension.

    python -m sonata_aot.aot.measure.mamba_opponent

says whether it can be loaded, and of which versions. It needs torch, triton, einops and a
mamba_ssm of exactly the version that results are compared with; the extension, which
`import mamba_ssm` wants, need not be there.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import sys
from collections.abc import Callable
from dataclasses import dataclass
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any

from ...artifacts.errors import MissingDependency, SonataError

VERSION = "2.3.2.post1"
# A pure wheel: nothing of it is compiled.
_INSTALL = (
    "MAMBA_SKIP_CUDA_BUILD=TRUE MAMBA_FORCE_BUILD=TRUE pip install --no-deps --no-build-isolation "
    f"mamba-ssm=={VERSION}"
)
# What the Triton half of mamba_ssm imports, and how to get it.
_NEEDED = {
    "torch": "pip install a CUDA build of torch",
    "triton": "pip install triton, as the build of torch at hand wants it",
    "einops": "pip install einops",
    "packaging": "pip install packaging",
    "mamba_ssm": _INSTALL,
}
# Packages that import the extension, or lead to one that does, as soon as they are imported.
_PACKAGES = ("mamba_ssm", "mamba_ssm.ops", "mamba_ssm.ops.triton", "mamba_ssm.utils")
_EXTENSION = "selective_scan_cuda"
_KERNELS = "mamba_ssm.ops.triton.ssd_"
_MODULE = f"{_KERNELS}combined"


@dataclass(frozen=True)
class Opponent:
    """mamba_ssm's `mamba_chunk_scan_combined`, and the versions of all that it runs on."""

    scan: Callable[..., Any]
    versions: dict[str, str]

    def retune(self) -> None:
        """Forget which configurations were fastest, so that the next call finds out for its shape.

        Left alone, Triton keeps those of the first length that it meets.
        """
        for name, module in list(sys.modules.items()):
            if name.startswith(_KERNELS):
                for value in vars(module).values():
                    cache = getattr(value, "cache", None)
                    if isinstance(cache, dict) and hasattr(value, "configs"):
                        cache.clear()


def load() -> Opponent:
    """Import the Triton kernels.

    Unless mamba_ssm had been imported before, its packages are empty afterwards: their modules can
    be imported from this process by their full names, and nothing from `mamba_ssm` itself.

    Raises:
        MissingDependency: a package is missing, mamba_ssm is of another version, or its kernels
            cannot be imported. What was imported of it until then is forgotten again.
    """
    for name, remedy in _NEEDED.items():
        if importlib.util.find_spec(name) is None:
            raise MissingDependency(f"{name} is not installed", remedy=remedy)
    versions = {name: _version(name) for name in _NEEDED}
    if versions["mamba_ssm"] != VERSION:
        found = f"mamba_ssm is of version {versions['mamba_ssm']}, the opponent is {VERSION}"
        raise MissingDependency(found, remedy=_INSTALL)
    before = set(sys.modules)
    _stub()
    try:
        scan = importlib.import_module(_MODULE).mamba_chunk_scan_combined
    # Decorators of kernels run while they are imported, so anything can come of versions that do
    # not fit.
    except Exception as error:
        for name in set(sys.modules) - before:
            if name.partition(".")[0] in ("mamba_ssm", _EXTENSION):
                del sys.modules[name]
        what = f"{_MODULE} cannot be imported ({type(error).__name__}: {error})"
        remedy = f"install versions that mamba_ssm {VERSION} works with; {versions}"
        raise MissingDependency(what, remedy=remedy) from error
    return Opponent(scan, versions)


def _version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return "unknown"


def _stub() -> None:
    """Put packages in place that have the real ones' modules, and do nothing when imported."""
    if "mamba_ssm" in sys.modules:
        return
    spec = importlib.util.find_spec("mamba_ssm")
    locations = [] if spec is None else list(spec.submodule_search_locations or ())
    for name in _PACKAGES:
        _, *below = name.split(".")
        empty = ModuleSpec(name, loader=None, is_package=True)
        empty.submodule_search_locations = [str(Path(root, *below)) for root in locations]
        module = sys.modules[name] = importlib.util.module_from_spec(empty)
        package, _, last = name.rpartition(".")
        if package:
            setattr(sys.modules[package], last, module)
    if importlib.util.find_spec(_EXTENSION) is None:
        empty = ModuleSpec(_EXTENSION, loader=None)
        sys.modules[_EXTENSION] = importlib.util.module_from_spec(empty)


def main() -> None:
    """Load it and say what it is."""
    try:
        opponent = load()
    except SonataError as error:
        raise SystemExit(str(error)) from None
    print("  ".join(f"{name} {version}" for name, version in opponent.versions.items()))


if __name__ == "__main__":
    main()
