"""`sonata-aot shapes` against the models themselves, and against configurations as published."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from sonata_aot.aot.shapes import ScanShape, Shapes, read_config

if TYPE_CHECKING:
    from tests.aot.conftest import Invoke

needs_transformers = pytest.mark.skipif(
    importlib.util.find_spec("transformers") is None, reason="transformers is not installed"
)
# By case: the configuration's class, and how it differs from its defaults.
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "mamba2": ("Mamba2Config", {}),
    "mamba2-1-group": ("Mamba2Config", {"hidden_size": 2560, "num_heads": 80, "n_groups": 1}),
    "bamba": ("BambaConfig", {"attn_layer_indices": [9], "mamba_d_state": 128}),
    "bamba-no-attention": ("BambaConfig", {}),
    "zamba2": ("Zamba2Config", {}),
    "zamba2-adapters": (
        "Zamba2Config",
        {"n_mamba_heads": 80, "mamba_headdim": 64, "use_shared_attention_adapter": True},
    ),
    "nemotron": ("NemotronHConfig", {}),
    "nemotron-dense": (
        "NemotronHConfig",
        {"hybrid_override_pattern": "M-M*-", "hidden_size": 4480, "mamba_head_dim": 80},
    ),
    "nemotron-latent": (
        "NemotronHConfig",
        {"hybrid_override_pattern": "MEM*E", "moe_latent_size": 1024},
    ),
    "falcon": ("FalconH1Config", {}),
    "falcon-d-ssm": (
        "FalconH1Config",
        {"mamba_d_ssm": 4096, "mamba_n_heads": 32, "mamba_d_head": 128, "head_dim": 128},
    ),
    "granite": ("GraniteMoeHybridConfig", {}),
    "granite-attention": (
        "GraniteMoeHybridConfig",
        {"layer_types": ["mamba", "attention"], "num_hidden_layers": 2, "num_key_value_heads": 8},
    ),
}


@needs_transformers
@pytest.mark.parametrize("differences_only", [False, True])
@pytest.mark.parametrize("case", MODELS)
def test_they_are_those_of_the_model_itself(
    case: str, differences_only: bool, tmp_path: Path
) -> None:
    """Of a model that transformers makes, without memory, from what it writes as config.json."""
    import torch
    import transformers

    name, changes = MODELS[case]
    config = getattr(transformers, name)(**changes)
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    path = tmp_path / "config.json"
    config.to_json_file(path, use_diff=differences_only)
    shapes = read_config(path, dtype=None, rows=(1,))
    modules = list(model.modules())
    layers = {m.weight.shape for m in modules if isinstance(m, torch.nn.Linear)}
    assert {(shape.n, shape.k) for shape in shapes.gemv} == layers
    mixers = [m for m in modules if hasattr(m, "A_log")]
    scans = {
        (
            getattr(m, "head_dim", 0) or getattr(m, "mamba_headdim", 0),
            m.ssm_state_size,
            m.num_heads,
            m.n_groups,
        )
        for m in mixers
    }
    assert {(s.headdim, s.dstate, s.heads, s.groups) for s in shapes.scans} == scans


# As the models' authors published them, without what says nothing of sizes.
ZONOS_TRANSFORMER: dict[str, Any] = {
    "backbone": {
        "d_model": 2048,
        "d_intermediate": 0,
        "attn_mlp_d_intermediate": 8192,
        "n_layer": 26,
        "ssm_cfg": {},
        "attn_layer_idx": list(range(26)),
        "attn_cfg": {"causal": True, "num_heads": 16, "num_heads_kv": 4, "rotary_emb_dim": 128},
        "rms_norm": False,
        "norm_epsilon": 1e-5,
    },
    "prefix_conditioner": {"conditioners": [], "projection": "linear"},
    "eos_token_id": 1024,
    "masked_token_id": 1025,
}
MAMBA2_ATTENTION: dict[str, Any] = {
    "d_model": 2560,
    "d_intermediate": 0,
    "n_layer": 64,
    "vocab_size": 50277,
    "ssm_cfg": {"layer": "Mamba2"},
    "attn_layer_idx": [9, 18, 27, 36, 45, 56],
    "attn_cfg": {"causal": True, "d_conv": 4, "head_dim": 128, "num_heads": 30},
    "pad_vocab_size_multiple": 16,
    "tie_embeddings": True,
}
ZAMBA2_OF_ITS_AUTHORS: dict[str, Any] = {
    "model_type": "zamba2",
    "expansion_factor": 2,
    "ffn_hidden_size": 14336,
    "hidden_size": 3584,
    "kv_channels": 112,
    "layers_block_type": ["mamba"] * 6 + ["hybrid"],
    "lora_rank": 128,
    "mamba_headdim": 64,
    "mamba_ngroups": 2,
    "num_attention_heads": 32,
    "num_key_value_heads": 32,
    "rms_norm_eps": 1e-5,
    "state_size": 64,
    "torch_dtype": "bfloat16",
    "use_shared_attention_lora": False,
    "use_shared_block_lora": True,
    "vocab_size": 32000,
}


def of(config: dict[str, Any], folder: Path) -> Shapes:
    path = folder / "config.json"
    path.write_text(json.dumps(config))
    return read_config(path, dtype=None, rows=(1,))


def test_zonos_without_mamba(tmp_path: Path) -> None:
    shapes = of(ZONOS_TRANSFORMER, tmp_path)
    assert shapes.scans == ()
    assert [(shape.name, shape.n, shape.k) for shape in shapes.gemv] == [
        ("attn.in_proj", 3072, 2048),
        ("attn.out_proj", 2048, 2048),
        ("mlp.fc1", 16384, 2048),
        ("mlp.fc2", 2048, 8192),
        ("head", 1032, 2048),
    ]


def test_mamba2_with_attention_in_between(tmp_path: Path) -> None:
    shapes = of(MAMBA2_ATTENTION, tmp_path)
    assert shapes.scans == (ScanShape(64, 128, 80, 1),)
    assert {(shape.n, shape.k) for shape in shapes.gemv} == {
        *((10576, 2560), (2560, 5120)),  # in_proj and out_proj
        *((11520, 2560), (2560, 3840)),  # those of attention
        (50288, 2560),
    }


def test_zamba2_as_its_authors_wrote_it(tmp_path: Path) -> None:
    shapes = of(ZAMBA2_OF_ITS_AUTHORS, tmp_path)
    assert shapes.scans == (ScanShape(64, 64, 112, 2),)
    found = {shape.name: (shape.n, shape.k) for shape in shapes.gemv}
    assert found["in_proj"] == (2 * 7168 + 2 * 2 * 64 + 112, 3584)
    assert found["gate_up_proj"] == (28672, 3584)
    assert found["gate_up_proj_adapter.0"] == (128, 3584)
    assert "q_proj_adapter.0" not in found


@pytest.mark.parametrize("part", [{"d_ssm": 2560}, {"expand": 1}])
def test_a_mixer_of_another_width(tmp_path: Path, part: dict[str, int]) -> None:
    config = {**MAMBA2_ATTENTION, "ssm_cfg": {"layer": "Mamba2", **part}}
    shapes = of(config, tmp_path)
    assert shapes.scans == (ScanShape(64, 128, 40, 1),)
    # With d_ssm the rest of the width is a gated MLP in the same projections.
    assert shapes.gemv[0].n == (10536 if "d_ssm" in part else 5416)


@pytest.mark.parametrize("layer", [None, "Mamba1", "Mamba3"])
def test_layers_that_are_no_mamba2(invoke: Invoke, tmp_path: Path, layer: str | None) -> None:
    """Without a word, those of mamba_ssm are Mamba1."""
    path = tmp_path / "config.json"
    mixer = {} if layer is None else {"layer": layer}
    path.write_text(json.dumps({**MAMBA2_ATTENTION, "ssm_cfg": mixer}))
    result = invoke("shapes", path, "--arch=sm86")
    assert (result.exit_code, result.stdout) == (1, "")
    assert f"its layers are {layer or 'Mamba1'!r}, and only Mamba2 has kernels" in result.stderr


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"layers_block_type": ["mamba", "conv"]}, "layers_block_type has a layer 'conv'"),
        ({"layers_block_type": [7]}, "layers_block_type has a layer 7"),
        ({"layers_block_type": {"a": 1}}, "layers_block_type is {'a': 1}"),
    ],
)
def test_layers_that_nobody_knows(
    invoke: Invoke, tmp_path: Path, change: dict[str, Any], words: str
) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**ZAMBA2_OF_ITS_AUTHORS, **change}))
    result = invoke("shapes", path, "--arch=sm86")
    assert (result.exit_code, result.stdout) == (1, "")
    assert words in result.stderr


def test_a_list_of_layers_that_is_none(invoke: Invoke, tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**MAMBA2_ATTENTION, "attn_layer_idx": ["9"]}))
    assert "attn_layer_idx is no list of layers" in invoke("shapes", path, "--arch=sm86").stderr
