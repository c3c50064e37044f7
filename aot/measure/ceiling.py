"""How fast this GPU's memory can be read: the kernel `read` in all its variants, the best of them.

Two uses. The ceiling is the best rate that any of them reached over anything. And the honest
opponent of one shape is a read of as many bytes in the same launch style, since short launches
cannot reach the ceiling.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from . import timing
from .gpu import Launchable
from .timing import Call, Effort, Timer

VECTOR = 16
# Blocks that the grid has for each multiprocessor, beside one trip of every thread.
FILLS = (1, 2, 4, 8, 16)
FINALISTS = 3


@dataclass(frozen=True)
class Way:
    """A variant of `read` with a grid."""

    warps: int
    unroll: int
    blocks: int
    programmatic: bool


@dataclass(frozen=True)
class Read:
    """How long one launch took that read `size` bytes."""

    way: Way
    size: int
    us: float

    @property
    def gbps(self) -> float:
        """Its rate."""
        return timing.gbps(self.size, self.us)

    def data(self) -> dict[str, Any]:
        """As JSON data."""
        return {**vars(self.way), "bytes": self.size, "us": self.us, "gbps": round(self.gbps, 1)}

    def __str__(self) -> str:
        style = "programmatic" if self.way.programmatic else "plain"
        return (
            f"{self.gbps:.0f} GB/s ({self.size / 1e6:.1f} MB a launch, {style}, {self.way.blocks} "
            f"blocks of {self.way.warps} warps, {self.way.unroll} loads under way)"
        )


class Reader:
    """Launches the variants of `read` and finds the fastest."""

    def __init__(
        self,
        binaries: dict[tuple[object, ...], Launchable],
        *,
        multiprocessors: int,
        peak_gbps: float,
        sink: int,
        stream: Callable[[], int],
        timer: Timer,
    ) -> None:
        """`binaries` by (warps, unroll, pdl); `sink` is the address of 4 bytes to write to."""
        self._binaries = binaries
        self._multiprocessors = multiprocessors
        self._peak_gbps = peak_gbps
        self._sink = sink
        self._stream = stream
        self._timer = timer
        self.seen: list[Read] = []

    def ways(self, size: int, programmatic: bool) -> list[Way]:
        """Every variant with every grid that is worth trying for so many bytes."""
        found = []
        for warps, unroll, pdl in sorted(self._binaries, key=str):
            if pdl != programmatic:
                continue
            warps, unroll = int(str(warps)), int(str(unroll))
            # More blocks than this would find nothing to read.
            one_trip = max(1, -(-(size // VECTOR) // (32 * warps * unroll)))
            grids = {min(self._multiprocessors * fill, one_trip) for fill in FILLS} | {one_trip}
            found += [Way(warps, unroll, blocks, programmatic) for blocks in sorted(grids)]
        return found

    def calls(self, way: Way, addresses: Sequence[int], size: int) -> list[Call]:
        """One launch for each address."""
        loaded = self._binaries[way.warps, way.unroll, int(way.programmatic)]

        def call(address: int) -> Call:
            return lambda: loaded.launch(
                self._stream(),
                address,
                self._sink,
                size // VECTOR,
                way.blocks,
                programmatic=way.programmatic,
            )

        return [call(address) for address in addresses]

    def best(self, addresses: Sequence[int], size: int, programmatic: bool, effort: Effort) -> Read:
        """The fastest way to read `size` bytes at each of the addresses, one after another.

        Raises:
            SonataError: a figure beyond the memory's peak rate.
        """
        quick = replace(effort, rounds=3, replays=min(5, effort.replays))
        first = [
            self.note(way, size, self._timer([self.calls(way, addresses, size)], quick)[0])
            for way in self.ways(size, programmatic)
        ]
        # A lucky reading must not win: the first few meet again.
        ways = [read.way for read in sorted(first, key=lambda read: read.us)[:FINALISTS]]
        times = self._timer([self.calls(way, addresses, size) for way in ways], effort)
        finalists = [self.note(way, size, us) for way, us in zip(ways, times, strict=True)]
        best = min(finalists, key=lambda read: read.us)
        self.seen.append(best)
        return best

    def note(self, way: Way, size: int, us: float) -> Read:
        """A reading, checked against what the memory can deliver."""
        timing.require_possible(size, us, self._peak_gbps, f"read of {size} bytes, {way}")
        return Read(way, size, us)
