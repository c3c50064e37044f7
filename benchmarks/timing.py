"""How GPU time is measured here: replays of a CUDA graph, ours and the opponent's in turn.

A graph holds one pass over inputs that together exceed the L2 cache, so that every launch reads its
weights from memory, and no launch cost of the host is counted.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence

import torch

REPLAYS = 20
REPEATS = 7


def capture(calls: Sequence[Callable[[], object]]) -> torch.cuda.CUDAGraph:
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


def replay_us(graphs: Sequence[torch.cuda.CUDAGraph], launches: int) -> list[float]:
    """Microseconds a launch of each graph: the median of 7 rounds of 20 replays.

    The graphs take turns within a round, so that a change of the GPU's clocks meets them all.
    `launches` is the number of launches in one graph.
    """
    for graph in graphs:
        graph.replay()
    torch.cuda.synchronize()
    rounds: list[list[float]] = [[] for _ in graphs]
    for _ in range(REPEATS):
        for graph, times in zip(graphs, rounds, strict=True):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            for _ in range(REPLAYS):
                graph.replay()
            end.record()
            end.synchronize()
            times.append(1e3 * start.elapsed_time(end) / (REPLAYS * launches))
    return [statistics.median(times) for times in rounds]


def require_possible(size: int, us: float) -> None:
    """Refuse a time in which the GPU's memory cannot deliver `size` bytes.

    Raises:
        RuntimeError: the figure is beyond the memory's peak rate, so the measurement is wrong.
    """
    properties = torch.cuda.get_device_properties(torch.cuda.current_device())
    # Two transfers a clock (kHz), over a bus of so many bits.
    peak = 2e3 * properties.memory_clock_rate * properties.memory_bus_width / 8
    if size / (1e-6 * us) > peak:
        raise RuntimeError(
            f"{size} bytes in {us:.2f} us is above the memory's {peak / 1e9:.0f} GB/s: "
            "the measurement is wrong"
        )
