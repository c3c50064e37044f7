"""Declaration of the skinny GEMV, y = x W^T.

x is (m, k), weight (n, k), out (m, n), all of `dtype`; the last dimension of each is contiguous and
the strides are in elements. k, and the strides of x and weight, are multiples of 8, so that every
row can be read 16 bytes at a time.
"""

from ..spec import Budget, Declaration, KernelSpec, Parameter, product

SPECS = (
    KernelSpec(
        declaration=Declaration(
            name="gemv",
            parameters=(
                Parameter("x", "pointer", element="dtype", align=16),
                Parameter("weight", "pointer", element="dtype", align=16),
                Parameter("out", "pointer", element="dtype", align=2),
                Parameter("n", "i32"),
                Parameter("k", "i32"),
                Parameter("x_stride", "i64"),
                Parameter("weight_stride", "i64"),
                Parameter("out_stride", "i64"),
            ),
            choices=("dtype", "m", "rows", "warps", "unroll"),
            selectors=("dtype", "m"),
            block=("32 * warps", "1", "1"),
            grid=("ceildiv(n, rows)", "1", "1"),
            shared_bytes="4 * warps * rows * m",
            budget=Budget(registers=128),
        ),
        variants=product(dtype=["bf16"], m=[1, 2], rows=[4], warps=[8], unroll=[1]),
        device="sonata_aot.kernels.gemv.device:gemv",
    ),
)
