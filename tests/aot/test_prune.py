"""What is in a cache, and what pruning removes of it and what never."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from sonata_aot.aot import plan
from sonata_aot.aot import prune as pruning
from sonata_aot.aot.build import build
from sonata_aot.aot.cache import Cache
from sonata_aot.aot.leases import keys_in_use
from sonata_aot.aot.options import parse_size, show_size
from sonata_aot.aot.prune import contents, prune
from sonata_aot.artifacts import Arch
from sonata_aot.artifacts.errors import StoreError, UntrustedPath
from sonata_aot.artifacts.files import locked
from sonata_aot.artifacts.verify import Passed, verify

if TYPE_CHECKING:
    from tests.aot.conftest import Invoke

SECOND = 10**9
KEYS = [digit * 64 for digit in "abcdef"]


@pytest.fixture
def cache() -> Cache:
    """Six entries of 1000 bytes each; `a` was used longest ago."""
    cache = Cache()
    for number, key in enumerate(KEYS, start=1):
        folder = cache.compiled / key
        folder.mkdir(parents=True, mode=0o700)
        (folder / "record.json").write_bytes(b"r" * 400)
        (folder / "code.cubin").write_bytes(b"c" * 600)
        os.utime(folder, ns=(number * SECOND, number * SECOND))
    return cache


def left(cache: Cache) -> str:
    """First letters of the keys that are there."""
    return "".join(sorted(path.name[0] for path in cache.compiled.iterdir()))


def test_contents_are_in_the_order_of_their_use(cache: Cache) -> None:
    items = contents(cache)
    assert [item.key for item in items] == KEYS
    assert [(item.bytes, item.used) for item in items] == [(1000, n * SECOND) for n in range(1, 7)]


def test_an_absent_cache_is_empty() -> None:
    cache = Cache()
    assert contents(cache) == []
    assert prune(cache, 0).removed == 0
    assert list(cache.root.iterdir()) in ([], [cache.in_use])


@pytest.mark.parametrize(
    ("most", "expected"),
    [(6000, "abcdef"), (5999, "bcdef"), (3000, "def"), (2500, "ef"), (0, ""), (None, "abcdef")],
)
def test_what_was_used_longest_ago_goes_first(
    cache: Cache, most: int | None, expected: str
) -> None:
    done = prune(cache, most)
    assert left(cache) == expected
    assert (done.removed, done.left) == (6 - len(expected), len(expected))
    assert (done.removed_bytes, done.left_bytes) == (done.removed * 1000, done.left * 1000)
    assert {path.name for path in cache.root.iterdir()} == {"compiled", "in-use"}


def test_use_counts_and_not_age(cache: Cache) -> None:
    with cache.using(KEYS[:2]):
        pass
    prune(cache, 3000)
    assert left(cache) == "abf"


@pytest.mark.parametrize("clock", [1, 2**33])
def test_the_order_is_that_of_use_whatever_the_clock_says(
    cache: Cache, monkeypatch: pytest.MonkeyPatch, clock: int
) -> None:
    monkeypatch.setattr(time, "time_ns", lambda: clock * SECOND)
    for key in (KEYS[1], KEYS[0]):
        with cache.using([key]):
            pass
        clock -= 1
    assert "".join(item.key[0] for item in contents(cache)) == "cdefba"


def test_what_a_build_uses_stays(cache: Cache) -> None:
    with cache.using(["0" * 64, KEYS[0], KEYS[3]]):
        done = prune(cache, 0)
        assert left(cache) == "ad"
        assert (done.in_use, done.left_bytes) == (2000, 2000)
    assert list(cache.in_use.iterdir()) == []
    prune(cache, 0)
    assert left(cache) == ""


HOLDER = """
import os, signal, sys
from sonata_aot.aot.cache import Cache
from sonata_aot.aot.leases import keys_in_use
with Cache().using(sys.argv[1:]):
    print("holds", flush=True)
    sys.stdin.readline()
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_what_another_process_uses_stays_until_it_dies(cache: Cache) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", HOLDER, KEYS[0]], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as holder:
        assert holder.stdin is not None
        assert holder.stdout is not None
        assert holder.stdout.readline() == b"holds\n"
        prune(cache, 0)
        assert left(cache) == "a"
        holder.stdin.write(b"die\n")
        holder.stdin.flush()
        holder.wait(timeout=60)
    assert len(list(cache.in_use.iterdir())) == 1  # nobody cleared up
    prune(cache, 0)
    assert left(cache) == ""
    assert list(cache.in_use.iterdir()) == []


def test_no_build_begins_while_pruning(cache: Cache, monkeypatch: pytest.MonkeyPatch) -> None:
    """Or it might take for cached what is just being removed."""
    tried: list[bool] = []
    rename = os.rename

    def renaming(source: Path, target: Path) -> None:
        descriptor = os.open(cache.in_use, os.O_RDONLY)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
            tried.append(True)
        except BlockingIOError:
            tried.append(False)
        finally:
            os.close(descriptor)
        rename(source, target)

    monkeypatch.setattr(os, "rename", renaming)
    prune(cache, 5000)
    assert tried == [False]


def test_a_build_waits_for_a_prune(cache: Cache) -> None:
    cache.in_use.mkdir()
    began = threading.Event()

    def build() -> None:
        with cache.using(KEYS):
            began.set()

    thread = threading.Thread(target=build)
    with locked(cache.in_use):
        thread.start()
        assert not began.wait(0.3)
    assert began.wait(30)
    thread.join()


def test_what_is_used_before_the_lock_is_had_counts(
    cache: Cache, monkeypatch: pytest.MonkeyPatch
) -> None:
    def late(folder: Path) -> Any:
        with cache.using([KEYS[0]]):
            pass
        return keys_in_use(folder)

    monkeypatch.setattr(pruning, "keys_in_use", late)
    prune(cache, 5000)
    assert left(cache) == "acdef"


def test_logs_count_and_go_in_turn(cache: Cache) -> None:
    cache.logs.mkdir()
    for number, key in ((2, KEYS[5]), (9, KEYS[0])):
        log = cache.logs / f"{key}.txt"
        log.write_bytes(b"l" * 500)
        os.utime(log, ns=(number * SECOND, number * SECOND))
    with cache.using([KEYS[5]]):  # its entry, which is another thing than the log of its key
        done = prune(cache, 4500)
    assert left(cache) == "cdef"
    assert [path.name[0] for path in cache.logs.iterdir()] == ["a"]
    assert (done.removed, done.removed_bytes) == (3, 2500)


def test_what_killed_builds_left_goes(cache: Cache) -> None:
    (cache.scratch / "abc/worker0").mkdir(parents=True)
    (cache.root / ".sonata-aot-trash" / KEYS[0]).mkdir(parents=True)
    cache.in_use.mkdir()
    (cache.in_use / ("0123" * 8)).write_text(KEYS[1])
    prune(cache, 5000)
    assert left(cache) == "bcdef"
    assert {path.name for path in cache.root.iterdir()} == {"compiled", "in-use"}
    assert list(cache.in_use.iterdir()) == []


def test_the_scratch_of_a_running_build_stays(cache: Cache) -> None:
    with cache.building() as scratch:
        prune(cache, 0)
        assert scratch.is_dir()


def test_what_is_somebodys_own_stays(cache: Cache) -> None:
    mine = [cache.root / "mine.txt", cache.compiled / "notes", cache.root / "logs" / "mine.txt"]
    mine += [cache.in_use / "mine.txt", cache.in_use / ("f" * 32) / "mine.txt"]
    for path in mine:
        path.parent.mkdir(exist_ok=True, parents=True)
        path.write_text("the only copy")
    (cache.in_use / ("e" * 32)).symlink_to(mine[0])
    assert prune(cache, 0).removed == len(KEYS)
    assert all(path.read_text() == "the only copy" for path in mine)


def test_a_link_is_removed_and_not_what_it_leads_to(cache: Cache, tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "file").write_text("x" * 5000)
    shutil.rmtree(cache.compiled / KEYS[0])
    (cache.compiled / KEYS[0]).symlink_to(tmp_path / "elsewhere")
    prune(cache, 0)
    assert left(cache) == ""
    assert (tmp_path / "elsewhere" / "file").exists()


@pytest.mark.parametrize("command", [contents, lambda cache: prune(cache, 0)])
def test_a_cache_that_others_can_write_is_refused(cache: Cache, command: Any) -> None:
    cache.compiled.chmod(0o777)
    with pytest.raises(UntrustedPath):
        command(cache)
    assert left(cache) == "abcdef"


@pytest.mark.parametrize("code", [errno.ENOLCK, errno.EBADF, errno.EOPNOTSUPP])
def test_a_file_system_without_locks_is_explained(
    cache: Cache, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    def flock(descriptor: int, kind: int) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(fcntl, "flock", flock)
    with cache.using(KEYS):  # for reading it serves
        pass
    with pytest.raises(StoreError, match=r"no locks on this file system.*local disk"):
        prune(cache, 0)
    assert left(cache) == "abcdef"


class TestWithBuilds:
    """Over a copy of the real cache: `gemv_any`, which has few variants."""

    def test_what_a_build_has_read_may_go(self, own_cache: Path, tmp_path: Path) -> None:
        specs, archs = plan.choose_kernels(["gemv_any"]), [Arch(8, 6)]
        jobs = plan.jobs(specs, archs)
        cache = Cache()
        seen: list[int] = []

        def progress(done: int, total: int, what: str) -> None:
            if not seen:
                seen.append(prune(cache, 0).left)

        result = build(specs, archs, out=tmp_path / "out", progress=progress)
        assert seen == [len(jobs)]  # no other entry was left, and all of its own
        assert result.compiled == set()
        assert all(isinstance(outcome, Passed) for outcome in verify(tmp_path / "out"))
        assert {item.key for item in contents(cache)} == {job.key for job in jobs}

    def test_a_build_counts_as_use(self, own_cache: Path, tmp_path: Path) -> None:
        specs, archs = plan.choose_kernels(["gemv_any"]), [Arch(9, 0)]
        build(specs, archs, out=tmp_path / "out")
        used = {job.key for job in plan.jobs(specs, archs)}
        newest = contents(Cache())[-len(used) :]
        assert {item.key for item in newest} == used

    def test_the_artifact_directory_loses_nothing_but_leftovers(
        self, own_cache: Path, invoke: Invoke
    ) -> None:
        chosen = ("build", "--arch=sm86", "--kernel=gemv_any")
        assert invoke(*chosen).exit_code == 0
        directory = own_cache / "artifacts"
        stray = directory / "objects" / ("0" * 64 + ".cubin")
        stray.write_bytes(b"of a killed publisher")
        (directory / ".sonata-aot-staging").mkdir()
        with locked(directory):
            assert invoke("cache", "clear").exit_code == 0
            assert stray.exists()  # perhaps a publisher's that is at work
        assert invoke("cache", "clear").exit_code == 0
        assert {path.name for path in directory.iterdir()} == {"manifest.json", "objects"}
        assert not stray.exists()
        assert all(isinstance(outcome, Passed) for outcome in verify(directory))
        assert invoke("cache", "size", "--json").stdout.count('"entries": 0') == 1

    def test_objects_that_no_manifest_was_written_for(
        self, own_cache: Path, invoke: Invoke
    ) -> None:
        objects = own_cache / "artifacts" / "objects"
        objects.mkdir(parents=True, mode=0o700)
        (objects / ("0" * 64 + ".ptx")).write_bytes(b"of a killed publisher")
        invoke("cache", "prune")
        assert list(objects.iterdir()) == []


class TestCommands:
    def test_path(self, cache: Cache, invoke: Invoke) -> None:
        assert invoke("cache", "path").stdout == f"{cache.root}\n"
        assert json.loads(invoke("cache", "path", "--json").stdout) == {
            "directory": str(cache.root)
        }

    def test_size(self, cache: Cache, invoke: Invoke) -> None:
        assert invoke("cache", "size").stdout == f"{cache.root}: 6 entries and 0 logs, 5.9 KiB\n"
        assert json.loads(invoke("cache", "size", "--json").stdout) == {
            "directory": str(cache.root),
            "entries": 6,
            "logs": 0,
            "bytes": 6000,
        }

    def test_list(self, own_cache: Path, invoke: Invoke) -> None:
        cache = Cache()
        broken, *others = contents(cache)
        (broken.path / "record.json").write_text("{}")
        printed = json.loads(invoke("cache", "list", "--json").stdout)["entries"]
        assert {entry["key"] for entry in printed} == {item.key for item in (broken, *others)}
        by_key = {entry["key"]: entry for entry in printed}
        assert by_key[broken.key]["kernel"] is None
        whole = cache.find(others[-1].key)
        assert whole is not None
        shown = by_key[others[-1].key]
        assert shown["variant"] == whole.binary.variant
        assert (shown["kernel"], shown["arch"]) == (whole.binary.kernel, whole.binary.arch)
        lines = invoke("cache", "list").stdout.splitlines()
        assert len(lines) == 1 + len(printed)
        assert lines[0].split()[:4] == ["key", "kernel", "variant", "arch"]

    def test_prune(self, cache: Cache, invoke: Invoke) -> None:
        result = invoke("cache", "prune", "--max-size", "4K")
        assert result.exit_code == 0
        assert left(cache) == "cdef"
        assert "removed 2 entries and logs, 2.0 KiB" in result.stdout
        printed = json.loads(invoke("cache", "prune", "--max-size=3500", "--json").stdout)
        assert printed == {
            "directory": str(cache.root),
            "removed": 1,
            "removed_bytes": 1000,
            "left": 3,
            "left_bytes": 3000,
            "in_use": 0,
        }
        assert invoke("cache", "prune", "--quiet").stdout == ""
        assert left(cache) == "def"

    def test_clear(self, cache: Cache, invoke: Invoke) -> None:
        with cache.using(KEYS[:1]):
            result = invoke("cache", "clear")
        assert result.exit_code == 0
        assert left(cache) == "a"
        assert "1000 B in use by running builds" in result.stdout

    @pytest.mark.parametrize("size", ["", "-1", "x", "1P", "1e9", "nan", "٣"])
    def test_what_is_no_size(self, cache: Cache, invoke: Invoke, size: str) -> None:
        assert invoke("cache", "prune", "--max-size", size).exit_code == 2
        assert left(cache) == "abcdef"


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("0", 0),
        ("1000000", 10**6),
        ("500M", 500 * 2**20),
        ("1.5GiB", 3 * 2**29),
        ("2 kb", 2048),
        ("1T", 2**40),
        ("12B", 12),
    ],
)
def test_sizes(text: str, size: int) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize(
    ("size", "text"), [(0, "0 B"), (1023, "1023 B"), (1536, "1.5 KiB"), (3 * 2**29, "1.5 GiB")]
)
def test_sizes_for_people(size: int, text: str) -> None:
    assert show_size(size) == text
