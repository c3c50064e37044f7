"""The walk of the one-pass scan's warps that own tokens; its steps are in `scan_output`."""

# The DSL ships no types, and its `.pth` file hides it from type checkers.
# pyright: reportMissingImports=false

import cutlass
from cutlass import Float32, Int32, Int64, Uint32, cute

from ..scalars import bits, choose, load_scalar
from ..tensor_core import load_floats, load_shared, store_shared, thread_index
from . import scan_output as output
from .gate import gate, load_z
from .scan_output import BLOCK
from .segment import AMONG_OUTPUTS, READY, USED, next_stage
from .shape import OWNERS, TURNS, WARP, slot


@cute.jit
def write_outputs(segment, warp, lanes, c, z, out, d, cb, starts, packed, pdl):
    """Compute what a warp owns of each tile's out, and store it.

    `lanes`: a thread's lane, and the row and pair of columns that it has of 8x8 matrices. `c`, `z`
    and `out`: pointer, and the strides of batch, token, and group or head. `d`: pointer, dtype, and
    the strides of head and channel. With `pdl`, `prepare` may still run at first.
    """
    shape, shared = segment.shape, segment.shared
    first, count, seqlen, tile = segment.first, segment.count, segment.seqlen, shape.tile
    c, (c_batch, c_token, c_group) = c
    z, (z_batch, z_token, z_head) = z
    out, (out_batch, out_token, out_head) = out
    d, d_kind, (d_head, d_channel) = d
    lane, group, t = lanes
    # Two sets of warps take tiles in turn. Of each a warp owns a block of 16 tokens, or the half
    # `part` of one.
    turn, owner = warp // OWNERS, warp % OWNERS
    part = owner // shape.row_blocks
    c_from = c.toint() + 2 * (
        Int64(segment.batch) * c_batch + Int64(segment.group) * c_group + Int64(t * 8)
    )
    cb_from = cb.toint() + (
        (Int64(segment.batch) * segment.tiles * segment.groups + segment.group)
        * (shape.triangle * BLOCK)
        + (part * (16 * WARP) + lane * 16)
    )
    cb_tile = Int64(segment.groups) * (shape.triangle * BLOCK)
    z_from = z.toint() + 2 * (
        Int64(segment.batch) * z_batch + Int64(segment.head) * z_head + segment.channel
    )
    out_from = out.toint() + 2 * (
        Int64(segment.batch) * out_batch + Int64(segment.head) * out_head + segment.channel
    )
    before = shape.row_blocks - 1
    cs = cute.make_rmem_tensor((4, shape.halves, shape.runs), Uint32)
    cbs = cute.make_rmem_tensor((4, shape.halves, shape.row_blocks), Uint32)
    cbs.fill(0)
    row_block = owner % shape.row_blocks
    token = (first + turn) * tile + row_block * 16 + part * 8 + group
    cb_here = cb_from + cb_tile * (first + turn) + output.triangle_of(row_block)
    if count > turn:
        c_rows = output.rows_of(c_from, c_token, token, seqlen, shape)
        for run in cutlass.range_constexpr(shape.runs):
            output.load_c(cs, run, c_rows, t, shape)
    channel = warp * WARP + lane
    factor = load_scalar(
        d.toint(),
        Int64(segment.head) * d_head + Int64(segment.channel + channel) * d_channel,
        d_kind,
        (channel < shape.width) & (d.toint() != 0),
    )
    if cutlass.const_expr(pdl):
        cute.arch.griddepcontrol_wait()
    # The last place has the block on the diagonal, and is loaded a tile ahead.
    output.load_block(cbs, before, cb_here + Int64(row_block) * BLOCK, count > turn, shape)
    if channel < shape.width:
        store_shared(shared + shape.d_start + channel * 4, [bits(factor)])
    cute.arch.barrier(barrier_id=AMONG_OUTPUTS, number_of_threads=OWNERS * TURNS * WARP)
    if z.toint() != 0:
        output.ask_for_rows(
            z_from + Int64(token - group) * (z_token * 2),
            z_token,
            lane,
            seqlen - token + group,
            shape,
        )
    walk = (
        *(segment, (turn, owner, part), lanes, (cs, c_from, c_token), (cbs, cb_here, cb_tile)),
        *((z_from, z_token), (out_from, out_token), starts, packed),
    )
    # Apart, so that what one needs takes no registers from the other; with masks that is slower.
    if cutlass.const_expr(packed):
        walk_tiles(*walk, z.toint() != 0)
    elif z.toint() != 0:
        walk_tiles(*walk, True)
    else:
        walk_tiles(*walk, False)


@cute.jit
def walk_tiles(segment, owns, lanes, c, cb, z, out, starts, packed, gated):
    """Walk a warp's tiles: every other one of the segment.

    `owns`: its set of warps, its place there, and which half of a block it has. `c`: registers with
    the first row, where rows start, and the stride of tokens. `cb`: registers with the first block
    on the diagonal, the address of that row of blocks, and the stride of tiles. `z`, read if
    `gated`, and `out`: where their rows start, and the stride of tokens.
    """
    shape, element, shared = segment.shape, segment.element, segment.shared
    first, count, seqlen, tile = segment.first, segment.count, segment.seqlen, shape.tile
    turn, owner, part = owns
    lane, group, t = lanes
    cs, c_from, c_token = c
    cbs, cb_here, cb_tile = cb
    z_from, z_token = z
    out_from, out_token = out
    # Where this lane finds its parts of the state.
    s_lanes = [shared + shape.s_start + slot(group, t ^ pair) * 16 for pair in (0, 2)]
    y = cute.make_rmem_tensor((4, shape.halves, shape.channel_tiles), Float32)
    # What the tile before has left to store.
    words = cute.make_rmem_tensor((2, shape.halves, shape.channel_tiles), Uint32)
    words.fill(0)
    out_at = out_from
    out_left = Int32(0)
    before = shape.row_blocks - 1
    row_block = owner % shape.row_blocks
    stage = turn
    s_stage = Uint32(turn * shape.s_stage)
    for i in cutlass.range(turn, count, TURNS, unroll=1):
        more = i + TURNS < count
        # The other way round in this warp's next tile.
        next_block = before - row_block
        next_token = (first + i + TURNS) * tile + next_block * 16 + part * 8 + group
        c_rows = output.rows_of(c_from, c_token, next_token, seqlen, shape)
        cb_next = cb_here + (
            cb_tile * TURNS + output.triangle_of(next_block) - output.triangle_of(row_block)
        )
        local = row_block * 16 + part * 8
        distance = local + group - 2 * t
        # Where it finds those of x, as first operand: found anew where masks take registers.
        x_lane = thread_index() % WARP if packed else lane
        # The same of the column that it stores.
        t_out = thread_index() % 4 if packed else t
        x_rows = (
            shared
            + (x_lane // 16 * 8 + x_lane % 8) * shape.x_row
            + x_lane // 8 % 2 * 16
            + Uint32(stage * shape.x_stage)
        )
        decay_stage = shared + Uint32(shape.decay_start + stage * shape.decay_stage)
        pairs = decay_stage + t * 16
        starts_stage = shared + Uint32(shape.starts_start + stage * (4 * tile))
        y.fill(0.0)
        cute.arch.barrier(barrier_id=READY + 2 * owner + turn, number_of_threads=5 * WARP)
        # Long and without branches, so that each wait has something else to do.
        decays = output.own_decays(decay_stage + (local + group) * 8, shape)
        # The last token's: no sequence starts in most tiles, which then cost what they cost where
        # there are no sequences at all.
        start = Int32(-1)
        if cutlass.const_expr(packed):  # noqa: SIM102
            if starts.toint() != 0:
                start = Int32(load_shared(starts_stage, 4 * tile - 4, count=1)[0])
        operands, own = output.multiply_state(
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
                cb_next + Int64(next_block) * BLOCK,
                more,
                cb_here,
                row_block,
            ),
            output.Rows(words, out_at, out_token * 16, out_left, t_out),
            part,
            shape,
            element,
        )
        # Both change where a sequence starts.
        diagonal = cute.make_rmem_tensor((2, shape.halves), Uint32)
        output.put(diagonal, operands)
        left = cute.make_rmem_tensor((2 * shape.halves,), Float32)
        output.carried(left, pairs + local * 8)
        if cutlass.const_expr(packed):  # noqa: SIM102
            if start >= 0:
                output.drop_carried(left, starts_stage + (local + 2 * t) * 4)
                begins = output.own_starts(starts_stage + (local + group) * 4, shape)
                output.drop_others(diagonal, begins, row_block * 16 + 2 * t)
        output.scale_tokens(y, left)
        x_own = x_rows + row_block * (16 * shape.x_row)
        xs = output.multiply_x(y, x_own, output.taken(diagonal), element)
        d_column = shared + shape.d_start + thread_index() % WARP // 4 * 4
        output.add_dx(y, xs, d_column, own, part, element)
        # The decay up to the token before this row of blocks.
        reference_at = choose(row_block > 0, row_block * 128 - 8, Int32(0))
        reference = load_floats(decay_stage + reference_at, 0, count=1)[0]
        token = (first + i) * tile + local + group
        # Past the end the last one's is read again, or none, whatever takes fewer registers.
        rows = output.rows_of(z_from, z_token, token, None if packed else seqlen, shape)
        left_of_z = seqlen - token if packed else None
        # Half of it early, or all as soon as the last block but one is done with: as many as there
        # are registers for.
        if gated:
            if cutlass.const_expr(packed):
                load_z(words, rows, left_of_z, range(1), t)
            elif row_block == 0:
                load_z(words, rows, left_of_z, range(shape.halves), t)
        if start < 0:
            for blocks in cutlass.range_constexpr(1, shape.row_blocks):
                if row_block == blocks:
                    output.multiply_before(
                        *(y, cbs, range(blocks - 1), pairs, x_rows, reference, decays, None),
                        *(2 * t, shape, element),
                    )
                    if cutlass.const_expr(not packed):  # noqa: SIM102
                        if gated:
                            load_z(words, rows, left_of_z, range(shape.halves), t)
                    output.multiply_before(
                        *(y, cbs, range(blocks - 1, blocks), pairs, x_rows, reference),
                        *(decays, None, 2 * t, shape, element),
                    )
        elif cutlass.const_expr(packed):
            begins = output.own_starts(starts_stage + (local + group) * 4, shape)
            # Few instructions: hardly a tile needs them, and they are read from memory for it.
            for block in cutlass.range(0, row_block, 1, unroll=1):
                output.load_block(cbs, 0, cb_here + Int64(block) * BLOCK, True, shape)
                output.multiply_before(
                    *(y, cbs, range(1), pairs + block * 128),
                    *(x_rows + Uint32(block * (16 * shape.x_row)), reference, decays, begins),
                    *(block * 16 + 2 * t, shape, element),
                )
        if more:
            cute.arch.barrier_arrive(barrier_id=USED + turn, number_of_threads=8 * WARP)
        # The same, found anew: kept, it would take a register.
        token = (first + i) * tile + local + group
        if gated:
            if cutlass.const_expr(packed):
                rows = output.rows_of(z_from, z_token, token, None, shape)
                load_z(words, rows, seqlen - token, range(1, shape.halves), t)
            gate(y, words, t, element)
            # Else the next tile's would come from memory only when they are used.
            following = next_token - group
            output.ask_for_rows(
                z_from + Int64(following) * (z_token * 2),
                z_token,
                thread_index() % WARP,
                seqlen - following,
                shape,
            )
        # Stored in the next tile's long stretch.
        output.round_out(words, y, element)
        out_at = out_from + Int64(token) * (out_token * 2)
        out_left = seqlen - token
        row_block = next_block
        cb_here = cb_next
        stage = next_stage(next_stage(stage))
    # The loop takes all registers: asked for anew, this need not be kept in one.
    t = thread_index() % 4
    output.Rows(words, out_at, out_token * 16, out_left, t).store(shape)
