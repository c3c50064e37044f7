"""What the one-pass scan needs of its input besides x, B and z, made once for all that share it.

The sequence is cut into tiles of ``tile`` tokens. Shapes; the elements of the last dimension lie
side by side, other strides count elements:

- ``dt``       ``(batch, seqlen, heads)``, any strides; fp32, bf16 or fp16 by ``dt_kind``;
- ``dt_bias``  ``(heads,)`` of dtype ``bias_kind``, or null;
- ``rates``    ``(heads,)``, called A elsewhere, of dtype ``rates_kind``; none positive;
- ``b``, ``c`` ``(batch, seqlen, groups, dstate)``, 16-bit, rows aligned to 16 bytes;
- ``seq_idx``  ``(batch, seqlen)`` i32, or null: which sequence a token belongs to;
- ``x``        ``(batch, seqlen, heads, channels)``, 16-bit: not read, but the L2 is asked for the
  first tiles of it, with which the scan begins. With ``pdl`` that does so itself.

Made are, with the sums of C Bᵀ and of decays in fp32:

- ``cb``      ``(batch, tiles, groups, triangle, 2, 32, 4)``: of C Bᵀ within a tile the 16x16 blocks
  on and below the diagonal, row by row. Of rows g and, in the other half, 8 + g of a block lane
  4g + t has columns 2t, 2t + 1, 2t + 8 and 2t + 9;
- ``decay``   ``(batch, heads, tiles, 3 * tile)``: of the tile's tokens pairs of their decay since
  its start or that of their sequence, the later one, as the sum of log2(e) dt A over the tokens up
  to it, and of their step size dt after bias, softplus and limits; then what is left of each step
  at the tile's end, if its sequence goes on until then;
- ``starts``  ``(batch, tiles, tile)`` i32, where there is ``seq_idx``: the token of the tile with
  which a token's sequence starts, -1 if it started before the tile.

Tokens past the end have a step size of 0 and belong to the last one's sequence. A token with a
negative ``seq_idx`` has a step size of 0, and its sequence starts past the tile: at ``tile``.

Blocks ``(batch * tiles, groups + ceildiv(heads, triangle), 1)`` of ``triangle`` warps: the first
``groups`` of a tile do C Bᵀ, a warp a block of it, the others the step sizes, a warp a head.
"""

# The DSL ships no types, and its `.pth` file hides it from type checkers.
# pyright: reportMissingImports=false

import math

import cutlass
from cutlass import Float32, Int32, Int64, Uint32, cute

from ..scalars import bits, choose, load_number, load_scalar, load_words, prefetch, store_words
from ..tensor_core import exp2, mma, reciprocal

LOG2_E = math.log2(math.e)
WARP = 32
ASKED = 2
"""Tiles of x that the L2 is asked for, of each head."""
ASKED_HEADS = 128
"""Heads, of all batches, of which it is asked: about as many blocks as run at first."""


@cute.kernel
def ssd_prepare(
    dt: cute.Pointer,
    dt_bias: cute.Pointer,
    rates: cute.Pointer,
    b: cute.Pointer,
    c: cute.Pointer,
    seq_idx: cute.Pointer,
    x: cute.Pointer,
    cb: cute.Pointer,
    decay: cute.Pointer,
    starts: cute.Pointer,
    batch: Int32,
    seqlen: Int32,
    tiles: Int32,
    heads: Int32,
    groups: Int32,
    channels: Int32,
    dt_kind: Int32,
    bias_kind: Int32,
    rates_kind: Int32,
    softplus: Int32,
    low: Float32,
    high: Float32,
    dt_batch: Int64,
    dt_token: Int64,
    dt_head: Int64,
    b_batch: Int64,
    b_token: Int64,
    b_group: Int64,
    c_batch: Int64,
    c_token: Int64,
    c_group: Int64,
    seq_batch: Int64,
    seq_token: Int64,
    x_batch: Int64,
    x_token: Int64,
    x_head: Int64,
    *,
    dstate: cutlass.Constexpr,
    tile: cutlass.Constexpr,
    pdl: cutlass.Constexpr,
):
    """Prepare one tile for one group, or for as many heads as there are warps."""
    if cutlass.const_expr(pdl):
        # The scan waits for all of this anyway.
        cute.arch.griddepcontrol_launch_dependents()
    row_blocks = tile // 16
    triangle = row_blocks * (row_blocks + 1) // 2
    thread = Int32(cute.arch.thread_idx()[0])
    lane = thread % WARP
    warp = cute.arch.make_warp_uniform(thread // WARP)
    place = Int32(cute.arch.block_idx()[0])
    role = Int32(cute.arch.block_idx()[1])
    # Unsigned, which takes less.
    this_batch = Int32(Uint32(place) // Uint32(tiles))
    this_tile = place - this_batch * tiles
    first = this_tile * tile
    if role < groups:
        group, t = lane // 4, lane % 4
        row_block = Int32(0)
        for later in cutlass.range_constexpr(1, row_blocks):
            row_block = row_block + Int32(warp >= later * (later + 1) // 2)
        column_block = warp - row_block * (row_block + 1) // 2
        row = first + row_block * 16 + group
        column = first + column_block * 16 + group
        c_row = row_start(c, this_batch, role, row, t, (c_batch, c_token, c_group))
        b_row = row_start(b, this_batch, role, column, t, (b_batch, b_token, b_group))
        runs = max(dstate, 32) // 32
        together = min(runs, 2)
        sums = cute.make_rmem_tensor((4, 2), Float32)
        sums.fill(0.0)
        # What is not loaded at once, asked for at once: it comes from memory, after some waiting.
        for part in cutlass.range_constexpr(together, runs, together):
            for rows, rows_left in (
                (rows_of(c_row, c_token), seqlen - row),
                (rows_of(b_row, b_token), seqlen - column),
            ):
                for half, row_at in enumerate(rows):
                    # Where the part ends, since it may start in the line before.
                    prefetch(row_at + 64 * (part + 1), (t == 3) & (rows_left > 8 * half))
        # Not all of dstate at once, so that more warps fit.
        for part in cutlass.range(0, runs, together, unroll=1):
            add_products(
                sums,
                [row_at + Int64(part) * 64 for row_at in rows_of(c_row, c_token)],
                [row_at + Int64(part) * 64 for row_at in rows_of(b_row, b_token)],
                (seqlen - row, seqlen - column),
                t,
                together,
                dstate,
                b.dtype,
            )
        block = ((Int64(place) * groups + role) * triangle + warp) * (2 * WARP)
        address = cb.toint() + (block + lane) * 16
        store_words(address, lane_row(sums, 0), True)
        store_words(address, lane_row(sums, 1), True, 16 * WARP)
    else:
        head = (role - groups) * triangle + warp
        known = head < heads
        bias = load_scalar(dt_bias.toint(), Int64(head), bias_kind, known & (dt_bias.toint() != 0))
        rate = load_scalar(rates.toint(), Int64(head), rates_kind, known) * LOG2_E
        before = Float32(0.0)
        # Twice the token with which a sequence starts, and one more if it is padding.
        start_before = Int32(-2)
        kept = cute.make_rmem_tensor((2, tile // WARP), Float32)
        place_out = (Int64(this_batch) * heads + head) * tiles + this_tile
        decays = decay.toint() + place_out * (12 * tile)
        # All that is read, before anything is made of it.
        read = []
        for chunk in cutlass.range_constexpr(tile // WARP):
            token = first + chunk * WARP + lane
            inside = known & (token < seqlen)
            index = Int64(this_batch) * dt_batch + Int64(token) * dt_token + Int64(head) * dt_head
            value = load_scalar(dt.toint(), index, dt_kind, inside)
            found = sequences(seq_idx, this_batch, token, inside, (seq_batch, seq_token))
            read.append((inside, value, found))
        if cutlass.const_expr(not pdl):
            row = x.toint() + 2 * (
                Int64(this_batch) * x_batch + Int64(first + lane) * x_token + Int64(head) * x_head
            )
            # In the order of the scan's blocks.
            asked = (this_tile < ASKED) & (head * batch + this_batch < ASKED_HEADS)
            for line in cutlass.range(0, -(-channels // 64), 1, unroll=1):
                for chunk in cutlass.range_constexpr(tile // WARP):
                    prefetch(
                        row + Int64(chunk * WARP) * (x_token * 2) + Int64(line) * 128,
                        asked & known & (first + chunk * WARP + lane < seqlen),
                    )
        for chunk in cutlass.range_constexpr(tile // WARP):
            inside, value, (sequence, previous) = read[chunk]
            step = step_size(value + bias, softplus, low, high)
            counted = inside & (sequence >= 0)
            step = choose(counted, step, Float32(0.0))
            padding = Int32(inside & (sequence < 0))
            mark = (Int32(chunk * WARP) + lane) * 2 + padding
            mark = choose((sequence != previous) | (padding != 0), mark, Int32(-2))
            mark = scan_max(mark, lane, start_before)
            start_before = cute.arch.shuffle_sync(mark, WARP - 1)
            start = mark >> 1
            # Not of tokens of sequences before: a NaN among them must not cross.
            earlier = choose(start < chunk * WARP, before, Float32(0.0))
            own = lane - choose(start < chunk * WARP, Int32(0), start - chunk * WARP)
            total = scan_sum(choose(counted, step * rate, Float32(0.0)), own) + earlier
            before = cute.arch.shuffle_sync(total, WARP - 1)
            kept[0, chunk] = total
            kept[1, chunk] = step
            pair = decays + Int64(chunk * WARP + lane) * 8
            store_words(pair, [bits(total), bits(step)], known)
            store_words(
                starts.toint() + (Int64(place) * tile + (chunk * WARP + lane)) * 4,
                [choose(mark % 2 != 0, Int32(tile), start)],
                (head == 0) & (seq_idx.toint() != 0),
            )
        for chunk in cutlass.range_constexpr(tile // WARP):
            left = exp2(before - kept[0, chunk]) * kept[1, chunk]
            weight = decays + (8 * tile + Int64(chunk * WARP + lane) * 4)
            store_words(weight, [bits(left)], known)


def row_start(tensor, batch, group, row, t, strides):
    """Address of this lane's first 16 bytes of a row."""
    of_batch, of_token, of_group = strides
    index = Int64(batch) * of_batch + Int64(row) * of_token + Int64(group) * of_group
    return tensor.toint() + index * 2 + Int64(t) * 16


def rows_of(address, of_token):
    """Addresses in this row and the one 8 further on."""
    return [address, address + of_token * 16]


def add_products(sums, c_rows, b_rows, left, t, runs, dstate, element):
    """Add as many runs of 32 of dstate to a 16x16 block of C Bᵀ, in halves of 8 columns.

    The order of dstate is free, as long as both operands have the same: so a lane's 16 bytes of a
    row serve as its pairs in two instructions.
    """
    c_left, b_left = left
    within = t < dstate // 8 if dstate < 32 else t >= 0
    words = [
        [
            load_words(address, within & (rows_left > 8 * half), 64 * run)
            for rows, rows_left in ((c_rows, c_left), (b_rows, b_left))
            for half, address in enumerate(rows)
        ]
        for run in range(runs)
    ]
    for *c_words, b_low, b_high in words:
        for pair in (0, 2):
            a = [c_words[half][pair + i] for i in (0, 1) for half in (0, 1)]
            for half, b_words in enumerate((b_low, b_high)):
                total = mma(a, b_words[pair : pair + 2], [sums[i, half] for i in range(4)], element)
                for i in range(4):
                    sums[i, half] = total[i]


def lane_row(sums, row):
    """What a lane has of row `group` or, 8 further on, the other one: as `cb` has it."""
    return [bits(sums[2 * row + i, half]) for half in (0, 1) for i in (0, 1)]


def sequences(seq_idx, batch, token, inside, strides):
    """The sequence of a token and of the one before it; 0 before the first, and where unknown."""
    of_batch, of_token = strides
    known = inside & (seq_idx.toint() != 0)
    address = seq_idx.toint() + (Int64(batch) * of_batch + Int64(token) * of_token) * 4
    mine = load_number(address, known, Int32(0))
    previous = load_number(address - of_token * 4, known & (token > 0), Int32(0))
    return mine, previous


def step_size(value, softplus, low, high):
    """Step size of dt plus bias; NaN stays NaN.

    softplus(v) = max(v, 0) + log1p(u), u = exp(-|v|) in (0, 1]; log1p(u) = 2 atanh(s) with s =
    u / (2 + u) of at most 1/3, as a series in s squared, whose 9 terms leave 1e-10. That keeps the
    relative precision of tiny results, which log2(1 + u) does not.
    """
    size = choose(value < 0.0, value, -value)
    u = exp2(size * LOG2_E)
    s = u * reciprocal(u + 2.0)
    square = s * s
    series = Float32(1.0 / 17)
    for term in range(15, 0, -2):
        series = series * square + 1.0 / term
    soft = choose(value > 0.0, value, Float32(0.0)) + 2.0 * s * series
    value = choose((softplus != 0) & (value <= 20.0), soft, value)
    value = choose(value < low, low, value)
    return choose(value > high, high, value)


def scan_sum(value, own):
    """Sum over this lane and the `own` lanes before it."""
    for distance in (1, 2, 4, 8, 16):
        other = cute.arch.shuffle_sync_up(value, distance, mask_and_clamp=0)
        value = value + choose(own >= distance, other, Float32(0.0))
    return value


def scan_max(value, lane, before):
    """Greatest over the lanes up to this one, and `before`."""
    for distance in (1, 2, 4, 8, 16):
        other = cute.arch.shuffle_sync_up(value, distance, mask_and_clamp=0)
        value = choose((lane >= distance) & (other > value), other, value)
    return choose(before > value, before, value)
