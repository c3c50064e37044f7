"""Every kernel of the scan and of its stages in small, for compute-sanitizer.

As `test_gemv_sanitizer` says; each operand is an allocation of its own, of just its size.
"""

from __future__ import annotations

from typing import Any

import pytest

from sonata_aot.loader import Kernels
from ssd_problems import BOUNDS, DTYPES, check, errors, pairs, problem, segments, sequences, torch

# A whole tile and a part of one, in two rows.
TOKENS = 70
OPTIONS = {"D": "channels", "z": True, "initial_states": torch.float32}


def alone(arguments: dict[str, Any]) -> dict[str, Any]:
    """The same with nothing before or behind the elements of a tensor."""
    return {
        name: value.clone(memory_format=torch.contiguous_format)
        if isinstance(value, torch.Tensor)
        else value
        for name, value in arguments.items()
    }


# racecheck is right about two tiles only: docs/ssd.md.
@pytest.mark.parametrize("tiles", [2, 3], ids=["two tiles", "reuse"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_sanitizer_sees_the_scan_of_every_size(kernels: Kernels, dtype: str, tiles: int):
    for headdim, dstate in pairs(kernels, dtype):
        sizes = {"heads": 2, "headdim": headdim, "dstate": dstate, "dtype": DTYPES[dtype]}
        tokens = (tiles - 1) * tile_of(kernels, headdim, dstate) + 6
        rows = alone(problem(2, tokens, **sizes, **OPTIONS))
        packed = alone(problem(1, tokens, **sizes, **OPTIONS, return_varlen_states=True))
        packed |= sequences(20, 0, tokens - 20)
        for count in (1, 2):
            with segments(kernels, count):
                check(kernels, rows, (headdim, dstate, count))
                check(kernels, packed, (headdim, dstate, count, "packed"))


def tile_of(kernels: Kernels, headdim: int, dstate: int) -> int:
    """Tokens of a tile of the scan of this size."""
    found = (loaded.binary.variant for loaded in kernels.table("ssd_scan").all().values())
    (tile,) = {v["tile"] for v in found if (v["headdim"], v["dstate"]) == (headdim, dstate)}
    return int(tile)


@pytest.mark.parametrize("dtype", DTYPES)
def test_sanitizer_sees_the_scan_copy_rows_that_are_not_aligned(kernels: Kernels, dtype: str):
    arguments = alone(problem(2, TOKENS, heads=2, dtype=DTYPES[dtype], **OPTIONS))
    for name in ("x", "z", "B", "C"):
        tensor = arguments[name]
        flat = torch.empty(tensor.numel() + 1, device="cuda", dtype=tensor.dtype)[1:]
        arguments[name] = flat.view_as(tensor).copy_(tensor)
    check(kernels, arguments, "not aligned")


@pytest.mark.parametrize("dtype", DTYPES)
def test_sanitizer_sees_the_stages_of_every_size(kernels: Kernels, dtype: str):
    out, states = BOUNDS[DTYPES[dtype]]
    for headdim, dstate in pairs(kernels, dtype):
        sizes = {"heads": 2, "headdim": headdim, "dstate": dstate, "dtype": DTYPES[dtype]}
        arguments = alone(problem(1, TOKENS, **sizes, **OPTIONS))
        arguments["chunk_size"] = 40
        packed = {**arguments, "seq_idx": sequences(20, TOKENS - 20)["seq_idx"]}
        for given in (arguments, packed):
            found = errors(kernels.ssd.combined(**given), given)
            assert found[0] <= 1.5 * out, (headdim, dstate)
            assert found[1] <= 1.5 * states, (headdim, dstate)
