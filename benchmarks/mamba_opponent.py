"""The opponent of the SSD scan: mamba_ssm's Triton kernels, without mamba_ssm's CUDA extension.

    python -m benchmarks.mamba_opponent

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

from sonata_aot.artifacts.errors import MissingDependency, SonataError

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
_MODULE = "mamba_ssm.ops.triton.ssd_combined"


@dataclass(frozen=True)
class Shape:
    """One scan; bf16, with D and dt_bias."""

    batch: int
    seqlen: int
    heads: int = 64
    headdim: int = 64
    dstate: int = 128
    groups: int = 1
    chunk_size: int = 256

    def __str__(self) -> str:
        usual = Shape(self.batch, self.seqlen)
        others = ("heads", "headdim", "dstate", "groups", "chunk_size")
        unusual = [f"{k}={getattr(self, k)}" for k in others if getattr(self, k) != vars(usual)[k]]
        return " ".join([f"{self.batch}x{self.seqlen}", *unusual])


# Those that have to be won.
BARS = (
    *(Shape(2, seqlen) for seqlen in (64, 128, 256, 512, 1024, 2048, 4096, 8192)),
    Shape(1, 32768),
    Shape(8, 2048),
)
# Those that are reported too: few heads, many with groups, wide ones.
REPORTED = (
    Shape(1, 2048, heads=24),
    Shape(1, 2048, heads=128, groups=8),
    Shape(2, 2048, heads=32, headdim=128),
)


@dataclass(frozen=True)
class Opponent:
    """mamba_ssm's `mamba_chunk_scan_combined`, and the versions of all that it runs on."""

    scan: Callable[..., Any]
    versions: dict[str, str]


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
