"""A kernel made for reading its machine code: scalars of every kind, static shared memory, a stack.

It has no `from __future__ import annotations`: the compiler reads the annotations themselves.
"""

# The compiler ships no types, and its `.pth` file hides it from type checkers.
# pyright: reportMissingImports=false

import cutlass
from cutlass import Float32, Int32, Int64, cute


@cute.kernel
def odd(
    scale: Float32,
    source: cute.Pointer,
    first: Int32,
    target: cute.Pointer,
    index: Int32,
    stride: Int64,
    *,
    slots: cutlass.Constexpr,
):
    """Copy through a local array that is indexed at run time, so that it must have an address."""
    thread = Int32(cute.arch.thread_idx()[0])
    shared = cute.make_tensor(cute.arch.alloc_smem(Float32, 64), cute.make_layout(64))
    local = cute.make_rmem_tensor((slots,), Float32)
    values = cute.make_tensor(source, cute.make_layout(1 << 20))
    for slot in cutlass.range(index, unroll=1):
        local[slot] = values[first + slot * thread]
    shared[thread] = local[(index + thread) % slots] * scale
    cute.arch.barrier()
    out = cute.make_tensor(target + Int64(thread) * stride, cute.make_layout(1))
    out[0] = shared[(thread + index) % 64]
