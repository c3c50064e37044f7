"""Reading many values of one type at a time, which takes a fraction of reading them one by one.

A column is the values that one field has in all the objects of a list. It is either taken as a
whole, by exactly the rules in `schema`, or not at all: then `schema` finds out what is wrong.
"""

from __future__ import annotations

import dataclasses
import functools
import re
import types
import typing
from collections.abc import Callable, Iterable, Sequence
from itertools import chain, islice
from typing import Any, Literal

from .record import record

# Takes plain data, returns a value for each; None where some are not as they must be.
Column = Callable[[Sequence[Any]], Sequence[Any] | None]


@record
class Range:
    """Inclusive bounds of an integer."""

    low: int
    high: int


class Match:
    """A pattern that the whole of a string must match."""

    def __init__(self, pattern: str) -> None:
        """Compile the pattern once, when the type is written."""
        self.pattern = re.compile(pattern)


@functools.cache
def field_types(kind: Any) -> dict[str, Any]:
    """The types of a dataclass's fields, by name."""
    found = {field.name: field.type for field in dataclasses.fields(kind)}
    if any(isinstance(item, str) for item in found.values()):
        hints = typing.get_type_hints(kind, include_extras=True)
        return {name: hints[name] for name in found}
    return found


def base_of(kind: Any) -> type:
    """The type that plain data has for a value of this type."""
    if dataclasses.is_dataclass(kind):
        return dict
    origin = typing.get_origin(kind)
    if origin is typing.Annotated:
        return base_of(typing.get_args(kind)[0])
    return list if origin is tuple else origin or kind


@functools.cache
def column(kind: Any) -> Column:
    """The column of a type, built once."""
    if dataclasses.is_dataclass(kind):
        return _objects(kind)
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin is typing.Annotated:
        return _ruled(*arguments)
    if origin is Literal:
        return _literals(arguments)
    if origin in (typing.Union, types.UnionType):
        return _mixed({base_of(member): column(member) for member in reversed(arguments)})
    if origin is tuple:
        return _lists(arguments[0]) if arguments[-1] is ... else _rows(arguments)
    if origin is dict:
        return _tables(*arguments)
    return _plain(kind)


def _of(kind: type) -> Callable[[Iterable[Any]], bool]:
    """Whether values are all of this very type: a bool is no int."""
    only = {kind}
    return lambda data: only.issuperset(map(type, data))


def _plain(kind: Any) -> Column:
    fits = _of(kind)
    return lambda data: data if fits(data) else None


def _ruled(kind: Any, rule: Range | Match) -> Column:
    fits = _of(kind)
    if isinstance(rule, Range):
        low, high = rule.low, rule.high

        def integers(data: Sequence[Any]) -> Sequence[Any] | None:
            return data if fits(data) and low <= min(data) and max(data) <= high else None

        return lambda data: integers(data) if data else data
    matches = rule.pattern.fullmatch
    return lambda data: data if fits(data) and all(map(matches, set(data))) else None


def _literals(values: tuple[Any, ...]) -> Column:
    kinds, pairs = set(map(type, values)), {(type(value), value) for value in values}

    def take(data: Sequence[Any]) -> Sequence[Any] | None:
        fits = kinds.issuperset(map(type, data)) and pairs.issuperset(
            zip(map(type, data), data, strict=True)
        )
        return data if fits else None

    return take


def _mixed(members: dict[type, Column]) -> Column:
    """A union: the data's own type picks the member."""

    def take(data: Sequence[Any]) -> Sequence[Any] | None:
        kinds = set(map(type, data))
        if not kinds <= members.keys():
            return None
        if len(kinds) == 1:
            return members[kinds.pop()](data)
        plain = kinds.isdisjoint((dict, list))
        # True equals 1.
        some = data if not plain or bool in kinds else set(data)
        found = {}
        for kind in kinds:
            values = members[kind]([item for item in some if type(item) is kind])
            if values is None:
                return None
            found[kind] = iter(values)
        return data if plain else [next(found[type(item)]) for item in data]

    return take


def _lists(kind: Any) -> Column:
    fits, items = _of(list), column(kind)

    def take(data: Sequence[Any]) -> Sequence[Any] | None:
        if not fits(data):
            return None
        values = items(list(chain.from_iterable(data)))
        if values is None:
            return None
        rest = iter(values)
        return [tuple(islice(rest, len(item))) for item in data]

    return take


def _rows(kinds: tuple[Any, ...]) -> Column:
    fits, columns = _of(list), [column(kind) for kind in kinds]

    def take(data: Sequence[Any]) -> Sequence[Any] | None:
        if not fits(data) or not {len(columns)}.issuperset(map(len, data)):
            return None
        results = []
        for take_part, part in zip(columns, zip(*data, strict=True), strict=False):  # as below
            values = take_part(part)
            if values is None:
                return None
            results.append(values)
        return list(zip(*results, strict=True))

    return take


def _tables(key_kind: Any, kind: Any) -> Column:
    fits, names, items = _of(dict), column(key_kind), column(kind)

    def take(data: Sequence[Any]) -> Sequence[Any] | None:
        if not fits(data) or names(list(set(chain.from_iterable(data)))) is None:
            return None
        flat = list(chain.from_iterable(map(dict.values, data)))
        values = items(flat)
        if values is None:
            return None
        if values is flat:
            return [item.copy() for item in data]
        rest = iter(values)
        return [dict(zip(item, rest, strict=False)) for item in data]

    return take


def _objects(kind: Any) -> Column:
    kinds = field_types(kind)
    names, columns = tuple(kinds), [column(item) for item in kinds.values()]
    fits = _of(dict)
    check = getattr(kind, "__post_init__", None)

    def take(data: Sequence[Any]) -> Sequence[Any] | None:
        if not fits(data) or not {names}.issuperset(map(tuple, data)):
            return None
        changed: list[tuple[str, Sequence[Any]]] = []
        parts = zip(*map(dict.values, data), strict=True)
        for name, take_part, part in zip(names, columns, parts, strict=False):  # or none: no data
            values = take_part(part)
            if values is None:
                return None
            if values is not part:
                changed.append((name, values))
        # What `kind(...)` does, but that sets the fields of a frozen class one slow call each.
        result = [object.__new__(kind) for _ in data]
        for value, fields in zip(result, data, strict=True):
            value.__dict__.update(fields)
        for name, values in changed:
            for value, item in zip(result, values, strict=True):
                value.__dict__[name] = item
        if check is not None:
            for value in result:
                check(value)
        return result

    return take
