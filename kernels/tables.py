"""Tables of rules: which variant a call gets, as `sonata-aot tune` measured it.

`tuning/<arch>.toml` holds, for each kernel that has variants to choose from, how the table came
about and its rules in the order in which they are tried. An architecture without a table of its own
uses that of the next lower one.
"""

from __future__ import annotations

import functools
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..artifacts.arch import Arch
from ..artifacts.declaration import Declaration, Variant
from ..artifacts.errors import ManifestError
from ..artifacts.rules import Rule
from .spec import KernelSpec

FOLDER = Path(__file__).with_name("tuning")
_KEYS = {"when", "n", "k", "variant", "launch"}


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
    return None if content is None else read(content, spec.declaration, arch, str(path))


def read(content: Mapping[str, Any], declaration: Declaration, arch: Arch, where: str) -> Table:
    """A kernel's table out of a file's parsed content.

    Raises:
        ManifestError: a key is missing or unknown, or a variant names no choice of the kernel.
    """
    rules = []
    for index, item in enumerate(content.get("rules", [])):
        if set(item) != _KEYS:
            raise _wrong(f"{where}: {declaration.name}.rules[{index}]", f"keys {sorted(item)}")
        fixed = {**item["variant"], **item["when"]}
        unknown = [name for name in item["variant"] if name not in declaration.choices]
        if unknown:
            raise _wrong(f"{where}: {declaration.name}.rules[{index}]", f"no choice {unknown[0]!r}")
        variant = {name: fixed[name] for name in declaration.choices if name in fixed}
        sizes = {name: (item[name][0], item[name][1]) for name in ("n", "k")}
        rules.append(
            Rule(declaration.name, arch.name, item["when"], sizes, variant, item["launch"])
        )
    return Table(content["origin"], tuple(rules))


def rules(spec: KernelSpec, arch: Arch) -> tuple[Rule, ...]:
    """The rules that a build writes into the manifest; none for a kernel without a table."""
    found = table(spec, arch)
    return () if found is None else found.rules


def default_variants(spec: KernelSpec, arch: Arch) -> tuple[Variant, ...]:
    """What is built without asking: all that some rule names, or everything without a table."""
    found = table(spec, arch)
    if found is None:
        return spec.variants
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
        raise _wrong(str(path), f"not valid TOML: {error}") from None


def _wrong(where: str, problem: str) -> ManifestError:
    return ManifestError(
        f"{where}: {problem}", remedy="write it with `sonata-aot tune gemv --out FILE`"
    )
