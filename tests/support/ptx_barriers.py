"""Barriers of the blocks that `ptx_machine` runs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ptx_lanes import Array, Read, reader
from ptx_memory import WARP, Clocks, MemoryFault
from ptx_parse import Statement, UnknownPtx


class BarrierCode:
    """What a barrier instruction asks for."""

    def __init__(self, statement: Statement) -> None:
        parts = set(statement.parts[1:]) - {"cta", "aligned"}
        self.warp = "warp" in parts
        self.arrive = "arrive" in parts
        operands = statement.operands
        if parts not in ({"sync"}, {"arrive"}, {"warp", "sync"}) or (
            self.arrive and len(operands) < 2
        ):
            raise UnknownPtx(statement.text)
        self.number: Read = reader(operands[0], "u32")
        """Of the barrier; the mask of a warp's."""
        self.count: Read | None = reader(operands[1], "u32") if operands[1:] else None


@dataclass
class Barrier:
    """A barrier of one block that is not full yet."""

    expected: int | None
    """Threads; None: all that are left of the block."""
    arrived: int = 0
    waiting: list[tuple[int, Array]] = field(default_factory=list)
    """Where warps go on, and which."""
    seen: Any = 0


class Barriers:
    """Those of all blocks, by block and number; warps are rows as in `Clocks`."""

    def __init__(self, clocks: Clocks, left: Callable[[int], int]) -> None:
        """`left`: how many threads of a block have not ended, by whole warps."""
        self.clocks = clocks
        self.left = left
        self.open: dict[tuple[int, int], Barrier] = {}

    def arrive(
        self, rows: Array, numbers: Array, counts: Array | None, pc: int | None
    ) -> list[tuple[int, Array]]:
        """Warps arrive, and those that wait will go on from `pc`.

        Gives which warps go on now, and where.
        """
        blocks = self.clocks.blocks
        if counts is None and pc is not None and not self.open and self._all_at_one(rows, numbers):
            seen = self.clocks.seen.reshape(self.clocks.warps, blocks, self.clocks.warps)
            seen[:] = seen.max(axis=0)
            self.clocks.release(rows)
            return [(pc, rows)]
        keys = np.stack([rows % blocks, numbers], axis=1)
        free: list[tuple[int, Array]] = []
        for block, number in np.unique(keys, axis=0).tolist():
            here = (keys == (block, number)).all(axis=1)
            expected = None
            if counts is not None:
                expected = int(counts[here][0])
            try:
                if (counts is not None and (counts[here] != expected).any()) or (
                    expected is not None and (expected % WARP or not expected)
                ):
                    raise MemoryFault(f"barrier {number} for {expected} threads, or others")
                free += self._arrive(block, number, expected, rows[here], pc)
            except MemoryFault as fault:
                raise MemoryFault(str(fault), int(np.argmax(here))) from None
        return free

    def _all_at_one(self, rows: Array, numbers: Array) -> bool:
        """Whether all threads of all blocks are at one barrier, the plain case."""
        return len(rows) == len(self.clocks.seen) and bool((numbers == numbers[0]).all())

    def _arrive(
        self, block: int, number: int, expected: int | None, rows: Array, pc: int | None
    ) -> list[tuple[int, Array]]:
        barrier = self.open.setdefault((block, number), Barrier(expected))
        if barrier.expected != expected:
            raise MemoryFault(
                f"barrier {number} is for {expected} threads (None: all), and for "
                f"{barrier.expected} to those that are there"
            )
        barrier.arrived += WARP * len(rows)
        barrier.seen = np.maximum(barrier.seen, self.clocks.seen[rows].max(axis=0))
        self.clocks.release(rows)
        if pc is not None:
            barrier.waiting.append((pc, rows))
        full = self.left(block) if expected is None else expected
        if barrier.arrived > full:
            raise MemoryFault(f"{barrier.arrived} threads arrive at barrier {number} for {full}")
        return self._release(block, number) if barrier.arrived == full else []

    def threads_ended(self) -> list[tuple[int, Array]]:
        """Which warps go on, as they waited only for threads that have ended."""
        full = [
            key
            for key, barrier in self.open.items()
            if barrier.expected is None and barrier.arrived >= self.left(key[0])
        ]
        return [item for key in full for item in self._release(*key)]

    def _release(self, block: int, number: int) -> list[tuple[int, Array]]:
        barrier = self.open.pop((block, number))
        for _, rows in barrier.waiting:
            self.clocks.seen[rows] = np.maximum(self.clocks.seen[rows], barrier.seen)
        return barrier.waiting

    def deadlock(self, statements: list[Statement], blocks: Array) -> list[str]:
        """Who waits where, for ever; `blocks` are their numbers in the grid."""
        lines = []
        for (block, number), barrier in sorted(self.open.items()):
            full = self.left(block) if barrier.expected is None else barrier.expected
            waiting = [
                f"warps {(rows // self.clocks.blocks).tolist()} in `{statements[pc - 1].text}` "
                f"(instruction {pc - 1})"
                for pc, rows in barrier.waiting
            ]
            if waiting:
                lines.append(
                    f"block {int(blocks[block])}, barrier {number}: {barrier.arrived} of {full} "
                    f"threads arrived; waiting: {', '.join(waiting)}"
                )
        return lines
