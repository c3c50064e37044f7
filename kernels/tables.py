"""Tables of rules: which variant a call gets, as `sonata-aot tune` measured it.

`tuning/<arch>.toml` holds, for each kernel that has variants to choose from, how the table came
about and its rules in the order in which they are tried. An architecture without a table of its own
uses that of the next lower one.
"""

from __future__ import annotations

import functools
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..artifacts.arch import Arch
from ..artifacts.declaration import Name, Variant, variant_name
from ..artifacts.errors import ManifestError
from ..artifacts.rules import Count, Rule
from ..artifacts.schema import decode
from .spec import KernelSpec

FOLDER = Path(__file__).with_name("tuning")


@dataclass(frozen=True)
class Table:
    """One kernel's rules for an architecture; `origin` says where they come from."""

    origin: str
    rules: tuple[Rule, ...]


def table(spec: KernelSpec, arch: Arch) -> Table | None:
    """The table of a kernel for an architecture; None if it has none.

    Raises:
        ManifestError: the file that it is in has something else; names the rule.
    """
    archs = sorted(Arch.parse(path.stem) for path in FOLDER.glob("*.toml"))
    fitting = [known for known in archs if known.number <= arch.number] or archs[:1]
    if not fitting:
        return None
    path = FOLDER / f"{fitting[-1].name}.toml"
    content = _content(path).get(spec.name)
    return None if content is None else _read(content, spec, arch, f"{path}: {spec.name}")


@dataclass(frozen=True)
class _Row:
    """A rule as the file has it."""

    when: dict[Name, Count]
    n: tuple[Count, Count]
    k: tuple[Count, Count]
    variant: Variant
    launch: dict[Name, Count]


@dataclass(frozen=True)
class _Rows:
    origin: str
    rules: tuple[_Row, ...]


def _read(content: Any, spec: KernelSpec, arch: Arch, where: str) -> Table:
    """A kernel's table out of a file's parsed content; raises as `table`."""
    try:
        rows = decode(_Rows, content, where)
    except ManifestError as error:
        raise _wrong(error.what) from None
    if not rows.rules:
        raise _wrong(f"{where}: no rules")
    choices = spec.declaration.choices
    known = {
        tuple(variant.items())
        for variant in spec.variants
        if spec.declaration.least_sm(variant) <= arch.number
    }
    rules = []
    for index, row in enumerate(rows.rules):
        fixed = {**row.variant, **row.when}
        variant = {name: fixed[name] for name in choices if name in fixed}
        unknown = sorted(row.variant.keys() - set(choices))
        if unknown:
            raise _wrong(f"{where}.rules[{index}]: {spec.name} has no choice {unknown[0]!r}")
        if not any(variant.items() <= set(items) for items in known):
            raise _wrong(
                f"{where}.rules[{index}]: {variant_name(variant)} is no declared variant for {arch}"
            )
        sizes = {"n": row.n, "k": row.k}
        rules.append(Rule(spec.name, arch.name, row.when, sizes, variant, row.launch))
    return Table(rows.origin, tuple(rules))


def rules(spec: KernelSpec, arch: Arch) -> tuple[Rule, ...]:
    """The rules that a build writes into the manifest; none for a kernel without a table."""
    found = table(spec, arch)
    return () if found is None else found.rules


def default_variants(spec: KernelSpec, arch: Arch) -> tuple[Variant, ...]:
    """What is built without asking: all that some rule names, or without a table what ships."""
    found = table(spec, arch)
    if found is None:
        return spec.variants if spec.shipped is None else spec.shipped
    named = {tuple(rule.variant.items()) for rule in found.rules}
    fixed = list(found.rules[0].variant)
    return tuple(
        variant
        for variant in spec.variants
        if tuple((name, variant[name]) for name in fixed) in named
    )


@functools.cache
def _content(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except tomllib.TOMLDecodeError as error:
        raise _wrong(f"{path}: not valid TOML: {error}") from None


def _wrong(problem: str) -> ManifestError:
    return ManifestError(problem, remedy="write it with `sonata-aot tune gemv --out FILE`")
