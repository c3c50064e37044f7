"""GPU time by replays: what a round is, that graphs take turns, and which figure counts."""

from __future__ import annotations

from typing import Any, cast

import pytest
import torch

from sonata_aot.aot.measure import timing

EFFORT = timing.Effort(rounds=5, replays=4, rotation=1)


class Clock:
    """A GPU whose graphs take as long as they are told, round by round."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 0.0
        self.replayed: list[str] = []
        monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
        monkeypatch.setattr(torch.cuda, "Event", lambda **_: Event(self))

    def graph(self, name: str, *ms: float) -> Any:
        return cast(torch.cuda.CUDAGraph, Graph(self, name, ms))


class Event:
    def __init__(self, clock: Clock) -> None:
        self.clock, self.at = clock, 0.0

    def record(self) -> None:
        self.at = self.clock.now

    def synchronize(self) -> None:
        pass

    def elapsed_time(self, end: Event) -> float:
        return end.at - self.at


class Graph:
    """The first replay is the warm-up; then `EFFORT.replays` belong to each round."""

    def __init__(self, clock: Clock, name: str, ms: tuple[float, ...]) -> None:
        self.clock, self.name, self.ms, self.count = clock, name, ms, 0

    def replay(self) -> None:
        number = max(0, self.count - 1) // EFFORT.replays
        self.clock.now += self.ms[number % len(self.ms)] if self.count else 1000.0
        self.count += 1
        self.clock.replayed.append(self.name)


def test_the_median_of_the_rounds_counts_for_each_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    graphs = [clock.graph("ours", 1.0, 9.0, 2.0, 3.0, 8.0), clock.graph("theirs", 6.0)]
    # Milliseconds of a replay with ten launches are tenths of a millisecond a launch.
    assert timing.replay_us(graphs, 10, EFFORT) == pytest.approx([300.0, 600.0])


def test_graphs_take_turns_after_one_replay_each(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    timing.replay_us([clock.graph("ours", 1.0), clock.graph("theirs", 1.0)], 1, EFFORT)
    a_round = ["ours"] * EFFORT.replays + ["theirs"] * EFFORT.replays
    assert clock.replayed == ["ours", "theirs"] + a_round * EFFORT.rounds
