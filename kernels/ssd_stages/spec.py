"""Declarations of the SSD scan's stages; their modules' docstrings say what parameters are."""

from ..models import DSTATES, HEADDIMS, MODELS
from ..spec import Budget, Declaration, KernelSpec, Parameter, Variant, product


def _pointer(name: str, element: str, align: int) -> Parameter:
    return Parameter(name, "pointer", element=element, align=align)


# Of any of three dtypes, which a number says.
def _any(*names: str, align: int = 2) -> tuple[Parameter, ...]:
    return tuple(_pointer(name, "u8", align) for name in names)


def _rows(*names: str) -> tuple[Parameter, ...]:
    return tuple(_pointer(name, "dtype", 16) for name in names)


def _floats(*names: str, align: int = 4) -> tuple[Parameter, ...]:
    return tuple(_pointer(name, "f32", align) for name in names)


def _integers(*names: str) -> tuple[Parameter, ...]:
    return tuple(Parameter(name, "i32") for name in names)


def _strides(name: str, *dimensions: str) -> tuple[Parameter, ...]:
    return tuple(Parameter(f"{name}_{dimension}", "i64") for dimension in dimensions)


_SEQUENCES = _pointer("seq_idx", "i32", 4)
_SIZES = ("batch", "seqlen", "chunks", "chunk_size")
_DTYPES = ("bf16", "f16")
_PER_HEAD = ("batch", "head", "chunk")

CUMSUM = Declaration(
    name="ssd_chunk_cumsum",
    parameters=(
        *_any("dt", "dt_bias", "rates"),
        *_floats("steps", "decay"),
        *_integers(*_SIZES, "heads", "dt_kind", "bias_kind", "rates_kind", "softplus"),
        Parameter("low", "f32"),
        Parameter("high", "f32"),
        *_strides("dt", "batch", "token", "head"),
        *_strides("bias", "head"),
        *_strides("rates", "head"),
    ),
    choices=(),
    selectors=(),
    block=("256", "1", "1"),
    grid=("ceildiv(heads, 32) * chunks * batch", "1", "1"),
    # Two tiles of 64 tokens, 33 numbers a token.
    shared_bytes="2 * 64 * 4 * 33",
    budget=Budget(registers=96),
)

BMM = Declaration(
    name="ssd_bmm_chunk",
    parameters=(
        *_rows("c", "b"),
        _SEQUENCES,
        _pointer("out", "u8", 8),
        *_integers(*_SIZES, "groups", "causal", "out_kind"),
        *_strides("c", "batch", "token", "group"),
        *_strides("b", "batch", "token", "group"),
        *_strides("seq", "batch", "token"),
        *_strides("out", "row"),
    ),
    choices=("dtype", "dstate"),
    selectors=("dtype", "dstate"),
    block=("128", "1", "1"),
    grid=("ceildiv(chunk_size, 64) * ceildiv(chunk_size, 64) * groups * chunks * batch", "1", "1"),
    # 64 rows of each, padded by 16 bytes, and the sequences of 64 tokens.
    shared_bytes="2 * 64 * (2 * dstate + 16) + 4 * 64",
    budget=Budget(registers=80),
)

STATE = Declaration(
    name="ssd_chunk_state",
    parameters=(
        *_rows("x", "b"),
        *_floats("steps", "decay"),
        _SEQUENCES,
        _pointer("states", "f32", 16),
        *_integers(*_SIZES, "heads", "group_heads"),
        *_strides("x", "batch", "token", "head"),
        *_strides("b", "batch", "token", "group"),
        *_strides("steps", *_PER_HEAD),
        *_strides("decay", *_PER_HEAD),
        *_strides("seq", "batch", "token"),
    ),
    choices=("dtype", "headdim", "dstate", "width", "columns"),
    selectors=("dtype", "headdim", "dstate"),
    block=("128", "1", "1"),
    grid=("ceildiv(headdim, width) * ceildiv(dstate, columns) * heads * chunks * batch", "1", "1"),
    # Two tiles of 64 rows of x and B, padded by 16 bytes, and three numbers a token.
    shared_bytes="2 * 64 * (2 * width + 16 + 2 * columns + 16 + 12)",
    budget=Budget(registers=168),
)

PASSING = Declaration(
    name="ssd_state_passing",
    parameters=(
        _pointer("states", "f32", 16),
        *_floats("decay"),
        *_any("initial", align=4),
        _SEQUENCES,
        *_any("out", align=16),
        _pointer("final", "f32", 16),
        *_integers(*_SIZES, "heads", "dim", "initial_kind", "out_kind"),
        *_strides("states", "batch", "chunk", "head"),
        *_strides("decay", *_PER_HEAD),
        *_strides("initial", "batch", "head"),
        *_strides("seq", "batch", "token"),
    ),
    choices=(),
    selectors=(),
    block=("128", "1", "1"),
    grid=("ceildiv(dim, 512) * heads * batch", "1", "1"),
    budget=Budget(registers=104),
)

SCAN = Declaration(
    name="ssd_chunk_scan",
    parameters=(
        _pointer("cb", "f32", 8),
        *_rows("x"),
        *_floats("steps", "decay"),
        *_rows("c"),
        *_any("states", align=16),
        *_any("d"),
        *_rows("z"),
        _SEQUENCES,
        *_rows("out"),
        *_integers(*_SIZES, "block_tiles", "heads", "group_heads", "states_kind", "d_kind"),
        *_strides("cb", "batch", "chunk", "group", "row"),
        *_strides("x", "batch", "token", "head"),
        *_strides("steps", *_PER_HEAD),
        *_strides("decay", *_PER_HEAD),
        *_strides("c", "batch", "token", "group"),
        *_strides("states", "batch", "chunk", "head"),
        *_strides("d", "head", "channel"),
        *_strides("z", "batch", "token", "head"),
        *_strides("seq", "batch", "token"),
    ),
    choices=("dtype", "headdim", "dstate", "width"),
    selectors=("dtype", "headdim", "dstate"),
    block=("128", "1", "1"),
    grid=(
        "ceildiv(headdim, width) * heads * ceildiv(chunk_size, 64 * block_tiles) * chunks * batch",
        "1",
        "1",
    ),
    # The state in 16 bits; two tiles of 64 rows of x, padded by 16 bytes, and two numbers a token;
    # D.
    shared_bytes="2 * width * max(dstate, 32) + 2 * 64 * (2 * width + 16 + 8) + 4 * width",
    budget=Budget(registers=168),
)


def _state(dtype: str, headdim: int, dstate: int) -> Variant:
    """A lane holds width * columns / 128 sums, of which there may be 80."""
    columns = min(max(dstate, 32), 64 if headdim == 96 else 128)
    width = 64 if headdim == 128 and columns == 128 else headdim
    names = ("dtype", "headdim", "dstate", "width", "columns")
    return dict(zip(names, (dtype, headdim, dstate, width, columns), strict=True))


def _scan(dtype: str, headdim: int, dstate: int) -> Variant:
    """Wide states are taken by halves, so that two blocks fit a multiprocessor's shared memory."""
    width = 64 if headdim == 128 else headdim
    return {"dtype": dtype, "headdim": headdim, "dstate": dstate, "width": width}


_ALL = [(t, p, n) for t in _DTYPES for p in HEADDIMS for n in DSTATES]
_SHIPPED = [(t, *pair) for t in _DTYPES for pair in MODELS]

SPECS = (
    KernelSpec(CUMSUM, ({},), "sonata_aot.kernels.ssd_stages.chunk_cumsum:ssd_chunk_cumsum"),
    KernelSpec(
        BMM,
        product(dtype=_DTYPES, dstate=DSTATES),
        "sonata_aot.kernels.ssd_stages.bmm_chunk:ssd_bmm_chunk",
        shipped=product(dtype=_DTYPES, dstate=sorted({dstate for _, dstate in MODELS})),
    ),
    KernelSpec(
        STATE,
        tuple(_state(*pair) for pair in _ALL),
        "sonata_aot.kernels.ssd_stages.chunk_state:ssd_chunk_state",
        shipped=tuple(_state(*pair) for pair in _SHIPPED),
    ),
    KernelSpec(PASSING, ({},), "sonata_aot.kernels.ssd_stages.state_passing:ssd_state_passing"),
    KernelSpec(
        SCAN,
        tuple(_scan(*pair) for pair in _ALL),
        "sonata_aot.kernels.ssd_stages.chunk_scan:ssd_chunk_scan",
        # Four blocks a multiprocessor, or three where the registers for that would not suffice.
        resident="4 - min(1, max(0, width - 64) + max(0, dstate - 128))",
        shipped=tuple(_scan(*pair) for pair in _SHIPPED),
    ),
)
