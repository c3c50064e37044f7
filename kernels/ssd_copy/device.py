"""Gathers a tensor of 16-bit elements with any strides into a contiguous one.

- ``source``  ``(batch, seqlen, rows, columns)``; strides count elements, and may be 0 or negative;
- ``target``  the same, contiguous and aligned to 16 bytes; ``columns`` is a multiple of 8.

A block copies ``tokens`` tokens, a thread eight elements at a time, which it stores as 16 bytes.
"""

# The DSL ships no types, and its `.pth` file hides it from type checkers.
# pyright: reportMissingImports=false

import cutlass
from cutlass import Int32, Int64, Uint32, cute

from ..scalars import store_words

VECTOR = 8


@cute.kernel
def ssd_copy(
    source: cute.Pointer,
    target: cute.Pointer,
    batch: Int32,
    seqlen: Int32,
    rows: Int32,
    columns: Int32,
    source_batch: Int64,
    source_token: Int64,
    source_row: Int64,
    source_column: Int64,
    *,
    threads: cutlass.Constexpr,
    tokens: cutlass.Constexpr,
):
    """Copy ``tokens`` tokens; grid ``(batch * ceildiv(seqlen, tokens), 1, 1)``."""
    place = Int32(cute.arch.block_idx()[0])
    parts = (seqlen - 1) // tokens + 1
    this_batch = place // parts
    first = place % parts * tokens
    row_vectors = columns // VECTOR
    vectors = rows * row_vectors
    left = seqlen - first
    count = vectors * tokens
    if left < tokens:
        count = vectors * left
    start = source.toint() + Int64(this_batch) * source_batch * 2
    goal = target.toint() + Int64(this_batch) * seqlen * rows * columns * 2
    for index in cutlass.range(Int32(cute.arch.thread_idx()[0]), count, threads, unroll=1):
        token = first + index // vectors
        vector = index % vectors
        row = vector // row_vectors
        column = vector % row_vectors * VECTOR
        element = (
            Int64(token) * source_token + Int64(row) * source_row + Int64(column) * source_column
        )
        words = gather(start + element * 2, source_column * 2)
        store_words(
            goal + (Int64(token) * rows * columns + Int64(vector) * VECTOR) * 2, words, True
        )


def gather(address, step):
    """Load eight elements that lie `step` bytes apart, as four words."""
    text = "{ .reg .b16 half<8>; .reg .b64 at; mov.b64 at, {$r0}; ld.global.b16 half0, [at]; "
    for i in range(1, VECTOR):
        text += f"add.s64 at, at, {{$r1}}; ld.global.b16 half{i}, [at]; "
    for i in range(VECTOR // 2):
        text += f"mov.b32 {{$w{i}}}, {{half{2 * i}, half{2 * i + 1}}}; "
    return cute.arch.inline_ptx(
        text + "}", write_only_types=[Uint32] * 4, read_only_args=[address, step]
    )
