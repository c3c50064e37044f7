"""Files that a measurement ends in: results, tables, pictures."""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Iterator
from pathlib import Path

from ..artifacts.errors import StoreError, UsageError


def require_writable(*files: Path | None, known: Path | None = None) -> None:
    """Say now, and not after minutes of measuring, that a file cannot be written.

    Raises:
        UsageError: two of them are one, or one is `known`, which is to be read.
        StoreError: one cannot be written.
    """
    paths = [path for path in files if path is not None]
    named = paths if known is None else [*paths, known]
    if len({_place(path) for path in named}) < len(named):
        raise UsageError(
            f"one file for two things: {', '.join(map(str, named))}", remedy="name one for each"
        )
    for path in paths:
        with _explained(path):
            if _is_replaceable(path):
                _stage(path, b"").unlink()
            else:
                path.open("ab").close()


def write(path: Path, data: bytes) -> None:
    """Write a whole file or nothing; what is no regular file, such as a pipe, is written to.

    Raises:
        StoreError: it cannot be written; what was there before, is there.
    """
    with _explained(path):
        if not _is_replaceable(path):
            path.write_bytes(data)
            return
        staged = _stage(path, data)
        try:
            staged.replace(_place(path))
        except BaseException:
            staged.unlink()
            raise


def _place(path: Path) -> Path:
    """Where it is, past symbolic links."""
    return Path(os.path.realpath(path))


def _is_replaceable(path: Path) -> bool:
    return not path.exists() or path.is_file()


def _stage(path: Path, data: bytes) -> Path:
    """A file beside the one that it is to become, with its mode."""
    target = _place(path)
    staged = target.with_name(f".{target.name}.{os.getpid()}")
    mode = None
    if target.exists():
        mode = stat.S_IMODE(target.stat().st_mode)
        target.open("ab").close()  # replacing it would not ask
    descriptor = os.open(staged, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, 0o666)
    try:
        with open(descriptor, "wb") as file:
            file.write(data)
            file.flush()
            if mode is not None:
                os.fchmod(descriptor, mode)
            os.fsync(descriptor)
    except BaseException:
        staged.unlink()
        raise
    return staged


@contextlib.contextmanager
def _explained(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise StoreError(
            f"cannot write {path}: {error.strerror}", remedy="name a file that can be written"
        ) from None
