"""Finds kernels: those of this package, of installed packages, and of modules that one names.

In this package each subfolder with a `spec.py` has some. Other packages announce a module by an
entry point of the group `sonata_aot.kernels`. Each such module has `SPECS`.
"""

from __future__ import annotations

import functools
import importlib
import importlib.metadata
import pkgutil
import traceback
from collections.abc import Iterable, Mapping

from ..artifacts.arch import KNOWN
from ..artifacts.declaration import variant_name
from ..artifacts.errors import BuildError, SonataError, UsageError
from ..artifacts.schema import decode, encode
from .spec import Declaration, KernelSpec, Variant

GROUP = "sonata_aot.kernels"
"""The group of entry points, and what names this package's own kernels among modules."""


@functools.cache
def builtin() -> dict[str, KernelSpec]:
    """Every kernel of this package by name, sorted."""
    package = __name__.rpartition(".")[0]
    folders = [
        module.name
        for module in pkgutil.iter_modules(importlib.import_module(package).__path__)
        if module.ispkg
    ]
    modules = [importlib.import_module(f"{package}.{folder}.spec") for folder in folders]
    specs = [spec for module in modules for spec in module.SPECS]
    return {spec.name: spec for spec in sorted(specs, key=lambda spec: spec.name)}


def from_module(name: str) -> tuple[KernelSpec, ...]:
    """The `SPECS` of a module, which is imported; `sonata_aot.kernels` names this package's own.

    Raises:
        UsageError: there is no such module.
        BuildError: it cannot be imported, or what it has is no kernels of its own; says where.
        ManifestError: a declaration in it is wrong.
    """
    if name == GROUP:
        return tuple(builtin().values())
    try:
        module = importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{name}.".startswith(f"{error.name}."):
            raise _broken(name, error) from None
        raise UsageError(
            f"no module {name!r}",
            remedy="install its package, or run this in the folder that the package is in",
        ) from None
    except SonataError:
        raise
    except Exception as error:
        raise _broken(name, error) from None
    specs = getattr(module, "SPECS", None)
    if not isinstance(specs, Iterable) or isinstance(specs, str | Mapping):
        raise _unusable(name, "has no SPECS")
    listed = tuple(specs)
    for spec in listed:
        if not isinstance(spec, KernelSpec):
            raise _unusable(name, f"has a {type(spec).__name__} in SPECS")
        _check(spec, name)
        if spec.name in builtin():
            raise BuildError(
                f"{name}: {spec.name!r} is a kernel of sonata-aot itself",
                remedy="give yours another name",
            )
    return listed


def installed() -> tuple[KernelSpec, ...]:
    """The kernels that installed packages announce, each in an entry point that names a module.

    Raises:
        BuildError: such a module cannot be used; the message names the package.
    """
    found: list[KernelSpec] = []
    for entry in importlib.metadata.entry_points(group=GROUP):
        try:
            found += from_module(entry.value)
        except (UsageError, BuildError) as error:
            package = entry.dist.name if entry.dist else entry.name
            raise BuildError(
                f"the installed package {package}: {error.what}",
                remedy=f"mend or remove it, or build without it: --from {GROUP}",
            ) from None
    return tuple(found)


def by_name(specs: Iterable[KernelSpec]) -> dict[str, KernelSpec]:
    """The kernels by name, sorted; naming a module twice is no harm.

    Raises:
        BuildError: two have one name.
    """
    found: dict[str, KernelSpec] = {}
    for spec in sorted(specs, key=lambda spec: spec.name):
        if found.setdefault(spec.name, spec) is not spec:
            raise BuildError(
                f"two kernels have the name {spec.name!r}: {found[spec.name].device} and "
                f"{spec.device}",
                remedy="rename one, or build from one of their modules",
            )
    return found


def _check(spec: KernelSpec, module: str) -> None:
    """Refuse what a manifest or the loader would not take, before anything is compiled."""
    where = f"{module}: {spec.name}"
    decode(Declaration, encode(spec.declaration), where)
    for variant in spec.variants:
        decode(Variant, encode(variant), f"{where}: variant")
    for arch in KNOWN:
        found: dict[tuple[object, ...], Variant] = {}
        for variant in spec.variants:
            if not spec.is_for(variant, arch):
                continue
            selected = tuple([variant[name] for name in spec.declaration.selectors])
            if found.setdefault(selected, variant) is not variant:
                raise BuildError(
                    f"{where}: {variant_name(variant)} and {variant_name(found[selected])} differ "
                    "in no selector, so that no call could choose",
                    remedy="declare one of them, or make a choice that differs a selector",
                )


def _broken(name: str, error: Exception) -> BuildError:
    frames = traceback.extract_tb(error.__traceback__)
    place = f" ({frames[-1].filename}:{frames[-1].lineno})" if frames else ""
    return BuildError(
        f"module {name!r} cannot be imported: {type(error).__name__}: {error}{place}",
        remedy="mend it; a module of declarations needs neither the compiler nor a GPU",
    )


def _unusable(name: str, problem: str) -> BuildError:
    return BuildError(
        f"module {name!r} {problem}",
        remedy="give it SPECS, a tuple of sonata_aot.kernels.KernelSpec",
    )
