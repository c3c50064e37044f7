"""Declaration of the read kernel, whose time is the least that reading a buffer takes.

`vectors` runs of 16 bytes from `buffer` on are read once; `sink` is never written to. Any number of
`blocks` does. Built on request: it is for benchmarks.
"""

from ..spec import Budget, Declaration, KernelSpec, Parameter, product

_CHOICES = ("warps", "unroll", "pdl")

READ = Declaration(
    name="read",
    parameters=(
        Parameter("buffer", "pointer", element="u8", align=16),
        Parameter("sink", "pointer", element="i32", align=4),
        Parameter("vectors", "i64"),
        Parameter("blocks", "i32"),
    ),
    choices=_CHOICES,
    selectors=_CHOICES,
    block=("32 * warps", "1", "1"),
    grid=("blocks", "1", "1"),
    min_sm="80 + 10 * pdl",
    programmatic="pdl",
    # Two blocks of 16 warps a multiprocessor.
    budget=Budget(registers=64),
)

SPECS = (
    KernelSpec(
        READ,
        product(warps=[8, 16], unroll=[4, 8], pdl=[0, 1]),
        "sonata_aot.kernels.read.device:read",
        default=False,
    ),
)
