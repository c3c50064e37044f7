from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from artifact_sets import rules_for
from hypothesis import given
from hypothesis import strategies as st

from sonata_aot.artifacts import Budget, Declaration, Parameter, Rule, first_match
from sonata_aot.artifacts.declaration import Variant, product
from sonata_aot.artifacts.rules import MAX_SIZE, rules_problem

EVERY = (1, MAX_SIZE)


def declaration(name: str) -> Declaration:
    return Declaration(
        name=name,
        parameters=(
            Parameter("x", "pointer", element="dtype", align=16),
            Parameter("n", "i32"),
            Parameter("k", "i64"),
            Parameter("scale", "f32"),
        ),
        choices=("dtype", "m", "rows"),
        selectors=("dtype", "m"),
        block=("32", "1", "1"),
        grid=("n", "1", "1"),
        budget=Budget(),
    )


DECLARED = {name: declaration(name) for name in ("gemv", "scan")}
ARCHS = ("sm90", "sm100")
GRID = product(dtype=["bf16", "f16"], m=[1, 2], rows=[2, 4])
VARIANTS: dict[tuple[str, str], list[Variant]] = {
    (name, arch): list(GRID) for name in DECLARED for arch in ARCHS
}
RULE = Rule(
    kernel="gemv",
    arch="sm90",
    when={"m": 1, "constant": 0},
    sizes={"n": EVERY, "k": EVERY},
    variant={"m": 1, "rows": 2},
    launch={"blocks_per_sm": 0},
)


def rule(n: tuple[int, int] = EVERY, k: tuple[int, int] = EVERY, **changes: Any) -> Rule:
    return dataclasses.replace(RULE, sizes={"n": n, "k": k}, **changes)


def problem(*rules: Rule, variants: Any = VARIANTS) -> str | None:
    return rules_problem(rules, DECLARED, ARCHS, variants)


SOUND = (
    rule(n=(1, 4096), variant={"m": 1, "rows": 4}),
    rule(n=(1, 8192), k=(2048, 4096)),
    rule(),
    rule(when={"m": 1, "constant": 1}),
    rule(when={"m": 2, "constant": 0}, variant={"m": 2, "rows": 2}),
)


def test_sound_rules_are_accepted() -> None:
    assert problem() is None
    assert problem(*SOUND) is None
    assert problem(*SOUND, *(dataclasses.replace(r, arch="sm100") for r in SOUND)) is None
    assert problem(*SOUND, *(dataclasses.replace(r, kernel="scan") for r in SOUND)) is None


def test_rules_without_sizes_or_conditions_are_accepted() -> None:
    assert problem(dataclasses.replace(RULE, when={}, sizes={})) is None


UNSOUND: dict[str, tuple[tuple[Rule, ...], str]] = {
    "kernel": ((rule(kernel="even"),), "rules[0]: kernel 'even' not declared"),
    "arch": ((RULE, rule(arch="sm86")), "rules[1]: arch sm86 not in selection"),
    "pointer": (
        (dataclasses.replace(RULE, sizes={"x": EVERY}),),
        "rules[0]: size 'x' is no integer parameter of gemv",
    ),
    "float": (
        (dataclasses.replace(RULE, sizes={"scale": EVERY}),),
        "rules[0]: size 'scale' is no integer parameter of gemv",
    ),
    "choice as a size": (
        (dataclasses.replace(RULE, sizes={"m": EVERY}),),
        "rules[0]: size 'm' is no integer parameter of gemv",
    ),
    "empty range": ((rule(n=(9, 8)), RULE), "rules[0]: size 'n' is from 9 to 8"),
    "unknown choice": (
        (rule(variant={"m": 1, "warps": 2}),),
        "rules[0]: variant has choices ['m', 'warps'], not some of ['dtype', 'm', 'rows'] "
        "in their order",
    ),
    "order of choices": (
        (rule(variant={"rows": 2, "m": 1}),),
        "rules[0]: variant has choices ['rows', 'm'], not some of ['dtype', 'm', 'rows'] "
        "in their order",
    ),
    "another m": (
        (rule(variant={"m": 2, "rows": 2}),),
        "rules[0]: 'm' is 1 in when, but 2 in variant",
    ),
    "no m": ((rule(variant={"rows": 2}),), "rules[0]: 'm' is in when, but not in variant"),
    "archs not in order": ((rule(arch="sm100"), RULE), "rules: not in order"),
    "kernels not in order": ((rule(kernel="scan"), RULE), "rules: not in order"),
    "apart": (
        (rule(n=(1, 5)), rule(arch="sm100"), RULE),
        "rules: not in order",
    ),
    "other conditions": (
        (RULE, rule(when={"m": 1})),
        "rules[1]: when names ['m'], other rules of gemv ['m', 'constant']",
    ),
    "other sizes": (
        (rule(n=(1, 5)), dataclasses.replace(RULE, sizes={"n": EVERY})),
        "rules[1]: sizes names ['n'], other rules of gemv ['n', 'k']",
    ),
    "other sizes on another arch": (
        (RULE, dataclasses.replace(RULE, arch="sm100", sizes={"n": EVERY})),
        "rules[1]: sizes names ['n'], other rules of gemv ['n', 'k']",
    ),
    "sizes in another order": (
        (rule(n=(1, 5)), dataclasses.replace(RULE, sizes={"k": EVERY, "n": EVERY})),
        "rules[1]: sizes names ['k', 'n'], other rules of gemv ['n', 'k']",
    ),
    "other choices": (
        (rule(n=(1, 5)), rule(variant={"m": 1})),
        "rules[1]: variant names ['m'], other rules of gemv ['m', 'rows']",
    ),
    "other launch values": (
        (rule(n=(1, 5)), rule(launch={})),
        "rules[1]: launch names [], other rules of gemv ['blocks_per_sm']",
    ),
    "not built": (
        (rule(variant={"m": 1, "rows": 3}),),
        "rules[0]: no binary gemv[m=1,rows=3] sm90",
    ),
    "a number as text": (
        (rule(variant={"m": 1, "rows": "2"}),),
        "rules[0]: no binary gemv[m=1,rows=2] sm90",
    ),
    "twice": ((RULE, RULE), "rules[1]: never used, since rules[0] takes all its sizes"),
    "after a wider one": (
        (rule(n=(5, 9)), rule(n=(6, 9), k=(2, 3)), RULE),
        "rules[1]: never used, since rules[0] takes all its sizes",
    ),
    "after the last": (
        (RULE, rule(n=(6, 9))),
        "rules[1]: never used, since rules[0] takes all its sizes",
    ),
    "n from 2": (
        (rule(n=(2, MAX_SIZE)),),
        "rules[0]: the last for its kernel, arch and when, but not for every size from 1 to "
        "2147483647",
    ),
    "k short of the end": (
        (rule(n=(1, 5)), rule(k=(0, MAX_SIZE - 1))),
        "rules[1]: the last for its kernel, arch and when, but not for every size from 1 to "
        "2147483647",
    ),
    "no last for one condition": (
        (rule(n=(1, 5)), rule(when={"m": 1, "constant": 1})),
        "rules[0]: the last for its kernel, arch and when, but not for every size from 1 to "
        "2147483647",
    ),
    "no last on one arch": (
        (RULE, rule(arch="sm100", k=(2, MAX_SIZE))),
        "rules[1]: the last for its kernel, arch and when, but not for every size from 1 to "
        "2147483647",
    ),
}


@pytest.mark.parametrize(("rules", "found"), UNSOUND.values(), ids=UNSOUND)
def test_unsound_rules_are_refused(rules: tuple[Rule, ...], found: str) -> None:
    assert problem(*rules) == found


def test_a_rule_is_built_in_every_dtype_that_another_has() -> None:
    few = [v for v in GRID if (v["dtype"], v["rows"]) != ("f16", 4)]
    variants = {**VARIANTS, ("gemv", "sm90"): few}
    four = {"m": 1, "rows": 4}
    found = "rules[0]: no binary gemv[dtype=f16,m=1,rows=4] sm90"
    assert problem(rule(n=(1, 5), variant=four), RULE, variants=variants) == found
    assert problem(rule(variant=four), variants=variants) is None
    other = (rule(variant=four), rule(arch="sm100"))
    assert problem(*other, variants=variants) is None


def test_another_archs_binaries_do_not_count() -> None:
    variants = {key: built for key, built in VARIANTS.items() if key != ("gemv", "sm90")}
    assert problem(RULE, variants=variants) == "rules[0]: no binary gemv[m=1,rows=2] sm90"


def test_the_first_rule_that_fits_counts() -> None:
    zero = {"m": 1, "constant": 0}
    assert first_match(SOUND, zero, {"n": 1, "k": 1}) is SOUND[0]
    assert first_match(SOUND, zero, {"n": 4096, "k": 3000}) is SOUND[0]
    assert first_match(SOUND, zero, {"n": 4097, "k": 2048}) is SOUND[1]
    assert first_match(SOUND, zero, {"n": 8192, "k": 4096}) is SOUND[1]
    assert first_match(SOUND, zero, {"n": 8192, "k": 2047}) is SOUND[2]
    assert first_match(SOUND, zero, {"n": 8192, "k": 4097}) is SOUND[2]
    assert first_match(SOUND, zero, {"n": MAX_SIZE, "k": MAX_SIZE}) is SOUND[2]
    assert first_match(SOUND, {"m": 1, "constant": 1}, {"n": 1, "k": 1}) is SOUND[3]
    assert first_match(SOUND, {"m": 2, "constant": 0}, {"n": 1, "k": 1}) is SOUND[4]


def test_more_may_be_known_of_a_call_than_rules_ask() -> None:
    assert first_match([RULE], {**RULE.when, "x": 5}, {"n": 1, "k": 1, "rows": 2}) is RULE


@pytest.mark.parametrize(
    ("when", "sizes"),
    [
        ({"m": 2, "constant": 1}, {"n": 1, "k": 1}),
        ({"m": 1}, {"n": 1, "k": 1}),
        ({}, {"n": 1, "k": 1}),
        ({"m": 1, "constant": 0}, {"n": 1}),
        ({"m": 1, "constant": 0}, {"n": 0, "k": 1}),
        ({"m": 1, "constant": 0}, {"n": 1, "k": MAX_SIZE + 1}),
    ],
)
def test_no_rule_fits(when: dict[str, int], sizes: dict[str, int]) -> None:
    assert first_match(SOUND, when, sizes) is None


_BOUNDS = st.sampled_from([0, 1, 2, 5, MAX_SIZE - 1, MAX_SIZE])
_RANGES = st.tuples(_BOUNDS, _BOUNDS)
_RULES = st.builds(
    lambda n, k, m, rows: rule(n, k, when={"m": m, "constant": 0}, variant={"m": m, "rows": rows}),
    _RANGES | st.just(EVERY),
    _RANGES | st.just(EVERY),
    st.sampled_from([1, 2]),
    st.sampled_from([2, 4]),
)
_SIZES = st.sampled_from([1, 2, 3, 5, 6, 10**6, MAX_SIZE - 1, MAX_SIZE])


@given(st.lists(_RULES, min_size=1, max_size=4), _SIZES, _SIZES)
def test_accepted_rules_leave_no_call_without_one(rules: list[Rule], n: int, k: int) -> None:
    if problem(*rules) is not None:
        rules = [RULE]
    for when in (r.when for r in rules):
        found = first_match(rules, when, {"n": n, "k": k})
        assert found is not None
        assert found.when == when


@given(st.lists(_RULES, min_size=1, max_size=4))
def test_rules_are_judged_whatever_they_are(rules: list[Rule]) -> None:
    found = problem(*rules)
    assert found is None or found.startswith("rules[")


def test_the_rules_of_the_other_tests_are_sound() -> None:
    rules = rules_for("sm86")
    assert {r.variant["slots"] for r in rules} == {16, 48}
    assert first_match(rules, {"wide": 0}, {"first": 100, "index": 0}) is rules[0]
