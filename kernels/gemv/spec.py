"""Declarations of the skinny GEMV, y = x W^T + bias, for 1 to 8 rows of x.

x is (x_rows, k), weight (n, k), bias (n,) or null, out (x_rows, n), all of `dtype`; the last
dimension of each is contiguous and the strides are in elements. A binary's `m` is the most rows
that it takes: 1, 2, 4 or 8.

`gemv` is the fast path: k is a multiple of 8 and rows of x and weight start 16-byte aligned.
`gemv_any` takes every other layout, `wide` if only that of x is another. n and k are anything that
an i32 holds.
"""

from ..spec import Budget, Declaration, KernelSpec, Parameter, Variant, product

_POINTERS = ("x", "weight", "bias", "out")
_STRIDES = ("x_stride", "weight_stride", "out_stride")
_DTYPES = ("bf16", "f16")
_GEMV_CHOICES = ("dtype", "m", "side", "rows", "warps", "unroll", "persistent", "pdl")
_ANY_CHOICES = ("dtype", "m", "wide", "side", "rows", "warps", "unroll")

GEMV = Declaration(
    name="gemv",
    parameters=(
        Parameter("x", "pointer", element="dtype", align=16),
        Parameter("weight", "pointer", element="dtype", align=16),
        Parameter("bias", "pointer", element="dtype", align=2),
        Parameter("out", "pointer", element="dtype", align=2),
        *(Parameter(name, "i32") for name in ("n", "k", "x_rows", "block_rows", "constant")),
        *(Parameter(name, "i64") for name in _STRIDES),
        *(Parameter(name, "i32") for name in ("ahead_skip", "ahead_rows", "ahead_blocks")),
        Parameter("upcoming", "pointer", element="dtype", align=16),
        Parameter("upcoming_bytes", "i32"),
    ),
    choices=_GEMV_CHOICES,
    # Which variant is best depends on n and k, so a table of rules says all of it.
    selectors=_GEMV_CHOICES,
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
    selectors=("dtype", "m", "wide"),
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

# (side, rows, warps, unroll, persistent) by m; `side`: which operand of the matrix instruction the
# weights are. The persistent ones pay only with programmatic launch, which has a block's next loads
# under way while the kernel before still runs; with `block_rows` equal to `rows` they do one tile a
# block, as the others do.
_TUNINGS = {
    1: (
        ("a", 2, 8, 4, 0),
        ("a", 4, 8, 2, 0),
        ("a", 4, 8, 1, 0),
        ("a", 8, 8, 1, 1),
        ("a", 8, 8, 2, 1),
        ("a", 8, 4, 2, 1),
        ("a", 4, 8, 2, 1),
        ("a", 4, 8, 4, 1),
        ("a", 16, 8, 1, 0),
        ("a", 16, 8, 1, 1),
        ("a", 16, 4, 1, 1),
    ),
    2: (
        ("a", 4, 8, 2, 0),
        ("a", 8, 8, 4, 0),
        ("a", 8, 16, 2, 0),
        ("a", 8, 8, 2, 0),
        ("a", 8, 8, 2, 1),
        ("a", 8, 4, 2, 1),
        ("a", 16, 4, 2, 1),
        ("a", 8, 8, 4, 1),
        ("a", 16, 8, 2, 1),
        ("a", 16, 8, 2, 0),
        ("a", 32, 8, 1, 0),
        ("a", 32, 8, 1, 1),
    ),
    4: (
        ("a", 8, 8, 4, 0),
        ("a", 8, 16, 2, 0),
        ("a", 16, 8, 2, 0),
        ("a", 8, 8, 4, 1),
        ("a", 16, 4, 4, 1),
        ("a", 16, 4, 2, 1),
        ("a", 16, 8, 2, 1),
        ("a", 8, 16, 2, 1),
        ("a", 16, 8, 4, 0),
        ("a", 16, 8, 4, 1),
        ("a", 32, 8, 2, 0),
        ("a", 32, 8, 2, 1),
        ("a", 32, 8, 1, 1),
        ("a", 32, 4, 2, 1),
        ("a", 8, 4, 4, 0),
        ("a", 16, 4, 4, 0),
        ("b", 8, 8, 2, 1),
        ("b", 16, 4, 2, 1),
    ),
    8: (
        ("b", 4, 8, 4, 0),
        ("b", 8, 8, 2, 0),
        ("b", 8, 8, 4, 0),
        ("b", 16, 5, 4, 0),
        ("b", 16, 8, 2, 0),
        ("b", 8, 8, 4, 1),
        ("b", 8, 8, 2, 1),
        ("b", 8, 16, 2, 1),
        ("b", 16, 8, 1, 1),
        ("b", 16, 8, 2, 1),
        ("b", 16, 4, 2, 1),
        ("b", 16, 16, 1, 1),
        ("b", 32, 8, 1, 0),
        ("b", 32, 8, 1, 1),
        ("b", 8, 4, 4, 0),
        ("b", 16, 4, 2, 0),
        ("b", 16, 4, 4, 0),
    ),
}
# On sm86, which has no programmatic launch, two blocks of these do not fit: 66 registers a thread.
_ONLY_PDL = {(2, ("a", 8, 16, 2, 0))}
_GENERAL = {1: ("a", 4, 8, 1), 2: ("a", 8, 8, 1), 4: ("b", 8, 8, 1), 8: ("b", 16, 8, 1)}


def _gemv(dtype: str, m: int, tuning: tuple[str | int, ...], pdl: int) -> Variant:
    return dict(zip(_GEMV_CHOICES, (dtype, m, *tuning, pdl), strict=True))


SPECS = (
    KernelSpec(
        GEMV,
        tuple(
            _gemv(dtype, m, tuning, pdl)
            for dtype in _DTYPES
            for pdl in (0, 1)
            for m, tunings in _TUNINGS.items()
            for tuning in tunings
            if pdl or not (tuning[-1] or (m, tuning) in _ONLY_PDL)
        ),
        "sonata_aot.kernels.gemv.device:gemv",
    ),
    KernelSpec(
        ANY,
        tuple(
            {**selectors, **dict(zip(_ANY_CHOICES[3:], _GENERAL[int(selectors["m"])], strict=True))}
            for selectors in product(dtype=_DTYPES, m=_GENERAL, wide=[0, 1])
        ),
        "sonata_aot.kernels.gemv.general:gemv_any",
    ),
)
