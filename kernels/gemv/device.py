"""Skinny GEMV, ``out = x @ weight.T``, on the ordinary fp32 pipe.

Shapes, all bf16; rows have a stride of their own, elements of a row lie side by side:

- ``x``       ``(m, k)``, ``m`` a compile-time choice of 1 or 2;
- ``weight``  ``(n, k)``, read from memory once: this is what the kernel costs;
- ``out``     ``(m, n)``, summed in fp32 and rounded once.

The pointers and the row strides of ``x`` and ``weight`` are multiples of 16 bytes and ``k`` is a
multiple of 8, so that a row is a run of 16-byte vectors. ``out`` needs only the alignment of its
element, and any row stride. Strides count elements.

Layout of the work: block ``b`` owns the columns of ``out`` (rows of ``weight``) from ``b * rows``
to ``b * rows + rows - 1``, and its ``warps`` warps split K. In a step each thread takes ``unroll``
vectors of every weight row, ``32 * warps`` vectors apart, so that a warp's load covers 512 bytes of
one row. All rows of a block share each vector of ``x``, which keeps the traffic of ``x`` (it stays
in the L1) and its unpacking small.

With ``m`` this small, bytes in flight decide the speed and arithmetic does not. So a thread has
``rows * unroll`` weight loads under way before it uses the first, and refills the registers in
place: those of the next step are loaded as soon as they are used up. That each round of loads is
used only across the back edge of the loop is also what stops the assembler from moving loads down
to their uses, as it does within one basic block, whatever the source says.

Every load is predicated on lying in the row, and gives zeros where it does not: so one loop serves
any ``k``, and the refill of the last step reads nothing. In the last block, rows from ``n`` on
stand for row ``n - 1`` and are not stored.

The sums meet in a fixed order, lanes by shuffle and then warps through shared memory behind the
only barrier, so equal inputs give equal bits.
"""

# The DSL ships no types, and its `.pth` file hides it from type checkers.
# pyright: reportMissingImports=false

import cutlass
from cutlass import Float32, Int32, Int64, Uint32, cute

WARP = 32
VECTOR = 8
"""Elements in 16 bytes, the unit of every load."""

CACHED = "ld.global"
STREAMED = "ld.global.L1::no_allocate"
"""Weights are read once, so they leave the L1 to ``x``."""


@cute.kernel
def gemv(
    x: cute.Pointer,
    weight: cute.Pointer,
    out: cute.Pointer,
    n: Int32,
    k: Int32,
    x_stride: Int64,
    weight_stride: Int64,
    out_stride: Int64,
    *,
    m: cutlass.Constexpr,
    rows: cutlass.Constexpr,
    warps: cutlass.Constexpr,
    unroll: cutlass.Constexpr,
):
    """Compute ``rows`` columns of ``out``.

    Grid ``(ceildiv(n, rows), 1, 1)``, block ``(32 * warps, 1, 1)``, and ``4 * warps * rows * m``
    bytes of dynamic shared memory; ``rows * m`` is at most ``32 * warps``. Sizes and indices are
    unsigned, which spares the sign corrections of division and widening.
    """
    thread = Uint32(cute.arch.thread_idx()[0])
    first_row = Uint32(cute.arch.block_idx()[0]) * rows
    rows_left = Uint32(n) - first_row

    threads = WARP * warps
    step = threads * unroll
    vectors = Uint32(k) // VECTOR

    x_rows = row_addresses(x, x_stride, m)
    first_weight = weight + Int64(first_row) * weight_stride
    weight_rows = row_addresses(first_weight, weight_stride, rows, rows_left)

    sums = cute.make_rmem_tensor((rows, m), Float32)
    sums.fill(0.0)
    weights = cute.make_rmem_tensor((4, rows, unroll), Uint32)
    for u in cutlass.range_constexpr(unroll):
        refill(weights, u, weight_rows, thread + u * threads, vectors)
    for first in cutlass.range(0, vectors, step, unroll=1):
        here = first + thread
        x_words = [
            [load(row, here + u * threads, vectors, CACHED) for row in x_rows]
            for u in range(unroll)
        ]
        for u in cutlass.range_constexpr(unroll):
            accumulate(sums, weights, u, x_words[u])
            refill(weights, u, weight_rows, here + step + u * threads, vectors)

    totals, first_total, answers = sum_over_warp([sums[i] for i in range(m * rows)], thread % WARP)
    partials = cute.arch.get_dyn_smem(Float32)
    if answers:
        store_all(partials + (thread // WARP * (m * rows) + first_total), totals)
    cute.arch.sync_threads()

    row = thread % rows
    if thread < m * rows and row < rows_left:
        total = sum_over_warps(partials + thread, warps, m * rows)
        offset = Int64(thread // rows) * out_stride + first_row + row
        (out + offset).store(total.to(out.dtype))


def row_addresses(base, stride, count, limit=None):
    """Addresses of ``count`` rows from ``base`` on.

    Where only the first ``limit`` rows exist, the others stand at the last of these. The arithmetic
    is 64-bit, since a matrix may pass 2**31 elements.
    """
    row_bytes = stride * (base.dtype.width // 8)
    addresses = [base.toint()]
    for r in range(1, count):
        onward = row_bytes if limit is None else select(limit > r, row_bytes, Int64(0))
        addresses.append(addresses[-1] + onward)
    return addresses


def refill(weights, u, weight_rows, position, limit):
    """Load vector ``position`` of every weight row into slot ``u`` of ``weights``."""
    for r, row in enumerate(weight_rows):
        for i, word in enumerate(load(row, position, limit, STREAMED)):
            weights[i, r, u] = word


def accumulate(sums, weights, u, x_vectors):
    """Add the products of slot ``u`` of ``weights`` and a vector of each row of ``x``."""
    x_values = [unpack(words) for words in x_vectors]
    for r in range(weights.shape[1]):
        weight_values = unpack([weights[i, r, u] for i in range(4)])
        for j, values in enumerate(x_values):
            sums[r, j] = dot(sums[r, j], weight_values, values)


def load(row, position, limit, instruction):
    """Load vector ``position`` of the row at address ``row``, as four words of two elements.

    Vectors from ``limit`` on are not read and are zeros.
    """
    zeros = "".join(f"mov.b32 {{$w{i}}}, 0; " for i in range(4))
    return cute.arch.inline_ptx(
        "{ .reg .pred inside; setp.lt.u32 inside, {$r1}, {$r2}; "
        + zeros
        + "@inside "
        + instruction
        + ".v4.b32 {{$w0}, {$w1}, {$w2}, {$w3}}, [{$r0}]; }",
        write_only_types=[Uint32] * 4,
        read_only_args=[row + Int64(position) * 16, position, limit],
    )


def unpack(words):
    """Widen eight bf16 to fp32: a bf16 is the upper half of the fp32 of the same value."""
    values = []
    for word in words:
        values.append((word << 16).bitcast(Float32))
        values.append((word & Uint32(0xFFFF0000)).bitcast(Float32))
    return values


def dot(total, left, right):
    """Add the products of ``left`` and ``right`` to ``total``, in order."""
    for a, b in zip(left, right, strict=True):
        total = total + a * b
    return total


def sum_over_warp(values, lane):
    """Sum each of ``values`` over the lanes of a warp, and deal the totals out to the lanes.

    While the count is even, a lane swaps half of its values with the lane that differs in one bit,
    so 16 values take 16 shuffles, not 80. Gives this lane's totals, the index of the first among
    ``values``, and whether it is the one to answer for them among the lanes that hold the same.
    """
    sharers = WARP
    first = Uint32(0)
    while sharers > 1 and len(values) % 2 == 0:
        sharers //= 2
        half = len(values) // 2
        upper = (lane & sharers) != 0
        kept = [select(upper, values[half + i], values[i]) for i in range(half)]
        sent = [select(upper, values[i], values[half + i]) for i in range(half)]
        values = [
            mine + cute.arch.shuffle_sync_bfly(theirs, sharers)
            for mine, theirs in zip(kept, sent, strict=True)
        ]
        first = first + select(upper, Uint32(half), Uint32(0))
    distance = sharers // 2
    while distance:
        values = [value + cute.arch.shuffle_sync_bfly(value, distance) for value in values]
        distance //= 2
    return values, first, lane % sharers == 0


def sum_over_warps(partials, warps, stride):
    """Sum one total over the warps in order; their values lie ``stride`` apart."""
    total = partials.load()
    for warp in range(1, warps):
        total = total + (partials + warp * stride).load()
    return total


def store_all(destination, values):
    """Store ``values`` side by side."""
    for i, value in enumerate(values):
        (destination + i).store(value)


def select(condition, chosen, other):
    """Give ``chosen`` where ``condition`` holds and ``other`` elsewhere, without a branch."""
    return type(chosen)(cutlass.select_(condition, chosen, other))
