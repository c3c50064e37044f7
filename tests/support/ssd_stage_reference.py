# ruff: noqa: N803 - A, B, C and D are the names of the calls that these mirror.
"""What each stage of the SSD scan computes, in float64; the calls are those of `kernels.ssd`."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ssd_reference import step_sizes


def chunked(tensor: Tensor, chunk_size: int, value: float = 0.0) -> Tensor:
    """(batch, seqlen, ...) as (batch, chunks, chunk_size, ...), filled up."""
    short = -tensor.shape[1] % chunk_size
    filler = tensor.new_full((tensor.shape[0], short, *tensor.shape[2:]), value)
    return torch.cat([tensor, filler], 1).unflatten(1, (-1, chunk_size))


def per_head(tensor: Tensor, heads: int) -> Tensor:
    """Groups become heads: in the second last dimension."""
    return tensor.repeat_interleave(heads // tensor.shape[-2], -2)


def chunk_cumsum(
    dt: Tensor,
    A: Tensor,
    chunk_size: int,
    dt_bias: Tensor | None = None,
    dt_softplus: bool = False,
    dt_limit: tuple[float, float] = (0.0, math.inf),
) -> tuple[Tensor, Tensor]:
    delta = step_sizes(dt, dt_bias, softplus=dt_softplus, limit=dt_limit)
    steps = chunked(delta, chunk_size).permute(0, 3, 1, 2)
    return (steps * A.double().reshape(-1, 1, 1)).cumsum(-1), steps


def bmm_chunk(a: Tensor, b: Tensor, chunk_size: int, seq_idx: Tensor | None = None) -> Tensor:
    """In full, whatever is asked for."""
    out = torch.einsum(
        "bcign,bcjgn->bcgij", chunked(a.double(), chunk_size), chunked(b.double(), chunk_size)
    )
    if seq_idx is not None:
        index = chunked(seq_idx, chunk_size, -1)
        out = out * (index.unsqueeze(-1) == index.unsqueeze(-2)).unsqueeze(2)
    return out


def chunk_state(
    B: Tensor, x: Tensor, dt: Tensor, dA_cumsum: Tensor, seq_idx: Tensor | None = None
) -> Tensor:
    chunk_size, heads = dt.shape[-1], x.shape[2]
    weight = (dA_cumsum[..., -1:].double() - dA_cumsum.double()).exp() * dt.double()
    if seq_idx is not None:
        index = chunked(seq_idx, chunk_size, -1)
        short = -x.shape[1] % chunk_size
        last = index[..., -1].clone()
        last[:, -1] = index[:, -1, chunk_size - 1 - short]
        kept = (index == last.unsqueeze(-1)) & (last >= 0).unsqueeze(-1)
        weight = weight * kept.unsqueeze(1)
    return torch.einsum(
        "bhcl,bclhp,bclhn->bchpn",
        weight,
        chunked(x.double(), chunk_size),
        per_head(chunked(B.double(), chunk_size), heads),
    )


def state_passing(
    states: Tensor,
    dA_chunk_cumsum: Tensor,
    initial_states: Tensor | None = None,
    seq_idx: Tensor | None = None,
    chunk_size: int = 1,
) -> tuple[Tensor, Tensor]:
    batch, chunks = states.shape[:2]
    state = states.new_zeros((batch, *states.shape[2:]), dtype=torch.float64)
    if initial_states is not None:
        state = initial_states.double()
    out, index = [], torch.zeros(batch)
    for chunk in range(chunks):
        out.append(state)
        factor = dA_chunk_cumsum[:, :, chunk].double().exp()
        if seq_idx is not None:
            new = seq_idx[:, min((chunk + 1) * chunk_size, seq_idx.shape[1]) - 1]
            factor = factor * (new == index.to(new)).unsqueeze(-1)
            index = new
        shape = factor.shape + (1,) * (states.dim() - 3)
        state = factor.reshape(shape) * state + states[:, chunk].double()
    return torch.stack(out, 1), state


def chunk_scan(
    cb: Tensor,
    x: Tensor,
    dt: Tensor,
    dA_cumsum: Tensor,
    C: Tensor,
    states: Tensor,
    D: Tensor | None = None,
    z: Tensor | None = None,
    seq_idx: Tensor | None = None,
) -> Tensor:
    (_, seqlen, heads, _), chunk_size = x.shape, dt.shape[-1]
    a = dA_cumsum.double().permute(0, 2, 1, 3)
    lower = torch.ones(chunk_size, chunk_size, dtype=torch.bool, device=x.device).tril()
    left = (a.unsqueeze(-1) - a.unsqueeze(-2)).masked_fill(~lower, -math.inf).exp()
    products = cb.double().where(lower, torch.zeros_like(cb, dtype=torch.float64))
    weight = products.repeat_interleave(heads // cb.shape[2], 2) * left
    weight = weight * dt.double().permute(0, 2, 1, 3).unsqueeze(-2)
    decay = a.exp()
    if seq_idx is not None:
        index = chunked(seq_idx, chunk_size, -1)
        before = torch.cat([torch.zeros_like(index[:, :1, -1]), index[:, :-1, -1]], 1)
        decay = decay * (index == before.unsqueeze(-1)).unsqueeze(2)
    inputs = chunked(x.double(), chunk_size)
    rows = per_head(chunked(C.double(), chunk_size), heads)
    out = torch.einsum("bchij,bcjhp->bcihp", weight, inputs)
    out = out + torch.einsum("bclhn,bchpn,bchl->bclhp", rows, states.double(), decay)
    if D is not None:
        out = out + inputs * D.double().reshape(heads, -1)
    out = out.flatten(1, 2)[:, :seqlen]
    return out if z is None else out * torch.nn.functional.silu(z.double())
