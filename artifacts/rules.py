"""Rules: which variant of a kernel a call gets, and how it is launched.

A build writes them into the manifest, from tables that were measured. Those of one kernel and one
architecture are tried in their order, and the first that fits counts.
"""

import itertools
import operator
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Annotated

from .arch import Arch, ArchName
from .declaration import ChoiceValue, Declaration, Name, Variant, variant_name
from .record import record
from .schema import Range

# The greatest size that a rule knows.
MAX_SIZE = 2**31 - 1

Count = Annotated[int, Range(0, MAX_SIZE)]
Values = tuple[ChoiceValue, ...]
Variants = Mapping[tuple[str, str], Sequence[Variant]]


@record
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
    firsts: dict[str, int] = {}
    for index, rule in enumerate(rules):
        if rule.kernel not in declared:
            yield f"rules[{index}]: kernel {rule.kernel!r} not declared"
        if rule.arch not in archs:
            yield f"rules[{index}]: arch {rule.arch} not in selection"
        groups.setdefault((rule.kernel, rule.arch), []).append(index)
        firsts.setdefault(rule.kernel, index)
    ordered = [i for group in sorted(groups, key=_group_order) for i in groups[group]]
    if ordered != list(range(len(rules))):
        yield "rules: not in order"
    for index in firsts.values():
        for problem in _name_problems(rules[index], declared[rules[index].kernel]):
            yield f"rules[{index}]: {problem}"
    for group, indices in groups.items():
        first = rules[firsts[group[0]]]
        names = _names(first)
        for index in indices:
            if _names(rules[index]) != names:
                yield f"rules[{index}]: {_other_names(rules[index], first)}"
            problem = _value_problem(rules[index])
            if problem is not None:
                yield f"rules[{index}]: {problem}"
        yield from _unbuilt(rules, indices, variants.get(group, ()))
        yield from _uncovered(rules, indices)


def _group_order(group: tuple[str, str]) -> tuple[str, Arch]:
    return group[0], Arch.parse(group[1])


def _name_problems(rule: Rule, declaration: Declaration) -> Iterator[str]:
    integers = {name for _, name in declaration.integers}
    for name in rule.sizes:
        if name not in integers:
            yield f"size {name!r} is no integer parameter of {rule.kernel}"
    if list(rule.variant) != [name for name in declaration.choices if name in rule.variant]:
        yield (
            f"variant has choices {list(rule.variant)}, not some of {list(declaration.choices)} "
            "in their order"
        )
    for name in rule.when:
        if name in declaration.choices and name not in rule.variant:
            yield f"{name!r} is in when, but not in variant"


def _names(rule: Rule) -> tuple[tuple[str, ...], ...]:
    return tuple(rule.when), tuple(rule.sizes), tuple(rule.variant), tuple(rule.launch)


def _other_names(rule: Rule, first: Rule) -> str:
    """How a rule's names differ from those of its kernel's first rule."""
    fields = ("when", "sizes", "variant", "launch")
    pairs = zip(fields, _names(rule), _names(first), strict=True)
    field, own, others = next(pair for pair in pairs if pair[1] != pair[2])
    return f"{field} names {list(own)}, other rules of {rule.kernel} {list(others)}"


def _value_problem(rule: Rule) -> str | None:
    for name, (low, high) in rule.sizes.items():
        if low > high:
            return f"size {name!r} is from {low} to {high}"
    for name, value in rule.when.items():
        if rule.variant.get(name, value) != value:
            return f"{name!r} is {value} in when, but {rule.variant[name]} in variant"
    return None


def _unbuilt(
    rules: Sequence[Rule], indices: Sequence[int], variants: Sequence[Variant]
) -> Iterator[str]:
    """Each rule's variant must be built for everything that a call may decide."""
    fixed = rules[indices[0]].variant
    built: dict[Values, set[Values]] = {}
    for variant in variants:
        key = tuple([variant[name] for name in fixed])
        rest = tuple([value for name, value in variant.items() if name not in fixed])
        built.setdefault(key, set()).add(rest)
    found = {index: built.get(tuple(rules[index].variant.values())) for index in indices}
    for index, rests in found.items():
        if rests is None:
            yield f"rules[{index}]: no binary {_label(rules[index], rules[index].variant)}"
    wanted = set().union(*(rests for rests in found.values() if rests is not None))
    for index, rests in found.items():
        if rests != wanted:
            rest = min(wanted.difference(rests or ()), key=str)
            names = [name for name in variants[0] if name not in fixed]
            every = {**dict(zip(names, rest, strict=True)), **rules[index].variant}
            ordered = {name: every[name] for name in variants[0]}
            yield f"rules[{index}]: no binary {_label(rules[index], ordered)}"


def _label(rule: Rule, variant: Variant) -> str:
    return f"{rule.kernel}[{variant_name(variant)}] {rule.arch}"


def _uncovered(rules: Sequence[Rule], indices: Sequence[int]) -> Iterator[str]:
    """A call finds a rule whatever its sizes are, and each rule is found by some call."""
    cases: dict[tuple[int, ...], list[tuple[int, tuple[int, ...]]]] = {}
    for index in indices:
        rule = rules[index]
        # The less each of these is, the more the rule takes.
        bounds = tuple([b for low, high in rule.sizes.values() for b in (low, -high)])
        before = cases.setdefault(tuple(rule.when.values()), [])
        for earlier, others in before:
            if others <= bounds and all(map(operator.le, others, bounds)):
                yield f"rules[{index}]: never used, since rules[{earlier}] takes all its sizes"
        before.append((index, bounds))
    for case in cases.values():
        index, bounds = case[-1]
        if any(bound > widest for bound, widest in zip(bounds, itertools.cycle((1, -MAX_SIZE)))):
            yield (
                f"rules[{index}]: the last for its kernel, arch and when, but not for every "
                f"size from 1 to {MAX_SIZE}"
            )
