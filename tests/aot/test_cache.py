"""The compile cache: whatever is damaged counts as absent, and is compiled again."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from sonata_aot.aot import plan
from sonata_aot.aot.build import build
from sonata_aot.aot.cache import Cache, Entry
from sonata_aot.artifacts import Arch
from sonata_aot.artifacts.errors import StoreError, UntrustedPath
from sonata_aot.artifacts.files import locked
from sonata_aot.artifacts.schema import digest
from sonata_aot.artifacts.verify import Passed, verify

if TYPE_CHECKING:
    from tests.aot.conftest import Invoke

ABSENT = "0" * 64
SCRATCH = ".sonata-aot-scratch"


@pytest.fixture
def entries(own_cache: Path) -> list[Entry]:
    cache = Cache()
    found = [cache.find(folder.name) for folder in sorted((own_cache / "compiled").iterdir())]
    return [entry for entry in found if entry is not None]


@pytest.fixture
def entry(entries: list[Entry]) -> Entry:
    # One that has something of everything that a record says.
    return next(entry for entry in entries if entry.binary.shared_bytes)


@pytest.fixture
def folder(own_cache: Path, entry: Entry) -> Path:
    return own_cache / "compiled" / entry.binary.key


def test_finds_what_a_build_left(entries: list[Entry], own_cache: Path) -> None:
    assert len(entries) == len(list((own_cache / "compiled").iterdir())) >= 4
    for entry in entries:
        assert entry.cubin.startswith(b"\x7fELF")
        assert b".entry " + entry.binary.entry.encode() in entry.ptx


def test_an_absent_key(own_cache: Path) -> None:
    assert Cache().find(ABSENT) is None


def test_an_entry_comes_back_as_it_was_put(tmp_path: Path, entry: Entry) -> None:
    cache = Cache(tmp_path / "new")
    with cache.building():
        cache.add(entry)
    assert cache.find(entry.binary.key) == entry
    assert {path.name for path in cache.root.iterdir()} == {"compiled", SCRATCH}
    assert list((cache.root / SCRATCH).iterdir()) == []


def test_a_damaged_entry_is_replaced(folder: Path, entry: Entry) -> None:
    (folder / "record.json").write_text("{}")
    (folder / entry.binary.cubin.file_name).unlink()
    cache = Cache()
    assert cache.find(entry.binary.key) is None
    cache.add(entry)
    assert cache.find(entry.binary.key) == entry
    assert list((cache.root / SCRATCH).iterdir()) == []


def test_a_link_that_leads_nowhere_is_replaced(folder: Path, entry: Entry) -> None:
    shutil.rmtree(folder)
    folder.symlink_to(folder.parent / "gone")
    Cache().add(entry)
    assert Cache().find(entry.binary.key) == entry
    assert not folder.is_symlink()


def payload(folder: Path, suffix: str) -> Path:
    (path,) = folder.glob(f"*.{suffix}")
    return path


def truncated(folder: Path) -> None:
    path = payload(folder, "cubin")
    path.write_bytes(path.read_bytes()[:-8])


def flipped(folder: Path) -> None:
    path = payload(folder, "ptx")
    path.write_bytes(path.read_bytes().replace(b"sm_", b"sn_", 1))


def longer(folder: Path) -> None:
    path = payload(folder, "cubin")
    path.write_bytes(path.read_bytes() + b"\0")


def missing(folder: Path) -> None:
    payload(folder, "ptx").unlink()


def linked(folder: Path) -> None:
    path = payload(folder, "cubin")
    moved = path.rename(folder.parent.parent / "moved")
    path.symlink_to(moved)


def no_record(folder: Path) -> None:
    (folder / "record.json").unlink()


def garbled_record(folder: Path) -> None:
    (folder / "record.json").write_bytes(b"\xff\xfe{")


def cut_record(folder: Path) -> None:
    path = folder / "record.json"
    path.write_bytes(path.read_bytes()[:-2])


def writable_record(folder: Path) -> None:
    (folder / "record.json").chmod(0o666)


def writable_payload(folder: Path) -> None:
    payload(folder, "cubin").chmod(0o602)


def another_entrys_content(folder: Path) -> None:
    other = next(path for path in sorted(folder.parent.iterdir()) if path != folder)
    shutil.rmtree(folder)
    shutil.copytree(other, folder)


def a_file_in_its_place(folder: Path) -> None:
    shutil.rmtree(folder)
    folder.write_text("")


@pytest.mark.parametrize(
    "damage",
    [
        *(truncated, flipped, longer, missing, linked, no_record, garbled_record, cut_record),
        *(another_entrys_content, a_file_in_its_place, writable_record, writable_payload),
    ],
)
def test_a_damaged_entry_counts_as_absent(
    folder: Path, entry: Entry, damage: Callable[[Path], None]
) -> None:
    damage(folder)
    assert Cache().find(entry.binary.key) is None


def edit_record(folder: Path, *, sealed: bool, **changes: object) -> None:
    """Change the binary in a record; `sealed` makes the digest fit."""
    path = folder / "record.json"
    record = json.loads(path.read_bytes())
    assert record["binary"] != record["binary"] | changes
    record["binary"] |= changes
    if sealed:
        record["digest"] = digest(record["binary"])
    path.write_text(json.dumps(record, separators=(",", ":")))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("spills", 7),
        ("registers", 1),
        ("block", [64, 1, 1]),
        ("entry", "gemv_other"),
        ("arch", "sm89"),
        ("kernel", "other"),
        ("shared_bytes", 0),
    ],
)
def test_an_edited_record_counts_as_absent(
    folder: Path, entry: Entry, name: str, value: object
) -> None:
    edit_record(folder, sealed=False, **{name: value})
    assert Cache().find(entry.binary.key) is None
    edit_record(folder, sealed=True, entry="sealed")
    assert Cache().find(entry.binary.key) is not None  # so it was the digest that told


@pytest.mark.parametrize("changes", [{"unknown": 1}, {"registers": 0}, {"key": ABSENT}])
def test_a_record_of_another_shape_counts_as_absent(
    folder: Path, entry: Entry, changes: dict[str, object]
) -> None:
    edit_record(folder, sealed=True, **changes)
    assert Cache().find(entry.binary.key) is None


def another_jobs_binary(folder: Path) -> None:
    """Whole and consistent in itself, but what was compiled for something else."""
    another_entrys_content(folder)
    edit_record(folder, sealed=True, key=folder.name)
    assert Cache().find(folder.name) is not None


def another_variants_binary(folder: Path) -> None:
    variant = json.loads((folder / "record.json").read_bytes())["binary"]["variant"]
    edit_record(folder, sealed=True, variant={**variant, "dtype": "other"})
    assert Cache().find(folder.name) is not None


def another_archs_binary(folder: Path) -> None:
    edit_record(folder, sealed=True, arch="sm89")
    assert Cache().find(folder.name) is not None


@pytest.mark.parametrize(
    "damage", [truncated, another_jobs_binary, another_variants_binary, another_archs_binary]
)
def test_only_what_is_damaged_is_compiled_again(
    invoke: Invoke,
    own_cache: Path,
    built: Path,
    tmp_path: Path,
    damage: Callable[[Path], None],
) -> None:
    out = tmp_path / "out"
    chosen = ("build", "--arch=sm86", "--kernel=gemv_any", "--out", out)
    first = json.loads(invoke(*chosen, "--json").stdout)
    assert first["compiled"] == []
    key = first["cached"][0]
    damage(own_cache / "compiled" / key)
    total = len(first["cached"])
    again = invoke(*chosen)
    assert again.exit_code == 0
    assert f"{total} binaries: 1 compiled, {total - 1} cached" in again.stdout
    assert again.stderr.count(" compiled in ") == 1
    assert json.loads((out / "manifest.json").read_bytes()) == first["manifest"]
    assert all(isinstance(outcome, Passed) for outcome in verify(out))
    assert Cache().find(key) is not None


def test_building_clears_what_a_killed_builder_left(tmp_path: Path) -> None:
    cache = Cache(tmp_path / "cache")
    for name in ("abc/worker0/work", "xyz/entry"):
        (cache.root / SCRATCH / name).mkdir(parents=True, mode=0o700)
    with cache.building() as scratch:
        assert list((cache.root / SCRATCH).iterdir()) == [scratch]
        assert list(scratch.iterdir()) == []
    assert not scratch.exists()


def test_building_keeps_what_is_somebodys_own(tmp_path: Path) -> None:
    # SONATA_AOT_CACHE_DIR may name a directory that holds other things too.
    cache = Cache(tmp_path / "cache")
    mine = [cache.root / name / "mine.txt" for name in ("scratch-notes", "scratch", ".scratch")]
    for path in mine:
        path.parent.mkdir(parents=True, mode=0o700)
        path.write_text("the only copy")
    with cache.building():
        pass
    assert all(path.read_text() == "the only copy" for path in mine)


def test_the_scratch_goes_also_after_an_error(tmp_path: Path) -> None:
    cache = Cache(tmp_path / "cache")
    with pytest.raises(RuntimeError), cache.building():
        raise RuntimeError
    assert list((cache.root / SCRATCH).iterdir()) == []


def test_everything_is_private(tmp_path: Path, entry: Entry) -> None:
    cache = Cache(tmp_path / "above" / "cache")
    with cache.building() as scratch:
        cache.add(entry)
        folders = [cache.root.parent, cache.root, scratch, *(cache.root / "compiled").rglob("*/")]
    kept = cache.keep_log(ABSENT, cache.root / "compiled" / entry.binary.key / "record.json")
    folders = [path for path in (*folders, kept.parent) if path.is_dir()]
    assert len(folders) >= 4
    assert {path.stat().st_mode & 0o777 for path in folders} == {0o700}


def test_a_place_that_others_may_write(tmp_path: Path) -> None:
    root = tmp_path / "open"
    root.mkdir()
    root.chmod(0o777)
    with pytest.raises(UntrustedPath), Cache(root).building():
        pass


@pytest.mark.parametrize("place", ["", "compiled"])
@pytest.mark.parametrize("fault", ["writable by everybody", "belongs to user 65534"])
def test_a_warm_build_trusts_its_cache_no_more_than_a_cold_one(
    invoke: Invoke, own_cache: Path, tmp_path: Path, fault: str, place: str
) -> None:
    """Nothing is compiled, so nothing is written there; but what is read goes to servers."""
    if fault.startswith("writable"):
        (own_cache / place).chmod(0o777)
    elif os.geteuid() == 0:
        os.chown(own_cache / place, 65534, -1)
    else:
        pytest.skip("only root can give files away")
    out = tmp_path / "out"
    result = invoke("build", "--arch=sm86", "--out", out)
    assert (result.exit_code, result.stdout) == (1, "")
    (line,) = result.stderr.splitlines()
    assert f"{own_cache / place} {fault}" in line.replace(" is writable", " writable")
    assert list(out.iterdir()) == []
    assert invoke("build", "--arch=sm86", "--out", out).exit_code == 1


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")
@pytest.mark.parametrize("name", ["record.json", "*.cubin", "*.ptx"])
def test_an_entry_of_another_users_counts_as_absent(folder: Path, entry: Entry, name: str) -> None:
    (path,) = folder.glob(name)
    os.chown(path, 65534, -1)
    assert Cache().find(entry.binary.key) is None


def test_a_build_that_waits_for_another_says_so(own_cache: Path, tmp_path: Path) -> None:
    class Enough(Exception):
        pass

    said: list[tuple[int, int, str]] = []

    def progress(*step: Any) -> None:
        said.append(step)
        if "waiting" in step[2]:
            raise Enough

    specs = plan.choose_kernels(["gemv_any"])
    *cached, missing = plan.jobs(specs, [Arch.parse("sm86")])
    shutil.rmtree(own_cache / "compiled" / missing.key)
    with contextlib.ExitStack() as other:
        other.enter_context(locked(own_cache / "compiled"))
        patience = threading.Timer(10, other.close)  # or a build that says nothing waits for ever
        patience.start()
        other.callback(patience.cancel)
        with pytest.raises(Enough):
            build(specs, [missing.arch], out=tmp_path / "out", progress=progress)
    done, total = len(cached), len(cached) + 1
    assert said == [
        (done, total, f"{done} cached"),
        (done, total, "waiting for another build"),
    ]


def test_a_place_that_is_a_file(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with (
        pytest.raises(StoreError, match="SONATA_AOT_CACHE_DIR"),
        Cache(tmp_path / "file").building(),
    ):
        pass


def test_the_record_is_checked_against_the_files(tmp_path: Path, entry: Entry) -> None:
    wrong = dataclasses.replace(entry, cubin=entry.cubin[:-1])
    cache = Cache(tmp_path / "cache")
    with cache.building():
        cache.add(wrong)
    assert cache.find(entry.binary.key) is None
