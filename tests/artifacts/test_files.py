from __future__ import annotations

import errno
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from artifact_sets import Made

from sonata_aot.artifacts import store
from sonata_aot.artifacts.errors import IntegrityError, StoreError
from sonata_aot.artifacts.files import (
    explained,
    locked,
    read_bounded,
    sync_directory,
    write_atomically,
)


def open_descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


@pytest.mark.parametrize("size", [0, 1, 4096])
def test_a_file_of_at_most_the_bound_is_read_whole(tmp_path: Path, size: int) -> None:
    (tmp_path / "f").write_bytes(b"x" * size)
    assert read_bounded(tmp_path / "f", size) == b"x" * size
    assert read_bounded(tmp_path / "f", size + 1) == b"x" * size


@pytest.mark.parametrize(("piece", "calls"), [(100, 1), (3, 5)])
def test_what_one_read_gives_is_all_or_is_read_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, piece: int, calls: int
) -> None:
    (tmp_path / "f").write_bytes(b"0123456789")
    real, sizes = os.read, list[int]()

    def read(descriptor: int, size: int) -> bytes:
        sizes.append(size)
        return real(descriptor, min(size, piece))

    monkeypatch.setattr(os, "read", read)
    assert read_bounded(tmp_path / "f", 100) == b"0123456789"
    assert len(sizes) == calls


def test_a_longer_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "f").write_bytes(b"12345")
    with pytest.raises(IntegrityError, match="has 5 bytes, more than 4"):
        read_bounded(tmp_path / "f", 4)


def test_a_file_that_grows_while_it_is_read_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "f"
    path.write_bytes(b"1234")
    real = os.fstat

    def grown(descriptor: int) -> os.stat_result:
        status = real(descriptor)
        path.write_bytes(b"12345")
        return status

    monkeypatch.setattr(os, "fstat", grown)
    with pytest.raises(IntegrityError, match="more than 4"):
        read_bounded(path, 4)


@pytest.mark.parametrize("kind", ["link", "broken link", "FIFO", "folder", "device"])
def test_what_is_no_regular_file_is_refused_at_once(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "f"
    (tmp_path / "real").write_bytes(b"x")
    match kind:
        case "link":
            path.symlink_to(tmp_path / "real")
        case "broken link":
            path.symlink_to(tmp_path / "nowhere")
        case "FIFO":
            os.mkfifo(path)
        case "folder":
            path.mkdir()
        case _:
            path = Path("/dev/zero")
    before = open_descriptors()
    with pytest.raises(IntegrityError, match="symbolic link" if "link" in kind else "not a reg"):
        read_bounded(path, 100)
    assert open_descriptors() == before


def test_a_socket_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)  # the name of a socket must be short
    with socket.socket(socket.AF_UNIX) as bound:
        bound.bind("f")
        with pytest.raises((IntegrityError, OSError)):
            read_bounded(tmp_path / "f", 100)


def test_a_missing_file_is_not_found(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        read_bounded(tmp_path / "f", 100)


def test_a_file_is_replaced_whole(tmp_path: Path) -> None:
    staging = tmp_path / "staging"
    staging.mkdir()
    target = tmp_path / "f"
    target.write_bytes(b"old")
    with open(target, "rb") as reader:
        write_atomically(target, b"new" * 10**5, staging=staging)
        assert reader.read() == b"old"
    assert target.read_bytes() == b"new" * 10**5
    assert list(staging.iterdir()) == []


def test_a_failed_write_leaves_the_old_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "f").write_bytes(b"old")
    (tmp_path / "staging").mkdir()

    def fails(descriptor: int) -> None:
        raise OSError(errno.EIO, "I/O error")

    before = open_descriptors()
    monkeypatch.setattr(os, "fsync", fails)
    with pytest.raises(OSError, match="I/O error"):
        write_atomically(tmp_path / "f", b"new", staging=tmp_path / "staging")
    assert (tmp_path / "f").read_bytes() == b"old"
    assert open_descriptors() == before


def test_data_is_synced_before_it_is_renamed_into_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps: list[str] = []
    for name in ("write", "fsync", "rename"):

        def noted(*arguments: object, name: str = name, real: object = getattr(os, name)) -> object:
            steps.append(name)
            assert callable(real)
            return real(*arguments)

        monkeypatch.setattr(os, name, noted)
    (tmp_path / "staging").mkdir()
    write_atomically(tmp_path / "f", b"new", staging=tmp_path / "staging")
    sync_directory(tmp_path)
    assert steps == ["write", "fsync", "rename", "fsync"]


def test_a_set_survives_a_power_failure_whole(
    made: Made, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The names of objects are on the disk before a manifest names them, and then its own."""
    steps: list[str] = []
    write, sync = store.write_atomically, store.sync_directory

    def writing(target: Path, data: bytes, *, staging: Path) -> None:
        write(target, data, staging=staging)
        steps.append("manifest" if target.name == "manifest.json" else "object")

    def syncing(directory: Path) -> None:
        sync(directory)
        steps.append(f"names in {directory.name}")

    monkeypatch.setattr(store, "write_atomically", writing)
    monkeypatch.setattr(store, "sync_directory", syncing)
    store.publish(tmp_path / "out", made.manifest, made.objects)
    objects = ["object"] * len(made.objects)
    assert steps == [*objects, "names in objects", "manifest", "names in out"]


def test_staging_through_a_link_is_refused(tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.write_bytes(b"mine")
    (tmp_path / "staging").mkdir()
    (tmp_path / "staging" / "f").symlink_to(victim)
    with pytest.raises(OSError, match="symbolic link"):
        write_atomically(tmp_path / "f", b"new", staging=tmp_path / "staging")
    assert victim.read_bytes() == b"mine"


TRY_LOCK = """
import fcntl, os, sys
descriptor = os.open(sys.argv[1], os.O_RDONLY)
try:
    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
except BlockingIOError:
    print("held")
else:
    print("free")
"""


def test_the_lock_excludes_other_processes_and_leaves_no_file(tmp_path: Path) -> None:
    def state() -> str:
        command = [sys.executable, "-S", "-c", TRY_LOCK, str(tmp_path)]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()

    with locked(tmp_path):
        assert state() == "held"
    assert state() == "free"
    with pytest.raises(RuntimeError), locked(tmp_path):
        raise RuntimeError
    assert state() == "free"
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("code", "remedy"),
    [
        (errno.ENOSPC, "free some space"),
        (errno.EDQUOT, "quota"),
        (errno.EACCES, "choose a directory you can write with --out or SONATA_AOT_DIR"),
        (errno.EROFS, "choose a directory you can write with --out or SONATA_AOT_DIR"),
    ],
)
def test_a_system_error_is_explained(code: int, remedy: str) -> None:
    with pytest.raises(StoreError) as caught, explained(Path("/some/place"), "publish to"):
        raise OSError(code, os.strerror(code))
    assert caught.value.what == f"cannot publish to /some/place: {os.strerror(code)}"
    assert remedy in caught.value.remedy
    assert isinstance(caught.value.__cause__, OSError)


def test_a_system_error_that_names_a_file_keeps_the_name(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="nowhere"), explained(tmp_path, "publish to"):
        (tmp_path / "nowhere" / "f").write_bytes(b"")
