"""Every variant of the fast path that was built, with every kind of launch that rules can name."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from gemv_cases import AROUND, DTYPES, NAN, Answer, Verdicts, bits, guarded, launch, torch
from sonata_aot.artifacts.declaration import Variant
from sonata_aot.loader import Kernels

# N x K: less than a tile and a vector a warp; rests of both; many tiles a block; and several of
# them, each of several steps.
SHAPES = ((1, 8), (37, 264), (20_011, 72), (4_300, 17_416))
# KB asked of the L2 ahead, and by how many blocks a multiprocessor further on. 1 GB is all.
AHEAD = ((0, 0), (64, 0), (2**20, 0), (64, 2), (2**20, 1))


@pytest.fixture(scope="module")
def operands() -> Iterator[Any]:
    """`operands(dtype, n, k)`: x, weight and bias, and the answers with and without the bias."""
    made: dict[tuple[str, int, int], Any] = {}

    def give(dtype: str, n: int, k: int) -> Any:
        if (dtype, n, k) not in made:
            kind = DTYPES[dtype]
            x, weight, bias = guarded(8, k, kind), guarded(n, k, kind), guarded(1, n, kind)[0]
            answers = Answer.of(x, weight), Answer.of(x, weight, bias)
            made[dtype, n, k] = x, weight, bias, answers
        return made[dtype, n, k]

    yield give
    made.clear()
    torch.cuda.empty_cache()


def variants(kernels: Kernels, dtype: str, m: int) -> list[Variant]:
    found = [loaded.binary.variant for loaded in kernels.table("gemv").all().values()]
    return [v for v in found if (v["dtype"], v["m"]) == (dtype, m)]


def launches(variant: Variant) -> list[tuple[dict[str, int], bool]]:
    """Launch values, and whether the weight counts as constant."""
    blocks = range(5) if variant["persistent"] else (0,)
    found = [(launch(b), False) for b in blocks]
    if variant["pdl"]:
        found += [(launch(b, *ahead), True) for b in blocks for ahead in AHEAD]
    return found


def name(variant: Variant) -> str:
    return "{side}{rows} w{warps} u{unroll} persistent={persistent} pdl={pdl}".format(**variant)


@pytest.mark.parametrize("m", [1, 2, 4, 8])
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_variant_and_launch(kernels: Kernels, operands: Any, dtype: str, m: int):
    """A variant's sums are of one order, however it is launched: so all its launches agree."""
    found, verdicts = variants(kernels, dtype, m), Verdicts()
    assert found, "the artifacts lack this dtype and number of rows"
    for n, k in SHAPES:
        x, weight, bias, answers = operands(dtype, n, k)
        for variant in found:
            calls = [
                kernels.gemv.using(variant, values, constant=constant)
                for values, constant in launches(variant)
            ]
            for rows in range(1, m + 1):
                given, answer = (bias, answers[1]) if rows % 2 else (None, answers[0])
                buffer = torch.full(
                    (len(calls), rows + 1, n + 5), AROUND, device="cuda", dtype=x.dtype
                )
                outs = buffer[:, :rows, 2 : 2 + n].fill_(NAN)
                for call, out in zip(calls, outs, strict=True):
                    call(x[:rows], weight, given, out)
                case = f"{name(variant)}: {rows} rows, N={n} K={k}"
                verdicts.add(case, answer.wrong(outs[0]))
                verdicts.add(f"{case}, launches", bits(outs) != bits(outs[:1]))
                outs.fill_(AROUND)
                verdicts.add(f"{case}, around the output", buffer != AROUND)
    verdicts.check()
