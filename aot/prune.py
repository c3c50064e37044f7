"""What a cache holds, and removing what was used longest ago.

Nothing here reads what an entry says: entries of any version of the tool count.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from ..artifacts.files import explained, locked
from ..artifacts.store import clear_leftovers
from .cache import Cache
from .leases import keys_in_use

_KEY = re.compile(r"[0-9a-f]{64}")
_LOG = re.compile(r"[0-9a-f]{64}\.txt")
# An unlikely name: what is in it is removed.
_TRASH = ".sonata-aot-trash"


@dataclass(frozen=True)
class Item:
    """An entry or a kept log: its key, size in bytes, and last use in ns since 1970."""

    path: Path
    key: str
    bytes: int
    used: int

    @property
    def is_log(self) -> bool:
        """Whether it is the compiler's output of a failed job, and no entry."""
        return self.path.suffix == ".txt"


@dataclass(frozen=True)
class Pruned:
    """What pruning did: how many items and bytes went, and are left; `in_use` bytes had to stay."""

    removed: int
    removed_bytes: int
    left: int
    left_bytes: int
    in_use: int


def contents(cache: Cache) -> list[Item]:
    """All entries and logs, the one used longest ago first.

    Raises:
        StoreError: the cache cannot be read.
        UntrustedPath: somebody else can write there.
    """
    cache.require_trusted()
    with explained(cache.root, "read the cache in"):
        items = [*_items(cache.compiled, _KEY), *_items(cache.logs, _LOG)]
    return sorted(items, key=lambda item: (item.used, item.key))


def prune(cache: Cache, most_bytes: int | None) -> Pruned:
    """Remove what killed builds left, and what was used longest ago until the cache fits.

    Without `most_bytes` everything whole stays. What a running build uses stays always, and so does
    the default artifact directory, but for leftovers in it.

    Raises:
        StoreError: the cache cannot be written.
        UntrustedPath: somebody else can write there.
    """
    items = contents(cache)
    if not cache.root.exists():
        return Pruned(0, 0, 0, 0, 0)
    removed = removed_bytes = busy = 0
    with explained(cache.root, "prune the cache in"):
        cache.in_use.mkdir(mode=0o700, exist_ok=True)
        with keys_in_use(cache.in_use) as used:
            items = contents(cache)
            total = sum(item.bytes for item in items)
            trash = cache.root / _TRASH
            shutil.rmtree(trash, ignore_errors=True)
            trash.mkdir(mode=0o700)
            for item in items:
                if most_bytes is None or total - removed_bytes <= most_bytes:
                    break
                if item.key in used and not item.is_log:
                    busy += item.bytes
                    continue
                # Out of the way at once: nobody sees half an entry.
                os.rename(item.path, trash / item.path.name)
                removed, removed_bytes = removed + 1, removed_bytes + item.bytes
            shutil.rmtree(trash)
            _clear_scratch(cache)
        clear_leftovers(cache.root / "artifacts")
    return Pruned(removed, removed_bytes, len(items) - removed, total - removed_bytes, busy)


def _items(folder: Path, name: re.Pattern[str]) -> Iterator[Item]:
    with contextlib.suppress(FileNotFoundError), os.scandir(folder) as found:
        for entry in found:
            if not name.fullmatch(entry.name):
                continue
            with contextlib.suppress(FileNotFoundError):  # replaced or removed meanwhile
                status = entry.stat(follow_symlinks=False)
                size = status.st_size
                if entry.is_dir(follow_symlinks=False):
                    with os.scandir(entry.path) as files:
                        size = sum(file.stat(follow_symlinks=False).st_size for file in files)
                key = entry.name.partition(".")[0]
                yield Item(Path(entry.path), key, size, status.st_mtime_ns)


def _clear_scratch(cache: Cache) -> None:
    """Remove what killed builds worked with, unless a build is at work: it cleared that itself."""
    if not cache.compiled.exists():
        return
    with contextlib.suppress(BlockingIOError), locked(cache.compiled, wait=False):
        shutil.rmtree(cache.scratch, ignore_errors=True)
