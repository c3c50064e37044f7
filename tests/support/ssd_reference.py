# ruff: noqa: N803, N806 - A, B, C and D are the names of the call that this mirrors.
"""What the SSD scan computes: one step after another, in float64.

`scan` takes the arguments of mamba_ssm 2.3.2.post1's `mamba_chunk_scan_combined` and returns, in
float64, what its forward would if it did not round. Per batch and head, over the tokens t:

    delta = clamp(softplus(dt + dt_bias), *dt_limit)
    state = exp(delta A) state + delta x Bᵀ            (headdim, dstate)
    out   = (state C + D x) silu(z)

Corners:

- **dt**: the bias first; then softplus, where the sum is at most 20, else the sum itself; then
  the limits, always: with (0, inf) and no softplus a negative dt counts as 0.
- **z** gates everything, D x too. D is per head or per head and channel.
- **groups**: head h reads B and C of group h // (heads / groups).
- **chunk_size** is how mamba_ssm cuts the work, no part of the result. Where its result does
  depend on it, the input is refused here, or the corner is named below.
- **Exponents** delta A must not be positive. mamba_ssm clamps them within a chunk but not across
  chunks; refused.
- **seq_idx**: a token whose index differs from the one before starts from a zero state. Before
  the first token the index counts as 0: initial_states reach out and final_states only where
  seq_idx[:, 0] is 0, and are dropped otherwise. mamba_ssm asks whether indices are equal; for
  an index that comes back after another one its answer depends on chunk_size, here it is a new
  sequence.
- **A negative index** marks padding: it adds nothing to a state. After a last token that is
  padding, final_states are zero. What out holds for padding depends on mamba_ssm's chunk_size;
  here padding runs as a sequence of its own.
- **final_states** are those after the last token, so with seq_idx only of the last sequence; of
  no tokens at all, the initial states (mamba_ssm cannot).
- **NaN**: one in dt stays one, and none outlives its sequence. mamba_ssm's limits turn the first
  into a number; it ends a sequence by a factor 0, which a NaN survives. Kernels keep to that in
  states; in out, a tile of tokens that has one may hold it at all of them.
- **varlen_states** (batch 1) are the states at the ends of the sequences in cu_seqlens, which only
  says where to look: what keeps sequences apart is seq_idx, and both must agree. cu_seqlens may
  end before the tokens do, and counts only with return_varlen_states. mamba_ssm forgets the
  initial states for a sequence that starts and ends in the first chunk; here the sequence that
  starts from them keeps them. An empty sequence has a zero state, but for the first, which has
  the initial one. mamba_ssm returns these states in C's dtype, and final_states in fp32.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor


def scan(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    chunk_size: int | None = None,
    D: Tensor | None = None,
    z: Tensor | None = None,
    dt_bias: Tensor | None = None,
    initial_states: Tensor | None = None,
    seq_idx: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    dt_softplus: bool = False,
    dt_limit: tuple[float, float] = (0.0, float("inf")),
    return_final_states: bool = False,
    return_varlen_states: bool = False,
) -> Tensor | tuple[Tensor, ...]:
    """The scan; any dtypes, strides and device.

    Returns:
        out, or a tuple of out and what was asked for: final_states, varlen_states.

    Raises:
        ValueError: shapes do not fit, or mamba_ssm's answer would depend on chunk_size.
    """
    _check_shapes(x, dt, A, B, C, D, z, dt_bias, initial_states, seq_idx)
    batch, seqlen, heads, headdim = x.shape
    groups, dstate = B.shape[2:]
    of_heads = (groups, heads // groups)

    delta = step_sizes(dt, dt_bias, softplus=dt_softplus, limit=dt_limit)
    exponents = delta * A.double()
    if (exponents > 0).any():
        raise ValueError("dt * A is positive: mamba_ssm's answer depends on chunk_size")

    # Heads become (groups, heads of a group), so that B and C need no copies.
    inputs = (x.double() * delta.unsqueeze(-1)).unflatten(2, of_heads)
    decay = exponents.exp().unflatten(2, of_heads)
    B, C = B.double(), C.double()
    shape = (batch, *of_heads, headdim, dstate)
    state = x.new_zeros(shape, dtype=torch.float64)
    if initial_states is not None:
        state = initial_states.double().reshape(shape).clone()
    ends: list[int | None] = []
    if return_varlen_states:
        ends = _ends(cu_seqlens, seq_idx, batch, seqlen)
    kept, at_end = set(ends), {0: state}

    fresh = None if seq_idx is None else _starts(seq_idx)
    out = x.new_empty((batch, seqlen, *of_heads, headdim), dtype=torch.float64)
    for t in range(seqlen):
        if fresh is not None:
            # Not by a factor 0: a NaN must not cross.
            state = state.masked_fill(fresh[:, t].reshape(batch, 1, 1, 1, 1), 0.0)
        added = inputs[:, t].unsqueeze(-1) * B[:, t].reshape(batch, groups, 1, 1, dstate)
        state = decay[:, t].reshape(batch, *of_heads, 1, 1) * state + added
        out[:, t] = torch.einsum("bgrpn,bgn->bgrp", state, C[:, t])
        if t + 1 in kept:
            at_end[t + 1] = state

    out = out.flatten(2, 3)
    if D is not None:
        out = out + x.double() * D.double().reshape(heads, -1)
    if z is not None:
        out = out * torch.nn.functional.silu(z.double())
    results = [out]
    if return_final_states:
        if seq_idx is not None and seqlen > 0:
            padding = seq_idx[:, -1] < 0
            state = state.masked_fill(padding.reshape(batch, 1, 1, 1, 1), 0.0)
        results.append(state.flatten(1, 2))
    if return_varlen_states:
        zero = torch.zeros_like(state)
        found = [zero if end is None else at_end[end] for end in ends]
        results.append(torch.cat([zero[:0], *found]).flatten(1, 2))
    return out if len(results) == 1 else tuple(results)


def step_sizes(
    dt: Tensor, bias: Tensor | None, *, softplus: bool, limit: tuple[float, float]
) -> Tensor:
    """What dt becomes before anything else is done with it."""
    delta = dt.double()
    if bias is not None:
        delta = delta + bias.double()
    if softplus:
        delta = torch.where(delta <= 20, delta.exp().log1p(), delta)
    return delta.clamp(*limit)


def _starts(seq_idx: Tensor) -> Tensor:
    """Where a token does not go on from the one before it."""
    before = torch.nn.functional.pad(seq_idx[:, :-1], (1, 0), value=0)
    return seq_idx != before


def _ends(
    cu_seqlens: Tensor | None, seq_idx: Tensor | None, batch: int, seqlen: int
) -> list[int | None]:
    """How many tokens lie before each sequence's end; None for a zero state."""
    if cu_seqlens is None or batch != 1:
        raise ValueError("varlen states need cu_seqlens and a batch of 1")
    bounds: list[int] = cu_seqlens.tolist()
    if not bounds or sorted(bounds) != bounds or not 0 <= bounds[0] <= bounds[-1] <= seqlen:
        raise ValueError(f"cu_seqlens must ascend within 0 .. {seqlen}: {bounds}")
    index = [0] * seqlen if seq_idx is None else seq_idx[0].tolist()
    _check_agreement(bounds, index)
    pairs = list(pairwise(bounds))
    # An end at 0 stands for the initial states.
    first = pairs[:1] == [(0, 0)]
    ends = [end if start < end else None for start, end in pairs]
    return [0, *ends[1:]] if first else ends


def _check_agreement(bounds: Sequence[int], index: Sequence[int]) -> None:
    for start, end in pairwise(bounds):
        own = index[start:end]
        joined = 0 < start < end and index[start - 1] == index[start]
        if joined or len(set(own)) > 1 or any(i < 0 for i in own):
            raise ValueError(
                f"seq_idx does not keep the sequence of tokens {start} to {end} apart: "
                "mamba_ssm's answer depends on chunk_size"
            )


def _check_shapes(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None,
    z: Tensor | None,
    dt_bias: Tensor | None,
    initial_states: Tensor | None,
    seq_idx: Tensor | None,
) -> None:
    batch, seqlen, heads, headdim = x.shape
    groups, dstate = B.shape[-2:]
    if groups == 0 or heads % groups:
        raise ValueError(f"{heads} heads are no multiple of {groups} groups")
    wanted = {
        "dt": (dt, (batch, seqlen, heads)),
        "A": (A, (heads,)),
        "B": (B, (batch, seqlen, groups, dstate)),
        "C": (C, (batch, seqlen, groups, dstate)),
        "D": (D, (heads,) if D is not None and D.dim() == 1 else (heads, headdim)),
        "z": (z, tuple(x.shape)),
        "dt_bias": (dt_bias, (heads,)),
        "initial_states": (initial_states, (batch, heads, headdim, dstate)),
        "seq_idx": (seq_idx, (batch, seqlen)),
    }
    for name, (tensor, shape) in wanted.items():
        # Broadcasting would turn a wrong shape into a wrong answer.
        if tensor is not None and tuple(tensor.shape) != shape:
            raise ValueError(f"{name} is {tuple(tensor.shape)}, not {shape}")
