"""How rows of weight and x lie in the fragments of `mma.sync.m16n8k16`, with no data moved for it.

The instruction multiplies a 16x16 matrix A and a 16x8 matrix B. Lane `4 * g + t` holds, of rows `g`
and `g + 8` of A and of column `g` of B, two pairs of elements each; which elements of K these are
makes no difference, as long as A and B agree. So a lane loads 16 bytes of a row, eight
elements in a run, and they serve as its four pairs in two instructions.

With fewer than eight rows of x the other columns would be idle. They get other parts of K: a chunk
of K is cut into `parts`; row `(w, p)` of one operand is part `p` of weight row `w`, column `(j, q)`
of the other is part `q` of row `j` of x, and of the result the entries with `p = q` count. So the
four lanes of a row, with those of its other parts, load a run of `64 * parts` bytes.

`side` says which operand the weights are:

- `a`: 16 weight rows by 8 rows of x, in `8 / m` parts. One instruction per 16 bytes of weights.
- `b`: 16 rows of x by 8 weight rows, in `16 / m` parts: runs of twice the length and half as many
  weight rows in a load, for two instructions per 16 bytes. For `m` from 4 on; with `m` of 1 it
  counts as 2.
"""

# pyright: reportMissingImports=false

from dataclasses import dataclass

from cutlass import Uint32, cute

from ..scalars import choose
from ..tensor_core import mma

WARP = 32
VECTOR = 8
"""Elements in 16 bytes, the unit of every load."""


@dataclass(frozen=True)
class Layout:
    """Where a lane's loads and results lie, for `m` rows of x and `rows` weight rows a tile."""

    m: int
    rows: int
    side: str

    @property
    def columns(self):
        """Rows of x that the fragments hold."""
        return max(self.m, 2) if self.side == "b" else self.m

    @property
    def parts(self):
        """Parts of K side by side in one instruction."""
        return (16 if self.side == "b" else 8) // self.columns

    @property
    def chunk(self):
        """Vectors of a row in one load of a warp."""
        return 4 * self.parts

    @property
    def load_rows(self):
        """Weight rows in one load of a warp."""
        return 8 // self.parts

    @property
    def groups(self):
        """Loads of weights for one chunk of a tile."""
        return self.rows // self.load_rows

    @property
    def x_vectors(self):
        """Loads of x for one chunk; they lie 64 bytes apart."""
        return 2 if self.side == "b" else 1

    @property
    def tiles(self):
        """Accumulators, of four fp32 each."""
        return self.groups if self.side == "b" else self.groups // 2

    def weight_place(self, lane):
        """Row, among those of one load, and vector, in the chunk, of this lane's weights."""
        group = lane // 4
        return group // self.parts, group % self.parts * 4 + lane % 4

    def x_place(self, lane):
        """Row of x and vector, in the chunk, of this lane's first load of x."""
        group, lanes = lane // 4, self.parts // self.x_vectors
        return group // lanes, group % lanes * (4 * self.x_vectors) + lane % 4

    def multiply(self, sums, weights, xs, u, element):
        """Add the products of slot `u` of weights and x to `sums`."""
        for tile in range(self.tiles):
            for half in (0, 2):
                if self.side == "b":
                    a = [xs[half + i, v, u] for i in (0, 1) for v in (0, 1)]
                    b = [weights[half + i, tile, u] for i in (0, 1)]
                else:
                    a = [weights[half + i, 2 * tile + r, u] for i in (0, 1) for r in (0, 1)]
                    b = [xs[half + i, 0, u] for i in (0, 1)]
                total = mma(a, b, [sums[i, tile] for i in range(4)], element)
                for i in range(4):
                    sums[i, tile] = total[i]

    def results(self, sums, lane):
        """This lane's sums over its warp.

        Gives triples (sum, row of the tile, row of x) and whether this lane answers for them, which
        each result has exactly one lane do.
        """
        group, t = lane // 4, lane % 4
        if self.parts == 1:
            found = [
                (sums[2 * half + i, tile], (2 * tile + half) * 8 + group, 2 * t + i)
                for tile in range(self.tiles)
                for half in (0, 1)
                for i in (0, 1)
            ]
            return found, None
        if self.side == "b":
            # Parts 2q and 2q + 1 of x lie in rows g and g + 8: they meet theirs on the diagonal.
            lanes = self.parts // 2
            values = [sums[0, tile] + sums[3, tile] for tile in range(self.groups)]
            matching = group % lanes == t % lanes
            column, row, masks = group // lanes, t // lanes, (5, 10)
            if self.columns > self.m:
                matching = matching & (column < self.m)
        else:
            lanes = self.parts // 2
            odd = group % 2 != 0
            values = [
                choose(odd, sums[2 * half + 1, tile], sums[2 * half, tile])
                for tile in range(self.tiles)
                for half in (0, 1)
            ]
            matching = group % self.parts // 2 == t % lanes
            column, row, masks = t // lanes, group // self.parts, (4, 9, 18)
        sharers = self.parts if self.side == "a" else lanes
        masks = masks[: sharers.bit_length() - 1]
        values, first, single = deal(values, masks, lane)
        found = [
            (value, (first + i) * self.load_rows + row, column) for i, value in enumerate(values)
        ]
        if lanes == 1:
            return found, single
        return found, matching if single is None else matching & single


def deal(values, masks, lane):
    """Sum each of `values` over the lanes that differ by `masks`, and deal the sums out to them.

    While the count is even, a lane swaps half of its values with its partner, so 8 values take 7
    shuffles, not 24. Gives this lane's sums, the index of the first among `values`, and whether it
    answers for them among those that hold the same (None: no other does).
    """
    first, single = Uint32(0), None
    for mask in masks:
        upper = (lane & (mask & -mask)) != 0
        if len(values) % 2 == 0:
            half = len(values) // 2
            kept = [choose(upper, values[half + i], values[i]) for i in range(half)]
            sent = [choose(upper, values[i], values[half + i]) for i in range(half)]
            first = first + choose(upper, Uint32(half), Uint32(0))
        else:
            kept = sent = values
            lower = (lane & (mask & -mask)) == 0
            single = lower if single is None else single & lower
        values = [
            mine + cute.arch.shuffle_sync_bfly(theirs, mask)
            for mine, theirs in zip(kept, sent, strict=True)
        ]
    return values, first, single
