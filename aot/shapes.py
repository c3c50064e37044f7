"""The GEMV and scan shapes of a model, out of its configuration file."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from ..artifacts.declaration import Name
from ..artifacts.errors import ArtifactError, SonataError
from ..artifacts.files import read_bounded
from ..artifacts.rules import MAX_SIZE
from ..artifacts.schema import Match, Range, decode, parse_json

_MAX_BYTES = 2**24
Size = Annotated[int, Range(1, MAX_SIZE)]
Label = Annotated[str, Match(r"[A-Za-z0-9_.-]{1,64}")]


@dataclass(frozen=True)
class GemvShape:
    """A linear layer with a weight of (n, k)."""

    name: Label
    n: Size
    k: Size


@dataclass(frozen=True)
class ScanShape:
    """A scan; what decides its variant are headdim and dstate."""

    headdim: Size
    dstate: Size
    heads: Size
    groups: Size


@dataclass(frozen=True)
class Shapes:
    """What a model calls kernels with: `rows` are the numbers of rows of x, 1 to 8."""

    model: Name
    dtype: Literal["bf16", "f16"]
    rows: tuple[Annotated[int, Range(1, 8)], ...]
    gemv: tuple[GemvShape, ...]
    scans: tuple[ScanShape, ...]


class ConfigError(SonataError):
    """A model's configuration, or a list of shapes, that cannot be used."""


_DTYPES = {"bfloat16": "bf16", "float16": "f16"}


def read_config(path: Path, *, dtype: str | None, rows: tuple[int, ...]) -> Shapes:
    """The shapes of a model: of a Hugging Face `config.json`, or one of mamba_ssm or Zonos.

    Each stands once, by the first layer that has it. Without `dtype` it is the file's; bf16 where
    that has none, or another.

    Raises:
        ConfigError: no such file, no such model, or a size that is missing or wrong.
    """
    data = _read(path)
    model, make = _reader(data, path)
    config = _Config(data, path)
    found = [*make(config)]
    stated = next((data[key] for key in ("dtype", "torch_dtype") if key in data), None)
    chosen = dtype or _DTYPES.get(stated if isinstance(stated, str) else "", "bf16")
    gemv: dict[tuple[int, int], GemvShape] = {}
    scans: dict[tuple[int, int], ScanShape] = {}
    for shape in found:
        if isinstance(shape, GemvShape):
            gemv.setdefault((shape.n, shape.k), shape)
        else:
            scans.setdefault((shape.headdim, shape.dstate), shape)
    return Shapes(
        model,
        "f16" if chosen == "f16" else "bf16",
        rows,
        tuple(gemv.values()),
        tuple(scans.values()),
    )


def read_list(path: Path) -> Shapes:
    """The shapes in a file that `sonata-aot shapes --json` has written.

    Raises:
        ConfigError: it is no such file.
    """
    data = _read(path)
    try:
        return decode(Shapes, data.get("shapes"), f"{path}: shapes")
    except ArtifactError as error:
        raise ConfigError(
            error.what, remedy="write it with `sonata-aot shapes CONFIG --json > FILE`"
        ) from None


def _read(path: Path) -> dict[str, Any]:
    try:
        data = parse_json(_without_floats(read_bounded(path, _MAX_BYTES)), str(path))
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}", remedy="name a JSON file") from None
    except SonataError as error:
        raise ConfigError(error.what, remedy="name a JSON file") from None
    if not isinstance(data, dict):
        raise ConfigError(f"{path}: not an object", remedy="name a model's config.json")
    return data


def _without_floats(data: bytes) -> bytes:
    """The same JSON with each float or infinity null: sizes are integers, and those are kept."""
    try:
        content = json.loads(data, parse_float=lambda _: None, parse_constant=lambda _: None)
    except (ValueError, RecursionError):
        return data  # what is wrong is said by the strict parser
    return json.dumps(content).encode()


class _Config:
    """Sizes in a configuration, each checked."""

    def __init__(self, data: dict[str, Any], path: Path, prefix: str = "") -> None:
        self.data = data
        self._path = path
        self._prefix = prefix

    def size(self, *names: str, default: int | None = None) -> int:
        """The first of these fields that there is and that is not null."""
        for name in names:
            value = self.data.get(name)
            if value is None or value == "auto":
                continue
            if type(value) is not int or not 1 <= value <= MAX_SIZE:
                raise self._wrong(f"{self._prefix}{name} is {value!r}")
            return value
        if default is None:
            raise self._wrong(f"no {' or '.join(self._prefix + name for name in names)}")
        return default

    def part(self, name: str) -> _Config:
        """A nested configuration, empty if it is absent."""
        value = self.data.get(name) or {}
        if not isinstance(value, dict):
            raise self._wrong(f"{self._prefix}{name} is no object")
        return _Config(value, self._path, f"{self._prefix}{name}.")

    def _wrong(self, problem: str) -> ConfigError:
        return ConfigError(f"{self._path}: {problem}", remedy="name the config.json of a model")


Shape = GemvShape | ScanShape


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


def _mamba2(config: _Config) -> Iterator[Shape]:
    hidden = config.size("hidden_size")
    inner = config.size("expand", default=2) * hidden
    headdim = config.size("head_dim", default=64)
    heads = config.size("num_heads", default=inner // headdim)
    state, groups = config.size("state_size", default=128), config.size("n_groups", default=8)
    yield from _mixer(hidden, inner, heads, headdim, state, groups)
    yield GemvShape("lm_head", config.size("vocab_size"), hidden)


def _bamba(config: _Config) -> Iterator[Shape]:
    hidden, middle = config.size("hidden_size"), config.size("intermediate_size")
    inner = config.size("mamba_d_ssm", default=config.size("mamba_expand", default=2) * hidden)
    heads = config.size("mamba_n_heads")
    headdim = config.size("mamba_d_head", default=inner // heads)
    state, groups = config.size("mamba_d_state"), config.size("mamba_n_groups", default=1)
    yield from _mixer(hidden, inner, heads, headdim, state, groups)
    attention = config.size("num_attention_heads")
    head = config.size("head_dim", default=hidden // attention)
    kv_heads = config.size("num_key_value_heads", default=attention)
    yield from _attention(hidden, hidden, attention, kv_heads, head)
    yield GemvShape("gate_proj", middle, hidden)
    yield GemvShape("down_proj", hidden, middle)
    yield GemvShape("lm_head", config.size("vocab_size"), hidden)


def _zamba2(config: _Config) -> Iterator[Shape]:
    hidden = config.size("hidden_size")
    inner = config.size("mamba_expand", default=2) * hidden
    heads = config.size("n_mamba_heads")
    headdim = config.size("mamba_headdim", default=inner // heads)
    state, groups = config.size("mamba_d_state"), config.size("mamba_ngroups", default=1)
    yield from _mixer(hidden, inner, heads, headdim, state, groups)
    # Its attention sees the embedding beside the hidden state.
    wide, attention = 2 * hidden, config.size("num_attention_heads")
    kv_heads = config.size("num_key_value_heads", default=attention)
    head = config.size("attention_head_dim", default=wide // attention)
    yield from _attention(wide, hidden, attention, kv_heads, head)
    middle = config.size("intermediate_size", default=4 * hidden)
    yield GemvShape("gate_up_proj", 2 * middle, hidden)
    yield GemvShape("down_proj", hidden, middle)
    yield GemvShape("linear", hidden, hidden)
    yield GemvShape("lm_head", config.size("vocab_size"), hidden)


def _nemotron_h(config: _Config) -> Iterator[Shape]:
    hidden, middle = config.size("hidden_size"), config.size("intermediate_size")
    heads, headdim = config.size("mamba_num_heads"), config.size("mamba_head_dim")
    state, groups = config.size("ssm_state_size"), config.size("n_groups", "mamba_n_groups")
    yield from _mixer(hidden, heads * headdim, heads, headdim, state, groups)
    attention = config.size("num_attention_heads")
    kv_heads = config.size("num_key_value_heads", default=attention)
    head = config.size("attention_head_dim", "head_dim", default=hidden // attention)
    yield from _attention(hidden, hidden, attention, kv_heads, head)
    yield GemvShape("up_proj", middle, hidden)
    yield GemvShape("down_proj", hidden, middle)
    yield GemvShape("lm_head", config.size("vocab_size"), hidden)


def _mamba_ssm(config: _Config) -> Iterator[Shape]:
    hidden, mixer = config.size("d_model"), config.part("ssm_cfg")
    inner = config.size("d_ssm", default=mixer.size("expand", default=2) * hidden)
    headdim, state = mixer.size("headdim", default=64), mixer.size("d_state", default=128)
    groups = mixer.size("ngroups", default=1)
    yield from _mixer(hidden, inner, inner // headdim, headdim, state, groups)
    attention = config.part("attn_cfg")
    if config.data.get("attn_layer_idx"):
        heads = attention.size("num_heads")
        kv_heads = attention.size("num_heads_kv", default=heads)
        head = attention.size("head_dim", default=hidden // heads)
        yield GemvShape("attn.in_proj", (heads + 2 * kv_heads) * head, hidden)
        yield GemvShape("attn.out_proj", hidden, heads * head)
    middle = config.data.get("d_intermediate") or config.data.get("attn_mlp_d_intermediate")
    if middle:
        middle = config.size("d_intermediate") if config.data.get("d_intermediate") else middle
        yield GemvShape("mlp.fc1", 2 * middle, hidden)
        yield GemvShape("mlp.fc2", hidden, middle)
    if config.data.get("vocab_size"):
        multiple = config.size("pad_vocab_size_multiple", default=1)
        yield GemvShape("lm_head", -(-config.size("vocab_size") // multiple) * multiple, hidden)


# Outputs of the head of each codebook.
_ZONOS_HEAD = 1025


def _zonos(config: _Config) -> Iterator[Shape]:
    backbone = config.part("backbone")
    yield from _mamba_ssm(backbone)
    yield GemvShape("head", _ZONOS_HEAD, backbone.size("d_model"))


_MODELS: dict[str, Callable[[_Config], Iterator[Shape]]] = {
    "mamba2": _mamba2,
    "bamba": _bamba,
    "falcon_h1": _bamba,  # of the same fields
    "zamba2": _zamba2,
    "nemotron_h": _nemotron_h,
}


def _reader(data: dict[str, Any], path: Path) -> tuple[str, Callable[[_Config], Iterator[Shape]]]:
    kind = data.get("model_type")
    if isinstance(kind, str) and kind in _MODELS:
        return kind, _MODELS[kind]
    if isinstance(data.get("backbone"), dict):
        return "zonos", _zonos
    if kind is None and "d_model" in data:
        return "mamba_ssm", _mamba_ssm
    known = ", ".join(sorted(_MODELS))
    raise ConfigError(
        f"{path}: model_type is {str(kind)[:40]!r}",
        remedy=f"name a config of {known}, mamba_ssm or Zonos",
    )
