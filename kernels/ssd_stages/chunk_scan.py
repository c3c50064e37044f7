"""The output, from the state before each chunk and from the chunk's own tokens.

For the tokens i and j of a chunk, with S the state before it:

    out_i = exp(decay_i) S C_i + sum over j <= i of cb_ij exp(decay_i - decay_j) dt_j x_j + D x_i
    out_i = out_i silu(z_i)

The last dimension is contiguous, and rows of x, z, c and states are aligned to 16 bytes:

- ``cb``             ``(batch, chunks, groups, chunk_size, chunk_size)`` fp32, rows aligned to 8
  bytes and padded to an even number: products of C and B, zero for two sequences; what is above the
  diagonal may be anything;
- ``x``, ``z``       ``(batch, seqlen, heads, headdim)``, 16-bit; ``z`` may be null;
- ``steps``          ``(batch, heads, chunks, chunk_size)`` fp32, called dt elsewhere;
- ``decay``          as ``steps``: sums of step sizes times A within the chunk;
- ``c``              ``(batch, seqlen, groups, dstate)``, 16-bit;
- ``states``         ``(batch, chunks, heads, headdim, dstate)``, of which a head's are contiguous;
  fp32 with a ``states_kind`` of 0, else of the dtype of x;
- ``d``              ``(heads,)`` or ``(heads, headdim)`` of dtype ``d_kind``, any strides; or null;
- ``seq_idx``        ``(batch, seqlen)`` i32, or null: the state counts only for tokens of the
  sequence that the chunk before ended in, which before the first chunk is that of index 0;
- ``out``            as x, contiguous.

A block takes ``width`` channels of a head, and ``block_tiles`` tiles of 64 tokens of a chunk; a
warp takes 16 tokens of a tile. The state lies in shared memory in the order in which lanes take it
as second operand. Per tile: C times the state, then 16 by 16 up to the diagonal cb, with decays,
step sizes and mask, times x. x comes a tile ahead, and cb, straight to the registers that need it,
16 columns ahead.
"""

# The DSL ships no types, and its `.pth` file hides it from type checkers.
# pyright: reportMissingImports=false

import cutlass
from cutlass import Float32, Int32, Int64, Uint32, cute

from ..scalars import (
    load_number,
    load_scalar,
    load_two,
    load_words,
    read_floats,
    store_words,
)
from ..tensor_core import (
    commit_copies,
    copy_async,
    exp2,
    load_floats,
    load_matrices,
    load_shared,
    mma,
    pack,
    reciprocal,
    store_shared,
    thread_index,
    unpack,
    wait_copies,
)
from .tiles import (
    LOG2_E,
    THREADS,
    TILE,
    WARP,
    bits,
    ceildiv,
    choose,
    copy_numbers,
    copy_rows,
    smaller,
    split,
)

C_AHEAD = 2
"""Runs of 32 of dstate that are under way."""
NUMBERS = 2 * 4 * TILE
"""Bytes of a tile's decays and step sizes."""


@cute.kernel
def ssd_chunk_scan(
    cb: cute.Pointer,
    x: cute.Pointer,
    steps: cute.Pointer,
    decay: cute.Pointer,
    c: cute.Pointer,
    states: cute.Pointer,
    d: cute.Pointer,
    z: cute.Pointer,
    seq_idx: cute.Pointer,
    out: cute.Pointer,
    batch: Int32,
    seqlen: Int32,
    chunks: Int32,
    chunk_size: Int32,
    block_tiles: Int32,
    heads: Int32,
    group_heads: Int32,
    states_kind: Int32,
    d_kind: Int32,
    cb_batch: Int64,
    cb_chunk: Int64,
    cb_group: Int64,
    cb_row: Int64,
    x_batch: Int64,
    x_token: Int64,
    x_head: Int64,
    steps_batch: Int64,
    steps_head: Int64,
    steps_chunk: Int64,
    decay_batch: Int64,
    decay_head: Int64,
    decay_chunk: Int64,
    c_batch: Int64,
    c_token: Int64,
    c_group: Int64,
    states_batch: Int64,
    states_chunk: Int64,
    states_head: Int64,
    d_head: Int64,
    d_channel: Int64,
    z_batch: Int64,
    z_token: Int64,
    z_head: Int64,
    seq_batch: Int64,
    seq_token: Int64,
    *,
    headdim: cutlass.Constexpr,
    dstate: cutlass.Constexpr,
    width: cutlass.Constexpr,
):
    """Scan some tiles of one chunk.

    Grid ``(headdim / width * heads * ceildiv(chunk_size, 64 * block_tiles) * chunks * batch, 1,
    1)``, block ``(128, 1, 1)``, and ``2 * width * max(dstate, 32) + 256 * (width + 8) + 1024 +
    4 * width`` bytes of dynamic shared memory.
    """
    element = x.dtype
    columns = max(dstate, 32)
    x_row = 2 * width + 16
    x_start = 2 * width * columns
    stage_bytes = TILE * x_row + NUMBERS
    d_start = x_start + 2 * stage_bytes
    thread = Int32(cute.arch.thread_idx()[0])
    lane = thread % WARP
    warp = cute.arch.make_warp_uniform(thread // WARP)
    x_slice, head, part, chunk, this_batch = split(
        Int32(cute.arch.block_idx()[0]),
        headdim // width,
        heads,
        ceildiv(chunk_size, TILE * block_tiles),
        chunks,
    )
    channel, group_of_head = x_slice * width, head // group_heads
    first = chunk * chunk_size
    count = smaller(seqlen - first, chunk_size)
    first_tile = part * block_tiles
    end_tile = smaller(first_tile + block_tiles, ceildiv(count, TILE))

    shared = Uint32(cute.arch.get_dyn_smem(Float32).toint())
    x_from = x.toint() + 2 * (
        Int64(this_batch) * x_batch + Int64(first) * x_token + Int64(head) * x_head + Int64(channel)
    )
    decay_from = decay.toint() + 4 * (
        Int64(this_batch) * decay_batch + Int64(head) * decay_head + Int64(chunk) * decay_chunk
    )
    steps_from = steps.toint() + 4 * (
        Int64(this_batch) * steps_batch + Int64(head) * steps_head + Int64(chunk) * steps_chunk
    )
    cb_from = cb.toint() + 4 * (
        Int64(this_batch) * cb_batch + Int64(chunk) * cb_chunk + Int64(group_of_head) * cb_group
    )
    c_from = c.toint() + 2 * (
        Int64(this_batch) * c_batch + Int64(first) * c_token + Int64(group_of_head) * c_group
    )
    z_from = z.toint() + 2 * (
        Int64(this_batch) * z_batch + Int64(first) * z_token + Int64(head) * z_head + Int64(channel)
    )
    out_token = Int64(heads) * headdim
    out_from = out.toint() + 2 * (
        (Int64(this_batch) * seqlen + Int64(first)) * out_token + Int64(head * headdim + channel)
    )
    seq_from = seq_idx.toint() + 4 * (Int64(this_batch) * seq_batch + Int64(first) * seq_token)
    has_seq = seq_idx.toint() != 0
    before = load_number(seq_from - 4 * seq_token, has_seq & (chunk > 0), Int32(0))

    if first_tile < end_tile:
        state_index = (
            Int64(this_batch) * states_batch
            + Int64(chunk) * states_chunk
            + Int64(head) * states_head
            + Int64(channel * dstate)
        )
        if states_kind == 0:
            round_state(shared, states.toint() + state_index * 4, thread, width, dstate, element)
        else:
            copy_state(shared, states.toint() + state_index * 2, thread, width, dstate)
        if (thread < width) & (d.toint() != 0):
            index = Int64(head) * d_head + Int64(channel + thread) * d_channel
            value = load_scalar(d.toint(), index, d_kind, True)
            store_shared(shared + Uint32(d_start + thread * 4), [bits(value)])
    state_lane = shared + Uint32(lane * 16)
    x_lane = Uint32(lane % 16 * x_row + lane // 16 * 16)
    c_words = cute.make_rmem_tensor((4, 2, C_AHEAD), Uint32)
    products = cute.make_rmem_tensor((8,), Float32)
    y = cute.make_rmem_tensor((4, width // 8), Float32)
    turn = Int32(0)
    for tile in cutlass.range(first_tile, end_tile, 1, unroll=1):
        # Read anew, so that no register holds over a tile what follows from it.
        group, t = thread_index() % WARP // 4, thread_index() % 4
        row = tile * TILE + warp * 16 + group
        copy_tile(
            shared + Uint32(x_start),
            turn,
            Int32(0),
            count,
            thread_index(),
            (x_from, x_token, x_row, width),
            (decay_from, steps_from),
        )
        commit_copies()
        c_address = c_from + Int64(row) * (2 * c_token)
        c_rows = (c_address + Int64(16 * t), c_token)
        for run in cutlass.range_constexpr(min(C_AHEAD, columns // 32)):
            load_c(c_words, run, c_rows, count - row, t, dstate)
        products_from = cb_from + Int64(row) * (4 * cb_row)
        products_from = products_from + Int64(8 * t)
        load_products(products, products_from, cb_row, count - row, count - 2 * t)
        row_decays = cute.make_rmem_tensor((2,), Float32)
        counted = cute.make_rmem_tensor((2,), Int32)
        for half in cutlass.range_constexpr(2):
            this = row + 8 * half
            row_decays[half] = read_floats(decay_from + Int64(this) * 4, this < count)[0]
            mine = load_number(
                seq_from + Int64(this) * (4 * seq_token), has_seq & (this < count), Int32(0)
            )
            counted[half] = choose((mine == before) | (has_seq == 0), Int32(1), Int32(0))
        wait_copies(0)
        cute.arch.sync_threads()
        y.fill(0.0)
        multiply_state(y, c_words, c_rows, count - row, t, dstate, state_lane, element)
        decay_state(y, row_decays, counted)
        for column_tile in cutlass.range(0, tile + 1, 1, unroll=1):
            if column_tile > 0:
                wait_copies(0)
                cute.arch.sync_threads()
            if column_tile < tile:
                copy_tile(
                    shared + Uint32(x_start),
                    turn + 1,
                    column_tile + 1,
                    count,
                    thread_index(),
                    (x_from, x_token, x_row, width),
                    (decay_from, steps_from),
                )
            commit_copies()
            stage = shared + Uint32(x_start + turn % 2 * stage_bytes)
            blocks = choose(column_tile < tile, Int32(TILE // 16), warp + 1)
            for block in cutlass.range(0, blocks, 1, unroll=1):
                column = column_tile * TILE + block * 16
                a = weigh(
                    [products[i] for i in range(8)],
                    stage + Uint32(TILE * x_row + 8 * t) + Uint32(block * 64),
                    [row_decays[i] for i in range(2)],
                    row - column - 2 * t,
                    element,
                )
                products_from += 64
                more = column + 16 <= tile * TILE + warp * 16
                load_products(
                    products,
                    products_from,
                    cb_row,
                    choose(more, count - row, Int32(0)),
                    count - column - 16 - 2 * t,
                )
                multiply_x(y, a, stage + x_lane + Uint32(block * (16 * x_row)), element)
            turn += 1
        diagonal = shared + Uint32(x_start + (turn - 1) % 2 * stage_bytes)
        if d.toint() != 0:
            add_dx(
                y,
                diagonal + Uint32((warp * 16 + group) * x_row + 4 * t),
                8 * x_row,
                shared + Uint32(d_start + 8 * t),
                element,
            )
        if z.toint() != 0:
            z_address = z_from + Int64(row) * (2 * z_token)
            gate(y, z_address, 16 * z_token, t, count - row, element)
        out_address = out_from + Int64(row) * (2 * out_token)
        write_out(y, out_address, 16 * out_token, t, count - row, element)


def pieces(thread, width, dstate):
    """This thread's pieces of 8 elements of a state: row, place in the row, known, place in shared.

    In shared memory 32 of dstate by 8 channels lie together, 16 bytes for each lane.
    """
    runs = max(dstate, 32) // 32
    total = width * runs * 4
    for turn in range(-(-total // THREADS)):
        piece = thread + turn * THREADS
        lane, rest = piece % WARP, piece // WARP
        row, column = rest // runs * 8 + lane // 4, rest % runs * 32 + lane % 4 * 8
        place = (rest % runs * (width // 8) + rest // runs) * (16 * WARP) + lane * 16
        there = True if total >= (turn + 1) * THREADS else piece < total
        yield row, column, column < dstate, place, there


def copy_state(shared, address, thread, width, dstate):
    """Start copying a state of 16-bit elements."""
    for row, column, known, place, there in pieces(thread, width, dstate):
        copy_async(
            shared + Uint32(place),
            address + Int64(row * dstate + column) * 2,
            choose(known, Int32(16), Int32(0)),
            there,
        )


def round_state(shared, address, thread, width, dstate, element):
    """Round a state of fp32 numbers to 16 bits."""
    for row, column, known, place, there in pieces(thread, width, dstate):
        source = address + Int64(row * dstate + column) * 4
        wanted = known if there is True else known & there
        words = [*load_words(source, wanted), *load_words(source, wanted, 16)]
        values = [word.bitcast(Float32) for word in words]
        rounded = [pack(values[i], values[i + 1], element) for i in range(0, 8, 2)]
        if there is True:
            store_shared(shared + Uint32(place), rounded)
        else:
            store_shared_if(there, shared + Uint32(place), rounded)


def store_shared_if(wanted, address, words):
    """Store 16 bytes to shared memory where ``wanted`` holds."""
    cute.arch.inline_ptx(
        "{ .reg .pred p; setp.ne.s32 p, {$r1}, 0; "
        "@p st.shared.v4.b32 [{$r0}], {{$r2}, {$r3}, {$r4}, {$r5}}; }",
        read_only_args=[address, Int32(wanted), *words],
    )


def copy_tile(shared, turn, tile, count, thread, x, numbers):
    """Start copying a tile of x, its decays and step sizes; past the end of the chunk are zeros."""
    x_from, x_token, x_row, width = x
    decay_from, steps_from = numbers
    token = tile * TILE
    left = count - token
    stage = shared + Uint32(turn % 2 * (TILE * x_row + NUMBERS))
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
    four = Int64(4)
    copy_numbers(
        stage + Uint32(TILE * x_row),
        (decay_from + Int64(token) * 4, four),
        (steps_from + Int64(token) * 4, four),
        left,
        thread,
    )


def load_c(words, run, c, left, t, dstate):
    """Load C of rows ``group`` and ``group + 8``: of a run of 32 of dstate 16 bytes a lane.

    The order of dstate is free, as long as the state has the same: so a lane's 16 bytes serve as
    its pairs in two instructions.
    """
    address, c_token = c
    for half in (0, 1):
        within = left > 8 * half
        if dstate < 32 * (run + 1):
            within = within & (t < (dstate - 32 * run) // 8)
        for i, word in enumerate(load_words(address, within, 64 * run)):
            words[i, half, run % C_AHEAD] = word
        address = address + c_token * 16


def load_products(products, address, cb_row, rows_left, columns_left):
    """Load this lane's eight numbers of 16x16 of cb: rows ``group`` and 8 on, pairs 2t and 8 on."""
    for half in (0, 1):
        for pair in (0, 1):
            values = read_floats(
                address,
                (rows_left > 8 * half) & (columns_left > 8 * pair),
                32 * pair,
                count=2,
            )
            for i in (0, 1):
                products[4 * half + 2 * pair + i] = values[i]
        address = address + cb_row * 32


def multiply_state(y, c_words, c, left, t, dstate, state, element):
    """Add C times the state; the first runs of C are there."""
    _, tiles = y.shape
    runs = max(dstate, 32) // 32
    for run in range(runs):
        for tile in range(tiles):
            words = load_shared(state, (run * tiles + tile) * (16 * WARP))
            for pair in (0, 2):
                a = [c_words[pair + i, half, run % C_AHEAD] for i in (0, 1) for half in (0, 1)]
                total = mma(a, words[pair : pair + 2], [y[i, tile] for i in range(4)], element)
                for i in range(4):
                    y[i, tile] = total[i]
        if run + C_AHEAD < runs:
            load_c(c_words, run + C_AHEAD, c, left, t, dstate)


def decay_state(y, row_decays, counted):
    """Multiply rows by their decays; zero where the state is another sequence's.

    Not by a factor of 0: neither infinities nor NaN may cross.
    """
    for half in (0, 1):
        factor = exp2(row_decays[half] * LOG2_E)
        for tile in range(y.shape[1]):
            for i in (0, 1):
                place = (2 * half + i, tile)
                y[place] = choose(counted[half] != 0, y[place] * factor, Float32(0.0))


def weigh(products, numbers, row_decays, diagonal, element):
    """16x16 of cb with decays and step sizes, masked, as first operand.

    ``diagonal``: how many columns beyond 2t row ``group`` reaches.
    """
    halves = []
    for pair in (0, 1):
        decays = load_floats(numbers, 32 * pair)
        sizes = load_floats(numbers, 4 * TILE + 32 * pair)
        for half in (0, 1):
            values = []
            for i in (0, 1):
                left = exp2((row_decays[half] - decays[i]) * LOG2_E)
                value = products[4 * half + 2 * pair + i] * (left * sizes[i])
                kept = 8 * pair + i <= diagonal + 8 * half
                values.append(choose(kept, value, Float32(0.0)))
            halves.append(pack(values[0], values[1], element))
    return halves


def multiply_x(y, a, x_rows, element):
    """Add ``a`` times 16 rows of x."""
    _, tiles = y.shape
    for first in range(0, tiles, 2):
        words = load_matrices(x_rows, 16 * first, transposed=True)
        for tile in (first, first + 1):
            pair = words[2 * (tile - first) : 2 * (tile - first) + 2]
            total = mma(a, pair, [y[i, tile] for i in range(4)], element)
            for i in range(4):
                y[i, tile] = total[i]


def add_dx(y, x_rows, eight_rows, factors, element):
    """Add D x, in fp32."""
    for tile in range(y.shape[1]):
        pair = load_floats(factors, 32 * tile)
        for half in (0, 1):
            (word,) = load_shared(x_rows, 16 * tile + half * eight_rows, count=1)
            for i, value in enumerate(unpack(word, element)):
                place = (2 * half + i, tile)
                y[place] = y[place] + pair[i] * value


def gate(y, address, eight_rows, t, left, element):
    """Multiply by silu(z), read as `write_out` writes."""
    address = address + Int64(t // 2 * 8 + t % 2 * 16)
    for half in (0, 1):
        for first in range(0, y.shape[1], 2):
            words = trade(*load_two(address, left > 8 * half, 16 * first), t)
            for tile, word in enumerate(words, first):
                for i, value in enumerate(unpack(word, element)):
                    place = (2 * half + i, tile)
                    y[place] = y[place] * value * reciprocal(1.0 + exp2(value * -LOG2_E))
        address = address + eight_rows


def write_out(y, address, eight_rows, t, left, element):
    """Round and store rows ``group`` and ``group + 8``, a pair of tiles at once: whole sectors.

    Lanes of even t have 8 bytes of the first tile of a pair, those of odd t of the second.
    """
    address = address + Int64(t // 2 * 8 + t % 2 * 16)
    for half in (0, 1):
        for first in range(0, y.shape[1], 2):
            words = [
                pack(y[2 * half, tile], y[2 * half + 1, tile], element)
                for tile in (first, first + 1)
            ]
            store_words(address, trade(*words, t), left > 8 * half, 16 * first)
        address = address + eight_rows


def trade(first, second, t):
    """Of two words of lanes t and t + 1, t even, both of the first to t and of the second on.

    And back, if done again.
    """
    odd = t % 2 != 0
    got = cute.arch.shuffle_sync_bfly(choose(odd, first, second), 1)
    return [choose(odd, got, first), choose(odd, second, got)]
