"""What a warp of `chunk_scan` does with its 16 tokens: products with the state and x, and out.

``y`` has the output, (4, tiles of 8 channels): of a tile a lane has elements 2t and 2t + 1 of rows
``group`` and ``group + 8``.
"""

# The DSL ships no types, and its `.pth` file hides it from type checkers.
# pyright: reportMissingImports=false

from cutlass import Float32, Int64, cute

from ..scalars import load_two, load_words, read_floats, store_words
from ..tensor_core import (
    exp2,
    load_floats,
    load_matrices,
    load_shared,
    mma,
    pack,
    reciprocal,
    unpack,
)
from .tiles import LOG2_E, TILE, WARP, choose

C_AHEAD = 2
"""Runs of 32 of dstate that are under way."""


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
            low, high = load_two(address, left > 8 * half, 16 * first)
            words = trade(low, high, t)
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
            low, high = (
                pack(y[2 * half, tile], y[2 * half + 1, tile], element)
                for tile in (first, first + 1)
            )
            store_words(address, trade(low, high, t), left > 8 * half, 16 * first)
        address = address + eight_rows


def trade(first, second, t):
    """Of two words of lanes t and t + 1, t even, both of the first to t and of the second on.

    And back, if done again.
    """
    odd = t % 2 != 0
    got = cute.arch.shuffle_sync_bfly(choose(odd, first, second), 1)
    return [choose(odd, got, first), choose(odd, second, got)]
