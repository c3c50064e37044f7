"""Strict reading of plain data into dataclasses, and back.

Standard JSON parsers accept duplicate keys, NaN and any nesting; a file that travels between
machines must not have them. A field's type says what is accepted:

- `int`, `str`, `bool`, `None` and unions of them, never converted into one another;
- `Annotated[int, Range(low, high)]`, `Annotated[str, Match(pattern)]`, `Literal[...]`;
- `tuple[T, ...]`, `tuple[T, T, T]`, `dict[str, T]`, and dataclasses, whose keys must match exactly
  and stand in the order of the fields.

So data that is read is what `encode` would write: nobody needs to encode it again to compare.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import types
import typing
from collections.abc import Callable
from typing import Any, Literal, TypeVar

from .columns import Match, Range, base_of, column, field_types
from .errors import ManifestError

_REMEDY = "rebuild the artifacts with `sonata-aot build`"
# Without the search for circles, a quarter of the time: neither JSON nor dataclasses can have one.
_ENCODER = json.JSONEncoder(separators=(",", ":"), allow_nan=False, check_circular=False)
T = TypeVar("T")


def parse_json(data: bytes, where: str) -> Any:
    """Parse UTF-8 JSON, refusing duplicate keys, NaN, infinities, floats and absurd nesting.

    Raises:
        ManifestError: the bytes are not such a text; `where` names them in the message.
    """

    def refuse(value: str) -> Any:
        raise ValueError(f"the number {value[:40]} is not an integer")

    try:
        return json.loads(
            data.decode("utf-8"),
            object_pairs_hook=unique_keys,
            parse_constant=refuse,
            parse_float=refuse,
        )
    except RecursionError:
        raise ManifestError(f"{where}: nested too deep", remedy=_REMEDY) from None
    except ValueError as error:  # UnicodeDecodeError and JSONDecodeError are among these
        raise ManifestError(f"{where}: not valid JSON: {error}", remedy=_REMEDY) from None


def unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An object of JSON, for `json.loads`.

    Raises:
        ValueError: a key stands twice.
    """
    result = dict(pairs)
    if len(result) != len(pairs):
        seen: set[str] = set()
        twice = next(key for key, _ in pairs if key in seen or seen.add(key))
        raise ValueError(f"the key {twice[:40]!r} stands twice")
    return result


def canonical_json(data: Any) -> bytes:
    """The one byte string for `data`: its own key order, no spaces, ASCII.

    Keys are not sorted: order carries meaning (a variant lists its choices as declared), and
    whoever writes data here writes it in a fixed order.
    """
    return canonical_text(data).encode("ascii")


def canonical_text(data: Any) -> str:
    """`canonical_json` as text."""
    return _ENCODER.encode(data)


def digest(data: Any) -> str:
    """SHA-256 of the canonical form, in hex."""
    return hashlib.sha256(canonical_json(data)).hexdigest()


def decode(kind: type[T], data: Any, where: str) -> T:
    """Read `data` as `kind`.

    Raises:
        ManifestError: the first difference found, with its place (`where.field[3]`).
    """
    values = column(kind)([data])
    if values is not None:
        return values[0]
    try:
        return _reader(kind)(data)
    except _Wrong as wrong:
        place = "".join(reversed(wrong.way))
        raise ManifestError(f"{where}{place}: {wrong.problem}", remedy=_REMEDY) from None


def encode(value: Any) -> Any:
    """The plain data that `decode` reads back as `value`."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {
            field.name: encode(getattr(value, field.name)) for field in dataclasses.fields(value)
        }
    if isinstance(value, tuple):
        return [encode(item) for item in value]
    if isinstance(value, dict):
        return {key: encode(item) for key, item in value.items()}
    return value


class _Wrong(Exception):
    """What is wrong with a value; each container on the way out adds its part of the place.

    So a place is put into words only where there is something to say about it.
    """

    def __init__(self, problem: str) -> None:
        super().__init__(problem)
        self.problem = problem
        self.way: list[str] = []


def _unlike(expected: str, data: Any) -> _Wrong:
    shown = repr(data) if not isinstance(data, dict | list) else type(data).__name__
    shown = shown if len(shown) <= 60 else shown[:57] + "..."
    return _Wrong(f"expected {expected}, found {shown}")


# Takes plain data, returns the value or raises `_Wrong`.
Reader = Callable[[Any], Any]


@functools.cache
def _reader(kind: Any) -> Reader:
    """The reader of a type: it takes values one by one, and says which is wrong and why."""
    if dataclasses.is_dataclass(kind):
        return _dataclass_reader(kind)
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin is typing.Annotated:
        return _annotated_reader(*arguments)
    if origin is Literal:
        return _literal_reader(arguments)
    if origin in (typing.Union, types.UnionType):
        return _union_reader(arguments)
    if origin is tuple:
        return _list_reader(arguments[0]) if arguments[-1] is ... else _tuple_reader(arguments)
    if origin is dict:
        return _dict_reader(*arguments)
    return _plain_reader(kind)


def _plain_reader(kind: Any) -> Reader:
    expected = "null" if kind is type(None) else kind.__name__

    def read(data: Any) -> Any:
        # `type(...) is`, since a bool is an int to isinstance.
        if type(data) is not kind:
            raise _unlike(expected, data)
        return data

    return read


def _annotated_reader(kind: Any, rule: Range | Match) -> Reader:
    plain = _plain_reader(kind)
    if isinstance(rule, Range):
        low, high = rule.low, rule.high

        def read_integer(data: Any) -> Any:
            if type(data) is int and low <= data <= high:
                return data
            raise _unlike(f"an integer from {low} to {high}", plain(data))

        return read_integer
    matches = rule.pattern.fullmatch

    def read_text(data: Any) -> Any:
        if type(data) is str and matches(data) is not None:
            return data
        raise _unlike(f"text like {rule.pattern.pattern}", plain(data))

    return read_text


def _literal_reader(values: tuple[Any, ...]) -> Reader:
    def read(data: Any) -> Any:
        if not any(type(data) is type(value) and data == value for value in values):
            raise _unlike(" or ".join(map(repr, values)), data)
        return data

    return read


def _union_reader(members: tuple[Any, ...]) -> Reader:
    # A union here is "X or null" or "text or integer": the data's own type picks the member.
    readers = {base_of(member): _reader(member) for member in reversed(members)}
    bases = [base_of(member) for member in members]
    expected = " or ".join("null" if base is type(None) else base.__name__ for base in bases)

    def read(data: Any) -> Any:
        reader = readers.get(type(data))
        if reader is None:
            raise _unlike(expected, data)
        return reader(data)

    return read


def _list_reader(kind: Any) -> Reader:
    reader = _reader(kind)

    def read(data: Any) -> Any:
        if type(data) is not list:
            raise _unlike("a list", data)
        result: list[Any] = []
        try:
            for item in data:
                result.append(reader(item))
        except _Wrong as wrong:
            wrong.way.append(f"[{len(result)}]")
            raise
        return tuple(result)

    return read


def _tuple_reader(kinds: tuple[Any, ...]) -> Reader:
    readers = [_reader(kind) for kind in kinds]

    def read(data: Any) -> Any:
        if type(data) is not list:
            raise _unlike("a list", data)
        if len(data) != len(readers):
            raise _unlike(f"a list of {len(readers)}", data)
        result: list[Any] = []
        try:
            for reader, item in zip(readers, data, strict=True):
                result.append(reader(item))
        except _Wrong as wrong:
            wrong.way.append(f"[{len(result)}]")
            raise
        return tuple(result)

    return read


def _dict_reader(key_kind: Any, kind: Any) -> Reader:
    key_reader, reader = _reader(key_kind), _reader(kind)

    def read(data: Any) -> Any:
        if type(data) is not dict:
            raise _unlike("an object", data)
        try:
            for key in data:
                key_reader(key)
        except _Wrong as wrong:
            wrong.way.append(" key")
            raise
        result: dict[str, Any] = {}
        key = ""
        try:
            for key, value in data.items():
                result[key] = reader(value)
        except _Wrong as wrong:
            wrong.way.append(f".{key}")
            raise
        return result

    return read


def _dataclass_reader(kind: Any) -> Reader:
    readers = {name: _reader(item) for name, item in field_types(kind).items()}
    names = tuple(readers)

    def read(data: Any) -> Any:
        if type(data) is not dict:
            raise _unlike("an object", data)
        if tuple(data) != names:
            raise _Wrong(_wrong_keys(data, names))
        fields: dict[str, Any] = {}
        name = ""
        try:
            for name, reader in readers.items():
                fields[name] = reader(data[name])
        except _Wrong as wrong:
            wrong.way.append(f".{name}")
            raise
        return kind(**fields)

    return read


def _wrong_keys(data: dict[str, Any], names: tuple[str, ...]) -> str:
    for key in data:
        if key not in names:
            return f"unknown key {key[:40]!r}"
    for name in names:
        if name not in data:
            return f"missing key {name!r}"
    return f"keys not in the order {', '.join(names)}"


__all__ = [
    "Match",
    "Range",
    "canonical_json",
    "canonical_text",
    "decode",
    "digest",
    "encode",
    "parse_json",
    "unique_keys",
]
