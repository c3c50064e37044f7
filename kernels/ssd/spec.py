"""Declarations of the SSD scan of Mamba2, forward.

The one-pass scan is two kernels: `ssd_prepare` makes what heads share, `ssd_scan` goes through the
sequence. The docstrings of their modules say what each parameter is.
"""

import itertools
from collections.abc import Iterable

from ..models import DSTATES, MODELS
from ..spec import Budget, Declaration, KernelSpec, Parameter, Variant, product


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
        _pointer("x", "dtype", 16),
        _pointer("cb", "f32", 16),
        _pointer("decay", "f32", 16),
        _pointer("starts", "i32", 16),
        *_integers("batch", "seqlen", "tiles", "heads", "groups", "channels"),
        *_integers("dt_kind", "bias_kind", "rates_kind", "softplus"),
        Parameter("low", "f32"),
        Parameter("high", "f32"),
        *_strides(*_of("dt", "batch", "token", "head")),
        *_strides(*_of("b", "batch", "token", "group"), *_of("c", "batch", "token", "group")),
        *_strides(*_of("seq", "batch", "token"), *_of("x", "batch", "token", "head")),
    ),
    choices=("dtype", "dstate", "tile", "pdl"),
    selectors=("dtype", "dstate", "tile", "pdl"),
    # As many warps as a tile has 16x16 blocks on and below its diagonal.
    block=(f"32 * {_TRIANGLE}", "1", "1"),
    grid=("batch * tiles", f"groups + ceildiv(heads, {_TRIANGLE})", "1"),
    min_sm="80 + 10 * pdl",
    budget=Budget(registers=72, warps="27"),
)

_DTYPES = ("bf16", "f16")
_SCAN_CHOICES = ("dtype", "headdim", "dstate", "width", "tile", "packed", "outputs", "pdl")
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
        _pointer("cu_seqlens", "i32", 4),
        _pointer("end_states", "dtype", 16),
        *_integers("batch", "seqlen", "tiles", "segments", "segment_tiles"),
        *_integers("heads", "groups", "group_heads", "d_kind", "initial_kind", "sequences"),
        *_strides(*_of("x", "batch", "token", "head")),
        *_strides(*_of("b", "batch", "token", "group"), *_of("c", "batch", "token", "group")),
        *_strides(*_of("z", "batch", "token", "head"), *_of("out", "batch", "token", "head")),
        *_strides(*_of("d", "head", "channel")),
        *_strides(*_of("initial", "batch", "segment", "head")),
        *_strides(*_of("final", "batch", "segment", "head")),
    ),
    choices=_SCAN_CHOICES,
    selectors=("dtype", "headdim", "dstate", "packed", "outputs", "pdl"),
    block=("128 + 256 * outputs", "1", "1"),
    grid=("segments * batch", "ceildiv(headdim, width) * heads", "1"),
    # Shape.shared_bytes: tiles of x, B, decays and starts, states, D.
    min_sm="80 + 10 * pdl",
    programmatic="pdl",
    shared_bytes=(
        f"3 * tile * (2 * width + 16) + 2 * tile * (2 * {_COLUMNS} + 16) "
        f"+ outputs * 4 * width * {_COLUMNS} + 48 * tile + outputs * 4 * width"
    ),
    budget=Budget(
        registers=252,
        # A block where there are outputs; else two, or three on sm90 without sequences. On sm86
        # shared memory may have room for one only.
        warps="4 + 8 * outputs + 4 * pdl * (1 - outputs) * (2 - packed)",
        # x, and out.
        tile_bytes="2 * width * tile * (1 + outputs)",
        # Of those that own tokens, every other set of four; and those that own the state.
        tile_warps="4",
    ),
)
# (width, tile) by headdim and dstate: what fits the 99 KB that a block has on sm86, and into 168
# registers a thread.
_CUTS = {
    **{(headdim, dstate): (headdim, 64) for headdim in (32, 64) for dstate in DSTATES[:4]},
    **{(128, dstate): (64, 64) for dstate in DSTATES[:4]},
    **{(headdim, 256): (32, 32) for headdim in (32, 64, 128)},
    **{(80, dstate): (80, 32) for dstate in DSTATES[:4]},
    (80, 256): (16, 32),
    **{(96, dstate): (96, 32) for dstate in DSTATES[:3]},
    (96, 128): (48, 64),
    (96, 256): (32, 32),
}
# Widths of those that would not do with the registers there are, if they mask sequences too.
_PACKED_WIDTHS = {(128, 128): 32, (96, 256): 16}
# Three blocks of four warps a multiprocessor where only states are computed; else the registers
# are worth more than a second block.
_RESIDENT = "3 - 2 * max(outputs, packed)"


def _scan(dtype: str, pair: tuple[int, int], packed: int, outputs: int, pdl: int) -> Variant:
    width, tile = _CUTS[pair]
    if packed:
        width = _PACKED_WIDTHS.get(pair, width)
    values = (dtype, *pair, width, tile, packed, outputs, pdl)
    return dict(zip(_SCAN_CHOICES, values, strict=True))


def _scans(pairs: Iterable[tuple[int, int]]) -> tuple[Variant, ...]:
    places = itertools.product(_DTYPES, sorted(pairs), (0, 1), (0, 1), (0, 1))
    return tuple(_scan(*place) for place in places)


def _prepares(pairs: Iterable[tuple[int, int]]) -> tuple[Variant, ...]:
    tiles = sorted({(dstate, _CUTS[headdim, dstate][1]) for headdim, dstate in pairs})
    return tuple(
        {"dtype": dtype, "dstate": dstate, "tile": tile, "pdl": pdl}
        for dtype, (dstate, tile), pdl in itertools.product(_DTYPES, tiles, (0, 1))
    )


PASS = Declaration(
    name="ssd_pass",
    parameters=(
        _pointer("own", "f32", 16),
        _pointer("totals", "f32", 4),
        _pointer("initial", "u8", 16),
        _pointer("states", "f32", 16),
        *_integers("batch", "parts", "ratio", "heads", "size", "initial_kind"),
        *_strides(*_of("initial", "batch", "head")),
    ),
    choices=("threads",),
    selectors=("threads",),
    block=("threads", "1", "1"),
    grid=("ceildiv(size, 4 * threads)", "heads", "batch"),
    budget=Budget(registers=48, warps="40"),
)

# Programmatic launch is there from sm90 on, and a variant that does without is not needed there.
_MAX_SM = "89 + 1000 * pdl"

SPECS = (
    KernelSpec(
        PREPARE,
        _prepares(_CUTS),
        "sonata_aot.kernels.ssd.prepare:ssd_prepare",
        resident="3",
        shipped=_prepares(MODELS),
        max_sm=_MAX_SM,
    ),
    KernelSpec(
        SCAN,
        _scans(_CUTS),
        "sonata_aot.kernels.ssd.scan:ssd_scan",
        resident=_RESIDENT,
        shipped=_scans(MODELS),
        max_sm=_MAX_SM,
    ),
    KernelSpec(PASS, product(threads=[256]), "sonata_aot.kernels.ssd.passing:ssd_pass"),
)
