"""Moves and conversions of `ptx_machine`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

import ptx_numbers as numbers
from ptx_arithmetic import MODES, apply, builds, is_float, known, types_of
from ptx_lanes import Array, Read, Run, Step, dtype_of, reader, writer
from ptx_memory import SHARED_WINDOW
from ptx_parse import BITS, Statement, UnknownPtx, Vector


@builds("mov")
def _mov(statement: Statement) -> Step:
    (kind,) = types_of(statement)
    known(statement)
    target, source = statement.operands
    if isinstance(target, Vector):
        return _unpack(target, source, kind)
    if isinstance(source, Vector):
        return _pack(target, source, kind)
    return apply(statement, lambda x: x, kind)


def _unpack(target: Vector, source: Any, kind: str) -> Step:
    read = reader(source, kind)
    each = f"b{BITS[kind] // len(target.items)}"
    dtype, count = dtype_of(each), len(target.items)
    writes = [writer(item, each) for item in target.items]

    def step(run: Run) -> None:
        words = np.ascontiguousarray(np.atleast_1d(read(run))).view(dtype).reshape(-1, count)
        for place, write in enumerate(writes):
            write(run, words[:, place])

    return step


def _pack(target: Any, source: Vector, kind: str) -> Step:
    count = len(source.items)
    each = f"b{BITS[kind] // count}"
    reads = [reader(item, each) for item in source.items]
    write = writer(target, kind)
    dtype, whole = dtype_of(each), dtype_of(kind)

    def step(run: Run) -> None:
        words = np.empty((run.active.size, count), dtype)
        for place, read in enumerate(reads):
            words[:, place] = read(run)
        write(run, words.view(whole).reshape(-1))

    return step


@builds("cvta")
def _cvta(statement: Statement) -> Step:
    flags = known(statement, "to", "global", "shared", "shared::cta", "const", "param")
    (kind,) = types_of(statement)
    if "global" in flags:
        return apply(statement, lambda x: x, kind)
    if "const" in flags or "param" in flags:
        raise UnknownPtx(statement.text)
    shift = np.uint64(SHARED_WINDOW)
    if "to" in flags:
        return apply(statement, lambda x: x - shift, kind)
    return apply(statement, lambda x: x + shift, kind)


_WHOLE = ("rni", "rzi", "rmi", "rpi")


@builds("cvt")
def _cvt(statement: Statement) -> Step:
    flags = known(statement, *MODES, *_WHOLE, "ftz", "sat", "relu", "pack", "rna", "satfinite")
    if flags & {"pack", "satfinite"}:
        raise UnknownPtx(statement.text)
    to, source = types_of(statement)
    mode = next((flag for flag in flags if flag in MODES), "rn")
    whole = next((flag for flag in flags if flag in _WHOLE), None)
    if to in ("bf16x2", "f16x2") and source == "f32":
        return _cvt_pair(statement, to, mode, flags)
    if to == "tf32":
        half, mask = np.uint32(0x1000), np.uint32(0xFFFF_E000)
        if mode == "rz" or "rna" not in flags:
            raise UnknownPtx(statement.text)
        return apply(statement, lambda x: x + half & mask, "b32")
    convert = _conversion(to, source, mode, whole, "sat" in flags)
    ftz = "ftz" in flags

    def compute(values: Array) -> Array:
        values = np.asarray(values)
        if ftz and source == "f32":
            values = numbers.flush(values)
        found = convert(values)
        if ftz and to == "f32":
            found = numbers.flush(found)
        return np.maximum(found, dtype_of(to)(0)) if "relu" in flags else found

    if to == "bf16":
        if flags & {"sat", "relu", "rm", "rp"}:
            raise UnknownPtx(statement.text)
        return apply(statement, lambda x: numbers.to_bf16(_real(x), mode), "b16", source)
    return apply(statement, compute, to, source)


def _real(values: Array) -> Array:
    values = np.asarray(values)
    return values if values.dtype in (np.float32, np.float64) else values.astype(np.float64)


def _cvt_pair(statement: Statement, to: str, mode: str, flags: set[str]) -> Step:
    target, upper, lower = statement.operands
    reads: list[Read] = [reader(lower, "f32"), reader(upper, "f32")]
    write = writer(target, "b32")

    def step(run: Run) -> None:
        pair = np.empty((run.active.size, 2), np.float32)
        for place, read in enumerate(reads):
            pair[:, place] = read(run)
        if "relu" in flags:
            pair = np.maximum(pair, np.float32(0))
        if to == "bf16x2":
            short = numbers.to_bf16(pair, mode)
        else:
            short = numbers.rounded(pair, np.float16, mode)
        write(run, short.view(np.uint32).reshape(-1))

    return step


def _conversion(
    to: str, source: str, mode: str, whole: str | None, saturate: bool
) -> Callable[[Array], Array]:
    into = dtype_of(to)
    if is_float(source) and not is_float(to):
        if whole is None:
            raise UnknownPtx("without a way to round")
        return lambda x: numbers.to_integer(x, into, whole)
    if not is_float(source):
        if not is_float(to):
            if not saturate:
                return lambda x: x.astype(into)
            low, high = np.iinfo(into).min, np.iinfo(into).max
            return lambda x: np.array(np.clip(x.astype(object), low, high), object).astype(into)
        if mode == "rn":
            return lambda x: x.astype(into)
        return lambda x: numbers.rounded(x.astype(np.longdouble), into, mode)
    if whole is not None:
        how = {"rni": np.rint, "rzi": np.trunc, "rmi": np.floor, "rpi": np.ceil}[whole]
        return lambda x: how(x).astype(into)

    def convert(values: Array) -> Array:
        found = numbers.rounded(values, into, mode)
        return np.fmin(np.fmax(found, into(0)), into(1)) if saturate else found

    return convert
