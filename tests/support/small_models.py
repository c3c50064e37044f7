"""Small models of transformers with random weights, of every family that `patch` knows."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

VOCABULARY = 64
# Mamba2 mixers of each model.
FAMILIES = {
    "mamba2": 2,
    "bamba": 2,
    "zamba2": 2,
    "falcon_h1": 2,
    "nemotron_h": 2,
    "granitemoehybrid": 2,
}


@contextmanager
def _without_rooms() -> Iterator[None]:
    """Import as from elsewhere: transformers takes our folder `kernels` for another package."""
    root, kept = Path(__file__).resolve().parents[2], list(sys.path)
    sys.path[:] = [path for path in kept if Path(path or ".").resolve() != root]
    try:
        yield
    finally:
        sys.path[:] = kept


@_without_rooms()
def make(family: str, headdim: int, dstate: int, hidden: int = 32, **changes: Any) -> Any:
    """A causal language model in bfloat16, without gradients, in evaluation mode.

    Its mixers have 2 * hidden / headdim heads; changes are of its configuration.
    """
    import transformers

    heads = 2 * hidden // headdim
    attention = {"num_attention_heads": 4, "num_key_value_heads": 2}
    mamba = {
        "mamba_n_heads": heads,
        "mamba_d_head": headdim,
        "mamba_d_state": dstate,
        "mamba_n_groups": 1,
        "mamba_expand": 2,
        "mamba_chunk_size": 16,
    }
    common = {"vocab_size": VOCABULARY, "hidden_size": hidden, "pad_token_id": 0}
    wide = {"intermediate_size": 2 * hidden}
    configurations: dict[str, tuple[str, dict[str, Any]]] = {
        "mamba2": (
            "Mamba2",
            {
                "num_hidden_layers": 2,
                "num_heads": heads,
                "head_dim": headdim,
                "state_size": dstate,
                "n_groups": 1,
                "expand": 2,
                "chunk_size": 16,
            },
        ),
        "bamba": (
            "Bamba",
            {**attention, **mamba, **wide, "num_hidden_layers": 3, "attn_layer_indices": [1]},
        ),
        "zamba2": (
            "Zamba2",
            {
                **attention,
                **wide,
                "num_key_value_heads": 4,
                "num_hidden_layers": 2,
                "layers_block_type": ["mamba", "hybrid"],
                "hybrid_layer_ids": [1],
                "mamba_headdim": headdim,
                "n_mamba_heads": heads,
                "mamba_d_state": dstate,
                "mamba_ngroups": 1,
                "mamba_expand": 2,
                "chunk_size": 16,
                "num_mem_blocks": 1,
                "adapter_rank": 8,
            },
        ),
        "falcon_h1": (
            "FalconH1",
            {**attention, **mamba, **wide, "num_hidden_layers": 2, "mamba_d_ssm": 2 * hidden},
        ),
        "nemotron_h": (
            "NemotronH",
            {
                **attention,
                **wide,
                "layers_block_type": ["mamba", "attention", "mamba", "moe"],
                "mamba_num_heads": heads,
                "mamba_head_dim": headdim,
                "ssm_state_size": dstate,
                "n_groups": 1,
                "chunk_size": 16,
                "n_routed_experts": 4,
                "num_experts_per_tok": 2,
                "moe_intermediate_size": 2 * hidden,
                "moe_shared_expert_intermediate_size": 2 * hidden,
            },
        ),
        "granitemoehybrid": (
            "GraniteMoeHybrid",
            {
                **attention,
                **mamba,
                **wide,
                "num_hidden_layers": 3,
                "layer_types": ["mamba", "attention", "mamba"],
                "num_local_experts": 4,
                "num_experts_per_tok": 2,
                "shared_intermediate_size": 2 * hidden,
            },
        ),
    }
    name, own = configurations[family]
    configuration = getattr(transformers, f"{name}Config")(**{**common, **own, **changes})
    model = getattr(transformers, f"{name}ForCausalLM")(configuration)
    return model.to(torch.bfloat16).requires_grad_(False).eval()


def tokens(batch: int, length: int, device: str = "cpu") -> torch.Tensor:
    """Random tokens, none of which is padding."""
    return torch.randint(1, VOCABULARY, (batch, length), device=device)


def generate(model: Any, ids: torch.Tensor, count: int = 4) -> tuple[torch.Tensor, torch.Tensor]:
    """Greedy tokens after `ids`, and the logits that each was taken from, in float32."""
    made = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=count,
        min_new_tokens=count,
        do_sample=False,
        output_logits=True,
        return_dict_in_generate=True,
    )
    return made.sequences, torch.stack(made.logits).float()
