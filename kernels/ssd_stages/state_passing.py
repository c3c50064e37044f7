"""States before each chunk, from what each chunk adds: the one stage that goes through time.

    before[k + 1] = exp(decay[k]) before[k] + states[k]

- ``states``   ``(batch, chunks, heads, dim)`` fp32, of which ``dim`` is contiguous, a multiple of
  4, and aligned to 16 bytes;
- ``decay``    ``(batch, heads, chunks)`` fp32, any strides: the sums at the ends of the chunks;
- ``initial``  ``(batch, heads, dim)`` of dtype ``initial_kind``, or null for zeros; ``dim`` is
  contiguous, and pairs of its elements are aligned;
- ``seq_idx``  ``(batch, seqlen)`` i32, or null. Where a chunk does not end in the sequence that the
  one before it ended in, nothing of the state is left; before the first the index counts as 0;
- ``out``      ``(batch, chunks, heads, dim)`` of dtype ``out_kind``, contiguous: before[k];
- ``final``    ``(batch, heads, dim)`` fp32, contiguous: the state after the last chunk.

A thread owns four numbers of the state. It has the next eight chunks' under way, as nothing but
time to wait for memory would decide its speed otherwise.
"""

# The DSL ships no types, and its `.pth` file hides it from type checkers.
# pyright: reportMissingImports=false

import cutlass
from cutlass import BFloat16, Float16, Float32, Int32, Int64, cute

from ..scalars import BFLOAT, load_number, load_pair, load_words, read_floats, store_words
from ..tensor_core import exp2, pack
from .tiles import LOG2_E, THREADS, bits, ceildiv, choose, smaller, split

AHEAD = 8
"""Chunks under way."""


@cute.kernel
def ssd_state_passing(
    states: cute.Pointer,
    decay: cute.Pointer,
    initial: cute.Pointer,
    seq_idx: cute.Pointer,
    out: cute.Pointer,
    final: cute.Pointer,
    batch: Int32,
    seqlen: Int32,
    chunks: Int32,
    chunk_size: Int32,
    heads: Int32,
    dim: Int32,
    initial_kind: Int32,
    out_kind: Int32,
    states_batch: Int64,
    states_chunk: Int64,
    states_head: Int64,
    decay_batch: Int64,
    decay_head: Int64,
    decay_chunk: Int64,
    initial_batch: Int64,
    initial_head: Int64,
    seq_batch: Int64,
    seq_token: Int64,
):
    """Pass on 512 numbers of a head's state.

    Grid ``(ceildiv(dim, 512) * heads * batch, 1, 1)``, block ``(128, 1, 1)``, no shared memory.
    """
    part, head, this_batch = split(
        Int32(cute.arch.block_idx()[0]), ceildiv(dim, 4 * THREADS), heads
    )
    place = (part * THREADS + Int32(cute.arch.thread_idx()[0])) * 4
    inside = place < dim
    states_from = states.toint() + 4 * (
        Int64(this_batch) * states_batch + Int64(head) * states_head + Int64(place)
    )
    decay_from = decay.toint() + 4 * (Int64(this_batch) * decay_batch + Int64(head) * decay_head)
    seq_from = seq_idx.toint() + 4 * (Int64(this_batch) * seq_batch)
    has_seq = seq_idx.toint() != 0

    state = cute.make_rmem_tensor((4,), Float32)
    given = inside & (initial.toint() != 0)
    for pair in cutlass.range_constexpr(2):
        index = (
            Int64(this_batch) * initial_batch + Int64(head) * initial_head + Int64(place + 2 * pair)
        )
        state[2 * pair], state[2 * pair + 1] = load_pair(
            initial.toint(), index, initial_kind, given
        )
    added = cute.make_rmem_tensor((4, AHEAD), Float32)
    decays = cute.make_rmem_tensor((AHEAD,), Float32)
    sequences = cute.make_rmem_tensor((AHEAD,), Int32)
    for slot in cutlass.range_constexpr(AHEAD):
        refill(
            (added, decays, sequences),
            slot,
            Int32(slot),
            chunks,
            (states_from, states_chunk, inside),
            (decay_from, decay_chunk),
            (seq_from, seq_token, has_seq, chunk_size, seqlen),
        )
    sequence = Int32(0)
    for first in cutlass.range(0, chunks, AHEAD, unroll=1):
        for slot in cutlass.range_constexpr(AHEAD):
            chunk = first + slot
            there = chunk < chunks
            row = (Int64(this_batch) * chunks + Int64(chunk)) * heads + head
            store_state(out, row * dim + Int64(place), state, out_kind, inside & there)
            goes_on = (sequences[slot] == sequence) | (has_seq == 0)
            advance(state, added, decays, slot, goes_on, there)
            sequence = choose(there, sequences[slot], sequence)
            refill(
                (added, decays, sequences),
                slot,
                chunk + AHEAD,
                chunks,
                (states_from, states_chunk, inside),
                (decay_from, decay_chunk),
                (seq_from, seq_token, has_seq, chunk_size, seqlen),
            )
    index = (Int64(this_batch) * heads + head) * dim + Int64(place)
    store_state(final, index, state, Int32(0), inside)


def refill(slots, slot, chunk, chunks, states, decay, sequence):
    """Load what a chunk adds, its decay, and the sequence that it ends in."""
    added, decays, sequences = slots
    states_from, states_chunk, inside = states
    decay_from, decay_chunk = decay
    seq_from, seq_token, has_seq, chunk_size, seqlen = sequence
    there = chunk < chunks
    words = load_words(states_from + Int64(chunk) * (4 * states_chunk), inside & there)
    for i, word in enumerate(words):
        added[i, slot] = word.bitcast(Float32)
    decays[slot] = read_floats(decay_from + Int64(chunk) * (4 * decay_chunk), there)[0]
    end = smaller(Int64(chunk + 1) * chunk_size, Int64(seqlen))
    sequences[slot] = load_number(seq_from + (end - 1) * (4 * seq_token), there & has_seq, Int32(0))


def advance(state, added, decays, slot, goes_on, there):
    """Go on to the next chunk, where there is one."""
    factor = exp2(decays[slot] * LOG2_E)
    for i in range(4):
        # Not by a factor of 0: neither infinities nor NaN may cross.
        left = choose(goes_on, factor * state[i], Float32(0.0))
        state[i] = choose(there, left + added[i, slot], state[i])


def store_state(tensor, index, state, kind, wanted):
    """Store four numbers from element ``index`` on."""
    values = [state[i] for i in range(4)]
    address = tensor.toint()
    store_words(address + index * 4, [bits(v) for v in values], wanted & (kind == 0))
    words = [
        choose(
            kind == BFLOAT,
            pack(values[i], values[i + 1], BFloat16),
            pack(values[i], values[i + 1], Float16),
        )
        for i in (0, 2)
    ]
    store_words(address + index * 2, words, wanted & (kind != 0))
