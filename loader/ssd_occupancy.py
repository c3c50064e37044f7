"""When the sequence of a scan is cut into segments, and into how many."""

from __future__ import annotations

from ..artifacts.manifest import Binary
from ..artifacts.record import record

# Blocks for each multiprocessor from which on a sequence is not cut.
FULL = 0.75
# Fewest tiles of a segment, and of a part of one; most parts of a segment.
LEAST_TILES = 4
LEAST_PART = 2
MOST_PARTS = 8
# What a tile costs where only states are made, over what it costs in all.
STATES_COST = 0.45
# What two more launches cost, in tiles of one block.
LAUNCHES_COST = 4.0
# What blocks that share a multiprocessor take, over what they would one after another: of the scan,
# and of those with half the warps that only make states.
SHARING = 0.9
STATES_SHARING = 0.6
_REGISTERS = 65536
# Shared memory that the driver keeps of each block's.
_RESERVED = 1024


@record
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


@record
class Cut:
    """A sequence in segments of `segment_tiles` tiles, the last of which may have fewer.

    States are made by parts, `ratio` of them a segment. None is empty.
    """

    segments: int
    segment_tiles: int
    ratio: int = 1

    @classmethod
    def of(cls, tiles: int, segments: int, ratio: int = 1) -> Cut:
        """About so many segments."""
        segment_tiles = ratio * -(-tiles // (segments * ratio))
        return cls(-(-tiles // segment_tiles), segment_tiles, ratio)

    @property
    def part_tiles(self) -> int:
        """Tiles of a part."""
        return self.segment_tiles // self.ratio

    @property
    def parts(self) -> int:
        """Parts of all segments but the last, whose state nobody needs."""
        return (self.segments - 1) * self.ratio


@record
class Room:
    """Multiprocessors, and blocks that one holds: of the scan, and of those that make states."""

    multiprocessors: int
    resident: int
    states_resident: int


def cost(blocks: int, cut: Cut, room: Room) -> float:
    """Model of the time of a scan, in tiles that a block goes through alone.

    A multiprocessor is busy with one block; a second one beside it makes both slower, and gains
    little over one after the other.
    """

    def busy(count: int, resident: int, sharing: float) -> float:
        most = -(-count // room.multiprocessors)
        return most * (sharing if min(most, resident) > 1 else 1.0)

    time = cut.segment_tiles * busy(blocks * cut.segments, room.resident, SHARING)
    if cut.segments > 1:
        each = busy(blocks * cut.parts, room.states_resident, STATES_SHARING)
        time += STATES_COST * cut.part_tiles * each + LAUNCHES_COST
    return time


def choose_cut(blocks: int, tiles: int, room: Room) -> Cut:
    """How the sequence of each of `blocks` blocks is cut into segments.

    Not at all where there are blocks for `FULL` of the multiprocessors. Else into as many segments
    as give each multiprocessor one block, or two, up to `resident`, of at least `LEAST_TILES` tiles
    each, and these into parts: what costs least.
    """
    best = Cut.of(tiles, 1) if tiles else Cut(1, 0)
    if blocks < 1 or blocks >= FULL * room.multiprocessors:
        return best
    least = cost(blocks, best, room)
    for wanted in range(1, room.resident + 1):
        segments = min(wanted * room.multiprocessors // blocks, tiles // LEAST_TILES)
        for ratio in range(1, MOST_PARTS + 1) if segments > 1 else ():
            cut = Cut.of(tiles, segments, ratio)
            if cut.part_tiles < LEAST_PART or cut.segments < 2:
                break
            if (time := cost(blocks, cut, room)) < least:
                best, least = cut, time
    return best
