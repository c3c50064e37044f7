"""Which binary a GEMV runs, and with what grid: rules and launch values become arguments."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from ..artifacts.declaration import Declaration, Variant
from ..artifacts.errors import ArgumentError, ManifestError, VariantMissing
from ..artifacts.record import record
from .library import Loaded, Table
from .ssd_launches import Address, Launches, Value
from .tensors import LINEAR

if TYPE_CHECKING:
    from ._native import Sequence

# Rows of x that the binaries take at most.
BATCHES = (1, 2, 4, 8)
MOST_ROWS = BATCHES[-1]
WARP = 32
# Bytes of what is read next that a launch asks of the L2: as many as memory delivers in the
# microsecond or so between two dependent kernels. Found by measuring a chain of 68 (docs/gemv.md).
UPCOMING_BYTES = 15 * 2**19
# A launch that reads more than this itself asks for nothing: there it costs more than it gains.
MOST_BEFORE_UPCOMING = 24 * 2**20
# Most of them that one thread asks for: `PIECE` in kernels/gemv/device.py.
_PIECE = 4096

_OPERANDS = tuple((name, "pointer") for name in ("x", "weight", "bias", "out"))
_SIZES = tuple((name, "i32") for name in ("n", "k", "x_rows"))
_STRIDES = tuple((name, "i64") for name in ("x_stride", "weight_stride", "out_stride"))
# What a launch passes, in order; the artifacts must have been built for it.
_PARAMETERS = {
    "gemv": (
        *_OPERANDS,
        *_SIZES,
        ("block_rows", "i32"),
        ("constant", "i32"),
        *_STRIDES,
        *((name, "i32") for name in ("ahead_skip", "ahead_rows", "ahead_blocks")),
        ("upcoming", "pointer"),
        ("upcoming_bytes", "i32"),
    ),
    "gemv_any": (*_OPERANDS, *_SIZES, *_STRIDES),
}
_SELECTORS = {
    "gemv": ("dtype", "m", "side", "rows", "warps", "unroll", "persistent", "pdl"),
    "gemv_any": ("dtype", "m", "wide"),
}
# Plans that are kept: some for each weight and number of rows, unless sizes keep changing.
_MOST_PLANS = 4096
_LAUNCH = ("blocks_per_sm", "ahead_kb", "skip_blocks_per_sm")


def require_known(declaration: Declaration) -> None:
    """Require the parameters and choices that this loader knows.

    Raises:
        ManifestError: the artifacts' kernel is another.
    """
    name = declaration.name
    found = tuple((p.name, p.kind) for p in declaration.parameters), declaration.selectors
    if found != (_PARAMETERS[name], _SELECTORS[name]):
        raise ManifestError(
            f"the artifacts' {name} has other parameters than this loader passes",
            remedy="rebuild the artifacts with this version of sonata-aot",
        )


@record
class Plan:
    """A binary and what of its launch does not depend on the tensors.

    `between` are the arguments between x_rows and the strides, `after` those after the strides up
    to `upcoming`; `upcoming_bytes` are those of a block.
    """

    loaded: Loaded
    grid: tuple[int, int, int]
    between: tuple[int, ...] = ()
    after: tuple[int, ...] = ()
    constant: bool = False
    upcoming_bytes: int = 0

    def launch(
        self,
        stream: int,
        addresses: tuple[int, int, int, int],
        sizes: tuple[int, int, int],
        strides: tuple[int, int, int],
        upcoming: tuple[int, int] = (0, 0),
    ) -> None:
        """Enqueue it; `upcoming` is an address and how many bytes there may be asked for."""
        arguments = self.arguments(addresses, sizes, strides, upcoming)
        self.loaded.enqueue(stream, self.grid, arguments, programmatic=self.constant)

    def arguments(
        self,
        addresses: tuple[int, int, int, int],
        sizes: tuple[int, int, int],
        strides: tuple[int, int, int],
        upcoming: tuple[int, int] = (0, 0),
    ) -> tuple[int, ...]:
        """A value for each parameter of the kernel, in order."""
        if not self.after:
            return (*addresses, *sizes, *strides)
        ahead = upcoming[0], self._share(upcoming[1])
        return (*addresses, *sizes, *self.between, *strides, *self.after, *ahead)

    def sequence(
        self,
        sizes: tuple[int, int, int],
        strides: tuple[int, int, int],
        upcoming: tuple[int, int] | None = None,
    ) -> Sequence:
        """The launch for tensors of one layout, complete but for the addresses of the operands.

        `upcoming` says how many bytes after the start of the fifth operand its first whole vector
        is, and how many bytes there may be asked for.
        """
        ahead: tuple[Value, ...] = (0, 0) if self.after else ()
        if self.after and upcoming is not None:
            ahead = Address(len(_OPERANDS), upcoming[0]), self._share(upcoming[1])
        values: tuple[Value, ...] = (
            *(Address(operand) for operand in range(len(_OPERANDS))),
            *(*sizes, *self.between, *strides, *self.after, *ahead),
        )
        names = [name for name, _ in _PARAMETERS[self.loaded.declaration.name]]
        launches = Launches()
        launches.add(self.loaded, dict(zip(names, values, strict=True)), early=self.constant)
        return launches.sequence(len(_OPERANDS) + (upcoming is not None))

    def _share(self, most: int) -> int:
        """Bytes that a block asks for, of so many that there are."""
        return min(self.upcoming_bytes, most // self.grid[0] // 16 * 16)

    @functools.cached_property
    def in_order(self) -> Plan:
        """The same without anything that may start before what precedes it has ended."""
        if not self.constant:
            return self
        between = (self.between[0], 0)
        return replace(self, between=between, after=(0, 0, 0), constant=False, upcoming_bytes=0)


class Planner:
    """Finds plans for one kind of call, and keeps them."""

    def __init__(
        self, fast: Table | None, general: Table | None, multiprocessors: Mapping[int, int]
    ) -> None:
        """`multiprocessors` by device.

        Raises:
            ManifestError: the artifacts' kernels are not those that this loader knows.
        """
        for table in (fast, general):
            if table is not None:
                require_known(table.declaration)
        self._fast = fast
        self._general = general
        self._multiprocessors = multiprocessors
        self._plans: dict[tuple[object, ...], Plan] = {}

    @property
    def devices(self) -> tuple[int, ...]:
        """Devices that kernels were loaded on."""
        return tuple(self._multiprocessors)

    def find(
        self, device: int, dtype: str, rows: int, n: int, k: int, layout: str, constant: bool
    ) -> Plan:
        """The plan of a call whose binary takes at least `rows` rows of x.

        `layout` is `aligned`, `wide` (only x is not aligned) or `any`.

        Raises:
            VariantMissing: no binary for it.
        """
        key = (device, dtype, rows, n, k, layout, constant)
        plan = self._plans.get(key)
        if plan is None:
            if len(self._plans) >= _MOST_PLANS:
                self._plans.clear()
            plan = self._plans[key] = self._find(*key)
        return plan

    def _find(
        self, device: int, dtype: str, rows: int, n: int, k: int, layout: str, constant: bool
    ) -> Plan:
        m = next(m for m in BATCHES if m >= rows)
        if layout == "aligned":
            found = None
            if self._fast is not None:
                for declared in (1, 0) if constant else (0,):
                    when, sizes = {"m": m, "constant": declared}, {"n": n, "k": k}
                    found = self._fast.select(device, when, sizes, dtype=dtype)
                    if found is not None:
                        return self.plan(*found, device, n, k, bool(declared))
        elif self._general is not None:
            loaded = self._general.get(device, dtype, m, int(layout == "wide"))
            if loaded is not None:
                return Plan(loaded, loaded.grid({"n": n, "k": k}))
        raise VariantMissing(
            f"gemv: no binary for {dtype}, {rows} rows of x, and {layout} rows of memory",
            remedy=f"build the kernels gemv and gemv_any, or {LINEAR}",
        )

    def exact(
        self,
        device: int,
        variant: Variant,
        launch: Mapping[str, int],
        n: int,
        k: int,
        constant: bool,
    ) -> Plan:
        """The plan of one very variant of `gemv`.

        Raises:
            VariantMissing: it was not built.
        """
        selectors = [variant.get(name, "") for name in _SELECTORS["gemv"]]
        loaded = None if self._fast is None else self._fast.get(device, *selectors)
        if loaded is None:
            raise VariantMissing(
                f"gemv: no binary of variant {dict(variant)}", remedy="build it with --all"
            )
        return self.plan(loaded, launch, device, n, k, constant)

    def plan(
        self,
        loaded: Loaded,
        launch: Mapping[str, int],
        device: int,
        n: int,
        k: int,
        constant: bool,
    ) -> Plan:
        """What rules call `launch`, for one size: see docs/gemv.md.

        Raises:
            ArgumentError: unknown launch values.
        """
        if tuple(launch) != _LAUNCH:
            raise ArgumentError(
                f"gemv: launch values {list(launch)}", remedy=f"give {', '.join(_LAUNCH)}"
            )
        variant = loaded.binary.variant
        rows, threads = int(variant["rows"]), WARP * int(variant["warps"])
        processors = self._multiprocessors[device]
        persistent = bool(variant["persistent"] and launch["blocks_per_sm"])
        block_rows = -(-n // (processors * launch["blocks_per_sm"])) if persistent else rows
        grid = loaded.grid({"n": n, "block_rows": block_rows})
        ahead = (0, 0, 0)
        asked = min(n, launch["ahead_kb"] * 1024 // (2 * k)) if constant else 0
        if asked and persistent:
            ahead = (0, min(block_rows, threads, -(-asked // grid[0])), grid[0])
        elif asked:
            skip = launch["skip_blocks_per_sm"] * processors * rows
            ahead = (skip, min(rows, threads), min(grid[0], -(-asked // rows)))
        upcoming = 0
        if constant and not persistent and 2 * n * k <= MOST_BEFORE_UPCOMING:
            upcoming = min(UPCOMING_BYTES // grid[0] // 16 * 16, threads * _PIECE)
        return Plan(loaded, grid, (block_rows, int(constant)), ahead, constant, upcoming)
