"""mamba_ssm's mamba_split_conv1d_scan_combined for inference, around our scan.

What its Mamba2 runs where there are no inference_params: convolution, scan, gated norm and output
projection. All but the scan are torch's own operations here, so that nothing is compiled.
"""

# ruff: noqa: N803, N806 - A, B, C and D are the names of the call.

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import conv1d, linear, silu

from . import fallback
from .patch_scan import ScanRunner

Function = Callable[..., Any]
# Activations of the convolution that are SiLU; another, which is None, is left to mamba_ssm.
_SILU = ("silu", "swish")
_ACTIVATION = "an activation that is not SiLU"
_PACKED = "packed sequences without causal_conv1d"


def split_scan(runner: ScanRunner, original: Function, convolution: Function | None) -> Function:
    """A function with the arguments and the result of mamba_ssm's 2.3.2.post1.

    Args:
        runner: Whose scan runs, and who counts.
        original: mamba_ssm's, for calls that are not ours.
        convolution: causal_conv1d_fn where that is installed.
    """

    def mamba_split_conv1d_scan_combined(
        zxbcdt: Tensor,
        conv1d_weight: Tensor,
        conv1d_bias: Tensor | None,
        dt_bias: Tensor,
        A: Tensor,
        D: Tensor,
        chunk_size: int,
        initial_states: Tensor | None = None,
        seq_idx: Tensor | None = None,
        dt_limit: tuple[float, float] = (0.0, float("inf")),
        return_final_states: bool = False,
        activation: str | None = "silu",
        rmsnorm_weight: Tensor | None = None,
        rmsnorm_eps: float = 1e-6,
        outproj_weight: Tensor | None = None,
        outproj_bias: Tensor | None = None,
        headdim: int | None = None,
        ngroups: int = 1,
        norm_before_gate: bool = True,
    ) -> Any:
        def run_original() -> Any:
            return original(
                *(zxbcdt, conv1d_weight, conv1d_bias, dt_bias, A, D, chunk_size, initial_states),
                *(seq_idx, dt_limit, return_final_states, activation, rmsnorm_weight, rmsnorm_eps),
                *(outproj_weight, outproj_bias, headdim, ngroups, norm_before_gate),
            )

        reason = runner.why_not_now(
            *(zxbcdt, conv1d_weight, conv1d_bias, dt_bias, A, D, initial_states, seq_idx),
            *(rmsnorm_weight, outproj_weight, outproj_bias),
        )
        if torch.is_autocast_enabled("cuda"):
            reason = reason or fallback.AUTOCAST
        if activation not in _SILU:
            reason = reason or _ACTIVATION
        if seq_idx is not None and convolution is None:
            reason = reason or _PACKED
        heads = D.shape[0]
        size = D.shape[1] if D.dim() == 2 else headdim
        if size is None:
            reason = reason or fallback.MISFIT
        if reason is not None or size is None:
            return runner.leave(reason or fallback.MISFIT, run_original)

        dim = heads * size
        dstate = (conv1d_weight.shape[0] - dim) // ngroups // 2
        states = ngroups * dstate
        d_mlp = (zxbcdt.shape[-1] - 2 * dim - 2 * states - heads) // 2
        z0, x0, z, xBC, dt = torch.split(
            zxbcdt, [d_mlp, d_mlp, dim, dim + 2 * states, heads], dim=-1
        )
        xBC = _convolved(xBC.transpose(1, 2), conv1d_weight, conv1d_bias, seq_idx, convolution)
        x, B, C = torch.split(xBC.transpose(1, 2), [dim, states, states], dim=-1)
        gate = z.unflatten(-1, (heads, size))
        found = runner.scan_only(
            x.unflatten(-1, (heads, size)),
            dt,
            A,
            B.unflatten(-1, (ngroups, dstate)),
            C.unflatten(-1, (ngroups, dstate)),
            chunk_size,
            D=D,
            z=gate if rmsnorm_weight is None else None,
            dt_bias=dt_bias,
            initial_states=initial_states,
            seq_idx=seq_idx,
            dt_softplus=True,
            dt_limit=dt_limit,
            return_final_states=return_final_states,
        )
        if isinstance(found, str):
            return runner.leave(found, run_original)
        y, *final = found if isinstance(found, tuple) else (found,)
        out = y.flatten(2)
        if rmsnorm_weight is not None:
            out = _gated_norm(out, z, rmsnorm_weight, rmsnorm_eps, dim // ngroups, norm_before_gate)
        if d_mlp > 0:
            out = torch.cat([silu(z0) * x0, out], dim=-1)
        if outproj_weight is not None:
            out = linear(out, outproj_weight, outproj_bias)
        result = (out, *final) if final else out
        runner.count(result, run_original)
        return result

    return mamba_split_conv1d_scan_combined


def _convolved(
    xBC: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    seq_idx: Tensor | None,
    convolution: Function | None,
) -> Tensor:
    """The causal convolution of each channel, and SiLU; xBC is (batch, channels, seqlen)."""
    if convolution is not None:
        return convolution(xBC, weight, bias=bias, activation="silu", seq_idx=seq_idx)
    channels, width = weight.shape
    padded = conv1d(xBC, weight[:, None].to(xBC.dtype), bias, padding=width - 1, groups=channels)
    return silu(padded[..., : xBC.shape[-1]])


def _gated_norm(
    out: Tensor, z: Tensor, weight: Tensor, eps: float, group: int, norm_before_gate: bool
) -> Tensor:
    """RMSNorm over groups of channels, gated by silu(z) before or after it; in fp32."""
    values, gate = out.float(), silu(z.float())
    if not norm_before_gate:
        values = values * gate
    groups = values.unflatten(-1, (-1, group))
    groups = groups * torch.rsqrt(groups.square().mean(-1, keepdim=True) + eps)
    values = groups.flatten(-2) * weight.float()
    if norm_before_gate:
        values = values * gate
    return values.to(out.dtype)
