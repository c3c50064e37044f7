"""Which cache entries running builds use, so that pruning leaves them alone.

A build writes the keys of its plan into a file of its own in `ROOT/in-use/` and holds a lock on
that file until it ends, however it ends. Whoever prunes holds the lock of the folder, so that no
build begins meanwhile; a file that nobody has locked is a dead build's.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import stat
from collections.abc import Iterable, Iterator
from pathlib import Path

from ..artifacts.files import locked

_NAME = re.compile(r"[0-9a-f]{32}")


@contextlib.contextmanager
def lease(folder: Path, keys: Iterable[str]) -> Iterator[None]:
    """Name these keys as used until the end of the block.

    Raises:
        OSError: the folder cannot be written, or its file system has no locks.
    """
    path = folder / os.urandom(16).hex()
    with contextlib.ExitStack() as stack:
        with locked(folder, shared=True):
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
            descriptor = os.open(path, flags, 0o600)
            stack.callback(os.close, descriptor)
            stack.callback(path.unlink, missing_ok=True)
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            with open(descriptor, "wb", closefd=False) as file:
                file.writelines(f"{key}\n".encode() for key in keys)
        yield


def _is_lease(path: Path) -> bool:
    """Whether a file can be a lease: what else is there is somebody's own."""
    return _NAME.fullmatch(path.name) is not None and stat.S_ISREG(path.lstat().st_mode)


@contextlib.contextmanager
def keys_in_use(folder: Path) -> Iterator[set[str]]:
    """The keys that running builds use; none is added before the end of the block.

    Clears what dead builds left.

    Raises:
        OSError: the folder cannot be read or written.
    """
    keys: set[str] = set()
    with locked(folder):
        for path in filter(_is_lease, folder.iterdir()):
            descriptor = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                path.unlink()
            except BlockingIOError:
                with open(descriptor, "rb", closefd=False) as file:
                    keys.update(file.read().decode(errors="replace").split())
            finally:
                os.close(descriptor)
        yield keys
