"""From measured times to a selection table: pure functions over plain data.

Each measured shape gets a cell, a range of N by a range of K around it, with bounds halfway (by
ratio) to the next measured one. Few variants are wanted, since each is a binary to ship and load;
how they are launched costs nothing. So first a small set of variants is chosen in which each cell
has one that is nearly as fast as its best, and then each cell gets its fastest out of that set.
"""

from __future__ import annotations

import itertools
import json
import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ...artifacts.errors import ArgumentError, SonataError

Variant = Mapping[str, int | str]
MAX_SIZE = 2**31 - 1
# Two measurements of one launch differ by about so much.
NOISE = 0.005
# What rules of the GEMV call `launch`.
LAUNCH = ("blocks_per_sm", "ahead_kb", "skip_blocks_per_sm")
# Choices that a rule does not fix: a table holds for every dtype, and m comes from `when`.
NOT_IN_RULES = ("dtype", "m")


@dataclass(frozen=True)
class Measurement:
    """Microseconds of one variant, launched one way, for one shape."""

    n: int
    k: int
    m: int
    constant: int
    variant: dict[str, int | str]
    launch: dict[str, int]
    us: float
    # Measured by the full rules, not in the first quick round.
    full: bool
    binary: str

    @property
    def shape(self) -> tuple[int, int]:
        """N and K."""
        return self.n, self.k

    @property
    def values(self) -> dict[str, int | str]:
        """Case, variant and launch."""
        case = {"n": self.n, "k": self.k, "m": self.m, "constant": self.constant}
        return {**case, **self.variant, **self.launch}

    @property
    def key(self) -> str:
        """The variant as text."""
        return ",".join(f"{name}={value}" for name, value in self.variant.items())


Score = Callable[[Measurement], float]
Cell = tuple[int, int]


@dataclass(frozen=True)
class Row:
    """One rule of a table."""

    when: dict[str, int]
    n: tuple[int, int]
    k: tuple[int, int]
    variant: dict[str, int | str] = field(hash=False)
    launch: dict[str, int] = field(hash=False)

    def fits(self, when: Mapping[str, int], n: int, k: int) -> bool:
        """Whether a call gets this rule, if no earlier one fits."""
        return (
            self.when == dict(when) and self.n[0] <= n <= self.n[1] and self.k[0] <= k <= self.k[1]
        )


def measured_us(measurement: Measurement) -> float:
    """The score where the GPU measured on is the one meant."""
    return measurement.us


def finalists(
    measurements: Iterable[Measurement], score: Score, *, most: int, within: float
) -> list[Measurement]:
    """Of one cell: the `most` fastest, and each variant's fastest launch, if `within` of the best.

    The second kind matters as a variant that is nearly the best here may be the best elsewhere.
    """
    ordered = sorted((m for m in measurements if score(m) < math.inf), key=score)
    if not ordered:
        return []
    least, seen, found = score(ordered[0]), set(), []
    for index, item in enumerate(ordered):
        first_of_variant = item.key not in seen
        seen.add(item.key)
        if index < most or (first_of_variant and score(item) <= within * least):
            found.append(item)
    return found


def choose(
    measurements: Iterable[Measurement],
    *,
    score: Score = measured_us,
    tolerance: float,
    kept: Sequence[Variant] = (),
    used: Sequence[Variant] = (),
) -> dict[tuple[int, int], dict[Cell, Measurement]]:
    """For each (m, constant) and shape the variant and launch that calls get.

    `tolerance` is how much slower than the best of a cell its choice may be: 0.01 is 1%. Where a
    cell has full measurements, only they count. Variants that have all values of one of `kept` are
    in the set that cells choose from in any case. Each of `used` has values of one cell, variant
    and launch, and that cell gets the fastest measurement that has all of them.

    Raises:
        SonataError: a cell has no measurement whose score is finite.
        ArgumentError: one of `used` is of no measurement, or of several cells.
    """
    measurements = list(measurements)
    groups: dict[int, dict[_Case, list[Measurement]]] = {}
    for item in measurements:
        cases = groups.setdefault(item.m, {})
        cases.setdefault((item.constant, *item.shape), []).append(item)
    chosen: dict[tuple[int, int], dict[Cell, Measurement]] = {}
    for m, cases in sorted(groups.items()):
        choices = _choose_for(m, cases, score, tolerance, kept)
        for (constant, n, k), item in sorted(choices.items()):
            chosen.setdefault((m, constant), {})[n, k] = item
    for wanted in used:
        fit = [item for item in measurements if wanted.items() <= item.values.items()]
        item = min((item for item in fit if item.full), key=score, default=None)
        if item is None or len({(each.m, each.constant, each.shape) for each in fit}) > 1:
            raise ArgumentError(
                f"of {len(fit)} measurements with {dict(wanted)} there must be a full one, and all "
                "of one shape",
                remedy="name n, k, m, constant, and values of a variant and a launch",
            )
        chosen[item.m, item.constant][item.shape] = item
    return chosen


# Constant or not, N, K: calls of each kind may share a variant.
_Case = tuple[int, int, int]


def _choose_for(
    m: int,
    cases: dict[_Case, list[Measurement]],
    score: Score,
    tolerance: float,
    kept: Sequence[Variant],
) -> dict[_Case, Measurement]:
    # The fastest launch of each variant in each case.
    best: dict[_Case, dict[str, Measurement]] = {}
    for case, items in sorted(cases.items()):
        full = [item for item in items if item.full] or items
        by_variant: dict[str, Measurement] = {}
        for item in sorted(full, key=score):
            if score(item) < math.inf:
                by_variant.setdefault(item.key, item)
        if not by_variant:
            raise SonataError(
                f"m={m} constant={case[0]} N={case[1]} K={case[2]}: no variant is left",
                remedy="build more variants, or tune without --model",
            )
        best[case] = by_variant
    slower = {
        case: {name: score(item) / min(map(score, items.values())) for name, item in items.items()}
        for case, items in best.items()
    }
    names = set(cover(slower, 1 + tolerance))
    everything = {name: item.variant for items in best.values() for name, item in items.items()}
    names |= {
        name
        for name, variant in everything.items()
        if any(wanted.items() <= variant.items() for wanted in kept)
    }
    return {
        case: _pick([item for name, item in items.items() if name in names], score)
        for case, items in best.items()
    }


def _pick(items: Sequence[Measurement], score: Score) -> Measurement:
    """The fastest, or among those as fast the one with the smallest blocks.

    Small blocks leave a multiprocessor sooner to those of the next kernel, which these timings, of
    one shape after itself, do not show.
    """
    least = min(map(score, items))
    as_fast = [item for item in items if score(item) <= (1 + NOISE) * least]
    return min(as_fast, key=lambda item: (int(item.variant.get("warps", 0)), score(item)))


def cover(slower: Mapping[Any, Mapping[str, float]], limit: float) -> list[str]:
    """A small set of names such that each cell has one whose ratio to its best is within `limit`.

    Greedy: the name that serves most of the cells that are left, and among equals the one that is
    least slow there; at last, names that the later ones made needless go.
    """
    able = {
        cell: {name for name, ratio in names.items() if ratio <= limit}
        for cell, names in slower.items()
    }
    chosen: list[str] = []
    left = set(able)
    while left:

        def merit(name: str, left: set[Any] = left) -> tuple[int, float, str]:
            served = [cell for cell in left if name in able[cell]]
            return -len(served), sum(slower[cell][name] for cell in served), name

        chosen.append(min({name for cell in left for name in able[cell]}, key=merit))
        left = {cell for cell in left if chosen[-1] not in able[cell]}
    for name in list(chosen):
        others = set(chosen) - {name}
        if all(names & others for names in able.values()):
            chosen.remove(name)
    return chosen


def intervals(values: Iterable[int]) -> list[tuple[int, int]]:
    """Ranges around distinct values that together cover every size, in order."""
    ordered = sorted(set(values))
    bounds = [_between(low, high) for low, high in itertools.pairwise(ordered)]
    return list(zip([1, *(b + 1 for b in bounds)], [*bounds, MAX_SIZE], strict=True))


def _between(low: int, high: int) -> int:
    """The geometric mean, rounded to four binary digits where that stays between the two."""
    mean = math.isqrt(low * high)
    unit = 1 << max(0, mean.bit_length() - 4)
    rounded = (mean + unit // 2) // unit * unit
    return rounded if low <= rounded < high else mean


def rows(choices: Mapping[tuple[int, int], Mapping[Cell, Measurement]]) -> list[Row]:
    """The rules of a table, in the order in which they are tried."""
    found: list[Row] = []
    for (m, constant), cells in sorted(choices.items()):
        found += _rows_of({"m": m, "constant": constant}, cells)
    return found


_Band = list[tuple[tuple[int, int], Measurement]]


def _rows_of(when: dict[str, int], cells: Mapping[Cell, Measurement]) -> list[Row]:
    bands: list[tuple[tuple[int, int], _Band]] = []
    for n_range, n in zip(
        intervals(n for n, _ in cells), sorted({n for n, _ in cells}), strict=True
    ):
        ks = sorted(k for other, k in cells if other == n)
        band: _Band = []
        for k_range, k in zip(intervals(ks), ks, strict=True):
            item = cells[n, k]
            if band and _same(band[-1][1], item):
                band[-1] = ((band[-1][0][0], k_range[1]), item)
            else:
                band.append((k_range, item))
        if bands and _same_band(bands[-1][1], band):
            bands[-1] = ((bands[-1][0][0], n_range[1]), band)
        else:
            bands.append((n_range, band))
    boxes = [(n, k, item) for n, band in bands for k, item in band]
    # Boxes do not overlap, so those with the most frequent answer can be one rule at the end.
    usual = Counter(_answer(item) for *_, item in boxes).most_common(1)[0][0]
    last = next(item for *_, item in boxes if _answer(item) == usual)
    everything = (1, MAX_SIZE)
    kept = [box for box in boxes if _answer(box[2]) != usual]
    return [
        Row(when, n, k, _fixed(item.variant), item.launch)
        for n, k, item in [*kept, (everything, everything, last)]
    ]


def _fixed(variant: Variant) -> dict[str, int | str]:
    return {name: value for name, value in variant.items() if name not in NOT_IN_RULES}


def _answer(item: Measurement) -> str:
    return json.dumps([_fixed(item.variant), item.launch])


def _same(left: Measurement, right: Measurement) -> bool:
    return _answer(left) == _answer(right)


def _same_band(left: _Band, right: _Band) -> bool:
    return [(k, _answer(item)) for k, item in left] == [(k, _answer(item)) for k, item in right]


def toml(kernel: str, origin: str, table: Sequence[Row]) -> str:
    """The table as the text of a file."""
    lines = [f"[{kernel}]", f"origin = {_text(origin)}"]
    for row in table:
        lines += [
            "",
            f"[[{kernel}.rules]]",
            f"when = {_inline(row.when)}",
            f"n = [{row.n[0]}, {row.n[1]}]",
            f"k = [{row.k[0]}, {row.k[1]}]",
            f"variant = {_inline(row.variant)}",
            f"launch = {_inline(row.launch)}",
        ]
    return "\n".join(lines) + "\n"


def _inline(values: Mapping[str, int | str]) -> str:
    pairs = (
        f"{name} = {_text(value) if isinstance(value, str) else value}"
        for name, value in values.items()
    )
    return "{" + ", ".join(pairs) + "}"


def _text(value: str) -> str:
    # A JSON string is a TOML string, but for DEL, which TOML wants escaped.
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
