"""The GEMV and scan shapes of a model, and lists of them in files."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from ..artifacts.declaration import Name
from ..artifacts.errors import ArtifactError, SonataError
from ..artifacts.files import read_bounded
from ..artifacts.rules import MAX_SIZE
from ..artifacts.schema import Match, Range, decode, unique_keys

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
    from .shapes_models import shapes_of  # which has the shapes from here

    data = _read(path)
    model, found = shapes_of(data, path)
    stated = next((data[key] for key in ("dtype", "torch_dtype") if key in data), None)
    chosen = dtype or _DTYPES.get(stated if isinstance(stated, str) else "", "bf16")
    gemv: dict[tuple[int, int], GemvShape] = {}
    scans: dict[tuple[int, int], ScanShape] = {}
    for shape in found:
        _check(shape, path)
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


def _check(shape: GemvShape | ScanShape, path: Path) -> None:
    """Refuse what a product or a quotient of sizes has made of them."""
    name = shape.name if isinstance(shape, GemvShape) else "scan"
    for field, size in vars(shape).items():
        if field != "name" and not 1 <= size <= MAX_SIZE:
            raise ConfigError(
                f"{path}: its sizes make {field} of {name} {size}",
                remedy="name the config.json of a model",
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
    """A JSON object, each float or infinity in it null: sizes are integers, and those are kept."""
    # The cache of Hugging Face has links alone; nothing here is run, so one may lead anywhere.
    target = Path(os.path.realpath(path)) if path.is_symlink() else path
    try:
        data = json.loads(
            read_bounded(target, _MAX_BYTES),
            object_pairs_hook=unique_keys,
            parse_float=lambda _: None,
            parse_constant=lambda _: None,
        )
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}", remedy="name a JSON file") from None
    except SonataError as error:
        raise ConfigError(error.what, remedy="name a JSON file") from None
    except RecursionError:
        raise ConfigError(f"{path}: nested too deep", remedy="name a JSON file") from None
    except ValueError as error:  # UnicodeDecodeError and JSONDecodeError are among these
        raise ConfigError(f"{path}: not valid JSON: {error}", remedy="name a JSON file") from None
    if not isinstance(data, dict):
        raise ConfigError(f"{path}: not an object", remedy="name a model's config.json")
    return data
