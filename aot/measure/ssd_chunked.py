# ruff: noqa: N803 - A, B, C and D are the names of the call.
"""The SSD scan in float64 by chunks, fast on long sequences: what results are held against.

It takes what `kernels.mamba_chunk_scan_combined` does, on any device. Tests hold it against the
scan token by token. What it gives at padding is not specified, and a NaN may travel.
"""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor


def scan_in_chunks(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    chunk_size: int = 64,
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
    """Out, or a tuple of it and the states that were asked for, all in float64."""
    batch, seqlen, heads, headdim = x.shape
    groups, dstate = B.shape[2:]
    chunk = 64
    delta = _step_sizes(dt, dt_bias, softplus=dt_softplus, limit=dt_limit)
    number = torch.zeros(batch, seqlen, dtype=torch.int64, device=x.device)
    if seq_idx is not None:
        before = torch.nn.functional.pad(seq_idx[:, :-1], (1, 0), value=0)
        number = (seq_idx != before).cumsum(1)
        delta = delta.masked_fill((seq_idx < 0).unsqueeze(-1), 0.0)
    rest = -seqlen % chunk
    if rest:
        number = torch.cat([number, number[:, -1:].expand(-1, rest)], 1)

    def cut(tensor: Tensor, *inner: int) -> Tensor:
        """In float64 and in chunks, zeros at the end."""
        padded = torch.cat([tensor.double(), tensor.new_zeros((batch, rest, *inner)).double()], 1)
        return padded.unflatten(1, (-1, chunk))

    if seqlen == 0:
        state = _initial(initial_states, x, dstate)
        ends = [state[0] if i == 0 else state[0] * 0 for i in range(_sequences(cu_seqlens))]
        varlen = torch.stack(ends) if ends else state[:0]
        return _results(
            x.double(), state if return_final_states else None, varlen, return_varlen_states
        )

    # Batch b, chunks c, tokens i and j of a chunk, groups g, heads h = (g, r).
    xc, dc = cut(x, heads, headdim), cut(delta, heads)
    bc, cc = cut(B, groups, dstate), cut(C, groups, dstate)
    ratio = heads // groups
    number = number.unflatten(1, (-1, chunk))
    sums = (dc * A.double()).cumsum(2)
    same = (number[..., :, None] == number[..., None, :]).tril()
    weights = (sums.unsqueeze(3) - sums.unsqueeze(2)).clamp_(max=0).exp_()
    weights = weights.mul_(same.unsqueeze(-1)).mul_(dc.unsqueeze(2))
    ended = torch.nn.functional.pad(number[:, :-1, -1], (1, 0), value=0)
    carried = sums.exp() * (number == ended.unsqueeze(-1)).unsqueeze(-1)
    heads_b, heads_c = (t.repeat_interleave(ratio, dim=3) for t in (bc, cc))
    products = torch.einsum("bcign,bcjgn->bcijg", cc, bc).repeat_interleave(ratio, dim=4)
    out = torch.einsum("bcijh,bcjhp->bcihp", products * weights, xc)
    added = torch.einsum("bcjh,bcjhp,bcjhn->bchpn", weights[:, :, -1], xc, heads_b)

    state = _initial(initial_states, x, dstate)
    states = []
    for i in range(added.shape[1]):
        states.append(state)
        state = carried[:, i, -1, :, None, None] * state + added[:, i]
    before_chunk = torch.stack(states, 1)
    out += torch.einsum("bcihn,bchpn,bcih->bcihp", heads_c, before_chunk, carried)
    out = out.flatten(1, 2)[:, :seqlen]
    if D is not None:
        out = out + x.double() * D.double().reshape(heads, -1)
    if z is not None:
        out = out * torch.nn.functional.silu(z.double())

    ends = []
    if return_varlen_states:
        assert cu_seqlens is not None
        for first, (start, end) in enumerate(pairwise(cu_seqlens.tolist())):
            if start == end:
                ends.append(_initial(initial_states, x, dstate)[0] * float(first == end == 0))
                continue
            c, i = divmod(end - 1, chunk)
            here = torch.einsum("jh,jhp,jhn->hpn", weights[0, c, i], xc[0, c], heads_b[0, c])
            ends.append(here + carried[0, c, i, :, None, None] * before_chunk[0, c])
    varlen = torch.stack(ends) if ends else state[:0]
    return _results(out, state if return_final_states else None, varlen, return_varlen_states)


def _step_sizes(
    dt: Tensor, bias: Tensor | None, *, softplus: bool, limit: tuple[float, float]
) -> Tensor:
    delta = dt.double()
    if bias is not None:
        delta = delta + bias.double()
    if softplus:
        delta = torch.where(delta <= 20, delta.exp().log1p(), delta)
    return delta.clamp(*limit)


def _initial(initial_states: Tensor | None, x: Tensor, dstate: int) -> Tensor:
    if initial_states is not None:
        return initial_states.double()
    batch, _, heads, headdim = x.shape
    return x.new_zeros((batch, heads, headdim, dstate), dtype=torch.float64)


def _sequences(cu_seqlens: Tensor | None) -> int:
    return 0 if cu_seqlens is None else cu_seqlens.shape[0] - 1


def _results(
    out: Tensor, final: Tensor | None, varlen: Tensor, wants_varlen: bool
) -> Tensor | tuple[Tensor, ...]:
    results = [out]
    results += [] if final is None else [final]
    results += [varlen] if wants_varlen else []
    return out if len(results) == 1 else tuple(results)
