"""Finds kernels: those of this package, of installed packages, and of modules that one names.

In this package each subfolder with a `spec.py` has some. Other packages announce a module by an
entry point of the group `sonata_aot.kernels`. Each such module has `SPECS`.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.metadata
import pkgutil
import re
import sys
import traceback
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from ..artifacts.arch import KNOWN
from ..artifacts.declaration import variant_name
from ..artifacts.errors import BuildError, ManifestError, SonataError, UsageError
from ..artifacts.schema import decode, encode
from .spec import Declaration, KernelSpec, Variant

GROUP = "sonata_aot.kernels"
"""The group of entry points, and what names this package's own kernels among modules."""

_DEVICE = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*:[^\W\d]\w*")
# Whose frames say nothing of where a module is wrong: this package's, and what imports modules.
_OURS = tuple(str(Path(__file__).parents[1] / room) for room in ("artifacts", "kernels"))
_MOST_WORDS = 300


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

    What it prints goes to standard error.

    Raises:
        UsageError: there is no such module.
        BuildError: it cannot be imported, a declaration in it is wrong, or what it has is no
            kernels of its own; says where.
    """
    if name == GROUP:
        return tuple(builtin().values())
    if not name or name.startswith(".") or "/" in name:
        raise UsageError(
            f"{name!r} is no name of a module",
            remedy="name it as an import statement does, such as mypkg.kernels",
        )
    try:
        # Standard output is for what a command reports.
        with contextlib.redirect_stdout(sys.stderr):
            specs: Any = getattr(importlib.import_module(name), "SPECS", None)
            usable = isinstance(specs, Iterable) and not isinstance(specs, str | Mapping)
            listed: tuple[Any, ...] | None = tuple(specs) if usable else None
    except ModuleNotFoundError as error:
        if error.name is None or not f"{name}.".startswith(f"{error.name}."):
            raise _broken(name, error) from None
        raise UsageError(
            f"no module {name!r}",
            remedy="install its package, or run this in the folder that the package is in",
        ) from None
    except SonataError as error:
        raise BuildError(f"module {name!r}: {error.what}", remedy=error.remedy) from None
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # `sys.exit` too, whose status would say nothing of the module
        raise _broken(name, error) from None
    if listed is None:
        raise _unusable(name, "has no SPECS")
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
    if not _DEVICE.fullmatch(str(spec.device)):
        raise BuildError(
            f"{where}: device is {spec.device!r}",
            remedy="name the kernel's function as in `package.module:function`",
        )
    try:
        decode(Declaration, encode(spec.declaration), where)
        for variant in spec.variants:
            decode(Variant, encode(variant), f"{where}: variant")
    except ManifestError as error:
        raise BuildError(error.what, remedy="correct the declaration") from None
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


def _broken(name: str, error: BaseException) -> BuildError:
    said = error.msg if isinstance(error, SyntaxError) else str(error)
    words = ": ".join([type(error).__name__, *said.splitlines()[:1]])[:_MOST_WORDS]
    return BuildError(
        f"module {name!r} cannot be imported: {words}{_place(error)}",
        remedy="mend it; a module of declarations needs neither the compiler nor a GPU",
    )


def _place(error: BaseException) -> str:
    """Where in somebody's own code it happened, as far as that is known."""
    if isinstance(error, SyntaxError) and error.filename:
        return f" ({error.filename}:{error.lineno})"
    others = (*_OURS, "<", str(importlib.__file__))
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        if not frame.filename.startswith(others):
            return f" ({frame.filename}:{frame.lineno})"
    return ""


def _unusable(name: str, problem: str) -> BuildError:
    return BuildError(
        f"module {name!r} {problem}",
        remedy="give it SPECS, a tuple of sonata_aot.kernels.KernelSpec",
    )
