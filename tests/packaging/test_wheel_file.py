"""Wheels as files: what is refused, and that the same content gives the same bytes."""

from __future__ import annotations

import os
import stat
import time
import zipfile
from collections.abc import Callable
from importlib.metadata import distribution
from pathlib import Path

import pytest

from sonata_aot.aot.wheel_base import find_base, installed_wheel
from sonata_aot.aot.wheel_file import Wheel, read_wheel
from sonata_aot.artifacts.errors import ArgumentError, BuildError, IntegrityError

Edit = Callable[[dict[str, bytes]], object]
METADATA, WHEEL = b"Metadata-Version: 2.4\nName: some-thing\nVersion: 1.5\n", b"Tag: py3-none-any\n"
INFO = "some_thing-1.5.dist-info"
RECORD = f"{INFO}/RECORD"


@pytest.fixture
def wheel() -> Wheel:
    files = {"b.py": b"b\n", "a/c.so": b"c", f"{INFO}/METADATA": METADATA, f"{INFO}/WHEEL": WHEEL}
    return Wheel("some-thing", "1.5", ("py3-none-any",), files)


@pytest.fixture
def path(wheel: Wheel, tmp_path: Path) -> Path:
    (tmp_path / wheel.file_name).write_bytes(wheel.to_bytes())
    return tmp_path / wheel.file_name


def edited(path: Path, edit: Edit) -> Path:
    with zipfile.ZipFile(path) as archive:
        files = {name: archive.read(name) for name in archive.namelist()}
    edit(files)
    with zipfile.ZipFile(path, "w") as archive:
        for name, data in files.items():
            archive.writestr(name, data)
    return path


def test_what_is_written_is_read(wheel: Wheel, path: Path) -> None:
    assert path.name == "some_thing-1.5-py3-none-any.whl"
    assert read_wheel(path) == wheel


def test_the_order_of_files_and_the_time_do_not_matter(
    wheel: Wheel, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = wheel.to_bytes()
    wheel.files = dict(reversed(wheel.files.items()))
    monkeypatch.setattr(time, "time", lambda: 2e9)
    assert wheel.to_bytes() == first


def test_metadata_come_last_and_modes_are_plain(path: Path) -> None:
    with zipfile.ZipFile(path) as archive:
        assert [info.filename for info in archive.infolist()] == [
            *("a/c.so", "b.py", f"{INFO}/METADATA", f"{INFO}/WHEEL", RECORD)
        ]
        for info in archive.infolist():
            assert info.external_attr >> 16 == stat.S_IFREG | 0o644
            assert info.date_time == (1980, 1, 1, 0, 0, 0)


@pytest.mark.parametrize(
    ("text", "year"), [("1700000000", 2023), ("0", 1980), ("4102444800", 2100)]
)
def test_the_variable_sets_the_time(
    wheel: Wheel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, year: int
) -> None:
    monkeypatch.setenv("SOURCE_DATE_EPOCH", text)
    (tmp_path / "x").write_bytes(wheel.to_bytes())
    with zipfile.ZipFile(tmp_path / "x") as archive:
        assert {info.date_time[0] for info in archive.infolist()} == {year}


@pytest.mark.parametrize("text", ["-1", "soon", str(2**32)])
def test_a_wrong_time_is_refused(wheel: Wheel, monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setenv("SOURCE_DATE_EPOCH", text)
    with pytest.raises(ArgumentError, match="SOURCE_DATE_EPOCH"):
        wheel.to_bytes()


@pytest.mark.parametrize(
    ("edit", "says"),
    [
        (lambda files: files.update({"b.py": b"B\n"}), "b.py is not as its RECORD says"),
        (lambda files: files.update({"d.py": b""}), "d.py is in RECORD or the wheel alone"),
        (lambda files: files.pop("b.py"), "b.py is in RECORD or the wheel alone"),
        (lambda files: files.pop(RECORD), "no RECORD"),
        (lambda files: files.update({RECORD: b""}), "in RECORD or the wheel alone"),
    ],
)
def test_a_wheel_that_is_not_as_recorded_is_refused(path: Path, edit: Edit, says: str) -> None:
    with pytest.raises(IntegrityError, match=says):
        read_wheel(edited(path, edit))


def test_no_flipped_bit_passes_unseen(wheel: Wheel, path: Path) -> None:
    wheel.files["b.py"] = b"a longer one, " * 20
    good = wheel.to_bytes()
    refused = 0
    for place in range(len(good)):
        for bit in (1, 128):
            path.write_bytes(good[:place] + bytes([good[place] ^ bit]) + good[place + 1 :])
            try:
                # What is not refused is of the container: times, modes, lengths of comments.
                assert read_wheel(path) == wheel
            except IntegrityError:
                refused += 1
    assert refused > len(good)


def test_no_wheel_at_all(tmp_path: Path) -> None:
    (tmp_path / "x-1-py3-none-any.whl").write_text("no zip")
    for name in ("x-1-py3-none-any.whl", "missing-1-py3-none-any.whl"):
        with pytest.raises(IntegrityError, match="is no wheel"):
            read_wheel(tmp_path / name)


def test_a_device_is_not_read_to_its_end() -> None:
    with pytest.raises(IntegrityError, match="not a regular file"):
        read_wheel(Path("/dev/null"))  # /dev/zero has none


def test_metadata_without_a_tag(wheel: Wheel, tmp_path: Path) -> None:
    wheel.files[f"{INFO}/WHEEL"] = b"Wheel-Version: 1.0\n"
    (tmp_path / wheel.file_name).write_bytes(wheel.to_bytes())
    with pytest.raises(IntegrityError, match="lack a name, version or tag"):
        read_wheel(tmp_path / wheel.file_name)


def test_another_platform(wheel: Wheel) -> None:
    wheel.tags = ("cp312-abi3-linux_x86_64",)
    wheel.files[f"{INFO}/WHEEL"] = b"Wheel-Version: 1.0\nTag: cp312-abi3-linux_x86_64\n\n"
    wheel.retag("manylinux_2_28_x86_64")
    assert wheel.file_name == "some_thing-1.5-cp312-abi3-manylinux_2_28_x86_64.whl"
    expected = b"Wheel-Version: 1.0\nTag: cp312-abi3-manylinux_2_28_x86_64\n"
    assert wheel.files[f"{INFO}/WHEEL"] == expected


def test_a_base_of_something_else_is_refused(path: Path) -> None:
    with pytest.raises(BuildError, match="is no wheel of sonata-aot"):
        find_base(path, isolation=True)


class TestInstalled:
    """Packing what is installed."""

    @pytest.fixture
    def root(self, path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
        root = tmp_path / "site"
        with zipfile.ZipFile(path) as archive:
            archive.extractall(root)
        # As an installer leaves it: byte code and a script without, files of its own with digests.
        record = root / RECORD
        more = "__pycache__/b.pyc,,\n../bin/thing,sha256=x,1\n" + f"{INFO}/INSTALLER,sha256=x,4\n"
        record.write_text(record.read_text() + more)
        (root / INFO / "INSTALLER").write_text("pip\n")
        monkeypatch.syspath_prepend(root)
        return root

    def test_it_is_the_wheel_that_was_installed(self, root: Path, path: Path) -> None:
        assert installed_wheel(distribution("some-thing")).to_bytes() == path.read_bytes()

    def test_a_changed_file_is_refused(self, root: Path) -> None:
        (root / "b.py").write_text("changed\n")
        with pytest.raises(IntegrityError, match=r"b\.py is not as its RECORD says"):
            installed_wheel(distribution("some-thing"))

    def test_a_file_without_a_digest_is_refused(self, root: Path) -> None:
        record = root / RECORD
        lines = record.read_text().splitlines()
        lines = ["b.py,," if line.startswith("b.py,") else line for line in lines]
        record.write_text("\n".join(lines))
        with pytest.raises(IntegrityError, match=r"b\.py is not as its RECORD says"):
            installed_wheel(distribution("some-thing"))

    def test_a_missing_file_is_refused(self, root: Path) -> None:
        os.unlink(root / "a" / "c.so")
        with pytest.raises(IntegrityError, match=r"c\.so cannot be read"):
            installed_wheel(distribution("some-thing"))
