"""Memory of the machine that `ptx_machine` plays: global buffers, and shared memory with its races.

Global buffers lie far apart, so what runs over an end hits nothing. Shared memory starts out as NaN
and unwritten. What a `cp.async` brings is there once the thread that asked for it has waited.

Races in shared memory are found by vector clocks: each warp counts its releases (arrivals at
barriers), and knows of each other warp the last one that it has seen, by way of barriers. An access
that conflicts with an earlier one by another warp must have seen it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np

Array = Any
WARP = 32
UNSIGNED = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}
# Of a thread's view of shared memory; below it nothing is, so that null is no place in it.
SHARED_BASE = 1024
# Where generic addresses are those of shared memory.
SHARED_WINDOW = 0x7FFF << 48


class MemoryFault(Exception):
    """An access that must not be; `lane` is the index, among those that accessed, of a culprit."""

    def __init__(self, problem: str, lane: int = 0) -> None:
        super().__init__(problem)
        self.lane = lane


@contextmanager
def among(lanes: Array) -> Iterator[None]:
    """Let a fault within, where only some lanes access, be one among all of them."""
    try:
        yield
    except MemoryFault as fault:
        raise MemoryFault(str(fault), int(lanes[fault.lane])) from None


class Buffer:
    """An array in global memory."""

    def __init__(self, array: Any, name: str, address: int, writable: bool) -> None:
        self.array = array
        self.name = name
        self.address = address
        self.writable = writable
        self.size = array.nbytes
        self.lead = address % 256
        self.base = address - self.lead
        length = -(-(self.lead + self.size) // 16) * 16
        self.storage = np.zeros(length, np.uint8)
        self.marks = np.zeros(length if writable else 0, np.uint8)
        # Who wrote a byte last, by the thread's number in the grid.
        self.writers = np.full(length if writable else 0, -1, np.int64)

    @property
    def written(self) -> Any:
        """Which elements were ever written, in the shape of the array."""
        marks = self.marks[self.lead : self.lead + self.size]
        return (marks.reshape(-1, self.array.itemsize) != 0).all(axis=1).reshape(self.array.shape)

    def take(self) -> None:
        """Begin a launch with what the array holds."""
        end = self.lead + self.size
        self.storage[self.lead : end] = np.frombuffer(self.array.tobytes(), np.uint8)
        self.writers[:] = -1

    def give_back(self) -> None:
        """Put what was written into the array."""
        found = self.storage[self.lead : self.lead + self.size]
        self.array[...] = found.view(self.array.dtype).reshape(self.array.shape)


class Memory:
    """Global memory: buffers far apart."""

    def __init__(self, *, exclusive: bool = True) -> None:
        """`exclusive`: threads of a launch must not write different values to one byte."""
        self.buffers: list[Buffer] = []
        self.exclusive = exclusive

    def buffer(
        self,
        array: Any,
        name: str,
        *,
        writable: bool = False,
        offset: int = 0,
        address: int | None = None,
    ) -> Buffer:
        """Place an array, `offset` bytes past a multiple of 256, or at an address.

        A launch begins with what the array holds then, and leaves in it what it has written.
        """
        if address is None:
            address = (len(self.buffers) + 1 << 40) + 0x7000 + offset
        made = Buffer(array, name, address, writable)
        for other in self.buffers:
            if made.base < other.base + len(other.storage) + 256 and (
                other.base < made.base + len(made.storage) + 256
            ):
                raise ValueError(f"{name} lies too close to {other.name}")
        self.buffers.append(made)
        return made

    def load(self, addresses: Array, width: int, count: int) -> Array:
        """`count` words of `width` bytes for each address."""
        buffer, places = self._places(addresses, width * count, writing=False)
        if buffer is not None:
            return _gather(buffer.storage, places, width, count)
        found = np.zeros((len(addresses), count), UNSIGNED[width])
        for pick in self._apart(addresses):
            with among(pick):
                found[pick] = self.load(addresses[pick], width, count)
        return found

    def store(self, addresses: Array, values: Array, threads: Array) -> None:
        """Words, a row of them for each address."""
        width, count = values.itemsize, values.shape[1]
        buffer, places = self._places(addresses, width * count, writing=True)
        if buffer is None:
            for pick in self._apart(addresses):
                with among(pick):
                    self.store(addresses[pick], values[pick], threads[pick])
            return
        if self.exclusive:
            self._check_writers(buffer, places, values, threads)
        _scatter(buffer.storage, places, values)
        _scatter(buffer.marks, places, np.full_like(values, ~values.dtype.type(0)))

    def update(self, addresses: Array, change: Callable[[Any, int], Any], width: int) -> Array:
        """Replace a word at each address, one after another, and give what was there before."""
        old = np.zeros(len(addresses), UNSIGNED[width])
        for lane, address in enumerate(addresses):
            with among(np.array([lane])):
                buffer, (place,) = self._places(address[None], width, writing=True)
            assert buffer is not None
            words = buffer.storage.view(UNSIGNED[width])
            old[lane] = words[place // width]
            words[place // width] = change(old[lane], lane)
            buffer.marks[place : place + width] = 0xFF
        return old

    def _places(self, addresses: Array, size: int, *, writing: bool) -> tuple[Buffer | None, Array]:
        """The buffer and offsets in its storage; no buffer, if there are several of them."""
        low, high = int(addresses.min()), int(addresses.max())
        for buffer in self.buffers:
            if low >= buffer.address and high + size <= buffer.address + buffer.size:
                if np.any(addresses & np.uint64(size - 1)):
                    lane = int(np.flatnonzero(addresses & np.uint64(size - 1))[0])
                    raise MemoryFault(f"address {int(addresses[lane]):#x} of {size} bytes", lane)
                if writing and not buffer.writable:
                    raise MemoryFault(f"a write to {buffer.name}, which is only read")
                return buffer, (addresses - np.uint64(buffer.base)).astype(np.int64)
        homes = self._homes(addresses)
        if (homes == homes[0]).all():
            raise MemoryFault(self._outside(addresses, size, homes), self._culprit(addresses, size))
        if (homes < 0).any():
            lane = int(np.flatnonzero(homes < 0)[0])
            raise MemoryFault(self._outside(addresses[lane : lane + 1], size, homes[lane:]), lane)
        return None, None

    def _homes(self, addresses: Array) -> Array:
        """Index of the buffer that each address is nearest to, within a gap; -1: none."""
        homes = np.full(len(addresses), -1)
        for index, buffer in enumerate(self.buffers):
            gap = np.uint64(128)
            near = (addresses >= np.uint64(buffer.base) - gap) & (
                addresses < np.uint64(buffer.base + len(buffer.storage)) + gap
            )
            homes[near] = index
        return homes

    def _apart(self, addresses: Array) -> list[Array]:
        homes = self._homes(addresses)
        return [np.flatnonzero(homes == home) for home in np.unique(homes)]

    def _culprit(self, addresses: Array, size: int) -> int:
        inside = np.zeros(len(addresses), np.bool_)
        for buffer in self.buffers:
            start, end = buffer.address, buffer.address + buffer.size
            inside |= (addresses >= np.uint64(start)) & (addresses + np.uint64(size) <= end)
        return int(np.flatnonzero(~inside)[0])

    def _outside(self, addresses: Array, size: int, homes: Array) -> str:
        address = int(addresses[self._culprit(addresses, size)])
        nearest = min(
            self.buffers,
            key=lambda b: max(b.address - address, address - b.address - b.size),
            default=None,
        )
        if nearest is None:
            return f"{size} bytes at {address:#x}: there are no buffers"
        return (
            f"{size} bytes at {address:#x} lie outside all buffers: {address - nearest.address} "
            f"bytes from the start of {nearest.name}, which has {nearest.size}"
        )

    def _check_writers(self, buffer: Buffer, places: Array, values: Array, threads: Array) -> None:
        size = values.itemsize * values.shape[1]
        new = values.view(np.uint8).reshape(len(places), size)
        where = places[:, None] + np.arange(size)
        other = (buffer.writers[where] >= 0) & (buffer.writers[where] != threads[:, None])
        clash = other & (buffer.storage[where] != new)
        buffer.writers[where] = threads[:, None]
        trial = buffer.storage.copy() if len(np.unique(places)) < len(places) else None
        if trial is not None:
            trial[where] = new
            clash |= trial[where] != new
        if clash.any():
            lane, byte = (int(i) for i in np.argwhere(clash)[0])
            raise MemoryFault(
                f"two threads write different values to byte "
                f"{int(where[lane, byte]) - buffer.lead} of {buffer.name}",
                lane,
            )


def _gather(storage: Array, places: Array, width: int, count: int) -> Array:
    words = storage.view(UNSIGNED[width])
    if count == 1:
        return words[places // width][:, None]
    return words.reshape(-1, count)[places // (width * count)]


def _scatter(storage: Array, places: Array, values: Array) -> None:
    width, count = values.itemsize, values.shape[1]
    words = storage.view(UNSIGNED[width])
    if count == 1:
        words[places // width] = values[:, 0]
    else:
        words.reshape(-1, count)[places // (width * count)] = values


class Clocks:
    """What each warp has seen of the others; row `w * blocks + b`: warp w, block b."""

    def __init__(self, warps: int, blocks: int) -> None:
        self.warps, self.blocks = warps, blocks
        self.seen = np.zeros((warps * blocks, warps), np.int32)
        rows = np.arange(warps * blocks)
        self.seen[rows, rows // blocks] = 1

    def release(self, rows: Array) -> None:
        """Begin new epochs: what these warps do from now on, no barrier before has shown."""
        self.seen[rows, rows // self.blocks] += 1


@dataclass
class Pending:
    """Asynchronous copies under way: of each its lane, group, place and bytes."""

    lanes: Array
    groups: Array
    places: Array
    data: Array
    threads: Array

    def pick(self, which: Array) -> Pending:
        fields = (self.lanes, self.groups, self.places, self.data, self.threads)
        return Pending(*(field[which] for field in fields))


class SharedMemory:
    """Shared memory of some blocks.

    `unit` is the least number of bytes that an access has: conflicts are found by such units.
    """

    def __init__(
        self, size: int, warps: int, blocks: int, *, unit: int, races: bool, strict: bool
    ) -> None:
        self.size = size
        self.blocks, self.warps = blocks, warps
        self.stride = -(-max(size, 1) // 16) * 16
        self.storage = np.full(self.stride * blocks, 0xFF, np.uint8)
        self.valid = np.zeros(self.stride * blocks, np.uint8)
        self.strict, self.races, self.unit = strict, races, unit
        self.clocks = Clocks(warps, blocks)
        if races:
            units = self.stride * blocks // unit
            self.writer = np.zeros(units, np.int32)
            self.wrote = np.zeros(units, np.int32)
            self.read = np.zeros((units, warps), np.int32)

    def load(self, addresses: Array, lanes: Array, width: int, count: int) -> Array:
        places = self._places(addresses, lanes, width * count)
        return self.load_places(places, lanes, width, count)

    def load_places(self, places: Array, lanes: Array, width: int, count: int) -> Array:
        if self.strict:
            known = _gather(self.valid, places, width, count)
            if not (known == ~known.dtype.type(0)).all():
                lane = int(np.flatnonzero((known != ~known.dtype.type(0)).any(axis=1))[0])
                raise MemoryFault(
                    f"byte {int(places[lane]) % self.stride} of shared memory is read, and nothing "
                    "was written there (or a copy to it is still under way)",
                    lane,
                )
        if self.races:
            self._note_read(places, lanes, width * count)
        return _gather(self.storage, places, width, count)

    def store(self, addresses: Array, lanes: Array, values: Array) -> None:
        places = self._places(addresses, lanes, values.itemsize * values.shape[1])
        if self.races:
            self._note_write(places, lanes, values.itemsize * values.shape[1])
        self._put(places, values)

    def update(
        self, addresses: Array, lanes: Array, change: Callable[[Any, int], Any], width: int
    ) -> Array:
        """As for global memory; atomic operations race with nothing."""
        places = self._places(addresses, lanes, width)
        old = np.zeros(len(places), UNSIGNED[width])
        words, valid = self.storage.view(UNSIGNED[width]), self.valid.view(UNSIGNED[width])
        for lane, place in enumerate(places // width):
            if self.strict and valid[place] != ~UNSIGNED[width](0):
                raise MemoryFault("an atomic operation where nothing was written", lane)
            old[lane] = words[place]
            words[place] = change(old[lane], lane)
        return old

    def begin_copy(self, addresses: Array, lanes: Array, size: int) -> Array:
        """Where an asynchronous copy goes; nobody may read there until it is done."""
        places = self._places(addresses, lanes, size)
        if self.races:
            self._note_write(places, lanes, size)
        nothing = np.full((len(places), size // 4), 0xFFFF_FFFF, np.uint32)
        self._put(places, nothing)
        _scatter(self.valid, places, np.zeros_like(nothing))
        return places

    def end_copy(self, copies: Pending) -> None:
        if self.races:
            size = copies.data.itemsize * copies.data.shape[1]
            self._note_write(copies.places, copies.lanes, size)
        self._put(copies.places, copies.data)

    def _put(self, places: Array, values: Array) -> None:
        _scatter(self.storage, places, values)
        _scatter(self.valid, places, np.full_like(values, ~values.dtype.type(0)))

    def _places(self, addresses: Array, lanes: Array, size: int) -> Array:
        offsets = addresses.astype(np.int64) - SHARED_BASE
        if offsets.min() < 0 or offsets.max() + size > self.size:
            lane = int(np.flatnonzero((offsets < 0) | (offsets + size > self.size))[0])
            raise MemoryFault(
                f"{size} bytes at {int(offsets[lane])} of shared memory, which has {self.size}",
                lane,
            )
        if np.any(offsets & size - 1):
            lane = int(np.flatnonzero(offsets & size - 1)[0])
            raise MemoryFault(f"{size} bytes at {int(offsets[lane])} of shared memory", lane)
        return lanes // WARP % self.blocks * self.stride + offsets

    def _units(self, places: Array, size: int) -> Array:
        return (places // self.unit)[:, None] + np.arange(max(size // self.unit, 1))

    def _note_read(self, places: Array, lanes: Array, size: int) -> None:
        units, rows = self._units(places, size), (lanes // WARP)[:, None]
        self._check_written(units, rows, "reads what")
        warps = rows // self.blocks
        self.read[units, warps] = self.clocks.seen[rows, warps]

    def _note_write(self, places: Array, lanes: Array, size: int) -> None:
        units, rows = self._units(places, size), (lanes // WARP)[:, None]
        self._check_written(units, rows, "overwrites what")
        late = self.read[units] > self.clocks.seen[rows]
        warps = rows // self.blocks
        if late.any():
            lane, unit, other = (int(i) for i in np.argwhere(late)[0])
            self._race(units[lane, unit], "overwrites what", other, "read", lane)
        self.writer[units] = warps
        self.wrote[units] = self.clocks.seen[rows, warps]
        clash = self.writer[units] != warps
        if clash.any():
            lane, unit = (int(i) for i in np.argwhere(clash)[0])
            place = units[lane, unit]
            self._race(place, "overwrites what", int(self.writer[place]), "wrote", lane)

    def _check_written(self, units: Array, rows: Array, what: str) -> None:
        writer = self.writer[units]
        late = self.wrote[units] > self.clocks.seen[rows, writer]
        if late.any():
            lane, unit = (int(i) for i in np.argwhere(late)[0])
            self._race(units[lane, unit], what, int(writer[lane, unit]), "wrote", lane)

    def _race(self, unit: Any, what: str, warp: int, did: str, lane: int) -> None:
        place = int(unit) * self.unit % self.stride
        raise MemoryFault(
            f"a race: this {what} warp {warp} {did} at byte {place} of shared memory, with no "
            "barrier between",
            lane,
        )
