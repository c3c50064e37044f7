"""Rules: which variant of a kernel a call gets, and how it is launched.

A build writes them into the manifest, from tables that were measured. Those of one kernel and one
architecture are tried in their order, and the first that fits counts.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated

from .arch import Arch, ArchName
from .declaration import Declaration, Name, Variant, variant_name
from .schema import Range

# The greatest size that a rule knows.
MAX_SIZE = 2**31 - 1

Count = Annotated[int, Range(0, MAX_SIZE)]
Variants = Mapping[tuple[str, str], Sequence[Variant]]


@dataclass(frozen=True)
class Rule:
    """One rule.

    `when` are values that a call must have exactly; one that is a choice of the kernel too has the
    value that it has in the variant. `sizes` are inclusive ranges of run-time integers. `variant`
    has values for some of the choices: the call itself decides the others, such as the dtype.
    `launch` says how the variant is launched, in words that the kernel's own launcher knows.
    """

    kernel: Name
    arch: ArchName
    when: dict[Name, Count]
    sizes: dict[Name, tuple[Count, Count]]
    variant: Variant
    launch: dict[Name, Count]

    def fits(self, when: Mapping[str, int], sizes: Mapping[str, int]) -> bool:
        """Whether a call with these values gets this rule, if no rule before does."""
        return all(when.get(name) == value for name, value in self.when.items()) and all(
            name in sizes and low <= sizes[name] <= high for name, (low, high) in self.sizes.items()
        )


def first_match(
    rules: Iterable[Rule], when: Mapping[str, int], sizes: Mapping[str, int]
) -> Rule | None:
    """The first of `rules` that fits a call.

    Among a manifest's rules for one kernel and architecture there is one for every call whose
    `when` some rule has, and whose sizes are from 1 to MAX_SIZE.
    """
    return next((rule for rule in rules if rule.fits(when, sizes)), None)


def rules_problem(
    rules: Sequence[Rule],
    declared: Mapping[str, Declaration],
    archs: Sequence[str],
    variants: Variants,
) -> str | None:
    """What is wrong with a manifest's rules and where, such as `rules[3]: ...`; None if nothing.

    `archs` are the selected ones, and `variants` what was built, by kernel and architecture.
    """
    return next(_problems(rules, declared, archs, variants), None)


def _problems(
    rules: Sequence[Rule],
    declared: Mapping[str, Declaration],
    archs: Sequence[str],
    variants: Variants,
) -> Iterator[str]:
    """Problems, of which only the first is to be relied on."""
    groups: dict[tuple[str, str], list[int]] = {}
    for index, rule in enumerate(rules):
        if rule.kernel not in declared:
            yield f"rules[{index}]: kernel {rule.kernel!r} not declared"
        if rule.arch not in archs:
            yield f"rules[{index}]: arch {rule.arch} not in selection"
        for problem in _own_problems(rule, declared[rule.kernel]):
            yield f"rules[{index}]: {problem}"
        groups.setdefault((rule.kernel, rule.arch), []).append(index)
    ordered = [i for group in sorted(groups, key=_group_order) for i in groups[group]]
    if ordered != list(range(len(rules))):
        yield "rules: not in order"
    yield from _unlike(rules)
    for group, indices in groups.items():
        yield from _unbuilt(rules, indices, variants.get(group, ()))
        yield from _uncovered(rules, indices)


def _group_order(group: tuple[str, str]) -> tuple[str, Arch]:
    return group[0], Arch.parse(group[1])


def _own_problems(rule: Rule, declaration: Declaration) -> Iterator[str]:
    integers = {p.name for p in declaration.parameters if p.kind in ("i32", "i64")}
    for name, (low, high) in rule.sizes.items():
        if name not in integers:
            yield f"size {name!r} is no integer parameter of {rule.kernel}"
        if low > high:
            yield f"size {name!r} is from {low} to {high}"
    if list(rule.variant) != [name for name in declaration.choices if name in rule.variant]:
        yield (
            f"variant has choices {list(rule.variant)}, not some of {list(declaration.choices)} "
            "in their order"
        )
    for name, value in rule.when.items():
        if name in declaration.choices and rule.variant.get(name) != value:
            yield f"{name!r} is {value} in when, but not in variant"


def _unlike(rules: Sequence[Rule]) -> Iterator[str]:
    """All rules of a kernel speak of the same things, so that they can be compared."""
    firsts: dict[str, Rule] = {}
    for index, rule in enumerate(rules):
        first = firsts.setdefault(rule.kernel, rule)
        for field in ("when", "sizes", "variant", "launch"):
            own, others = list(getattr(rule, field)), list(getattr(first, field))
            if own != others:
                yield f"rules[{index}]: {field} names {own}, other rules of {rule.kernel} {others}"


def _unbuilt(
    rules: Sequence[Rule], indices: Sequence[int], variants: Sequence[Variant]
) -> Iterator[str]:
    """Each rule's variant must be built for everything that a call may decide."""
    fixed = rules[indices[0]].variant
    built: dict[tuple[object, ...], list[Variant]] = {}
    for variant in variants:
        rest = {name: value for name, value in variant.items() if name not in fixed}
        built.setdefault(tuple(variant[name] for name in fixed), []).append(rest)
    wanted: dict[str, Variant] = {}
    for index in indices:
        rule = rules[index]
        found = built.get(tuple(rule.variant.values()), [])
        if not found:
            yield f"rules[{index}]: no binary {_label(rule, rule.variant)}"
        wanted |= {variant_name(rest): rest for rest in found}
    for index in indices:
        rule = rules[index]
        found = {variant_name(rest) for rest in built[tuple(rule.variant.values())]}
        for name, rest in wanted.items():
            if name not in found:
                yield f"rules[{index}]: no binary {_label(rule, {**rest, **rule.variant})}"


def _label(rule: Rule, variant: Variant) -> str:
    return f"{rule.kernel}[{variant_name(variant)}] {rule.arch}"


def _uncovered(rules: Sequence[Rule], indices: Sequence[int]) -> Iterator[str]:
    """A call finds a rule whatever its sizes are, and each rule is found by some call."""
    cases: dict[tuple[int, ...], list[int]] = {}
    for index in indices:
        before = cases.setdefault(tuple(rules[index].when.values()), [])
        for earlier in before:
            if _within(rules[index], rules[earlier]):
                yield f"rules[{index}]: never used, since rules[{earlier}] takes all its sizes"
        before.append(index)
    for case in cases.values():
        if any(low > 1 or high < MAX_SIZE for low, high in rules[case[-1]].sizes.values()):
            yield (
                f"rules[{case[-1]}]: the last for its kernel, arch and when, but not for every "
                f"size from 1 to {MAX_SIZE}"
            )


def _within(rule: Rule, other: Rule) -> bool:
    pairs = zip(rule.sizes.values(), other.sizes.values(), strict=True)
    return all(
        other_low <= low and high <= other_high for (low, high), (other_low, other_high) in pairs
    )
