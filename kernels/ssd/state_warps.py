"""The walk of the one-pass scan's warps that own the state; its steps are in `scan_state`."""

# The DSL ships no types, and its `.pth` file hides it from type checkers.
# pyright: reportMissingImports=false

import cutlass
from cutlass import Float32, Int32, Int64, Uint32, cute

from ..scalars import bits, choose, pinned, store_words
from ..tensor_core import commit_copies, exp2, load_floats, load_shared, wait_copies
from . import scan_state as state
from .scan_state import NEVER
from .segment import AMONG_STATES, READY, USED, next_stage
from .shape import B_STAGES, OWNERS, STATE_WARPS, WARP, X_STAGES

AHEAD = 3
"""Tiles after which one is asked for that is not copied yet."""


@cute.jit
def carry_state(
    segment,
    owner,
    own_thread,
    lanes,
    x,
    b,
    decay,
    starts,
    initial,
    final,
    totals,
    ends,
    packed,
    outputs,
    pdl,
):
    """Copy tiles, take a warp's part of the state through them, and store states.

    With `pdl`, `prepare` may still run at first, but nothing before it.

    `x` and `b`: pointer, and the strides of batch, token, and head or group. `initial`: pointer,
    dtype and strides of batch, segment and head; `final` the same without dtype. `ends`: pointers
    to the bounds of sequences and to the states at their ends, and how many there are.
    """
    shape, element, shared = segment.shape, segment.element, segment.shared
    first, count, seqlen = segment.first, segment.count, segment.seqlen
    tile, dstate = shape.tile, shape.dstate
    x, (x_batch, x_token, x_head) = x
    b, (b_batch, b_token, b_group) = b
    initial, initial_kind, (initial_batch, initial_segment, initial_head) = initial
    final, (final_batch, final_segment, final_head) = final
    cu_seqlens, end_states, sequences = ends
    lane, group, t = lanes
    m_tiles = shape.channel_tiles
    n_tiles = shape.state_columns // 8
    column = owner * shape.state_columns
    x_from = state.row_source(
        x.toint() + segment.channel * 2,
        (x_batch, x_token, x_head),
        segment.batch,
        segment.head,
        own_thread,
        shape.width // 8,
    )
    b_from = state.row_source(
        b.toint(),
        (b_batch, b_token, b_group),
        segment.batch,
        segment.group,
        own_thread,
        shape.columns // 8,
    )
    x_lines = x.toint() + 2 * (
        Int64(segment.batch) * x_batch + Int64(segment.head) * x_head + Int64(segment.channel)
    )
    b_lines = b.toint() + 2 * (Int64(segment.batch) * b_batch + Int64(segment.group) * b_group)
    decay_from = (
        decay.toint()
        + (Int64(segment.batch) * segment.heads + segment.head) * segment.tiles * shape.decay_stage
    )
    starts_from = starts.toint() + Int64(segment.batch) * segment.tiles * (4 * tile)
    has_starts = (starts.toint() != 0) if packed else None
    if count > 0:
        state.copy_inputs(
            shape,
            shared,
            own_thread,
            Int32(0),
            Int32(0),
            first * tile,
            seqlen - first * tile,
            (x_from, x_token),
            (b_from, b_token),
        )
    for later in cutlass.range_constexpr(1, AHEAD):
        state.prefetch_rows(
            shape,
            own_thread,
            (first + later) * tile,
            seqlen,
            (x_lines, x_token),
            shape.width,
            True,
        )
    if cutlass.const_expr(pdl):
        cute.arch.griddepcontrol_wait()
    if count > 0:
        state.copy_prepared(
            shape,
            shared,
            own_thread,
            Int32(0),
            first * tile,
            decay_from,
            (starts_from, has_starts),
        )
    commit_copies()
    s = cute.make_rmem_tensor((4, n_tiles, m_tiles), Float32)
    s.fill(0.0)
    if initial.toint() != 0:
        entry = (
            Int64(segment.batch) * initial_batch
            + Int64(segment.number) * initial_segment
            + Int64(segment.head) * initial_head
            + Int64(segment.channel + group) * dstate
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
    # The outer one is decided at compile time, the inner one at run time.
    if cutlass.const_expr(packed):  # noqa: SIM102
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
        decay_stage = shared + Uint32(shape.decay_start + stage * shape.decay_stage)
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
            for reader in cutlass.range_constexpr(OWNERS):
                cute.arch.barrier_arrive(
                    barrier_id=READY + 2 * reader + i % 2, number_of_threads=5 * WARP
                )
        cute.arch.barrier(barrier_id=AMONG_STATES, number_of_threads=STATE_WARPS * WARP)
        # Where registers are scarce, places to copy are found anew for each tile.
        copier = pinned(own_thread) if tile == 32 else own_thread
        # Else x and B would come from memory only when they are copied. All heads of a group read
        # its B, so one block asks.
        later_token = (first + i + AHEAD) * tile
        state.prefetch_rows(
            shape, copier, later_token, seqlen, (x_lines, x_token), shape.width, True
        )
        asks_for_b = (segment.head == segment.group * segment.group_heads) & (segment.channel == 0)
        state.prefetch_rows(
            shape, copier, later_token, seqlen, (b_lines, b_token), dstate, asks_for_b
        )
        if i + 1 < count:
            next_token = (first + i + 1) * tile
            if next_token + tile <= seqlen:
                state.copy_inputs(
                    shape,
                    shared,
                    copier,
                    next_stage(stage),
                    (i + 1) % B_STAGES,
                    next_token,
                    None,
                    (x_from, x_token),
                    (b_from, b_token),
                )
            else:
                state.copy_inputs(
                    shape,
                    shared,
                    copier,
                    next_stage(stage),
                    (i + 1) % B_STAGES,
                    next_token,
                    seqlen - next_token,
                    (x_from, x_token),
                    (b_from, b_token),
                )
            state.copy_prepared(
                shape,
                shared,
                copier,
                next_stage(stage),
                next_token,
                decay_from,
                (starts_from, has_starts),
            )
        commit_copies()
        a_last = load_floats(decay_stage, 8 * tile - 8, count=1)[0]
        start = Int32(-1)
        x_stage = x_lane + Uint32(stage * shape.x_stage)
        b_stage = b_lane + Uint32(i % B_STAGES * shape.b_stage)
        pairs = decay_stage + t * 16
        left_at_end = decay_stage + (8 * tile + t * 8)
        if cutlass.const_expr(packed):
            starts_stage = shared + Uint32(shape.starts_start + stage * (4 * tile))
            if starts.toint() != 0:
                start = state.last_start(shape, shared, stage)
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
                    (Int64(sequence) * segment.heads + segment.head) * shape.headdim
                    + (segment.channel + group)
                ) * dstate + (column + 2 * t)
                last = choose(begin < next_end, local, Int32(-1))
                # A few columns of a few channels at a time, as there are no registers for more.
                some = min(n_tiles, 4 if n_tiles * m_tiles <= 16 else 2)
                for m in cutlass.range_constexpr(m_tiles):
                    for n in cutlass.range_constexpr(0, n_tiles, some):
                        at_end = cute.make_rmem_tensor((4, some, 1), Float32)
                        state.take_part(at_end, s, n, m, kept, exp2(a_end))
                        for block in cutlass.range(0, shape.row_blocks, 1, unroll=1):
                            state.update(
                                at_end,
                                x_stage + Uint32(block * (16 * shape.x_row)) + 32 * m,
                                b_stage + Uint32(block * (16 * shape.b_row)) + 16 * n,
                                state.weights_until(pairs + Uint32(block * 128), a_end),
                                state.counted(
                                    start_end - block * 16 - 2 * t, last - block * 16 - 2 * t
                                ),
                                element,
                            )
                        state.store_part(
                            at_end,
                            end_states.toint() + (entry + (16 * m * dstate + 8 * n)) * 2,
                            column + 8 * n + 2 * t,
                            dstate,
                            element,
                        )
                sequence = sequence + 1
                next_end = state.sequence_end(cu_seqlens, sequence, sequences)
        total += a_last
        if start >= 0:
            # Not by a factor of 0: neither infinities nor NaN may cross.
            s.fill(0.0)
            ended = Int32(1)
            for block in cutlass.range(0, shape.row_blocks, 1, unroll=1):
                state.update(
                    s,
                    x_stage + Uint32(block * (16 * shape.x_row)),
                    b_stage + Uint32(block * (16 * shape.b_row)),
                    state.weights_to_end(left_at_end + Uint32(block * 64), 0),
                    state.counted(start - block * 16 - 2 * t, Int32(tile)),
                    element,
                )
        else:
            state.scale(s, exp2(a_last))
            for block in cutlass.range_constexpr(shape.row_blocks):
                state.update(
                    s,
                    x_stage + block * (16 * shape.x_row),
                    b_stage + block * (16 * shape.b_row),
                    state.weights_to_end(left_at_end, 64 * block),
                    None,
                    element,
                )
        stage = next_stage(stage)
    # One of its own, so that nothing that was made of the other is kept until here.
    head = pinned(segment.head)
    column = column + 2 * t
    if (final.toint() != 0) & ((final_segment >= 0) | (segment.number == segment.segments - 1)):
        if cutlass.const_expr(outputs):
            last = choose(stage == 0, Int32(X_STAGES - 1), stage - 1)
            add_rounded_away(segment, s, x_lane, b_lane, last, t, starts, packed)
        entry = (
            Int64(segment.batch) * final_batch
            + choose(final_segment >= 0, Int64(segment.number) * final_segment, Int64(0))
            + Int64(head) * final_head
            + Int64(segment.channel + group) * dstate
            + column
        )
        state.store_state(s, final.toint() + entry * 4, column, dstate)
    if (totals.toint() != 0) & (own_thread == 0) & (segment.channel == 0):
        address = (
            totals.toint()
            + ((Int64(segment.batch) * segment.segments + segment.number) * segment.heads + head)
            * 4
        )
        store_words(address, [bits(choose(ended == 0, exp2(total), Float32(-1.0)))], True)


@cute.jit
def add_rounded_away(segment, s, x_lane, b_lane, stage, t, starts, packed):
    """Add to the state after the last tile, which is still there, what rounding took from it.

    Of its last 17 to 32 tokens, if it has so many: of these most is left at the end, so final
    states are more exact, for little time. `x_lane` and `b_lane`: where this lane finds first
    tiles; `stage`: that of the tile's x.
    """
    shape, shared = segment.shape, segment.shared
    x_stage = x_lane + Uint32(stage * shape.x_stage)
    b_stage = b_lane + Uint32((segment.count - 1) % B_STAGES * shape.b_stage)
    left_at_end = shared + Uint32(
        shape.decay_start + stage * shape.decay_stage + 8 * shape.tile + t * 8
    )
    # The outer one is decided at compile time, the inner one at run time.
    start = Int32(-1)
    if cutlass.const_expr(packed):  # noqa: SIM102
        if starts.toint() != 0:
            start = state.last_start(shape, shared, stage)
    left = segment.seqlen - (segment.first + segment.count - 1) * shape.tile
    blocks = choose(left < shape.tile, (left + 15) // 16, Int32(shape.row_blocks))
    blocks = choose(segment.count > 0, blocks, Int32(0))
    first = choose(blocks > 2, blocks - 2, Int32(0))
    # Few instructions: they are read from memory for this one time.
    for block in cutlass.range(first, blocks, 1, unroll=1):
        masks = None
        if cutlass.const_expr(packed):
            masks = state.counted(start - block * 16 - 2 * t, Int32(shape.tile))
        state.update(
            s,
            x_stage + Uint32(block * (16 * shape.x_row)),
            b_stage + Uint32(block * (16 * shape.b_row)),
            state.weights_to_end(left_at_end + Uint32(block * 64), 0),
            masks,
            segment.element,
            state.rounded_away,
        )
