"""The PTX machine's arithmetic, against answers worked out by hand or in another way."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from ptx_numbers import from_bf16, to_bf16
from ptx_snippets import each

U16, U32, U64, F16, F32, F64 = np.uint16, np.uint32, np.uint64, np.float16, np.float32, np.float64
S32, S64 = np.int32, np.int64
NAN, INF = float("nan"), float("inf")


def u32(*values: int) -> Any:
    return np.array([value & 0xFFFF_FFFF for value in values], U32)


def u64(*values: int) -> Any:
    return np.array([value & (1 << 64) - 1 for value in values], U64)


def f32(*values: float) -> Any:
    return np.array(values, F32)


BIG = 0x9E37_79B9_7F4A_7C15
INTEGERS = [
    ("add.s32 %d, %a, %b;", u32(5, -1, 2**31 - 1), u32(7, 1, 1), u32(12, 0, 2**31)),
    ("sub.s64 %d, %a, %b;", u64(0, 5), u64(1, 7), u64(-1, -2)),
    ("mul.lo.s32 %d, %a, %b;", u32(-3, 1 << 20), u32(7, 1 << 13), u32(-21, 0)),
    ("mul.hi.u32 %d, %a, %b;", u32(-1, 1 << 31), u32(-1, 6), u32(-2, 3)),
    ("mul.hi.s32 %d, %a, %b;", u32(-1, 1 << 30), u32(5, 8), u32(-1, 2)),
    ("mul.hi.u64 %d, %a, %b;", u64(BIG), u64(BIG), u64(BIG * BIG >> 64)),
    (
        "mul.hi.s64 %d, %a, %b;",
        u64(BIG, 3),
        u64(5, -1),
        u64((BIG - (1 << 64)) * 5 >> 64, -1),
    ),
    ("mul.wide.u32 %d, %a, %b;", u32(-1, 3), u32(-1, 4), u64((2**32 - 1) ** 2, 12)),
    ("mul.wide.s32 %d, %a, %b;", u32(-1, 3), u32(7, -4), u64(-7, -12)),
    ("div.s32 %d, %a, %b;", u32(-7, 7, -7, 6), u32(2, -2, -2, 3), u32(-3, -3, 3, 2)),
    ("rem.s32 %d, %a, %b;", u32(-7, 7, -7, 6), u32(2, -2, -2, 3), u32(-1, 1, -1, 0)),
    ("div.u32 %d, %a, %b;", u32(-7), u32(2), u32((2**32 - 7) // 2)),
    ("min.s32 %d, %a, %b;", u32(-7, 7), u32(2, 2), u32(-7, 2)),
    ("max.u32 %d, %a, %b;", u32(-7, 1), u32(2, 2), u32(-7, 2)),
    ("min.relu.s32 %d, %a, %b;", u32(-7, 7), u32(2, 2), u32(0, 2)),
    ("max.relu.s32 %d, %a, %b;", u32(-7, 7), u32(-2, 2), u32(0, 7)),
    ("shl.b32 %d, %a, %b;", u32(3, 3, 3), u32(31, 32, 33), u32(1 << 31, 0, 0)),
    ("shr.u32 %d, %a, %b;", u32(-1, -1, -1), u32(31, 32, 99), u32(1, 0, 0)),
    ("shr.s32 %d, %a, %b;", u32(-8, -8, 8), u32(1, 40, 40), u32(-4, -1, 0)),
    ("and.b32 %d, %a, %b;", u32(12), u32(10), u32(8)),
    ("xor.b32 %d, %a, %b;", u32(12), u32(10), u32(6)),
    ("lop3.b32 %d, %a, %b, 3855, 0xE8;", u32(0xFF00), u32(0x0FF0), u32(0x0F00)),
    ("prmt.b32 %d, %a, %b, 0x7604;", u32(0x33221100), u32(0x77665544), u32(0x77660044)),
    ("prmt.b32 %d, %a, %b, 0x80F7;", u32(0x332211F0), u32(0x77665544), u32(0xFFF00077)),
    ("shf.l.wrap.b32 %d, %a, %b, 36;", u32(0xA000_0000), u32(0x12), u32(0x12A)),
    ("shf.r.wrap.b32 %d, %a, %b, 4;", u32(0xA5), u32(0x3), u32(0x3000_000A)),
    ("shf.r.clamp.b32 %d, %a, %b, 40;", u32(0xA5), u32(0x3), u32(0x3)),
    ("bfi.b32 %d, %a, %b, 4, 8;", u32(0xABCD), u32(0xFFFF_FFFF), u32(0xFFFF_FCDF)),
]


@pytest.mark.parametrize(("code", "a", "b", "expected"), INTEGERS, ids=lambda x: str(x)[:24])
def test_integers(code: str, a: Any, b: Any, expected: Any) -> None:
    assert each(code, a, b, result=expected.dtype.type).tolist() == expected.tolist()


def signed(value: int, bits: int) -> int:
    return value - (value >> bits - 1 << bits)


def divide(a: int, b: int) -> tuple[int, int]:
    whole = abs(a) // abs(b) * (1 if (a < 0) == (b < 0) else -1)
    return whole, a - whole * b


def bits_of(value: int, place: int, length: int) -> int:
    return value >> place & (1 << length) - 1


ANY_BITS: list[tuple[str, int, Callable[[int, int], int]]] = [
    ("mul.hi.u32", 32, lambda a, b: a * b >> 32),
    ("mul.hi.s32", 32, lambda a, b: signed(a, 32) * signed(b, 32) >> 32),
    ("mul.hi.u64", 64, lambda a, b: a * b >> 64),
    ("mul.hi.s64", 64, lambda a, b: signed(a, 64) * signed(b, 64) >> 64),
    ("mul.lo.s64", 64, lambda a, b: a * b),
    ("div.s32", 32, lambda a, b: divide(signed(a, 32), signed(b, 32))[0]),
    ("rem.s64", 64, lambda a, b: divide(signed(a, 64), signed(b, 64))[1]),
    ("div.u64", 64, lambda a, b: a // b),
    ("max.s64", 64, lambda a, b: max(signed(a, 64), signed(b, 64))),
]


@pytest.mark.parametrize(("name", "bits", "answer"), ANY_BITS, ids=[each[0] for each in ANY_BITS])
def test_integers_of_any_bits(name: str, bits: int, answer: Callable[[int, int], int]) -> None:
    random = np.random.default_rng(bits)
    dtype = U32 if bits == 32 else U64
    a, b = (random.integers(1, 1 << 64, 256, U64, endpoint=False) for _ in range(2))
    # Of all lengths.
    a, b = ((x >> random.integers(0, 64, 256, U64)).astype(dtype) | dtype(1) for x in (a, b))
    found = each(f"{name} %d, %a, %b;", a, b, result=dtype)
    mask = (1 << bits) - 1
    expected = [answer(int(x), int(y)) & mask for x, y in zip(a, b, strict=True)]
    assert found.tolist() == expected


def test_fields_and_shifts_of_any_bits() -> None:
    random = np.random.default_rng(3)
    a = random.integers(0, 1 << 32, 256, U32, endpoint=False)
    for place, length in random.integers(0, 33, (8, 2)).tolist():
        found = each(f"bfe.u32 %d, %a, {place}, {length};", a, result=U32)
        assert found.tolist() == [bits_of(x, place, length) for x in a.tolist()]
        found = each(f"bfi.b32 %d, %a, 0x12345678, {place}, {length};", a, result=U32)
        mask = (1 << length) - 1 << place & 0xFFFF_FFFF
        assert found.tolist() == [0x1234_5678 & ~mask | x << place & mask for x in a.tolist()]
        both = [x << 32 | 0x1234_5678 for x in a.tolist()]
        found = each(f"shf.l.clamp.b32 %d, 0x12345678, %a, {place};", a, result=U32)
        assert found.tolist() == [(x << place) >> 32 & 0xFFFF_FFFF for x in both]
        found = each(f"shf.r.wrap.b32 %d, 0x12345678, %a, {place};", a, result=U32)
        assert found.tolist() == [x >> place % 32 & 0xFFFF_FFFF for x in both]
        found = each(f"shr.s32 %d, %a, {place};", a, result=U32)
        assert found.tolist() == [signed(x, 32) >> place & 0xFFFF_FFFF for x in a.tolist()]
    found = each("brev.b32 %d, %a;", a, result=U32)
    assert found.tolist() == [int(f"{x:032b}"[::-1], 2) for x in a.tolist()]
    found = each("clz.b32 %d, %a;", a, result=U32)
    assert found.tolist() == [32 - x.bit_length() for x in a.tolist()]


ONE = [
    ("not.b32 %d, %a;", u32(5), u32(-6)),
    ("neg.s32 %d, %a;", u32(5), u32(-5)),
    ("abs.s32 %d, %a;", u32(-5, 5), u32(5, 5)),
    ("popc.b32 %d, %a;", u32(0xF0F1, 0), u32(9, 0)),
    ("clz.b32 %d, %a;", u32(0, 1, -1, 0x00FF_0000), u32(32, 31, 0, 8)),
    ("bfind.u32 %d, %a;", u32(0, 1, 0x00FF_0000), u32(-1, 0, 23)),
    ("brev.b32 %d, %a;", u32(1, 0xC000_0001), u32(1 << 31, 0x8000_0003)),
    ("bfe.u32 %d, %a, 8, 4;", u32(0xABCD), u32(0xB)),
    ("bfe.s32 %d, %a, 8, 4;", u32(0xABCD, 0x0700), u32(-5, 7)),
    ("bfe.s32 %d, %a, 28, 8;", u32(0x8000_0000, 0x7000_0000), u32(-8, 7)),
    ("bfe.u32 %d, %a, 3, 0;", u32(0xABCD), u32(0)),
    ("mad.lo.s32 %d, %a, 3, 4;", u32(5, -1), u32(19, 1)),
    ("mad.wide.u32 %d, %a, 16, 5;", u32(-1), u64((2**32 - 1) * 16 + 5)),
    ("add.s32 %d, %a, -1;", u32(0), u32(-1)),
]


@pytest.mark.parametrize(("code", "a", "expected"), ONE, ids=lambda x: str(x)[:24])
def test_integers_of_one_operand(code: str, a: Any, expected: Any) -> None:
    assert each(code, a, result=expected.dtype.type).tolist() == expected.tolist()


FLOATS = [
    ("add.f32 %d, %a, %b;", [1, 2**24, INF, NAN], [2, 1, -INF, 1], [3, 2**24, NAN, NAN]),
    ("mul.ftz.f32 %d, %a, %b;", [2**-130, 2**-100], [1, 2**-30], [0, 0]),
    ("mul.f32 %d, %a, %b;", [2**-130, 2**-100], [1, 2**-30], [2**-130, 2**-130]),
    ("min.f32 %d, %a, %b;", [1, NAN, 3, -0.0, 0.0], [2, 2, NAN, 0.0, -0.0], [1, 2, 3, -0.0, -0.0]),
    ("max.f32 %d, %a, %b;", [1, NAN, NAN, -0.0], [2, 2, NAN, 0.0], [2, 2, NAN, 0.0]),
    ("max.NaN.f32 %d, %a, %b;", [1, NAN, 3], [2, 2, NAN], [2, NAN, NAN]),
    ("div.rn.f32 %d, %a, %b;", [1, 1], [3, 0], [F32(1) / F32(3), INF]),
    ("add.rz.f32 %d, %a, %b;", [1, -1], [2**-24 + 2**-30, -(2**-24 + 2**-30)], [1, -1]),
    ("add.rp.f32 %d, %a, %b;", [1], [2**-30], [1 + 2**-23]),
    ("add.sat.f32 %d, %a, %b;", [1, -3, NAN], [2, 1, 1], [1, 0, 0]),
    ("fma.rn.f32 %d, %a, %b, 0fBF800000;", [1 + 2**-12], [1 - 2**-12], [-(2**-24)]),
    # Just beside the middle of two numbers, though float64 does not show it.
    ("fma.rn.f32 %d, %a, %b, 0f20800000;", [1 + 2**-12], [1 + 2**-12], [1 + 2**-11 + 2**-23]),
    ("fma.rn.f32 %d, %a, %b, 0fA0800000;", [1 + 2**-12], [1 + 2**-12], [1 + 2**-11]),
    ("copysign.f32 %d, %a, %b;", [-1, 1], [2, 3], [-2, 3]),
]


def same(found: Any, expected: Any) -> bool:
    """The same numbers, signs of zeros too; any NaN is one."""
    found, expected = np.asarray(found), np.asarray(expected, found.dtype)
    nan = np.isnan(found) & np.isnan(expected)
    equal = (found == expected) & (np.signbit(found) == np.signbit(expected))
    return bool((nan | equal).all())


@pytest.mark.parametrize(("code", "a", "b", "expected"), FLOATS, ids=lambda x: str(x)[:24])
def test_floats(code: str, a: Any, b: Any, expected: Any) -> None:
    assert same(each(code, f32(*a), f32(*b), result=F32), expected)


UNARY = [
    ("ex2.approx.f32 %d, %a;", [0, 3, -1, -INF, INF, NAN], [1, 8, 0.5, 0, INF, NAN]),
    ("ex2.approx.ftz.f32 %d, %a;", [-130, 0.5], [0, F32(math.sqrt(2))]),
    ("ex2.approx.f32 %d, %a;", [-130], [2**-130]),
    ("lg2.approx.f32 %d, %a;", [8, 0, -1], [3, -INF, NAN]),
    ("rcp.rn.f32 %d, %a;", [4, 0, -0.0], [0.25, INF, -INF]),
    ("rsqrt.approx.f32 %d, %a;", [4, 0], [0.5, INF]),
    ("sqrt.rn.f32 %d, %a;", [2, -1], [F32(math.sqrt(2)), NAN]),
    ("tanh.approx.f32 %d, %a;", [0, INF], [0, 1]),
    ("neg.f32 %d, %a;", [1, -0.0], [-1, 0]),
    ("abs.f32 %d, %a;", [-1, -0.0], [1, 0]),
    ("cvt.rni.f32.f32 %d, %a;", [0.5, 1.5, -2.5], [0, 2, -2]),
    ("cvt.rzi.f32.f32 %d, %a;", [1.5, -2.5], [1, -2]),
    ("cvt.rmi.f32.f32 %d, %a;", [1.5, -2.5], [1, -3]),
    ("cvt.sat.f32.f32 %d, %a;", [2, -1, 0.5, NAN], [1, 0, 0.5, 0]),
]


@pytest.mark.parametrize(("code", "a", "expected"), UNARY, ids=lambda x: str(x)[:24])
def test_floats_of_one_operand(code: str, a: Any, expected: Any) -> None:
    assert same(each(code, f32(*a), result=F32), expected)


CONVERSIONS = [
    (
        "cvt.rzi.s32.f32 %d, %a;",
        f32(1.9, -1.9, 3e9, -3e9, NAN),
        S32,
        [1, -1, 2**31 - 1, -(2**31), 0],
    ),
    ("cvt.rni.s32.f32 %d, %a;", f32(0.5, 1.5, 2.5), S32, [0, 2, 2]),
    ("cvt.rzi.u32.f32 %d, %a;", f32(-5, 3e9, 5e9), U32, [0, 3_000_000_000, 2**32 - 1]),
    ("cvt.rzi.s64.f32 %d, %a;", f32(2**40, 1e30), S64, [2**40, 2**63 - 1]),
    ("cvt.rn.f32.s32 %d, %a;", u32(-3, 2**24 + 1), F32, [-3, 2**24]),
    ("cvt.rn.f32.u32 %d, %a;", u32(-1), F32, [2**32]),
    ("cvt.rz.f32.s32 %d, %a;", u32(2**25 + 3), F32, [2**25]),
    ("cvt.u64.u32 %d, %a;", u32(-1), U64, [2**32 - 1]),
    ("cvt.s64.s32 %d, %a;", u32(-1), S64, [-1]),
    ("cvt.u32.u64 %d, %a;", u64(2**35 + 7), U32, [7]),
    ("cvt.s32.s16 %d, %a;", np.array([0xFFFE], U16), S32, [-2]),
    ("cvt.s32.s8 %d, %a;", u32(0x1FE), S32, [-2]),
    ("cvt.u32.u16 %d, %a;", np.array([0xFFFE], U16), U32, [0xFFFE]),
    ("cvt.sat.u8.s32 %d, %a;", u32(-4, 300, 7), U32, [0, 255, 7]),
    ("cvt.f32.f16 %d, %a;", np.array([1.5, 2**-24, INF], F16), F32, [1.5, 2**-24, INF]),
    ("cvt.f32.bf16 %d, %a;", to_bf16(f32(1.5, -3e38)), F32, from_bf16(to_bf16(f32(1.5, -3e38)))),
    ("cvt.rn.f16.f32 %d, %a;", f32(1 + 2**-11, 1 + 3 * 2**-11, 1e6), F16, [1, 1 + 2**-9, INF]),
    ("cvt.rz.f16.f32 %d, %a;", f32(1 + 3 * 2**-11, 1e6), F16, [1 + 2**-10, 65504]),
    (
        "cvt.rn.bf16.f32 %d, %a;",
        f32(1 + 2**-8, 1 + 3 * 2**-8, 3.4e38),
        U16,
        [0x3F80, 0x3F82, 0x7F80],
    ),
    ("cvt.rz.bf16.f32 %d, %a;", f32(1 + 3 * 2**-8, -1.999), U16, [0x3F81, 0xBFFF]),
    ("cvt.rn.bf16.f32 %d, %a;", f32(NAN), U16, [0x7FFF]),
    ("cvt.rn.f16x2.f32 %d, %a, 0f3F800000;", f32(2, -1), U32, [0x4000_3C00, 0xBC00_3C00]),
    ("cvt.rn.bf16x2.f32 %d, %a, 0f3F800000;", f32(2, -1), U32, [0x4000_3F80, 0xBF80_3F80]),
    ("cvt.rn.relu.bf16x2.f32 %d, 0f40000000, %a;", f32(-1), U32, [0x4000_0000]),
    ("cvt.f64.f32 %d, %a;", f32(1.5), F64, [1.5]),
    ("cvt.rn.f32.f64 %d, %a;", np.array([1 + 2**-24 + 2**-40]), F32, [1 + 2**-23]),
    ("cvt.rna.tf32.f32 %d, %a;", f32(1 + 2**-11), U32, [0x3F80_2000]),
]


@pytest.mark.parametrize(
    ("code", "a", "result", "expected"), CONVERSIONS, ids=lambda x: str(x)[:28]
)
def test_conversions(code: str, a: Any, result: Any, expected: Any) -> None:
    found = each(code, a, result=result)
    assert found.tolist() == np.asarray(expected, result).tolist()


def test_bfloat16_is_rounded_to_the_nearest_even_of_all_upper_halves() -> None:
    upper = np.arange(0, 0x7F80, 7, dtype=np.uint32) << 16
    for lower, up in ((0x7FFF, 0), (0x8001, 1), (0x8000, None)):
        found = to_bf16((upper | np.uint32(lower)).view(F32)).astype(np.uint32)
        more = (upper >> 16) & 1 if up is None else up
        assert (found == (upper >> 16) + more).all()


def test_float64_is_rounded_to_bfloat16_once() -> None:
    # By way of float32 it would lie half way, and go to the even one.
    assert to_bf16(np.array([1 + 2**-8 + 2**-40, 1 + 2**-8 - 2**-40])).tolist() == [0x3F81, 0x3F80]


def test_float64() -> None:
    a, b = np.array([1.5, 2**-60]), np.array([3.0, 1.0])
    for code, expected in (
        ("add.rn.f64 %d, %a, %b;", [4.5, 1.0]),
        ("fma.rn.f64 %d, %a, %b, 0d3FF0000000000000;", [5.5, 1.0]),
        ("div.rn.f64 %d, %a, %b;", [0.5, 2**-60]),
        ("max.f64 %d, %a, %b;", [3.0, 1.0]),
        ("neg.f64 %d, %a;", [-1.5, -(2**-60)]),
    ):
        assert each(code, a, b, result=F64).tolist() == expected, code


def pair(low: float, high: float, brain: bool) -> int:
    short = to_bf16(f32(low, high)) if brain else np.array([low, high], F16).view(U16)
    return int(short[0]) | int(short[1]) << 16


@pytest.mark.parametrize("brain", [True, False])
def test_packed_halves(brain: bool) -> None:
    kind = "bf16x2" if brain else "f16x2"
    a, b, c = (u32(pair(*values, brain)) for values in ((1.5, -2), (0.5, 4), (1, NAN)))
    for code, expected in (
        (f"mul.rn.{kind} %d, %a, %b;", (0.75, -8)),
        (f"fma.rn.{kind} %d, %a, %b, %a;", (2.25, -10)),
        (f"add.rn.{kind} %d, %a, %b;", (2, 2)),
        (f"max.{kind} %d, %a, %c;", (1.5, -2)),
        (f"min.{kind} %d, %a, %b;", (0.5, -2)),
        (f"neg.{kind} %d, %a;", (-1.5, 2)),
    ):
        assert each(code, a, b, c, result=U32).tolist() == [pair(*expected, brain)], code


COMPARISONS = [
    ("setp.lt.s32 %d, %a, %b;", u32(-1, 1), u32(1, -1), [True, False]),
    ("setp.lt.u32 %d, %a, %b;", u32(-1, 1), u32(1, -1), [False, True]),
    ("setp.hi.u32 %d, %a, %b;", u32(-1, 1), u32(1, -1), [True, False]),
    ("setp.ne.f32 %d, %a, %b;", f32(1, 1, NAN), f32(2, 1, 1), [True, False, False]),
    ("setp.neu.f32 %d, %a, %b;", f32(1, 1, NAN), f32(2, 1, 1), [True, False, True]),
    ("setp.gt.f32 %d, %a, %b;", f32(2, 1, NAN), f32(1, 1, 1), [True, False, False]),
    ("setp.gtu.f32 %d, %a, %b;", f32(2, 1, NAN), f32(1, 1, 1), [True, False, True]),
    ("setp.nan.f32 %d, %a, %b;", f32(2, NAN), f32(1, 1), [False, True]),
    ("setp.num.f32 %d, %a, %b;", f32(2, NAN), f32(1, 1), [True, False]),
    ("setp.eq.s32 %p1, %a, %a; setp.lt.and.s32 %d, %a, %b, !%p1;", u32(1), u32(2), [False]),
    ("mov.pred %d, -1;", u32(1), u32(2), [True]),
    ("mov.pred %p1, 0; and.pred %d, %p1, -1;", u32(1), u32(2), [False]),
    ("setp.lt.s32 %p1|%d, %a, %b;", u32(1, 3), u32(2, 2), [False, True]),
]


@pytest.mark.parametrize(("code", "a", "b", "expected"), COMPARISONS, ids=lambda x: str(x)[:24])
def test_comparisons(code: str, a: Any, b: Any, expected: Any) -> None:
    assert each(code, a, b, result=np.bool_).tolist() == expected


def test_choices_and_moves() -> None:
    picks = np.array([True, False])
    assert each("selp.b32 %d, %a, 7, %b;", u32(1, 2), picks, result=U32).tolist() == [1, 7]
    assert each("slct.b32.s32 %d, %a, 7, %b;", u32(1, 2), u32(0, -1), result=U32).tolist() == [1, 7]
    assert each("set.lt.u32.s32 %d, %a, 2;", u32(1, 2), result=U32).tolist() == [2**32 - 1, 0]
    swap = "mov.b32 {%h1, %h2}, %a; mov.b32 %d, {%h2, %h1};"
    assert each(swap, u32(0x1234_5678), result=U32).tolist() == [0x5678_1234]
    upper = "mov.b64 {_, %r1}, %a; mov.b64 %d, {%r1, %r1};"
    assert each(upper, u64(7 << 32), result=U64).tolist() == [7 << 32 | 7]
