"""Scalars whose dtype a launch decides, and predicated accesses of global memory."""

# pyright: reportMissingImports=false

import cutlass
from cutlass import Float32, Int32, Uint32, cute

FLOAT, BFLOAT, HALF = 0, 1, 2
"""Codes of dtypes, as kernels take them in their `..._kind` parameters."""


def load_scalar(base, index, kind, wanted):
    """Load element `index` (`Int64`) of an array of dtype `kind` as fp32; zero unless `wanted`."""
    return cute.arch.inline_ptx(
        "{ .reg .pred in, p; .reg .b16 none, half; .reg .b32 word; .reg .b64 at; "
        "setp.ne.s32 in, {$r3}, 0; mov.b16 none, 0; mov.b16 half, 0; mov.b32 word, 0; "
        "mov.f32 {$w0}, 0f00000000; "
        "shl.b64 at, {$r1}, 1; setp.eq.s32 p, {$r2}, 0; @p shl.b64 at, {$r1}, 2; "
        "add.s64 at, at, {$r0}; "
        "setp.eq.and.s32 p, {$r2}, 0, in; @p ld.global.f32 {$w0}, [at]; "
        "setp.ne.and.s32 p, {$r2}, 0, in; @p ld.global.b16 half, [at]; "
        "mov.b32 word, {none, half}; "
        "setp.eq.and.s32 p, {$r2}, 1, in; @p mov.b32 {$w0}, word; "
        "setp.eq.and.s32 p, {$r2}, 2, in; @p cvt.f32.f16 {$w0}, half; }",
        write_only_types=[Float32],
        read_only_args=[base, index, kind, Int32(wanted)],
    )


def load_pair(base, index, kind, wanted):
    """As `load_scalar`, of elements `index` and `index + 1`; `index` is even and pairs aligned."""
    return cute.arch.inline_ptx(
        "{ .reg .pred in, p; .reg .b16 low, high, none; .reg .b32 word; .reg .b64 at; "
        "setp.ne.s32 in, {$r3}, 0; mov.b16 none, 0; mov.b32 word, 0; "
        "mov.f32 {$w0}, 0f00000000; mov.f32 {$w1}, 0f00000000; "
        "shl.b64 at, {$r1}, 1; setp.eq.s32 p, {$r2}, 0; @p shl.b64 at, {$r1}, 2; "
        "add.s64 at, at, {$r0}; "
        "setp.eq.and.s32 p, {$r2}, 0, in; @p ld.global.v2.f32 {{$w0}, {$w1}}, [at]; "
        "setp.ne.and.s32 p, {$r2}, 0, in; @p ld.global.b32 word, [at]; "
        "mov.b32 {low, high}, word; "
        "setp.eq.and.s32 p, {$r2}, 1, in; @p mov.b32 {$w0}, {none, low}; "
        "@p mov.b32 {$w1}, {none, high}; "
        "setp.eq.and.s32 p, {$r2}, 2, in; @p cvt.f32.f16 {$w0}, low; @p cvt.f32.f16 {$w1}, high; }",
        write_only_types=[Float32, Float32],
        read_only_args=[base, index, kind, Int32(wanted)],
    )


def load_number(address, wanted, otherwise):
    """Load an i32 where `wanted` holds; else `otherwise`."""
    return cute.arch.inline_ptx(
        "{ .reg .pred p; setp.ne.s32 p, {$r1}, 0; mov.b32 {$w0}, {$r2}; "
        "@p ld.global.b32 {$w0}, [{$r0}]; }",
        write_only_types=[Int32],
        read_only_args=[address, Int32(wanted), otherwise],
    )


def load_words(address, wanted, offset=0):
    """Load 16 bytes at `address` plus a constant as four words; zeros unless `wanted`."""
    if wanted is True:
        return cute.arch.inline_ptx(
            f"ld.global.v4.b32 {{{{$w0}}, {{$w1}}, {{$w2}}, {{$w3}}}}, [{{$r0}}+{offset}];",
            write_only_types=[Uint32] * 4,
            read_only_args=[address],
        )
    zeros = "".join(f"mov.b32 {{$w{i}}}, 0; " for i in range(4))
    return cute.arch.inline_ptx(
        "{ .reg .pred p; setp.ne.s32 p, {$r1}, 0; " + zeros + "@p ld.global.v4.b32 "
        f"{{{{$w0}}, {{$w1}}, {{$w2}}, {{$w3}}}}, [{{$r0}}+{offset}]; }}",
        write_only_types=[Uint32] * 4,
        read_only_args=[address, Int32(wanted)],
    )


def load_two(address, wanted, offset=0):
    """As `load_words`, of 8 bytes."""
    return cute.arch.inline_ptx(
        "{ .reg .pred p; setp.ne.s32 p, {$r1}, 0; mov.b32 {$w0}, 0; mov.b32 {$w1}, 0; "
        f"@p ld.global.v2.b32 {{{{$w0}}, {{$w1}}}}, [{{$r0}}+{offset}]; }}",
        write_only_types=[Uint32] * 2,
        read_only_args=[address, Int32(wanted)],
    )


def reload_words(words, address, wanted, offset=0):
    """Four words, loaded anew from `address` plus a constant where `wanted` holds."""
    kept = "".join(f"mov.b32 {{$w{i}}}, {{$r{i + 2}}}; " for i in range(4))
    return cute.arch.inline_ptx(
        "{ .reg .pred p; setp.ne.s32 p, {$r1}, 0; " + kept + "@p ld.global.v4.b32 "
        f"{{{{$w0}}, {{$w1}}, {{$w2}}, {{$w3}}}}, [{{$r0}}+{offset}]; }}",
        write_only_types=[Uint32] * 4,
        read_only_args=[address, Int32(wanted), *words],
    )


def prefetch(address, wanted):
    """Ask the L2 for the 128 bytes around an address where `wanted` holds."""
    cute.arch.inline_ptx(
        "{ .reg .pred p; setp.ne.s32 p, {$r1}, 0; @p prefetch.global.L2 [{$r0}]; }",
        read_only_args=[address, Int32(wanted)],
    )


def store_words(address, words, wanted, offset=0):
    """Store 1, 2 or 4 words at `address` plus a constant, where `wanted` holds."""
    names = [f"{{$r{i + 2}}}" for i in range(len(words))]
    kind = f"v{len(words)}.b32" if len(words) > 1 else "b32"
    what = f"{{{', '.join(names)}}}" if len(words) > 1 else names[0]
    cute.arch.inline_ptx(
        "{ .reg .pred p; setp.ne.s32 p, {$r1}, 0; "
        f"@p st.global.{kind} [{{$r0}}+{offset}], {what}; }}",
        read_only_args=[address, Int32(wanted), *words],
    )


def read_floats(address, wanted, offset=0, *, count=1):
    """Load 1 or 2 fp32 numbers at `address` plus a constant; zeros unless `wanted`."""
    names = [f"{{$w{i}}}" for i in range(count)]
    zeros = "".join(f"mov.f32 {name}, 0f00000000; " for name in names)
    kind, what = ("v2.f32", f"{{{', '.join(names)}}}") if count == 2 else ("f32", names[0])
    found = cute.arch.inline_ptx(
        "{ .reg .pred p; setp.ne.s32 p, {$r1}, 0; " + zeros + f"@p ld.global.{kind} {what}, "
        f"[{{$r0}}+{offset}]; }}",
        write_only_types=[Float32] * count,
        read_only_args=[address, Int32(wanted)],
    )
    return [found] if count == 1 else list(found)


def bits(value):
    """The same 32 bits, as a word."""
    return value.bitcast(Uint32)


def choose(condition, chosen, other):
    """Give `chosen` where `condition` holds and `other` elsewhere, without a branch."""
    return type(chosen)(cutlass.select_(condition, chosen, other))


def pinned(value):
    """The same value, which the compiler takes for another: neither shared nor computed anew."""
    return cute.arch.shuffle_sync_bfly(value, 0)
