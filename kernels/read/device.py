"""Reads a buffer and does nothing else.

A step of a block covers ``unroll`` vectors of 16 bytes a thread, side by side; the next step lies a
grid's steps on. As in the GEMV, a thread has all loads of a step under way before it uses the
first, and refills the registers in place.

The loads must not be dropped as unused, so their exclusive or decides over a store, which a
condition that never holds keeps from happening.

With ``pdl`` (programmatic dependent launch, from sm90 on) the next kernel in the stream may start
at once, and all reads come before the wait for the kernel before: right only for what no kernel
under way writes. Every thread waits before it ends.
"""

# The DSL ships no types, and its `.pth` file hides it from type checkers.
# pyright: reportMissingImports=false

import cutlass
from cutlass import Int32, Int64, Uint32, cute

from ..loads import STREAMED, load_vector

BYTES = 16
UNLIKELY = 0x5EED_BEEF


@cute.kernel
def read(
    buffer: cute.Pointer,
    sink: cute.Pointer,
    vectors: Int64,
    blocks: Int32,
    *,
    warps: cutlass.Constexpr,
    unroll: cutlass.Constexpr,
    pdl: cutlass.Constexpr,
):
    """Read ``vectors`` vectors, with ``blocks`` blocks of ``32 * warps`` threads.

    ``vectors`` is at least 0. Counts and offsets have 64 bits.
    """
    if cutlass.const_expr(pdl):
        cute.arch.griddepcontrol_launch_dependents()
    thread = cute.arch.thread_idx()[0]
    tile = 32 * warps * unroll
    first = Int64(cute.arch.block_idx()[0]) * tile
    step = Int64(blocks) * tile
    left = vectors - first - thread
    address = buffer.toint() + (first + thread) * BYTES

    words = cute.make_rmem_tensor((4, unroll), Uint32)
    found = cute.make_rmem_tensor((4,), Uint32)
    found.fill(0)
    for u in cutlass.range_constexpr(unroll):
        refill(words, u, address, left, 32 * warps)
    while first < vectors:
        first += step
        address += step * BYTES
        left -= step
        for u in cutlass.range_constexpr(unroll):
            for i in cutlass.range_constexpr(4):
                found[i] = found[i] ^ words[i, u]
            refill(words, u, address, left, 32 * warps)

    if cutlass.const_expr(pdl):
        cute.arch.griddepcontrol_wait()
    total = found[0] ^ found[1] ^ found[2] ^ found[3]
    if (total == Uint32(UNLIKELY)) & (blocks < 0):
        sink.store(Int32(total))


def refill(words, u, address, left, apart):
    """Load vector ``u``, ``u * apart`` vectors after ``address``, if more than that are left."""
    loaded = load_vector(address, u * apart * BYTES, Int64(u * apart), left, STREAMED)
    for i, word in enumerate(loaded):
        words[i, u] = word
