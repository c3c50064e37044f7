"""The lanes that execute an instruction of `ptx_machine`, and how operands are read and written.

Lanes are numbered by warp of the block, then block, then lane of the warp, so that those of some
warps of all blocks lie side by side.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from ptx_memory import SHARED_BASE, WARP, Memory, MemoryFault, Pending, SharedMemory
from ptx_numbers import from_bf16, to_bf16
from ptx_parse import (
    BITS,
    SINK,
    VIEWS,
    Constant,
    Not,
    Register,
    Special,
    Symbol,
    UnknownPtx,
    literal,
)

Array = Any
Step = Callable[["Run"], None]
Read = Callable[["Run"], Array]
Write = Callable[["Run", Array], None]


class Active:
    """Some lanes in rising order, as a slice where they lie side by side."""

    __slots__ = ("_lanes", "_rows", "at", "size")

    def __init__(self, lanes: Array) -> None:
        self.size = len(lanes)
        self._lanes = lanes
        self._rows: Any = None
        first, last = int(lanes[0]), int(lanes[-1])
        self.at: Any = slice(first, last + 1) if last - first == self.size - 1 else lanes

    @property
    def lanes(self) -> Array:
        return self._lanes

    @property
    def rows(self) -> Array:
        """Warps, if they are all here in full; else None."""
        if self._rows is None:
            self._rows = False
            if self.size % WARP == 0:
                table = self._lanes.reshape(-1, WARP)
                if ((table[:, 0] % WARP == 0) & (table[:, -1] - table[:, 0] == WARP - 1)).all():
                    self._rows = table[:, 0] // WARP
        return None if self._rows is False else self._rows


class Run:
    """Blocks of a grid under way."""

    def __init__(
        self,
        memory: Memory,
        shared: SharedMemory,
        special: dict[str, Array],
        symbols: dict[str, int],
        parameters: dict[str, bytes],
        exists: Array,
        threads: Array,
    ) -> None:
        self.memory = memory
        self.shared = shared
        self.special = special
        self.symbols = symbols
        self.parameters = parameters
        self.exists = exists
        self.threads = threads
        """Number of each lane's thread in the grid."""
        self.total = int(exists.sum())
        self.pc = 0
        self.pending: list[Pending] = []
        self.commits = np.zeros(len(exists), np.int64)
        self.active: Active
        self.at: Any = None
        self.everything = False

    def enter(self, active: Active) -> None:
        """Let these lanes execute what follows."""
        self.active = active
        self.at = active.at
        self.everything = active.size == self.total

    def check(self, register: Register) -> None:
        """Complain about a register that was not written."""
        known = register.written[self.at]
        if not known.all():
            lane = int(np.flatnonzero(~known)[0])
            raise MemoryFault(f"{register.name} is read and was not written", lane)


_INDEX = {"b": 0, "u": 0, "s": 1, "f": 2, "p": 0}
_PACKED = ("f16x2", "bf16x2")


def dtype_of(type_: str) -> Any:
    """The numpy type that a PTX type is computed with; float32 for bfloat16."""
    if type_ in ("bf16", "bf16x2"):
        return np.float32
    if type_ == "f16x2":
        return np.float16
    return VIEWS[BITS[type_]][_INDEX[type_[0]]]


def holds(guard: Any) -> Read:
    """Where a predicate holds."""
    if isinstance(guard, Constant):
        constant = np.bool_(guard.value != 0)
        return lambda run: constant
    if isinstance(guard, Not):
        inner = holds(guard.register)
        return lambda run: ~inner(run)
    if not isinstance(guard, Register) or guard.bits != 1:
        raise UnknownPtx(f"{guard} is no predicate")

    def read(run: Run) -> Array:
        if not guard.complete:
            run.check(guard)
        return guard.views[0][run.at]

    return read


def reader(operand: Any, type_: str) -> Read:
    """How to read an operand as a type; an array over the active lanes, or one number."""
    if type_ == "pred":
        return holds(operand)
    if type_ in ("bf16", *_PACKED):
        return _short_reader(operand, type_)
    dtype, bits = dtype_of(type_), BITS[type_]
    if isinstance(operand, Constant):
        number = literal(operand, dtype)
        return lambda run: number
    if isinstance(operand, Special):
        return lambda run: _special(run, operand.name, dtype)
    if isinstance(operand, Symbol):
        return lambda run: dtype(run.symbols[operand.name] + operand.offset)
    if not isinstance(operand, Register) or operand.bits < bits:
        raise UnknownPtx(f"operand {operand} as {type_}")
    if operand.bits > bits:
        # Loads, stores and conversions may have wider registers.
        raw = VIEWS[bits][0]

        def narrow(run: Run) -> Array:
            if not operand.complete:
                run.check(operand)
            return operand.views[0][run.at].astype(raw).view(dtype)

        return narrow
    index = _INDEX[type_[0]]

    def read(run: Run) -> Array:
        if not operand.complete:
            run.check(operand)
        return operand.views[index][run.at]

    return read


def _special(run: Run, name: str, dtype: Any) -> Array:
    value = run.special[name]
    found = value[run.at] if np.ndim(value) else value
    return np.asarray(found).astype(dtype)


def _short_reader(operand: Any, type_: str) -> Read:
    if type_ == "bf16":
        bits = reader(operand, "b16")
        return lambda run: from_bf16(bits(run))
    words = reader(operand, "b32")
    if type_ == "f16x2":
        return lambda run: np.atleast_1d(words(run)).view(np.float16).reshape(-1, 2)
    return lambda run: from_bf16(np.atleast_1d(words(run)).view(np.uint16).reshape(-1, 2))


def writer(operand: Any, type_: str) -> Write:
    """How to write values of `dtype_of(type_)`; bfloat16 is rounded to."""
    if operand == SINK:
        return lambda run, values: None
    if not isinstance(operand, Register):
        raise UnknownPtx(f"destination {operand}")
    if type_ == "bf16":
        bits = writer(operand, "b16")
        return lambda run, values: bits(run, to_bf16(values))
    if type_ in _PACKED:
        words = writer(operand, "b32")
        convert = to_bf16 if type_ == "bf16x2" else np.float16
        return lambda run, values: words(
            run, np.ascontiguousarray(convert(values)).view(np.uint32).reshape(-1)
        )
    size = 1 if type_ == "pred" else BITS[type_]
    if operand.bits < size:
        raise UnknownPtx(f"destination {operand.name} for {type_}")
    # In a wider register, with the sign of a signed number.
    index = _INDEX[type_[0]] if operand.bits == size else int(type_[0] == "s")

    def write(run: Run, values: Array) -> None:
        operand.views[index][run.at] = values
        if not operand.complete:
            if run.everything:
                operand.complete = True
            else:
                operand.written[run.at] = True

    return write


def spread(values: Array, size: int) -> Array:
    """One value for each lane."""
    if isinstance(values, np.ndarray) and values.shape == (size,):
        return values
    return np.broadcast_to(values, size)


def shared_address(offset: int) -> int:
    return SHARED_BASE + offset
