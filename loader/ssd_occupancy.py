"""When the sequence of a scan is cut into segments, and into how many."""

from __future__ import annotations

from dataclasses import dataclass

from ..artifacts.manifest import Binary

# A share of the GPU from which on it counts as full.
FULL = 0.75
# Fewest tiles of a segment.
LEAST_TILES = 4
# What the pass that makes the states of segments costs, as a share of the scan itself.
STATES_COST = 0.45
# What two more launches cost, in tiles of one block.
LAUNCHES_COST = 4.0
_REGISTERS = 65536
# Shared memory that the driver keeps of each block's.
_RESERVED = 1024


@dataclass(frozen=True)
class Gpu:
    """What decides how many blocks run at once; `shared_bytes` is the most that a block gets."""

    multiprocessors: int
    shared_bytes: int

    def places(self, binary: Binary) -> int:
        """Blocks that run at once, as far as shared memory and registers let them."""
        shared = binary.shared_bytes + binary.static_shared_bytes + _RESERVED
        threads = binary.block[0] * binary.block[1] * binary.block[2]
        registers = threads * (binary.registers + -binary.registers % 8)
        fitting = min((self.shared_bytes + _RESERVED) // shared, _REGISTERS // registers)
        return self.multiprocessors * max(1, fitting)


def cost(blocks: int, tiles: int, places: int, segments: int = 1) -> float:
    """Model of the time of a scan, in tiles: how many a block goes through, times the waves."""
    waves = -(-blocks * segments // places)
    through = waves * -(-tiles // segments)
    return through if segments == 1 else (1 + STATES_COST) * through + LAUNCHES_COST


def choose_segments(blocks: int, tiles: int, places: int) -> int:
    """How many segments the sequence of each of `blocks` blocks is cut into.

    One where the blocks fill the `places` of the GPU; else as many as fill it once, each of at
    least `LEAST_TILES` tiles, if by `cost` that is faster. None is empty.
    """
    if blocks < 1 or blocks >= FULL * places:
        return 1
    most = min(places // blocks, tiles // LEAST_TILES)
    if most < 2:
        return 1
    segment_tiles = -(-tiles // most)
    segments = -(-tiles // segment_tiles)
    return segments if cost(blocks, tiles, places, segments) < cost(blocks, tiles, places) else 1
