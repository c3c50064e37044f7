"""Products of the rows of C and B within each chunk.

- ``c``, ``b``  ``(batch, seqlen, groups, dstate)``, 16-bit, rows aligned to 16 bytes;
- ``seq_idx``   ``(batch, seqlen)`` i32, or null: products of two sequences are zero;
- ``out``       ``(batch, chunks, groups, chunk_size, chunk_size)``, rows ``out_row`` elements
  apart: row i has the products of C's token i with B's tokens. In fp32 with an ``out_kind`` of 0,
  else rounded to the dtype of ``c``. Rows end padded to an even number of elements.

Tokens past the end count as zero. With ``causal`` nothing is written to tiles above the diagonal.

A block does a tile of 64 x 64 products, a warp 16 rows of it. dstate comes in runs of 64, all under
way at once, and the first is used while the others come.
"""

# The DSL ships no types, and its `.pth` file hides it from type checkers.
# pyright: reportMissingImports=false

import cutlass
from cutlass import Float32, Int32, Int64, Uint32, cute

from ..scalars import load_number, store_words
from ..tensor_core import (
    commit_copies,
    copy_number_async,
    load_matrices,
    load_shared,
    mma,
    pack,
    wait_copies,
)
from .tiles import TILE, WARP, bits, ceildiv, choose, copy_rows, smaller, split


@cute.kernel
def ssd_bmm_chunk(
    c: cute.Pointer,
    b: cute.Pointer,
    seq_idx: cute.Pointer,
    out: cute.Pointer,
    batch: Int32,
    seqlen: Int32,
    chunks: Int32,
    chunk_size: Int32,
    groups: Int32,
    causal: Int32,
    out_kind: Int32,
    c_batch: Int64,
    c_token: Int64,
    c_group: Int64,
    b_batch: Int64,
    b_token: Int64,
    b_group: Int64,
    seq_batch: Int64,
    seq_token: Int64,
    out_row: Int64,
    *,
    dstate: cutlass.Constexpr,
):
    """Multiply one tile.

    Grid ``(ceildiv(chunk_size, 64) squared * groups * chunks * batch, 1, 1)``, block
    ``(128, 1, 1)``, and ``256 * (dstate + 8) + 256`` bytes of dynamic shared memory.
    """
    element = c.dtype
    thread = Int32(cute.arch.thread_idx()[0])
    lane = thread % WARP
    warp = cute.arch.make_warp_uniform(thread // WARP)
    group, t = lane // 4, lane % 4
    tiles = ceildiv(chunk_size, TILE)
    column_tile, row_tile, this_group, chunk, this_batch = split(
        Int32(cute.arch.block_idx()[0]), tiles, tiles, groups, chunks
    )
    if (causal == 0) | (column_tile <= row_tile):
        first = chunk * chunk_size
        count = smaller(seqlen - first, chunk_size)
        row, column = row_tile * TILE, column_tile * TILE
        row_bytes = 2 * dstate + 16
        shared = Uint32(cute.arch.get_dyn_smem(Float32).toint())
        b_rows = shared + Uint32(TILE * row_bytes)
        sequences = b_rows + Uint32(TILE * row_bytes)
        c_from = row_address(c, this_batch, c_batch, first + row, c_token, this_group, c_group)
        b_from = row_address(b, this_batch, b_batch, first + column, b_token, this_group, b_group)
        seq_from = seq_idx.toint() + 4 * (Int64(this_batch) * seq_batch + Int64(first) * seq_token)
        has_seq = seq_idx.toint() != 0
        copy_number_async(
            sequences + Uint32(thread * 4),
            seq_from + Int64(column + thread) * (4 * seq_token),
            column + thread < count,
            has_seq & (thread < TILE),
        )
        run = 64 if dstate > 64 else dstate
        for start in cutlass.range_constexpr(0, dstate, run):
            for shared_rows, source, stride, left in (
                (shared, c_from, c_token, count - row),
                (b_rows, b_from, b_token, count - column),
            ):
                copy_rows(
                    shared_rows + Uint32(2 * start),
                    row_bytes,
                    source + 2 * start,
                    stride,
                    left,
                    thread,
                    size=run,
                    columns=run,
                )
            commit_copies()
        sums = cute.make_rmem_tensor((4, TILE // 8), Float32)
        sums.fill(0.0)
        c_lane = shared + Uint32((warp * 16 + lane % 16) * row_bytes + lane // 16 * 16)
        b_lane = b_rows + Uint32((lane // 16 * 8 + lane % 8) * row_bytes + lane // 8 % 2 * 16)
        for start in cutlass.range_constexpr(0, dstate, run):
            wait_copies((dstate - start) // run - 1)
            cute.arch.sync_threads()
            for step in cutlass.range_constexpr(start, start + run, 16):
                multiply(sums, c_lane, b_lane, 2 * step, row_bytes, element)

        this_row = row + warp * 16 + group
        if has_seq:
            mask(sums, sequences, seq_from, 4 * seq_token, this_row, count, t)
        place = (Int64(this_batch) * chunks + chunk) * groups + this_group
        index = (place * chunk_size + Int64(this_row)) * out_row + Int64(column + 2 * t)
        if out_kind == 0:
            for tile in cutlass.range_constexpr(TILE // 8):
                for half in cutlass.range_constexpr(2):
                    store_words(
                        out.toint() + (index + Int64(half * 8) * out_row) * 4,
                        [bits(sums[2 * half, tile]), bits(sums[2 * half + 1, tile])],
                        (this_row + half * 8 < chunk_size)
                        & (column + 8 * tile + 2 * t < chunk_size),
                        32 * tile,
                    )
        else:
            for tile in cutlass.range_constexpr(TILE // 8):
                for half in cutlass.range_constexpr(2):
                    store_words(
                        out.toint() + (index + Int64(half * 8) * out_row) * 2,
                        [pack(sums[2 * half, tile], sums[2 * half + 1, tile], element)],
                        (this_row + half * 8 < chunk_size)
                        & (column + 8 * tile + 2 * t < chunk_size),
                        16 * tile,
                    )


def row_address(tensor, batch, of_batch, token, of_token, group, of_group):
    """Address of a token's row."""
    index = Int64(batch) * of_batch + Int64(token) * of_token + Int64(group) * of_group
    return tensor.toint() + index * 2


def multiply(sums, c_lane, b_lane, offset, row_bytes, element):
    """Add the products of 16 elements of dstate, ``offset`` bytes into the rows."""
    a = load_matrices(c_lane, offset)
    for first in range(0, TILE // 8, 2):
        words = load_matrices(b_lane, first * 8 * row_bytes + offset)
        for tile in (first, first + 1):
            pair = words[2 * (tile - first) : 2 * (tile - first) + 2]
            total = mma(a, pair, [sums[i, tile] for i in range(4)], element)
            for i in range(4):
                sums[i, tile] = total[i]


def mask(sums, sequences, seq_from, stride, row, count, t):
    """Zero what belongs to two sequences."""
    for half in (0, 1):
        this_row = row + 8 * half
        mine = load_number(seq_from + Int64(this_row) * stride, this_row < count, Int32(0))
        for tile in range(TILE // 8):
            words = load_shared(sequences + Uint32(8 * t), 32 * tile, count=2)
            for i, word in enumerate(words):
                place = (2 * half + i, tile)
                sums[place] = choose(mine == Int32(word), sums[place], Float32(0.0))
