"""Runs a kernel's PTX with numpy: all threads of some blocks at once, with real values, no GPU.

    machine = Machine(ptx)
    memory = Memory()
    x = memory.buffer(values, "x")
    out = memory.buffer(result, "out", writable=True)
    machine.run(memory, grid=(4, 1, 1), block=(128, 1, 1), shared_bytes=512, arguments=[x, out, 5])

What a GPU would pass over in silence is a `Fault` that names instruction, block and thread: a
register or a byte of shared memory that nobody wrote, an access outside of the buffers or not
aligned, a race in shared memory, a barrier that never fills.

Threads that are at one instruction execute it together. Of several groups the one that is furthest
behind runs, so that groups meet again after a branch.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ptx_blocks import Batch, Code, Fault, Shape, Trace
from ptx_memory import WARP, Buffer, Memory
from ptx_parse import Program, UnknownPtx

__all__ = ["Buffer", "Fault", "Machine", "Memory", "Outcome", "UnknownPtx"]


@dataclass
class Outcome:
    """What a run was like."""

    steps: int = 0
    """Instructions executed, each counted once for all threads that did so together."""


class Machine:
    """A kernel, parsed once; may be run often."""

    def __init__(self, ptx: str, entry: str | None = None) -> None:
        """Parse; an instruction that is not known is an UnknownPtx."""
        self.program = Program(ptx, entry)
        self._code = Code(self.program)

    def run(
        self,
        memory: Memory,
        *,
        grid: Shape,
        block: Shape,
        arguments: Sequence[Buffer | int | float | bytes],
        shared_bytes: int = 0,
        races: bool = True,
        strict: bool = True,
        limit: int = 5_000_000,
        lanes: int = 1 << 14,
        trace: Trace | None = None,
    ) -> Outcome:
        """Run all blocks, about `lanes` threads at once.

        `races`: look for them in shared memory; `strict`: reading what nobody wrote there is a
        fault; `limit`: most instructions for each batch of blocks; `trace`: called before each
        instruction that is no jump and no barrier.
        """
        grid, block = ((*shape, 1, 1)[:3] for shape in (grid, block))
        if tuple(block) != (self.program.block or tuple(block)):
            raise ValueError(f"a block of {block}, not {self.program.block} as the kernel says")
        threads = block[0] * block[1] * block[2]
        parameters = self._parameters(arguments)
        outcome = Outcome()
        warps = -(-threads // WARP)
        each = max(1, lanes // (warps * WARP))
        blocks = grid[0] * grid[1] * grid[2]
        for buffer in memory.buffers:
            buffer.take()
        try:
            with np.errstate(all="ignore"):
                for first in range(0, blocks, each):
                    chosen = np.arange(first, min(first + each, blocks))
                    batch = Batch(self._code, memory, grid, block, chosen, parameters, shared_bytes)
                    batch.prepare(races=races, strict=strict)
                    outcome.steps += batch.run(limit, trace)
        finally:
            for buffer in memory.buffers:
                if buffer.writable:
                    buffer.give_back()
        return outcome

    def _parameters(self, arguments: Sequence[Any]) -> dict[str, bytes]:
        declared = self.program.parameters
        if len(arguments) != len(declared):
            raise ValueError(f"{len(arguments)} arguments for {len(declared)} parameters")
        packed = {}
        for parameter, value in zip(declared, arguments, strict=True):
            if isinstance(value, Buffer):
                value = value.address
            if isinstance(value, float):
                value = struct.pack("<f" if parameter.size == 4 else "<d", value)
            elif not isinstance(value, bytes):
                bits = 8 * parameter.size
                if not -(1 << bits - 1) <= value < 1 << bits:
                    raise ValueError(f"{parameter.name} = {value}")
                value = (int(value) & (1 << bits) - 1).to_bytes(parameter.size, "little")
            if len(value) != parameter.size:
                raise ValueError(f"{parameter.name} has {parameter.size} bytes, not {len(value)}")
            packed[parameter.name] = value
        return packed
