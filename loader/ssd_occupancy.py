"""When the sequence of a scan is cut into segments, and into how many."""

from __future__ import annotations

from dataclasses import dataclass

from ..artifacts.manifest import Binary

# Blocks for each multiprocessor from which on a sequence is not cut.
FULL = 0.75
# Fewest tiles of a segment.
LEAST_TILES = 4
# What the pass that makes the states of segments costs, as a share of the scan itself.
STATES_COST = 0.45
# What two more launches cost, in tiles of one block.
LAUNCHES_COST = 4.0
# What blocks that share a multiprocessor take, over what they would one after another.
SHARING = 0.9
_REGISTERS = 65536
# Shared memory that the driver keeps of each block's.
_RESERVED = 1024


@dataclass(frozen=True)
class Gpu:
    """What decides how many blocks run at once; `shared_bytes` is the most that a block gets."""

    multiprocessors: int
    shared_bytes: int

    def resident(self, binary: Binary) -> int:
        """Blocks that a multiprocessor holds, as far as shared memory and registers let it."""
        shared = binary.shared_bytes + binary.static_shared_bytes + _RESERVED
        threads = binary.block[0] * binary.block[1] * binary.block[2]
        registers = threads * (binary.registers + -binary.registers % 8)
        return max(1, min((self.shared_bytes + _RESERVED) // shared, _REGISTERS // registers))


def cost(blocks: int, tiles: int, multiprocessors: int, resident: int, segments: int = 1) -> float:
    """Model of the time of a scan, in tiles that a block goes through alone.

    A multiprocessor is busy with one block; a second one beside it makes both slower, and gains
    little over one after the other. The states of segments are a pass of their own.
    """
    most = -(-blocks * segments // multiprocessors)
    sharing = SHARING if min(most, resident) > 1 else 1.0
    time = most * sharing * -(-tiles // segments)
    return time if segments == 1 else (1 + STATES_COST) * time + LAUNCHES_COST


def choose_segments(blocks: int, tiles: int, multiprocessors: int, resident: int) -> int:
    """How many segments the sequence of each of `blocks` blocks is cut into.

    One where there are blocks for `FULL` of the multiprocessors. Else as many as give each
    multiprocessor one block, or two, up to `resident`: what costs least, where each segment has at
    least `LEAST_TILES` tiles. None is empty.
    """
    best = 1
    if blocks < 1 or blocks >= FULL * multiprocessors:
        return best
    for wanted in range(1, resident + 1):
        most = min(wanted * multiprocessors // blocks, tiles // LEAST_TILES)
        if most > 1:
            segments = -(-tiles // -(-tiles // most))
            if cost(blocks, tiles, multiprocessors, resident, segments) < cost(
                blocks, tiles, multiprocessors, resident, best
            ):
                best = segments
    return best
