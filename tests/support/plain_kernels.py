"""Kernels that are torch's own operations on the CPU, for tests of what calls kernels and when."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear

import ssd_reference
from sonata_aot.artifacts.errors import ArgumentError, VariantMissing

# headdim, dstate: what there are kernels of the scan for.
PAIRS = {(8, 16), (16, 16)}


class PlainGemv:
    """The calls of `loader.gemv.Gemv` that patched models make."""

    def __init__(self) -> None:
        self.rows: list[int] = []
        # Added to results, so that they can be told from torch's.
        self.offset = 0.0

    def __call__(
        self,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None = None,
        out: Tensor | None = None,
        *,
        batch_invariant: bool = False,
    ) -> Tensor:
        assert x.dim() == 2
        assert 1 <= x.shape[0] <= 8
        assert x.stride(1) == 1
        assert not torch.is_grad_enabled() or not (x.requires_grad or weight.requires_grad)
        self.rows.append(x.shape[0])
        result = linear(x, weight, bias)
        return result + self.offset if self.offset else result


class PlainScan:
    """The calls of `loader.ssd.ChunkScan` that patched models make."""

    def __init__(self) -> None:
        self.calls: list[dict[str, Any]] = []
        self._signature = inspect.signature(ssd_reference.scan)

    def binaries(self, *arguments: Any, **named: Any) -> tuple[()]:
        self._bound(*arguments, **named)
        return ()

    def __call__(self, *arguments: Any, **named: Any) -> Tensor | tuple[Tensor, ...]:
        given = self._bound(*arguments, **named)
        self.calls.append(given)
        x = given["x"]
        results = ssd_reference.scan(**given)
        out, *states = results if isinstance(results, tuple) else (results,)
        kinds = [torch.float32] * given["return_final_states"] + [x.dtype]
        made = tuple(state.to(kind) for state, kind in zip(states, kinds, strict=False))
        return (out.to(x.dtype), *made) if made else out.to(x.dtype)

    def _bound(self, *arguments: Any, **named: Any) -> dict[str, Any]:
        bound = self._signature.bind(*arguments, **named)
        bound.apply_defaults()
        given = bound.arguments
        x, dstate = given["x"], given["B"].shape[3]
        seq_idx = given["seq_idx"]
        if seq_idx is not None and seq_idx.dtype != torch.int32:
            raise ArgumentError("seq_idx is no int32", remedy="convert it")
        if (x.shape[3], dstate) not in PAIRS:
            raise VariantMissing(f"no scan {x.shape[3]}x{dstate}", remedy="build it")
        return given


class PlainKernels:
    """What `loader.load` returns, as far as patched models and operators use it."""

    def __init__(self) -> None:
        self.gemv = PlainGemv()
        self.mamba_chunk_scan_combined = PlainScan()
        self.devices = frozenset([0])

    @property
    def gemv_rows(self) -> list[int]:
        """Rows of each call of the GEMV."""
        return self.gemv.rows

    @property
    def scans(self) -> list[dict[str, Any]]:
        """The arguments of each call of the scan."""
        return self.mamba_chunk_scan_combined.calls


def ssd_operands(
    batch: int = 2, seqlen: int = 12, heads: int = 4, headdim: int = 8, dstate: int = 16
) -> tuple[Tensor, ...]:
    """x, dt, A, B and C in float32."""
    return (
        torch.randn(batch, seqlen, heads, headdim),
        torch.rand(batch, seqlen, heads),
        -torch.rand(heads),
        torch.randn(batch, seqlen, 1, dstate),
        torch.randn(batch, seqlen, 1, dstate),
    )
