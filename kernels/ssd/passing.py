"""Hands states on between the segments of a sequence that `ssd_scan` goes through apart.

`ssd_scan` without outputs has gone through all segments but the last in parts, `ratio` of them a
segment, each from a state of zeros.

- ``own``      ``(batch, parts, heads, size)`` fp32, ``size`` = headdim x dstate, a multiple of 4:
  what each part made of nothing;
- ``totals``   ``(batch, parts, heads)`` fp32: the factor from the state before a part to after it,
  negative where nothing is left of it;
- ``initial``  ``(batch, heads, size)`` of dtype ``initial_kind``, or null for zeros; strides of
  batch and heads count elements, and rows start aligned to 16 bytes;
- ``states``   ``(batch, parts / ratio + 1, heads, size)`` fp32: the state before each segment.

Grid ``(ceildiv(size, 4 * threads), heads, batch)``, four elements a thread.
"""

# The DSL ships no types, and its `.pth` file hides it from type checkers.
# pyright: reportMissingImports=false

import cutlass
from cutlass import Float32, Int32, Int64, cute

from ..scalars import bits, choose, load_pair, load_scalar, load_words, store_words


@cute.kernel
def ssd_pass(
    own: cute.Pointer,
    totals: cute.Pointer,
    initial: cute.Pointer,
    states: cute.Pointer,
    batch: Int32,
    parts: Int32,
    ratio: Int32,
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
    row = Int64(this_batch) * parts * heads + head
    segment = Int64(this_batch) * (parts // ratio + 1) * heads + head
    left = Int32(0)
    for _ in cutlass.range(0, parts, 1, unroll=2):
        found = load_words(own.toint() + (row * size + element) * 4, inside)
        factor = load_scalar(totals.toint(), row, Int32(0), True)
        store_words(
            states.toint() + (segment * size + element) * 4,
            [bits(state[i]) for i in range(4)],
            inside & (left == 0),
        )
        if left == 0:
            segment = segment + heads
            left = ratio
        left = left - 1
        for i in cutlass.range_constexpr(4):
            # Not by a factor of 0: neither infinities nor NaN may cross.
            kept = choose(factor < 0.0, Float32(0.0), state[i] * factor)
            state[i] = kept + found[i].bitcast(Float32)
        row = row + heads
    store_words(
        states.toint() + (segment * size + element) * 4,
        [bits(state[i]) for i in range(4)],
        inside,
    )
