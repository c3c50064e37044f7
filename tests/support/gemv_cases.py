"""Data, references and verdicts that the GPU tests of the GEMV share."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest

torch: Any = pytest.importorskip("torch")

NAN = float("nan")
# What lies around an output; a bfloat16 and a float16 hold it exactly.
AROUND = 7.0
DTYPES = {"bf16": torch.bfloat16, "f16": torch.float16}
# How far one rounding moves a number at most: by this share of it, or this much among the smallest.
ROUNDING = {torch.bfloat16: (2**-8, 2**-134), torch.float16: (2**-11, 2**-25)}
# What fp32 sums of up to 14336 products may lose, as a share of the sum of their magnitudes.
SUMMING = 2**-18
# Elements of padding before and after what is guarded.
_PAD = 16


def random(*shape: int, dtype: Any, scale: float = 1.0) -> Any:
    """Normal random numbers on the device."""
    return (torch.randn(*shape, device="cuda") * scale).to(dtype)


def guarded(rows: int, columns: int, dtype: Any, *, start: int = 0, stride: int = 0) -> Any:
    """Random rows in a buffer of NaN, so that reading anything else shows.

    They start `start` elements past a 16-byte boundary and lie `stride` apart; without a stride
    they have NaN between them, and a multiple of 16 bytes from one to the next.
    """
    stride = stride or (columns + _PAD) // 8 * 8
    size = 2 * _PAD + start + (rows - 1) * stride + columns
    flat = torch.full((size,), NAN, device="cuda", dtype=dtype)
    view = flat.as_strided((rows, columns), (stride, 1), _PAD + start)
    view.copy_(random(rows, columns, dtype=dtype))
    return view


def output(rows: int, columns: int, dtype: Any, *, start: int = 0, gap: int = 0) -> tuple[Any, Any]:
    """A buffer, and an output in it of NaN."""
    size = 2 * _PAD + start + rows * (columns + gap)
    buffer = torch.full((size,), AROUND, device="cuda", dtype=dtype)
    out = buffer.as_strided((rows, columns), (columns + gap, 1), _PAD + start)
    return buffer, out.fill_(NAN)


def spoiled(buffer: Any, out: Any) -> Any:
    """Where the buffer was written outside `out`, a part of it."""
    kept = out.clone()
    out.fill_(AROUND)
    wrong = buffer != AROUND
    out.copy_(kept)
    return wrong


def bits(tensor: Any) -> Any:
    """A tensor of a 16-bit dtype as integers: NaN equals itself, and 0 is not -0."""
    return tensor.view(torch.int16)


@dataclass(frozen=True)
class Answer:
    """What a GEMV should give, and how far each element may be from it."""

    expected: Any
    bound: Any

    @classmethod
    def of(cls, x: Any, weight: Any, bias: Any = None) -> Answer:
        """In float64; the bound is that of fp32 sums, rounded once."""
        wide, weights = x.double(), weight.double()
        expected = wide @ weights.T
        magnitude = wide.abs() @ weights.abs_().T
        if bias is not None:
            expected += bias.double()
            magnitude += bias.double().abs()
        share, least = ROUNDING[x.dtype]
        return cls(expected, share * expected.abs() + SUMMING * magnitude + least)

    def wrong(self, y: Any) -> Any:
        """Which elements of the first rows are wrong; NaN is."""
        rows = y.shape[0]
        return ~((y.double() - self.expected[:rows]).abs() <= self.bound[:rows])

    def error(self, y: Any) -> Any:
        """Relative L2 error of the first rows."""
        expected = self.expected[: y.shape[0]]
        return (y.double() - expected).norm() / expected.norm()


class Verdicts:
    """Counts of what is wrong, fetched from the device once for all cases of a test."""

    def __init__(self) -> None:
        self._cases: list[str] = []
        self._counts: list[Any] = []

    def add(self, case: str, wrong: Any) -> None:
        """`wrong` is true where something is."""
        self._cases.append(case)
        self._counts.append(wrong.sum())

    def same(self, case: str, found: Any, expected: Any) -> None:
        """The bits should be equal."""
        self.add(case, bits(found) != bits(expected))

    def check(self) -> None:
        """Fail if anything is wrong in any case."""
        counts = torch.stack(self._counts).tolist()
        bad = [f"{case}: {count}" for case, count in zip(self._cases, counts, strict=True) if count]
        assert not bad, f"{len(bad)} of {len(counts)} cases are wrong: " + "; ".join(bad[:12])


def launch(
    blocks_per_sm: int = 0, ahead_kb: int = 0, skip_blocks_per_sm: int = 0
) -> dict[str, int]:
    """Launch values as rules have them."""
    return {
        "blocks_per_sm": blocks_per_sm,
        "ahead_kb": ahead_kb,
        "skip_blocks_per_sm": skip_blocks_per_sm,
    }


def in_order(kernels: Any, x: Any, weight: Any) -> Any:
    """The variant that a bound call runs, launched in stream order, as `gemv.using` gives it.

    In what order a variant sums does not depend on how it is launched, so the bits are the same.
    """
    variant = kernels.gemv.binary(x, weight, constant=True).variant
    return kernels.gemv.using(variant, launch())


def settled(bound: Any, x: Any) -> Any:
    """A bound GEMV after its first launch on the current stream, which is in order.

    Only those after it are programmatic, and only they ask the L2 for what comes next.
    """
    bound(x)
    return bound


def need_memory(size: int) -> None:
    """Skip where the device has less free memory."""
    torch.cuda.empty_cache()
    free = torch.cuda.mem_get_info()[0]
    if free < size:
        pytest.skip(f"needs {size >> 30} GiB of device memory, and {free >> 30} are free")
