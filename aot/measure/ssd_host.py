"""Time of eager calls on the host: issued only, and with the wait for the GPU."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from .timing import Call

ROUNDS = 5
# So few that the driver's queue of launches never fills, and issuing never waits for the GPU.
CALLS = 100
_WARM = 10


@dataclass(frozen=True)
class Eager:
    """Microseconds a call: until the GPU is done, and until the calls are issued."""

    wall_us: float
    host_us: float


class Clock(Protocol):
    """Times eager calls in turn."""

    def __call__(self, calls: Sequence[Call]) -> list[Eager]:
        """One measurement for each call."""
        ...


def eager(calls: Sequence[Call]) -> list[Eager]:
    """The `Clock` of a real GPU: medians of rounds of `CALLS` calls."""
    for call in calls:
        for _ in range(_WARM):
            call()
    walls: list[list[float]] = [[] for _ in calls]
    hosts: list[list[float]] = [[] for _ in calls]
    for _ in range(ROUNDS):
        for call, wall, host in zip(calls, walls, hosts, strict=True):
            torch.cuda.synchronize()
            began = time.perf_counter()
            for _ in range(CALLS):
                call()
            issued = time.perf_counter()
            torch.cuda.synchronize()
            wall.append(1e6 * (time.perf_counter() - began) / CALLS)
            host.append(1e6 * (issued - began) / CALLS)
    return [
        Eager(statistics.median(wall), statistics.median(host))
        for wall, host in zip(walls, hosts, strict=True)
    ]
