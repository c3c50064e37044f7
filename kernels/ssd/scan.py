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
the output, own 16 tokens of a tile each (with tiles of 32, and half of its channels); the other
four, those of the state, own a quarter of dstate each, whose part of the state they hold in fp32.
These also copy x and B of the next tile to shared memory, leave the state in 16 bits there and go
on, up to two tiles ahead. C and C Bᵀ come straight into the registers of the one warp that needs
them. Later tokens of a tile have more tokens before them, so the output's warps swap places after
each tile, and may run a tile apart.

``packed`` variants take ``starts`` and ``cu_seqlens``; the others have no masks but the diagonal's.
"""

# The DSL ships no types, and its `.pth` file hides it from type checkers.
# pyright: reportMissingImports=false

import cutlass
from cutlass import Float32, Int32, Int64, Uint32, cute

from ..scalars import load_scalar, store_words
from ..tensor_core import commit_copies, exp2, load_floats, load_shared, store_shared, wait_copies
from . import scan_output as output
from . import scan_state as state
from .prepare import bits, choose
from .scan_output import BLOCK
from .scan_state import NEVER
from .shape import B_STAGES, SCAN_WARPS, STATE_WARPS, WARP, X_STAGES, Shape, slot

# Named barriers. Those between both sorts of warps have a number for even and one for odd tiles,
# and those at which a state is ready are each output warp's own: so these may run a tile apart.
AMONG_STATES = 1
USED = 2
READY = 4
AHEAD = 3
"""Tiles after which one is asked for that is not copied yet."""


def pinned(value):
    """The same value, which is kept and not computed anew where it is used."""
    return cute.arch.shuffle_sync_bfly(value, 0)


def next_stage(stage):
    """The stage of x after this one."""
    return choose(stage == X_STAGES - 1, Int32(0), stage + 1)


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
    packed: cutlass.Constexpr,
    outputs: cutlass.Constexpr,
    pdl: cutlass.Constexpr,
):
    """Scan one segment of one head, or ``width`` channels of it.

    Grid ``(headdim / width * heads * segments * batch, 1, 1)``, blocks of `Shape.threads`, and
    `Shape.shared_bytes` of dynamic shared memory.
    """
    shape = Shape(headdim, dstate, width, tile, outputs)
    element = x.dtype
    thread = pinned(Int32(cute.arch.thread_idx()[0]))
    lane = thread % WARP
    warp = cute.arch.make_warp_uniform(thread // WARP)
    group, t = lane // 4, lane % 4
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

    shared = pinned(Uint32(cute.arch.get_dyn_smem(Float32).toint()))
    output_warps = SCAN_WARPS * outputs
    if cutlass.const_expr(pdl):
        cute.arch.griddepcontrol_wait()
    if cutlass.const_expr(outputs):
        for step in cutlass.range_constexpr((width + 255) // 256):
            index = thread + 256 * step
            if index < width:
                value = load_scalar(
                    d.toint(),
                    Int64(head) * d_head + Int64(channel + index) * d_channel,
                    d_kind,
                    d.toint() != 0,
                )
                store_shared(shared + shape.d_start + index * 4, [bits(value)])
    cute.arch.sync_threads()

    if Uint32(warp) < Uint32(output_warps):
        # A warp owns a block of 16 tokens, or the half `part` of one.
        part = warp // shape.row_blocks
        c_from = c.toint() + 2 * (
            Int64(this_batch) * c_batch + Int64(group_of_head) * c_group + Int64(t * 8)
        )
        cb_from = cb.toint() + (
            (Int64(this_batch) * tiles * groups + group_of_head) * (shape.triangle * BLOCK)
            + (part * (16 * WARP) + lane * 16)
        )
        cb_tile = Int64(groups) * (shape.triangle * BLOCK)
        z_from = z.toint() + 2 * (Int64(this_batch) * z_batch + Int64(head) * z_head + channel)
        out_from = out.toint() + 2 * (
            Int64(this_batch) * out_batch + Int64(head) * out_head + channel
        )
        # Where this lane finds its parts of the state, and of x as first operand.
        s_lanes = [shared + shape.s_start + slot(group, t ^ pair) * 16 for pair in (0, 2)]
        x_lane = shared + (lane // 16 * 8 + lane % 8) * shape.x_row + lane // 8 % 2 * 16
        d_column = shared + shape.d_start + group * 4
        y = cute.make_rmem_tensor((4, shape.halves, shape.channel_tiles), Float32)
        before = shape.row_blocks - 1
        cs = cute.make_rmem_tensor((4, shape.halves, shape.runs), Uint32)
        cbs = cute.make_rmem_tensor((4, shape.halves, shape.row_blocks), Uint32)
        cbs.fill(0)
        # What the tile before has left to store.
        words = cute.make_rmem_tensor((2, shape.halves, shape.channel_tiles), Uint32)
        words.fill(0)
        out_at = out_from
        out_left = Int32(0)
        row_block = warp % shape.row_blocks
        stage = Int32(0)
        token = first * tile + row_block * 16 + part * 8 + group
        cb_here = cb_from + cb_tile * first + output.triangle_of(row_block)
        # The last place has the block on the diagonal, and is loaded a tile ahead.
        output.load_block(cbs, before, cb_here + Int64(row_block) * BLOCK, count > 0, shape)
        if count > 0:
            c_rows = output.rows_of_c(c_from, c_token, token, seqlen, shape)
            for run in cutlass.range_constexpr(shape.runs):
                output.load_c(cs, run, c_rows, t, shape)
        for i in cutlass.range(0, count, 1, unroll=1):
            more = i + 1 < count
            # The other way round in the next tile.
            next_block = before - row_block
            next_token = (first + i + 1) * tile + next_block * 16 + part * 8 + group
            c_rows = output.rows_of_c(c_from, c_token, next_token, seqlen, shape)
            cb_next = cb_from + cb_tile * (first + i + 1) + output.triangle_of(next_block)
            s_stage = Uint32(i % 2 * shape.s_stage)
            local = row_block * 16 + part * 8
            distance = local + group - 2 * t
            x_rows = x_lane + Uint32(stage * shape.x_stage)
            decay_stage = shared + Uint32(shape.decay_start + stage * (8 * tile))
            pairs = decay_stage + t * 16
            starts_stage = shared + Uint32(shape.starts_start + stage * (4 * tile))
            y.fill(0.0)
            cute.arch.barrier(barrier_id=READY + 2 * warp + i % 2, number_of_threads=5 * WARP)
            # Long and without branches, so that each wait has something else to do.
            decays = output.own_decays(decay_stage + (local + group) * 8, shape)
            begins = output.own_starts(
                starts_stage + (local + group) * 4, packed, starts.toint() != 0, shape
            )
            diagonal = output.multiply_state(
                y,
                cs,
                c_rows,
                [lane_of + s_stage for lane_of in s_lanes],
                output.Blocks(
                    cbs,
                    before,
                    pairs + row_block * 128,
                    decays,
                    distance - row_block * 16,
                    begins,
                    row_block * 16 + 2 * t,
                    cb_next + Int64(next_block) * BLOCK,
                    more,
                    cb_here,
                    row_block,
                ),
                output.Rows(words, out_at, out_token * 16, out_left, t),
                shape,
                element,
            )
            output.scale_tokens(
                y,
                output.carried(
                    pairs + local * 8,
                    starts_stage + (local + 2 * t) * 4,
                    packed,
                    starts.toint() != 0,
                    shape,
                ),
            )
            xs = output.multiply_x(y, x_rows + row_block * (16 * shape.x_row), diagonal, element)
            output.add_dx(y, xs, d_column, part, element)
            # The decay up to the token before this row of blocks.
            reference_at = choose(row_block > 0, row_block * 128 - 8, Int32(0))
            reference = load_floats(decay_stage + reference_at, 0, count=1)[0]
            for blocks in cutlass.range_constexpr(1, shape.row_blocks):
                if row_block == blocks:
                    output.multiply_before(
                        y,
                        cbs,
                        blocks,
                        pairs,
                        x_rows,
                        reference,
                        decays,
                        begins,
                        distance,
                        2 * t,
                        shape,
                        element,
                    )
            if i + 2 < count:
                cute.arch.barrier_arrive(barrier_id=USED + i % 2, number_of_threads=8 * WARP)
            token = (first + i) * tile + local + group
            if z.toint() != 0:
                output.gate(
                    y,
                    z_from + Int64(token) * (z_token * 2),
                    z_token * 16,
                    t,
                    seqlen - token,
                    element,
                )
            # Stored in the next tile's long stretch.
            output.round_out(words, y, element)
            out_at = out_from + Int64(token) * (out_token * 2)
            out_left = seqlen - token
            row_block = next_block
            cb_here = cb_next
            stage = next_stage(stage)
        output.Rows(words, out_at, out_token * 16, out_left, t).store(shape)
    else:
        own_thread = thread - output_warps * WARP
        owner = warp - output_warps
        m_tiles = width // 16
        n_tiles = shape.state_columns // 8
        column = owner * shape.state_columns
        x_from = state.row_source(
            x.toint() + channel * 2,
            (x_batch, x_token, x_head),
            this_batch,
            head,
            own_thread,
            width // 8,
        )
        b_from = state.row_source(
            b.toint(),
            (b_batch, b_token, b_group),
            this_batch,
            group_of_head,
            own_thread,
            shape.columns // 8,
        )
        x_lines = x.toint() + 2 * (
            Int64(this_batch) * x_batch + Int64(head) * x_head + Int64(channel)
        )
        b_lines = b.toint() + 2 * (Int64(this_batch) * b_batch + Int64(group_of_head) * b_group)
        decay_from = decay.toint() + (Int64(this_batch) * heads + head) * tiles * (8 * tile)
        starts_from = starts.toint() + Int64(this_batch) * tiles * (4 * tile)
        has_starts = (starts.toint() != 0) if packed else None
        if count > 0:
            state.copy_tile(
                shape,
                shared,
                own_thread,
                Int32(0),
                Int32(0),
                first * tile,
                seqlen,
                (x_from, x_token),
                (b_from, b_token),
                decay_from,
                (starts_from, has_starts),
            )
        commit_copies()
        s = cute.make_rmem_tensor((4, n_tiles, m_tiles), Float32)
        s.fill(0.0)
        if initial.toint() != 0:
            entry = (
                Int64(this_batch) * initial_batch
                + Int64(segment) * initial_segment
                + Int64(head) * initial_head
                + Int64(channel + group) * dstate
                + (column + 2 * t)
            )
            state.load_state(s, initial.toint(), entry, initial_kind, column + 2 * t, dstate)
        x_lane = shared + (lane // 16 * 8 + lane % 8) * shape.x_row + lane // 8 % 2 * 16
        b_lane = shared + shape.b_start + lane % 16 * shape.b_row + lane // 16 * 16 + column * 2
        stage = Int32(0)
        total = Float32(0.0)
        ended = Int32(0)
        # The next sequence to end, and where; none if there are no more.
        sequence = Int32(0)
        next_end = Int32(NEVER)
        if cutlass.const_expr(packed):
            if cu_seqlens.toint() != 0:
                upper = sequences
                if first == 0:
                    upper = Int32(0)
                while sequence < upper:
                    middle = (sequence + upper) // 2
                    if state.sequence_end(cu_seqlens, middle, sequences) <= first * tile:
                        sequence = middle + 1
                    else:
                        upper = middle
                next_end = state.sequence_end(cu_seqlens, sequence, sequences)
        for i in cutlass.range(0, count, 1, unroll=1):
            decay_stage = shared + Uint32(shape.decay_start + stage * (8 * tile))
            wait_copies(0)
            if cutlass.const_expr(outputs):
                if i >= 2:
                    cute.arch.barrier(barrier_id=USED + i % 2, number_of_threads=8 * WARP)
                state.publish(
                    s,
                    shared + Uint32(shape.s_start + i % 2 * shape.s_stage),
                    owner,
                    group,
                    t,
                    shape,
                    element,
                )
                for reader in cutlass.range_constexpr(SCAN_WARPS):
                    cute.arch.barrier_arrive(
                        barrier_id=READY + 2 * reader + i % 2, number_of_threads=5 * WARP
                    )
            cute.arch.barrier(barrier_id=AMONG_STATES, number_of_threads=STATE_WARPS * WARP)
            state.prefetch_tile(
                shape,
                own_thread,
                (first + i + AHEAD) * tile,
                seqlen,
                (x_lines, x_token),
                (b_lines, b_token),
                (head == group_of_head * group_heads) & (channel == 0),
            )
            if i + 1 < count:
                state.copy_tile(
                    shape,
                    shared,
                    own_thread,
                    next_stage(stage),
                    (i + 1) % B_STAGES,
                    (first + i + 1) * tile,
                    seqlen,
                    (x_from, x_token),
                    (b_from, b_token),
                    decay_from,
                    (starts_from, has_starts),
                )
            commit_copies()
            a_last = load_floats(decay_stage, 8 * tile - 8, count=1)[0]
            start = Int32(-1)
            x_stage = x_lane + Uint32(stage * shape.x_stage)
            b_stage = b_lane + Uint32(i % B_STAGES * shape.b_stage)
            pairs = decay_stage + t * 16
            if cutlass.const_expr(packed):
                starts_stage = shared + Uint32(shape.starts_start + stage * (4 * tile))
                if starts.toint() != 0:
                    start = Int32(load_shared(starts_stage, 4 * tile - 4, count=1)[0])
                token = (first + i) * tile
                while next_end <= token + tile:
                    begin = state.sequence_end(cu_seqlens, sequence - 1, sequences)
                    local = next_end - 1 - token
                    a_end = Float32(0.0)
                    start_end = Int32(-1)
                    if begin < next_end:
                        a_end = load_floats(decay_stage + local * 8, 0, count=1)[0]
                        if starts.toint() != 0:
                            start_end = Int32(load_shared(starts_stage + local * 4, 0, count=1)[0])
                    kept = (begin < next_end) & (start_end < 0) | (sequence == 0) & (next_end == 0)
                    entry = (
                        (Int64(sequence) * heads + head) * headdim + (channel + group)
                    ) * dstate + (column + 2 * t)
                    last = choose(begin < next_end, local, Int32(-1))
                    for m in cutlass.range_constexpr(m_tiles):
                        at_end = cute.make_rmem_tensor((4, n_tiles, 1), Float32)
                        state.take_row(at_end, s, m, kept, exp2(a_end))
                        for block in cutlass.range(0, shape.row_blocks, 1, unroll=1):
                            state.update(
                                at_end,
                                x_stage + Uint32(block * (16 * shape.x_row)) + 32 * m,
                                b_stage + Uint32(block * (16 * shape.b_row)),
                                load_floats(pairs + Uint32(block * 128), 0, count=4)
                                + load_floats(pairs + Uint32(block * 128), 64, count=4),
                                a_end,
                                (start_end - block * 16 - 2 * t, last - block * 16 - 2 * t),
                                element,
                            )
                        state.store_row(
                            at_end,
                            end_states.toint() + (entry + 16 * m * dstate) * 2,
                            column + 2 * t,
                            dstate,
                            element,
                        )
                    sequence = sequence + 1
                    next_end = state.sequence_end(cu_seqlens, sequence, sequences)
                if start >= 0:
                    # Not by a factor of 0: neither infinities nor NaN may cross.
                    s.fill(0.0)
                    ended = Int32(1)
            total += a_last
            state.scale(s, exp2(a_last))
            for block in cutlass.range_constexpr(shape.row_blocks):
                counted = None
                if cutlass.const_expr(packed):
                    counted = (start - block * 16 - 2 * t, Int32(tile))
                state.update(
                    s,
                    x_stage + block * (16 * shape.x_row),
                    b_stage + block * (16 * shape.b_row),
                    load_floats(pairs, block * 128, count=4)
                    + load_floats(pairs, block * 128 + 64, count=4),
                    a_last,
                    counted,
                    element,
                )
            stage = next_stage(stage)
        if (final.toint() != 0) & ((final_segment >= 0) | (segment == segments - 1)):
            entry = (
                Int64(this_batch) * final_batch
                + choose(final_segment >= 0, Int64(segment) * final_segment, Int64(0))
                + Int64(head) * final_head
                + Int64(channel + group) * dstate
                + (column + 2 * t)
            )
            state.store_state(s, final.toint() + entry * 4, column + 2 * t, dstate)
        if (totals.toint() != 0) & (own_thread == 0) & (channel == 0):
            address = totals.toint() + ((Int64(this_batch) * segments + segment) * heads + head) * 4
            store_words(address, [bits(choose(ended == 0, exp2(total), Float32(0.0)))], True)
