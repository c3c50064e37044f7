"""Builds where something about the place is wrong or odd: each has one clear outcome."""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
import subprocess
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import small_spec

from sonata_aot.aot import pool
from sonata_aot.artifacts import open_artifacts
from sonata_aot.artifacts.verify import Passed, verify

if TYPE_CHECKING:
    from tests.aot.canned import Canned
    from tests.aot.conftest import Cli, Invoke


def is_whole(directory: Path) -> bool:
    return all(isinstance(outcome, Passed) for outcome in verify(directory))


MOUNT = 'mount -t tmpfs -o size={size},mode=700 tmpfs "$1" || exit 77; shift; exec "$@"'


@pytest.mark.parametrize("place", ["cache", "out"])
def test_a_full_disk(canned: Canned, place: str) -> None:
    """A really full one: a file system of 100 KB."""
    if os.geteuid() != 0 or shutil.which("unshare") is None:
        pytest.skip("only root can mount a small file system of its own")
    (canned.root / place).mkdir(mode=0o700)
    mounted = ["unshare", "--mount", "sh", "-c", MOUNT.format(size="100k"), "sh"]
    out = ("--out", canned.root / "out")
    # One worker, so that it is not at the same time as the build that it finds no space.
    done = canned.build("--jobs=1", *out, before=[*mounted, str(canned.root / place)])
    if done.returncode == 77 or "unshare" in done.stderr:
        pytest.skip(f"this machine lets nobody mount: {done.stderr.strip()}")
    assert (done.returncode, done.stdout) == (1, "")
    error = done.stderr.splitlines()[-1]
    assert re.search(r"cannot (write the cache in|publish to) .*No space left on device", error)
    assert "free some space" in error
    assert "Traceback" not in done.stderr
    again = canned.build(*out)
    assert again.returncode == 0, again.stderr
    assert is_whole(canned.root / "out")


def test_disk_full_at_every_write(canned: Canned) -> None:
    """ENOSPC injected ever later: every build but the last fails in one line, none does harm."""
    (canned.root / "sitecustomize.py").write_text(FULL)
    failures = 0
    for left in range(0, 200, 9):
        canned.environ["WRITES_LEFT"] = str(left)
        done = canned.build("--jobs=1")
        if done.returncode == 0:
            break
        failures += 1
        assert "No space left on device" in done.stderr
        assert "Traceback" not in done.stderr
    assert failures > 2
    assert is_whole(canned.cache / "artifacts")
    assert len(canned.compiled) < 8 + failures + 1  # what was compiled was kept


def test_a_disk_too_full_to_start_a_worker(
    own_cache: Path, invoke: Invoke, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Also where nothing has been compiled yet: no fault of the output, which is a pipe."""
    for folder in (own_cache / "compiled").iterdir():
        shutil.rmtree(folder)

    def full(worker: object, scratch: Path) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(scratch))

    monkeypatch.setattr(pool._Worker, "__init__", full)
    result = invoke("build", "--arch=sm86", "--kernel=gemv_any", "--out", tmp_path / "out")
    assert (result.exit_code, result.stdout) == (1, "")
    (line,) = result.stderr.splitlines()
    assert line.startswith(f"sonata-aot: cannot compile in {own_cache}")
    assert "No space left on device; free some space" in line


# In the builder alone, so not in workers: after so many files that it opened for writing.
FULL = """
import errno, os, sys

left = int(os.environ.get("WRITES_LEFT", "1000000"))


def hook(event, arguments):
    global left
    if event != "open" or not isinstance(arguments[0], str) or "run.py" not in sys.argv[0]:
        return
    name = arguments[0]
    writes = arguments[2] & (os.O_WRONLY | os.O_RDWR)
    if writes and name.endswith((".cubin", ".ptx", ".json")) and "/worker" not in name:
        left -= 1
        if left < 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), name)


sys.addaudithook(hook)
"""


@pytest.mark.parametrize("name", [b"with  two spaces", b"not-utf8-\xff\nnor a line", b"-q"])
def test_odd_names(canned: Canned, name: bytes) -> None:
    """Of the cache, of the directory, and of the working directory."""
    odd = Path(os.fsdecode(os.path.join(os.fsencode(canned.root), name)))
    odd.mkdir(mode=0o700)
    canned.environ["SONATA_AOT_CACHE_DIR"] = str(odd / "cache")
    # The second as in a UTF-8 locale such as en_US.UTF-8, which not every machine has.
    for setting in (
        {"LC_ALL": "C"},
        {"PYTHONUTF8": "1", "PYTHONIOENCODING": "utf-8:strict"},
        {"PYTHONIOENCODING": "ascii"},
    ):
        canned.environ |= setting
        done = canned.build("--out", odd / "out")
        assert done.returncode == 0, done.stderr
        assert is_whole(odd / "out")
        shown = canned.command("verify", odd / "out")
        assert (shown.returncode, shown.stderr) == (0, ""), shown.stderr
        printed = canned.command("list", odd / "out", "--json")
        assert json.loads(printed.stdout)["directory"] == str(odd / "out")
    assert len(canned.compiled) == 8
    sized = json.loads(canned.command("cache", "size", "--json").stdout)
    assert (sized["directory"], sized["entries"]) == (str(odd / "cache"), 8)


@pytest.mark.parametrize("name", [b"a: b", b"\xff 'b' {c}"])
def test_the_compiler_itself_in_odd_places(cli: Cli, tmp_path: Path, name: bytes) -> None:
    """The project and the cache; of the project's the compiler must be able to write the name."""
    odd = Path(os.fsdecode(os.path.join(os.fsencode(tmp_path), name)))
    odd.mkdir(mode=0o700)
    device, spec = "odd_place_device", "odd_place_spec"
    code = small_spec.DEVICE.format(name="odd_place")
    readable = odd if name.isascii() else tmp_path
    (readable / f"{device}.py").write_text(code)
    (readable / f"{spec}.py").write_text(
        small_spec.SPEC.format(name="odd_place", device=f"{device}:odd_place")
    )
    chosen = ("build", "--arch=sm86", "--from", spec)
    done = cli(*chosen, "--out", odd / "out", cwd=readable, SONATA_AOT_CACHE_DIR=odd / "cache")
    assert done.returncode == 0, done.stderr
    assert is_whole(odd / "out")
    plain = cli(*chosen, "--out", tmp_path / "out", cwd=readable)
    assert plain.returncode == 0, plain.stderr
    manifests = [(place / "out" / "manifest.json").read_bytes() for place in (odd, tmp_path)]
    assert manifests[0] == manifests[1]
    if readable != odd:
        for file in tmp_path.glob("odd_place_*"):
            file.rename(odd / file.name)
        (odd / f"{device}.py").write_text(code + "# else it is cached")
        done = cli(*chosen, "--out", odd / "out", cwd=odd)
        assert (done.returncode, done.stdout) == (1, "")
        assert "is in a folder whose name is no UTF-8" in done.stderr
        assert "rename the folder" in done.stderr


@pytest.mark.parametrize("years", [-30, 30])
def test_a_clock_that_has_jumped(own_cache: Path, invoke: Invoke, years: int) -> None:
    """All that is there is as good as before, whatever time it seems to be of."""
    chosen = ("build", "--arch=sm86", "--kernel=gemv_any", "--json")
    before = json.loads(invoke(*chosen).stdout)
    when = time.time() + years * 365 * 86400
    for path in own_cache.rglob("*"):
        os.utime(path, (when, when))
    after = json.loads(invoke(*chosen).stdout)
    assert (after["compiled"], after["written"], after["removed"]) == ([], 0, [])
    assert after["manifest"] == before["manifest"]
    listed = json.loads(invoke("cache", "list", "--json").stdout)["entries"]
    assert {entry["key"] for entry in listed[-16:]} == set(after["cached"])  # used last
    assert is_whole(own_cache / "artifacts")


@pytest.mark.parametrize(
    ("cache", "out", "good"),
    [
        ("a", "a", False),
        ("a/b", "a", False),
        ("a", "a/compiled", False),
        ("a", "link/logs/b", False),
        ("a", "a/artifacts", True),
        ("a", "ab", True),
    ],
)
def test_a_set_and_a_cache_do_not_lie_in_each_other(
    own_cache: Path,
    invoke: Invoke,
    tmp_path: Path,
    cache: str,
    out: str,
    good: bool,
) -> None:
    """Said before anything is compiled or made, and not by the publisher afterwards."""
    (tmp_path / "link").symlink_to(tmp_path / "a")
    if good:
        own_cache.rename(tmp_path / cache)
    result = invoke(
        *("build", "--arch=sm86", "--kernel=gemv_any", "--out", tmp_path / out),
        SONATA_AOT_CACHE_DIR=tmp_path / cache,
    )
    if good:
        assert result.exit_code == 0, result.stderr
        return
    assert (result.exit_code, result.stdout) == (1, "")
    (line,) = result.stderr.splitlines()
    assert f"{tmp_path / out}: the compile cache {tmp_path / cache} lies there" in line
    assert not (tmp_path / "a").exists()


class TestReadOnly:
    """A cache on a medium that nobody can write, root included."""

    @pytest.fixture
    def read_only(self, canned: Canned) -> list[str]:
        """Words before a command that see a full cache, mounted read-only."""
        if os.geteuid() != 0 or shutil.which("unshare") is None:
            pytest.skip("only root can mount")
        assert canned.build("--out", canned.root / "out").returncode == 0
        shell = 'mount --bind -o ro "$1" "$1" && mount -o remount,bind,ro "$1" || exit 77; '
        words = ["unshare", "--mount", "sh", "-c", shell + 'shift; exec "$@"', "sh"]
        return [*words, str(canned.cache)]

    def run(self, canned: Canned, *arguments: str | Path, before: list[str]) -> Run:
        done = canned.build(*arguments, before=before)
        if done.returncode == 77 or "unshare" in done.stderr:
            pytest.skip(f"this machine lets nobody mount: {done.stderr.strip()}")
        return done

    def test_it_serves_for_reading(self, canned: Canned, read_only: list[str]) -> None:
        done = self.run(canned, "--json", "--out", canned.root / "new", before=read_only)
        assert done.returncode == 0, done.stderr
        assert json.loads(done.stdout)["compiled"] == []
        assert is_whole(canned.root / "new")

    def test_what_is_missing_there_is_an_error(self, canned: Canned, read_only: list[str]) -> None:
        shutil.rmtree(next((canned.cache / "compiled").iterdir()))
        done = self.run(canned, "--out", canned.root / "new", before=read_only)
        assert (done.returncode, done.stdout) == (1, "")
        error = done.stderr.splitlines()[-1]
        assert f"cannot write the cache in {canned.cache}" in error
        assert "Read-only file system" in error
        assert "SONATA_AOT_CACHE_DIR" in error
        assert not list((canned.root / "new").iterdir())

    def test_publishing_there_is_an_error(self, canned: Canned, read_only: list[str]) -> None:
        done = self.run(canned, before=read_only)
        assert (done.returncode, done.stdout) == (1, "")
        assert "Read-only file system" in done.stderr
        assert "--out" in done.stderr


Run = subprocess.CompletedProcess[str]


def test_a_directory_of_another_user_where_it_is_allowed(
    invoke: Invoke, own_cache: Path, tmp_path: Path
) -> None:
    """As in a container that runs as root over a checkout of user 1000."""
    if os.geteuid() != 0:
        pytest.skip("only root can give files away")
    checkout = tmp_path / "checkout"
    checkout.mkdir()
    os.chown(checkout, 1000, -1)
    chosen = ("build", "--arch=sm86", "--kernel=gemv_any", "--out", checkout / "out")
    refused = invoke(*chosen)
    assert refused.exit_code == 1
    assert f"{checkout} belongs to user 1000" in refused.stderr
    allowed = invoke(*chosen, "--allow-untrusted", "--quiet")
    assert (allowed.exit_code, allowed.stdout) == (0, "")
    fault = f"{checkout} belongs to user 1000, not to root or the current user"
    assert allowed.stderr == f"sonata-aot: warning: used all the same: {fault}\n"
    for command in ("list", "verify", "doctor", "inspect"):
        options = ("--check",) if command == "inspect" else ()
        assert fault in invoke(command, *options, checkout / "out").output
        allowed = invoke(command, *options, checkout / "out", "--allow-untrusted", "--json")
        assert allowed.exit_code == 0, allowed.stderr
        assert json.loads(allowed.stdout)["untrusted"] == [fault]
    # What was built says nothing of it: it is the same as anywhere else.
    invoke(*chosen[:-1], tmp_path / "out")
    assert (
        open_artifacts(tmp_path / "out").manifest.to_bytes()
        == (checkout / "out" / "manifest.json").read_bytes()
    )


def test_the_flag_allows_no_damage_and_no_link(
    invoke: Invoke, copied: Path, tmp_path: Path
) -> None:
    (copied / "objects").rename(tmp_path / "elsewhere")
    (copied / "objects").symlink_to(tmp_path / "elsewhere")
    result = invoke("verify", copied, "--allow-untrusted")
    assert result.exit_code == 1
    assert "is not a directory of its own" in result.stdout
