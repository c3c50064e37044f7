"""What a build consists of: every kernel, variant and architecture, each with its cache key."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import os
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..artifacts import environment
from ..artifacts.arch import Arch, normalise, parse_arch_list
from ..artifacts.declaration import Declaration, Variant, variant_name
from ..artifacts.errors import UsageError
from ..artifacts.schema import digest, encode
from ..kernels import KernelSpec, builtin
from ..kernels.registry import by_name, from_module, installed
from ..kernels.tables import default_variants
from .cache import ENTRY_FORMAT
from .sources import source_digest, source_digests
from .toolchain import compiler_versions

if TYPE_CHECKING:
    from .needed import Needed


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
            "declaration": _encoded(self.spec.declaration),
            "device": self.spec.device,
            "resident": self.spec.resident_blocks(self.variant),
            "variant": self.variant,
            "arch": self.arch.name,
            "recipe": _recipe(),
            "sources": source_digest(self.spec.module),
            "compiler": compiler,
            "entry_format": ENTRY_FORMAT,
        }

    def record(self) -> dict[str, Any]:
        """`inputs` with each source file by itself, for people to compare."""
        return {
            **self.inputs(compiler_versions()),
            "sources": source_digests(self.spec.module),
        }


@functools.cache
def _encoded(declaration: Declaration) -> dict[str, Any]:
    return encode(declaration)


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


def known_kernels(modules: Iterable[str] = ()) -> dict[str, KernelSpec]:
    """The kernels of these modules, or else this package's own and those of installed packages.

    Modules are looked for in the current directory too, after all other places.

    Raises:
        UsageError: there is no such module.
        BuildError: a module cannot be used, or two kernels have one name.
    """
    named = list(modules)
    if not named:
        return by_name([*builtin().values(), *installed()])
    with contextlib.suppress(FileNotFoundError):
        if (here := os.getcwd()) not in sys.path:
            sys.path.append(here)
    return by_name([spec for module in named for spec in from_module(module)])


def choose_kernels(
    requested: Iterable[str], modules: Iterable[str] = (), *, everything: bool = False
) -> tuple[KernelSpec, ...]:
    """The kernels asked for, or those built by default (or `everything`), sorted by name.

    They are among `known_kernels(modules)`.

    Raises:
        UsageError: an unknown kernel.
        UsageError, BuildError: as for `known_kernels`.
    """
    known = known_kernels(modules)
    names = sorted(set(requested)) or [
        name for name, spec in known.items() if spec.default or everything
    ]
    for name in names:
        if name not in known:
            raise UsageError(f"unknown kernel {name!r}", remedy="use one of " + " ".join(known))
    return tuple(known[name] for name in names)


@dataclass(frozen=True)
class Selection:
    """What a build consists of: these kernels for these architectures.

    Of each kernel what calls get, with `everything` each variant, with `only` what that has.
    """

    specs: tuple[KernelSpec, ...]
    archs: tuple[Arch, ...]
    everything: bool
    only: Needed | None

    def jobs(self) -> list[Job]:
        """As `jobs`."""
        return jobs(self.specs, self.archs, everything=self.everything, only=self.only)

    def left_out(self) -> list[tuple[Job, str]]:
        """As `left_out`."""
        return left_out(self.specs, self.archs, everything=self.everything, only=self.only)


def select(path: Path, archs: Iterable[str]) -> Selection:
    """What a list of shapes needs.

    Raises:
        ConfigError: it is no list of shapes.
        BuildError: no variant is declared for one of them.
        UsageError: as for `choose_archs`.
    """
    from .needed import needed, require_all  # most builds have no such list
    from .shapes import read_list

    chosen = choose_archs(archs)
    only = needed(read_list(path), chosen)
    require_all(only)
    return Selection(only.kernels(), chosen, False, only)


def jobs(
    specs: Iterable[KernelSpec],
    archs: Iterable[Arch],
    *,
    everything: bool = False,
    only: Needed | None = None,
) -> list[Job]:
    """What a build compiles, in the order of the manifest.

    Of a kernel with a table of rules those variants that some rule names; with `everything` each
    that its declaration allows for the architecture; with `only` what that has.
    """
    return [job for job, reason in _candidates(specs, archs, everything, only) if reason is None]


def left_out(
    specs: Iterable[KernelSpec],
    archs: Iterable[Arch],
    *,
    everything: bool = False,
    only: Needed | None = None,
) -> list[tuple[Job, str]]:
    """What `jobs` leaves out by its declaration, each with the reason."""
    return [
        (job, reason)
        for job, reason in _candidates(specs, archs, everything, only)
        if reason is not None
    ]


def _candidates(
    specs: Iterable[KernelSpec], archs: Iterable[Arch], everything: bool, only: Needed | None
) -> Iterator[tuple[Job, str | None]]:
    targets = list(archs)
    for spec in specs:
        for arch in targets:
            if only is not None:
                chosen = only.variants(spec, arch)
            else:
                chosen = spec.variants if everything else default_variants(spec, arch)
            for variant in chosen:
                yield Job(spec, variant, arch), spec.reason_against(variant, arch)
