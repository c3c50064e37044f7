"""Selection tables from made-up times: every call gets a rule, every shape a quick variant."""

from __future__ import annotations

import itertools
import tomllib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sonata_aot.aot.measure import table
from sonata_aot.aot.measure.table import MAX_SIZE, Measurement, Row
from sonata_aot.artifacts.errors import ArgumentError, SonataError

LAUNCHES = ({"blocks_per_sm": 0, "ahead_kb": 0}, {"blocks_per_sm": 2, "ahead_kb": 8192})


def measured(
    n: int, k: int, name: int, us: float, *, m: int = 1, constant: int = 0, way: int = 0,
    full: bool = True,
) -> Measurement:  # fmt: skip
    variant: dict[str, int | str] = {"dtype": "bf16", "m": m, "side": "a", "rows": name}
    return Measurement(n, k, m, constant, variant, dict(LAUNCHES[way]), us, full, "0" * 64)


sizes = st.integers(1, MAX_SIZE)
times = st.floats(1.0, 2.0)


@st.composite
def measurements(draw: st.DrawFn) -> list[Measurement]:
    shapes = draw(st.lists(st.tuples(sizes, sizes), min_size=1, max_size=6, unique=True))
    groups = draw(
        st.lists(
            st.tuples(st.sampled_from((1, 2)), st.sampled_from((0, 1))),
            min_size=1,
            unique=True,
        )
    )
    names = range(draw(st.integers(1, 5)))
    return [
        measured(n, k, name, draw(times), m=m, constant=constant, way=way)
        for m, constant in groups
        for n, k in shapes
        for name in names
        for way in (0, 1)
    ]


def lookup(rules: list[Row], m: int, constant: int, n: int, k: int) -> Row:
    return next(row for row in rules if row.fits({"m": m, "constant": constant}, n, k))


@given(measurements(), st.floats(0, 0.2), st.lists(st.tuples(sizes, sizes), max_size=8))
def test_every_call_gets_a_rule_and_every_shape_a_quick_variant(
    items: list[Measurement], tolerance: float, others: list[tuple[int, int]]
) -> None:
    choices = table.choose(items, tolerance=tolerance)
    rules = table.rows(choices)
    for m, constant in {(item.m, item.constant) for item in items}:
        here = [item for item in items if (item.m, item.constant) == (m, constant)]
        for n, k in others:
            lookup(rules, m, constant, n, k)
        for n, k in {item.shape for item in here}:
            row = lookup(rules, m, constant, n, k)
            cell = [item for item in here if item.shape == (n, k)]
            (got,) = [
                item
                for item in cell
                if item.launch == row.launch and item.variant["rows"] == row.variant["rows"]
            ]
            assert got.us <= min(item.us for item in cell) * (1 + tolerance) * (1 + 1e-9)
        last = [row for row in rules if row.when == {"m": m, "constant": constant}][-1]
        assert (last.n, last.k) == ((1, MAX_SIZE), (1, MAX_SIZE))


@given(measurements(), st.floats(0, 0.2))
def test_a_fallthrough_reaches_the_nearest_shape_of_its_own_band(
    items: list[Measurement], tolerance: float
) -> None:
    """The last rule stands for boxes that were left out, and so changes no answer."""
    choices = table.choose(items, tolerance=tolerance)
    rules = table.rows(choices)
    for (m, constant), cells in choices.items():
        ns = sorted({n for n, _ in cells})
        for (low, high), n in zip(table.intervals(ns), ns, strict=True):
            ks = sorted(k for other, k in cells if other == n)
            for (left, right), k in zip(table.intervals(ks), ks, strict=True):
                for corner in itertools.product((low, high), (left, right)):
                    row = lookup(rules, m, constant, *corner)
                    assert row.launch == cells[n, k].launch
                    assert row.variant["rows"] == cells[n, k].variant["rows"]


@given(measurements())
def test_no_rule_is_dead(items: list[Measurement]) -> None:
    rules = table.rows(table.choose(items, tolerance=0.01))
    for index, row in enumerate(rules):
        for before in rules[:index]:
            covers = (
                before.when == row.when
                and before.n[0] <= row.n[0] <= row.n[1] <= before.n[1]
                and before.k[0] <= row.k[0] <= row.k[1] <= before.k[1]
            )
            assert not covers


@given(
    st.dictionaries(
        st.integers(0, 8),
        st.dictionaries(st.sampled_from("abcdef"), st.floats(1.0, 1.1), min_size=1),
        min_size=1,
        max_size=8,
    )
)
def test_a_cover_serves_every_cell_with_no_name_too_many(
    cells: dict[int, dict[str, float]],
) -> None:
    slower = {
        cell: {name: time / min(names.values()) for name, time in names.items()}
        for cell, names in cells.items()
    }
    chosen = table.cover(slower, 1.01)

    def serves(names: tuple[str, ...]) -> bool:
        return all(
            any(ratios.get(name, 9.0) <= 1.01 for name in names) for ratios in slower.values()
        )

    assert serves(tuple(chosen))
    assert not any(serves(tuple(name for name in chosen if name != without)) for without in chosen)
    fewest = next(
        size for size in range(1, 7) if any(map(serves, itertools.combinations("abcdef", size)))
    )
    assert len(chosen) <= fewest + 1


def test_a_name_that_later_ones_make_needless_goes() -> None:
    able = {"a": (1, 2, 3, 4), "b": (1, 2, 5), "c": (3, 4, 6)}
    slower = {
        cell: {name: 1.0 if cell in cells else 2.0 for name, cells in able.items()}
        for cell in range(1, 7)
    }
    assert sorted(table.cover(slower, 1.01)) == ["b", "c"]


def test_one_variant_that_is_nearly_best_everywhere_replaces_three() -> None:
    items = [
        *(measured(100, 8, 1, 1.000), measured(100, 8, 2, 2.0), measured(100, 8, 3, 1.009)),
        *(measured(900, 8, 1, 2.0), measured(900, 8, 2, 1.000), measured(900, 8, 3, 1.009)),
    ]
    names = {row.variant["rows"] for row in table.rows(table.choose(items, tolerance=0.01))}
    assert names == {3}
    names = {row.variant["rows"] for row in table.rows(table.choose(items, tolerance=0.001))}
    assert names == {1, 2}


def test_within_the_chosen_set_a_cell_gets_its_fastest() -> None:
    """Variant 1 is within 1% of the best at 900 too, but variant 2 is there anyway."""
    items = [
        *(measured(100, 8, 1, 1.0), measured(100, 8, 2, 2.0)),
        *(measured(900, 8, 1, 1.005), measured(900, 8, 2, 1.0)),
        *(measured(9000, 8, 1, 2.0), measured(9000, 8, 2, 1.0)),
    ]
    chosen = table.choose(items, tolerance=0.01)[1, 0]
    assert {shape: item.variant["rows"] for shape, item in chosen.items()} == {
        (100, 8): 1,
        (900, 8): 2,
        (9000, 8): 2,
    }


def test_a_cell_gets_what_is_to_be_used_there_and_the_others_their_fastest() -> None:
    items = [
        *(measured(n, 8, 1, 1.0) for n in (100, 900)),
        *(measured(n, 8, 2, 3.0, way=way) for n in (100, 900) for way in (0, 1)),
        *(measured(100, 8, 2, 2.0, way=1), measured(100, 8, 3, 1.0, full=False)),
    ]
    used = [{"n": 100, "k": 8, "m": 1, "constant": 0, "rows": 2, "blocks_per_sm": 2}]
    cells = table.choose(items, tolerance=0.0, used=used)[1, 0]
    assert (cells[100, 8].us, cells[100, 8].launch) == (2.0, LAUNCHES[1])
    assert cells[900, 8].variant["rows"] == 1
    rules = table.rows({(1, 0): cells})
    assert lookup(rules, 1, 0, 100, 8).variant["rows"] == 2
    for wrong in ({"n": 100, "rows": 4}, {"n": 100, "rows": 3}, {"rows": 2}, {"m": 2, "rows": 1}):
        with pytest.raises(ArgumentError, match="all of one shape"):
            table.choose(items, tolerance=0.0, used=[wrong])


def test_the_launch_is_the_fastest_of_each_cell() -> None:
    items = [
        *(measured(100, 8, 1, 1.0, way=0), measured(100, 8, 1, 1.001, way=1)),
        *(measured(900, 8, 1, 1.001, way=0), measured(900, 8, 1, 1.0, way=1)),
    ]
    rules = table.rows(table.choose(items, tolerance=0.01))
    assert lookup(rules, 1, 0, 100, 8).launch == LAUNCHES[0]
    assert lookup(rules, 1, 0, 900, 8).launch == LAUNCHES[1]


def test_where_there_are_full_measurements_a_quick_one_does_not_count() -> None:
    items = [measured(9, 8, 1, 1.0, full=False), measured(9, 8, 2, 1.5), measured(9, 8, 3, 1.6)]
    (row,) = table.rows(table.choose(items, tolerance=0.01))
    assert row.variant["rows"] == 2
    (row,) = table.rows(table.choose(items[:1], tolerance=0.01))
    assert row.variant["rows"] == 1


def test_a_score_decides_and_an_infinite_one_excludes() -> None:
    items = [measured(9, 8, 1, 1.0), measured(9, 8, 2, 2.0), measured(9, 8, 3, 3.0)]
    scores = {1: float("inf"), 2: 9.0, 3: 8.0}
    chosen = table.choose(items, score=lambda i: scores[int(i.variant["rows"])], tolerance=0.0)
    assert chosen[1, 0][9, 8].variant["rows"] == 3
    with pytest.raises(SonataError, match="no variant is left"):
        table.choose(items, score=lambda i: float("inf"), tolerance=0.0)


def test_finalists_are_the_fastest_and_near_variants_in_their_best_launch() -> None:
    items = [
        *(measured(9, 8, 1, 1.00), measured(9, 8, 1, 1.01, way=1)),
        *(measured(9, 8, 2, 1.04), measured(9, 8, 2, 1.02, way=1)),
        *(measured(9, 8, 3, 1.05), measured(9, 8, 4, 1.06), measured(9, 8, 5, float("inf"))),
    ]
    found = table.finalists(items, table.measured_us, most=2, within=1.05)
    assert [(item.variant["rows"], item.us) for item in found] == [
        *((1, 1.00), (1, 1.01), (2, 1.02), (3, 1.05)),
    ]


def test_intervals_meet_halfway_by_ratio_at_round_numbers() -> None:
    assert table.intervals([1024, 256, 2048, 2048]) == [
        *((1, 512), (513, 1408), (1409, MAX_SIZE)),
    ]
    assert table.intervals([5]) == [(1, MAX_SIZE)]
    assert table.intervals([14336, 16384]) == [(1, 15360), (15361, MAX_SIZE)]


@given(st.sets(sizes, min_size=1, max_size=20))
def test_intervals_cover_all_sizes_and_hold_one_value_each(values: set[int]) -> None:
    found = table.intervals(values)
    assert (found[0][0], found[-1][1]) == (1, MAX_SIZE)
    for (_, high), (low, _) in itertools.pairwise(found):
        assert low == high + 1
    for (low, high), value in zip(found, sorted(values), strict=True):
        assert low <= value <= high


def test_neighbours_with_one_answer_are_one_rule() -> None:
    items = [
        measured(n, k, {(100, 8): 1, (100, 64): 1, (900, 8): 1}.get((n, k), 2), 1.0)
        for n, k in [(100, 8), (100, 64), (900, 8), (9000, 8), (90000, 8), (90000, 512)]
    ]
    rules = table.rows(table.choose(items, tolerance=0.0))
    assert len(rules) == 2
    assert rules[0].k == (1, MAX_SIZE)


text = st.text(st.characters(exclude_categories=["Cs"]), max_size=40)


@given(measurements(), text)
def test_the_file_says_what_the_rules_say(items: list[Measurement], origin: str) -> None:
    rules = table.rows(table.choose(items, tolerance=0.01))
    read = tomllib.loads(table.toml("gemv", origin, rules))
    assert read["gemv"]["origin"] == origin
    assert list(read) == ["gemv"]
    assert [
        Row(r["when"], tuple(r["n"]), tuple(r["k"]), r["variant"], r["launch"])
        for r in read["gemv"]["rules"]
    ] == rules
    assert not {"m", "dtype"} & {name for row in rules for name in row.variant}


@pytest.mark.parametrize("origin", ["", "\x7f", "\x00\n\t", 'say "x" \\ twice', "ÿ \U0001f600"])
def test_any_origin_can_be_written(origin: str) -> None:
    assert tomllib.loads(table.toml("gemv", origin, []))["gemv"]["origin"] == origin
