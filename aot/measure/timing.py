"""How GPU time is measured here: replays of CUDA graphs, ours and the opponent's in turn.

A graph holds one pass over inputs that together exceed the L2 cache, so that every launch reads its
weights from memory, and no launch cost of the host is counted.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from ...artifacts.errors import SonataError

Call = Callable[[], object]
# The launches of one graph, in order.
Pass = Sequence[Call]


@dataclass(frozen=True)
class Effort:
    """Rounds of replays, the median of which counts, over so many bytes of inputs."""

    rounds: int
    replays: int
    rotation: int


FULL = Effort(rounds=7, replays=20, rotation=800_000_000)


class Timer(Protocol):
    """Measures passes of equal length against one another."""

    def __call__(
        self, passes: Sequence[Pass], effort: Effort, before: Callable[[], object] | None = None
    ) -> list[float]:
        """Microseconds a launch of each pass; `before` runs between the warm-up and the replays."""
        ...


def replayed(
    passes: Sequence[Pass], effort: Effort, before: Callable[[], object] | None = None
) -> list[float]:
    """The `Timer` of a real GPU."""
    graphs = [capture(calls) for calls in passes]
    if before is not None:
        before()
    return replay_us(graphs, len(passes[0]), effort)


def capture(calls: Pass) -> torch.cuda.CUDAGraph:
    """A graph of the calls in order, warmed up on a side stream."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for call in calls:
            call()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    return graph


def replay_us(
    graphs: Sequence[torch.cuda.CUDAGraph], launches: int, effort: Effort = FULL
) -> list[float]:
    """Microseconds a launch of each graph: the median over the rounds.

    The graphs take turns within a round, so that a change of the GPU's clocks meets them all.
    `launches` is the number of launches in one graph.
    """
    for graph in graphs:
        graph.replay()
    torch.cuda.synchronize()
    rounds: list[list[float]] = [[] for _ in graphs]
    for _ in range(effort.rounds):
        for graph, times in zip(graphs, rounds, strict=True):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            for _ in range(effort.replays):
                graph.replay()
            end.record()
            end.synchronize()
            times.append(1e3 * start.elapsed_time(end) / (effort.replays * launches))
    return [statistics.median(times) for times in rounds]


def copies(size: int, rotation: int) -> int:
    """How many inputs of `size` bytes make a rotation; at least two."""
    return max(2, -(-rotation // size))


def gbps(size: int, us: float) -> float:
    """GB/s of so many bytes in so many microseconds."""
    return size / us / 1e3


def require_possible(size: int, us: float, peak_gbps: float, case: str) -> None:
    """Refuse a time in which the GPU's memory cannot deliver `size` bytes.

    Raises:
        SonataError: the figure is beyond the memory's peak rate, so the measurement is wrong.
    """
    if not us > 0 or gbps(size, us) > peak_gbps:
        raise SonataError(
            f"bench bug: {case}: {size} bytes in {us:.3f} us is above the memory's "
            f"{peak_gbps:.0f} GB/s",
            remedy="the measurement is wrong: please report it with this message",
        )
