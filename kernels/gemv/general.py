"""Skinny GEMV for any layout: ``out = x @ weight.T + bias``, for up to eight rows of x.

The shapes are those of ``device.py``, but ``k`` is anything from 1 to 2**31 - 1, and ``x`` and
``weight`` have any row stride and any base address that a 16-bit element may have. Only elements of
the rows are read: each load is of one element, and predicated on lying in its row. Positions pass
``k`` by less than two steps, so as unsigned numbers they stay below 2**32.

The order of K in the fragments is free as long as both operands agree on it. So the eight elements
of a lane's vector are not neighbours here: element ``e`` of the vectors of a chunk is one run in
memory, a lane's next to the next lane's, and a load of a warp covers whole runs, though each lane
takes two bytes. The elements stay apart in registers until they are used, one round of loads later.

With ``wide`` the rows of ``weight`` start 16-byte aligned and ``k`` is a multiple of 8, and only x
may lie anyhow: weights are read 16 bytes at a time, so a lane's elements are neighbours again.

The sums meet in a fixed order, as in ``device.py``.
"""

# The DSL ships no types, and its `.pth` file hides it from type checkers.
# pyright: reportMissingImports=false

import cutlass
from cutlass import Float32, Int32, Int64, Uint16, Uint32, cute

from ..loads import CACHED, STREAMED, load_bits, load_vector
from .device import PAD, smaller, store_sums, sum_over_warps
from .fragments import VECTOR, WARP, Layout


@cute.kernel
def gemv_any(
    x: cute.Pointer,
    weight: cute.Pointer,
    bias: cute.Pointer,
    out: cute.Pointer,
    n: Int32,
    k: Int32,
    x_rows: Int32,
    x_stride: Int64,
    weight_stride: Int64,
    out_stride: Int64,
    *,
    m: cutlass.Constexpr,
    side: cutlass.Constexpr,
    rows: cutlass.Constexpr,
    warps: cutlass.Constexpr,
    unroll: cutlass.Constexpr,
    wide: cutlass.Constexpr,
):
    """Compute ``rows`` columns of ``out``.

    Grid ``(ceildiv(n, rows), 1, 1)``, block ``(32 * warps, 1, 1)``, and
    ``4 * warps * m * (rows + 4)`` bytes of dynamic shared memory; limits on the choices as in
    ``device.py``.
    """
    layout = Layout(m, rows, side)
    element = weight.dtype
    thread = Uint32(cute.arch.thread_idx()[0])
    warp = thread // WARP
    lane = thread % WARP
    run = 1 if cutlass.const_expr(wide) else layout.chunk
    ahead = VECTOR * layout.chunk
    step = warps * unroll * ahead
    first_row = Uint32(cute.arch.block_idx()[0]) * rows
    rows_left = Int32(Uint32(n) - first_row)

    row, place = layout.weight_place(lane)
    x_row, x_place = layout.x_place(lane)
    scale = VECTOR if cutlass.const_expr(wide) else 1
    start = warp * (unroll * ahead)
    position = start + place * scale
    x_position = start + x_place * scale
    row_bytes = weight_stride * 2
    load_bytes = row_bytes * layout.load_rows
    address = weight.toint() + Int64(first_row + row) * row_bytes + Int64(position) * 2
    rows_left_here = rows_left - Int32(row)
    x_address = (
        x.toint()
        + Int64(smaller(x_row, Uint32(x_rows) - 1)) * (x_stride * 2)
        + Int64(x_position) * 2
    )

    if cutlass.const_expr(wide):
        weights = cute.make_rmem_tensor((4, layout.groups, unroll), Uint32)
    else:
        weights = cute.make_rmem_tensor((VECTOR, layout.groups, unroll), Uint16)
    xs = cute.make_rmem_tensor((VECTOR, layout.x_vectors, unroll), Uint16)
    sums = cute.make_rmem_tensor((4, layout.tiles), Float32)
    sums.fill(0.0)
    for u in cutlass.range_constexpr(unroll):
        refill(weights, u, layout, address, load_bytes, position, k, rows_left_here, wide)
        refill_x(xs, u, layout, x_address, x_position, k, run, scale)

    answer_row = thread % rows
    answer_column = thread // rows
    answers = answer_column < smaller(Uint32(x_rows), Uint32(m))
    bias_bits = load_bits(bias, first_row + answer_row, answers, answer_row, rows_left)
    # A count of steps: a position would pass 2**31, and loops compare as signed numbers.
    steps = Int32((Uint32(k) + (step - 1)) // step)
    for _ in cutlass.range(0, steps, 1, unroll=1):
        address += step * 2
        x_address += step * 2
        position += step
        x_position += step
        for u in cutlass.range_constexpr(unroll):
            these = weights if cutlass.const_expr(wide) else Pairs(weights)
            layout.multiply(sums, these, Pairs(xs), u, element)
            refill(weights, u, layout, address, load_bytes, position, k, rows_left_here, wide)
            refill_x(xs, u, layout, x_address, x_position, k, run, scale)

    partials = cute.arch.get_dyn_smem(Float32)
    store_sums(partials + warp * (m * (rows + PAD)), layout, sums, lane)
    cute.arch.sync_threads()
    if answers & (Int32(answer_row) < rows_left):
        mine = partials + (answer_column * (rows + PAD) + answer_row)
        total = sum_over_warps(mine, warps, m * (rows + PAD)) + bias_bits.bitcast(element).to(
            Float32
        )
        offset = Int64(answer_column) * out_stride + first_row + answer_row
        (out + offset).store(total.to(out.dtype))


class Pairs:
    """Words of two elements each, from a tensor of single ones; made when first asked for."""

    def __init__(self, elements):
        """Take a register tensor whose first mode goes along K."""
        self.elements = elements
        self.words = {}

    def __getitem__(self, place):
        word, vector, u = place
        if place not in self.words:
            pair = [self.elements[2 * word + i, vector, u] for i in (0, 1)]
            self.words[place] = cute.arch.inline_ptx(
                "mov.b32 {$w0}, {{$r0}, {$r1}};", write_only_types=[Uint32], read_only_args=pair
            )
        return self.words[place]


def refill(weights, u, layout, address, load_bytes, position, k, rows_left, wide):
    """Load slot ``u`` of the step at ``address``."""
    ahead = u * VECTOR * layout.chunk
    for group in range(layout.groups):
        row = group * layout.load_rows
        if wide:
            words = load_vector(
                address, ahead * 2, position + ahead, Uint32(k), STREAMED, rows_left, row
            )
        else:
            words = load_elements(address, ahead, layout.chunk, position, Uint32(k), rows_left, row)
        address = address + load_bytes
        for i, word in enumerate(words):
            weights[i, group, u] = word


def refill_x(xs, u, layout, address, position, k, run, scale):
    """Load slot ``u`` of x of the step at ``address``."""
    for v in range(layout.x_vectors):
        ahead = u * VECTOR * layout.chunk + 4 * v * scale
        for i, word in enumerate(load_elements(address, ahead, run, position, Uint32(k))):
            xs[i, v, u] = word


def load_elements(address, ahead, apart, position, limit, rows_left=None, row=0):
    """Load eight elements, ``apart`` from each other, the first one ``ahead`` of ``address``.

    Zero for each whose position is not below ``limit``, and without ``rows_left > row``.
    """
    within = f"setp.gt.and.s32 inside, {{$r3}}, {row}, inside; " if rows_left is not None else ""
    return [
        cute.arch.inline_ptx(
            "{ .reg .pred inside; setp.lt.u32 inside, {$r1}, {$r2}; "
            + within
            + f"mov.b16 {{$w0}}, 0; @inside {CACHED}.b16 {{$w0}}, "
            + f"[{{$r0}}+{2 * (ahead + i * apart)}]; }}",
            write_only_types=[Uint16],
            read_only_args=[address, position + (ahead + i * apart), limit]
            + ([] if rows_left is None else [rows_left]),
        )
        for i in range(VECTOR)
    ]
