"""Files that a measurement ends in: whole or not at all."""

from __future__ import annotations

import os
import resource
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from sonata_aot.aot import result_files
from sonata_aot.artifacts.errors import StoreError, UsageError


@contextmanager
def full_disk(size: int) -> Iterator[None]:
    """No file grows beyond so many bytes."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A file with results."""
    path = tmp_path / "results.json"
    path.write_bytes(b"before")
    path.chmod(0o640)
    return path


def test_it_is_replaced_and_keeps_its_mode(path: Path) -> None:
    result_files.write(path, b"after")
    assert path.read_bytes() == b"after"
    assert path.stat().st_mode & 0o777 == 0o640
    assert list(path.parent.iterdir()) == [path]


def test_a_new_file_is_made_as_any_other(tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.touch()
    result_files.write(tmp_path / "new", b"new")
    assert (tmp_path / "new").stat().st_mode == other.stat().st_mode


def test_a_full_disk_takes_nothing_away(path: Path) -> None:
    with full_disk(1000), pytest.raises(StoreError, match=r"cannot write .*: File too"):
        result_files.write(path, b"x" * 2000)
    assert path.read_bytes() == b"before"
    assert list(path.parent.iterdir()) == [path]


def test_who_is_interrupted_takes_nothing_away(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(descriptor: int) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "fsync", interrupt)
    with pytest.raises(KeyboardInterrupt):
        result_files.write(path, b"after")
    assert path.read_bytes() == b"before"
    assert list(path.parent.iterdir()) == [path]


def test_a_link_stays_one(path: Path) -> None:
    link = path.with_name("link")
    link.symlink_to(path.name)
    result_files.write(link, b"after")
    assert link.is_symlink()
    assert path.read_bytes() == b"after"


def test_a_pipe_is_written_to(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    read: list[bytes] = []
    reader = threading.Thread(target=lambda: read.append(pipe.read_bytes()))
    reader.start()
    result_files.write(pipe, b"after")
    reader.join()
    assert read == [b"after"]
    assert pipe.is_fifo()


def test_asking_leaves_nothing_behind(path: Path) -> None:
    result_files.require_writable(path, None, path.with_name("new"))
    assert path.read_bytes() == b"before"
    assert list(path.parent.iterdir()) == [path]


@pytest.mark.parametrize("name", ["absent/new", ".", "results.json/new"])
def test_what_cannot_be_written_is_said(path: Path, name: str) -> None:
    with pytest.raises(StoreError, match="cannot write"):
        result_files.require_writable(path.parent / name)


def test_two_names_of_one_file(path: Path) -> None:
    link = path.with_name("link")
    link.symlink_to(path)
    with pytest.raises(UsageError, match="one file for two things"):
        result_files.require_writable(path, link)
