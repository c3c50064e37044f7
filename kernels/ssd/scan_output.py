"""What the warps do that own tokens in the one-pass scan: products with C, x and z, and out.

They compute the transpose, channels by tokens: so the state and x, which are first operands then,
come out of shared memory in the registers that the matrix instruction wants, and a row of C out of
one load of global memory. `y` has shape (4, halves, tiles of 16 channels), where a half is 8
tokens; a warp has two of them, or one.
"""

# The DSL ships no types, and its `.pth` file hides it from type checkers.
# pyright: reportMissingImports=false

from typing import Any, NamedTuple

from cutlass import Float32, Int32, Int64, Uint32, cute

from ..scalars import choose, load_words, prefetch, reload_words, store_words
from ..tensor_core import (
    exp2,
    load_floats,
    load_matrices,
    load_shared,
    mma,
    pack,
    transpose_matrix,
    unpack,
)
from .shape import WARP

BLOCK = 1024
"""Bytes of a block of C Bᵀ."""


def triangle_of(row_block):
    """Bytes before the first block of C Bᵀ of a row of blocks."""
    return Int64(row_block * (row_block + 1) // 2) * BLOCK


def rows_of(start, stride, token, seqlen, shape):
    """Addresses of each half's row of C or z; past `seqlen`, if given, that of the last token."""
    rows = []
    for half in range(shape.halves):
        row = token + 8 * half
        if seqlen is not None:
            row = choose(row < seqlen, row, seqlen - 1)
        rows.append(start + Int64(row) * (stride * 2))
    return rows


def load_c(cs, run, rows, t, shape):
    """Load 16 bytes of a run of 32 of dstate, of each half's row."""
    for half, address in enumerate(rows):
        if shape.dstate < 32 * (run + 1):
            within = t < (shape.dstate - 32 * run) // 8
            words = load_words(address, within, 64 * run)
        else:
            words = load_words(address, True, 64 * run)
        for i, word in enumerate(words):
            cs[i, half, run] = word


def load_block(cs, place, address, wanted, shape):
    """Load this lane's numbers of a block of C Bᵀ, four of each half's row."""
    for half in range(shape.halves):
        words = [cs[i, half, place] for i in range(4)]
        for i, word in enumerate(reload_words(words, address, wanted, half * (16 * WARP))):
            cs[i, half, place] = word


class Blocks(NamedTuple):
    """A row of blocks of C Bᵀ: what `weights` takes of that on the diagonal, and where all are.

    The one on the diagonal has been loaded; `following` is the next tile's.
    """

    cbs: Any
    place: int
    columns: Any
    decays: list[Any]
    distance: Any
    following: Any
    more: Any
    here: Any
    before: Any

    def weights(self, columns, part, t, shape, element):
        """The block's weights, and `own_products`; loads the next block in its place."""
        own = own_products(self.cbs, self.place, columns, part, t, shape)
        found = weights(self.cbs, self.place, columns, self.decays, self.distance, element)
        load_block(self.cbs, self.place, self.following, self.more, shape)
        return found, own

    def load_before(self, shape):
        """Load the blocks before the diagonal."""
        for block in range(shape.row_blocks - 1):
            load_block(self.cbs, block, self.here + block * BLOCK, block < self.before, shape)


class Rows(NamedTuple):
    """Rows of out to be stored, rounded by `round_out`: where, and how many are left."""

    words: Any
    address: Any
    eight_rows: Any
    left: Any
    t: Any

    def transposed(self, half, m):
        """Words of 2t and 2t + 1 of 16 channels of the half's token."""
        return [transpose_matrix(self.words[row, half, m]) for row in (0, 1)]

    def store_words(self, half, m, words):
        """Store 16 channels of the half's token, 8 bytes a lane: whole sectors."""
        # Lanes of even t have the first of two tiles of 8 channels, those of odd t the second.
        address = self.address + Int64(self.t // 2 * 8 + self.t % 2 * 16)
        for _ in range(half):
            address = address + self.eight_rows
        store_words(address, words, self.left > 8 * half, 32 * m)

    def store(self, shape):
        """Store all of it."""
        for half in range(shape.halves):
            for m in range(shape.channel_tiles):
                self.store_words(half, m, pair_up(*self.transposed(half, m), t=self.t))


def multiply_state(y, cs, c_rows, stages, blocks, rows, part, shape, element):
    """Add the state times C, load the next C, and give `Blocks.weights`.

    The products wait for shared memory and for one another, so what else there is to do stands
    between them: those weights, and storing the rows of the tile before. Fragments are loaded a
    step ahead.
    """
    steps = [(run, pair) for run in range(shape.runs) for pair in (0, 1)]
    tiles = [(half, m) for half in range(shape.halves) for m in range(shape.channel_tiles)]
    found = {}

    def turn(part):
        for place in tiles[part::2]:
            found[place] = rows.transposed(*place)

    def pair(part):
        for place in tiles[part::2]:
            found[place] = pair_up(*found[place], t=rows.t)

    def store(part):
        for place in tiles[part::2]:
            rows.store_words(*place, found[place])

    def columns():
        blocks.load_before(shape)
        found["columns"] = load_columns(blocks.columns, 0)

    def weigh():
        found["weights"] = blocks.weights(found["columns"], part, rows.t, shape, element)

    # First what frees registers.
    others = [
        lambda: turn(0),
        lambda: pair(0),
        lambda: (store(0), turn(1)),
        lambda: pair(1),
        lambda: store(1),
        columns,
        weigh,
    ]
    fragments = load_state_tile(stages, *steps[0], shape)
    for i, (run, pair_of) in enumerate(steps):
        ahead = load_state_tile(stages, *steps[i + 1], shape) if i + 1 < len(steps) else []
        for m, a in enumerate(fragments):
            for half in range(shape.halves):
                add_product(
                    y, a, [cs[2 * pair_of + j, half, run] for j in (0, 1)], half, m, element
                )
        if pair_of == 1:
            load_c(cs, run, c_rows, rows.t, shape)
        last = i + 1 == len(steps)
        for other in others[i:] if last else others[i : i + 1]:
            other()
        fragments = ahead
    return found["weights"]


def load_state_tile(stages, run, pair, shape):
    """The state's fragments of 16 of dstate, by 16 channels."""
    first = (2 * run + pair) * shape.channel_tiles
    return [
        load_shared(stages[pair], (first + m) * (16 * WARP)) for m in range(shape.channel_tiles)
    ]


def add_product(y, a, b, half, m, element):
    """Add a product of fragments to 16 channels of 8 tokens."""
    total = mma(a, b, [y[i, half, m] for i in range(4)], element)
    for i in range(4):
        y[i, half, m] = total[i]


def scale_tokens(y, factors):
    """Multiply tokens 2t and 2t + 1 of each half."""
    _, halves, tiles = y.shape
    for m in range(tiles):
        for half in range(halves):
            for i in range(4):
                y[i, half, m] = y[i, half, m] * factors[2 * half + i % 2]


def own_decays(place, shape):
    """The decay up to each half's token."""
    return [load_floats(place, 64 * half, count=1)[0] for half in range(shape.halves)]


def own_starts(place, shape):
    """Where the sequence of each half's token starts in the tile; -1 if before it."""
    return [Int32(load_shared(place, 32 * half, count=1)[0]) for half in range(shape.halves)]


def carried(factors, pairs):
    """What is left of the state before the tile at tokens 2t and 2t + 1 of each half."""
    for half in range(factors.shape[0] // 2):
        values = load_floats(pairs, 64 * half, count=4)
        for i in (0, 1):
            factors[2 * half + i] = exp2(values[2 * i])


def drop_carried(factors, starts):
    """Where a sequence starts nothing is left of it; `starts`: those of tokens from 2t on."""
    for half in range(factors.shape[0] // 2):
        for i, start in enumerate(load_shared(starts, 32 * half, count=2)):
            place = 2 * half + i
            factors[place] = choose(Int32(start) < 0, factors[place], Float32(0.0))


def weights_before(cbs, place, pairs, reference, decays, element):
    """A block of C Bᵀ before its row's own one, with decays and step sizes, as second operand.

    Decays are factored at the token before the row's block, whose sum is `reference`: both factors
    are at most 1, so neither overflows. `pairs`: (decay, step size) of the columns 2t, 2t + 1,
    2t + 8, 2t + 9.
    """
    factors = [exp2(reference - pairs[2 * i]) * pairs[2 * i + 1] for i in range(4)]
    operands = []
    for half, decay in enumerate(decays):
        own = exp2(decay - reference)
        values = [cbs[i, half, place].bitcast(Float32) * factors[i] * own for i in range(4)]
        operands.append([pack(*values[:2], element=element), pack(*values[2:], element=element)])
    return operands


def weights(cbs, place, pairs, decays, distance, element):
    """A block of C Bᵀ with decays and step sizes, up to the diagonal, as second operand.

    Of a token's own column `own_products` takes care. `pairs` as in `weights_before`. `distance`:
    how far the first half's token is from column 2t.
    """
    operands = []
    for half, decay in enumerate(decays):
        values = []
        for i, column in enumerate((0, 1, 8, 9)):
            number = cbs[i, half, place].bitcast(Float32)
            value = number * pairs[2 * i + 1] * exp2(decay - pairs[2 * i])
            values.append(choose(column < distance + 8 * half, value, Float32(0.0)))
        operands.append([pack(*values[:2], element=element), pack(*values[2:], element=element)])
    return operands


def of_sequence(words, begin, first):
    """Clear the weights of a half that are of other sequences, and may be no numbers.

    Column 2t is token `first` of the tile, and the half's token's sequence starts at `begin`.
    """
    kept = [
        choose(first + column >= begin, Uint32(half), Uint32(0))
        for column, half in zip((0, 1, 8, 9), (0xFFFF, 0xFFFF0000) * 2, strict=True)
    ]
    return [words[0] & (kept[0] | kept[1]), words[1] & (kept[2] | kept[3])]


def put(words, operands):
    """Keep the operands of halves in registers that may change."""
    for half, operand in enumerate(operands):
        for i, word in enumerate(operand):
            words[i, half] = word


def taken(words):
    """The operands that `put` has kept."""
    return [[words[0, half], words[1, half]] for half in range(words.shape[1])]


def drop_others(words, begins, first):
    """As `of_sequence`, of what `put` has kept."""
    kept = [of_sequence(*pair, first) for pair in zip(taken(words), begins, strict=True)]
    put(words, kept)


def own_products(cbs, place, pairs, part, t, shape):
    """C B of tokens 2t and 2t + 1 of each half with themselves, times their step sizes.

    What they add to out is not rounded like the weights of others: it is the largest, where decay
    is fast. A token's lane is that of its row and of its column.
    """
    odd = cute.arch.lane_idx() // 4 % 2 != 0
    found = []
    for half in range(shape.halves):
        columns = [2 * half, 2 * half + 1]
        numbers = [cbs[i, half, place] for i in columns]
        steps = [pairs[2 * i + 1] for i in columns]
        if shape.halves == 1:
            # The half of the block that the warp has is only known when it runs.
            numbers = [choose(part == 0, cbs[i, 0, place], cbs[2 + i, 0, place]) for i in (0, 1)]
            steps = [choose(part == 0, pairs[2 * i + 1], pairs[2 * i + 5]) for i in (0, 1)]
        number = choose(odd, numbers[1], numbers[0])
        for i in (0, 1):
            own = cute.arch.shuffle_sync(number, 9 * t + 4 * i)
            found.append(own.bitcast(Float32) * steps[i])
    return found


def load_columns(pairs, block):
    """(Decay, step size) of a block's columns 2t, 2t + 1, 2t + 8 and 2t + 9."""
    found = load_floats(pairs, block * 128, count=4)
    return found + load_floats(pairs, block * 128 + 64, count=4)


def multiply_before(
    y, cbs, blocks, pairs, x_rows, reference, decays, begins, first, shape, element
):
    """Add what some blocks before the diagonal give.

    `begins`: of `own_starts`, or None if no sequence starts in the tile. `first`: the token of the
    first block's column 2t.
    """
    for block in blocks:
        columns = load_columns(pairs, block)
        found = weights_before(cbs, block, columns, reference, decays, element)
        if begins is not None:
            found = [
                of_sequence(words, begin, first + block * 16)
                for words, begin in zip(found, begins, strict=True)
            ]
        multiply_x(y, x_rows + block * (16 * shape.x_row), found, element)


def multiply_x(y, x_rows, operands, element):
    """Add 16 tokens of x times a block of weights; gives x, as first operand."""
    found = []
    for m in range(y.shape[2]):
        a = load_matrices(x_rows, 32 * m, transposed=True)
        for half, b in enumerate(operands):
            add_product(y, a, b, half, m, element)
        found.append(a)
    return found


def add_dx(y, xs, d_column, own, first, element):
    """Add D x and what tokens give themselves, in fp32.

    Of x as first operand, from its half `first` on; `own`: of `own_products`.
    """
    _, halves, tiles = y.shape
    for m in range(tiles):
        for row in (0, 1):
            (factor,) = load_floats(d_column, 64 * m + 32 * row, count=1)
            for half in range(halves):
                word = xs[m][2 * half + row]
                if halves == 1:
                    word = choose(first == 0, word, xs[m][2 + row])
                for i, value in enumerate(unpack(word, element)):
                    weight = factor + own[2 * half + i]
                    y[2 * row + i, half, m] = y[2 * row + i, half, m] + weight * value


def ask_for_rows(address, stride, lane, left, shape):
    """Ask the L2 for the rows of z of one warp, of which `left` are left."""
    rows, lines = 8 * shape.halves, -(-shape.width // 64)
    for first in range(0, rows * lines, WARP):
        place = first + lane
        row, line = place % rows, place // rows
        prefetch(
            address + Int64(row) * (stride * 2) + Int64(line * 128), (row < left) & (line < lines)
        )


def round_out(words, y, element):
    """Round to 16 bits, tokens 2t and 2t + 1 in a word."""
    rows, halves, tiles = words.shape
    for m in range(tiles):
        for half in range(halves):
            for row in range(rows):
                words[row, half, m] = pack(y[2 * row, half, m], y[2 * row + 1, half, m], element)


def pair_up(first, second, t):
    """Of two words of lanes t and t + 1, t even, both of the first to t and of the second on."""
    odd = t % 2 != 0
    got = cute.arch.shuffle_sync_bfly(choose(odd, first, second), 1)
    return [choose(odd, got, first), choose(odd, second, got)]
