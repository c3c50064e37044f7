"""Runs a compiled kernel in `ptx_machine`, as its declaration says that it is launched."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from ptx_machine import Buffer, Machine, Memory, Outcome
from sonata_aot.artifacts import ArtifactSet
from sonata_aot.artifacts.declaration import Variant

# Arch, kernel, variant.
Case = tuple[str, str, Variant]


class Kernel:
    """A variant's PTX, changed by `edit` and parsed; may be run often."""

    def __init__(
        self, artifacts: ArtifactSet, case: Case, edit: Callable[[str], str] = str
    ) -> None:
        (self.binary,) = (
            b for b in artifacts.manifest.binaries if (b.arch, b.kernel, b.variant) == case
        )
        declaration = artifacts.manifest.declaration(self.binary.kernel)
        assert declaration is not None
        self.declaration = declaration
        self.machine = Machine(edit(artifacts.read(self.binary.ptx).decode()), self.binary.entry)

    def choice(self, name: str) -> int:
        """An integer choice, or 0 where the kernel has none of that name."""
        return int(self.binary.variant.get(name, 0))

    def run(
        self, memory: Memory, arguments: Mapping[str, Buffer | int | float], **options: Any
    ) -> Outcome:
        """Run all blocks of the grid that the declaration has for these arguments, by name."""
        declaration, variant = self.declaration, self.binary.variant
        names = [parameter.name for parameter in declaration.parameters]
        if set(arguments) != set(names):
            raise ValueError(f"arguments {sorted(arguments)} for parameters {names}")
        integers = {name: arguments[name] for _, name in declaration.integers}
        sizes = {name: value for name, value in integers.items() if isinstance(value, int)}
        return self.machine.run(
            memory,
            grid=declaration.grid_shape(variant, sizes),
            block=declaration.block_shape(variant),
            shared_bytes=declaration.shared_memory(variant),
            arguments=[arguments[name] for name in names],
            **options,
        )
