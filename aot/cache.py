"""The compile cache: one folder per cache key, put in place whole.

    ROOT/compiled/<key>/record.json   a manifest's record of the binary, and its digest
    ROOT/compiled/<key>/inputs.json   what the key was made from, for people to be shown
    ROOT/compiled/<key>/<sha256>.cubin, <sha256>.ptx
    ROOT/in-use/<random>              the keys that a running build uses
    ROOT/logs/<key>.txt               the compiler's output of a kernel that did not compile
    ROOT/.sonata-aot-scratch/         what a build in progress works with

Whatever is damaged counts as absent and is compiled again. An entry's modification time says when
it was last used. Versions of the tool that write other records have other keys, so they can share
a root as long as they keep these places and their locks.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..artifacts.errors import SonataError, StoreError
from ..artifacts.files import explained, locked, read_bounded
from ..artifacts.manifest import Binary, Sha256
from ..artifacts.places import cache_root
from ..artifacts.schema import canonical_json, decode, digest, encode, parse_json
from ..artifacts.store import make_private, read_object
from ..artifacts.trust import require_trusted
from .leases import lease

# Part of every key. To be raised with any change of what a record says of the same binary.
ENTRY_FORMAT = 1
RECORD = "record.json"
INPUTS = "inputs.json"
_MAX_RECORD_BYTES = 2**20


@dataclass(frozen=True)
class Entry:
    """A compiled binary: its record and the bytes of its two files."""

    binary: Binary
    cubin: bytes
    ptx: bytes

    @property
    def objects(self) -> dict[str, bytes]:
        """File name to bytes, as an artifact directory holds them."""
        return {self.binary.cubin.file_name: self.cubin, self.binary.ptx.file_name: self.ptx}


@dataclass(frozen=True)
class _Record:
    """What `record.json` holds; the digest is of the binary's canonical form."""

    binary: Binary
    digest: Sha256


class Cache:
    """The cache under a root directory; `Cache()` is the user's."""

    def __init__(self, root: Path | None = None) -> None:
        """Name the place; nothing is created before the first write."""
        self.root = root or cache_root()
        self.compiled = self.root / "compiled"
        self.in_use = self.root / "in-use"
        self.logs = self.root / "logs"
        # An unlikely name: what is in it is removed.
        self.scratch = self.root / ".sonata-aot-scratch"

    def require_trusted(self) -> None:
        """Refuse a cache that somebody else could have changed.

        Raises:
            UntrustedPath: naming the directory at fault.
            StoreError: it cannot be examined.
        """
        with explained(self.root, "read the cache in"), contextlib.suppress(FileNotFoundError):
            require_trusted(self.compiled)

    def find(self, key: str) -> Entry | None:
        """The entry of a key, its bytes checked by digest; None if absent or damaged."""
        folder = self.compiled / key
        try:
            data = read_bounded(folder / RECORD, _MAX_RECORD_BYTES, owned=True)
            record = decode(_Record, parse_json(data, str(folder)), str(folder))
            binary = record.binary
            if binary.key != key or record.digest != digest(encode(binary)):
                return None
            cubin, ptx = (
                read_object(folder / payload.file_name, payload, owned=True)
                for payload in (binary.cubin, binary.ptx)
            )
            return Entry(binary, cubin, ptx)
        except (OSError, SonataError):
            return None

    def add(self, entry: Entry, inputs: Mapping[str, Any] | None = None) -> None:
        """Put an entry in place, whole, instead of a damaged one if there is any.

        `inputs`: what its key was made from, which is kept to say later what has changed.

        Raises:
            StoreError: no permission, no space.
        """
        folder = self.compiled / entry.binary.key
        record = _Record(entry.binary, digest(encode(entry.binary)))
        files = {**entry.objects, RECORD: canonical_json(encode(record))}
        if inputs is not None:
            files[INPUTS] = canonical_json(inputs)
        with explained(self.root, "write the cache in"), self._staging() as staging:
            staged = staging / "entry"
            staged.mkdir(mode=0o700)
            for name, data in files.items():
                (staged / name).write_bytes(data)
            if os.path.lexists(folder):
                os.rename(folder, staging / "damaged")
            os.rename(staged, folder)

    def keep_log(self, key: str, log: Path) -> Path:
        """Keep the compiler's output of a failed job; returns where.

        Raises:
            StoreError: no permission, no space.
        """
        kept = self.logs / f"{key}.txt"
        make_private(kept.parent, "write the cache in")
        with explained(kept.parent, "write the cache in"):
            shutil.copyfile(log, kept)
        return kept

    @contextlib.contextmanager
    def using(self, keys: Collection[str]) -> Iterator[None]:
        """Keep these keys from being pruned until the end of the block; then they count as used.

        Does neither where the cache can only be read: what is removed there meanwhile is absent.

        Raises:
            UntrustedPath: somebody else can write there.
        """
        with contextlib.ExitStack() as stack:
            with contextlib.suppress(OSError, StoreError):
                make_private(self.in_use, "write the cache in")
                stack.enter_context(lease(self.in_use, keys))
                stack.callback(self._count_as_used, keys)
            yield

    def _count_as_used(self, keys: Collection[str]) -> None:
        with contextlib.suppress(OSError), os.scandir(self.compiled) as folders:
            newest = max((entry.stat().st_mtime_ns for entry in folders), default=0)
            # Later than any other use, also where the clock has gone back.
            stamp = max(time.time_ns(), newest + 1)
            for key in keys:
                with contextlib.suppress(FileNotFoundError):
                    os.utime(self.compiled / key, ns=(stamp, stamp))

    @contextlib.contextmanager
    def building(self, waiting: Callable[[], None] = lambda: None) -> Iterator[Path]:
        """Hold the build lock of this cache, with an empty scratch directory.

        `waiting` is called once if another build has the lock.

        Builders that race for one cache so compile each kernel once. What a killed builder left is
        cleared by the next.

        Raises:
            StoreError: no permission, no space.
            UntrustedPath: somebody else can write there.
        """
        make_private(self.compiled, "write the cache in")
        with contextlib.ExitStack() as stack:
            with explained(self.root, "write the cache in"):
                stack.enter_context(locked(self.compiled, waiting=waiting))
                shutil.rmtree(self.scratch, ignore_errors=True)
                scratch = stack.enter_context(self._staging())
            yield scratch

    @contextlib.contextmanager
    def _staging(self) -> Iterator[Path]:
        self.scratch.mkdir(mode=0o700, exist_ok=True)
        folder = Path(tempfile.mkdtemp(dir=self.scratch))
        try:
            yield folder
        finally:
            shutil.rmtree(folder, ignore_errors=True)
