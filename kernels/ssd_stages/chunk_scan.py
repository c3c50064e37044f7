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

from ..scalars import load_number, load_scalar, load_words, read_floats
from ..tensor_core import (
    commit_copies,
    copy_async,
    pack,
    store_shared,
    thread_index,
    wait_copies,
)
from .chunk_scan_rows import (
    C_AHEAD,
    add_dx,
    decay_state,
    gate,
    load_c,
    load_products,
    multiply_state,
    multiply_x,
    weigh,
    write_out,
)
from .tiles import (
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
