"""What mamba_ssm's `Mamba2` computes where it has no inference_params, after its projection."""

# ruff: noqa: N806 - A, B and C are the names of the calls.

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear, silu

import ssd_reference


def expected(module: Any, u: Tensor) -> Tensor:
    """What mamba_ssm documents, in float64 from the projected input on."""
    zxbcdt = module.in_proj(u).double()
    dim, states, heads = module.d_ssm, module.ngroups * module.d_state, module.nheads
    d_mlp = (zxbcdt.shape[-1] - 2 * dim - 2 * states - heads) // 2
    parts = [d_mlp, d_mlp, dim, dim + 2 * states, heads]
    z0, x0, z, xBC, dt = zxbcdt.split(parts, -1)
    weight, bias = module.conv1d.weight.double(), module.conv1d.bias.double()
    rows = [torch.zeros_like(xBC[:, :3]), xBC]
    padded = torch.cat(rows, 1)
    # Four taps back from each token.
    xBC = sum(padded[:, tap : tap + u.shape[1]] * weight[:, 0, tap] for tap in range(4))
    x, B, C = silu(torch.as_tensor(xBC + bias)).split([dim, states, states], -1)
    D = module.D.view(-1, module.headdim) if module.D_has_hdim else module.D
    y: Any = ssd_reference.scan(
        x.unflatten(-1, (heads, -1)),
        dt,
        -torch.exp(module.A_log.double()),
        B.unflatten(-1, (module.ngroups, -1)),
        C.unflatten(-1, (module.ngroups, -1)),
        64,
        D=D,
        z=None if module.rmsnorm else z.unflatten(-1, (heads, -1)),
        dt_bias=module.dt_bias,
        dt_softplus=True,
    )
    y = y.flatten(2)
    if module.rmsnorm:
        y = y if module.norm_before_gate else y * silu(z)
        groups = y.unflatten(-1, (module.ngroups, -1))
        scale = (groups.square().mean(-1, keepdim=True) + module.norm.eps).sqrt()
        y = (groups / scale).flatten(2) * module.norm.weight.double()
        y = y * silu(z) if module.norm_before_gate else y
    y = torch.cat([silu(z0) * x0, y], -1)
    bias = module.out_proj.bias
    return linear(y, module.out_proj.weight.double(), None if bias is None else bias.double())


def error(found: Tensor, wanted: Tensor) -> float:
    return ((found.double() - wanted).norm() / wanted.norm()).item()
