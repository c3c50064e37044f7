from __future__ import annotations

import errno
import os
import shutil
import stat
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from artifact_sets import Made, assert_holds, run_python, tree

from sonata_aot.artifacts import open_artifacts, publish
from sonata_aot.artifacts.errors import (
    ArtifactsNotFound,
    IntegrityError,
    StoreError,
    UntrustedPath,
)
from sonata_aot.artifacts.store import make_private

STAGING = ".sonata-aot-staging"


def put_in(directory: Path, made: Made) -> int:
    return publish(directory, made.manifest, made.objects)


def read_all(directory: Path) -> dict[str, bytes]:
    """Every object through the verified way, as a loader reads them."""
    artifacts = open_artifacts(directory)
    return {p.file_name: artifacts.read(p) for _, p in artifacts.manifest.payloads()}


@pytest.fixture(params=["grows", "shrinks", "changes"])
def change(request: pytest.FixtureRequest, both: Made) -> tuple[Made, Made]:
    """An old set and the new one that replaces it."""
    small, large, other = both.only(0), both.only(0, 1, 2), both.only(2, 3)
    return {"grows": (small, large), "shrinks": (large, small), "changes": (small, other)}[
        request.param
    ]


def test_what_is_published_is_read_back(made: Made, tmp_path: Path) -> None:
    target = tmp_path / "new" / "deep" / "artifacts"
    assert put_in(target, made) == 5
    assert read_all(target) == made.objects
    assert open_artifacts(target).manifest == made.manifest
    assert_holds(target, made)


def test_publishing_the_same_again_writes_nothing(made: Made, directory: Path) -> None:
    before = {path: path.stat().st_mtime_ns for path in [directory, *directory.rglob("*")]}
    assert put_in(directory, made) == 0
    after = {path: path.stat().st_mtime_ns for path in [directory, *directory.rglob("*")]}
    assert before == after


def test_another_set_replaces_the_old_one(change: tuple[Made, Made], tmp_path: Path) -> None:
    old, new = change
    put_in(tmp_path / "a", old)
    assert put_in(tmp_path / "a", new) == 1 + len(new.objects.keys() - old.objects.keys())
    assert_holds(tmp_path / "a", new)


def test_a_signature_stays_with_its_manifest_and_goes_with_it(
    change: tuple[Made, Made], tmp_path: Path
) -> None:
    old, new = change
    signature = tmp_path / "a" / "manifest.json.sig"
    put_in(tmp_path / "a", old)
    signature.write_text("signed")
    put_in(tmp_path / "a", old)
    assert signature.read_text() == "signed"
    put_in(tmp_path / "a", new)
    assert not signature.exists()


def test_what_a_killed_publisher_left_goes_with_the_next(made: Made, directory: Path) -> None:
    (directory / "objects" / f"{'0' * 64}.cubin").write_bytes(b"x")
    (directory / "objects" / f"{'0' * 64}.ptx").mkdir()
    (directory / STAGING).mkdir()
    (directory / STAGING / "manifest.json").write_text("half a mani")
    put_in(directory, made)
    assert_holds(directory, made)


@pytest.mark.parametrize("name", ["thesis.txt", "objects/thesis.txt", "objects/x.cubin"])
def test_a_directory_with_other_files_is_left_alone(
    both: Made, made: Made, directory: Path, name: str
) -> None:
    (directory / name).write_text("the only copy")
    before = tree(directory)
    with pytest.raises(StoreError, match=Path(name).name) as caught:
        put_in(directory, both.only(0))
    assert "remove" in caught.value.remedy or "another" in caught.value.remedy
    assert tree(directory) == before
    assert read_all(directory) == made.objects


# What may lie in place of a file: made from its path, its bytes and a folder elsewhere.
Misplace = Callable[[Path, bytes, Path], object]


def _link(path: Path, data: bytes, aside: Path) -> None:
    (aside / "copy").write_bytes(data)
    path.symlink_to(aside / "copy")


def _folder(path: Path, data: bytes, aside: Path) -> None:
    path.mkdir()
    (path / "inside").write_bytes(data)


def _written(change: Callable[[bytes], bytes]) -> Misplace:
    return lambda path, data, aside: path.write_bytes(change(data))


NOT_A_FILE: dict[str, Misplace] = {
    "FIFO": lambda path, data, aside: os.mkfifo(path),
    "link to the right bytes": _link,
    "link to itself": lambda path, data, aside: path.symlink_to(path),
    "folder": _folder,
}
WRONG: dict[str, Misplace] = {
    **NOT_A_FILE,
    "missing": lambda path, data, aside: None,
    "empty": _written(lambda data: b""),
    "one byte short": _written(lambda data: data[:-1]),
    "one byte long": _written(lambda data: data + b"\0"),
    "first bit": _written(lambda data: bytes([data[0] ^ 1]) + data[1:]),
    "last bit": _written(lambda data: data[:-1] + bytes([data[-1] ^ 128])),
    "other bytes of that size": _written(lambda data: bytes(len(data))),
}


@pytest.mark.parametrize("kind", ["cubin", "ptx"])
@pytest.mark.parametrize("wrong", WRONG)
def test_a_wrong_object_is_refused_and_then_replaced(
    made: Made, directory: Path, tmp_path: Path, wrong: str, kind: str
) -> None:
    payload = getattr(made.manifest.binaries[0], kind)
    path = directory / "objects" / payload.file_name
    data = path.read_bytes()
    path.unlink()
    WRONG[wrong](path, data, tmp_path)
    with pytest.raises(IntegrityError) as caught:
        open_artifacts(directory).read(payload)
    assert str(path) in caught.value.what
    assert put_in(directory, made) == 1
    assert_holds(directory, made)


def test_a_huge_object_is_refused_without_reading_it(made: Made, directory: Path) -> None:
    payload = made.manifest.binaries[0].cubin
    os.truncate(directory / "objects" / payload.file_name, 2**42)
    with pytest.raises(IntegrityError, match=f"{2**42} bytes, more than {payload.size}"):
        open_artifacts(directory).read(payload)


def test_swapped_objects_are_refused(made: Made, directory: Path) -> None:
    payloads = [binary.cubin for binary in made.manifest.binaries]
    assert payloads[0].size == payloads[1].size  # so that only the digest can tell
    first, second = (directory / "objects" / payload.file_name for payload in payloads)
    data = first.read_bytes()
    first.write_bytes(second.read_bytes())
    second.write_bytes(data)
    for payload in payloads:
        with pytest.raises(IntegrityError, match="SHA-256"):
            open_artifacts(directory).read(payload)


@pytest.mark.parametrize("wrong", NOT_A_FILE)
def test_a_manifest_that_is_no_file_is_refused_and_then_replaced(
    made: Made, directory: Path, tmp_path: Path, wrong: str
) -> None:
    path = directory / "manifest.json"
    data = path.read_bytes()
    path.unlink()
    NOT_A_FILE[wrong](path, data, tmp_path)
    with pytest.raises(IntegrityError, match=r"manifest\.json"):
        open_artifacts(directory)
    assert put_in(directory, made) == 1
    assert_holds(directory, made)


def test_a_link_to_a_folder_of_objects_is_not_emptied(made: Made, directory: Path) -> None:
    elsewhere = directory.parent / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "thesis.txt").write_text("the only copy")
    shutil.rmtree(directory / "objects")
    (directory / "objects").symlink_to(elsewhere)
    try:
        put_in(directory, made)
    except StoreError:
        pass
    else:
        assert_holds(directory, made)
    assert (elsewhere / "thesis.txt").read_text() == "the only copy"


def test_a_folder_that_never_held_artifacts_is_not_emptied(made: Made, tmp_path: Path) -> None:
    (tmp_path / "project" / "objects").mkdir(parents=True)
    work = tmp_path / "project" / "objects" / "work.blend"
    work.write_text("the only copy")
    with pytest.raises(StoreError):
        put_in(tmp_path / "project", made)
    assert work.read_text() == "the only copy"


@pytest.mark.parametrize("case", ["nothing", "empty", "no manifest", "a file", "below a file"])
def test_no_artifacts_is_an_error_of_its_own(made: Made, tmp_path: Path, case: str) -> None:
    target = tmp_path / "there"
    if case == "empty":
        target.mkdir()
    elif case == "no manifest":
        made.write(target)
        (target / "manifest.json").unlink()
    elif case != "nothing":
        target.write_text("x")
        target = target / "below" if case == "below a file" else target
    with pytest.raises(ArtifactsNotFound) as caught:
        open_artifacts(target)
    assert str(target) in caught.value.what
    assert "sonata-aot build" in caught.value.remedy


def test_a_directory_that_is_a_loop_of_links_is_an_error(tmp_path: Path) -> None:
    loop = tmp_path / "loop"
    loop.symlink_to(loop)
    with pytest.raises((ArtifactsNotFound, IntegrityError)):
        open_artifacts(loop)


@pytest.mark.parametrize("umask", [0, 0o022, 0o077])
def test_what_is_published_is_private_whatever_the_umask(
    both: Made, tmp_path: Path, umask: int
) -> None:
    before = os.umask(umask)
    try:
        put_in(tmp_path / "new" / "artifacts", both)
    finally:
        os.umask(before)
    for path in [tmp_path / "new", *(tmp_path / "new").rglob("*")]:
        assert stat.S_IMODE(path.stat().st_mode) == (0o700 if path.is_dir() else 0o600), path


def test_publishing_where_others_can_write_is_refused(made: Made, tmp_path: Path) -> None:
    (tmp_path / "shared").mkdir()
    (tmp_path / "shared").chmod(0o777)
    with pytest.raises(UntrustedPath, match="writable by everybody"):
        put_in(tmp_path / "shared" / "artifacts", made)
    assert list((tmp_path / "shared").rglob("*.cubin")) == []


@pytest.mark.parametrize("below", [False, True])
def test_a_file_in_place_of_the_directory_is_a_store_error(tmp_path: Path, below: bool) -> None:
    (tmp_path / "file").write_text("x")
    target = tmp_path / "file" / "below" if below else tmp_path / "file"
    with pytest.raises(StoreError, match="file") as caught:
        make_private(target, "publish to")
    assert "--out" in caught.value.remedy


# For each number N, publishes an old set into TARGET/N and then a new one in a child that is killed
# before its N-th change of the file system, a write in its middle; ends where a child does not die.
KILLED = """
import os, signal, sys
from pathlib import Path
from sonata_aot.artifacts import open_artifacts, publish
def read(text):
    source = open_artifacts(Path(text))
    return source.manifest, {p.file_name: source.read(p) for _, p in source.manifest.payloads()}
old, new, target = read(sys.argv[1]), read(sys.argv[2]), Path(sys.argv[3])
def dying(name, real):
    def call(*arguments, **named):
        global left
        left -= 1
        if left < 0:
            if name == "write":
                real(arguments[0], bytes(arguments[1])[: len(arguments[1]) // 2])
            os.kill(os.getpid(), signal.SIGKILL)
        return real(*arguments, **named)
    return call
for count in range(200):
    publish(target / str(count), *old)
    child = os.fork()
    if child == 0:
        left = count
        for name in ("write", "fsync", "rename", "replace", "link", "unlink", "mkdir", "rmdir"):
            setattr(os, name, dying(name, getattr(os, name)))
        publish(target / str(count), *new)
        os._exit(0)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    if status == 0:
        break
    assert status == -signal.SIGKILL, status
"""


def test_a_publisher_killed_anywhere_leaves_the_old_set_or_the_new(
    change: tuple[Made, Made], tmp_path: Path
) -> None:
    old, new = change
    target = tmp_path / "target"
    run_python(KILLED, old.write(tmp_path / "old"), new.write(tmp_path / "new"), target)
    killed = sorted(target.iterdir(), key=lambda path: int(path.name))
    assert_holds(killed.pop(), new)  # this one came to its end
    assert len(killed) > 5
    for directory in killed:
        assert read_all(directory) in (old.objects, new.objects), directory.name
        put_in(directory, new)
        assert_holds(directory, new)


def test_a_full_disk_is_a_store_error_and_the_old_set_stays(
    change: tuple[Made, Made], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    old, new = change
    target = tmp_path / "target"
    real = os.write
    writes = 1 + len(new.objects.keys() - old.objects.keys())
    for count in range(writes):
        put_in(target, old)
        left = count

        def write(descriptor: int, data: Any) -> int:
            nonlocal left
            left -= 1
            if left < 0:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            return real(descriptor, data)

        monkeypatch.setattr(os, "write", write)
        with pytest.raises(StoreError) as caught:
            put_in(target, new)
        monkeypatch.undo()
        assert str(target) in caught.value.what
        assert "No space left" in caught.value.what
        assert "free some space" in caught.value.remedy
        assert read_all(target) == old.objects
        assert not (target / STAGING).exists()
    put_in(target, new)
    assert_holds(target, new)


def test_short_writes_are_continued(
    made: Made, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.write
    monkeypatch.setattr(os, "write", lambda descriptor, data: real(descriptor, data[:1000]))
    put_in(tmp_path / "a", made)
    monkeypatch.undo()
    assert_holds(tmp_path / "a", made)


def test_a_really_full_disk(both: Made, tmp_path: Path) -> None:
    mount = tmp_path / "mount"
    mount.mkdir()
    small, large = both.only(0).write(tmp_path / "small"), both.write(tmp_path / "large")
    script = """
import sys
from pathlib import Path
from sonata_aot.artifacts import open_artifacts, publish
from sonata_aot.artifacts.errors import StoreError
def put(source):
    read = open_artifacts(Path(source))
    objects = {p.file_name: read.read(p) for _, p in read.manifest.payloads()}
    publish(Path(sys.argv[3]) / "artifacts", read.manifest, objects)
    return objects
old = put(sys.argv[1])
try:
    put(sys.argv[2])
except StoreError as error:
    assert "No space left" in str(error) and "free some space" in str(error), error
else:
    raise SystemExit("it fitted")
read = open_artifacts(Path(sys.argv[3]) / "artifacts")
assert {p.file_name: read.read(p) for _, p in read.manifest.payloads()} == old
"""
    shell = 'mount -t tmpfs -o size=28k,mode=700 tmpfs "$1" || exit 77; shift; exec "$@"'
    run = [sys.executable, "-c", script, str(small), str(large), str(mount)]
    if os.geteuid() != 0 or shutil.which("unshare") is None:
        pytest.skip("only root can mount a small file system of its own")
    result = subprocess.run(
        ["unshare", "--mount", "sh", "-c", shell, "sh", str(mount), *run],
        capture_output=True,
        text=True,
        check=False,
    )
    if result.returncode == 77 or "unshare" in result.stderr:
        pytest.skip(f"this machine lets nobody mount: {result.stderr.strip()}")
    assert result.returncode == 0, result.stderr
