"""Parameter blocks by the declarations of kernels, with places for addresses to come."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, NamedTuple

from ..artifacts.declaration import Declaration
from ..artifacts.errors import ArgumentError, ManifestError
from .library import Loaded

if TYPE_CHECKING:
    from ._native import Sequence

# Regions of a workspace start so aligned.
_ALIGNMENT = 256


class Address(NamedTuple):
    """The address that operand number `operand` of a call has, plus `added`."""

    operand: int
    added: int = 0


Value = int | float | Address
# A launch as `_native.Sequence` takes it, but for the kernel.
Patches = tuple[tuple[int, int, int], ...]


def pack(declaration: Declaration, values: Mapping[str, Value]) -> tuple[bytes, Patches]:
    """The parameter block of a launch, 0 where an address is to come, and where which one goes.

    Raises:
        ManifestError: the kernel's parameters are not those of `values`.
        ArgumentError: a value does not fit its parameter.
    """
    names = [parameter.name for parameter in declaration.parameters]
    if set(names) != set(values):
        raise ManifestError(
            f"the artifacts' {declaration.name} has other parameters than this loader passes: "
            f"{sorted(set(names) ^ set(values))}",
            remedy="rebuild the artifacts with this version of sonata-aot",
        )
    constants, patches = [], []
    for (offset, _), name in zip(declaration.offsets, names, strict=True):
        value = values[name]
        if isinstance(value, Address):
            patches.append((offset, value.operand, value.added))
            value = 0
        constants.append(value)
    try:
        return declaration.pack(*constants), tuple(patches)
    except Exception as error:  # struct.error is made anew for each struct module
        raise ArgumentError(
            f"{declaration.name}: {dict(values)} do not fit the parameters: {error}",
            remedy="pass sizes and strides within the kernel's integer types",
        ) from None


class Workspace:
    """Regions of one allocation, which is the operand `operand` of a call."""

    def __init__(self, operand: int) -> None:
        """Without regions."""
        self.operand = operand
        self.size = 0

    def take(self, size: int) -> Address:
        """A region of so many bytes."""
        start = self.size
        self.size += size + -size % _ALIGNMENT
        return Address(self.operand, start)


class Launches:
    """Launches in order, each by the values of its parameters."""

    def __init__(self) -> None:
        """None."""
        self.items: list[tuple[Loaded, dict[str, Value], bool]] = []

    def add(self, loaded: Loaded, values: dict[str, Value], *, early: bool = False) -> None:
        """Enter the next one; `early` of the first is as `programmatic` of `Loaded.launch`."""
        self.items.append((loaded, values, early))

    def sequence(self, operands: int) -> Sequence:
        """What issues all of them by one call.

        Each but the first may begin while the one before it runs, where its declaration allows it;
        the first, where it is `early`, before what precedes all on the stream has ended.

        Raises:
            ManifestError, ArgumentError: as for `pack`; or a grid is too large.
            DriverError: the driver refused the code of a kernel.
        """
        from . import _native

        prepared = []
        for loaded, values, early in self.items:
            params, patches = pack(loaded.declaration, values)
            sizes = {name: value for name, value in values.items() if isinstance(value, int)}
            binary = loaded.binary
            early = early or bool(prepared)
            programmatic = early and loaded.declaration.is_programmatic(binary.variant)
            prepared.append(
                (loaded.kernel(), loaded.grid(sizes), binary.block, params, patches, programmatic)
            )
        return _native.Sequence(prepared, operands)


def strides(name: str, dimensions: tuple[str, ...], steps: tuple[int, ...]) -> dict[str, Value]:
    """Parameters by name; 0 where the tensor lacks the dimension."""
    padded = (*steps, *(0 for _ in dimensions))
    return {f"{name}_{which}": step for which, step in zip(dimensions, padded, strict=False)}


def dense_steps(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Strides of a contiguous tensor."""
    steps = [1]
    for size in reversed(shape[1:]):
        steps.append(steps[-1] * size)
    return tuple(reversed(steps))
