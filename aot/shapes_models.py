"""What is in a model: its linear layers and scans, by the fields of its configuration.

Defaults are those of the model's own code. Of a mixture of experts the experts themselves are left
out: their weights are no linear layers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from ..artifacts.rules import MAX_SIZE
from .shapes import ConfigError, GemvShape, ScanShape

Shape = GemvShape | ScanShape
# Of the head of each of Zonos' codebooks, before it is padded.
_ZONOS_HEAD = 1025
# What a kind of layer is called, in a list or as a letter of a pattern.
_KINDS = {
    **dict.fromkeys(("mamba", "linear_attention", "M"), "mamba"),
    **dict.fromkeys(("attention", "full_attention", "*"), "attention"),
    **dict.fromkeys(("mlp", "-"), "mlp"),
    **dict.fromkeys(("moe", "E"), "moe"),
    "hybrid": "hybrid",
}


class Config:
    """Sizes in a configuration, each checked."""

    def __init__(self, data: dict[str, Any], path: Path, prefix: str = "") -> None:
        """`prefix` is how messages name the part of the file that this is."""
        self.data = data
        self._path = path
        self._prefix = prefix

    def size(self, *names: str, default: int | None = None) -> int:
        """The first of these fields that there is and that is not null.

        Raises:
            ConfigError: it is no size, or there is none and no default.
        """
        for name in names:
            value = self.data.get(name)
            if value is None or value == "auto":
                continue
            if type(value) is not int or not 1 <= value <= MAX_SIZE:
                raise self.wrong(f"{self._prefix}{name} is {_shown(value)}")
            return value
        if default is None:
            raise self.wrong(f"no {' or '.join(self._prefix + name for name in names)}")
        return default

    def optional(self, name: str) -> int:
        """A size that may also be 0, null or absent: then it is 0."""
        return self.size(name) if self.data.get(name) else 0

    def part(self, name: str) -> Config:
        """A nested configuration, empty if it is absent."""
        value = self.data.get(name) or {}
        if not isinstance(value, dict):
            raise self.wrong(f"{self._prefix}{name} is no object")
        return Config(value, self._path, f"{self._prefix}{name}.")

    def indices(self, name: str) -> frozenset[int] | None:
        """A list of layers, null being empty; None if it is absent."""
        if name not in self.data:
            return None
        value = self.data[name] or []
        if not isinstance(value, list) or not all(type(item) is int for item in value):
            raise self.wrong(f"{self._prefix}{name} is no list of layers")
        return frozenset(value)

    def kinds(self) -> frozenset[str] | None:
        """The kinds of layers that there are; None if the file does not say."""
        names = ("layers_block_type", "layer_types", "hybrid_override_pattern")
        name = next((name for name in names if self.data.get(name)), None)
        if name is None:
            return None
        value = self.data[name]
        if not isinstance(value, list | str):
            raise self.wrong(f"{self._prefix}{name} is {_shown(value)}")
        unknown = [item for item in value if not isinstance(item, str) or item not in _KINDS]
        if unknown:
            raise self.wrong(f"{self._prefix}{name} has a layer {_shown(unknown[0])}")
        return frozenset(_KINDS[item] for item in value)

    def wrong(self, problem: str) -> ConfigError:
        """The error that says what is wrong with the file."""
        return ConfigError(f"{self._path}: {problem}", remedy="name the config.json of a model")


def _shown(value: object) -> str:
    shown = repr(value)
    return shown if len(shown) <= 60 else f"{shown[:57]}..."


def shapes_of(data: dict[str, Any], path: Path) -> tuple[str, list[Shape]]:
    """What a configuration is of, and every shape in it; equal ones come more than once.

    Raises:
        ConfigError: no such model, or a size that is missing or wrong.
    """
    model, make = _reader(data, path)
    return model, [*make(Config(data, path))]


def _mixer(
    hidden: int, inner: int, heads: int, headdim: int, dstate: int, groups: int
) -> Iterator[Shape]:
    yield GemvShape("in_proj", 2 * inner + 2 * groups * dstate + heads, hidden)
    yield GemvShape("out_proj", hidden, inner)
    yield ScanShape(headdim, dstate, heads, groups)


def _attention(hidden: int, out: int, heads: int, kv_heads: int, head: int) -> Iterator[Shape]:
    """`hidden` goes in and `out` comes out."""
    yield GemvShape("q_proj", heads * head, hidden)
    yield GemvShape("k_proj", kv_heads * head, hidden)
    yield GemvShape("o_proj", out, heads * head)


def _mamba2(config: Config) -> Iterator[Shape]:
    hidden = config.size("hidden_size")
    inner = config.size("expand", default=2) * hidden
    headdim = config.size("head_dim", default=64)
    heads = config.size("num_heads", default=inner // headdim)
    state, groups = config.size("state_size", default=128), config.size("n_groups", default=8)
    yield from _mixer(hidden, inner, heads, headdim, state, groups)
    yield GemvShape("lm_head", config.size("vocab_size"), hidden)


def _bamba_mixers(config: Config, *, attends: bool) -> Iterator[Shape]:
    """Mamba2 and attention as Bamba has them, and those that took them over."""
    hidden = config.size("hidden_size")
    inner = config.size("mamba_d_ssm", default=config.size("mamba_expand", default=2) * hidden)
    heads = config.size("mamba_n_heads")
    headdim = config.size("mamba_d_head", default=inner // heads)
    state, groups = config.size("mamba_d_state"), config.size("mamba_n_groups", default=1)
    yield from _mixer(hidden, inner, heads, headdim, state, groups)
    if attends:
        attention = config.size("num_attention_heads")
        head = config.size("head_dim", default=hidden // attention)
        kv_heads = config.size("num_key_value_heads", default=attention)
        yield from _attention(hidden, hidden, attention, kv_heads, head)
    yield GemvShape("lm_head", config.size("vocab_size"), hidden)


def _bamba(config: Config) -> Iterator[Shape]:
    # Where the file does not say which layers attend, some are taken to.
    yield from _bamba_mixers(config, attends=config.indices("attn_layer_indices") != frozenset())
    yield from _gated_mlp(config)


def _falcon_h1(config: Config) -> Iterator[Shape]:
    yield from _bamba_mixers(config, attends=True)
    yield from _gated_mlp(config)


def _granite(config: Config) -> Iterator[Shape]:
    kinds = config.kinds()
    yield from _bamba_mixers(config, attends=kinds is None or "attention" in kinds)
    hidden, middle = config.size("hidden_size"), config.size("shared_intermediate_size")
    yield GemvShape("input_linear", 2 * middle, hidden)
    yield GemvShape("output_linear", hidden, middle)


def _gated_mlp(config: Config) -> Iterator[Shape]:
    hidden, middle = config.size("hidden_size"), config.size("intermediate_size")
    yield GemvShape("gate_proj", middle, hidden)
    yield GemvShape("down_proj", hidden, middle)


def _zamba2(config: Config) -> Iterator[Shape]:
    # Each second name is that of files from before transformers had the model.
    hidden = config.size("hidden_size")
    inner = config.size("mamba_expand", "expansion_factor", default=2) * hidden
    heads = config.size("n_mamba_heads", default=inner // config.size("mamba_headdim", default=64))
    headdim = config.size("mamba_headdim", default=inner // heads)
    state = config.size("mamba_d_state", "state_size", default=64)
    groups = config.size("mamba_ngroups", default=1)
    yield from _mixer(hidden, inner, heads, headdim, state, groups)
    yield GemvShape("lm_head", config.size("vocab_size"), hidden)
    kinds = config.kinds()
    if kinds is not None and "hybrid" not in kinds:
        return
    # Its attention sees the embedding beside the hidden state.
    wide, attention = 2 * hidden, config.size("num_attention_heads")
    kv_heads = config.size("num_key_value_heads", default=attention)
    head = config.size("attention_head_dim", default=wide // attention)
    yield from _attention(wide, hidden, attention, kv_heads, head)
    middle = config.size("intermediate_size", "ffn_hidden_size", default=4 * hidden)
    yield GemvShape("gate_up_proj", 2 * middle, hidden)
    yield GemvShape("down_proj", hidden, middle)
    yield GemvShape("linear", hidden, hidden)
    # The layers share these weights, and each adapts them by a product of its own.
    rank = config.size("adapter_rank", "lora_rank", default=128)
    yield GemvShape("gate_up_proj_adapter.0", rank, hidden)
    yield GemvShape("gate_up_proj_adapter.1", 2 * middle, rank)
    adapted = ("use_shared_attention_adapter", "use_shared_attention_lora")
    if any(config.data.get(name) for name in adapted):
        yield GemvShape("q_proj_adapter.0", rank, wide)
        yield GemvShape("q_proj_adapter.1", wide, rank)


def _nemotron_h(config: Config) -> Iterator[Shape]:
    hidden = config.size("hidden_size")
    kinds = config.kinds() or {"mamba", "attention", "mlp"}
    if "mamba" in kinds:
        heads, headdim = config.size("mamba_num_heads"), config.size("mamba_head_dim")
        state, groups = config.size("ssm_state_size"), config.size("n_groups", "mamba_n_groups")
        yield from _mixer(hidden, heads * headdim, heads, headdim, state, groups)
    if "attention" in kinds:
        attention = config.size("num_attention_heads")
        kv_heads = config.size("num_key_value_heads", default=attention)
        head = config.size("attention_head_dim", "head_dim", default=hidden // attention)
        yield from _attention(hidden, hidden, attention, kv_heads, head)
    if "mlp" in kinds:
        middle = config.size("intermediate_size")
        yield GemvShape("up_proj", middle, hidden)
        yield GemvShape("down_proj", hidden, middle)
    if "moe" in kinds:
        middle = config.size("moe_shared_expert_intermediate_size")
        yield GemvShape("shared_experts.up_proj", middle, hidden)
        yield GemvShape("shared_experts.down_proj", hidden, middle)
        if latent := config.optional("moe_latent_size"):
            yield GemvShape("fc1_latent_proj", latent, hidden)
            yield GemvShape("fc2_latent_proj", hidden, latent)
    yield GemvShape("lm_head", config.size("vocab_size"), hidden)


def _mamba_ssm(config: Config) -> Iterator[Shape]:
    hidden, mixer = config.size("d_model"), config.part("ssm_cfg")
    attends = config.indices("attn_layer_idx") or frozenset()
    layers = config.size("n_layer", default=len(attends) + 1)
    has_mixers = not attends.issuperset(range(layers))
    if has_mixers:
        layer = mixer.data.get("layer", "Mamba1")  # as mamba_ssm itself takes it
        if layer != "Mamba2":
            raise config.wrong(f"its layers are {str(layer)[:40]!r}, and only Mamba2 has kernels")
        inner = mixer.size("expand", default=2) * hidden
        headdim, state = mixer.size("headdim", default=64), mixer.size("d_state", default=128)
        heads = mixer.size("d_ssm", default=inner) // headdim
        yield from _mixer(hidden, inner, heads, headdim, state, mixer.size("ngroups", default=1))
        yield from _mamba_ssm_mlp(config.optional("d_intermediate"), hidden)
    if attends:
        attention = config.part("attn_cfg")
        heads = attention.size("num_heads")
        kv_heads = attention.size("num_heads_kv", default=heads)
        head = attention.size("head_dim", default=hidden // heads)
        beside = _rounded(attention.optional("mlp_dim"), 256)
        yield GemvShape("attn.in_proj", (heads + 2 * kv_heads) * head + beside, hidden)
        yield GemvShape("attn.out_proj", hidden, heads * head + beside // 2)
        own = "attn_mlp_d_intermediate" in config.data  # Zonos'
        name = "attn_mlp_d_intermediate" if own else "d_intermediate"
        yield from _mamba_ssm_mlp(config.optional(name), hidden)
    if config.data.get("vocab_size"):
        multiple = config.size("pad_vocab_size_multiple", default=8)
        yield GemvShape("lm_head", _rounded(config.size("vocab_size"), multiple), hidden)


def _mamba_ssm_mlp(middle: int, hidden: int) -> Iterator[Shape]:
    if middle:
        middle = _rounded(middle, 128)
        yield GemvShape("mlp.fc1", 2 * middle, hidden)
        yield GemvShape("mlp.fc2", hidden, middle)


def _zonos(config: Config) -> Iterator[Shape]:
    backbone = config.part("backbone")
    yield from _mamba_ssm(backbone)
    multiple = config.size("pad_vocab_to_multiple_of", default=8)
    yield GemvShape("head", _rounded(_ZONOS_HEAD, multiple), backbone.size("d_model"))


def _rounded(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple


_MODELS: dict[str, Callable[[Config], Iterable[Shape]]] = {
    "bamba": _bamba,
    "falcon_h1": _falcon_h1,
    "granitemoehybrid": _granite,
    "mamba2": _mamba2,
    "nemotron_h": _nemotron_h,
    "zamba2": _zamba2,
}


def _reader(data: dict[str, Any], path: Path) -> tuple[str, Callable[[Config], Iterable[Shape]]]:
    kind = data.get("model_type")
    if isinstance(kind, str) and kind in _MODELS:
        return kind, _MODELS[kind]
    if isinstance(data.get("backbone"), dict):
        return "zonos", _zonos
    if kind is None and "d_model" in data:
        return "mamba_ssm", _mamba_ssm
    raise ConfigError(
        f"{path}: model_type is {str(kind)[:40]!r}",
        remedy=f"name a config of {', '.join(_MODELS)}, mamba_ssm or Zonos",
    )
