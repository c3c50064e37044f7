"""How a kernel is declared for ahead-of-time compilation."""

from __future__ import annotations

import functools
from dataclasses import dataclass

from ..artifacts.arch import Arch
from ..artifacts.declaration import Budget, Declaration, Parameter, Variant, product
from ..artifacts.errors import ManifestError
from ..artifacts.expression import Expression

__all__ = ["Budget", "Declaration", "KernelSpec", "Parameter", "Variant", "product"]


@dataclass(frozen=True)
class KernelSpec:
    """A declaration, its variants, and where the device code is.

    Without `default` the kernel is built only where it is asked for, by name or with `--all`. Of a
    kernel without a table `shipped` are the variants that a build makes without `--all`; None: all.

    `resident` is how many blocks a multiprocessor should hold at least, which limits registers: an
    expression over integer choices, in which 0 leaves it to the compiler. `max_sm` is the greatest
    architecture, as a number, that a variant is built for, such an expression too.

    `device` is `package.module:function`, a module-level `@cute.kernel` whose positional parameters
    are the declaration's, in order (`cute.Pointer`, `Int32`, `Int64`, `Float32`), and whose
    `Constexpr` parameters are its choices, by name. Only compile workers import that module.
    """

    declaration: Declaration
    variants: tuple[Variant, ...]
    device: str
    default: bool = True
    resident: str = "0"
    shipped: tuple[Variant, ...] | None = None
    max_sm: str = "9999"

    def __post_init__(self) -> None:
        """Check every variant against the declaration.

        Raises:
            ManifestError: naming the kernel and what is wrong.
        """
        for variant in self.variants:
            self.declaration.check_variant(variant)
            self.declaration.block_shape(variant)
            self.declaration.shared_memory(variant)
            self.declaration.least_sm(variant)
            self.declaration.is_programmatic(variant)
            self.declaration.budget.floors_of(variant)
            self.resident_blocks(variant)
            _value(self.max_sm, variant)
        for variant in self.shipped or ():
            if variant not in self.variants:
                raise ManifestError(
                    f"kernel {self.name!r} ships {variant}, which is none of its variants",
                    remedy="declare it, or leave it out",
                )

    def resident_blocks(self, variant: Variant) -> int:
        """What `resident` says for a variant."""
        return _value(self.resident, variant)

    def is_for(self, variant: Variant, arch: Arch) -> bool:
        """Whether a variant is built for an architecture."""
        return self.reason_against(variant, arch) is None

    def reason_against(self, variant: Variant, arch: Arch) -> str | None:
        """Why a variant is not built for an architecture, by its declaration; None if it is."""
        least, most = self.declaration.least_sm(variant), _value(self.max_sm, variant)
        if arch.number < least:
            return f"for sm{least} and later"
        if arch.number > most:
            return f"for no later than sm{most}"
        needed, there = self.declaration.shared_memory(variant), arch.dynamic_shared_bytes
        if needed > there:
            return f"{needed} bytes of shared memory, of {there} that a block has"
        return None

    @property
    def name(self) -> str:
        """The kernel's name."""
        return self.declaration.name

    @property
    def module(self) -> str:
        """The module of the device code."""
        return self.device.partition(":")[0]


def _value(text: str, variant: Variant) -> int:
    values = {name: value for name, value in variant.items() if isinstance(value, int)}
    return _parsed(text).evaluate(values)


_parsed = functools.cache(Expression)
