"""What kernels on the tensor cores are made of: copies to shared memory, fragments, products.

Everything here is there from sm80 on. Addresses in shared memory are `Uint32`, those in global
memory `Int64`. A "word" is a `Uint32` with two 16-bit elements, the one of lower index in its lower
half. Names of fragments and lanes are those of the PTX manual's `mma.m16n8k16`: lane
`4 * group + t`.
"""

# The DSL ships no types, and its `.pth` file hides it from type checkers.

# pyright: reportMissingImports=false

from cutlass import Float32, Int32, Uint32, cute
from cutlass._mlir.dialects import llvm
from cutlass.cutlass_dsl import T

_NAMES = {"BFloat16": "bf16", "Float16": "f16"}


def dtype_name(element):
    """The PTX name of a 16-bit dtype."""
    return _NAMES[element.__name__]


def mma(a, b, c, element):
    """Multiply 16x16 by 16x8 and add: words `a` (4) and `b` (2), sums `c` (4 fp32)."""
    name = dtype_name(element)
    operands = [f"{{$r{i}}}" for i in range(10)]
    return cute.arch.inline_ptx(
        f"mma.sync.aligned.m16n8k16.row.col.f32.{name}.{name}.f32 "
        "{{$w0}, {$w1}, {$w2}, {$w3}}, "
        f"{{{', '.join(operands[:4])}}}, {{{', '.join(operands[4:6])}}}, "
        f"{{{', '.join(operands[6:])}}};",
        write_only_types=[Float32] * 4,
        read_only_args=[*a, *b, *c],
    )


def load_matrices(address, offset=0, *, transposed=False, count=4):
    """Load 1, 2 or 4 matrices of 8x8 16-bit elements from shared memory, a word a lane each.

    Lane `8 * i + r` gives the address of row `r` of matrix `i`, aligned to 16 bytes; the constant
    `offset` is added to it. A lane gets elements 2t and 2t + 1 of row `group`, or of column `group`
    if `transposed`.
    """
    words = ", ".join(f"{{$w{i}}}" for i in range(count))
    turn = ".trans" if transposed else ""
    found = cute.arch.inline_ptx(
        f"ldmatrix.sync.aligned.m8n8.x{count}{turn}.shared.b16 {{{words}}}, [{{$r0}}+{offset}];",
        write_only_types=[Uint32] * count,
        read_only_args=[address],
    )
    return (found,) if count == 1 else found


def load_shared(address, offset=0, *, count=4):
    """Load 1, 2 or 4 words of 4 bytes from shared memory at `address` plus a constant."""
    words = [f"{{$w{i}}}" for i in range(count)]
    kind = f"v{count}.b32 {{{', '.join(words)}}}" if count > 1 else f"b32 {words[0]}"
    found = cute.arch.inline_ptx(
        f"ld.shared.{kind}, [{{$r0}}+{offset}];",
        write_only_types=[Uint32] * count,
        read_only_args=[address],
    )
    return (found,) if count == 1 else found


def load_floats(address, offset=0, *, count=2):
    """As `load_shared`, of fp32 numbers."""
    return [word.bitcast(Float32) for word in load_shared(address, offset, count=count)]


def store_shared(address, words, offset=0):
    """Store 1, 2 or 4 words of 4 bytes to shared memory at `address` plus a constant."""
    count = len(words)
    names = [f"{{$r{i + 1}}}" for i in range(count)]
    kind, what = (f"v{count}.b32", f"{{{', '.join(names)}}}") if count > 1 else ("b32", names[0])
    cute.arch.inline_ptx(
        f"st.shared.{kind} [{{$r0}}+{offset}], {what};", read_only_args=[address, *words]
    )


def copy_async(shared, address, size, wanted, offset=0):
    """Where `wanted`, start copying 16 bytes to shared memory, at `shared` plus a constant.

    Only the first `size` are read and the rest is zero; with a size of 0 the address may be any.
    Both addresses are aligned to 16 bytes.
    """
    if wanted is True:
        cute.arch.inline_ptx(
            f"cp.async.cg.shared.global [{{$r0}}+{offset}], [{{$r1}}], 16, {{$r2}};",
            read_only_args=[shared, address, size],
        )
        return
    cute.arch.inline_ptx(
        "{ .reg .pred p; setp.ne.s32 p, {$r3}, 0; "
        f"@p cp.async.cg.shared.global [{{$r0}}+{offset}], [{{$r1}}], 16, {{$r2}}; }}",
        read_only_args=[shared, address, size, Int32(wanted)],
    )


def commit_copies():
    """End a group of this thread's copies."""
    cute.arch.inline_ptx("cp.async.commit_group;")


def wait_copies(pending):
    """Wait until at most the last `pending` groups of this thread's copies are under way."""
    cute.arch.inline_ptx(f"cp.async.wait_group {pending};")


def pack(low, high, element):
    """Round two fp32 numbers to nearest even into a word."""
    return cute.arch.inline_ptx(
        f"cvt.rn.{dtype_name(element)}x2.f32 {{$w0}}, {{$r1}}, {{$r0}};",
        write_only_types=[Uint32],
        read_only_args=[low, high],
    )


def unpack(word, element):
    """The two elements of a word in fp32."""
    if dtype_name(element) == "bf16":
        low, high = word << Uint32(16), word & Uint32(0xFFFF0000)
        return low.bitcast(Float32), high.bitcast(Float32)
    return cute.arch.inline_ptx(
        "{ .reg .b16 low, high; mov.b32 {low, high}, {$r0}; "
        "cvt.f32.f16 {$w0}, low; cvt.f32.f16 {$w1}, high; }",
        write_only_types=[Float32, Float32],
        read_only_args=[word],
    )


def exp2(value):
    """2 to the power of an fp32 number, to 2 ulp; tiny results are 0."""
    return cute.arch.inline_ptx(
        "ex2.approx.ftz.f32 {$w0}, {$r0};", write_only_types=[Float32], read_only_args=[value]
    )


def reciprocal(value):
    """1 over an fp32 number, to 1 ulp; 0 of infinities."""
    return cute.arch.inline_ptx(
        "rcp.approx.ftz.f32 {$w0}, {$r0};", write_only_types=[Float32], read_only_args=[value]
    )


def at_least(word, floor, element):
    """The elements of a word, none below those of another; NaN stays."""
    return cute.arch.inline_ptx(
        f"max.NaN.{dtype_name(element)}x2 {{$w0}}, {{$r0}}, {{$r1}};",
        write_only_types=[Uint32],
        read_only_args=[word, floor],
    )


def finite_only(word, element):
    """The elements of a word; 0 instead of those that are infinite or NaN."""
    bf16 = dtype_name(element) == "bf16"
    exponent, one = (0x7F807F80, 0x00800080) if bf16 else (0x7C007C00, 0x04000400)
    # An exponent of ones alone becomes the bit above it when one is added.
    above = ((word & Uint32(exponent)) + Uint32(one)) & Uint32(0x80008000)
    return word & ~((above >> Uint32(15)) * Uint32(0xFFFF))


def transpose_matrix(word):
    """Transpose an 8x8 matrix of 16-bit elements, of which lane (group, t) has row `group`."""
    return cute.arch.inline_ptx(
        "movmatrix.sync.aligned.m8n8.trans.b16 {$w0}, {$r0};",
        write_only_types=[Uint32],
        read_only_args=[word],
    )


def copy_number_async(shared, address, inside, wanted):
    """Where `wanted`, start copying 4 bytes to shared memory; zero unless `inside`.

    Both addresses are aligned to 4 bytes.
    """
    cute.arch.inline_ptx(
        "{ .reg .pred p; setp.ne.s32 p, {$r3}, 0; "
        "@p cp.async.ca.shared.global [{$r0}], [{$r1}], 4, {$r2}; }",
        read_only_args=[shared, address, Int32(inside) * 4, Int32(wanted)],
    )


def thread_index():
    """This thread's index in its block, read here, so that no register holds it until then."""
    return Int32(
        llvm.inline_asm(
            T.i32(), [], "mov.u32 $0, %tid.x;", "=r", has_side_effects=True, is_align_stack=False
        )
    )
