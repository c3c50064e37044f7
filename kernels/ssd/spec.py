"""Declarations of the SSD scan of Mamba2, forward.

The one-pass scan is two kernels: `ssd_prepare` makes what heads share, `ssd_scan` goes through the
sequence. The docstrings of their modules say what each parameter is.
"""

from ..spec import Budget, Declaration, KernelSpec, Parameter, Variant, product
from .shape import THREADS


def _pointer(name: str, element: str, align: int) -> Parameter:
    return Parameter(name, "pointer", element=element, align=align)


def _integers(*names: str) -> tuple[Parameter, ...]:
    return tuple(Parameter(name, "i32") for name in names)


def _strides(*names: str) -> tuple[Parameter, ...]:
    return tuple(Parameter(name, "i64") for name in names)


def _of(name: str, *dimensions: str) -> tuple[str, ...]:
    return tuple(f"{name}_{dimension}" for dimension in dimensions)


_ROW_BLOCKS = "ceildiv(tile, 16)"
_TRIANGLE = f"ceildiv({_ROW_BLOCKS} * ({_ROW_BLOCKS} + 1), 2)"

PREPARE = Declaration(
    name="ssd_prepare",
    parameters=(
        # Of any of three dtypes, which a number says.
        _pointer("dt", "u8", 2),
        _pointer("dt_bias", "u8", 2),
        _pointer("rates", "u8", 2),
        _pointer("b", "dtype", 16),
        _pointer("c", "dtype", 16),
        _pointer("seq_idx", "i32", 4),
        _pointer("cb", "f32", 16),
        _pointer("decay", "f32", 16),
        _pointer("starts", "i32", 16),
        *_integers("batch", "seqlen", "tiles", "heads", "groups"),
        *_integers("dt_kind", "bias_kind", "rates_kind", "softplus"),
        Parameter("low", "f32"),
        Parameter("high", "f32"),
        *_strides(*_of("dt", "batch", "token", "head")),
        *_strides(*_of("b", "batch", "token", "group"), *_of("c", "batch", "token", "group")),
        *_strides(*_of("seq", "batch", "token")),
    ),
    choices=("dtype", "dstate", "tile"),
    selectors=("dtype", "dstate", "tile"),
    # As many warps as a tile has 16x16 blocks on and below its diagonal.
    block=(f"32 * {_TRIANGLE}", "1", "1"),
    grid=("batch * tiles", f"groups + ceildiv(heads, {_TRIANGLE})", "1"),
    budget=Budget(),
)

_SCAN_CHOICES = ("dtype", "headdim", "dstate", "width", "tile")
_COLUMNS = "max(dstate, 32)"

SCAN = Declaration(
    name="ssd_scan",
    parameters=(
        _pointer("x", "dtype", 16),
        _pointer("b", "dtype", 16),
        _pointer("c", "dtype", 16),
        _pointer("d", "u8", 2),
        _pointer("z", "dtype", 16),
        _pointer("out", "dtype", 16),
        _pointer("cb", "f32", 16),
        _pointer("decay", "f32", 16),
        _pointer("starts", "i32", 16),
        _pointer("initial", "u8", 16),
        _pointer("final", "f32", 16),
        _pointer("totals", "f32", 4),
        *_integers("batch", "seqlen", "tiles", "segments", "segment_tiles"),
        *_integers("heads", "groups", "group_heads", "d_kind", "initial_kind"),
        *_strides(*_of("x", "batch", "token", "head")),
        *_strides(*_of("b", "batch", "token", "group"), *_of("c", "batch", "token", "group")),
        *_strides(*_of("z", "batch", "token", "head"), *_of("out", "batch", "token", "head")),
        *_strides(*_of("d", "head", "channel")),
        *_strides(*_of("initial", "batch", "segment", "head")),
        *_strides(*_of("final", "batch", "segment", "head")),
    ),
    choices=_SCAN_CHOICES,
    selectors=("dtype", "headdim", "dstate"),
    block=(str(THREADS), "1", "1"),
    grid=("ceildiv(headdim, width) * heads * segments * batch", "1", "1"),
    # Shape.shared_bytes: tiles of x, B, decays and starts, states, D.
    shared_bytes=(
        f"3 * tile * (2 * width + 16) + 2 * tile * (2 * {_COLUMNS} + 16) "
        f"+ 4 * width * {_COLUMNS} + 36 * tile + 4 * width"
    ),
    budget=Budget(),
)
# (width, tile) by headdim and dstate: what fits the 99 KB that a block has on sm86.
_CUTS = {
    (64, 128): (64, 64),
}


def _scan(dtype: str, headdim: int, dstate: int) -> Variant:
    return dict(
        zip(_SCAN_CHOICES, (dtype, headdim, dstate, *_CUTS[headdim, dstate]), strict=True)
    )


SPECS = (
    KernelSpec(
        PREPARE,
        product(dtype=["bf16", "f16"], dstate=[128], tile=[64]),
        "sonata_aot.kernels.ssd.prepare:ssd_prepare",
    ),
    KernelSpec(
        SCAN,
        tuple(_scan(dtype, *pair) for dtype in ("bf16", "f16") for pair in _CUTS),
        "sonata_aot.kernels.ssd.scan:ssd_scan",
    ),
)
