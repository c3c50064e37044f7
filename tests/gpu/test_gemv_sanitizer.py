"""Every binary once, in small, for compute-sanitizer.

    PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer --tool memcheck \
        python -m pytest tests/gpu -k sanitizer

and the same with `--tool racecheck`. Without torch's cache, each tensor is an allocation of its
own, so that memcheck sees the first byte past its end.
"""

from __future__ import annotations

from typing import Any

import pytest

from gemv_cases import DTYPES, NAN, Answer, Verdicts, launch, random, settled, torch
from sonata_aot.artifacts.declaration import Variant
from sonata_aot.loader import Kernels

N, K = 37, 264


def operands(dtype: str, m: int, k: int = K) -> Any:
    """Of exactly the size of what is read: nothing lies behind the last row."""
    kind = DTYPES[dtype]
    return random(m, k, dtype=kind), random(N, k, dtype=kind), random(N, dtype=kind)


def check(verdicts: Verdicts, case: str, operands: Any, call: Any) -> None:
    x, weight, bias = operands
    for given in (bias, None):
        out = torch.full((x.shape[0], N), NAN, device="cuda", dtype=x.dtype)
        call(x, weight, given, out)
        verdicts.add(case, Answer.of(x, weight, given).wrong(out))


def variants(kernels: Kernels, dtype: str) -> list[Variant]:
    found = [loaded.binary.variant for loaded in kernels.table("gemv").all().values()]
    return [variant for variant in found if variant["dtype"] == dtype]


@pytest.mark.parametrize("dtype", DTYPES)
def test_sanitizer_sees_every_variant_of_the_fast_path(kernels: Kernels, dtype: str):
    verdicts = Verdicts()
    for variant in variants(kernels, dtype):
        tensors = operands(dtype, int(variant["m"]))
        for constant in {False, bool(variant["pdl"])}:
            call = kernels.gemv.using(variant, launch(0, 64 * constant, 0), constant=constant)
            check(verdicts, str(dict(variant)), tensors, call)
    verdicts.check()


@pytest.mark.parametrize("dtype", DTYPES)
def test_sanitizer_sees_blocks_of_several_tiles(kernels: Kernels, dtype: str):
    persistent = [v for v in variants(kernels, dtype) if v["persistent"]]
    if not persistent:
        pytest.skip("no variant has several tiles a block")
    processors = torch.cuda.get_device_properties(0).multi_processor_count
    n, verdicts = 40 * processors + 3, Verdicts()
    weight, bias = random(n, 40, dtype=DTYPES[dtype]), random(n, dtype=DTYPES[dtype])
    for variant in persistent:
        x = random(int(variant["m"]), 40, dtype=DTYPES[dtype])
        out = torch.full((x.shape[0], n), NAN, device="cuda", dtype=x.dtype)
        kernels.gemv.using(variant, launch(1, 64), constant=True)(x, weight, bias, out)
        verdicts.add(str(dict(variant)), Answer.of(x, weight, bias).wrong(out))
    verdicts.check()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("layout", ["x off", "weight off", "odd K", "one row for all"])
def test_sanitizer_sees_every_layout(kernels: Kernels, layout: str, dtype: str):
    verdicts = Verdicts()
    for m in (1, 2, 3, 4, 7, 8):
        x, weight, bias = operands(dtype, m, K - 1 if layout == "odd K" else K)
        if layout == "x off":
            x = random(m * K + 1, dtype=x.dtype)[1:].view(m, K)
        elif layout == "weight off":
            weight = random(N * K + 3, dtype=x.dtype)[3:].view(N, K)
        elif layout == "one row for all":
            x, weight = x[:1].clone().expand(m, K), weight[:1].clone().expand(N, K)
        check(verdicts, f"M={m}", (x, weight, bias), kernels.gemv)
    verdicts.check()


@pytest.mark.parametrize("dtype", DTYPES)
def test_sanitizer_sees_bound_calls_and_what_comes_next(kernels: Kernels, dtype: str):
    verdicts = Verdicts()
    for m in (1, 2, 4, 8):
        x, weight, bias = operands(dtype, m)
        for rows in (1, N):
            upcoming = random(rows, 40, dtype=x.dtype)
            bound = settled(kernels.gemv.bind(weight, bias, upcoming=upcoming), x)
            out = torch.full((m, N), NAN, device="cuda", dtype=x.dtype)
            verdicts.add(f"M={m}", Answer.of(x, weight, bias).wrong(bound(x, out)))
    verdicts.check()
