"""Why a build would compile something: which of the inputs of a cache key has changed."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from ..artifacts.errors import SonataError
from ..artifacts.files import read_bounded
from .cache import INPUTS, RECORD, Cache
from .plan import Job

_MAX_BYTES = 2**20
State = Literal["cached", "changed", "new"]


@dataclass(frozen=True)
class Planned:
    """A job, whether the cache has it, and if not, how it differs from the last that it had.

    `changed` is one of which the cache has another version; `why` is then never empty.
    """

    job: Job
    state: State
    why: tuple[str, ...] = ()


def explain(jobs: Sequence[Job], cache: Cache) -> list[Planned]:
    """The state of each job, in order.

    Raises:
        UntrustedPath: somebody else can write to the cache.
    """
    cache.require_trusted()
    missing = {job.key for job in jobs if cache.find(job.key) is None}
    earlier = _earlier(cache) if missing else {}
    planned = []
    for job in jobs:
        folder = earlier.get(_name(job.spec.name, job.variant, job.arch.name))
        if job.key not in missing:
            planned.append(Planned(job, "cached"))
        elif folder is None:
            planned.append(Planned(job, "new"))
        else:
            planned.append(Planned(job, "changed", tuple(_differences(folder, job))))
    return planned


def _name(kernel: str, variant: dict[str, Any], arch: str) -> str:
    return json.dumps([kernel, variant, arch])


def _earlier(cache: Cache) -> dict[str, Path]:
    """By kernel, variant and architecture the entry that was used last."""
    found: dict[str, tuple[int, Path]] = {}
    for folder in cache.compiled.iterdir() if cache.compiled.is_dir() else ():
        record = _read(folder / RECORD)
        try:
            binary = record["binary"]
            name = _name(binary["kernel"], binary["variant"], binary["arch"])
            used = folder.stat().st_mtime_ns
        except (KeyError, TypeError, OSError):
            continue  # damaged, or of a version to come
        found[name] = max(found.get(name, (0, folder)), (used, folder))
    return {name: folder for name, (_, folder) in found.items()}


def _read(path: Path) -> Any:
    """What a file of an entry says; it is only shown, so nothing is checked but its owner."""
    try:
        return json.loads(read_bounded(path, _MAX_BYTES, owned=True))
    except (OSError, SonataError, ValueError, RecursionError):
        return None


def _differences(folder: Path, job: Job) -> Iterator[str]:
    before, now = _read(folder / INPUTS), job.record()
    if not isinstance(before, dict):
        yield "unknown: the cached one does not say what it was made from"
        return
    for name, value in now.items():
        old = before.get(name)
        if old == value:
            continue
        if not isinstance(value, dict) or not isinstance(old, dict):
            yield _PLAIN.get(name, name)
            continue
        for part in sorted({*old, *value}):
            if old.get(part) != value.get(part):
                yield _PARTS[name](part, old.get(part), value.get(part))


def _source(name: str, old: object, new: object) -> str:
    how = " (new)" if old is None else " (gone)" if new is None else ""
    return f"source {name}{how}"


_PLAIN = {
    "recipe": "how the compiler is called",
    "entry_format": "what sonata-aot records",
    "resident": "resident blocks",
}
_PARTS = {
    "declaration": lambda part, old, new: f"declaration: {part}",
    "variant": lambda part, old, new: f"variant: {part}",
    "sources": _source,
    "compiler": lambda part, old, new: f"{part} {old or 'absent'} -> {new or 'absent'}",
}
