"""What the warps do that own tokens in the one-pass scan: products with C, x and z, and out."""

# The DSL ships no types, and its `.pth` file hides it from type checkers.
# pyright: reportMissingImports=false

from cutlass import Float32, Int32, Int64, Uint32, cute

from ..scalars import load_words, store_words
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
from .prepare import LOG2_E, choose
from .shape import WARP

BLOCK = 1024
"""Bytes of a block of C Bᵀ."""


def triangle_of(row_block):
    """Bytes before the first block of C Bᵀ of a row of blocks."""
    return Int64(row_block * (row_block + 1) // 2) * BLOCK


def load_c(cs, run, address, eight_rows, left, t, shape, wanted):
    """Load 16 bytes of a run of 32 of dstate, of C's rows `group` and 8 further on."""
    for half in (0, 1):
        inside = wanted & (left > 8 * half)
        if shape.dstate < 32 * (run + 1):
            inside = inside & (t < (shape.dstate - 32 * run) // 8)
        for i, word in enumerate(load_words(address, inside, 64 * run)):
            cs[i, half, run] = word
        address = address + eight_rows


def load_block(cs, place, address, wanted):
    """Load this lane's eight numbers of a block of C Bᵀ."""
    for half in (0, 1):
        for i, word in enumerate(load_words(address, wanted, half * (16 * WARP))):
            cs[i, half, place] = word


def multiply_state(y, cs, run, s_stage, shape, element):
    """Add a run of 32 of dstate of C times the state."""
    tiles = shape.channels // 8
    words = [
        load_shared(s_stage, (run * (shape.width // 8) + tile) * (16 * WARP))
        for tile in range(tiles)
    ]
    for pair in (0, 2):
        a = [cs[pair + i, half, run] for i in (0, 1) for half in (0, 1)]
        for tile in range(tiles):
            total = mma(a, words[tile][pair : pair + 2], [y[i, tile] for i in range(4)], element)
            for i in range(4):
                y[i, tile] = total[i]


def scale_rows(y, low, high):
    """Multiply the rows of lanes' groups, and those 8 further on."""
    for tile in range(y.shape[1]):
        for i in (0, 1):
            y[i, tile] = y[i, tile] * low
            y[i + 2, tile] = y[i + 2, tile] * high


def weights_before(cs, place, pairs, reference, rows, element):
    """A block of C Bᵀ before its row's own one, with decays and step sizes, as first operand.

    Decays are factored at the token before the row's block, whose sum is `reference`: both factors
    are at most 1, so neither overflows. `pairs`: (decay, step size) of the columns 2t, 2t + 1,
    2t + 8, 2t + 9. `rows`: the factor of each row.
    """
    factors = [exp2(reference - pairs[2 * i]) * pairs[2 * i + 1] for i in range(4)]
    return [
        pack(
            *[
                cs[2 * row + i, half, place].bitcast(Float32) * factors[2 * half + i] * rows[row]
                for i in (0, 1)
            ],
            element,
        )
        for half in (0, 1)
        for row in (0, 1)
    ]


def weights(cs, place, pairs, decays, diagonal, least, element):
    """A block of C Bᵀ with decays and step sizes, masked, as first operand.

    `pairs` as in `weights_before`. `diagonal`: how far row `group` is from column 2t; `least`: how
    far the first token of each row's sequence is, or None.
    """
    halves = []
    for half in (0, 1):
        for row in (0, 1):
            values = []
            for i in (0, 1):
                a_j, step = pairs[4 * half + 2 * i], pairs[4 * half + 2 * i + 1]
                number = cs[2 * row + i, half, place].bitcast(Float32)
                value = number * step * exp2(decays[row] - a_j)
                column = 8 * half + i
                kept = column <= diagonal + 8 * row
                if least is not None:
                    kept = kept & (column >= least[row])
                values.append(choose(kept, value, Float32(0.0)))
            halves.append(pack(values[0], values[1], element))
    return halves


def multiply_x(y, a, x_rows, shape, element):
    """Add the block ``a`` times 16 rows of x."""
    tiles = shape.channels // 8
    for first in range(0, tiles, 2):
        count = 4 if first + 1 < tiles else 2
        words = load_matrices(x_rows, 16 * first, transposed=True, count=count)
        for tile in range(first, min(first + 2, tiles)):
            pair = words[2 * (tile - first) : 2 * (tile - first) + 2]
            total = mma(a, pair, [y[i, tile] for i in range(4)], element)
            for i in range(4):
                y[i, tile] = total[i]


def add_dx(y, x_row, eight_rows, d_row, element):
    """Add D x, in fp32."""
    for tile in range(y.shape[1]):
        factors = load_floats(d_row, 32 * tile)
        for row in (0, 1):
            (word,) = load_shared(x_row, 16 * tile + row * eight_rows, count=1)
            for i, value in enumerate(unpack(word, element)):
                y[2 * row + i, tile] = y[2 * row + i, tile] + factors[i] * value


def gate(y, address, eight_rows, t, left, element):
    """Multiply by silu(z)."""
    for row in (0, 1):
        known = left > 8 * row
        for first, words in read_row(y.shape[1], address, t, known):
            for i, word in enumerate(words):
                for j, value in enumerate(unpack(word, element)):
                    place = (2 * row + j, first + i)
                    y[place] = y[place] * value * reciprocal(1.0 + exp2(value * -LOG2_E))
        address = address + eight_rows


def read_row(tiles, address, t, known):
    """A row of as many tiles of 8 elements, as words of 2t and 2t + 1 in each: (tile, words)."""
    for first in range(0, tiles, 4):
        if tiles - first >= 4:
            words = load_words(address + Int64(t) * 16, known, 16 * first)
            yield first, exchange(list(words), t)
        else:
            for tile in range(first, tiles):
                yield tile, [load_word(address + Int64(t) * 4 + 16 * tile, known)]


def write_out(y, address, eight_rows, t, left, element):
    """Round and store two rows, 16 bytes a lane."""
    tiles = y.shape[1]
    for row in (0, 1):
        known = left > 8 * row
        words = [pack(y[2 * row, tile], y[2 * row + 1, tile], element) for tile in range(tiles)]
        for first in range(0, tiles, 4):
            if tiles - first >= 4:
                four = exchange(words[first : first + 4], t)
                store_words(address + Int64(t) * 16, four, known, 16 * first)
            else:
                for tile in range(first, tiles):
                    store_words(address + Int64(t) * 4, [words[tile]], known, 16 * tile)
        address = address + eight_rows


def load_word(address, wanted):
    """Load a word; zero unless `wanted`."""
    return cute.arch.inline_ptx(
        "{ .reg .pred p; setp.ne.s32 p, {$r1}, 0; mov.b32 {$w0}, 0; "
        "@p ld.global.b32 {$w0}, [{$r0}]; }",
        write_only_types=[Uint32],
        read_only_args=[address, Int32(wanted)],
    )


def exchange(words, t):
    """Turn word i of lane t into word t of lane i, among the four lanes of a group."""
    for distance in (1, 2):
        upper = (t & distance) != 0
        for low in (0, 1) if distance == 2 else (0, 2):
            high = low + distance
            sent = choose(upper, words[low], words[high])
            got = cute.arch.shuffle_sync_bfly(sent, distance)
            words[low] = choose(upper, got, words[low])
            words[high] = choose(upper, words[high], got)
    return words
