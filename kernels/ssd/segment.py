"""What both sorts of warps of the one-pass scan know: their segment, and how they meet."""

# The DSL ships no types, and its `.pth` file hides it from type checkers.
# pyright: reportMissingImports=false

from typing import Any, NamedTuple

from cutlass import Int32

from ..scalars import choose
from .shape import X_STAGES, Shape

# Named barriers. Those between both sorts of warps have a number for even and one for odd tiles,
# and those at which a state is ready are each output warp's own: so these may run a tile apart.
AMONG_STATES = 1
USED = 2
READY = 4
AMONG_OUTPUTS = 12


class Segment(NamedTuple):
    """What a block walks: `count` tiles of one head, from tile `first` on.

    `group` is that of the head, and `group_heads` how many that has; `channel` is the first of
    the block's. `number` is the segment's of `segments`.
    """

    shape: Shape
    element: Any
    shared: Any
    batch: Any
    head: Any
    group: Any
    channel: Any
    first: Any
    count: Any
    seqlen: Any
    tiles: Any
    heads: Any
    groups: Any
    group_heads: Any
    number: Any
    segments: Any


def next_stage(stage):
    """The stage of x after this one."""
    return choose(stage == X_STAGES - 1, Int32(0), stage + 1)
