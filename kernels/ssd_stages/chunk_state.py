"""What each chunk adds to the state: its tokens, as far as they have not decayed at its end.

    states = sum over the chunk's tokens j of exp(decay_last - decay_j) dt_j x_j B_jᵀ

- ``x``        ``(batch, seqlen, heads, headdim)``, 16-bit, rows aligned to 16 bytes;
- ``b``        ``(batch, seqlen, groups, dstate)``, as x;
- ``steps``    ``(batch, heads, chunks, chunk_size)`` fp32, called dt elsewhere; the last dimension
  is contiguous;
- ``decay``    as ``steps``: sums of step sizes times A within the chunk;
- ``seq_idx``  ``(batch, seqlen)`` i32, or null. Only tokens of the chunk's last sequence count, and
  none if its index is negative;
- ``states``   ``(batch, chunks, heads, headdim, dstate)`` fp32, contiguous.

A block makes ``width`` x ``columns`` of a head's state of one chunk, the sums in registers: each of
its four warps all of ``width`` and a quarter of ``columns``. It goes through the chunk in tiles of
64 tokens, of which the next one comes meanwhile. B takes decays and step sizes on its way into the
matrix instruction.
"""

# The DSL ships no types, and its `.pth` file hides it from type checkers.
# pyright: reportMissingImports=false

import cutlass
from cutlass import Float32, Int32, Int64, Uint32, cute

from ..scalars import load_number, read_floats, store_words
from ..tensor_core import (
    commit_copies,
    copy_number_async,
    exp2,
    load_floats,
    load_matrices,
    load_shared,
    mma,
    pack,
    unpack,
    wait_copies,
)
from .tiles import (
    LOG2_E,
    TILE,
    WARP,
    WARPS,
    bits,
    ceildiv,
    choose,
    copy_numbers,
    copy_rows,
    smaller,
    split,
)

NUMBERS = 3 * 4 * TILE
"""Bytes of a tile's decays, step sizes and sequences."""


@cute.kernel
def ssd_chunk_state(
    x: cute.Pointer,
    b: cute.Pointer,
    steps: cute.Pointer,
    decay: cute.Pointer,
    seq_idx: cute.Pointer,
    states: cute.Pointer,
    batch: Int32,
    seqlen: Int32,
    chunks: Int32,
    chunk_size: Int32,
    heads: Int32,
    group_heads: Int32,
    x_batch: Int64,
    x_token: Int64,
    x_head: Int64,
    b_batch: Int64,
    b_token: Int64,
    b_group: Int64,
    steps_batch: Int64,
    steps_head: Int64,
    steps_chunk: Int64,
    decay_batch: Int64,
    decay_head: Int64,
    decay_chunk: Int64,
    seq_batch: Int64,
    seq_token: Int64,
    *,
    headdim: cutlass.Constexpr,
    dstate: cutlass.Constexpr,
    width: cutlass.Constexpr,
    columns: cutlass.Constexpr,
):
    """Make one block of one chunk's state.

    Grid ``(headdim / width * ceildiv(dstate, columns) * heads * chunks * batch, 1, 1)``, block
    ``(128, 1, 1)``, and ``256 * (width + columns + 16) + 1536`` bytes of dynamic shared memory.
    """
    element = x.dtype
    x_row, b_row = 2 * width + 16, 2 * columns + 16
    b_start = TILE * x_row
    numbers_start = b_start + TILE * b_row
    stage_bytes = numbers_start + NUMBERS
    thread = Int32(cute.arch.thread_idx()[0])
    lane = thread % WARP
    warp = cute.arch.make_warp_uniform(thread // WARP)
    group, t = lane // 4, lane % 4
    x_slice, b_slice, head, chunk, this_batch = split(
        Int32(cute.arch.block_idx()[0]),
        headdim // width,
        max(dstate // columns, 1),
        heads,
        chunks,
    )
    channel, column = x_slice * width, b_slice * columns
    first = chunk * chunk_size
    count = smaller(seqlen - first, chunk_size)
    tiles = ceildiv(count, TILE)

    shared = Uint32(cute.arch.get_dyn_smem(Float32).toint())
    x_from = x.toint() + 2 * (
        Int64(this_batch) * x_batch + Int64(first) * x_token + Int64(head) * x_head + Int64(channel)
    )
    b_from = b.toint() + 2 * (
        Int64(this_batch) * b_batch
        + Int64(first) * b_token
        + Int64(head // group_heads) * b_group
        + Int64(column)
    )
    decay_from = decay.toint() + 4 * (
        Int64(this_batch) * decay_batch + Int64(head) * decay_head + Int64(chunk) * decay_chunk
    )
    steps_from = steps.toint() + 4 * (
        Int64(this_batch) * steps_batch + Int64(head) * steps_head + Int64(chunk) * steps_chunk
    )
    seq_from = seq_idx.toint() + 4 * (Int64(this_batch) * seq_batch + Int64(first) * seq_token)
    has_seq = seq_idx.toint() != 0

    copy_tile(
        shared,
        Int32(0),
        count,
        thread,
        has_seq,
        (x_from, x_token, x_row, width),
        (b_from, b_token, b_row, columns, dstate),
        (decay_from, steps_from, seq_from, seq_token),
    )
    commit_copies()
    last = read_floats(decay_from + Int64(count - 1) * 4, True)[0]
    last_sequence = load_number(seq_from + Int64(count - 1) * (4 * seq_token), has_seq, Int32(0))
    sums = cute.make_rmem_tensor((4, columns // (8 * WARPS), width // 16), Float32)
    sums.fill(0.0)
    x_lane = Uint32((lane // 16 * 8 + lane % 8) * x_row + lane // 8 % 2 * 16)
    b_lane = Uint32(b_start + lane % 16 * b_row + lane // 16 * 16 + warp * (2 * columns // WARPS))
    for tile in cutlass.range(0, tiles, 1, unroll=1):
        wait_copies(0)
        cute.arch.sync_threads()
        if tile + 1 < tiles:
            copy_tile(
                shared,
                tile + 1,
                count,
                thread,
                has_seq,
                (x_from, x_token, x_row, width),
                (b_from, b_token, b_row, columns, dstate),
                (decay_from, steps_from, seq_from, seq_token),
            )
        commit_copies()
        stage = shared + Uint32(tile % 2 * stage_bytes)
        for block in cutlass.range_constexpr(TILE // 16):
            numbers = stage + Uint32(numbers_start) + Uint32((block * 16 + 2 * t) * 4)
            factors = cute.make_rmem_tensor((4,), Float32)
            weigh(factors, numbers, last)
            if has_seq:
                keep(factors, numbers, last_sequence)
            multiply(
                sums,
                stage + x_lane + Uint32(block * 16 * x_row),
                stage + b_lane + Uint32(block * 16 * b_row),
                [factors[i] for i in range(4)],
                element,
            )
    entry = (
        ((Int64(this_batch) * chunks + chunk) * heads + head) * (headdim * dstate)
        + Int64((channel + group) * dstate)
        + Int64(column + warp * (columns // WARPS) + 2 * t)
    )
    within = dstate - column - warp * (columns // WARPS) - 2 * t
    store(sums, states.toint() + entry * 4, within, dstate)


def copy_tile(shared, tile, count, thread, has_seq, x, b, numbers):
    """Start copying a tile; what lies past the end of the chunk becomes zero."""
    x_from, x_token, x_row, width = x
    b_from, b_token, b_row, columns, dstate = b
    decay_from, steps_from, seq_from, seq_token = numbers
    token = tile * TILE
    left = count - token
    b_start = TILE * x_row
    numbers_start = b_start + TILE * b_row
    stage = shared + Uint32(tile % 2 * (numbers_start + NUMBERS))
    copy_rows(
        stage,
        x_row,
        x_from + Int64(token) * (2 * x_token),
        x_token,
        left,
        thread,
        size=width,
        columns=width,
    )
    copy_rows(
        stage + Uint32(b_start),
        b_row,
        b_from + Int64(token) * (2 * b_token),
        b_token,
        left,
        thread,
        size=min(dstate, columns),
        columns=columns,
    )
    four = Int64(4)
    at = stage + Uint32(numbers_start)
    copy_numbers(
        at,
        (decay_from + Int64(token) * 4, four),
        (steps_from + Int64(token) * 4, four),
        left,
        thread,
    )
    copy_number_async(
        at + Uint32(8 * TILE + thread * 4),
        seq_from + Int64(token + thread) * (4 * seq_token),
        thread < left,
        has_seq & (thread < TILE),
    )


def weigh(factors, numbers, last):
    """What is left at the chunk's end of tokens 2t, 2t + 1, 2t + 8 and 2t + 9."""
    for half in (0, 1):
        decays = load_floats(numbers, 32 * half)
        sizes = load_floats(numbers, 4 * TILE + 32 * half)
        for i in (0, 1):
            factors[2 * half + i] = exp2((last - decays[i]) * LOG2_E) * sizes[i]


def keep(factors, numbers, last_sequence):
    """Leave out the tokens of other sequences than the last one."""
    for half in (0, 1):
        for i, word in enumerate(load_shared(numbers, 8 * TILE + 32 * half, count=2)):
            kept = (Int32(word) == last_sequence) & (last_sequence >= 0)
            place = 2 * half + i
            factors[place] = choose(kept, factors[place], Float32(0.0))


def multiply(sums, x_rows, b_rows, factors, element):
    """Add 16 tokens: x transposed times B with its factors."""
    _, n_tiles, m_tiles = sums.shape
    operands = []
    for first in range(0, n_tiles, 2):
        count = 4 if first + 1 < n_tiles else 2
        words = load_matrices(b_rows, 16 * first, transposed=True, count=count)
        for half in range(0, count, 2):
            scaled = []
            for i in (0, 1):
                low, high = unpack(words[half + i], element)
                scaled.append(pack(low * factors[2 * i], high * factors[2 * i + 1], element))
            operands.append(scaled)
    for m in range(m_tiles):
        a = load_matrices(x_rows, 32 * m, transposed=True)
        for n in range(n_tiles):
            total = mma(a, operands[n], [sums[i, n, m] for i in range(4)], element)
            for i in range(4):
                sums[i, n, m] = total[i]


def store(sums, address, within, dstate):
    """Store this lane's sums, ``within`` columns of dstate at most."""
    _, n_tiles, m_tiles = sums.shape
    for m in range(m_tiles):
        for n in range(n_tiles):
            for half in (0, 1):
                store_words(
                    address,
                    [bits(sums[2 * half, n, m]), bits(sums[2 * half + 1, n, m])],
                    within > 8 * n,
                    4 * ((16 * m + 8 * half) * dstate + 8 * n),
                )
