"""Holds machine code against its declaration's budget."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from ..artifacts.declaration import Budget, ChoiceValue

if TYPE_CHECKING:
    from .inspect import Figures  # a build measures none of its own

# What is measured by counting: more of it is worse.
_RESOURCES = ("registers", "spills", "stack_bytes")
_LESS = {
    "registers": "take a smaller tile or unroll less",
    "spills": "keep fewer values at a time, and index arrays by constants",
    "stack_bytes": "keep fewer values at a time, and index arrays by constants",
}
_FASTER = {
    "issue": "take instructions out of the main loop",
    "tensor": "use fewer matrix instructions for the same bytes",
    "shared": "keep in registers what is used again",
    "in_flight": "have more bytes under way a thread, or more warps a multiprocessor",
}


class Resources(Protocol):
    """What a budget has an upper limit for: a manifest's record, or what was read off the code."""

    @property
    def registers(self) -> int:
        """Of a thread."""
        ...

    @property
    def spills(self) -> int:
        """Instructions that touch local memory."""
        ...

    @property
    def stack_bytes(self) -> int:
        """Of a thread."""
        ...


@dataclass(frozen=True)
class Breach:
    """One field of a budget that a binary does not keep to, and what to do."""

    field: str
    problem: str
    remedy: str


def over_budget(used: Resources, budget: Budget) -> list[str]:
    """Each resource of which code uses more than its budget."""
    return [
        f"{name} is {getattr(used, name)}, over the budget of {getattr(budget, name)}"
        for name in _RESOURCES
        if getattr(used, name) > getattr(budget, name)
    ]


def breaches(figures: Figures, budget: Budget, variant: dict[str, ChoiceValue]) -> list[Breach]:
    """All that a binary breaks of its budget; empty if it keeps to it."""
    found = [
        Breach(name, problem, f"{_LESS[name]}, or raise the budget in the declaration")
        for problem in over_budget(figures, budget)
        for name in [problem.partition(" ")[0]]
    ]
    found += (
        Breach(name, problem, f"{remedy}, or lower the budget in the declaration")
        for name, problem, remedy in _below(figures, budget.floors_of(variant))
    )
    return found


def _below(figures: Figures, floors: dict[str, int]) -> Iterator[tuple[str, str, str]]:
    code, held = figures.code, figures.occupancy
    narrowest = min(code.streamed_loads, default=0)
    if narrowest < (floor := floors["load_bytes"]):
        has = f"a streamed load takes {narrowest} bytes" if narrowest else "no load is streamed"
        remedy = f"load {floor} bytes at a time, marked L1::no_allocate"
        yield "load_bytes", f"{has}, and the budget asks for {floor} bytes each", remedy
    if (under_way := code.in_flight_bytes or 0) < (floor := floors["in_flight_bytes"]):
        has = f"a thread has {under_way} bytes under way before the first use"
        remedy = "issue more loads before using the first"
        yield "in_flight_bytes", f"{has}, below the budget of {floor}", remedy
    if held.warps < (floor := floors["warps"]):
        has = f"a multiprocessor holds {held.warps} warps, for want of {held.limit}"
        remedy = "need less of that, or choose another size of block"
        yield "warps", f"{has}, below the budget of {floor}", remedy
    if floors["tile_bytes"] and figures.tile is None:
        has = "the budget says what a tile moves, and no loop has 16-bit matrix products alone"
        yield "tile_bytes", has, "have such a loop over tiles"
    if floors["dram_bound"] and figures.gpu is not None:
        wanted = "and the budget asks for DRAM"
        if figures.prediction is None:
            remedy = "have a main loop with streamed loads, and 16-bit matrix products or none"
            yield "dram_bound", f"the code allows no prediction, {wanted}", remedy
        elif (bound := figures.prediction.bound) != "dram":
            rate = figures.prediction.rates[bound] / 1e9
            has = f"on an {figures.gpu} the bound is {bound}, at {rate:.0f} GB/s"
            yield "dram_bound", f"{has}, {wanted}", _FASTER[bound]
