"""What the stages share: tiles of tokens, their copies to shared memory, and small steps.

A sequence is cut into chunks of ``chunk_size`` tokens, the last of which may be shorter, and a
chunk into tiles of 64 tokens, whatever its size. A block has four warps.
"""

# The DSL ships no types, and its `.pth` file hides it from type checkers.
# pyright: reportMissingImports=false

from cutlass import Int32, Int64, Uint32, cute

from ..scalars import bits, choose
from ..ssd.prepare import LOG2_E, scan_sum, step_size
from ..tensor_core import copy_async, copy_number_async

__all__ = [
    "LOG2_E",
    "THREADS",
    "TILE",
    "WARP",
    "WARPS",
    "bits",
    "ceildiv",
    "choose",
    "copy_numbers",
    "copy_rows",
    "scan_sum",
    "smaller",
    "split",
    "step_size",
]

WARP = 32
WARPS = 4
THREADS = WARP * WARPS
TILE = 64


def split(place, *sizes):
    """The indices that a block's number stands for, the first of which varies fastest."""
    indices = []
    for size in sizes:
        indices.append(place % size)
        place = place // size
    return [cute.arch.make_warp_uniform(index) for index in (*indices, place)]


def smaller(left, right):
    """The lesser of two, without a branch."""
    return choose(left < right, left, right)


def ceildiv(number, divisor):
    """Quotient of numbers that are not negative, rounded up."""
    return (number + (divisor - 1)) // divisor


def copy_rows(shared, row_bytes, source, stride, left, thread, *, size, columns):
    """Start copying a tile of 16-bit rows to shared memory.

    Row ``i`` begins at ``source + 2 * i * stride`` and comes to ``shared + i * row_bytes``: its
    first ``size`` elements, and zeros up to ``columns`` of them. Rows from ``left`` on are zero.
    """
    pieces = columns // 8
    rows = THREADS // pieces
    row, column = thread // pieces, thread % pieces
    source = source + Int64(row) * (stride * 2) + Int64(column * 16)
    shared = shared + Uint32(row * row_bytes + column * 16)
    within = True if size == columns else column < size // 8
    for first in range(0, TILE, rows):
        wanted = True if THREADS % pieces == 0 else row < rows
        if first + rows > TILE:
            wanted = (row < TILE - first) & wanted
        copy_async(
            shared + Uint32(first * row_bytes),
            source,
            choose((row + first < left) & within, Int32(16), Int32(0)),
            wanted,
        )
        source = source + stride * (2 * rows)


def copy_numbers(shared, first, second, left, thread):
    """Start copying a tile's numbers of 4 bytes from two places; from ``left`` on they are zero.

    Each place is an address and a stride in bytes; those of the second come after the first's.
    """
    place = thread % TILE
    (one, one_stride), (two, two_stride) = first, second
    source = choose(thread < TILE, one + Int64(place) * one_stride, two + Int64(place) * two_stride)
    copy_number_async(shared + Uint32(thread * 4), source, place < left, True)
