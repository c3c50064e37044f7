"""The copy of rows that are not aligned, run with real values through its PTX."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest

from kernel_runs import Kernel
from ptx_machine import Memory
from sonata_aot.artifacts import open_artifacts
from sonata_aot.kernels import Variant

if TYPE_CHECKING:
    from tests.conftest import BuildCases

VARIANT: Variant = {"threads": 256, "tokens": 8}


@pytest.fixture(scope="module")
def copy(build_cases: BuildCases) -> Kernel:
    case = ("sm86", "ssd_copy", VARIANT)
    return Kernel(open_artifacts(build_cases("ssd-copy", [case])), case)


# (batch, seqlen, rows, columns), strides in elements, and where the first element lies.
LAYOUTS = {
    "odd rows": ((2, 9, 3, 16), (500, 51, 17, 1), 1),
    "columns apart": ((1, 8, 2, 32), (600, 64, 1, 2), 0),
    "the same for all tokens and batches": ((3, 10, 1, 8), (0, 0, 8, 1), 3),
    "one element": ((2, 3, 2, 8), (0, 0, 0, 0), 5),
    "backwards": ((2, 17, 2, 8), (-300, -16, -8, -1), 600),
    "many rows": ((1, 2, 70, 64), (9000, 4480, 64, 1), 0),
    "one token": ((1, 1, 1, 8), (1, 1, 1, 1), 0),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_element_comes_from_where_the_strides_say(copy: Kernel, layout: str):
    shape, strides, start = LAYOUTS[layout]
    values = np.random.default_rng(0).integers(0, 2**16, 9216).astype(np.uint16)
    index = start + sum(
        np.arange(size).reshape([-1 if i == axis else 1 for i in range(4)]) * strides[axis]
        for axis, size in enumerate(shape)
    )
    memory = Memory()
    source = memory.buffer(values, "source")
    # A word beyond what is to be written.
    result = np.full(int(np.prod(shape)) + 8, 0xDEAD, np.uint16)
    target = memory.buffer(result, "target", writable=True)
    names = ("batch", "seqlen", "rows", "columns")
    sizes = dict(zip(names, shape, strict=True))
    steps = dict(zip(("batch", "token", "row", "column"), strides, strict=True))
    copy.run(
        memory,
        {
            "source": source.address + 2 * start,
            "target": target,
            **sizes,
            **{f"source_{name}": step for name, step in steps.items()},
        },
    )
    assert np.array_equal(result[:-8].reshape(shape), values[index])
    assert (result[-8:] == 0xDEAD).all()
