"""Strict reading of plain data into dataclasses, and back.

Standard JSON parsers accept duplicate keys, NaN and any nesting; a file that travels between
machines must not have them. A field's type says what is accepted:

- `int`, `str`, `bool`, `None` and unions of them, never converted into one another;
- `Annotated[int, Range(low, high)]`, `Annotated[str, Match(pattern)]`, `Literal[...]`;
- `tuple[T, ...]`, `tuple[T, T, T]`, `dict[str, T]`, and dataclasses, whose keys must match exactly.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import re
import types
import typing
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

from .errors import ManifestError

_REMEDY = "rebuild the artifacts with `sonata-aot build`"
T = TypeVar("T")


@dataclass(frozen=True)
class Range:
    """Inclusive bounds of an integer."""

    low: int
    high: int


class Match:
    """A pattern that the whole of a string must match."""

    def __init__(self, pattern: str) -> None:
        """Compile the pattern once, when the type is written."""
        self.pattern = re.compile(pattern)


def parse_json(data: bytes, where: str) -> Any:
    """Parse UTF-8 JSON, refusing duplicate keys, NaN, infinities, floats and absurd nesting.

    Raises:
        ManifestError: the bytes are not such a text; `where` names them in the message.
    """

    def refuse(value: str) -> Any:
        raise ValueError(f"the number {value[:40]} is not an integer")

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        result = dict(pairs)
        if len(result) != len(pairs):
            seen: set[str] = set()
            twice = next(key for key, _ in pairs if key in seen or seen.add(key))
            raise ValueError(f"the key {twice[:40]!r} stands twice")
        return result

    try:
        return json.loads(
            data.decode("utf-8"),
            object_pairs_hook=unique,
            parse_constant=refuse,
            parse_float=refuse,
        )
    except RecursionError:
        raise ManifestError(f"{where}: nested too deep", remedy=_REMEDY) from None
    except ValueError as error:  # UnicodeDecodeError and JSONDecodeError are among these
        raise ManifestError(f"{where}: not valid JSON: {error}", remedy=_REMEDY) from None


def canonical_json(data: Any) -> bytes:
    """The one byte string for `data`: its own key order, no spaces, ASCII.

    Keys are not sorted: order carries meaning (a variant lists its choices as declared), and
    whoever writes data here writes it in a fixed order.
    """
    return json.dumps(data, separators=(",", ":"), allow_nan=False).encode("ascii")


def digest(data: Any) -> str:
    """SHA-256 of the canonical form, in hex."""
    return hashlib.sha256(canonical_json(data)).hexdigest()


def decode(kind: type[T], data: Any, where: str) -> T:
    """Read `data` as `kind`.

    Raises:
        ManifestError: the first difference found, with its place (`where.field[3]`).
    """
    return _decode(kind, data, where)


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


def _fail(where: str, expected: str, data: Any) -> ManifestError:
    shown = repr(data) if not isinstance(data, dict | list) else type(data).__name__
    shown = shown if len(shown) <= 60 else shown[:57] + "..."
    return ManifestError(f"{where}: expected {expected}, found {shown}", remedy=_REMEDY)


@functools.cache
def _fields(kind: Any) -> dict[str, Any]:
    hints = typing.get_type_hints(kind, include_extras=True)
    return {field.name: hints[field.name] for field in dataclasses.fields(kind)}


def _decode(kind: Any, data: Any, where: str) -> Any:
    if dataclasses.is_dataclass(kind):
        return _decode_dataclass(kind, data, where)
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin is typing.Annotated:
        return _decode_annotated(arguments, data, where)
    if origin is Literal:
        if not any(type(data) is type(value) and data == value for value in arguments):
            raise _fail(where, " or ".join(map(repr, arguments)), data)
        return data
    if origin in (typing.Union, types.UnionType):
        return _decode_union(arguments, data, where)
    if origin is tuple:
        return _decode_tuple(arguments, data, where)
    if origin is dict:
        if type(data) is not dict:
            raise _fail(where, "an object", data)
        keys = [_decode(arguments[0], key, f"{where} key") for key in data]
        return {key: _decode(arguments[1], data[key], f"{where}.{key}") for key in keys}
    # `type(...) is`, since a bool is an int to isinstance.
    if type(data) is not kind:
        raise _fail(where, "null" if kind is type(None) else kind.__name__, data)
    return data


def _decode_dataclass(kind: Any, data: Any, where: str) -> Any:
    if type(data) is not dict:
        raise _fail(where, "an object", data)
    fields = _fields(kind)
    for key in data:
        if key not in fields:
            raise ManifestError(f"{where}: unknown key {key[:40]!r}", remedy=_REMEDY)
    for name in fields:
        if name not in data:
            raise ManifestError(f"{where}: missing key {name!r}", remedy=_REMEDY)
    return kind(**{name: _decode(t, data[name], f"{where}.{name}") for name, t in fields.items()})


def _decode_annotated(arguments: tuple[Any, ...], data: Any, where: str) -> Any:
    value = _decode(arguments[0], data, where)
    for rule in arguments[1:]:
        if isinstance(rule, Range) and not rule.low <= value <= rule.high:
            raise _fail(where, f"an integer from {rule.low} to {rule.high}", data)
        if isinstance(rule, Match) and rule.pattern.fullmatch(value) is None:
            raise _fail(where, f"text like {rule.pattern.pattern}", data)
    return value


def _decode_union(arguments: tuple[Any, ...], data: Any, where: str) -> Any:
    # A union here is "X or null" or "text or integer": the data's own type picks the member.
    for member in arguments:
        base = typing.get_args(member)[0] if typing.get_origin(member) else member
        base = dict if dataclasses.is_dataclass(base) else base
        if type(data) is base:
            return _decode(member, data, where)
    names = (getattr(member, "__name__", str(member)) for member in arguments)
    raise _fail(where, " or ".join(names), data)


def _decode_tuple(arguments: tuple[Any, ...], data: Any, where: str) -> Any:
    if type(data) is not list:
        raise _fail(where, "a list", data)
    if arguments[-1] is Ellipsis:
        kinds: list[Any] = [arguments[0]] * len(data)
    else:
        kinds = list(arguments)
        if len(data) != len(kinds):
            raise _fail(where, f"a list of {len(kinds)}", data)
    return tuple(
        _decode(kind, item, f"{where}[{index}]")
        for index, (kind, item) in enumerate(zip(kinds, data, strict=True))
    )
