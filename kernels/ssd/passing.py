"""Hands states on between the segments of a sequence that `ssd_scan` went through apart.

- ``states``   ``(batch, segments, heads, size)`` fp32, contiguous, ``size`` = headdim x dstate, a
  multiple of 4: what each segment made of a state of zeros. On return the state before it;
- ``totals``   ``(batch, segments, heads)`` fp32: the factor from the state before to that after;
- ``initial``  ``(batch, heads, size)`` of dtype ``initial_kind``, or null for zeros; strides of
  batch and heads count elements, and rows start aligned to 16 bytes;
- ``final``    ``(batch, heads, size)`` fp32, contiguous, or null: the state after the last segment.

Grid ``(ceildiv(size, 1024), heads, batch)``, blocks of 256 threads, four elements each.
"""

# The DSL ships no types, and its `.pth` file hides it from type checkers.
# pyright: reportMissingImports=false

import cutlass
from cutlass import Float32, Int32, Int64, cute

from ..scalars import load_pair, load_scalar, load_words, store_words
from .prepare import bits


@cute.kernel
def ssd_pass(
    states: cute.Pointer,
    totals: cute.Pointer,
    initial: cute.Pointer,
    final: cute.Pointer,
    batch: Int32,
    segments: Int32,
    heads: Int32,
    size: Int32,
    initial_kind: Int32,
    initial_batch: Int64,
    initial_head: Int64,
    *,
    threads: cutlass.Constexpr,
):
    """Take four elements of a head's state through all segments."""
    element = Int32(cute.arch.block_idx()[0]) * (4 * threads) + cute.arch.thread_idx()[0] * 4
    head = Int32(cute.arch.block_idx()[1])
    this_batch = Int32(cute.arch.block_idx()[2])
    inside = element < size
    known = inside & (initial.toint() != 0)
    entry = Int64(this_batch) * initial_batch + Int64(head) * initial_head + Int64(element)
    state = cute.make_rmem_tensor((4,), Float32)
    for i in cutlass.range_constexpr(2):
        pair = load_pair(initial.toint(), entry + 2 * i, initial_kind, known)
        state[2 * i] = pair[0]
        state[2 * i + 1] = pair[1]
    row = Int64(this_batch) * segments * heads + head
    for _ in cutlass.range(0, segments, 1, unroll=1):
        address = states.toint() + (row * size + element) * 4
        own = load_words(address, inside)
        factor = load_scalar(totals.toint(), row, Int32(0), True)
        store_words(address, [bits(state[i]) for i in range(4)], inside)
        for i in cutlass.range_constexpr(4):
            state[i] = state[i] * factor + own[i].bitcast(Float32)
        row = row + heads
    last = final.toint() + ((Int64(this_batch) * heads + head) * size + element) * 4
    store_words(last, [bits(state[i]) for i in range(4)], inside & (final.toint() != 0))
