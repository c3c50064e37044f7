"""The one-pass SSD scan: a block walks the sequence of one head, its state in registers.

Per batch and head, over the tokens t, with a state of headdim x dstate:

    state = exp(dt A) state + dt x Bᵀ
    out   = (state C + D x) silu(z)

`prepare` has made the decays ``a`` (sums of log2(e) dt A within a tile), step sizes and, per group,
the products C Bᵀ. For a tile whose state before it is S, with i and j over its tokens:

    out_i = exp2(a_i) S C_i + sum over j <= i of (C Bᵀ)_ij exp2(a_i - a_j) dt_j x_j + D x_i
    S     = exp2(a_last) S + sum over j of exp2(a_last - a_j) dt_j x_j B_jᵀ

Shapes; the last dimension is contiguous, other strides count elements, and rows of 16-bit
elements start aligned to 16 bytes:

- ``x``, ``z``, ``out``  ``(batch, seqlen, heads, headdim)``; ``z`` may be null. Without ``out``
  only states are computed;
- ``b``, ``c``           ``(batch, seqlen, groups, dstate)``;
- ``d``                  ``(heads,)`` or ``(heads, headdim)`` of dtype ``d_kind``, or null;
- ``cb``, ``decay``, ``starts``  of `prepare`; ``starts`` is null without ``seq_idx``;
- ``initial``            ``(batch, segments, heads, headdim, dstate)`` of dtype ``initial_kind``,
  or null for zeros: the state before each segment;
- ``final``              the same in fp32: the state after each segment, or with a
  ``final_segment`` stride of -1 after the last one alone; or null;
- ``totals``             ``(batch, segments, heads)`` fp32, or null: the factor from the state
  before a segment to what is left of it after;
- ``cu_seqlens``         ``(sequences + 1,)`` i32, or null, for a batch of 1: bounds of sequences;
- ``end_states``         ``(sequences, heads, headdim, dstate)``, contiguous: the states at their
  ends. An empty sequence has zeros, but for a first one at the very start, which has ``initial``.

A block takes ``width`` channels of a head and ``segment_tiles`` tiles. Four of its warps, those of
the scan, own 16 tokens of a tile each (or, with tiles of 32, half of its channels); the other four,
those of the state, own a quarter of dstate each, whose part of the state they hold in fp32. One
tile ahead of the others, they leave it in 16 bits in shared memory and go on. So nobody waits for
anybody but at one barrier a tile. The next tile's x and B come meanwhile.
"""

# The DSL ships no types, and its `.pth` file hides it from type checkers.
# pyright: reportMissingImports=false

import cutlass
from cutlass import Float32, Int32, Int64, Uint32, cute

from ..scalars import load_number, load_pair, load_scalar, load_words, store_words
from ..tensor_core import (
    commit_copies,
    copy_async,
    exp2,
    load_floats,
    load_matrices,
    load_shared,
    mma,
    pack,
    reciprocal,
    store_shared,
    unpack,
    wait_copies,
)
from .prepare import LOG2_E, bits, choose
from .shape import B_STAGES, SCAN_WARPS, THREADS, WARP, X_STAGES, Shape

NEVER = 2**31 - 1


@cute.kernel
def ssd_scan(
    x: cute.Pointer,
    b: cute.Pointer,
    c: cute.Pointer,
    d: cute.Pointer,
    z: cute.Pointer,
    out: cute.Pointer,
    cb: cute.Pointer,
    decay: cute.Pointer,
    starts: cute.Pointer,
    initial: cute.Pointer,
    final: cute.Pointer,
    totals: cute.Pointer,
    cu_seqlens: cute.Pointer,
    end_states: cute.Pointer,
    batch: Int32,
    seqlen: Int32,
    tiles: Int32,
    segments: Int32,
    segment_tiles: Int32,
    heads: Int32,
    groups: Int32,
    group_heads: Int32,
    d_kind: Int32,
    initial_kind: Int32,
    sequences: Int32,
    x_batch: Int64,
    x_token: Int64,
    x_head: Int64,
    b_batch: Int64,
    b_token: Int64,
    b_group: Int64,
    c_batch: Int64,
    c_token: Int64,
    c_group: Int64,
    z_batch: Int64,
    z_token: Int64,
    z_head: Int64,
    out_batch: Int64,
    out_token: Int64,
    out_head: Int64,
    d_head: Int64,
    d_channel: Int64,
    initial_batch: Int64,
    initial_segment: Int64,
    initial_head: Int64,
    final_batch: Int64,
    final_segment: Int64,
    final_head: Int64,
    *,
    headdim: cutlass.Constexpr,
    dstate: cutlass.Constexpr,
    width: cutlass.Constexpr,
    tile: cutlass.Constexpr,
    varlen: cutlass.Constexpr,
):
    """Scan one segment of one head, or ``width`` channels of it.

    Grid ``(headdim / width * heads * segments * batch, 1, 1)``, block ``(256, 1, 1)``, and
    `Shape.shared_bytes` of dynamic shared memory.
    """
    shape = Shape(headdim, dstate, width, tile)
    element = x.dtype
    thread = Int32(cute.arch.thread_idx()[0])
    lane = thread % WARP
    warp = cute.arch.make_warp_uniform(thread // WARP)
    place = Int32(cute.arch.block_idx()[0])
    channel = place % shape.slices * width
    place = place // shape.slices
    head = place % heads
    place = place // heads
    segment = place % segments
    this_batch = place // segments
    group_of_head = head // group_heads
    first = segment * segment_tiles
    count = choose(tiles - first < segment_tiles, tiles - first, segment_tiles)
    count = choose(count < 0, Int32(0), count)

    shared = Uint32(cute.arch.get_dyn_smem(Float32).toint())
    # What each tile's copies start from.
    x_from = x.toint() + 2 * (Int64(this_batch) * x_batch + Int64(head) * x_head + Int64(channel))
    b_from = b.toint() + 2 * (Int64(this_batch) * b_batch + Int64(group_of_head) * b_group)
    decay_from = decay.toint() + (Int64(this_batch) * heads + head) * tiles * (8 * tile)
    starts_from = starts.toint() + Int64(this_batch) * tiles * (4 * tile)
    has_starts = starts.toint() != 0
    if count > 0:
        copy_tile(
            shape,
            shared,
            thread,
            Int32(0),
            first,
            seqlen,
            has_starts,
            (x_from, x_token),
            (b_from, b_token),
            decay_from,
            starts_from,
        )
    commit_copies()

    if warp < SCAN_WARPS:
        group, t = lane // 4, lane % 4
        part = warp // shape.row_blocks
        tiles_n = shape.channels // 8
        mine = channel + part * shape.channels
        for step in cutlass.range_constexpr((width + 127) // 128):
            index = thread + 128 * step
            if index < width:
                value = load_scalar(
                    d.toint(),
                    Int64(head) * d_head + Int64(channel + index) * d_channel,
                    d_kind,
                    d.toint() != 0,
                )
                store_shared(shared + shape.d_start + index * 4, [bits(value)])
        c_from = c.toint() + 2 * (Int64(this_batch) * c_batch + Int64(group_of_head) * c_group)
        cb_from = cb.toint() + (
            (Int64(this_batch) * tiles * groups + group_of_head) * (shape.triangle * 1024)
            + lane * 16
        )
        cb_tile = Int64(groups) * (shape.triangle * 1024)
        z_from = z.toint() + 2 * (Int64(this_batch) * z_batch + Int64(head) * z_head + mine)
        out_from = out.toint() + 2 * (Int64(this_batch) * out_batch + Int64(head) * out_head + mine)
        wanted = out.toint() != 0
        # Where this lane finds its part of the state, and of x as second operand.
        s_lane = shared + shape.s_start + part * (shape.channels * 64) + slot(group, t) * 16
        x_lane = shared + part * (2 * shape.channels) + lane % 16 * shape.x_row + lane // 16 * 16
        cs = cute.make_rmem_tensor((4, 2, shape.runs), Uint32)
        cbs = cute.make_rmem_tensor((4, 2), Uint32)
        y = cute.make_rmem_tensor((4, tiles_n), Float32)
        row_block = warp % shape.row_blocks
        row = first * tile + row_block * 16 + group
        load_c(cs, c_from, c_token, row, seqlen, t, shape, wanted & (count > 0))
        load_cb(cbs, cb_from + cb_tile * first + triangle_of(row_block), wanted & (count > 0))
        wait_copies(0)
        cute.arch.sync_threads()
        if count > 1:
            copy_tile(
                shape,
                shared,
                thread,
                Int32(1),
                first,
                seqlen,
                has_starts,
                (x_from, x_token),
                (b_from, b_token),
                decay_from,
                starts_from,
            )
        commit_copies()
        for i in cutlass.range(0, count, 1, unroll=1):
            wait_copies(0)
            cute.arch.sync_threads()
            if i + 2 < count:
                copy_tile(
                    shape,
                    shared,
                    thread,
                    i + 2,
                    first,
                    seqlen,
                    has_starts,
                    (x_from, x_token),
                    (b_from, b_token),
                    decay_from,
                    starts_from,
                )
            commit_copies()
            if wanted:
                s_stage = s_lane + i % 2 * shape.s_stage
                x_stage = i % X_STAGES * shape.x_stage
                decay_stage = shared + shape.decay_start + i % X_STAGES * (8 * tile)
                starts_stage = shared + shape.starts_start + i % X_STAGES * (4 * tile)
                y.fill(0.0)
                state_product(y, cs, s_stage, shape, element)
                # The other way round in the next tile, as later tokens have more to do.
                next_block = shape.row_blocks - 1 - row_block
                next_row = (first + i + 1) * tile + next_block * 16 + group
                load_c(cs, c_from, c_token, next_row, seqlen, t, shape, i + 1 < count)
                local = row_block * 16 + group
                a_low = load_floats(decay_stage + local * 8, 0, count=1)[0]
                a_high = load_floats(decay_stage + local * 8, 64, count=1)[0]
                start_low = Int32(-1)
                start_high = Int32(-1)
                if has_starts:
                    start_low = Int32(load_shared(starts_stage + local * 4, 0, count=1)[0])
                    start_high = Int32(load_shared(starts_stage + local * 4, 32, count=1)[0])
                scale_rows(
                    y,
                    choose(start_low < 0, exp2(a_low), Float32(0.0)),
                    choose(start_high < 0, exp2(a_high), Float32(0.0)),
                )
                least_low = choose(start_low < 0, Int32(0), start_low)
                least_high = choose(start_high < 0, Int32(0), start_high)
                cb_here = cb_from + cb_tile * (first + i) + triangle_of(row_block)
                cb_next = cb_from + cb_tile * (first + i + 1) + triangle_of(next_block)
                for block in cutlass.range(0, row_block + 1, 1, unroll=1):
                    pairs = decay_stage + (block * 16 + 2 * t) * 8
                    a = weights(
                        cbs,
                        load_floats(pairs, 0, count=4) + load_floats(pairs, 64, count=4),
                        (a_low, a_high),
                        (least_low - block * 16 - 2 * t, least_high - block * 16 - 2 * t),
                        (row_block - block) * 16 + group - 2 * t,
                        element,
                    )
                    more = block < row_block
                    load_cb(
                        cbs,
                        choose(more, cb_here + Int64(block + 1) * 1024, cb_next),
                        more | (i + 1 < count),
                    )
                    multiply_x(y, a, x_lane + x_stage + block * (16 * shape.x_row), shape, element)
                x_row = shared + x_stage + local * shape.x_row + part * (2 * shape.channels) + 4 * t
                d_row = shared + shape.d_start + part * (4 * shape.channels) + 8 * t
                add_dx(y, x_row, 8 * shape.x_row, d_row, element)
                token = (first + i) * tile + local
                if z.toint() != 0:
                    gate(
                        y,
                        z_from + Int64(token) * (z_token * 2),
                        z_token * 16,
                        t,
                        seqlen - token,
                        element,
                    )
                write_out(
                    y,
                    out_from + Int64(token) * (out_token * 2),
                    out_token * 16,
                    t,
                    seqlen - token,
                    element,
                )
                row_block = next_block
    else:
        group, t = lane // 4, lane % 4
        owner = warp - SCAN_WARPS
        m_tiles = width // 16
        n_tiles = shape.state_columns // 8
        column = owner * shape.state_columns
        s = cute.make_rmem_tensor((4, n_tiles, m_tiles), Float32)
        s.fill(0.0)
        entry = (
            Int64(this_batch) * initial_batch
            + Int64(segment) * initial_segment
            + Int64(head) * initial_head
            + Int64(channel + group) * dstate
            + (column + 2 * t)
        )
        if initial.toint() != 0:
            load_state(s, initial.toint(), entry, initial_kind, column + 2 * t, dstate)
        x_lane = shared + (lane // 16 * 8 + lane % 8) * shape.x_row + lane // 8 % 2 * 16
        b_lane = shared + shape.b_start + lane % 16 * shape.b_row + lane // 16 * 16 + column * 2
        total = Float32(0.0)
        ended = Int32(0)
        # The next sequence to end, and where; none if there are no more.
        sequence = Int32(0)
        next_end = Int32(NEVER)
        if cutlass.const_expr(varlen):
            upper = sequences
            if first == 0:
                upper = Int32(0)
            while sequence < upper:
                middle = (sequence + upper) // 2
                if sequence_end(cu_seqlens, middle, sequences) <= first * tile:
                    sequence = middle + 1
                else:
                    upper = middle
            next_end = sequence_end(cu_seqlens, sequence, sequences)
        for i in cutlass.range(0, count, 1, unroll=1):
            wait_copies(0)
            cute.arch.sync_threads()
            if i + 1 < count:
                copy_tile(
                    shape,
                    shared,
                    thread,
                    i + 1,
                    first,
                    seqlen,
                    has_starts,
                    (x_from, x_token),
                    (b_from, b_token),
                    decay_from,
                    starts_from,
                )
            commit_copies()
            decay_stage = shared + shape.decay_start + i % X_STAGES * (8 * tile)
            publish(
                s, shared + shape.s_start + i % 2 * shape.s_stage, owner, group, t, shape, element
            )
            a_last = load_floats(decay_stage, 8 * tile - 8, count=1)[0]
            start = Int32(-1)
            if has_starts:
                stage = shared + shape.starts_start + i % X_STAGES * (4 * tile)
                start = Int32(load_shared(stage, 4 * tile - 4, count=1)[0])
            x_stage = x_lane + i % X_STAGES * shape.x_stage
            b_stage = b_lane + i % B_STAGES * shape.b_stage
            token = (first + i) * tile
            if cutlass.const_expr(varlen):
                while next_end <= token + tile:
                    begin = sequence_end(cu_seqlens, sequence - 1, sequences)
                    local = next_end - 1 - token
                    a_end = Float32(0.0)
                    start_end = Int32(-1)
                    if begin < next_end:
                        a_end = load_floats(decay_stage + local * 8, 0, count=1)[0]
                        if has_starts:
                            stage = shared + shape.starts_start + i % X_STAGES * (4 * tile)
                            start_end = Int32(load_shared(stage + local * 4, 0, count=1)[0])
                    kept = (begin < next_end) & (start_end < 0) | (sequence == 0) & (next_end == 0)
                    entry = (
                        (Int64(sequence) * heads + head) * headdim + (channel + group)
                    ) * dstate + (column + 2 * t)
                    for m in cutlass.range_constexpr(m_tiles):
                        at_end = cute.make_rmem_tensor((4, n_tiles, 1), Float32)
                        take_row(at_end, s, m, kept, exp2(a_end))
                        for block in cutlass.range(0, shape.row_blocks, 1, unroll=1):
                            pairs = decay_stage + (block * 16 + 2 * t) * 8
                            update(
                                at_end,
                                x_stage + block * (16 * shape.x_row) + 32 * m,
                                b_stage + block * (16 * shape.b_row),
                                load_floats(pairs, 0, count=4) + load_floats(pairs, 64, count=4),
                                a_end,
                                start_end - block * 16 - 2 * t,
                                choose(begin < next_end, local, Int32(-1)) - block * 16 - 2 * t,
                                shape,
                                element,
                            )
                        store_row(
                            at_end,
                            end_states.toint() + (entry + 16 * m * dstate) * 2,
                            column + 2 * t,
                            dstate,
                            element,
                        )
                    sequence = sequence + 1
                    next_end = sequence_end(cu_seqlens, sequence, sequences)
            total += a_last
            if start >= 0:
                # Not by a factor of 0: neither infinities nor NaN may cross.
                s.fill(0.0)
                ended = Int32(1)
            scale(s, exp2(a_last))
            for block in cutlass.range_constexpr(shape.row_blocks):
                pairs = decay_stage + (block * 16 + 2 * t) * 8
                update(
                    s,
                    x_stage + block * (16 * shape.x_row),
                    b_stage + block * (16 * shape.b_row),
                    load_floats(pairs, 0, count=4) + load_floats(pairs, 64, count=4),
                    a_last,
                    start - block * 16 - 2 * t,
                    None,
                    shape,
                    element,
                )
        wait_copies(0)
        cute.arch.sync_threads()
        if (final.toint() != 0) & ((final_segment >= 0) | (segment == segments - 1)):
            entry = (
                Int64(this_batch) * final_batch
                + choose(final_segment >= 0, Int64(segment) * final_segment, Int64(0))
                + Int64(head) * final_head
                + Int64(channel + group) * dstate
                + (column + 2 * t)
            )
            store_state(s, final.toint() + entry * 4, column + 2 * t, dstate)
        if (totals.toint() != 0) & (thread == THREADS - WARP) & (channel == 0):
            address = totals.toint() + ((Int64(this_batch) * segments + segment) * heads + head) * 4
            store_words(address, [bits(choose(ended == 0, exp2(total), Float32(0.0)))], True)


def slot(group, t):
    """Where, among a warp's 32 runs of 16 bytes, lane (group, t) finds its own.

    The turn spreads what lanes of eight groups write over all banks.
    """
    return group * 4 + (t ^ (group // 2))


def triangle_of(row_block):
    """Bytes before the first block of C Bᵀ of a row of blocks."""
    return Int64(row_block * (row_block + 1) // 2) * 1024


def copy_tile(
    shape, shared, thread, index, first, seqlen, has_starts, x, b, decay_from, starts_from
):
    """Start copying tile ``first + index``; rows past the end become zero."""
    token = (first + index) * shape.tile
    left = seqlen - token
    for (source, stride), rows_at, row_bytes, bytes_of, chunks in (
        (x, index % X_STAGES * shape.x_stage, shape.x_row, 2 * shape.width, shape.width // 8),
        (
            b,
            shape.b_start + index % B_STAGES * shape.b_stage,
            shape.b_row,
            2 * shape.dstate,
            shape.columns // 8,
        ),
    ):
        source = source + Int64(token) * (stride * 2)
        total = shape.tile * chunks
        for turn in range(-(-total // THREADS)):
            chunk = thread + turn * THREADS
            row, column = chunk // chunks, chunk % chunks * 16
            inside = row < left
            if chunks * 16 > bytes_of:
                inside = inside & (column < bytes_of)
            copy_async(
                shared + Uint32(rows_at) + Uint32(row * row_bytes + column),
                source + Int64(row) * (stride * 2) + Int64(column),
                choose(inside, Int32(16), Int32(0)),
                True if total >= (turn + 1) * THREADS else chunk < total,
            )
    pairs, marks = shape.tile // 2, shape.tile // 4
    stage = index % X_STAGES
    copy_async(
        shared + Uint32(shape.decay_start + stage * (8 * shape.tile) + thread * 16),
        decay_from + (Int64(token) * 8 + Int64(thread) * 16),
        Int32(16),
        thread < pairs,
    )
    mark = thread - 64
    copy_async(
        shared + Uint32(shape.starts_start + stage * (4 * shape.tile) + mark * 16),
        starts_from + (Int64(token) * 4 + Int64(mark) * 16),
        Int32(16),
        (mark >= 0) & (mark < marks) & has_starts,
    )


def load_c(cs, c_from, c_token, row, seqlen, t, shape, wanted):
    """Load C of rows ``row`` and ``row + 8``, 16 bytes of each run of 32."""
    address = c_from + Int64(row) * (c_token * 2) + Int64(t) * 16
    for half in (0, 1):
        inside = wanted & (row + 8 * half < seqlen)
        for run in range(shape.runs):
            within = inside
            if shape.dstate < 32 * (run + 1):
                within = inside & (t < (shape.dstate - 32 * run) // 8)
            for i, word in enumerate(load_words(address, within, 64 * run)):
                cs[i, half, run] = word
        address = address + c_token * 16


def load_cb(cbs, address, wanted):
    """Load this lane's eight numbers of a block of C Bᵀ."""
    for half in (0, 1):
        for i, word in enumerate(load_words(address, wanted, half * (16 * WARP))):
            cbs[i, half] = word


def state_product(y, cs, s_stage, shape, element):
    """Add C times the state, a run of 32 of dstate after another."""
    for run in range(shape.runs):
        for tile in range(shape.channels // 8):
            words = load_shared(s_stage, (run * (shape.width // 8) + tile) * (16 * WARP))
            for pair in (0, 2):
                a = [cs[pair + i, half, run] for i in (0, 1) for half in (0, 1)]
                total = mma(a, words[pair : pair + 2], [y[i, tile] for i in range(4)], element)
                for i in range(4):
                    y[i, tile] = total[i]


def scale_rows(y, low, high):
    """Multiply the rows of lanes' groups, and those 8 further on."""
    for tile in range(y.shape[1]):
        for i in (0, 1):
            y[i, tile] = y[i, tile] * low
            y[i + 2, tile] = y[i + 2, tile] * high


def weights(cbs, pairs, decays, least, diagonal, element):
    """A block of C Bᵀ with decays and step sizes, masked, as first operand.

    ``pairs``: (decay, step size) of the columns 2t, 2t + 1, 2t + 8, 2t + 9. ``least``: how far the
    first token of each row's sequence is from column 2t; ``diagonal``: how far row ``group`` is.
    """
    halves = []
    for half in (0, 1):
        for row in (0, 1):
            values = []
            for i in (0, 1):
                a_j, step = pairs[4 * half + 2 * i], pairs[4 * half + 2 * i + 1]
                value = cbs[2 * row + i, half].bitcast(Float32) * step * exp2(decays[row] - a_j)
                column = 8 * half + i
                kept = (column <= diagonal + 8 * row) & (column >= least[row])
                values.append(choose(kept, value, Float32(0.0)))
            halves.append(pack(values[0], values[1], element))
    return halves


def multiply_x(y, a, x_rows, shape, element):
    """Add the block ``a`` times 16 rows of x."""
    tiles = shape.channels // 8
    for first in range(0, tiles, 2):
        count = 4 if first + 1 < tiles else 2
        words = load_matrices(x_rows, 16 * first, transposed=True, count=count)
        for tile in range(first, min(first + 2, tiles)):
            pair = words[2 * (tile - first) : 2 * (tile - first) + 2]
            total = mma(a, pair, [y[i, tile] for i in range(4)], element)
            for i in range(4):
                y[i, tile] = total[i]


def add_dx(y, x_row, eight_rows, d_row, element):
    """Add D x, in fp32."""
    for tile in range(y.shape[1]):
        factors = load_floats(d_row, 32 * tile)
        for row in (0, 1):
            (word,) = load_shared(x_row, 16 * tile + row * eight_rows, count=1)
            for i, value in enumerate(unpack(word, element)):
                y[2 * row + i, tile] = y[2 * row + i, tile] + factors[i] * value


def gate(y, address, eight_rows, t, left, element):
    """Multiply by silu(z)."""
    for row in (0, 1):
        known = left > 8 * row
        for first, words in read_row(y.shape[1], address, t, known):
            for i, word in enumerate(words):
                for j, value in enumerate(unpack(word, element)):
                    place = (2 * row + j, first + i)
                    y[place] = y[place] * value * reciprocal(1.0 + exp2(value * -LOG2_E))
        address = address + eight_rows


def read_row(tiles, address, t, known):
    """A row of as many tiles of 8 elements, as words of 2t and 2t + 1 in each: (tile, words)."""
    for first in range(0, tiles, 4):
        if tiles - first >= 4:
            words = load_words(address + Int64(t) * 16, known, 16 * first)
            yield first, exchange(list(words), t)
        else:
            for tile in range(first, tiles):
                yield tile, [load_word(address + Int64(t) * 4 + 16 * tile, known)]


def write_out(y, address, eight_rows, t, left, element):
    """Round and store two rows, 16 bytes a lane."""
    tiles = y.shape[1]
    for row in (0, 1):
        known = left > 8 * row
        words = [pack(y[2 * row, tile], y[2 * row + 1, tile], element) for tile in range(tiles)]
        for first in range(0, tiles, 4):
            if tiles - first >= 4:
                four = exchange(words[first : first + 4], t)
                store_words(address + Int64(t) * 16, four, known, 16 * first)
            else:
                for tile in range(first, tiles):
                    store_words(address + Int64(t) * 4, [words[tile]], known, 16 * tile)
        address = address + eight_rows


def load_word(address, wanted):
    """Load a word; zero unless `wanted`."""
    return cute.arch.inline_ptx(
        "{ .reg .pred p; setp.ne.s32 p, {$r1}, 0; mov.b32 {$w0}, 0; "
        "@p ld.global.b32 {$w0}, [{$r0}]; }",
        write_only_types=[Uint32],
        read_only_args=[address, Int32(wanted)],
    )


def exchange(words, t):
    """Turn word i of lane t into word t of lane i, among the four lanes of a group."""
    for distance in (1, 2):
        upper = (t & distance) != 0
        for low in (0, 1) if distance == 2 else (0, 2):
            high = low + distance
            sent = choose(upper, words[low], words[high])
            got = cute.arch.shuffle_sync_bfly(sent, distance)
            words[low] = choose(upper, got, words[low])
            words[high] = choose(upper, words[high], got)
    return words


def load_state(s, base, entry, kind, column, dstate):
    """Load this lane's part of a state; rows are 8 apart and tiles of columns 8 wide."""
    _, n_tiles, m_tiles = s.shape
    for m in range(m_tiles):
        for n in range(n_tiles):
            for half in (0, 1):
                index = entry + ((16 * m + 8 * half) * dstate + 8 * n)
                pair = load_pair(base, index, kind, column + 8 * n < dstate)
                for i in (0, 1):
                    s[2 * half + i, n, m] = pair[i]


def store_state(s, address, column, dstate):
    """Store this lane's part of a state in fp32."""
    _, n_tiles, m_tiles = s.shape
    for m in range(m_tiles):
        for n in range(n_tiles):
            for half in (0, 1):
                store_words(
                    address,
                    [bits(s[2 * half, n, m]), bits(s[2 * half + 1, n, m])],
                    column + 8 * n < dstate,
                    4 * ((16 * m + 8 * half) * dstate + 8 * n),
                )


def publish(s, stage, owner, group, t, shape, element):
    """Leave the state in shared memory in 16 bits, as the scan's warps read it."""
    _, n_tiles, m_tiles = s.shape
    for n in range(n_tiles):
        index = owner * n_tiles + n
        turned = group * 4 + (index % 4 ^ group // 2)
        address = stage + index // 4 * (shape.width // 8 * 16 * WARP) + turned * 16 + t * 4
        for m in range(m_tiles):
            for half in (0, 1):
                word = pack(s[2 * half, n, m], s[2 * half + 1, n, m], element)
                store_shared(address, [word], (2 * m + half) * (16 * WARP))


def scale(s, factor):
    """Multiply the state."""
    _, n_tiles, m_tiles = s.shape
    for m in range(m_tiles):
        for n in range(n_tiles):
            for i in range(4):
                s[i, n, m] = s[i, n, m] * factor


def sequence_end(cu_seqlens, sequence, sequences):
    """Where a sequence ends; never, if it is past the last one."""
    return load_number(
        cu_seqlens.toint() + Int64(sequence + 1) * 4, sequence < sequences, Int32(NEVER)
    )


def take_row(target, s, m, kept, factor):
    """Start 16 channels of another state from this one, times `factor`, or from zeros."""
    for n in range(s.shape[1]):
        for i in range(4):
            target[i, n, 0] = choose(kept, s[i, n, m] * factor, Float32(0.0))


def store_row(s, address, column, dstate, element):
    """Store this lane's part of 16 channels of a state in 16 bits."""
    for n in range(s.shape[1]):
        for half in (0, 1):
            word = pack(s[2 * half, n, 0], s[2 * half + 1, n, 0], element)
            store_words(address, [word], column + 8 * n < dstate, 2 * (8 * half * dstate + 8 * n))


def update(s, x_rows, b_rows, pairs, a_last, start, end, shape, element):
    """Add 16 tokens to the state: x times B, weighted by step sizes and decays.

    Only tokens from `start` to `end` (None: all) count, relative to this lane's first.
    """
    _, n_tiles, m_tiles = s.shape
    factors = []
    for i, column in enumerate((0, 1, 8, 9)):
        value = exp2(a_last - pairs[2 * i]) * pairs[2 * i + 1]
        counted = column >= start
        if end is not None:
            counted = counted & (column <= end)
        factors.append(choose(counted, value, Float32(0.0)))
    operands = []
    for first in range(0, n_tiles, 2):
        count = 4 if first + 1 < n_tiles else 2
        words = load_matrices(b_rows, 16 * first, transposed=True, count=count)
        for tile in range(first, min(first + 2, n_tiles)):
            scaled = []
            for half in (0, 1):
                low, high = unpack(words[2 * (tile - first) + half], element)
                scaled.append(pack(low * factors[2 * half], high * factors[2 * half + 1], element))
            operands.append(scaled)
    for m in range(m_tiles):
        a = load_matrices(x_rows, 32 * m, transposed=True)
        for n in range(n_tiles):
            total = mma(a, operands[n], [s[i, n, m] for i in range(4)], element)
            for i in range(4):
                s[i, n, m] = total[i]
