"""Predicated loads, shared by kernels: what lies outside is not read and is zero."""

# The DSL ships no types, and its `.pth` file hides it from type checkers.

# pyright: reportMissingImports=false

from cutlass import Int32, Int64, Uint16, Uint32, cute

STREAMED = "ld.global.L1::no_allocate"
"""What is read once leaves the L1 to the rest."""
CACHED = "ld.global"


def load_vector(address, offset, position, limit, instruction, rows_left=None, row=0):
    """Load the 16 bytes at `address` plus a constant `offset`, as four words.

    Zeros unless `position < limit` and, with `rows_left`, `rows_left > row`. `position` and `limit`
    are both `Uint32` or both `Int64`.
    """
    kind = "s64" if isinstance(limit, Int64) else "u32"
    within = f"setp.gt.and.s32 inside, {{$r3}}, {row}, inside; " if rows_left is not None else ""
    zeros = "".join(f"mov.b32 {{$w{i}}}, 0; " for i in range(4))
    return cute.arch.inline_ptx(
        f"{{ .reg .pred inside; setp.lt.{kind} inside, {{$r1}}, {{$r2}}; "
        + within
        + zeros
        + "@inside "
        + instruction
        + f".v4.b32 {{{{$w0}}, {{$w1}}, {{$w2}}, {{$w3}}}}, [{{$r0}}+{offset}]; }}",
        write_only_types=[Uint32] * 4,
        read_only_args=[address, position, limit] + ([] if rows_left is None else [rows_left]),
    )


def load_bits(base, index, wanted, row, rows_left):
    """Load 16-bit element ``index`` where ``wanted`` holds and ``row < rows_left``; else zero.

    A null ``base`` gives zero everywhere. ``rows_left`` may have passed below 0.
    """
    return cute.arch.inline_ptx(
        "{ .reg .pred inside; setp.ne.s32 inside, {$r2}, 0; setp.ne.and.s64 inside, {$r1}, 0, "
        "inside; setp.lt.and.s32 inside, {$r3}, {$r4}, inside; mov.b16 {$w0}, 0; "
        "@inside ld.global.b16 {$w0}, [{$r0}]; }",
        write_only_types=[Uint16],
        read_only_args=[
            base.toint() + Int64(index) * 2,
            base.toint(),
            Int32(wanted),
            row,
            rows_left,
        ],
    )
