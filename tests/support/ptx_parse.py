"""Reads the PTX of one kernel into statements whose names are resolved, for `ptx_machine`."""

from __future__ import annotations

import re
import struct
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np

BITS = {"pred": 1, "b8": 8, "u8": 8, "s8": 8, "bf16": 16, "f16x2": 32, "bf16x2": 32, "tf32": 32}
BITS |= {f"{kind}{bits}": bits for kind in "bus" for bits in (16, 32, 64)}
BITS |= {"f16": 16, "f32": 32, "f64": 64, "b128": 128}
VIEWS: dict[int, tuple[Any, ...]] = {
    1: (np.bool_,),
    8: (np.uint8, np.int8),
    16: (np.uint16, np.int16, np.float16),
    32: (np.uint32, np.int32, np.float32),
    64: (np.uint64, np.int64, np.float64),
}


class UnknownPtx(Exception):
    """Something that is not known here."""


class Register:
    """A virtual register: a lane for each thread, its bits seen as unsigned, signed, float."""

    def __init__(self, name: str, bits: int) -> None:
        if bits not in VIEWS:
            raise UnknownPtx(f"register {name} of {bits} bits")
        self.name = name
        self.bits = bits
        self.views: tuple[Any, ...] = ()
        self.written: Any = None
        self.complete = False
        """Whether all lanes were written, so that `written` need not be asked."""

    def allocate(self, lanes: int) -> None:
        """Forget all values."""
        first, *others = VIEWS[self.bits]
        data = np.zeros(lanes, first)
        self.views = (data, *(data.view(other) for other in others))
        self.written = np.zeros(lanes, np.bool_)
        self.complete = False


@dataclass(frozen=True)
class Constant:
    """Bits as an integer, or the value of a literal with a point."""

    value: int | float


@dataclass(frozen=True)
class Special:
    """A special register, `%tid.x`."""

    name: str


@dataclass(frozen=True)
class Symbol:
    """A place in shared memory or a parameter."""

    name: str
    offset: int = 0


@dataclass(frozen=True)
class Address:
    base: Any
    offset: int


@dataclass(frozen=True)
class Vector:
    items: tuple[Any, ...]


@dataclass(frozen=True)
class Pair:
    """Two destinations, `a|b`."""

    first: Any
    second: Any


@dataclass(frozen=True)
class Not:
    register: Register


SINK = Symbol("_")


def flat(operands: Iterable[Any]) -> Iterator[Any]:
    """Operands without brackets and braces."""
    for operand in operands:
        if isinstance(operand, Vector):
            yield from flat(operand.items)
        elif isinstance(operand, Pair):
            yield from flat((operand.first, operand.second))
        else:
            yield operand.base if isinstance(operand, Address) else operand


@dataclass
class Statement:
    """One instruction."""

    text: str
    name: str
    operands: tuple[Any, ...]
    guard: Register | Not | None
    scope: Scope
    target: int = -1
    """Where a branch goes."""

    @property
    def parts(self) -> list[str]:
        return self.name.split(".")


@dataclass
class Scope:
    """Names between braces; inline assembly has its own."""

    parent: Scope | None = None
    registers: dict[str, int] = field(default_factory=dict)
    ranges: dict[str, tuple[int, int]] = field(default_factory=dict)
    labels: dict[str, int] = field(default_factory=dict)
    made: dict[str, Register] = field(default_factory=dict)

    def declare(self, text: str) -> None:
        """Take in `.reg .b32 a, %r<5>`."""
        match = re.fullmatch(r"\.reg\s+\.(\w+)\s+(.*)", text, re.S)
        if not match or match[1] not in BITS:
            raise UnknownPtx(text)
        for name in match[2].split(","):
            if many := re.fullmatch(r"([\w%$]+)<(\d+)>", name.strip()):
                self.ranges[many[1]] = BITS[match[1]], int(many[2])
            else:
                self.registers[name.strip()] = BITS[match[1]]

    def register(self, name: str) -> Register | None:
        if name in self.made:
            return self.made[name]
        bits = self.registers.get(name)
        if bits is None and (match := re.fullmatch(r"([\w%$]*?)(\d+)", name)):
            bits, count = self.ranges.get(match[1], (None, 0))
            bits = bits if int(match[2]) < count else None
        if bits is not None:
            return self.made.setdefault(name, Register(name, bits))
        return self.parent.register(name) if self.parent else None

    def label(self, name: str) -> int:
        if name in self.labels:
            return self.labels[name]
        if self.parent is None:
            raise UnknownPtx(f"label {name}")
        return self.parent.label(name)


@dataclass(frozen=True)
class Shared:
    """An array in shared memory; one without a size is the dynamic part."""

    name: str
    align: int
    size: int | None


@dataclass(frozen=True)
class Parameter:
    name: str
    type: str
    size: int


class Program:
    """The statements of a kernel, and what it declares."""

    def __init__(self, ptx: str, entry: str | None = None) -> None:
        text = re.sub(r"//[^\n]*|/\*.*?\*/", " ", ptx, flags=re.S)
        starts = {m[1]: m for m in re.finditer(r"\.entry\s+([\w$]+)", text)}
        if entry is None and len(starts) != 1:
            raise UnknownPtx(f"{len(starts)} entries: {', '.join(starts)}")
        start = starts[entry] if entry is not None else next(iter(starts.values()))
        self.entry = start[1]
        head, rest = text[: start.start()], text[start.end() :]
        opening = rest.index("{")
        signature, body = rest[:opening], rest[opening:]
        self.parameters = [*_parameters(signature)]
        self.block = _block(signature)
        """Threads, where the kernel insists on a number."""
        self.shared = [*_shared(head)]
        self.statements: list[Statement] = []
        self.scopes: list[Scope] = []
        self._parse(body)
        self.statements.append(Statement("ret", "ret", (), None, self.scopes[0]))
        for statement in self.statements:
            if statement.parts[0] == "bra":
                statement.target = statement.scope.label(statement.operands[0].name)

    @property
    def registers(self) -> list[Register]:
        """Those that occur."""
        return [register for scope in self.scopes for register in scope.made.values()]

    def _parse(self, body: str) -> None:
        scope: Scope | None = None
        at = 0
        while True:
            if space := _SPACE.match(body, at):
                at = space.end()
            if body[at] == "{":
                scope = Scope(scope)
                self.scopes.append(scope)
                at += 1
            elif body[at] == "}":
                assert scope is not None
                scope, at = scope.parent, at + 1
                if scope is None:
                    return
            elif match := _LABEL.match(body, at):
                assert scope is not None
                scope.labels[match[1]] = len(self.statements)
                at = match.end()
            else:
                assert scope is not None
                end = body.index(";", at)
                self._statement(" ".join(body[at:end].split()), scope)
                at = end + 1

    def _statement(self, text: str, scope: Scope) -> None:
        if text.startswith(".reg"):
            scope.declare(text)
        elif text.startswith(".shared"):
            self.shared += _shared(text + ";")
        elif text.startswith((".pragma", ".loc")):
            return
        elif text.startswith("."):
            raise UnknownPtx(text)
        else:
            self.statements.append(_instruction(text, scope))


_SPACE = re.compile(r"[\s;]+")
_LABEL = re.compile(r"([\w$%]+)\s*:(?!:)")


def _parameters(signature: str) -> Iterator[Parameter]:
    for declared in re.findall(r"\.param\s+([^,)]+)", signature):
        match = re.fullmatch(r"\.(\w+)\s+(.*?)([\w$]+)(?:\[(\d+)\])?\s*", declared, re.S)
        if not match:
            match = re.fullmatch(r"\.align\s+\d+\s+\.(\w+)(\s+)([\w$]+)\[(\d+)\]\s*", declared)
        if not match or match[1] not in BITS:
            raise UnknownPtx(f"parameter {declared}")
        yield Parameter(match[3], match[1], BITS[match[1]] // 8 * int(match[4] or 1))


def _block(signature: str) -> tuple[int, int, int] | None:
    match = re.search(r"\.reqntid\s+([\d,\s]+)", signature)
    if not match:
        return None
    x, y, z = (*(int(extent) for extent in match[1].split(",")), 1, 1)[:3]
    return x, y, z


def _shared(text: str) -> Iterator[Shared]:
    pattern = r"\.shared\s+(?:\.align\s+(\d+)\s+)?\.(\w+)\s+([\w$]+)(\[(\d*)\])?\s*;"
    for align, kind, name, array, count in re.findall(pattern, text):
        each = BITS[kind] // 8
        size = None if array and not count else each * int(count or 1)
        yield Shared(name, int(align or each), size)


def _instruction(text: str, scope: Scope) -> Statement:
    rest, guard = text, None
    if match := re.match(r"@(!?)\s*([%\w$]+)\s+", text):
        register = scope.register(match[2])
        if register is None:
            raise UnknownPtx(text)
        guard = Not(register) if match[1] else register
        rest = text[match.end() :]
    name, _, operands = rest.partition(" ")
    parsed = tuple(_operand(part, scope, text) for part in _split(operands))
    return Statement(text, name, parsed, guard, scope)


def _split(text: str) -> list[str]:
    """Operands, at commas outside of brackets."""
    parts, depth = [""], 0
    for char in text:
        depth += (char in "{[(") - (char in "}])")
        if char == "," and not depth:
            parts.append("")
        else:
            parts[-1] += char
    return [part.strip() for part in parts if part.strip()]


def _operand(text: str, scope: Scope, statement: str) -> Any:
    if text[0] == "{":
        return Vector(tuple(_operand(part, scope, statement) for part in _split(text[1:-1])))
    if text[0] == "[":
        base, offset = text[1:-1].strip(), 0
        if match := re.fullmatch(r"(.+?)\s*([+-])\s*(-?\w+)", base):
            base, offset = match[1], int(match[3], 0) * (-1 if match[2] == "-" else 1)
        return Address(_operand(base, scope, statement), offset)
    if "|" in text:
        first, second = text.split("|")
        return Pair(*(_operand(part.strip(), scope, statement) for part in (first, second)))
    if text[0] == "!":
        register = scope.register(text[1:].strip())
        if register is None:
            raise UnknownPtx(f"{text} in {statement}")
        return Not(register)
    if text == "_":
        return SINK
    if register := scope.register(text):
        return register
    if re.match(r"[-\d]", text):
        return Constant(_number(text))
    if match := re.fullmatch(r"([\w$]+)\s*\+\s*(\d+)", text):
        return Symbol(match[1], int(match[2]))
    if text[0] == "%":
        return Special(text)
    return Symbol(text)


def _number(text: str) -> int | float:
    sign, digits = (-1, text[1:]) if text[0] == "-" else (1, text)
    if match := re.fullmatch(r"0[fF]([0-9a-fA-F]{8})", digits):
        return int(match[1], 16) ^ (0x8000_0000 if sign < 0 else 0)
    if match := re.fullmatch(r"0[dD]([0-9a-fA-F]{16})", digits):
        return int(match[1], 16) ^ (1 << 63 if sign < 0 else 0)
    if re.fullmatch(r"\d*\.\d*(e[+-]?\d+)?", digits, re.I):
        return sign * float(digits)
    digits = re.sub(r"U$", "", digits)
    return sign * (int(digits, 8) if re.fullmatch(r"0[0-7]+", digits) else int(digits, 0))


def literal(constant: Constant, dtype: Any) -> Any:
    """A constant as a number of a numpy type; the bits of it, where it is an integer."""
    size = np.dtype(dtype).itemsize
    if isinstance(constant.value, float):
        return dtype(constant.value)
    bits = constant.value & (1 << 8 * size) - 1
    code = {1: "B", 2: "H", 4: "I", 8: "Q"}[size]
    return np.frombuffer(struct.pack(f"<{code}", bits), dtype)[0]
