"""A stack of the size of Zonos' hybrid backbone, with random weights: one decode step.

34 Mamba2 layers and 12 layers of attention and MLP, in bfloat16. Projections are `nn.Linear`; what
lies between them is torch code that `fused=True` has torch.compile fuse, as a server would use
fused kernels there. States are buffers that a step updates in place, so that it can be captured.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import rms_norm, silu, softplus

MODEL, INNER, HEADDIM, DSTATE, WIDTH = 2048, 4096, 64, 128, 4
HEADS = INNER // HEADDIM
CONV = INNER + 2 * DSTATE
ATTENTION_HEADS, KEY_HEADS, ATTENTION_DIM, HIDDEN = 16, 4, 128, 8192
VOCABULARY = 9 * 1025
MAMBA_LAYERS, ATTENTION_LAYERS = 34, 12


class Mamba2Step(nn.Module):
    """One token through a Mamba2 layer: (batch, MODEL) to (batch, MODEL)."""

    def __init__(self, batch: int) -> None:
        """Random weights, and zero states for `batch` sequences."""
        super().__init__()
        self.in_proj = nn.Linear(MODEL, 2 * INNER + 2 * DSTATE + HEADS, bias=False)
        self.out_proj = nn.Linear(INNER, MODEL, bias=False)
        self.conv_weight = nn.Parameter(torch.randn(CONV, WIDTH) / 2)
        self.conv_bias = nn.Parameter(torch.zeros(CONV))
        self.A_log = nn.Parameter(torch.rand(HEADS).add(1).log())
        self.dt_bias = nn.Parameter(torch.randn(HEADS) - 2)
        self.skip = nn.Parameter(torch.ones(HEADS))
        self.norm = nn.Parameter(torch.ones(MODEL))
        self.gated_norm = nn.Parameter(torch.ones(INNER))
        self.register_buffer("conv_state", torch.zeros(batch, CONV, WIDTH))
        self.register_buffer("state", torch.zeros(batch, HEADS, HEADDIM, DSTATE))
        self.between: Callable[..., Tensor] = _mamba2
        self.before: Callable[..., Tensor] = _normed

    def forward(self, x: Tensor, position: Tensor) -> Tensor:
        """The residual stream after this layer."""
        projected = self.in_proj(self.before(x, self.norm))
        y = self.between(
            projected,
            self.conv_state,
            self.state,
            *(self.conv_weight, self.conv_bias, self.A_log, self.dt_bias),
            *(self.skip, self.gated_norm),
        )
        return x + self.out_proj(y)


class AttentionStep(nn.Module):
    """One token through attention and a gated MLP, over `length` cached positions."""

    def __init__(self, batch: int, length: int) -> None:
        """Random weights, and an empty cache for `batch` sequences."""
        super().__init__()
        keys = KEY_HEADS * ATTENTION_DIM
        self.qkv = nn.Linear(MODEL, MODEL + 2 * keys, bias=False)
        self.out_proj = nn.Linear(MODEL, MODEL, bias=False)
        self.gate_up = nn.Linear(MODEL, 2 * HIDDEN, bias=False)
        self.down = nn.Linear(HIDDEN, MODEL, bias=False)
        self.norm = nn.Parameter(torch.ones(MODEL))
        self.mlp_norm = nn.Parameter(torch.ones(MODEL))
        for name in ("keys", "values"):
            self.register_buffer(name, torch.zeros(batch, KEY_HEADS, length, ATTENTION_DIM))
        self.between: Callable[..., Tensor] = _attention
        self.before: Callable[..., Tensor] = _normed
        self.gated: Callable[..., Tensor] = _gated

    def forward(self, x: Tensor, position: Tensor) -> Tensor:
        """The residual stream after this layer."""
        qkv = self.qkv(self.before(x, self.norm))
        x = x + self.out_proj(self.between(qkv, self.keys, self.values, position))
        return x + self.down(self.gated(self.gate_up(self.before(x, self.mlp_norm))))


class HybridStack(nn.Module):
    """One decode step: the tokens of a batch to logits."""

    def __init__(
        self,
        batch: int,
        length: int,
        mamba_layers: int = MAMBA_LAYERS,
        attention_layers: int = ATTENTION_LAYERS,
    ) -> None:
        """`length` is how many positions the caches of attention have."""
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, MODEL)
        # Attention is spread evenly among the Mamba2 layers.
        total = mamba_layers + attention_layers
        count = attention_layers
        is_attention = [(i + 1) * count // total > i * count // total for i in range(total)]
        self.layers = nn.ModuleList(
            AttentionStep(batch, length) if attention else Mamba2Step(batch)
            for attention in is_attention
        )
        self.norm = nn.Parameter(torch.ones(MODEL))
        self.head = nn.Linear(MODEL, VOCABULARY, bias=False)
        self.register_buffer("position", torch.zeros(1, dtype=torch.int64))

    def forward(self, tokens: Tensor) -> Tensor:
        """(batch,) tokens to (batch, VOCABULARY) logits; moves the states on by one position."""
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x, self.position)
        self.position += 1
        return self.head(_normed(x, self.norm))

    def reset(self) -> None:
        """Start new sequences."""
        for buffer in self.buffers():
            buffer.zero_()

    def weight_bytes(self) -> int:
        """Bytes of the projections' weights, each of which a step reads once."""
        linears = [module for module in self.modules() if isinstance(module, nn.Linear)]
        return sum(one.weight.numel() * one.weight.element_size() for one in linears)


def make(batch: int, length: int, *, fused: bool = True, **layers: int) -> HybridStack:
    """The stack in bfloat16 on the current CUDA device, without gradients.

    `layers` are numbers of layers, as for `HybridStack`.
    """
    with torch.device("cuda"):
        stack = HybridStack(batch, length, **layers).to(torch.bfloat16).requires_grad_(False)
    if fused:
        compiled: dict[Any, Any] = {}
        for layer in stack.layers:
            for name in ("between", "before", "gated"):
                function = getattr(layer, name, None)
                if function is not None:
                    compiled.setdefault(function, torch.compile(function, dynamic=False))
                    setattr(layer, name, compiled[function])
    return stack.eval()


def _normed(x: Tensor, weight: Tensor) -> Tensor:
    return rms_norm(x, x.shape[-1:], weight, 1e-5)


def _gated(x: Tensor) -> Tensor:
    gate, up = x.chunk(2, -1)
    return silu(gate) * up


def _mamba2(
    projected: Tensor,
    conv_state: Tensor,
    state: Tensor,
    conv_weight: Tensor,
    conv_bias: Tensor,
    a_log: Tensor,
    dt_bias: Tensor,
    skip: Tensor,
    norm: Tensor,
) -> Tensor:
    """From in_proj to out_proj: convolution, state update, gated norm; in fp32 but for states."""
    z, channels, dt = projected.split([INNER, CONV, HEADS], -1)
    window = torch.cat([conv_state[..., 1:], channels[..., None]], -1)
    conv_state.copy_(window)
    channels = silu((window.float() * conv_weight).sum(-1) + conv_bias)
    x, b, c = channels.split([INNER, DSTATE, DSTATE], -1)
    x = x.unflatten(-1, (HEADS, HEADDIM))
    delta = softplus(dt.float() + dt_bias)
    decay = torch.exp(-delta * torch.exp(a_log.float()))
    update = (delta[..., None] * x)[..., None] * b[:, None, None]
    moved = state.float() * decay[..., None, None] + update
    state.copy_(moved)
    y = (moved * c[:, None, None]).sum(-1) + skip[:, None] * x
    return _normed(y.flatten(1) * silu(z.float()), norm.float()).to(projected.dtype)


def _attention(qkv: Tensor, keys: Tensor, values: Tensor, position: Tensor) -> Tensor:
    """From the projection of queries, keys and values to out_proj."""
    width = KEY_HEADS * ATTENTION_DIM
    q, k, v = qkv.split([MODEL, width, width], -1)
    keys.index_copy_(2, position, k.unflatten(-1, (KEY_HEADS, 1, ATTENTION_DIM)))
    values.index_copy_(2, position, v.unflatten(-1, (KEY_HEADS, 1, ATTENTION_DIM)))
    seen = torch.arange(keys.shape[2], device=keys.device) <= position
    # Heads that share keys side by side.
    query = q.unflatten(-1, (KEY_HEADS, ATTENTION_HEADS // KEY_HEADS, ATTENTION_DIM))
    scores = (query @ keys.transpose(2, 3)).float() * ATTENTION_DIM**-0.5
    weights = scores.masked_fill(~seen, float("-inf")).softmax(-1).to(values.dtype)
    return (weights @ values).flatten(1)
