"""A finished wheel gets its name, and the sums beside it: both or neither, whatever happens."""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

from ..artifacts.errors import StoreError
from ..artifacts.files import NO_LOCKS, explained, locked

SUMS = "SHA256SUMS"
# Folders of this name hold what is not finished. One that a killed process left is removed by the
# next, under the lock.
_STAGING = ".sonata-aot-wheel-"


def require_writable(out: Path) -> None:
    """Make a folder for wheels, and see that files can be put there.

    Raises:
        StoreError: they cannot.
    """
    with explained(out, "write into"):
        out.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryDirectory(prefix=_STAGING, dir=out).cleanup()


def publish(name: str, content: bytes, out: Path, *, check: Callable[[Path], None]) -> Path:
    """Write the wheel `name` into `out`, and the sums of all packages there.

    `check` gets the written file before it has its place, and raises what is wrong with it.

    Raises:
        StoreError: the folder cannot be written, or something else lies where a file shall.
    """
    target, listed = out / name, out / SUMS
    with explained(out, "write into"), _alone(out):
        for place in (target, listed):
            if place.is_dir():
                raise StoreError(f"{place} is a directory", remedy="remove it, or choose an --out")
        with tempfile.TemporaryDirectory(prefix=_STAGING, dir=out) as staging:
            staged, sums = Path(staging) / name, Path(staging) / SUMS
            staged.write_bytes(content)
            check(staged)
            sums.write_bytes(_sums(out, {name: hashlib.sha256(content).hexdigest()}))
            staged.replace(target)
            sums.replace(listed)
    return target


@contextlib.contextmanager
def _alone(out: Path) -> Iterator[None]:
    """Wait for whoever else writes wheels there: their sums would lack ours."""
    with contextlib.ExitStack() as stack:
        try:
            stack.enter_context(locked(out))
        except OSError as error:
            if error.errno not in NO_LOCKS:
                raise
        else:
            for left in out.glob(f"{_STAGING}*"):
                shutil.rmtree(left, ignore_errors=True)
        yield


def _sums(folder: Path, new: dict[str, str]) -> bytes:
    """The digests of all packages in a folder and of new ones, as `sha256sum --check` reads them.

    What is no file, such as a link to nothing, has none.
    """
    digests = dict(new)
    for name in os.listdir(folder):
        path = folder / name
        if name.endswith((".whl", ".tar.gz")) and name not in new and path.is_file():
            digests[name] = hashlib.sha256(path.read_bytes()).hexdigest()
    return b"".join(
        f"{digest}  ".encode() + os.fsencode(name) + b"\n"
        for name, digest in sorted(digests.items())
    )
