"""File operations that leave nothing half-done: whole-file writes, bounded reads, locks."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import stat
from collections.abc import Callable, Iterator
from pathlib import Path

from .errors import IntegrityError, SonataError, StoreError
from .trust import require_own


def write_atomically(target: Path, data: bytes, *, staging: Path) -> None:
    """Write a whole file or nothing: staged on the same file system, synced, renamed.

    `staging` is a directory under the same lock as `target`; a killed writer leaves its file there
    and the next one clears it.
    """
    staged = staging / target.name
    descriptor = os.open(staged, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, 0o600)
    try:
        view = memoryview(data)
        while view:
            view = view[os.write(descriptor, view) :]
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
    os.rename(staged, target)


def sync_directory(directory: Path) -> None:
    """Make renames in a directory survive a power failure."""
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def read_bounded(path: Path | str, most: int, *, owned: bool = False) -> bytes:
    """The bytes of a regular file of at most `most` bytes, never through a symbolic link.

    With `owned` the file must be as hard to change as a trusted directory.

    Raises:
        UntrustedPath: `owned`, and it is not.
        FileNotFoundError: there is no such file.
        IntegrityError: it is a link, not a regular file, or longer.
        OSError: it cannot be read.
    """
    try:
        # O_NONBLOCK: opening a FIFO put there by mistake must not hang.
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise IntegrityError(
                f"{path} is a symbolic link", remedy="put the file itself there, or rebuild"
            ) from None
        raise
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise IntegrityError(f"{path} is not a regular file", remedy="rebuild the artifacts")
        if owned:
            require_own(path, status)
        if status.st_size > most:
            raise IntegrityError(
                f"{path} has {status.st_size} bytes, more than {most}",
                remedy="rebuild the artifacts",
            )
        # One more than there was, so that a file that grows meanwhile is noticed, and that no
        # second read has to find the end.
        data = os.read(descriptor, status.st_size + 1)
        if len(data) != status.st_size:
            while len(data) <= most and (more := os.read(descriptor, most + 1 - len(data))):
                data += more
    finally:
        os.close(descriptor)
    if len(data) > most:
        raise IntegrityError(f"{path} has more than {most} bytes", remedy="rebuild the artifacts")
    return data


@contextlib.contextmanager
def locked(
    directory: Path,
    *,
    shared: bool = False,
    wait: bool = True,
    waiting: Callable[[], None] = lambda: None,
) -> Iterator[None]:
    """Hold the lock of a directory: alone, or `shared` with others that only read.

    The lock is on the directory itself, so it leaves no file behind, and the kernel drops it when
    its holder dies. `waiting` is called once if somebody else has it.

    Raises:
        BlockingIOError: somebody else has it, and `wait` is false.
        OSError: the directory cannot be opened, or its file system has no such locks.
    """
    kind = fcntl.LOCK_SH if shared else fcntl.LOCK_EX
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        try:
            fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
        except BlockingIOError:
            if not wait:
                raise
            waiting()
            fcntl.flock(descriptor, kind)
        yield
    finally:
        os.close(descriptor)


# What `flock` says on a network file system that cannot lock, or cannot lock a directory.
NO_LOCKS = (errno.ENOLCK, errno.EBADF, errno.EOPNOTSUPP)


@contextlib.contextmanager
def explained(directory: Path, doing: str) -> Iterator[None]:
    """Turn an `OSError` into a `StoreError` that names the directory and the remedy."""
    try:
        yield
    except OSError as error:
        raise _store_error(directory, doing, error) from error


def _store_error(directory: Path, doing: str, error: OSError) -> SonataError:
    reason = error.strerror or str(error)
    if error.errno in NO_LOCKS:
        reason = f"no locks on this file system ({reason})"
    remedy = {
        **dict.fromkeys(
            NO_LOCKS,
            "build on a local disk (--out, SONATA_AOT_CACHE_DIR) and copy the result: "
            "it can be read from anywhere",
        ),
        errno.ENOSPC: "free some space, or choose another place with --out or SONATA_AOT_DIR "
        "(TMPDIR for what is temporary)",
        errno.EDQUOT: "free some of your quota, or choose another place with --out",
    }.get(
        error.errno or 0,
        "choose a directory you can write with --out or SONATA_AOT_DIR "
        "(and SONATA_AOT_CACHE_DIR for the cache)",
    )
    place = error.filename if isinstance(error.filename, str) else str(directory)
    return StoreError(f"cannot {doing} {place}: {reason}", remedy=remedy)
