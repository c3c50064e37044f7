"""Wheels as data: read with every digest checked, written the same way for the same content."""

from __future__ import annotations

import base64
import csv
import hashlib
import io
import re
import time
import zipfile
import zlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from ..artifacts import environment
from ..artifacts.errors import IntegrityError

_FILE_NAME = re.compile(r"[\w.]+-[\w.+!]+(?:-\d[\w.]*)?-[\w.]+-[\w.]+-[\w.]+\.whl", re.ASCII)
_AGAIN = "build or fetch the wheel again"
# Far above any wheel of ours, so that a damaged one cannot fill the memory.
_MAX_BYTES = 2**30
# What `zipfile` raises of a file that is damaged or something else; RuntimeError where a bit says
# that it is encrypted.
_BROKEN = (OSError, EOFError, ValueError, RuntimeError, zipfile.BadZipFile, zlib.error)


def normalised(name: str) -> str:
    """A distribution's name as file names hold it."""
    return re.sub(r"[-_.]+", "_", name).lower()


@dataclass
class Wheel:
    """The content of a wheel but for its RECORD: the files by path, and the tags.

    `tags` are of the form `cp312-abi3-linux_x86_64`.
    """

    name: str
    version: str
    tags: tuple[str, ...]
    files: dict[str, bytes] = field(repr=False)

    @property
    def dist_info(self) -> str:
        """The metadata's folder."""
        return f"{normalised(self.name)}-{self.version}.dist-info"

    @property
    def file_name(self) -> str:
        """What the file must be called."""
        parts = zip(*(tag.split("-") for tag in self.tags), strict=True)
        shown = (".".join(sorted(set(part))) for part in parts)
        return "-".join([normalised(self.name), self.version, *shown]) + ".whl"

    def retag(self, platform: str) -> None:
        """Say that the wheel is for another platform."""
        self.tags = tuple("-".join([*tag.split("-")[:2], platform]) for tag in self.tags)
        where = f"{self.dist_info}/WHEEL"
        lines = self.files[where].decode().splitlines()
        kept = [line for line in lines if line and not line.startswith("Tag:")]
        self.files[where] = _lines([*kept, *(f"Tag: {tag}" for tag in self.tags)])

    def to_bytes(self) -> bytes:
        """The file: in a fixed order, with fixed times and permissions, RECORD last."""
        record = f"{self.dist_info}/RECORD"
        content = {**self.files, record: _record(self.files, record)}
        stamp = time.gmtime(max(environment.SOURCE_DATE_EPOCH.get(), 315532800))[:6]
        target = io.BytesIO()
        with zipfile.ZipFile(target, "w") as archive:
            # Metadata comes last, as the format recommends.
            for name in sorted(content, key=lambda n: (".dist-info/" in n, n == record, n)):
                info = zipfile.ZipInfo(name, stamp)
                info.create_system, info.external_attr = 3, 0o100644 << 16
                archive.writestr(info, content[name], zipfile.ZIP_DEFLATED, 9)
        return target.getvalue()


def read_wheel(path: Path) -> Wheel:
    """Read a wheel whose every file is as its RECORD says.

    Raises:
        IntegrityError: it is no wheel, or a file in it is not what RECORD says.
    """
    try:
        # Of a device or a pipe there may be no end.
        if not path.is_file() and path.exists():
            raise IntegrityError(f"{path} is no wheel: not a regular file", remedy=_AGAIN)
        with zipfile.ZipFile(path) as archive:
            size = sum(info.file_size for info in archive.infolist())
            names = [info.filename for info in archive.infolist() if not info.is_dir()]
            if size > _MAX_BYTES or len(set(names)) != len(names):
                raise IntegrityError(f"{path} is too large, or names a file twice", remedy=_AGAIN)
            files = {name: archive.read(name) for name in names}
    except _BROKEN as error:
        raise IntegrityError(f"{path} is no wheel: {error}", remedy=_AGAIN) from None
    found = [name for name in files if re.fullmatch(r"[^/]+\.dist-info/RECORD", name)]
    if len(found) != 1 or not _FILE_NAME.fullmatch(path.name):
        raise IntegrityError(f"{path} is no wheel: no RECORD, or a wrong name", remedy=_AGAIN)
    stated = read_record(files.pop(found[0]).decode("utf-8", "replace"))
    stated.pop(found[0], None)
    if set(stated) != set(files):
        odd = sorted(set(stated) ^ set(files))[0]
        raise IntegrityError(f"{path}: {odd} is in RECORD or the wheel alone", remedy=_AGAIN)
    for name, data in files.items():
        if stated[name] != record_digest(data):
            raise IntegrityError(f"{path}: {name} is not as its RECORD says", remedy=_AGAIN)
    return make_wheel(files, found[0].partition("/")[0], str(path))


def make_wheel(files: Mapping[str, bytes], dist_info: str, where: str) -> Wheel:
    """The wheel of these files, one of which must be WHEEL and one METADATA.

    Raises:
        IntegrityError: they are not there, or say too little.
    """
    try:
        tags = tuple(_headers(files[f"{dist_info}/WHEEL"], "Tag"))
        (name,) = _headers(files[f"{dist_info}/METADATA"], "Name")
        (version,) = _headers(files[f"{dist_info}/METADATA"], "Version")
        if not tags or any(tag.count("-") != 2 for tag in tags):
            raise ValueError
    except (KeyError, ValueError):
        raise IntegrityError(
            f"{where}: its metadata lack a name, version or tag", remedy=_AGAIN
        ) from None
    return Wheel(name, version, tags, dict(files))


def read_record(text: str) -> dict[str, str]:
    """The digest, as `sha256=...`, of each file that a RECORD lists; empty where it has none."""
    return {row[0]: row[1] for row in csv.reader(text.splitlines()) if len(row) == 3}


def record_digest(data: bytes) -> str:
    """A file's digest as RECORD holds it."""
    digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=")
    return f"sha256={digest.decode()}"


def _record(files: Mapping[str, bytes], itself: str) -> bytes:
    target = io.StringIO()
    writer = csv.writer(target, lineterminator="\n")
    for name in sorted(files):
        writer.writerow([name, record_digest(files[name]), len(files[name])])
    writer.writerow([itself, "", ""])
    return target.getvalue().encode()


def _headers(data: bytes, name: str) -> list[str]:
    head = data.decode().partition("\n\n")[0]
    return [line.partition(":")[2].strip() for line in head.splitlines() if _is(line, name)]


def _is(line: str, name: str) -> bool:
    return line.partition(":")[0].lower() == name.lower()


def _lines(lines: Iterable[str]) -> bytes:
    return "".join(f"{line}\n" for line in lines).encode()
