"""What a build consists of: every kernel, variant and architecture, each with its cache key."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..artifacts import environment
from ..artifacts.arch import Arch, normalise, parse_arch_list
from ..artifacts.declaration import Variant, variant_name
from ..artifacts.errors import UsageError
from ..artifacts.schema import digest, encode
from ..kernels import KernelSpec, builtin
from ..kernels.tables import default_variants
from .cache import ENTRY_FORMAT
from .sources import source_digest
from .toolchain import compiler_versions


@dataclass(frozen=True)
class Job:
    """One variant of one kernel for one architecture."""

    spec: KernelSpec
    variant: Variant
    arch: Arch

    @property
    def label(self) -> str:
        """How messages name it."""
        return f"{self.spec.name}[{variant_name(self.variant)}] {self.arch}"

    @functools.cached_property
    def key(self) -> str:
        """SHA-256 over everything that can change a byte of the output, and nothing else."""
        return digest(self.inputs(compiler_versions()))

    def inputs(self, compiler: dict[str, str]) -> dict[str, Any]:
        """What the key is made of, where these are the compiler's packages."""
        return {
            "declaration": encode(self.spec.declaration),
            "device": self.spec.device,
            "resident": self.spec.resident_blocks(self.variant),
            "variant": self.variant,
            "arch": self.arch.name,
            "recipe": _recipe(),
            "sources": source_digest(self.spec.module),
            "compiler": compiler,
            "entry_format": ENTRY_FORMAT,
        }


@functools.cache
def _recipe() -> str:
    # The compile options, and how a worker turns a task into a compiler call.
    return hashlib.sha256(Path(__file__).with_name("recipe.py").read_bytes()).hexdigest()


def choose_archs(requested: Iterable[str]) -> tuple[Arch, ...]:
    """The architectures asked for, or those of TORCH_CUDA_ARCH_LIST; never this machine's own.

    Raises:
        UsageError: an unknown architecture, or none at all.
    """
    archs = normalise(Arch.parse(text) for text in requested)
    if not archs:
        try:
            archs = parse_arch_list(environment.TORCH_CUDA_ARCH_LIST.get())
        except UsageError as error:
            raise UsageError(f"TORCH_CUDA_ARCH_LIST: {error.what}", remedy=error.remedy) from None
    if not archs:
        raise UsageError("no architecture given", remedy="say for instance --arch sm86")
    return archs


def choose_kernels(requested: Iterable[str], *, everything: bool = False) -> tuple[KernelSpec, ...]:
    """The kernels asked for, or those built by default (or `everything`), sorted by name.

    Raises:
        UsageError: an unknown kernel.
    """
    known = builtin()
    names = sorted(set(requested)) or [
        name for name, spec in known.items() if spec.default or everything
    ]
    for name in names:
        if name not in known:
            raise UsageError(f"unknown kernel {name!r}", remedy="use one of " + " ".join(known))
    return tuple(known[name] for name in names)


def jobs(
    specs: Iterable[KernelSpec], archs: Iterable[Arch], *, everything: bool = False
) -> list[Job]:
    """What a build compiles, in the order of the manifest.

    Of a kernel with a table of rules those variants that some rule names; with `everything` each
    that its declaration allows for the architecture.
    """
    targets = list(archs)
    return [
        Job(spec, variant, arch)
        for spec in specs
        for arch in targets
        for variant in (spec.variants if everything else default_variants(spec, arch))
        if spec.is_for(variant, arch)
    ]
