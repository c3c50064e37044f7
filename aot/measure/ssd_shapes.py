"""The scans that are measured, and published times that an opponent's is estimated from."""

from __future__ import annotations

import re
from dataclasses import dataclass, fields, replace
from typing import Any

from ...artifacts.errors import UsageError


@dataclass(frozen=True)
class Shape:
    """One scan in bf16, with D, dt_bias, softplus and final states; the flags say what else."""

    batch: int
    seqlen: int
    heads: int = 64
    headdim: int = 64
    dstate: int = 128
    groups: int = 1
    chunk_size: int = 256
    # A gate; states before the first token, in fp32; two sequences; slices of one projection.
    z: bool = False
    initial: bool = False
    seq_idx: bool = False
    strides: bool = False

    def __str__(self) -> str:
        unusual = [f"{name}={value}" for name, value in self._more().items() if name in _SIZES]
        return " ".join([f"{self.batch}x{self.seqlen}", *unusual, *self.extras])

    def _more(self) -> dict[str, int]:
        """What is not as usual, by name."""
        usual = {field.name: field.default for field in fields(self)}
        return {k: int(v) for k, v in vars(self).items() if k in _MORE and v != usual[k]}

    @property
    def extras(self) -> tuple[str, ...]:
        """The flags that are set: `z=1`."""
        return tuple(f"{name}=1" for name in EXTRAS if getattr(self, name))

    @property
    def case(self) -> str:
        """As results name it."""
        chunk = () if self.chunk_size == 256 else (f"chunk={self.chunk_size}",)
        return " ".join(
            [
                f"b={self.batch} l={self.seqlen} h={self.heads} p={self.headdim} n={self.dstate} "
                f"g={self.groups} dtype=bf16",
                *chunk,
                *self.extras,
            ]
        )

    @property
    def plain(self) -> Shape:
        """The same without its extras."""
        return replace(self, z=False, initial=False, seq_idx=False, strides=False)

    @property
    def bytes(self) -> int:
        """All inputs and outputs once."""
        tokens, state = self.batch * self.seqlen, self.heads * self.headdim * self.dstate
        row, parameters = 2 * self.heads * self.headdim, 3 * 4 * self.heads
        size = tokens * (2 * row + 2 * self.heads + 4 * self.groups * self.dstate)
        size += 4 * self.batch * state + parameters
        size += tokens * row * self.z + 4 * self.batch * state * self.initial
        return size + 4 * tokens * self.seq_idx

    @classmethod
    def parse(cls, text: str) -> Shape:
        """From `2x2048` or `2x2048,heads=24,z=1`.

        Raises:
            UsageError: it is not of that form, or groups do not divide heads.
        """
        first, *more = text.strip().lower().split(",")
        remedy = f"write batch x seqlen, then any of {', '.join(_MORE)}: 2x2048,heads=24,z=1"
        match = re.fullmatch(r"([1-9][0-9]{0,6})x([1-9][0-9]{0,8})", first)
        pairs = [re.fullmatch(r"([a-z_]+)=([0-9]{1,6})", part) for part in more]
        if match is None or not all(pair and pair[1] in _MORE for pair in pairs):
            raise UsageError(f"shape {text!r}", remedy=remedy)
        values: dict[str, Any] = {pair[1]: int(pair[2]) for pair in pairs if pair}
        values |= {name: bool(values[name]) for name in EXTRAS if name in values}
        found = cls(int(match[1]), int(match[2]), **values)
        if not all(getattr(found, name) for name in _SIZES) or found.heads % found.groups:
            raise UsageError(f"shape {text!r}: groups must divide heads", remedy=remedy)
        return found


EXTRAS = ("z", "initial", "seq_idx", "strides")
_SIZES = ("heads", "headdim", "dstate", "groups", "chunk_size")
_MORE = (*_SIZES, *EXTRAS)

# Those that have to be won.
BARS = (
    *(Shape(2, seqlen) for seqlen in (64, 128, 256, 512, 1024, 2048, 4096, 8192)),
    Shape(1, 32768),
    Shape(8, 2048),
)
# Those that are reported too: few heads, many with groups, wide ones.
REPORTED = (
    Shape(1, 2048, heads=24),
    Shape(1, 2048, heads=128, groups=8),
    Shape(2, 2048, heads=32, headdim=128),
)
# What may cost no more than its bytes and `EXTRA_TOLERANCE`.
WITH_EXTRAS = (
    Shape(2, 2048, z=True),
    Shape(2, 2048, initial=True),
    Shape(2, 2048, seq_idx=True),
    Shape(2, 2048, strides=True),
    Shape(2, 2048, z=True, initial=True, seq_idx=True, strides=True),
)
PARTS = {"bars": BARS, "reported": REPORTED, "extras": WITH_EXTRAS}
EXTRA_TOLERANCE = 0.05

# Microseconds by graph replay on one H200 (torch 2.11) of the fused Triton kernel that is published
# as github.com/RishiAstra/mamba, branch main, with MAMBA2_FUSION_TYPE=high, and of mamba_ssm
# 2.3.2.post1's kernels, measured beside it. That package cannot be installed from an index, so its
# time here is the one kernels' time times their ratio there.
FUSED_AND_UNFUSED_US = dict(
    zip(
        BARS,
        (
            (38.8, 24.1),
            (43.8, 28.0),
            (50.9, 35.2),
            (57.3, 54.7),
            (100.1, 93.7),
            (170.3, 168.8),
            (306.9, 318.7),
            (579.5, 610.5),
            (1102.7, 1237.8),
            (603.5, 601.4),
        ),
        strict=True,
    )
)


def fused_estimate_us(shape: Shape, unfused_us: float) -> float | None:
    """What the fused kernel would take where mamba_ssm's take so long; None where unknown."""
    known = FUSED_AND_UNFUSED_US.get(shape)
    return None if known is None else unfused_us * known[0] / known[1]
