"""What a thread of the GEMV reads and writes, at sizes that no test could run, off its PTX."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import pytest

from ptx_walk import Access, Program
from sonata_aot.artifacts import ArtifactSet, open_artifacts
from sonata_aot.kernels import Variant

if TYPE_CHECKING:
    from tests.conftest import BuildCases

MOST = 2**31 - 1
NAMES = ("x", "weight", "bias", "out", "upcoming")
BASES = {name: place << 50 for place, name in enumerate(NAMES, start=1)}
PIECE = 4096
# Bytes that a block asks for of what comes next: for some of its threads a piece, for one a rest.
UPCOMING = 5 * PIECE + 16
CASES = {
    "gemv": [
        {"m": 2, "side": "a", "rows": 4, "warps": 8, "unroll": 2, "persistent": 0, "pdl": 0},
        {"m": 8, "side": "b", "rows": 16, "warps": 5, "unroll": 4, "persistent": 0, "pdl": 0},
        {"m": 1, "side": "a", "rows": 8, "warps": 8, "unroll": 2, "persistent": 1, "pdl": 1},
        {"m": 4, "side": "b", "rows": 8, "warps": 8, "unroll": 2, "persistent": 1, "pdl": 1},
        {"m": 8, "side": "b", "rows": 16, "warps": 8, "unroll": 1, "persistent": 1, "pdl": 1},
    ],
    "gemv_any": [
        {"m": 1, "wide": 0, "side": "a", "rows": 4, "warps": 8, "unroll": 1},
        {"m": 8, "wide": 0, "side": "b", "rows": 16, "warps": 8, "unroll": 1},
        {"m": 2, "wide": 1, "side": "a", "rows": 8, "warps": 8, "unroll": 1},
    ],
}


@dataclass(frozen=True)
class Kernel:
    name: str
    variant: Variant
    program: Program

    def choice(self, name: str) -> int:
        return int(self.variant.get(name, 0))

    @property
    def step(self) -> int:
        """Elements of a row that a block takes in a turn of its main loop."""
        m, b = self.choice("m"), self.variant["side"] == "b"
        parts = 16 // max(m, 2) if b else 8 // m
        return 32 * parts * self.choice("warps") * self.choice("unroll")

    def walk(
        self, threads: Sequence[int], n: int, k: int, *, block: int = 0, block_rows: int = 0
    ) -> list[Access]:
        """What these threads access with `m` rows of x; with one too, each access is checked."""
        rows, m = self.choice("rows"), self.choice("m")
        block_rows = block_rows or rows
        strides = k + 8, k + 16, n + 1
        first, end = block * block_rows, min(n, (block + 1) * block_rows)
        turns = [-(-k // self.step), -(-(end - first) // rows)][: len(self.program.loops)]
        found = []
        for x_rows, constant in dict.fromkeys([(1, 0), (m, self.choice("pdl"))]):
            *pointers, upcoming = BASES.values()
            arguments = [*pointers, n, k, x_rows]
            if self.name == "gemv":
                # A huge share of rows to ask the L2 for, from far on.
                arguments += [block_rows, constant, *strides, MOST, MOST, MOST]
                arguments += [upcoming, UPCOMING]
            else:
                arguments += strides
            areas = {
                "x": (0, x_rows, strides[0], 0, k),
                "weight": (first, end, strides[1], 0, k),
                "bias": (0, 1, n, first, end),
                "out": (0, x_rows, strides[2], first, end),
            }
            walks = [self.program.walk(arguments, thread, block, turns) for thread in threads]
            found = [access for accesses in walks for access in accesses]
            for access in found:
                if access.address >> 50 == upcoming >> 50:
                    start = access.address - upcoming - block * UPCOMING
                    assert (access.kind, start % PIECE, access.size % 16) == ("prefetch", 0, 0)
                    assert 0 < access.size <= min(PIECE, UPCOMING - start), access
                else:
                    self.check(access, areas, n)
        return found

    def check(self, access: Access, areas: dict[str, tuple[int, ...]], n: int) -> None:
        name = next(name for name, base in BASES.items() if access.address >> 50 == base >> 50)
        low, high, stride, left, right = areas[name]
        row, column = divmod((access.address - BASES[name]) // 2, stride)
        if access.kind == "prefetch":
            # A hint; what rows it names is up to the caller, but they are this weight's.
            assert (name, access.size % 16) == ("weight", 0)
            low, high = 0, n
        else:
            assert access.kind == ("store" if name == "out" else "load")
        assert access.address % min(access.size, 16) == 0
        assert low <= row < high, access
        assert left <= column, access
        assert column + access.size // 2 <= right, access


def case_of(name: str, rest: Variant) -> tuple[str, str, Variant]:
    return "sm90" if rest.get("pdl") else "sm86", name, {"dtype": "bf16", **rest}


PARAMS = [case_of(name, rest) for name, variants in CASES.items() for rest in variants]


@pytest.fixture(scope="module")
def family(build_cases: BuildCases) -> ArtifactSet:
    return open_artifacts(build_cases("limits", PARAMS))


@pytest.fixture(
    scope="module",
    params=PARAMS,
    ids=lambda case: "-".join(map(str, [case[1], *case[2].values()])),
)
def kernel(request: pytest.FixtureRequest, family: ArtifactSet) -> Kernel:
    (binary,) = (
        b for b in family.manifest.binaries if (b.arch, b.kernel, b.variant) == request.param
    )
    return Kernel(binary.kernel, binary.variant, Program(family.read(binary.ptx).decode()))


def corners(kernel: Kernel) -> list[int]:
    """The first and the last thread of the first and the last warp, and one from between."""
    last = 32 * kernel.choice("warps") - 1
    return [0, 31, 77, last - 31, last]


def test_a_block_reads_each_element_of_its_weights_once_and_writes_each_result(
    kernel: Kernel,
) -> None:
    rows, aligned = kernel.choice("rows"), kernel.name == "gemv" or kernel.choice("wide")
    n = 2 * rows + 1 if kernel.choice("persistent") else rows - 1
    k = kernel.step + (24 if aligned else 13)
    threads = range(32 * kernel.choice("warps"))
    block_rows = n if kernel.choice("persistent") else rows
    found = kernel.walk(threads, n, k, block_rows=block_rows)
    base, stride = BASES["weight"], k + 16
    read = Counter(
        divmod((access.address - base) // 2 + i, stride)
        for access in found
        if access.kind == "load" and access.address >> 50 == base >> 50
        for i in range(access.size // 2)
    )
    assert read == Counter((row, column) for row in range(n) for column in range(k))
    written = Counter(access.address for access in found if access.kind == "store")
    m = kernel.choice("m")
    assert written == Counter(
        BASES["out"] + 2 * (row * (n + 1) + column) for row in range(m) for column in range(n)
    )


def test_a_block_asks_for_each_byte_of_its_share_of_what_comes_next_once(kernel: Kernel) -> None:
    rows = kernel.choice("rows")
    found = kernel.walk(range(32 * kernel.choice("warps")), 9 * rows, 8, block=7)
    asked = [a for a in found if a.address >> 50 == BASES["upcoming"] >> 50]
    first, pieces = BASES["upcoming"] + 7 * UPCOMING, range(0, UPCOMING, PIECE)
    expected = [Access("prefetch", first + at, min(PIECE, UPCOMING - at)) for at in pieces]
    assert asked == (expected if kernel.choice("pdl") else [])


def test_rows_of_the_greatest_length(kernel: Kernel) -> None:
    aligned = kernel.name == "gemv" or kernel.choice("wide")
    rows = kernel.choice("rows")
    n = 2 * rows + 1 if kernel.choice("persistent") else rows
    for k in (2**30, MOST - 7) if aligned else (2**30 + 1, MOST - 1, MOST):
        found = kernel.walk(corners(kernel), n, k, block_rows=n)
        assert any(access.kind == "load" for access in found)


def test_the_greatest_number_of_rows(kernel: Kernel) -> None:
    rows = kernel.choice("rows")
    last = (MOST - 1) // rows
    found = kernel.walk(corners(kernel), MOST, 8, block=last)
    assert any(access.kind == "store" for access in found)
    if kernel.choice("persistent"):
        for block_rows, block in ((MOST, 0), (2**30 + 3, 0), (2**30 + 3, 1), (MOST - 1, 1)):
            kernel.walk(corners(kernel), MOST, 8, block=block, block_rows=block_rows)
