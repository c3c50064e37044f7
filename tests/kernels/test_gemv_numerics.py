"""What the GEMV computes, with real values and no GPU: its PTX is run in numpy.

All inputs have NaN around them, and so has what is written to.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from kernel_runs import Kernel
from ptx_machine import Buffer, Fault, Machine, Memory
from ptx_numbers import from_bf16, to_bf16
from sonata_aot.artifacts import ArtifactSet, open_artifacts
from sonata_aot.kernels import Variant

if TYPE_CHECKING:
    from tests.conftest import BuildCases

Case = tuple[str, str, Variant]
Array = Any

# m, side, rows, warps, unroll, persistent.
FAST = [
    (1, "a", 4, 8, 2, 0),
    (2, "a", 8, 8, 4, 0),
    (4, "a", 16, 8, 2, 0),
    (4, "a", 8, 8, 4, 0),
    (8, "b", 16, 5, 4, 0),
    (8, "b", 8, 8, 4, 0),
]
# By programmatic launch: of several tiles a block, and waiting for the kernel before.
LATE = [(2, "a", 8, 8, 2, 1), (4, "a", 16, 8, 4, 1), (8, "b", 16, 4, 2, 1)]
ANY = [(1, "a", 4, 8, 1), (2, "a", 8, 8, 1), (4, "b", 8, 8, 1), (8, "b", 16, 8, 1)]


def cases() -> list[Case]:
    names = ("m", "side", "rows", "warps", "unroll", "persistent")
    found: list[Case] = []
    for index, tuning in enumerate(FAST + LATE):
        pdl = int(tuning in LATE)
        dtype = ("bf16", "f16")[index % 2]
        variant = {"dtype": dtype, **dict(zip(names, tuning, strict=True)), "pdl": pdl}
        found.append(("sm90" if pdl else "sm86", "gemv", variant))
    for index, (m, *rest) in enumerate(ANY):
        dtype, wide = ("bf16", "f16")[index % 2], index // 2 % 2
        some = {"dtype": dtype, "m": m, "wide": wide}
        found.append(("sm86", "gemv_any", some | dict(zip(names[1:], rest, strict=False))))
        found.append(("sm86", "gemv_any", {**found[-1][2], "wide": 1 - wide}))
    return found


CASES = cases()
# How far rounding once moves a number at most, and what sums in float32 lose of their magnitudes.
ROUNDING = {"bf16": 2**-8, "f16": 2**-11}
SUMMING = 2**-20


@pytest.fixture(scope="module")
def family(build_cases: BuildCases) -> ArtifactSet:
    return open_artifacts(build_cases("numerics", CASES))


def name_of(case: Case) -> str:
    return "-".join(map(str, [case[0], case[1], *case[2].values()]))


@pytest.fixture(scope="module", params=CASES, ids=name_of)
def kernel(request: pytest.FixtureRequest, family: ArtifactSet) -> Kernel:
    return Kernel(family, request.param)


def some(cases: list[Case]) -> pytest.MarkDecorator:
    """For a test of these alone."""
    return pytest.mark.parametrize("kernel", cases, ids=name_of, indirect=True)


def encoded(values: Array, dtype: str) -> Array:
    values = np.asarray(values, np.float32)
    return to_bf16(values) if dtype == "bf16" else values.astype(np.float16).view(np.uint16)


def decoded(bits: Array, dtype: str) -> Array:
    return (from_bf16(bits) if dtype == "bf16" else bits.view(np.float16)).astype(np.float64)


@dataclass
class Rows:
    """A matrix in a buffer of NaN, of which the last row ends the buffer."""

    buffer: Buffer
    values: Array
    stride: int

    @classmethod
    def place(
        cls, memory: Memory, values: Array, name: str, pad: int, dtype: str, **o: Any
    ) -> Rows:
        rows, columns = values.shape
        stride = columns + pad
        flat = np.full((rows - 1) * stride + columns, 0xFFFF, np.uint16)
        view = np.lib.stride_tricks.as_strided(flat, values.shape, (2 * stride, 2))
        view[:] = encoded(values, dtype)
        return cls(memory.buffer(flat, name, **o), view, stride)


@dataclass
class Problem:
    """A call of the GEMV and its answer."""

    rows: int
    n: int
    k: int
    bias: bool
    pads: tuple[int, int, int] = (8, 16, 3)
    """Elements between rows of x, weight and out."""
    offsets: tuple[int, int] = (0, 0)
    """Bytes past a multiple of 16 at which x and weight start."""

    def solve(self, kernel: Kernel, **more: int) -> None:
        """Run it and hold the result against float64."""
        dtype = str(kernel.binary.variant["dtype"])
        random = np.random.default_rng(self.n * self.k)
        memory = Memory()
        x, weight, out = (
            Rows.place(memory, random.standard_normal(shape), name, pad, dtype, **options)
            for name, shape, pad, options in (
                ("x", (self.rows, self.k), self.pads[0], {"offset": self.offsets[0]}),
                ("weight", (self.n, self.k), self.pads[1], {"offset": self.offsets[1]}),
                ("out", (self.rows, self.n), self.pads[2], {"offset": 2, "writable": True}),
            )
        )
        out.values[:] = 0xFFFF
        bias = encoded(random.standard_normal(self.n), dtype)
        arguments: dict[str, Buffer | int | float] = {
            "x": x.buffer,
            "weight": weight.buffer,
            "bias": memory.buffer(bias, "bias", offset=2) if self.bias else 0,
            "out": out.buffer,
            "n": self.n,
            "k": self.k,
            "x_rows": self.rows,
            "x_stride": x.stride,
            "weight_stride": weight.stride,
            "out_stride": out.stride,
        }
        outcome = kernel.run(memory, arguments | more)
        assert outcome.steps > 0
        wide, weights = decoded(x.values, dtype), decoded(weight.values, dtype)
        expected, magnitude = wide @ weights.T, np.abs(wide) @ np.abs(weights).T
        if self.bias:
            expected = expected + decoded(bias, dtype)
            magnitude = magnitude + np.abs(decoded(bias, dtype))
        off = np.abs(decoded(out.values, dtype) - expected)
        bound = ROUNDING[dtype] * np.abs(expected) + SUMMING * magnitude
        assert (off <= bound).all(), f"{(~(off <= bound)).sum()} of {off.size} are wrong"
        # All of it, and nothing between its rows.
        marks = out.buffer.written
        strided = np.lib.stride_tricks.as_strided(marks, out.values.shape, (out.stride, 1))
        assert strided.all()
        assert marks.sum() == out.values.size


def fast(kernel: Kernel, block_rows: int, **changes: int) -> dict[str, int]:
    """What only `gemv` takes."""
    if kernel.binary.kernel != "gemv":
        return {}
    given = {
        "block_rows": block_rows,
        "constant": kernel.choice("pdl"),
        "ahead_skip": kernel.choice("rows"),
        "ahead_rows": kernel.choice("rows"),
        "ahead_blocks": 2,
        "upcoming": 0,
        "upcoming_bytes": 0,
    }
    return given | changes


def step(kernel: Kernel) -> int:
    """Elements of a row that a block takes in a turn of its main loop."""
    m, b = kernel.choice("m"), kernel.binary.variant["side"] == "b"
    parts = 16 // max(m, 2) if b else 8 // m
    return 32 * parts * kernel.choice("warps") * kernel.choice("unroll")


def test_results_are_those_of_float64(kernel: Kernel) -> None:
    rows, turn = kernel.choice("rows"), step(kernel)
    aligned = kernel.binary.kernel == "gemv" or kernel.choice("wide") == 1
    n = 2 * rows + 1
    tiles = 3 if kernel.choice("persistent") else 1
    for x_rows, bias, k in (
        (kernel.choice("m"), True, turn + (24 if aligned else 13)),
        (kernel.choice("m") // 2 + 1, False, 8 if aligned else 3),
        (1, True, 2 * turn),
    ):
        Problem(x_rows, n, k, bias).solve(kernel, **fast(kernel, tiles * rows))


@some([case for case in CASES if case[1] == "gemv_any"])
def test_rows_that_start_anywhere(kernel: Kernel) -> None:
    wide = kernel.choice("wide")
    pads, offsets = (3, 8 if wide else 5), (2, 0 if wide else 6)
    problem = Problem(kernel.choice("m"), 5, 64 if wide else 61, True, (*pads, 1), offsets)
    problem.solve(kernel)


@some([case for case in CASES if case[2].get("persistent")])
def test_where_tiles_end_and_what_is_asked_for_do_not_matter(kernel: Kernel) -> None:
    rows = kernel.choice("rows")
    for block_rows in (1, rows - 1, rows + 3, 4 * rows):
        n = 3 * rows + 5
        more = fast(kernel, block_rows, constant=block_rows % 2, ahead_blocks=99)
        Problem(kernel.choice("m"), n, 72, True).solve(kernel, **more)


@some([CASES[0], CASES[-1]])
def test_without_its_barrier_warps_would_race(kernel: Kernel, family: ArtifactSet) -> None:
    ptx = family.read(kernel.binary.ptx).decode()
    assert ptx.count("bar.sync") == 1
    broken = Kernel(family, (kernel.binary.arch, kernel.binary.kernel, kernel.binary.variant))
    broken.machine = Machine(re.sub(r"bar\.sync.*;", "", ptx))
    rows = kernel.choice("rows")
    with pytest.raises(Fault, match="a race: this reads what warp"):
        Problem(1, rows, 64, True).solve(broken, **fast(kernel, rows))
