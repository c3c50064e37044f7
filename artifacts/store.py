"""The artifact directory: publishing it whole, and reading it verified.

    DIRECTORY/manifest.json           the index, renamed into place last
    DIRECTORY/objects/<sha256>.cubin  machine code, named by its digest
    DIRECTORY/objects/<sha256>.ptx    the same kernel's PTX
    DIRECTORY/manifest.json.sig       a signature of the index, if somebody made one
    DIRECTORY/ptx.xz                  in wheels: all PTX in one file; see `pack`

Objects are written before the manifest that names them and removed after the one that no longer
does. A reader that has read the old manifest may then miss an object: it reads the manifest again.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import re
import shutil
import stat
import threading
from collections.abc import Callable, Mapping
from pathlib import Path

from .errors import ArgumentError, ArtifactsNotFound, IntegrityError, SonataError, StoreError
from .files import explained, locked, read_bounded, sync_directory, write_atomically
from .manifest import FILE_NAME, MAX_MANIFEST_BYTES, OBJECTS, SIGNATURE, Manifest, Payload
from .pack import PACK, unpack_ptx
from .record import record
from .trust import require_own, require_trusted

# Unlikely names: what is in them is removed.
_STAGING = ".sonata-aot-staging"
# The index of a shard, which `shard` reads.
SHARD_FILE = "shard.json"
_OBJECT_NAME = re.compile(r"[0-9a-f]{64}\.(cubin|ptx)")


# Of several threads that read a directory, one unpacks.
_unpacking: dict[Path, threading.Lock] = {}

# The child of a fork may have inherited some held, by a thread that does not exist there.
os.register_at_fork(after_in_child=_unpacking.clear)


def sha256(data: bytes) -> str:
    """SHA-256 in hex."""
    return hashlib.sha256(data).hexdigest()


def make_private(directory: Path, doing: str) -> None:
    """Create a directory and its missing ancestors, all of mode 0700.

    Raises:
        StoreError: it cannot be made, or something else is in its place.
        UntrustedPath: somebody else can write there or above.
    """
    with explained(directory, doing):
        missing = [path for path in (directory, *directory.parents) if not path.exists()]
        if missing:
            require_trusted(missing[-1].parent, only_above=True)
        for path in reversed(missing):
            path.mkdir(mode=0o700, exist_ok=True)
        if not directory.is_dir():
            raise StoreError(
                f"cannot {doing} {directory}: not a directory",
                remedy="choose another place with --out or SONATA_AOT_DIR",
            )
        require_trusted(directory)


@record
class ArtifactSet:
    """An artifact directory whose manifest has been read."""

    directory: Path
    manifest: Manifest

    def path(self, payload: Payload) -> Path:
        """Where a payload's file lies."""
        return self.directory / OBJECTS / payload.file_name

    def read(self, payload: Payload) -> bytes:
        """The bytes of one file, verified: these very bytes may go to the driver.

        Raises:
            IntegrityError: missing, unreadable, or not of the manifest's size and digest.
            MissingDependency: it is packed, and this Python has no lzma.
            SonataError: it is packed, and the manifest beside it cannot be used any more.
        """
        if payload.isa is not None:
            packed = self._packed().get(payload.file_name)
            if packed is not None:
                where = f"{payload.file_name} in {self.directory / PACK}"
                return _checked(where, packed, payload)
        # As text: `self.path` takes longer than to open the file.
        return read_object(f"{self.directory}/{OBJECTS}/{payload.file_name}", payload)

    def _packed(self) -> dict[str, bytes]:
        # No `cached_property`: Python 3.11 locks those, and a forked child would wait for ever.
        with _unpacking.setdefault(self.directory, threading.Lock()):
            if "packed" not in self.__dict__:
                self.__dict__["packed"] = self._unpack()
            return self.__dict__["packed"]

    def _unpack(self) -> dict[str, bytes]:
        path = self.directory / PACK
        if not path.exists():
            return {}
        # Where each begins follows from all that are before it, of any architecture.
        whole = open_artifacts(self.directory).manifest
        if whole.digest != self.manifest.digest:
            raise IntegrityError(f"{path} is not of this manifest any more", remedy="load it again")
        return unpack_ptx(path, whole)


def read_object(path: Path | str, payload: Payload, *, owned: bool = False) -> bytes:
    """The bytes of a payload's file, verified; `owned` as for `read_bounded`.

    Raises:
        IntegrityError: missing, unreadable, or not of the payload's size and digest.
        UntrustedPath: `owned`, and somebody else could have changed it.
    """
    try:
        data = read_bounded(path, payload.size, owned=owned)
    except FileNotFoundError:
        raise IntegrityError(
            f"{path} is missing", remedy="rebuild with `sonata-aot build`, or copy it again"
        ) from None
    except OSError as error:
        raise IntegrityError(
            f"{path} cannot be read: {error.strerror}", remedy="correct its permissions"
        ) from None
    return _checked(path, data, payload)


def _checked(path: Path | str, data: bytes, payload: Payload) -> bytes:
    if len(data) != payload.size:
        raise IntegrityError(
            f"{path} has {len(data)} bytes, not {payload.size}",
            remedy="rebuild with `sonata-aot build`, or copy it again",
        )
    if sha256(data) != payload.sha256:
        raise IntegrityError(
            f"{path} does not have the SHA-256 that the manifest names",
            remedy="rebuild with `sonata-aot build`, or copy it again",
        )
    return data


def open_artifacts(directory: Path, only: Callable[[str], bool] | None = None) -> ArtifactSet:
    """Read a directory's manifest; `only` as for `Manifest.from_bytes`.

    Raises:
        ArtifactsNotFound: there is no such directory, or no manifest in it.
        UntrustedPath: somebody else can write it or a directory above it.
        ManifestError: the manifest is wrong.
        IntegrityError: the manifest is a link, unreadable or too long.
        ArgumentError: the path cannot be one.
    """
    data = read_index(directory, FILE_NAME)
    if data is None:
        if (directory / SHARD_FILE).is_file():
            raise ArtifactsNotFound(
                f"{directory} holds one shard of a build, which is no artifact set",
                remedy="make a set of all its shards: `sonata-aot merge SHARD... --out DIRECTORY`",
            )
        raise ArtifactsNotFound(
            f"no artifacts in {directory}",
            remedy="build them with `sonata-aot build --arch ARCH`, or name another directory",
        )
    return ArtifactSet(directory, Manifest.from_bytes(data, str(directory / FILE_NAME), only))


def read_index(directory: Path, file_name: str) -> bytes | None:
    """The bytes of a directory's index, None if there is none; the folder of objects is examined.

    Raises:
        UntrustedPath: somebody else can write one of them, or a directory above.
        IntegrityError: the index is a link, unreadable or too long, or the objects lie elsewhere.
        ArgumentError: the path cannot be one.
    """
    if "\0" in str(directory):
        raise ArgumentError(f"the path {str(directory)!r} holds a NUL", remedy="correct the path")
    path = directory / file_name
    try:
        require_trusted(directory)
        data = read_bounded(path, MAX_MANIFEST_BYTES, owned=True)
        _require_objects(directory / OBJECTS)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise IntegrityError(
            f"{path} cannot be read: {error.strerror}", remedy="correct its permissions"
        ) from None
    return data


def prepare(directory: Path, file_name: str = FILE_NAME) -> None:
    """Make a directory that can be published to, or say why it cannot.

    `file_name` is that of its index.

    Raises:
        StoreError: no permission, or files of another kind are there.
        UntrustedPath: somebody else can write there.
    """
    make_private(directory, "publish to")
    with explained(directory, "publish to"):
        if not os.access(directory, os.W_OK | os.X_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(directory))
        _require_ours(directory, file_name)


def _require_objects(store: Path) -> None:
    """The folder of objects, if there is one, is no link out of here and nobody else's."""
    with contextlib.suppress(FileNotFoundError):
        status = store.lstat()
        if not stat.S_ISDIR(status.st_mode):
            raise IntegrityError(
                f"{store} is not a directory of its own",
                remedy="put the directory itself there, or rebuild",
            )
        require_own(store, status)


def publish(directory: Path, manifest: Manifest, objects: Mapping[str, bytes]) -> int:
    """Make a directory hold exactly this manifest and its objects; as `publish_index`."""
    return publish_index(directory, FILE_NAME, manifest.to_bytes(), objects)


def publish_index(
    directory: Path, file_name: str, content: bytes, objects: Mapping[str, bytes]
) -> int:
    """Make a directory hold exactly this index and its objects.

    `objects` maps file names to bytes. Files already there with the right bytes stay; other objects
    go. Returns how many files were written (0: nothing had changed).

    Raises:
        StoreError: the directory cannot be written, holds files of another kind, or no space is
            left; the old set stays usable.
        UntrustedPath: somebody else can write there.
    """
    make_private(directory, "publish to")
    with explained(directory, "publish to"), locked(directory):
        _require_ours(directory, file_name)
        staging = directory / _STAGING
        shutil.rmtree(staging, ignore_errors=True)
        store = directory / OBJECTS
        written = 0
        try:
            for name, data in objects.items():
                if _same(store / name, data):
                    continue
                store.mkdir(mode=0o700, exist_ok=True)
                staging.mkdir(mode=0o700, exist_ok=True)
                write_atomically(store / name, data, staging=staging)
                written += 1
            if written:
                sync_directory(store)
            if not _same(directory / file_name, content):
                staging.mkdir(mode=0o700, exist_ok=True)
                (directory / SIGNATURE).unlink(missing_ok=True)  # of what was there before
                write_atomically(directory / file_name, content, staging=staging)
                sync_directory(directory)
                written += 1
        finally:
            shutil.rmtree(staging, ignore_errors=True)
        _remove_others(store, set(objects))
    return written


def clear_leftovers(directory: Path) -> None:
    """Remove what a killed publisher left: half-written files, and objects that nothing names.

    Nothing happens where the manifest is damaged, or while another publishes.

    Raises:
        OSError: no permission.
    """
    keep: set[str] = set()
    with contextlib.ExitStack() as stack:
        try:
            stack.enter_context(locked(directory, wait=False))
            _require_ours(directory, FILE_NAME)
            manifest = open_artifacts(directory).manifest
            keep = {payload.file_name for _, payload in manifest.payloads()}
        except ArtifactsNotFound:
            pass  # the publisher was killed before there was any manifest
        except (FileNotFoundError, BlockingIOError, SonataError):
            return
        shutil.rmtree(directory / _STAGING, ignore_errors=True)
        _remove_others(directory / OBJECTS, keep)


def _require_ours(directory: Path, file_name: str) -> None:
    """Refuse a directory with files that no publisher put there: some of them would be removed."""
    store = directory / OBJECTS
    ours = {file_name, OBJECTS, SIGNATURE, _STAGING}
    names = {path.name for path in directory.iterdir()} - ours
    objects: set[str] = set()
    if store.is_dir() and not store.is_symlink():
        objects = {path.name for path in store.iterdir()}
        names |= {name for name in objects if not _OBJECT_NAME.fullmatch(name)}
    elif store.is_symlink() or store.exists():
        names.add(OBJECTS)
    if not objects and _is_anothers_manifest(directory / file_name):
        names.add(file_name)
    if names:
        raise StoreError(
            f"{directory} holds {sorted(names)[0]!r}, which is no artifact",
            remedy="publish into an empty directory, or remove what does not belong there",
        )


def _is_anothers_manifest(path: Path) -> bool:
    """Whether a manifest with no objects beside it is some other program's `manifest.json`."""
    try:
        return not read_bounded(path, MAX_MANIFEST_BYTES).startswith(b'{\n"schema":')
    except FileNotFoundError:
        return False
    except IntegrityError:
        return True


def _same(path: Path, data: bytes) -> bool:
    try:
        return read_bounded(path, len(data)) == data
    except (FileNotFoundError, IntegrityError):
        # A rename takes the place of a file or a link, but not of a folder.
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        return False


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        os.unlink(path)


def _remove_others(store: Path, keep: set[str]) -> None:
    if store.is_dir():
        for path in store.iterdir():
            if path.name not in keep:
                _remove(path)
