"""A wheel gets its place whole, with true sums, whoever else writes there or was killed."""

from __future__ import annotations

import errno
import hashlib
import os
import signal
import subprocess
import sys
import textwrap
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from sonata_aot.aot import wheel_publish as module
from sonata_aot.aot.wheel_publish import SUMS, publish, require_writable
from sonata_aot.artifacts.errors import BuildError, SonataError, StoreError
from sonata_aot.artifacts.files import locked

NAME = "x-1-py3-none-any.whl"


def nothing(path: Path) -> None:
    assert path.read_bytes() == b"wheel"


def line(name: str, content: bytes) -> str:
    return f"{hashlib.sha256(content).hexdigest()}  {name}\n"


def test_the_sums_are_of_all_packages(tmp_path: Path) -> None:
    (tmp_path / "b-1.tar.gz").write_bytes(b"b")
    (tmp_path / "notes").write_bytes(b"n")
    (tmp_path / "a-1-py3-none-any.whl").write_bytes(b"a")
    assert publish(NAME, b"wheel", tmp_path, check=nothing) == tmp_path / NAME
    expected = [line("a-1-py3-none-any.whl", b"a"), line("b-1.tar.gz", b"b"), line(NAME, b"wheel")]
    assert (tmp_path / SUMS).read_text() == "".join(expected)


def test_what_is_no_file_has_no_sum(tmp_path: Path) -> None:
    (tmp_path / "nowhere.whl").symlink_to(tmp_path / "missing")
    (tmp_path / "folder.whl").mkdir()
    os.mkfifo(tmp_path / "pipe.whl")
    publish(NAME, b"wheel", tmp_path, check=nothing)
    assert (tmp_path / SUMS).read_text() == line(NAME, b"wheel")


@pytest.mark.parametrize("name", [NAME, SUMS])
def test_a_directory_in_its_place_is_named_and_nothing_written(tmp_path: Path, name: str) -> None:
    (tmp_path / name).mkdir()
    with pytest.raises(StoreError, match=f"{name} is a directory; remove it"):
        publish(NAME, b"wheel", tmp_path, check=nothing)
    assert os.listdir(tmp_path) == [name]


def test_what_is_wrong_leaves_what_was_there(tmp_path: Path) -> None:
    publish(NAME, b"wheel", tmp_path, check=nothing)
    sums = (tmp_path / SUMS).read_bytes()

    def wrong(path: Path) -> None:
        raise BuildError("wrong", remedy="mend it")

    with pytest.raises(BuildError):
        publish(NAME, b"other", tmp_path, check=wrong)
    assert {name: (tmp_path / name).read_bytes() for name in os.listdir(tmp_path)} == {
        NAME: b"wheel",
        SUMS: sums,
    }


def test_what_a_killed_one_left_is_removed_by_the_next(tmp_path: Path) -> None:
    script = f"""
    import os, pathlib, signal
    from sonata_aot.aot.wheel_publish import publish
    out = pathlib.Path({str(tmp_path)!r})
    publish({NAME!r}, b"wheel", out, check=lambda path: os.kill(os.getpid(), signal.SIGKILL))
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(script)], check=False)
    assert done.returncode == -signal.SIGKILL
    (left,) = os.listdir(tmp_path)  # neither the wheel nor sums
    assert left.startswith(".sonata-aot-wheel-")
    (tmp_path / ".kept").mkdir()
    publish(NAME, b"wheel", tmp_path, check=nothing)
    assert sorted(os.listdir(tmp_path)) == [".kept", SUMS, NAME]


def test_one_waits_for_another(tmp_path: Path) -> None:
    other = "a-1-py3-none-any.whl"
    with locked(tmp_path):
        thread = threading.Thread(
            target=publish, args=(NAME, b"wheel", tmp_path), kwargs={"check": nothing}
        )
        thread.start()
        (tmp_path / other).write_bytes(b"a")
        assert not (tmp_path / NAME).exists()
    thread.join()
    assert (tmp_path / SUMS).read_text() == line(other, b"a") + line(NAME, b"wheel")


def test_where_there_are_no_locks_it_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    @contextmanager
    def none(directory: Path) -> Iterator[None]:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))
        yield

    monkeypatch.setattr(module, "locked", none)
    theirs = tmp_path / ".sonata-aot-wheel-theirs"
    theirs.mkdir()  # somebody may be at work in it
    publish(NAME, b"wheel", tmp_path, check=nothing)
    assert sorted(os.listdir(tmp_path)) == [theirs.name, SUMS, NAME]


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    require_writable(tmp_path / "new" / "folder")
    assert os.listdir(tmp_path / "new" / "folder") == []
    (tmp_path / "file").touch()
    for place in (tmp_path / "file", tmp_path / "file" / "below", Path("/proc/none")):
        with pytest.raises(SonataError, match=f"cannot write into {place}"):
            require_writable(place)
