"""Skinny GEMV, ``out = x @ weight.T + bias``, for up to eight rows of x, on the tensor cores.

Shapes, all of one 16-bit dtype; rows have a stride of their own, elements of a row lie side by
side:

- ``x``       ``(x_rows, k)``, ``x_rows`` from 1 to ``m``;
- ``weight``  ``(n, k)``, read from memory once: this is what the kernel costs;
- ``bias``    ``(n,)``, or null;
- ``out``     ``(x_rows, n)``, summed in fp32 and rounded once.

``k`` is a multiple of 8 and the rows of ``x`` and ``weight`` start 16-byte aligned. Strides count
elements.

``n`` and ``block_rows`` go up to 2**31 - 1 and ``k`` up to 2**31 - 8. Rows are unsigned numbers of
32 bits, in which the sum of any two fits; how many are left is signed, as it passes below 0.
Offsets in memory have 64 bits.

Block ``b`` owns the weight rows from ``b * block_rows`` on, ``block_rows`` of them, and goes
through them in tiles of ``rows``; without ``persistent`` it has one tile, and ``block_rows`` is
``rows``. Its warps split K. In a step each warp takes ``unroll`` chunks of K side by side, and the
next step's lie ``warps`` times as far on.

What decides the speed is bytes in flight. So a thread has its loads of a whole step under way
before it uses the first, and refills the registers in place, with the next step or the first one of
the next tile. As each round of loads is used only across the back edge of the loop, the assembler
cannot move loads down to their uses, as it does within one basic block.

Every load is predicated on lying in its row and in the block's rows, and gives zeros where it does
not: so one loop serves any ``n`` and ``k``, and nothing is read past the end.

With ``pdl`` (programmatic dependent launch, from sm90 on) the next kernel in the stream may start
at once, and this one reads the first step's weights while the kernel before it still runs, where
``constant`` says that that kernel cannot be writing them; else it waits first. Nothing else is read
or written before the wait, and every thread waits, so that whoever waits for this kernel waits for
the ones before it too.

Also with ``pdl``, each of the grid's first ``ahead_blocks`` blocks asks the L2 before the wait for
``ahead_rows`` rows (at most one a thread) from ``ahead_skip`` after its first on. That is a hint to
the level of memory where all writes meet: it cannot hand anyone old data, so it needs no
``constant``. Rows that would lie past the end are left out, or, should the sum with a huge
``ahead_skip`` wrap, are others of this weight.

``upcoming`` is memory that a later kernel of the stream reads, most likely its weights. After the
wait, block ``b`` asks the L2 for ``upcoming_bytes`` of it (at most a piece a thread) from
``b * upcoming_bytes`` on, so that the memory has work while this kernel ends and the next one waits
for it.

The sums meet in a fixed order, lanes by shuffle and then warps through shared memory behind one
barrier a tile (two buffers in turn), so equal inputs give equal bits.
"""

# The DSL ships no types, and its `.pth` file hides it from type checkers.
# pyright: reportMissingImports=false

import cutlass
from cutlass import Float32, Int32, Int64, Uint32, cute
from cutlass._mlir.dialects import llvm
from cutlass.cutlass_dsl import T

from ..loads import CACHED, STREAMED, load_bits, load_vector
from ..scalars import choose
from .fragments import VECTOR, WARP, Layout

PIECE = 4096
"""Most bytes of `upcoming` that one thread asks for."""
PAD = 4
"""Floats between rows of partial sums, so that lanes hit different banks."""


@cute.kernel
def gemv(
    x: cute.Pointer,
    weight: cute.Pointer,
    bias: cute.Pointer,
    out: cute.Pointer,
    n: Int32,
    k: Int32,
    x_rows: Int32,
    block_rows: Int32,
    constant: Int32,
    x_stride: Int64,
    weight_stride: Int64,
    out_stride: Int64,
    ahead_skip: Int32,
    ahead_rows: Int32,
    ahead_blocks: Int32,
    upcoming: cute.Pointer,
    upcoming_bytes: Int32,
    *,
    m: cutlass.Constexpr,
    side: cutlass.Constexpr,
    rows: cutlass.Constexpr,
    warps: cutlass.Constexpr,
    unroll: cutlass.Constexpr,
    persistent: cutlass.Constexpr,
    pdl: cutlass.Constexpr,
):
    """Compute ``block_rows`` columns of ``out``.

    Grid ``(ceildiv(n, block_rows), 1, 1)``, block ``(32 * warps, 1, 1)``, and
    ``4 * warps * m * (rows + 4) * (1 + persistent)`` bytes of dynamic shared memory. ``rows * m``
    is at most ``32 * warps``, and ``rows`` a multiple of ``2 * m`` (side ``a``) or ``m / 2`` (side
    ``b``).
    """
    layout = Layout(m, rows, side)
    element = weight.dtype
    thread = Uint32(cute.arch.thread_idx()[0])
    warp = thread // WARP
    lane = thread % WARP
    vectors = Uint32(k) // VECTOR
    step = warps * unroll * layout.chunk
    first_row = Uint32(cute.arch.block_idx()[0]) * Uint32(block_rows)
    end_row = smaller(first_row + Uint32(block_rows), Uint32(n))

    row, vector = layout.weight_place(lane)
    position = warp * (unroll * layout.chunk) + vector
    row_bytes = weight_stride * 2
    load_bytes = row_bytes * layout.load_rows
    address = weight.toint() + Int64(first_row + row) * row_bytes + Int64(position) * 16
    rows_left = Int32(end_row - first_row - row)

    asked = Uint32(ahead_skip) + lane * warps + warp
    limit = end_row if cutlass.const_expr(persistent) else Uint32(n)
    wanted = (
        (lane * warps + warp < Uint32(ahead_rows))
        & (cute.arch.block_idx()[0] < ahead_blocks)
        & (first_row + asked < limit)
    )
    asked_row = weight.toint() + Int64(first_row + asked) * row_bytes
    if cutlass.const_expr(pdl):
        cute.arch.griddepcontrol_launch_dependents()
        if constant == 0:
            ask(asked_row, Uint32(k) * 2, Uint32(0), wanted)
            cute.arch.griddepcontrol_wait()
    weights = cute.make_rmem_tensor((4, layout.groups, unroll), Uint32)
    xs = cute.make_rmem_tensor((4, layout.x_vectors, unroll), Uint32)
    sums = cute.make_rmem_tensor((4, layout.tiles), Float32)
    for u in cutlass.range_constexpr(unroll):
        refill(weights, u, layout, address, load_bytes, position, vectors, rows_left)

    if cutlass.const_expr(pdl):
        # What the first round of loads takes needs no asking for.
        loaded = choose(asked < rows, Uint32(step * 16), Uint32(0))
        ask(asked_row + Int64(loaded), Uint32(k) * 2, loaded, wanted & (constant != 0))
        cute.arch.griddepcontrol_wait()
    x_row, x_vector = layout.x_place(lane)
    x_position = warp * (unroll * layout.chunk) + x_vector
    x_address = (
        x.toint()
        + Int64(smaller(x_row, Uint32(x_rows) - 1)) * (x_stride * 2)
        + Int64(x_position) * 16
    )
    for u in cutlass.range_constexpr(unroll):
        refill_x(xs, u, layout, x_address, x_position, vectors)

    answer_row = thread % rows
    answer_column = thread // rows
    partials = cute.arch.get_dyn_smem(Float32)
    tiles = Int32(1)
    if cutlass.const_expr(persistent):
        tiles = Int32((end_row - first_row + (rows - 1)) // rows)
    answers = answer_column < smaller(Uint32(x_rows), Uint32(m))
    bias_bits = load_bits(bias, first_row + answer_row, answers, answer_row, end_row - first_row)
    if cutlass.const_expr(pdl):
        ask_upcoming(upcoming, upcoming_bytes)
    for tile in cutlass.range(0, tiles, 1, unroll=1):
        sums.fill(0.0)
        for first in cutlass.range(0, vectors, step, unroll=1):
            if cutlass.const_expr(persistent):
                # On in the row, or back to its start and down to the next tile's rows.
                ends = first + step >= vectors
                onward = choose(ends, -Int32(first), Int32(step))
                position = Uint32(Int32(position) + onward)
                x_position = Uint32(Int32(x_position) + onward)
                x_address += Int64(onward) * 16
                address += Int64(onward) * 16 + choose(ends, row_bytes * rows, Int64(0))
                rows_left = choose(ends, rows_left - rows, rows_left)
            else:
                address += step * 16
                x_address += step * 16
                position += step
                x_position += step
            for u in cutlass.range_constexpr(unroll):
                layout.multiply(sums, weights, xs, u, element)
                refill(weights, u, layout, address, load_bytes, position, vectors, rows_left)
                refill_x(xs, u, layout, x_address, x_position, vectors)
        this_bias = bias_bits
        if cutlass.const_expr(persistent):
            after = first_row + Uint32(tile) * rows + rows
            bias_bits = load_bits(bias, after + answer_row, answers, answer_row, end_row - after)

        # Read anew, so that the loop above need not hold what follows from them.
        this = special("tid.x")
        row_here, column_here = this % rows, this // rows
        block_row = special("ctaid.x") * Uint32(block_rows)
        rows_here = (
            smaller(block_row + Uint32(block_rows), Uint32(n)) - block_row - Uint32(tile) * rows
        )
        buffer = partials
        if cutlass.const_expr(persistent):
            buffer = partials + (tile % 2) * (warps * m * (rows + PAD))
        store_sums(buffer + this // WARP * (m * (rows + PAD)), layout, sums, this % WARP)
        cute.arch.sync_threads()
        if (column_here < smaller(Uint32(x_rows), Uint32(m))) & (row_here < rows_here):
            mine = buffer + (column_here * (rows + PAD) + row_here)
            total = sum_over_warps(mine, warps, m * (rows + PAD)) + this_bias.bitcast(element).to(
                Float32
            )
            offset = Int64(column_here) * out_stride + block_row + Uint32(tile) * rows + row_here
            (out + offset).store(total.to(out.dtype))


def special(name):
    """A special register, read here and not before."""
    return Uint32(
        llvm.inline_asm(
            T.i32(), [], f"mov.u32 $0, %{name};", "=r", has_side_effects=True, is_align_stack=False
        )
    )


def ask_upcoming(upcoming, size):
    """Prefetch this block's `size` bytes of `upcoming` into the L2, a piece a thread."""
    start = special("tid.x") * PIECE
    left = size - Int32(start)
    address = upcoming.toint() + Int64(special("ctaid.x")) * Int64(size) + Int64(start)
    ask(address, Uint32(choose(left < PIECE, left, Int32(PIECE))), Uint32(0), left > 0)


def ask(address, size, loaded, wanted):
    """Prefetch a row of ``size`` bytes into the L2, less the ``loaded`` ones before ``address``."""
    cute.arch.inline_ptx(
        "{ .reg .pred inside; .reg .b32 rest; setp.ne.s32 inside, {$r3}, 0; "
        "setp.gt.and.u32 inside, {$r1}, {$r2}, inside; sub.u32 rest, {$r1}, {$r2}; "
        "@inside cp.async.bulk.prefetch.L2.global [{$r0}], rest; }",
        read_only_args=[address, size, loaded, Int32(wanted)],
    )


def refill(weights, u, layout, address, load_bytes, position, vectors, rows_left):
    """Load slot ``u`` of the step at ``address``."""
    ahead = u * layout.chunk
    for group in range(layout.groups):
        words = load_vector(
            address,
            ahead * 16,
            position + ahead,
            vectors,
            STREAMED,
            rows_left,
            group * layout.load_rows,
        )
        address = address + load_bytes
        for i, word in enumerate(words):
            weights[i, group, u] = word


def refill_x(xs, u, layout, address, position, vectors):
    """Load slot ``u`` of x of the step at ``address``."""
    for v in range(layout.x_vectors):
        ahead = u * layout.chunk + 4 * v
        words = load_vector(address, ahead * 16, position + ahead, vectors, CACHED)
        for i, word in enumerate(words):
            xs[i, v, u] = word


def store_sums(destination, layout, sums, lane):
    """Store this warp's sums, rows of x one after another."""
    found, answers = layout.results(sums, lane)
    for value, row, column in found:
        index = column * (layout.rows + PAD) + row
        store_if(answers, destination + index, value)


def store_if(condition, pointer, value):
    """Store where ``condition`` holds; everywhere if it is None."""
    if condition is None:
        pointer.store(value)
    else:
        cute.arch.inline_ptx(
            "{ .reg .pred p; setp.ne.s32 p, {$r2}, 0; @p st.shared.f32 [{$r0}], {$r1}; }",
            read_only_args=[pointer.toint(), value, Int32(condition)],
        )


def sum_over_warps(partials, warps, stride):
    """Sum one total over the warps in order; their values lie ``stride`` apart."""
    total = partials.load()
    for warp in range(1, warps):
        total = total + (partials + warp * stride).load()
    return total


def smaller(left, right):
    """The lesser of two, without a branch."""
    return choose(left < right, left, right)
