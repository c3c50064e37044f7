"""What the warps do that own the state in the one-pass scan: tiles in, the state on, states out."""

# The DSL ships no types, and its `.pth` file hides it from type checkers.
# pyright: reportMissingImports=false

from cutlass import Float32, Int32, Int64, Uint32

from ..scalars import bits, choose, load_number, load_pair, prefetch, store_words
from ..tensor_core import (
    copy_async,
    exp2,
    finite_only,
    load_floats,
    load_matrices,
    load_shared,
    mma,
    pack,
    store_shared,
    unpack,
)
from .shape import WARP, slot

THREADS = 128
"""Those that copy."""
NEVER = 2**31 - 1
"""Where a sequence ends that does not exist."""


def row_source(tensor, strides, batch, head, thread, chunks):
    """Where this thread's first 16 bytes of a tile's rows start, for tokens from 0 on."""
    of_batch, of_token, of_head = strides
    index = Int64(batch) * of_batch + Int64(head) * of_head + Int64(thread // chunks) * of_token
    return tensor + 2 * index + Int64(thread % chunks * 16)


def copy_inputs(shape, shared, thread, stage, b_stage, token, left, x, b):
    """Start copying x and B of the tile from `token` on; rows past the `left` ones become zero.

    `left` is None if the tile is whole. `x` and `b`: `row_source` and the stride of tokens.
    """
    copy_rows(
        x,
        shared + Uint32(stage * shape.x_stage),
        thread,
        token,
        left,
        shape.tile,
        shape.width // 8,
        shape.width // 8,
        shape.x_row,
    )
    copy_rows(
        b,
        shared + Uint32(shape.b_start + b_stage * shape.b_stage),
        thread,
        token,
        left,
        shape.tile,
        shape.columns // 8,
        shape.dstate // 8,
        shape.b_row,
    )


def copy_prepared(shape, shared, thread, stage, token, decay_from, starts):
    """Start copying what `prepare` has made of the tile from `token` on.

    `starts`: where they are, and whether there are any, or None.
    """
    copy_async(
        shared + Uint32(shape.decay_start + stage * shape.decay_stage + thread * 16),
        decay_from + (Int64(token) * 12 + Int64(thread) * 16),
        Int32(16),
        thread < shape.decay_stage // 16,
    )
    starts_from, has_starts = starts
    if has_starts is not None:
        mark = thread - 64
        copy_async(
            shared + Uint32(shape.starts_start + stage * (4 * shape.tile) + mark * 16),
            starts_from + (Int64(token) * 4 + Int64(mark) * 16),
            Int32(16),
            (mark >= 0) & (mark < shape.tile // 4) & has_starts,
        )


def prefetch_rows(shape, thread, token, seqlen, rows, width, wanted):
    """Ask the L2 for a tile of `rows`, their address and stride, of so many 16-bit elements."""
    source, stride = rows
    lines = -(-width // 64)
    for turn in range(-(-shape.tile * lines // THREADS)):
        line = thread + turn * THREADS
        row = token + line // lines
        prefetch(
            source + Int64(row) * (stride * 2) + Int64(line % lines * 128),
            (row < seqlen) & (line < shape.tile * lines) & wanted,
        )


def copy_rows(source, stage, thread, token, left, rows, chunks, filled, row_bytes):
    """Start copying `rows` rows of `chunks` runs of 16 bytes, of which `filled` are no padding."""
    start, stride = source
    start = start + Int64(token) * (stride * 2)
    if THREADS % chunks == 0:
        # A thread keeps its place in the rows, so there is little to compute.
        each = THREADS // chunks
        row, column = thread // chunks, thread % chunks
        place = stage + Uint32(row * row_bytes + column * 16)
        for turn in range(-(-rows // each)):
            size = filled_size(row + turn * each, column, left, filled, chunks)
            wanted = True if (turn + 1) * each <= rows else row + turn * each < rows
            copy_async(place, start, size, wanted, turn * each * row_bytes)
            start = start + stride * (2 * each)
        return
    first_row = thread // chunks
    start = start - Int64(first_row) * (stride * 2) - Int64(thread % chunks * 16)
    for turn in range(-(-rows * chunks // THREADS)):
        chunk = thread + turn * THREADS
        row, column = chunk // chunks, chunk % chunks
        copy_async(
            stage + Uint32(row * row_bytes + column * 16),
            start + Int64(row) * (stride * 2) + Int64(column * 16),
            filled_size(row, column, left, filled, chunks),
            True if (turn + 1) * THREADS <= rows * chunks else chunk < rows * chunks,
        )


def filled_size(row, column, left, filled, chunks):
    """How many of 16 bytes are copied, and not zero."""
    if left is None and filled == chunks:
        return Int32(16)
    inside = column < filled
    if left is not None:
        inside = (row < left) & inside if filled < chunks else row < left
    return choose(inside, Int32(16), Int32(0))


def load_state(s, base, entry, kind, column, dstate):
    """Load this lane's part of a state; rows are 8 apart and tiles of columns 8 wide."""
    _, n_tiles, m_tiles = s.shape
    for m in range(m_tiles):
        for n in range(n_tiles):
            for half in (0, 1):
                index = entry + ((16 * m + 8 * half) * dstate + 8 * n)
                pair = load_pair(base, index, kind, column + 8 * n < dstate)
                for i in (0, 1):
                    s[2 * half + i, n, m] = pair[i]


def store_state(s, address, column, dstate):
    """Store this lane's part of a state in fp32."""
    _, n_tiles, m_tiles = s.shape
    for m in range(m_tiles):
        for n in range(n_tiles):
            for half in (0, 1):
                store_words(
                    address,
                    [bits(s[2 * half, n, m]), bits(s[2 * half + 1, n, m])],
                    column + 8 * n < dstate,
                    4 * ((16 * m + 8 * half) * dstate + 8 * n),
                )


def publish(s, stage, owner, group, t, shape, element):
    """Leave the state in shared memory in 16 bits, as first operands of the output's warps.

    Of a run of 32 of dstate lane (group, r) there has the eight from 8r on, as those warps have of
    C: four for one instruction and four for the next, `pair`.
    """
    _, n_tiles, m_tiles = s.shape
    pair = t // 2
    for n in range(n_tiles):
        index = owner * n_tiles + n
        place = slot(group, index % 4 ^ 2 * pair) * 16 + t % 2 * 8
        address = stage + Uint32((index // 4 * 2 + pair) * (m_tiles * 16 * WARP) + place)
        for m in range(m_tiles):
            words = [pack(s[2 * row, n, m], s[2 * row + 1, n, m], element) for row in (0, 1)]
            store_shared(address, words, m * (16 * WARP))


def scale(s, factor):
    """Multiply the state."""
    _, n_tiles, m_tiles = s.shape
    for m in range(m_tiles):
        for n in range(n_tiles):
            for i in range(4):
                s[i, n, m] = s[i, n, m] * factor


def sequence_end(cu_seqlens, sequence, sequences):
    """Where a sequence ends; never, if it is past the last one."""
    return load_number(
        cu_seqlens.toint() + Int64(sequence + 1) * 4, sequence < sequences, Int32(NEVER)
    )


def take_part(target, s, first, m, kept, factor):
    """Start 16 channels of another state from this one, times `factor`, or from zeros.

    Columns from tile `first` on, as many as `target` has.
    """
    for n in range(target.shape[1]):
        for i in range(4):
            target[i, n, 0] = choose(kept, s[i, first + n, m] * factor, Float32(0.0))


def store_part(s, address, column, dstate, element):
    """Store this lane's part of 16 channels of a state in 16 bits."""
    for n in range(s.shape[1]):
        for half in (0, 1):
            word = pack(s[2 * half, n, 0], s[2 * half + 1, n, 0], element)
            store_words(address, [word], column + 8 * n < dstate, 2 * (8 * half * dstate + 8 * n))


def weights_to_end(left_at_end, offset):
    """What is left at the tile's end of the steps of tokens 2t, 2t + 1, 2t + 8 and 2t + 9."""
    found = load_floats(left_at_end, offset, count=2)
    return found + load_floats(left_at_end, offset + 32, count=2)


def last_start(shape, shared, stage):
    """Where in its tile the sequence of its last token starts; -1 if before it."""
    starts_stage = shared + Uint32(shape.starts_start + stage * (4 * shape.tile))
    return Int32(load_shared(starts_stage, 4 * shape.tile - 4, count=1)[0])


def counted(start, last):
    """Masks of the tokens 2t and 2t + 1, and 8 further on, from `start` to `last`.

    Both are relative to this lane's first. They clear operands: a factor of 0 would let a NaN pass.
    """
    kept = [
        choose((column >= start) & (column <= last), Uint32(half), Uint32(0))
        for column, half in zip((0, 1, 8, 9), (0xFFFF, 0xFFFF0000) * 2, strict=True)
    ]
    return kept[0] | kept[1], kept[2] | kept[3]


def weights_until(pairs, a_end):
    """As `weights_to_end`, at another token, whose decay is `a_end`."""
    values = load_floats(pairs, 0, count=4) + load_floats(pairs, 64, count=4)
    return [exp2(a_end - values[2 * i]) * values[2 * i + 1] for i in range(4)]


def update(s, x_rows, b_rows, factors, masks, element, rounded=pack):
    """Add 16 tokens to the state: x times B, weighted; `masks` of `counted`, or None for all.

    Of the weighted B what `rounded` gives: itself, or what rounding it has left.
    """
    n_tiles = s.shape[1]
    # With masks a few columns at a time, as there are no registers for more.
    some = n_tiles if masks is None else 2
    for n in range(0, n_tiles, some):
        columns = range(n, min(n + some, n_tiles))
        update_columns(s, columns, x_rows, b_rows, factors, masks, element, rounded)


def rounded_away(low, high, element):
    """What `pack` leaves of two fp32 numbers, rounded in turn; nothing of infinities."""
    rests = []
    for number, kept in zip((low, high), unpack(pack(low, high, element), element), strict=True):
        finite = (bits(kept) & Uint32(0x7F800000)) != Uint32(0x7F800000)
        rests.append(choose(finite, number - kept, Float32(0.0)))
    return pack(rests[0], rests[1], element)


def update_columns(s, columns, x_rows, b_rows, factors, masks, element, rounded):
    """As `update`, of some tiles of columns."""
    operands = {}
    n_tiles = columns.stop
    for first in range(columns.start, n_tiles, 2):
        count = 4 if first + 1 < n_tiles else 2
        words = load_matrices(b_rows, 16 * first, transposed=True, count=count)
        for tile in range(first, min(first + 2, n_tiles)):
            scaled = []
            for half in (0, 1):
                low, high = unpack(words[2 * (tile - first) + half], element)
                word = rounded(low * factors[2 * half], high * factors[2 * half + 1], element)
                scaled.append(word if masks is None else word & masks[half])
            operands[tile] = scaled
    for m in range(s.shape[2]):
        a = load_matrices(x_rows, 32 * m, transposed=True)
        if masks is not None:
            a = [word & masks[i // 2] for i, word in enumerate(a)]
        if rounded is rounded_away:
            # Infinite ones have made the state infinite already, and would now make it NaN.
            a = [finite_only(word, element) for word in a]
        for n in columns:
            total = mma(a, operands[n], [s[i, n, m] for i in range(4)], element)
            for i in range(4):
                s[i, n, m] = total[i]
