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
  before a segment to what is left of it after, -1 if a sequence starts in the segment;
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

from ..scalars import choose, pinned
from .output_warps import write_outputs
from .segment import Segment
from .shape import OWNERS, STATE_WARPS, TURNS, WARP, Shape
from .state_warps import carry_state


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

    Grid ``(segments * batch, headdim / width * heads, 1)``, blocks of `Shape.threads`, and
    `Shape.shared_bytes` of dynamic shared memory.
    """
    shape = Shape(headdim, dstate, width, tile, outputs)
    thread = pinned(Int32(cute.arch.thread_idx()[0]))
    lane = thread % WARP
    warp = cute.arch.make_warp_uniform(thread // WARP)
    group, t = lane // 4, lane % 4
    this_batch, number = Int32(cute.arch.block_idx()[0]), Int32(0)
    place = Int32(cute.arch.block_idx()[1])
    head, channel = place // shape.slices, place % shape.slices * width
    # Divisions take long, and everything waits for these.
    if segments > 1:
        number = this_batch % segments
        this_batch = this_batch // segments
    group_of_head = Int32(0)
    if groups > 1:
        group_of_head = head // group_heads
    first = number * segment_tiles
    count = choose(tiles - first < segment_tiles, tiles - first, segment_tiles)
    count = choose(count < 0, Int32(0), count)

    shared = pinned(Uint32(cute.arch.get_dyn_smem(Float32).toint()))
    output_warps = OWNERS * TURNS * outputs
    segment = Segment(
        shape=shape,
        element=x.dtype,
        shared=shared,
        batch=this_batch,
        head=head,
        group=group_of_head,
        channel=channel,
        first=first,
        count=count,
        seqlen=seqlen,
        tiles=tiles,
        heads=heads,
        groups=groups,
        group_heads=group_heads,
        number=number,
        segments=segments,
    )
    if Uint32(warp) < Uint32(output_warps):
        write_outputs(
            segment,
            warp,
            (lane, group, t),
            (c, (c_batch, c_token, c_group)),
            (z, (z_batch, z_token, z_head)),
            (out, (out_batch, out_token, out_head)),
            (d, d_kind, (d_head, d_channel)),
            cb,
            starts,
            packed,
            pdl,
        )
    else:
        carry_state(
            segment,
            warp - output_warps,
            # With fewer bits than in a difference, which could be negative.
            thread & (STATE_WARPS * WARP - 1),
            (lane, group, t),
            (x, (x_batch, x_token, x_head)),
            (b, (b_batch, b_token, b_group)),
            decay,
            starts,
            (initial, initial_kind, (initial_batch, initial_segment, initial_head)),
            (final, (final_batch, final_segment, final_head)),
            totals,
            (cu_seqlens, end_states, sequences),
            packed,
            outputs,
            pdl,
        )
