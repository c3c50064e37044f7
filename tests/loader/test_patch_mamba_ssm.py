"""Patched `Mamba2` of mamba_ssm, by a stand-in that calls functions as 2.3.2.post1 does."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import silu

from mamba2_reference import error, expected
from plain_kernels import PlainKernels
from sonata_aot import loader
from sonata_aot.loader import fallback

# The real class has more arguments; what its forward calls, and with what, is the same.
STAND_IN = """
import torch
from torch import nn

calls = []
causal_conv1d_fn = None


def mamba_chunk_scan_combined(x, *arguments, return_final_states=False, **named):
    calls.append("scan")
    final = x.new_zeros(x.shape[0], *x.shape[2:], arguments[2].shape[3])
    return (x, final) if return_final_states else x


def mamba_split_conv1d_scan_combined(
    zxbcdt, conv1d_weight, conv1d_bias, dt_bias, A, D, chunk_size, initial_states=None,
    seq_idx=None, dt_limit=(0.0, float("inf")), return_final_states=False, activation="silu",
    rmsnorm_weight=None, rmsnorm_eps=1e-6, outproj_weight=None, outproj_bias=None, headdim=None,
    ngroups=1, norm_before_gate=True,
):
    calls.append("split")
    return zxbcdt[..., : outproj_weight.shape[0]]


class Mamba2(nn.Module):
    def __init__(self, rmsnorm=True, D_has_hdim=False, norm_before_gate=False, d_mlp=0, bias=False):
        super().__init__()
        self.headdim, self.d_state, self.ngroups, self.nheads = 8, 16, 2, 4
        self.rmsnorm, self.norm_before_gate, self.D_has_hdim = rmsnorm, norm_before_gate, D_has_hdim
        self.d_ssm = 32
        conv = self.d_ssm + 2 * self.ngroups * self.d_state
        self.in_proj = nn.Linear(16, 2 * d_mlp + self.d_ssm + conv + self.nheads, bias=bias)
        self.conv1d = nn.Conv1d(conv, conv, 4, groups=conv, padding=3)
        self.dt_bias = nn.Parameter(torch.randn(self.nheads))
        self.A_log = nn.Parameter(torch.rand(self.nheads))
        self.D = nn.Parameter(torch.randn(self.d_ssm if D_has_hdim else self.nheads))
        self.norm = nn.Module()
        self.norm.weight, self.norm.eps = nn.Parameter(torch.rand(self.d_ssm)), 1e-5
        self.out_proj = nn.Linear(self.d_ssm + d_mlp, 16, bias=bias)
        self.activation, self.dt_limit = "silu", (0.0, float("inf"))

    def forward(self, u, seqlen=None, seq_idx=None, cu_seqlens=None, inference_params=None):
        zxbcdt = self.in_proj(u)
        A = -torch.exp(self.A_log.float())
        if inference_params is None:
            return mamba_split_conv1d_scan_combined(
                zxbcdt,
                self.conv1d.weight.squeeze(1),
                self.conv1d.bias,
                self.dt_bias,
                A,
                D=self.D.view(-1, self.headdim) if self.D_has_hdim else self.D,
                chunk_size=64,
                seq_idx=seq_idx,
                activation=self.activation,
                rmsnorm_weight=self.norm.weight if self.rmsnorm else None,
                rmsnorm_eps=self.norm.eps if self.rmsnorm else 1e-6,
                outproj_weight=self.out_proj.weight,
                outproj_bias=self.out_proj.bias,
                headdim=None if self.D_has_hdim else self.headdim,
                ngroups=self.ngroups,
                norm_before_gate=self.norm_before_gate,
            )
        z, xBC, dt = zxbcdt.split([self.d_ssm, self.conv1d.in_channels, self.nheads], -1)
        states = self.ngroups * self.d_state
        x, B, C = xBC.split([self.d_ssm, states, states], -1)
        y, last = mamba_chunk_scan_combined(
            x.unflatten(-1, (-1, self.headdim)),
            dt,
            A,
            B.unflatten(-1, (self.ngroups, -1)),
            C.unflatten(-1, (self.ngroups, -1)),
            chunk_size=64,
            D=self.D,
            z=None,
            dt_bias=self.dt_bias,
            dt_softplus=True,
            seq_idx=seq_idx,
            cu_seqlens=cu_seqlens,
            return_final_states=True,
            return_varlen_states=False,
        )
        inference_params.append(last)
        return self.out_proj(y.flatten(2))
"""


@pytest.fixture
def mamba_ssm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The stand-in's module."""
    folder = tmp_path / "mamba_ssm" / "modules"
    folder.mkdir(parents=True)
    (tmp_path / "mamba_ssm" / "__init__.py").write_text("__version__ = '2.3.2.post1'\n")
    (folder / "__init__.py").touch()
    (folder / "mamba2.py").write_text(STAND_IN)
    monkeypatch.syspath_prepend(tmp_path)
    kept = {name: sys.modules.pop(name) for name in list(sys.modules) if "mamba_ssm" in name[:9]}
    yield importlib.import_module("mamba_ssm.modules.mamba2")
    for name in [name for name in sys.modules if name.startswith("mamba_ssm")]:
        del sys.modules[name]
    sys.modules.update(kept)


def make(mamba_ssm: Any, **options: Any) -> Any:
    return mamba_ssm.Mamba2(**options).to(torch.bfloat16).requires_grad_(False)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"norm_before_gate": True},
        {"rmsnorm": False},
        {"D_has_hdim": True},
        {"d_mlp": 24, "bias": True},
        {"d_mlp": 8, "rmsnorm": False},
    ],
)
def test_the_fused_function_is_reproduced(
    mamba_ssm: Any, kernels: PlainKernels, options: dict[str, Any]
) -> None:
    torch.manual_seed(3)
    module = make(mamba_ssm, **options)
    u = torch.randn(2, 21, 16, dtype=torch.bfloat16)
    report = loader.patch(module)
    found = module(u)
    assert mamba_ssm.calls == []
    assert len(kernels.scans) == 1
    assert found.dtype == torch.bfloat16
    # bfloat16 rounds by up to 2**-9 in each of a few steps.
    assert error(found, expected(module, u)) < 2**-6
    assert report.entries[0].calls == 1


def test_the_path_with_inference_params(mamba_ssm: Any, kernels: PlainKernels) -> None:
    module = make(mamba_ssm)
    report = loader.patch(module)
    states: list[Tensor] = []
    module(torch.randn(2, 21, 16, dtype=torch.bfloat16), inference_params=states)
    assert mamba_ssm.calls == []
    assert states[0].shape == (2, 4, 8, 16)
    assert states[0].abs().sum() > 0
    assert report.entries[0].shape == "4 x 8, 2 groups, state 16"


def test_packed_sequences_need_the_convolution_that_knows_them(
    mamba_ssm: Any, kernels: PlainKernels
) -> None:
    module = make(mamba_ssm)
    u = torch.randn(1, 12, 16, dtype=torch.bfloat16)
    index = torch.tensor([[0] * 5 + [1] * 7], dtype=torch.int32)
    report = loader.patch(module)
    module(u, seq_idx=index)
    assert mamba_ssm.calls == ["split"]
    assert list(report.entries[0].original_calls) == ["packed sequences without causal_conv1d"]
    report.undo()

    def causal_conv1d_fn(x: Tensor, weight: Tensor, bias: Any, activation: str, seq_idx: Any):
        assert activation == "silu"
        assert seq_idx is index
        parts = [x[..., :5], x[..., 5:]]
        one = SimpleNamespace(weight=weight, bias=bias)
        made = [
            torch.nn.functional.conv1d(
                part, one.weight[:, None], one.bias, padding=3, groups=len(one.weight)
            )[..., : part.shape[-1]]
            for part in parts
        ]
        return silu(torch.cat(made, -1))

    mamba_ssm.causal_conv1d_fn = causal_conv1d_fn
    loader.patch(module)
    found = module(u, seq_idx=index)
    assert mamba_ssm.calls == ["split"]
    wanted = torch.cat([expected(module, u[:, :5]), expected(module, u[:, 5:])], 1)
    assert error(found, wanted) < 2**-6


def test_what_is_left_to_mamba_ssm(
    mamba_ssm: Any, kernels: PlainKernels, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = make(mamba_ssm)
    report = loader.patch(module)
    u = torch.randn(1, 12, 16, dtype=torch.bfloat16)
    torch.set_autocast_enabled("cuda", True)
    try:
        module(u)
    finally:
        torch.set_autocast_enabled("cuda", False)
    module(u.clone().requires_grad_())
    module.activation = "gelu"
    module(u)
    module.activation = "silu"
    monkeypatch.setattr("plain_kernels.PAIRS", set())
    module(u)
    assert list(report.entries[0].original_calls) == [
        fallback.AUTOCAST,
        fallback.GRADIENT,
        "an activation that is not SiLU",
        "no scan 8x16",
    ]
    assert mamba_ssm.calls == ["split"] * 4
    report.undo()
    module(u)
    assert mamba_ssm.calls == ["split"] * 5


def test_other_versions_are_left_alone(
    mamba_ssm: Any, kernels: PlainKernels, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mamba_ssm.__version__", "2.2.6")
    report = loader.patch(make(mamba_ssm))
    assert report.entries[0].reason == "mamba_ssm 2.2.6 was not tested; tested: 2.3.2"
