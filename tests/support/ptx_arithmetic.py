"""Arithmetic and comparisons of `ptx_machine`.

What is approximate on a GPU (`ex2.approx`, `rcp.approx`, ...) is rounded right here. Not exact are
a `fma` of float64, and sums that are rounded otherwise than to the nearest: they are rounded to
longer numbers first.
"""

from __future__ import annotations

import operator
from collections.abc import Callable

import numpy as np

import ptx_numbers as numbers
from ptx_lanes import Array, Run, Step, dtype_of, reader, writer
from ptx_parse import BITS, SINK, Constant, Pair, Statement, UnknownPtx, literal

Build = Callable[[Statement], Step]
BUILDERS: dict[str, Build] = {}


def builds(*names: str) -> Callable[[Build], Build]:
    """Register how instructions are made executable, by the first part of their names."""

    def register(build: Build) -> Build:
        BUILDERS.update(dict.fromkeys(names, build))
        return build

    return register


def known(statement: Statement, *allowed: str) -> set[str]:
    """The parts of a name between the first and the type, which must all be known."""
    parts = statement.parts[1:]
    found = {part for part in parts if part not in BITS}
    if unknown := found - set(allowed):
        raise UnknownPtx(f"{', '.join(sorted(unknown))} of {statement.text}")
    return found


def types_of(statement: Statement) -> list[str]:
    return [part for part in statement.parts[1:] if part in BITS]


def apply(statement: Statement, compute: Callable[..., Array], *types: str) -> Step:
    """The first operand is computed from the rest; `types` has one for each, the last repeated."""
    operands = statement.operands
    kinds = [*types, *[types[-1]] * (len(operands) - len(types))]
    write = writer(operands[0], kinds[0])
    reads = [reader(o, kind) for o, kind in zip(operands[1:], kinds[1:], strict=True)]
    if len(reads) == 1:
        (one,) = reads
        return lambda run: write(run, compute(one(run)))
    if len(reads) == 2:
        left, right = reads
        return lambda run: write(run, compute(left(run), right(run)))
    return lambda run: write(run, compute(*[read(run) for read in reads]))


def is_float(type_: str) -> bool:
    return "f" in type_


# Integers


_INTEGER = {
    "add": np.add,
    "sub": np.subtract,
    "min": np.minimum,
    "max": np.maximum,
    "div": numbers.quotient,
    "rem": numbers.remainder,
    "abs": np.abs,
    "neg": np.negative,
}
_FLOAT = {
    "add": np.add,
    "sub": np.subtract,
    "mul": np.multiply,
    "div": np.divide,
    "min": numbers.least,
    "max": numbers.greatest,
    "abs": np.abs,
    "neg": np.negative,
    "rcp": lambda x: 1 / x,
    "sqrt": np.sqrt,
    "rsqrt": lambda x: 1 / np.sqrt(x),
    "ex2": np.exp2,
    "lg2": np.log2,
    "tanh": np.tanh,
    "sin": np.sin,
    "cos": np.cos,
    "fma": lambda a, b, c: a * b + c,
    "mad": lambda a, b, c: a * b + c,
}
MODES = ("rn", "rz", "rm", "rp")


@builds("add", "sub", "min", "max", "div", "rem", "abs", "neg")
def _common(statement: Statement) -> Step:
    (kind,) = types_of(statement)
    if is_float(kind):
        return _float(statement)
    function = _INTEGER[statement.parts[0]]
    if "relu" in known(statement, "relu"):
        zero = dtype_of(kind)(0)
        return apply(statement, lambda a, b: np.maximum(function(a, b), zero), kind)
    return apply(statement, function, kind)


@builds("rcp", "sqrt", "rsqrt", "ex2", "lg2", "tanh", "sin", "cos", "fma")
def _float(statement: Statement) -> Step:
    (kind,) = types_of(statement)
    base = statement.parts[0]
    flags = known(statement, *MODES, "ftz", "sat", "approx", "full", "NaN", "relu", "xorsign")
    if "xorsign" in flags:
        raise UnknownPtx(statement.text)
    function = _FLOAT[base]
    if "NaN" in flags:
        function = {"min": np.minimum, "max": np.maximum}[base]
    mode = next((flag for flag in flags if flag in MODES), "rn")
    dtype = dtype_of(kind)
    exact = base in ("min", "max", "abs", "neg")
    # As float64, products are exact, and what is not computed right in float32 is right then.
    wide = not exact and (
        mode != "rn"
        or kind in ("bf16", "bf16x2")
        or base not in ("add", "sub", "mul", "div", "sqrt")
    )
    wide_type = np.longdouble if kind == "f64" and base == "fma" else np.float64
    ftz = "ftz" in flags and dtype is np.float32
    if base in ("fma", "mad") and kind == "f32" and mode == "rn":
        function, wide = numbers.fused, False

    def compute(*values: Array) -> Array:
        if ftz:
            values = tuple(numbers.flush(value) for value in values)
        if wide:
            found = function(*[np.asarray(value).astype(wide_type) for value in values])
            if kind not in ("bf16", "bf16x2"):
                found = numbers.rounded(found, dtype, mode)
        else:
            found = function(*values)
        if ftz:
            found = numbers.flush(found)
        if "sat" in flags:
            found = np.fmin(np.fmax(found, dtype(0)), dtype(1))
        if "relu" in flags:
            found = np.maximum(found, dtype(0))
        return found

    if exact and kind in ("bf16", "bf16x2") and base in ("abs", "neg"):
        return _sign_bits(statement, kind)
    return apply(statement, compute, kind)


def _sign_bits(statement: Statement, kind: str) -> Step:
    word = "b16" if kind == "bf16" else "b32"
    sign = dtype_of(word)(0x8000 if kind == "bf16" else 0x8000_8000)
    if statement.parts[0] == "neg":
        return apply(statement, lambda x: x ^ sign, word)
    return apply(statement, lambda x: x & ~sign, word)


@builds("mul", "mad")
def _product(statement: Statement) -> Step:
    (kind,) = types_of(statement)
    base = statement.parts[0]
    if is_float(kind):
        return _float(statement)
    flags = known(statement, "lo", "hi", "wide")
    if len(flags) != 1:
        raise UnknownPtx(statement.text)
    if "wide" in flags:
        wide = f"{kind[0]}{2 * BITS[kind]}"
        dtype = dtype_of(wide)

        def widened(a: Array, b: Array, *c: Array) -> Array:
            product = np.asarray(a).astype(dtype) * np.asarray(b).astype(dtype)
            return product + c[0] if c else product

        return apply(statement, widened, *([wide, kind, kind, wide][: len(statement.operands)]))
    multiply = np.multiply if "lo" in flags else numbers.high_product
    if base == "mul":
        return apply(statement, multiply, kind)
    return apply(statement, lambda a, b, c: multiply(a, b) + c, kind)


@builds("and", "or", "xor", "not", "cnot")
def _logic(statement: Statement) -> Step:
    (kind,) = types_of(statement)
    known(statement)
    functions = {
        "and": np.bitwise_and,
        "or": np.bitwise_or,
        "xor": np.bitwise_xor,
        "not": np.invert,
        "cnot": lambda x: (x == 0).astype(x.dtype),
    }
    return apply(statement, functions[statement.parts[0]], kind)


@builds("shl", "shr")
def _shift(statement: Statement) -> Step:
    (kind,) = types_of(statement)
    known(statement)
    move = numbers.shift_left if statement.parts[0] == "shl" else numbers.shift_right
    return apply(statement, move, kind, kind, "u32")


@builds("shf")
def _funnel(statement: Statement) -> Step:
    flags = known(statement, "l", "r", "wrap", "clamp")
    left, wrap = "l" in flags, "wrap" in flags
    return apply(statement, lambda a, b, c: numbers.funnel(a, b, c, left, wrap), "b32")


@builds("bfe", "bfi")
def _field(statement: Statement) -> Step:
    (kind,) = types_of(statement)
    known(statement)
    if statement.parts[0] == "bfe":
        return apply(statement, numbers.extract_field, kind, kind, "u32")
    return apply(statement, numbers.insert_field, kind, kind, kind, "u32")


@builds("lop3")
def _lop3(statement: Statement) -> Step:
    known(statement)
    *operands, table = statement.operands
    entries = int(table.value)
    short = Statement(statement.text, "lop3.b32", tuple(operands), None, statement.scope)
    return apply(short, lambda a, b, c: numbers.truth_table(a, b, c, entries), "b32")


@builds("prmt")
def _prmt(statement: Statement) -> Step:
    flags = known(statement, "f4e", "b4e", "rc8", "ecl", "ecr", "rc16")
    mode = next(iter(flags), "")
    return apply(statement, lambda a, b, c: numbers.permute_bytes(a, b, c, mode), "b32")


@builds("popc", "clz", "brev", "bfind")
def _count(statement: Statement) -> Step:
    (kind,) = types_of(statement)
    base = statement.parts[0]
    flags = known(statement, "shiftamt")
    if base == "brev":
        return apply(statement, numbers.reverse_bits, kind)
    if base == "popc":
        return apply(statement, lambda x: np.bitwise_count(x).astype(np.uint32), "u32", kind)
    if base == "clz":
        return apply(statement, numbers.leading_zeros, "u32", kind)

    def find(values: Array) -> Array:
        if kind[0] == "s":
            unsigned = dtype_of(f"u{BITS[kind]}")
            values = np.where(values < 0, ~values, values).astype(unsigned)
        zeros = numbers.leading_zeros(values)
        found = zeros if "shiftamt" in flags else np.uint32(BITS[kind] - 1) - zeros
        return np.where(values == 0, np.uint32(0xFFFF_FFFF), found)

    return apply(statement, find, "u32", kind)


# Comparisons and choices

_COMPARE = {name: getattr(operator, name) for name in ("eq", "ne", "lt", "le", "gt", "ge")}
_UNSIGNED = {"lo": operator.lt, "ls": operator.le, "hi": operator.gt, "hs": operator.ge}
_JOIN = {"and": np.logical_and, "or": np.logical_or, "xor": np.logical_xor}


def _comparison(name: str, kind: str) -> Callable[[Array, Array], Array]:
    if not is_float(kind):
        return (_COMPARE | _UNSIGNED)[name]
    if name in ("num", "nan"):
        return lambda a, b: (np.isnan(a) | np.isnan(b)) == (name == "nan")
    compare = _COMPARE[name.removesuffix("u") if name not in _COMPARE else name]
    if name == "ne":
        return lambda a, b: (a < b) | (a > b)
    if name in _COMPARE:
        return compare
    if name == "neu":
        return compare
    return lambda a, b: compare(a, b) | np.isnan(a) | np.isnan(b)


@builds("setp", "set")
def _setp(statement: Statement) -> Step:
    name, *rest = statement.parts[1:]
    flags = known(statement, name, *_JOIN, "ftz") - {name}
    *into, kind = ["pred", *types_of(statement)][-2:]
    (result,) = into
    if result != "pred" and statement.parts[0] != "set":
        raise UnknownPtx(statement.text)
    join = next((_JOIN[flag] for flag in flags if flag in _JOIN), None)
    compare = _comparison(name, kind)
    if name in _UNSIGNED or (kind[0] == "b" and not is_float(kind)):
        kind = f"u{BITS[kind]}"
    target, *sources = statement.operands
    left, right = (reader(source, kind) for source in sources[:2])
    other = reader(sources[2], "pred") if sources[2:] else None
    if (join is None) != (other is None) or name == rest[-1]:
        raise UnknownPtx(statement.text)
    first, second = (target.first, target.second) if isinstance(target, Pair) else (target, SINK)
    write, write_second = writer(first, result), writer(second, "pred")
    ftz = "ftz" in flags
    # What `set` gives where it holds: 1.0, or all ones.
    one = None if result == "pred" else literal(_SET[is_float(result)], dtype_of(result))

    def step(run: Run) -> None:
        a, b = left(run), right(run)
        if ftz:
            a, b = numbers.flush(a), numbers.flush(b)
        found = compare(a, b)
        if join is not None and other is not None:
            with_ = other(run)
            found, not_found = join(found, with_), join(~found, with_)
        else:
            not_found = ~found
        write(run, found if one is None else np.where(found, one, one.dtype.type(0)))
        write_second(run, not_found)

    return step


_SET = {True: Constant(1.0), False: Constant(-1)}


@builds("selp")
def _selp(statement: Statement) -> Step:
    (kind,) = types_of(statement)
    known(statement)
    return apply(statement, lambda a, b, p: np.where(p, a, b), kind, kind, kind, "pred")


@builds("slct")
def _slct(statement: Statement) -> Step:
    known(statement, "ftz")
    kind, by = types_of(statement)
    return apply(statement, lambda a, b, c: np.where(c >= 0, a, b), kind, kind, kind, by)


@builds("testp")
def _testp(statement: Statement) -> Step:
    (kind,) = types_of(statement)
    flags = known(statement, "finite", "infinite", "number", "notanumber")
    test = {
        "finite": np.isfinite,
        "infinite": np.isinf,
        "number": lambda x: ~np.isnan(x),
        "notanumber": np.isnan,
    }[flags.pop()]
    return apply(statement, test, "pred", kind)


@builds("copysign")
def _copysign(statement: Statement) -> Step:
    (kind,) = types_of(statement)
    known(statement)
    return apply(statement, lambda a, b: np.copysign(b, a), kind)
