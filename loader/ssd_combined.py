# ruff: noqa: N803 - A, B, C and D are the names of the call that this mirrors.
"""`kernels.ssd.combined`: the scan made of its stages."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from .stage_checks import Check
from .stage_launch import runs

if TYPE_CHECKING:
    from .ssd_stages import Stages


def combined(
    self: Stages,
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    chunk_size: int,
    D: Tensor | None = None,
    z: Tensor | None = None,
    dt_bias: Tensor | None = None,
    initial_states: Tensor | None = None,
    seq_idx: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    dt_softplus: bool = False,
    dt_limit: tuple[float, float] = (0.0, math.inf),
    return_final_states: bool = False,
    return_varlen_states: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """The scan, made of the stages: see docs/ssd.md for its arguments and corners.

    `chunk_size` decides the speed and no part of the result. An index of seq_idx that comes
    back after another one is a new sequence. `cu_seqlens` has no part in the result.

    Returns:
        out, as x; with return_final_states also the states after the last token,
        (batch, heads, headdim, dstate) float32.

    Raises:
        ArgumentError: an argument breaks one of the conditions, is on another device than the
            others or one that `load` was not given, or requires grad; or varlen states are
            asked for.
        VariantMissing: no binary for these sizes and this dtype.
        DriverError: the driver refused a launch, or an earlier one had failed.
    """
    check = Check("combined", self.multiprocessors)
    if return_varlen_states:
        check.fail(
            "the stages make no varlen states", "call mamba_chunk_scan_combined of the kernels"
        )
    # All of it now: a stage would say what it calls its arguments, after others have run.
    check.chunk_size(chunk_size)
    check.limits(dt_limit)
    check.scan(x, dt, A, B, C)
    check.outputs(x, D, z)
    check.states(x, B, dt_bias, initial_states)
    if seq_idx is not None:
        check.sequences(seq_idx, *x.shape[:2])
        seq_idx = runs(seq_idx)
    decay, steps = self.chunk_cumsum(dt, A, chunk_size, dt_bias, dt_softplus, dt_limit)
    added = self.chunk_state(B, x, steps, decay, seq_idx)
    # Rounded here or where they are used comes to the same.
    states, final = self.state_passing(
        added, decay[..., -1], initial_states, seq_idx, chunk_size, out_dtype=x.dtype
    )
    products = self.bmm_chunk(C, B, chunk_size, seq_idx, True, torch.float32)
    out = self.chunk_scan(products, x, steps, decay, C, states, D, z, seq_idx)
    return (out, final) if return_final_states else out
