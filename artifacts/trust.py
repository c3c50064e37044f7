"""Refuses directories that somebody else could have changed.

Machine code out of a directory runs with this process's rights, so the directory and all above it
must be writable by root and the current user alone.
"""

from __future__ import annotations

import contextlib
import grp
import os
import pwd
import stat
from pathlib import Path

from .errors import UntrustedPath


def require_trusted(directory: Path) -> None:
    """Check a directory, what it links to, and every ancestor of both.

    Allowed: owned by root or the effective user; and not writable by others, except for a sticky
    directory (such as /tmp) above, where others can neither remove nor rename what is not theirs. A
    group may write if nobody else is in it.

    Raises:
        UntrustedPath: naming the directory at fault.
        OSError: a directory on the way cannot be examined.
    """
    given = Path(os.path.abspath(directory))
    chain = [given, *given.parents]
    real = given.resolve(strict=True)
    if real != given:
        chain += [real, *real.parents]
    for path in chain:
        _check(path, path.lstat(), leaf=path in (given, real))


def _check(path: Path, status: os.stat_result, *, leaf: bool) -> None:
    allowed = {0, os.geteuid()}
    if status.st_uid not in allowed:
        raise UntrustedPath(
            f"{path} belongs to user {status.st_uid}, not to root or the current user",
            remedy="use a directory of your own, or have root own it",
        )
    if stat.S_ISLNK(status.st_mode):
        return  # a link's own mode means nothing; what it leads to is in the chain
    sticky = bool(status.st_mode & stat.S_ISVTX) and not leaf
    if status.st_mode & stat.S_IWOTH and not sticky:
        raise UntrustedPath(f"{path} is writable by everybody", remedy=f"chmod o-w {path}")
    if status.st_mode & stat.S_IWGRP and not sticky and not _private(status.st_gid):
        raise UntrustedPath(
            f"{path} is writable by group {status.st_gid}, which has other members",
            remedy=f"chmod g-w {path}",
        )


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
