"""Refuses directories that somebody else could have changed.

Machine code out of a directory runs with this process's rights, so the directory and all above it
must be writable by root and the current user alone.
"""

from __future__ import annotations

import contextlib
import errno
import grp
import os
import pwd
import stat
from collections.abc import Iterator
from contextvars import ContextVar
from pathlib import Path

from .errors import UntrustedPath

# As many links as Linux follows in one path.
_MAX_LINKS = 40


# What was not refused, though it should have been; None where everything is.
_overridden: ContextVar[list[str] | None] = ContextVar("overridden", default=None)


@contextlib.contextmanager
def untrusted_allowed() -> Iterator[list[str]]:
    """Refuse nothing in this block for who could have changed it.

    Whatever would have been refused is recorded in the list, each fault once: the caller must show
    it. Digests, links and the form of files are checked as ever.
    """
    faults: list[str] = []
    token = _overridden.set(faults)
    try:
        yield faults
    finally:
        _overridden.reset(token)


def overridden() -> list[str] | None:
    """The faults recorded so far by `untrusted_allowed`, None outside of it."""
    return _overridden.get()


def require_trusted(directory: Path, *, only_above: bool = False) -> None:
    """Check a directory, every link on the way to it, and every ancestor of all of them.

    Allowed: owned by root or the effective user; and not writable by others, except for a sticky
    directory (such as /tmp) above, where others can neither remove nor rename what is not theirs. A
    group may write if nobody else is in it. With `only_above` the directory itself is one that the
    one meant will be made in, so it may be sticky too.

    Raises:
        UntrustedPath: naming the directory at fault.
        OSError: a directory on the way cannot be examined, or links go round in circles.
    """
    # Component by component, as the kernel does: `link/..` is the parent of what the link names.
    current, rest, hops = Path("/"), [*reversed(directory.absolute().parts[1:])], 0
    _check(current, current.lstat(), leaf=False)
    while rest:
        part = rest.pop()
        if part == "..":
            current = current.parent
            continue
        path = current / part
        status = path.lstat()
        _check(path, status, leaf=False)
        if not stat.S_ISLNK(status.st_mode):
            current = path
            continue
        hops += 1
        if hops > _MAX_LINKS:
            raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), str(directory))
        target = path.readlink()
        if target.is_absolute():
            current = Path("/")
        rest += reversed([part for part in target.parts if part != "/"])
    _check(current, current.lstat(), leaf=not only_above)


def require_own(path: Path | str, status: os.stat_result) -> None:
    """Check a file, as `require_trusted` checks a directory."""
    _check(path, status, leaf=True)


def _check(path: Path | str, status: os.stat_result, *, leaf: bool) -> None:
    allowed = {0, os.geteuid()}
    if status.st_uid not in allowed:
        _refuse(
            f"{path} belongs to user {status.st_uid}, not to root or the current user",
            remedy="use a directory of your own, or have root own it",
        )
    if stat.S_ISLNK(status.st_mode):
        return  # a link's own mode means nothing; what it leads to is in the chain
    sticky = bool(status.st_mode & stat.S_ISVTX) and not leaf
    if status.st_mode & stat.S_IWOTH and not sticky:
        _refuse(f"{path} is writable by everybody", remedy=f"chmod o-w {path}")
    if status.st_mode & stat.S_IWGRP and not sticky and not _private(status.st_gid):
        _refuse(
            f"{path} is writable by group {status.st_gid}, which has other members",
            remedy=f"chmod g-w {path}",
        )


def _refuse(what: str, remedy: str) -> None:
    faults = _overridden.get()
    if faults is None:
        raise UntrustedPath(what, remedy=remedy)
    if what not in faults:
        faults.append(what)


def _private(group: int) -> bool:
    """Whether nobody but root and the current user is in the group."""
    if group == 0:
        return True
    try:
        names = set(grp.getgrgid(group).gr_mem)
    except KeyError:
        return False
    names |= {user.pw_name for user in pwd.getpwall() if user.pw_gid == group}
    allowed = {"root"}
    with contextlib.suppress(KeyError):
        allowed.add(pwd.getpwuid(os.geteuid()).pw_name)
    return names <= allowed
