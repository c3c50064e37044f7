"""What differs between two artifact directories."""

from __future__ import annotations

from dataclasses import dataclass

from ..artifacts.manifest import Binary, Manifest

# What is compared of a binary, in the order in which it is shown.
FIGURES = ("registers", "spills", "stack_bytes", "shared_bytes", "cubin_bytes", "ptx_bytes")


@dataclass(frozen=True)
class Changed:
    """A binary that both have, with other bytes or figures: before and after by name."""

    before: Binary
    after: Binary
    figures: dict[str, tuple[int, int]]


@dataclass(frozen=True)
class Difference:
    """What the second has and the first has not, the other way round, and what differs in both.

    `declarations`, `compiler` and `rules` name what else differs.
    """

    added: tuple[Binary, ...]
    removed: tuple[Binary, ...]
    changed: tuple[Changed, ...]
    declarations: tuple[str, ...]
    compiler: dict[str, tuple[str | None, str | None]]
    rules: tuple[str, ...]

    @property
    def is_empty(self) -> bool:
        """Whether nothing differs that is looked at."""
        return self == Difference((), (), (), (), {}, ())


def figures(binary: Binary) -> dict[str, int]:
    """What FIGURES has, of one binary; shared memory is dynamic and static together."""
    return {
        "registers": binary.registers,
        "spills": binary.spills,
        "stack_bytes": binary.stack_bytes,
        "shared_bytes": binary.shared_bytes + binary.static_shared_bytes,
        "cubin_bytes": binary.cubin.size,
        "ptx_bytes": binary.ptx.size,
    }


def compare(before: Manifest, after: Manifest) -> Difference:
    """What differs; binaries are the same by kernel, variant and architecture."""
    old = {binary.label: binary for binary in before.binaries}
    new = {binary.label: binary for binary in after.binaries}
    changed = []
    for label, binary in new.items():
        other = old.get(label)
        if other is None:
            continue
        one, two = figures(other), figures(binary)
        # Dynamic shared memory stands in the record alone.
        if one == two and _bytes(other) == _bytes(binary):
            continue
        differing = {name: (one[name], two[name]) for name in FIGURES if one[name] != two[name]}
        changed.append(Changed(other, binary, differing))
    kernels = sorted({*before.selection.kernels, *after.selection.kernels})
    packages = sorted({*before.compiler, *after.compiler})
    versions = {name: (before.compiler.get(name), after.compiler.get(name)) for name in packages}
    return Difference(
        added=tuple(binary for label, binary in new.items() if label not in old),
        removed=tuple(binary for label, binary in old.items() if label not in new),
        changed=tuple(changed),
        declarations=tuple(
            name
            for name in kernels
            if before.declaration(name) and after.declaration(name)
            if before.declaration(name) != after.declaration(name)
        ),
        compiler={name: pair for name, pair in versions.items() if pair[0] != pair[1]},
        rules=tuple(name for name in kernels if _rules(before, name) != _rules(after, name)),
    )


def _bytes(binary: Binary) -> tuple[str, str]:
    return binary.cubin.sha256, binary.ptx.sha256


def _rules(manifest: Manifest, kernel: str) -> list[object]:
    return [rule for rule in manifest.rules if rule.kernel == kernel]
