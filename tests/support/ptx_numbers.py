"""Numbers as PTX computes with them, where numpy has them otherwise or not at all."""

from __future__ import annotations

from typing import Any

import numpy as np

Array = Any


def from_bf16(bits: Array) -> Array:
    """float32 of the bits of bfloat16."""
    return (np.asarray(bits, np.uint16).astype(np.uint32) << np.uint32(16)).view(np.float32)


def to_bf16(values: Array, mode: str = "rn") -> Array:
    """The bits of bfloat16, rounded once: to the nearest, ties to even, or towards zero (`rz`)."""
    values = np.asarray(values)
    if values.dtype == np.float64:
        bits = _odd(values).view(np.uint32)
    else:
        bits = values.astype(np.float32).view(np.uint32)
    rest = np.uint32(0x7FFF) + (bits >> np.uint32(16) & np.uint32(1)) if mode == "rn" else 0
    # A NaN's carry would run into its exponent.
    nan = (bits & np.uint32(0x7FFF_FFFF)) > np.uint32(0x7F80_0000)
    return np.where(nan, np.uint16(0x7FFF), (bits + np.uint32(rest) >> np.uint32(16))).astype(
        np.uint16
    )


def _odd(values: Array) -> Array:
    """float32 of float64, rounded to odd: a second rounding then is as if it were the only one."""
    near = values.astype(np.float32)
    bits = near.view(np.uint32)
    away = np.abs(near.astype(np.float64)) > np.abs(values)
    inexact = (near != values) & ~np.isnan(values) & ~np.isinf(values)
    bits = np.where(away & inexact, bits - np.uint32(1), bits)
    return np.where(inexact, bits | np.uint32(1), bits).view(np.float32)


def rounded(values: Array, dtype: Any, mode: str) -> Array:
    """To a float type by rounding mode rn, rz, rm or rp."""
    near = values.astype(dtype)
    if mode == "rn":
        return near
    wide = near.astype(np.float64)
    if mode == "rz":
        return np.where(np.abs(wide) > np.abs(values), np.nextafter(near, dtype(0)), near)
    if mode == "rm":
        return np.where(wide > values, np.nextafter(near, dtype(-np.inf)), near)
    return np.where(wide < values, np.nextafter(near, dtype(np.inf)), near)


def flush(values: Array) -> Array:
    """Subnormal float32 to zero of their sign."""
    tiny = np.abs(values) < np.float32(2**-126)
    return np.where(tiny, np.copysign(np.float32(0), values), values) if np.any(tiny) else values


def fused(a: Array, b: Array, c: Array) -> Array:
    """float32 of a * b + c, rounded once."""
    product = np.asarray(a, np.float64) * np.asarray(b, np.float64)
    third = np.asarray(c, np.float64)
    total = np.asarray(product + third)
    # Rounded to float64 first, a sum can come to lie half way between two float32.
    bits = total.view(np.uint64)
    middle = (bits & np.uint64(0x1FFF_FFFF)) == np.uint64(0x1000_0000)
    middle |= (np.abs(total) < 2**-126) & (total != 0)
    if middle.any():
        back = total - product
        lost = (product - (total - back)) + (third - back)
        nudge = middle & (lost != 0) & (bits & np.uint64(1) == 0)
        total = np.where(nudge, np.nextafter(total, np.copysign(np.inf, lost)), total)
    return total.astype(np.float32)


def least(a: Array, b: Array) -> Array:
    """The other where one is NaN; -0 is below 0."""
    return -greatest(-a, -b)


def greatest(a: Array, b: Array) -> Array:
    found = np.fmax(a, b)
    zeros = (a == 0) & (b == 0)
    return np.where(zeros, a + b, found) if np.any(zeros) else found


def to_integer(values: Array, dtype: Any, mode: str) -> Array:
    """Of floats, rounded by rni, rzi, rmi or rpi, to the nearest that there is; of NaN zero."""
    how = {"rni": np.rint, "rzi": np.trunc, "rmi": np.floor, "rpi": np.ceil}[mode]
    whole = how(values.astype(np.float64))
    low, high = np.iinfo(dtype).min, np.iinfo(dtype).max
    inside = (whole > float(low) - 1) & (whole < float(high))
    found = np.where(inside, whole, 0).astype(dtype)
    found = np.where(whole >= float(high), dtype(high), found)
    return np.where(whole <= float(low), dtype(low), found)


def high_product(left: Array, right: Array) -> Array:
    """The upper half of a product, of 16, 32 or 64 bits."""
    left, right = np.asarray(left), np.asarray(right)
    dtype = left.dtype
    bits = 8 * dtype.itemsize
    if bits < 64:
        wide = np.int64 if dtype.kind == "i" else np.uint64
        product = left.astype(wide) * right.astype(wide)
        return (product >> wide(bits)).astype(dtype)
    a, b = left.view(np.uint64), right.view(np.uint64)
    half, mask = np.uint64(32), np.uint64(0xFFFF_FFFF)
    low = (a & mask) * (b & mask)
    middle = (a >> half) * (b & mask) + (low >> half)
    other = (a & mask) * (b >> half) + (middle & mask)
    high = (a >> half) * (b >> half) + (middle >> half) + (other >> half)
    if dtype.kind == "i":
        zero = np.uint64(0)
        high = high - np.where(left < 0, b, zero) - np.where(right < 0, a, zero)
    return high.view(dtype)


def quotient(left: Array, right: Array) -> Array:
    """Rounded towards zero."""
    if np.any(right == 0):
        raise ZeroDivisionError("an integer is divided by zero")
    found = left // right
    if np.asarray(left).dtype.kind == "i":
        found = found + ((found * right != left) & ((left < 0) != (right < 0)))
    return found


def remainder(left: Array, right: Array) -> Array:
    if np.any(right == 0):
        raise ZeroDivisionError("an integer is divided by zero")
    return np.fmod(left, right)


def shift_left(values: Array, by: Array) -> Array:
    bits = 8 * np.asarray(values).dtype.itemsize
    kind = np.asarray(values).dtype.type
    moved = values << np.minimum(by, np.uint32(bits - 1)).astype(kind)
    return np.where(by >= np.uint32(bits), kind(0), moved)


def shift_right(values: Array, by: Array) -> Array:
    """Arithmetic for signed numbers."""
    kind = np.asarray(values).dtype.type
    bits = 8 * np.asarray(values).dtype.itemsize
    moved = values >> np.minimum(by, np.uint32(bits - 1)).astype(kind)
    if np.issubdtype(kind, np.signedinteger):
        return moved
    return np.where(by >= np.uint32(bits), kind(0), moved)


def reverse_bits(values: Array) -> Array:
    size = np.asarray(values).dtype.itemsize
    rows = np.atleast_1d(np.asarray(values)).view(np.uint8).reshape(-1, size)
    flipped = np.packbits(np.unpackbits(rows, axis=1)[:, ::-1], axis=1)
    return np.ascontiguousarray(flipped).view(np.asarray(values).dtype).reshape(-1)


def leading_zeros(values: Array) -> Array:
    left = np.asarray(values).copy()
    found = np.zeros(left.shape, np.uint32)
    bits = 8 * left.dtype.itemsize
    kind = left.dtype.type
    step = bits // 2
    while step:
        small = left < (kind(1) << kind(bits - step))
        found = np.where(small, found + np.uint32(step), found)
        left = np.where(small, left << kind(step), left)
        step //= 2
    return np.where(np.asarray(values) == 0, np.uint32(bits), found)


def permute_bytes(a: Array, b: Array, selector: Array, mode: str = "") -> Array:
    """`prmt.b32`."""
    both = np.asarray(a).astype(np.uint64) | np.asarray(b).astype(np.uint64) << np.uint64(32)
    found = np.uint32(0)
    for place in range(4):
        if mode:
            one = np.asarray(selector).astype(np.uint64) & np.uint64(3)
            which = _PERMUTED[mode](one, np.uint64(place))
            sign = np.uint64(0)
        else:
            nibble = (np.asarray(selector) >> np.uint32(4 * place)).astype(np.uint64)
            which, sign = nibble & np.uint64(7), nibble >> np.uint64(3) & np.uint64(1)
        byte = both >> (which * np.uint64(8)) & np.uint64(0xFF)
        filled = np.where(byte >> np.uint64(7) != 0, np.uint64(0xFF), np.uint64(0))
        byte = np.where(sign != 0, filled, byte)
        found = found | byte.astype(np.uint32) << np.uint32(8 * place)
    return found


_PERMUTED = {
    "f4e": lambda one, place: one + place,
    "b4e": lambda one, place: (one - place) & np.uint64(7),
    "rc8": lambda one, place: one,
    "ecl": lambda one, place: np.maximum(one, place),
    "ecr": lambda one, place: np.minimum(one, place),
    "rc16": lambda one, place: (one & np.uint64(1)) * np.uint64(2) + (place & np.uint64(1)),
}


def truth_table(a: Array, b: Array, c: Array, table: int) -> Array:
    """`lop3.b32`."""
    found = np.uint32(0)
    for entry in range(8):
        if table >> entry & 1:
            term = a if entry & 4 else ~a
            term = term & (b if entry & 2 else ~b)
            found = found | (term & (c if entry & 1 else ~c))
    return found


def funnel(low: Array, high: Array, by: Array, left: bool, wrap: bool) -> Array:
    """`shf`: the upper word of both shifted left, or the lower one shifted right."""
    by = by & np.uint32(31) if wrap else np.minimum(by, np.uint32(32))
    by = np.asarray(by).astype(np.uint64)
    both = np.asarray(low).astype(np.uint64) | np.asarray(high).astype(np.uint64) << np.uint64(32)
    moved = (both << by) >> np.uint64(32) if left else both >> by
    return moved.astype(np.uint32)


def extract_field(values: Array, place: Array, length: Array) -> Array:
    """`bfe`, with the sign of the field's upper bit for signed numbers."""
    kind = np.asarray(values).dtype.type
    bits = 8 * np.asarray(values).dtype.itemsize
    place, length = place & np.uint32(0xFF), length & np.uint32(0xFF)
    length = np.minimum(length, np.uint32(bits))
    if np.issubdtype(kind, np.signedinteger):
        # Up until the field's upper bit is the number's, its bits beyond the end filled by sign.
        lower = shift_right(values, place)
        spare = np.uint32(bits) - length
        return np.where(length == 0, kind(0), shift_right(shift_left(lower, spare), spare))
    spare = np.uint32(bits) - length
    return shift_right(shift_left(shift_right(values, place), spare), spare)


def insert_field(field: Array, values: Array, place: Array, length: Array) -> Array:
    """`bfi`."""
    kind = np.asarray(values).dtype.type
    bits = 8 * np.asarray(values).dtype.itemsize
    place, length = place & np.uint32(0xFF), length & np.uint32(0xFF)
    ones = ~shift_left(np.broadcast_to(~kind(0), np.shape(length)), np.minimum(length, bits))
    mask = shift_left(ones, place)
    return (values & ~mask) | (shift_left(field, place) & mask)
