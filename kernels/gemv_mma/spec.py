"""Declarations of the tensor-core GEMV, y = x W^T + bias, for 1 to 8 rows of x. Built on request.

x is (x_rows, k), weight (n, k), bias (n,) or null, out (x_rows, n), all of `dtype`; the last
dimension of each is contiguous and the strides are in elements. A binary's `m` is the most rows
that it takes: 1, 2, 4 or 8.

`gemv_mma` is the fast path: k is a multiple of 8 and rows of x and weight start 16-byte aligned.
`gemv_any` takes every other layout, `wide` if only that of x is another, with k up to 2**30.
docs/gemv.md says what they are for, and why `kernels.gemv` does not use them yet.
"""

from ..spec import Budget, Declaration, KernelSpec, Parameter, Variant, product

_POINTERS = ("x", "weight", "bias", "out")
_STRIDES = ("x_stride", "weight_stride", "out_stride")
_DTYPES = ("bf16", "f16")
_MMA_CHOICES = (
    *("dtype", "m", "side", "rows", "warps", "unroll"),
    *("persistent", "fetch", "ahead", "late", "pdl"),
)
_ANY_CHOICES = ("dtype", "m", "wide", "side", "rows", "warps", "unroll")

MMA = Declaration(
    name="gemv_mma",
    parameters=(
        Parameter("x", "pointer", element="dtype", align=16),
        Parameter("weight", "pointer", element="dtype", align=16),
        Parameter("bias", "pointer", element="dtype", align=2),
        Parameter("out", "pointer", element="dtype", align=2),
        *(Parameter(name, "i32") for name in ("n", "k", "x_rows", "block_rows", "constant")),
        *(Parameter(name, "i64") for name in _STRIDES),
        *(Parameter(name, "i32") for name in ("ahead_skip", "ahead_rows", "ahead_blocks")),
    ),
    choices=_MMA_CHOICES,
    # Until tables say which variant a call gets, a caller names all of it.
    selectors=_MMA_CHOICES,
    block=("32 * warps", "1", "1"),
    grid=("ceildiv(n, block_rows)", "1", "1"),
    # Partial sums of each warp, padded by 4 floats; two sets where one tile follows another.
    shared_bytes="4 * warps * m * (rows + 4) * (1 + persistent)",
    min_sm="80 + 10 * pdl",
    programmatic="pdl",
    # Two blocks a multiprocessor: one loads while the other sums.
    budget=Budget(
        registers=168, load_bytes="16", in_flight_bytes="64", warps="2 * warps", dram_bound="1"
    ),
)

ANY = Declaration(
    name="gemv_any",
    parameters=(
        *(Parameter(name, "pointer", element="dtype", align=2) for name in _POINTERS),
        *(Parameter(name, "i32") for name in ("n", "k", "x_rows")),
        *(Parameter(name, "i64") for name in _STRIDES),
    ),
    choices=_ANY_CHOICES,
    selectors=_ANY_CHOICES,
    block=("32 * warps", "1", "1"),
    grid=("ceildiv(n, rows)", "1", "1"),
    shared_bytes="4 * warps * m * (rows + 4)",
    # Single elements come through the L1, so only `wide` variants have streamed loads.
    budget=Budget(
        registers=128,
        load_bytes="16 * wide",
        in_flight_bytes="64 * wide",
        warps="2 * warps",
        dram_bound="wide",
    ),
)

# (side, rows, warps, unroll) by m: weights are operand a or b of the matrix instruction.
_PLAIN = {
    1: (("a", 2, 8, 4), ("a", 4, 8, 2)),
    2: (("a", 4, 8, 2), ("a", 8, 8, 4)),
    4: (("a", 8, 8, 4), ("a", 8, 16, 2), ("a", 16, 8, 2)),
    8: (("b", 4, 8, 4), ("b", 8, 8, 2), ("b", 8, 8, 4), ("b", 16, 5, 4), ("b", 16, 8, 2)),
}
# As above, with `persistent`; all of these ask the L2 ahead and start with programmatic launch.
_DEPENDENT = {
    1: (("a", 4, 8, 2, 0), ("a", 8, 8, 1, 1), ("a", 8, 8, 2, 1), ("a", 8, 4, 2, 1)),
    2: (("a", 4, 8, 2, 0), ("a", 8, 8, 4, 0), ("a", 8, 8, 2, 1), ("a", 16, 4, 2, 1)),
    4: (("a", 8, 16, 2, 0), ("a", 8, 8, 4, 1), ("a", 16, 4, 4, 1), ("b", 8, 8, 2, 1)),
    8: (("b", 8, 8, 2, 0), ("b", 8, 8, 4, 1), ("b", 16, 8, 1, 1), ("b", 16, 8, 2, 0)),
}
_GENERAL = {1: ("a", 4, 8, 1), 2: ("a", 8, 8, 1), 4: ("b", 8, 8, 1), 8: ("b", 16, 8, 1)}


def _mma(dtype: str, m: int, tuning: tuple[str | int, ...], pdl: int) -> Variant:
    side, rows, warps, unroll, *more = tuning
    values = (dtype, m, side, rows, warps, unroll, *(more or [0]), 0, pdl, 0, pdl)
    return dict(zip(_MMA_CHOICES, values, strict=True))


SPECS = (
    KernelSpec(
        MMA,
        tuple(
            _mma(dtype, m, tuning, pdl)
            for dtype in _DTYPES
            for pdl, table in enumerate((_PLAIN, _DEPENDENT))
            for m, tunings in table.items()
            for tuning in tunings
        ),
        "sonata_aot.kernels.gemv_mma.device:gemv",
        default=False,
    ),
    KernelSpec(
        ANY,
        tuple(
            {**selectors, **dict(zip(_ANY_CHOICES[3:], _GENERAL[int(selectors["m"])], strict=True))}
            for selectors in product(dtype=_DTYPES, m=_GENERAL, wide=[0, 1])
        ),
        "sonata_aot.kernels.gemv_mma.general:gemv_any",
        default=False,
    ),
)
