"""Counts what a block does for each tile of a kernel whose warps walk tiles in loops of their own.

Nothing is known of the values that branches depend on, so there are two counts: along the least and
along the most costly way through a loop. Neither enters a loop within, which is for what is rare,
where there is a way around it. Loops that exclude each other, as no way leads from one to the
other, are alternatives if both copy to shared memory or neither does, and the same loops come
before and after them; else they are those of different warps.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from .instructions import class_of, global_bytes, matrix_fmas, shared_bytes
from .sass import Instruction, branches, loops, parse

Body = Sequence[Instruction]


@dataclass(frozen=True)
class Counts:
    """What all warps of a block do for a tile.

    `shared_bytes` are as if no two lanes asked for the same; `global_bytes` come from a cache or
    from DRAM.
    """

    instructions: int
    matrix_fmas: int
    shared_bytes: int
    global_bytes: int


@dataclass(frozen=True)
class Tile:
    """What a block does for a tile, at least and at most.

    `loops` are the outermost that multiply on tensor cores, and wait for other warps if any of
    these do; alternatives count as one. As many warps as the budget's `tile_warps` make a trip
    through each for a tile. `dram_bytes` is its `tile_bytes`.
    """

    loops: int
    dram_bytes: int
    least: Counts
    most: Counts


def per_tile(text: str, warps: int, dram_bytes: int) -> Tile | None:
    """Of nvdisasm's output of one kernel, and what its budget says.

    None where no bytes are said, no loop multiplies, or the products are not of 16-bit operands.
    """
    if not dram_bytes:
        return None
    instructions, targets, found = parse(text), branches(text), loops(text)
    bodies = [
        body
        for start, end in _outermost(found)
        if (body := [item for item in instructions if start <= item.address <= end])
        and any(class_of(item) == "tensor" for item in body)
    ]
    if not bodies or any(matrix_fmas(body) is None for body in bodies):
        return None
    # What is multiplied before or after all tiles meets no other warp.
    bodies = [body for body in bodies if _meets(body)] or bodies
    ways = [
        [_Ways(body, targets, found) for body in group]
        for group in _alternatives(bodies, instructions, targets)
    ]

    def counts(choose: Callable[[float, float], float]) -> Counts:
        def total(cost: Callable[[Instruction], int]) -> int:
            costs = [[way.cost(cost, choose) for way in group] for group in ways]
            return sum(int(functools.reduce(choose, group)) for group in costs) * warps

        return Counts(
            instructions=total(lambda item: 1),
            matrix_fmas=total(lambda item: matrix_fmas([item]) or 0),
            shared_bytes=total(shared_bytes),
            global_bytes=total(global_bytes),
        )

    return Tile(len(ways), dram_bytes, least=counts(min), most=counts(max))


def _meets(body: Body) -> bool:
    return any(item.mnemonic == "BAR" for item in body)


def _copies(body: Body) -> bool:
    return any(item.mnemonic == "LDGSTS" for item in body)


def _alternatives(
    bodies: Sequence[Body], instructions: Body, targets: Mapping[int, Sequence[int]]
) -> list[list[Body]]:
    """Loops in groups, of which a warp takes one each."""
    starts = [body[0].address for body in bodies]
    after = [
        _reachable(body[-1].address, instructions, targets).intersection(starts) - {start}
        for start, body in zip(starts, bodies, strict=True)
    ]
    groups: dict[Any, list[Body]] = {}
    for place, (start, body) in enumerate(zip(starts, bodies, strict=True)):
        before = frozenset(s for s, behind in zip(starts, after, strict=True) if start in behind)
        role = (_copies(body), before, frozenset(after[place]))
        groups.setdefault(role, []).append(body)
    return list(groups.values())


def _reachable(start: int, instructions: Body, targets: Mapping[int, Sequence[int]]) -> set[int]:
    """Addresses that some way from an instruction leads to."""
    places = {item.address: place for place, item in enumerate(instructions)}
    seen: set[int] = set()
    waiting = [start]
    while waiting:
        address = waiting.pop()
        if address in seen:
            continue
        seen.add(address)
        place = places[address]
        if instructions[place].falls_through and place + 1 < len(instructions):
            waiting.append(instructions[place + 1].address)
        waiting += [target for target in targets.get(address, ()) if target in places]
    return seen


def _outermost(found: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    # Of several branches back to one place the last ends the loop.
    ends = dict(sorted(found))
    return [
        (start, end)
        for start, end in ends.items()
        if not any(other < start and end <= ends[other] for other in ends)
    ]


class _Ways:
    """The ways through a loop, from its first instruction to a branch back to it."""

    def __init__(
        self,
        body: Sequence[Instruction],
        targets: Mapping[int, Sequence[int]],
        found: Sequence[tuple[int, int]],
    ) -> None:
        self._body = body
        places = {item.address: place for place, item in enumerate(body)}
        # Where a way goes on, by place; place 0 ends it.
        self._next: list[list[int]] = [
            [
                *([place + 1] if item.falls_through and place + 1 < len(body) else []),
                *(places[target] for target in targets.get(item.address, ()) if target in places),
            ]
            for place, item in enumerate(body)
        ]
        before: dict[int, list[int]] = {}
        for place, following in enumerate(self._next):
            for one in following:
                before.setdefault(one, []).append(place)
        self._rare: set[int] = set()
        for start, end in found:
            if start in places and end in places and places[start] > 0:
                self._rare |= self._loop(places[start], places[end], before)

    @staticmethod
    def _loop(start: int, end: int, before: Mapping[int, Sequence[int]]) -> set[int]:
        """What a branch back repeats; nothing, if the code is only not in the order it runs in.

        `before`: from where a way leads to a place.
        """
        inside, waiting = {start}, [end]
        while waiting:
            place = waiting.pop()
            if place == 0:
                return set()  # the end is also reached from outside, so it repeats nothing
            if place not in inside:
                inside.add(place)
                waiting += before.get(place, [])
        return inside

    def cost(
        self, cost: Callable[[Instruction], int], choose: Callable[[float, float], float]
    ) -> int:
        """The sum of costs of the way that `choose`, min or max, prefers."""
        found = self._sum(cost, choose, self._rare)
        return int(self._sum(cost, choose, set()) if math.isnan(found) else found)

    def _sum(
        self,
        cost: Callable[[Instruction], int],
        choose: Callable[[float, float], float],
        closed: set[int],
    ) -> float:
        # Up to each instruction; NaN where no way leads.
        before = [0.0] + [math.nan] * len(self._body)
        back = math.nan

        def better(one: float, other: float) -> float:
            return one if math.isnan(other) else other if math.isnan(one) else choose(one, other)

        done: set[int] = set()
        for place in self._order(closed):
            done.add(place)
            so_far = before[place] + cost(self._body[place])
            for following in self._next[place]:
                if following == 0:
                    back = better(back, so_far)
                elif following not in done:
                    before[following] = better(before[following], so_far)
        return back

    def _order(self, closed: set[int]) -> list[int]:
        """Places that some way leads to, each after all that lead to it but by repetition."""
        order: list[int] = []
        seen = {0, *closed}
        stack = [(0, iter(self._next[0]))]
        while stack:
            place, rest = stack[-1]
            following = next((one for one in rest if one not in seen), None)
            if following is None:
                order.append(place)
                stack.pop()
            else:
                seen.add(following)
                stack.append((following, iter(self._next[following])))
        return order[::-1]
