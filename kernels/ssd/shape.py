"""How one block of the one-pass scan cuts its work, and where things lie in its shared memory."""

from dataclasses import dataclass

WARP = 32
OWNERS = 4
"""Output warps that share the tokens of a tile."""
TURNS = 2
"""Sets of them, which take tiles in turn."""
STATE_WARPS = 4
X_STAGES = 3
B_STAGES = 2
S_STAGES = 2


@dataclass(frozen=True)
class Shape:
    """A block's share: `width` of the `headdim` channels of a head, `tile` tokens at a time."""

    headdim: int
    dstate: int
    width: int
    tile: int
    outputs: int

    @property
    def threads(self):
        """Of a block; without `outputs` it computes states alone."""
        return WARP * (OWNERS * TURNS * self.outputs + STATE_WARPS)

    @property
    def slices(self):
        """Blocks that share a head."""
        return self.headdim // self.width

    @property
    def row_blocks(self):
        """Blocks of 16 tokens in a tile."""
        return self.tile // 16

    @property
    def triangle(self):
        """16x16 blocks of C Bᵀ that a tile needs: those on and below the diagonal."""
        return self.row_blocks * (self.row_blocks + 1) // 2

    @property
    def columns(self):
        """The dstate that is computed with: a multiple of 32, padded with zeros."""
        return max(self.dstate, 32)

    @property
    def runs(self):
        """Runs of 32 in `columns`, of which a lane loads 16 bytes."""
        return self.columns // 32

    @property
    def halves(self):
        """Runs of 8 tokens of one output warp."""
        return self.tile // (8 * OWNERS)

    @property
    def channel_tiles(self):
        """Runs of 16 channels of a block."""
        return self.width // 16

    @property
    def state_columns(self):
        """Columns of the state that one state warp owns."""
        return self.columns // STATE_WARPS

    @property
    def x_row(self):
        """Bytes of a row of x; the padding spreads 8 rows over all banks."""
        return 2 * self.width + 16

    @property
    def b_row(self):
        """Bytes of a row of B; the padding spreads 8 rows over all banks."""
        return 2 * self.columns + 16

    @property
    def x_stage(self):
        """Bytes of a tile of x."""
        return self.tile * self.x_row

    @property
    def b_stage(self):
        """Bytes of a tile of B."""
        return self.tile * self.b_row

    @property
    def s_stage(self):
        """Bytes of a state of 16-bit elements."""
        return 2 * self.width * self.columns

    @property
    def b_start(self):
        """Where the tiles of B begin; those of x begin at 0."""
        return X_STAGES * self.x_stage

    @property
    def s_start(self):
        """Where the states begin."""
        return self.b_start + B_STAGES * self.b_stage

    @property
    def decay_stage(self):
        """Bytes of a tile's decays, step sizes, and what is left of those at its end."""
        return 12 * self.tile

    @property
    def decay_start(self):
        """Where the tiles' decays begin."""
        return self.s_start + S_STAGES * self.s_stage * self.outputs

    @property
    def starts_start(self):
        """Where the starts of sequences begin, one number a token."""
        return self.decay_start + X_STAGES * self.decay_stage

    @property
    def d_start(self):
        """Where D begins, in fp32."""
        return self.starts_start + X_STAGES * 4 * self.tile

    @property
    def shared_bytes(self):
        """All of it."""
        return self.d_start + 4 * self.width * self.outputs


def slot(group, t):
    """Where, among a warp's 32 runs of 16 bytes of the state, lane (group, t) has its own.

    The turn spreads what lanes of eight groups write over all banks.
    """
    return group * 4 + (t ^ (group // 2))
