"""Step sizes, and their decays summed up within each chunk.

- ``dt``       ``(batch, seqlen, heads)``, any strides; fp32, bf16 or fp16 by ``dt_kind``;
- ``dt_bias``  ``(heads,)`` of dtype ``bias_kind``, or null;
- ``rates``    ``(heads,)``, called A elsewhere, of dtype ``rates_kind``;
- ``steps``    ``(batch, heads, chunks, chunk_size)`` fp32, contiguous: dt after bias, softplus and
  limits, zero for tokens past the end;
- ``decay``    the same shape: sums of step sizes times A from the chunk's first token on.

A block takes 32 heads of a chunk, 64 tokens at a time: read with a lane a head, since heads lie
side by side in ``dt``, turned in shared memory, and summed with a lane a token. Two buffers take
turns, so that there is one barrier a tile.
"""

# The DSL ships no types, and its `.pth` file hides it from type checkers.
# pyright: reportMissingImports=false

import cutlass
from cutlass import Float32, Int32, Int64, Uint32, cute

from ..scalars import load_scalar, store_words
from ..tensor_core import load_floats, store_shared
from .tiles import TILE, WARP, bits, ceildiv, choose, scan_sum, smaller, split, step_size

HEADS = WARP
WARPS = 8
ROW = 4 * (HEADS + 1)
"""Bytes of a token's row of step sizes; the padding spreads a column over all banks."""


@cute.kernel
def ssd_chunk_cumsum(
    dt: cute.Pointer,
    dt_bias: cute.Pointer,
    rates: cute.Pointer,
    steps: cute.Pointer,
    decay: cute.Pointer,
    batch: Int32,
    seqlen: Int32,
    chunks: Int32,
    chunk_size: Int32,
    heads: Int32,
    dt_kind: Int32,
    bias_kind: Int32,
    rates_kind: Int32,
    softplus: Int32,
    low: Float32,
    high: Float32,
    dt_batch: Int64,
    dt_token: Int64,
    dt_head: Int64,
    bias_head: Int64,
    rates_head: Int64,
):
    """Sum up one chunk of 32 heads.

    Grid ``(ceildiv(heads, 32) * chunks * batch, 1, 1)``, block ``(256, 1, 1)``, and 16896 bytes of
    dynamic shared memory.
    """
    thread = Int32(cute.arch.thread_idx()[0])
    lane = thread % WARP
    warp = cute.arch.make_warp_uniform(thread // WARP)
    head_block, chunk, this_batch = split(
        Int32(cute.arch.block_idx()[0]), ceildiv(heads, HEADS), chunks
    )
    first_head = head_block * HEADS
    first = chunk * chunk_size
    count = smaller(seqlen - first, chunk_size)
    shared = Uint32(cute.arch.get_dyn_smem(Float32).toint())

    known = first_head + lane < heads
    bias = load_scalar(
        dt_bias.toint(),
        Int64(first_head + lane) * bias_head,
        bias_kind,
        known & (dt_bias.toint() != 0),
    )
    dt_index = Int64(this_batch) * dt_batch + Int64(first_head + lane) * dt_head
    before = cute.make_rmem_tensor((HEADS // WARPS,), Float32)
    before.fill(0.0)
    for start in cutlass.range(0, chunk_size, TILE, unroll=1):
        buffer = shared + Uint32(start // TILE % 2 * (TILE * ROW))
        load_steps(
            buffer,
            dt,
            dt_index,
            dt_token,
            first,
            start,
            count,
            known,
            (warp, lane),
            (bias, dt_kind, softplus, low, high),
        )
        cute.arch.sync_threads()
        for turn in cutlass.range_constexpr(HEADS // WARPS):
            head = warp + turn * WARPS
            inside = first_head + head < heads
            rate = load_scalar(
                rates.toint(), Int64(first_head + head) * rates_head, rates_kind, inside
            )
            row = (Int64(this_batch) * heads + (first_head + head)) * chunks + chunk
            for half in cutlass.range_constexpr(TILE // WARP):
                place = half * WARP + lane
                step = load_floats(buffer + Uint32(place * ROW + head * 4), count=1)[0]
                total = scan_sum(step * rate, lane) + before[turn]
                before[turn] = cute.arch.shuffle_sync(total, WARP - 1)
                wanted = inside & (start + place < chunk_size)
                index = (row * chunk_size + Int64(start + place)) * 4
                store_words(steps.toint() + index, [bits(step)], wanted)
                store_words(decay.toint() + index, [bits(total)], wanted)


def load_steps(buffer, dt, dt_index, dt_token, first, start, count, known, place, options):
    """Leave the step sizes of a tile in shared memory: a row a token, a column a head."""
    warp, lane = place
    bias, dt_kind, softplus, low, high = options
    for turn in range(TILE // WARPS):
        row = warp + turn * WARPS
        inside = known & (start + row < count)
        index = dt_index + Int64(first + start + row) * dt_token
        value = load_scalar(dt.toint(), index, dt_kind, inside) + bias
        step = choose(inside, step_size(value, softplus, low, high), Float32(0.0))
        store_shared(buffer + Uint32(row * ROW + lane * 4), [bits(step)])
