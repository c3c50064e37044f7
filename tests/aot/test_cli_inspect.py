"""`list`, `verify` and `doctor` on good, missing and damaged directories."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from sonata_aot.artifacts import open_artifacts

if TYPE_CHECKING:
    from tests.aot.conftest import Cli, Invoke


def an_object(directory: Path, suffix: str) -> Path:
    return min((directory / "objects").glob(f"*.{suffix}"))


def truncate(directory: Path) -> str:
    path = an_object(directory, "cubin")
    path.write_bytes(path.read_bytes()[:-1])
    return path.name


def flip(directory: Path) -> str:
    path = an_object(directory, "ptx")
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    return path.name


def lengthen(directory: Path) -> str:
    path = an_object(directory, "ptx")
    path.write_bytes(path.read_bytes() + b"\n")
    return path.name


def remove(directory: Path) -> str:
    path = an_object(directory, "cubin")
    path.unlink()
    return path.name


def swap(directory: Path) -> str:
    one, other, *_ = sorted((directory / "objects").glob("*.cubin"))
    spare = directory / "spare"
    one.rename(spare)
    other.rename(one)
    spare.rename(other)
    return one.name


def link(directory: Path) -> str:
    path = an_object(directory, "cubin")
    target = directory.parent / "elsewhere"
    path.rename(target)
    path.symlink_to(target)
    return path.name


def stray(directory: Path) -> str:
    (directory / "objects" / "evil.so").write_bytes(b"x")
    return "objects/evil.so"


def stray_above(directory: Path) -> str:
    (directory / "notes.txt").write_text("x")
    return "notes.txt"


OBJECT_DAMAGE = [truncate, flip, lengthen, remove, swap, link, stray, stray_above]


def edit(directory: Path) -> None:
    path = directory / "manifest.json"
    path.write_text(path.read_text().replace('"spills":0', '"spills":1', 1))


def reformat(directory: Path) -> None:
    path = directory / "manifest.json"
    path.write_text(json.dumps(json.loads(path.read_text())))


def empty(directory: Path) -> None:
    (directory / "manifest.json").write_bytes(b"")


def cut(directory: Path) -> None:
    path = directory / "manifest.json"
    path.write_bytes(path.read_bytes()[:100])


def future(directory: Path) -> None:
    path = directory / "manifest.json"
    path.write_text(path.read_text().replace('"schema":1', '"schema":2', 1))


def vanish(directory: Path) -> None:
    (directory / "manifest.json").unlink()


def never_built(directory: Path) -> None:
    shutil.rmtree(directory)


MANIFEST_DAMAGE = [edit, reformat, empty, cut, future, vanish, never_built]


class TestList:
    def test_shows_every_binary_and_where_it_came_from(self, cli: Cli, built: Path) -> None:
        result = cli("list", built)
        manifest = open_artifacts(built).manifest
        assert (result.returncode, result.stderr) == (0, "")
        table, _, origin = result.stdout.partition("\n\n")
        assert len(table.splitlines()) == 1 + len(manifest.binaries)
        for line, binary in zip(table.splitlines()[1:], manifest.binaries, strict=True):
            # A kernel without choices has an empty cell.
            start = [binary.kernel, *binary.variant_name.split(), binary.arch]
            assert line.split()[: len(start)] == start
        for text in (manifest.tool, manifest.digest[:12], "nvidia-cutlass-dsl 4", str(built)):
            assert text in origin

    def test_json_is_the_manifest(self, invoke: Invoke, built: Path) -> None:
        printed = json.loads(invoke("list", built, "--json").stdout)
        assert printed.pop("directory") == str(built)
        assert printed == json.loads((built / "manifest.json").read_bytes())

    def test_the_directory_comes_from_the_environment(self, invoke: Invoke, built: Path) -> None:
        assert invoke("list", SONATA_AOT_DIR=built).stdout == invoke("list", built).stdout

    @pytest.mark.parametrize("flags", [[], ["--json"]])
    @pytest.mark.parametrize("damage", MANIFEST_DAMAGE)
    def test_refuses_in_one_line(
        self, invoke: Invoke, copied: Path, damage: Callable[[Path], None], flags: list[str]
    ) -> None:
        damage(copied)
        result = invoke("list", copied, *flags)
        assert (result.exit_code, result.stdout) == (1, "")
        assert len(result.stderr.splitlines()) == 1
        assert str(copied) in result.stderr
        assert "build" in result.stderr


class TestVerify:
    def test_a_good_directory(self, cli: Cli, built: Path) -> None:
        result = cli("verify", built)
        total = 1 + len(open_artifacts(built).manifest.binaries)
        assert (result.returncode, result.stderr) == (0, "")
        assert (
            len([line for line in result.stdout.splitlines() if line.startswith("ok  ")]) == total
        )
        assert result.stdout.endswith(f"{built}: {total} ok, 0 wrong\n")

    def test_json_of_a_good_directory(self, invoke: Invoke, built: Path) -> None:
        result = invoke("verify", built, "--json")
        printed = json.loads(result.stdout)
        labels = [binary.label for binary in open_artifacts(built).manifest.binaries]
        assert (result.exit_code, printed["ok"], printed["directory"]) == (0, True, str(built))
        assert printed["outcomes"] == [
            {"outcome": "passed", "subject": subject} for subject in ["manifest.json", *labels]
        ]

    @pytest.mark.parametrize("damage", OBJECT_DAMAGE)
    def test_finds_every_damage(
        self, invoke: Invoke, copied: Path, damage: Callable[[Path], str]
    ) -> None:
        name = damage(copied)
        result = invoke("verify", copied)
        assert (result.exit_code, result.stderr) == (1, "")
        failures = [line for line in result.stdout.splitlines() if line.startswith("FAIL  ")]
        assert any(name in line for line in failures)
        assert f"{len(failures)} wrong" in result.stdout
        printed = json.loads(invoke("verify", copied, "--json").stdout)
        wrong = [item for item in printed["outcomes"] if item["outcome"] != "passed"]
        assert not printed["ok"]
        assert len(wrong) == len(failures)

    @pytest.mark.parametrize("damage", MANIFEST_DAMAGE)
    def test_finds_a_bad_manifest(
        self, invoke: Invoke, copied: Path, damage: Callable[[Path], None]
    ) -> None:
        damage(copied)
        result = invoke("verify", copied)
        assert result.exit_code == 1
        assert "FAIL  " in result.stdout
        printed = json.loads(invoke("verify", copied, "--json").stdout)
        assert [item["outcome"] for item in printed["outcomes"]] == ["failed"]
        assert printed["outcomes"][0].keys() == {"outcome", "subject", "problem", "remedy"}

    def test_one_damage_does_not_hide_the_rest(self, invoke: Invoke, copied: Path) -> None:
        truncate(copied)
        stray(copied)
        printed = json.loads(invoke("verify", copied, "--json").stdout)
        kinds = [item["outcome"] for item in printed["outcomes"]]
        assert kinds.count("failed") == 1
        assert kinds.count("unexpected") == 1
        assert kinds.count("passed") == len(open_artifacts(copied).manifest.binaries)


class TestDoctor:
    @pytest.fixture
    def report(self, cli: Cli, built: Path) -> dict[str, Any]:
        result = cli("doctor", built, "--json")
        assert (result.returncode, result.stderr) == (0, "")
        return json.loads(result.stdout)

    def test_json_schema(self, report: dict[str, Any], built: Path) -> None:
        assert report.keys() == {
            *("tool", "python", "platform", "compiler", "torch", "driver", "devices", "places"),
        }
        assert report["compiler"].keys() == {"packages", "problem"}
        assert report["compiler"]["packages"]["nvidia-cutlass-dsl"]
        assert report["driver"].keys() >= {"available", "reason", "version", "library"}
        (place,) = report["places"]
        assert place["path"] == str(built)
        assert (place["usable"], place["problem"]) == (True, None)
        assert place["archs"] == ["sm86", "sm90"]
        assert place["binaries"] == len(open_artifacts(built).manifest.binaries)
        assert len(place["choices"]) == len(report["devices"])

    def test_a_machine_without_a_driver(
        self, cli: Cli, report: dict[str, Any], built: Path
    ) -> None:
        if report["driver"]["available"]:
            pytest.skip("this machine has a driver")
        assert report["devices"] == []
        assert "libcuda.so.1" in report["driver"]["reason"]
        result = cli("doctor", built)
        assert result.returncode == 0
        assert "driver      none: " in result.stdout
        assert "binaries for sm86, sm90" in result.stdout

    def test_looks_where_the_loader_looks(self, invoke: Invoke, built: Path) -> None:
        def origins(**environ: Path) -> list[str]:
            printed = json.loads(invoke("doctor", "--json", **environ).stdout)
            return [place["origin"] for place in printed["places"]]

        assert origins() == ["the installed wheel", "the user cache"]
        assert origins(SONATA_AOT_DIR=built) == ["SONATA_AOT_DIR"]

    def test_nothing_where_nobody_put_anything_is_not_wrong(
        self, invoke: Invoke, built: Path, tmp_path: Path
    ) -> None:
        """A checkout has nothing in the place of a wheel's artifacts."""
        cache = tmp_path / "cache"
        nothing = invoke("doctor", SONATA_AOT_CACHE_DIR=cache)
        assert f"artifacts   none in the user cache ({cache}/artifacts)" in nothing.stdout
        assert nothing.stdout.endswith(
            "\n            build them with `sonata-aot build --arch ARCH`\n"
        )
        cache.mkdir(mode=0o700)
        shutil.copytree(built, cache / "artifacts")
        shown = invoke("doctor", SONATA_AOT_CACHE_DIR=cache)
        assert "artifacts   none in the installed wheel (" in shown.stdout
        assert f"artifacts   {cache}/artifacts (the user cache)\n" in shown.stdout
        assert "unusable" not in nothing.stdout + shown.stdout
        assert "build them" not in shown.stdout
        places = json.loads(invoke("doctor", "--json", SONATA_AOT_CACHE_DIR=cache).stdout)["places"]
        assert [(item["absent"], item["usable"]) for item in places] == [
            (True, False),
            (False, True),
        ]

    def test_nothing_where_something_was_named_is_wrong(
        self, invoke: Invoke, tmp_path: Path
    ) -> None:
        for named in (("doctor", tmp_path), ("doctor",)):
            text = invoke(*named, SONATA_AOT_DIR=tmp_path).stdout
            assert f"            unusable: no artifacts in {tmp_path}; build them" in text

    @pytest.mark.parametrize("damage", MANIFEST_DAMAGE)
    def test_reports_a_bad_directory_and_exits_0(
        self, invoke: Invoke, copied: Path, damage: Callable[[Path], None]
    ) -> None:
        damage(copied)
        result = invoke("doctor", copied, "--json")
        (place,) = json.loads(result.stdout)["places"]
        assert (result.exit_code, place["usable"], place["choices"]) == (0, False, [])
        assert str(copied) in place["problem"]

    def test_an_unknown_arch_is_a_usage_error(self, invoke: Invoke, built: Path) -> None:
        result = invoke("doctor", built, "--arch", "sm999")
        assert result.exit_code == 2
        assert "'sm999'" in result.stderr

    def test_a_broken_probe_is_a_finding(
        self, invoke: Invoke, built: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("sonata_aot.aot.doctor._PROBE", "sonata_aot.no_such_module")
        result = invoke("doctor", built, "--json")
        printed = json.loads(result.stdout)
        assert result.exit_code == 0
        assert not printed["driver"]["available"]
        assert "probe ended with status 1: " in printed["driver"]["reason"]
        assert "no_such_module" in printed["driver"]["reason"]

    @pytest.mark.parametrize("printed", ["nothing", "noise"])
    def test_a_probe_that_answers_nothing(
        self, invoke: Invoke, built: Path, monkeypatch: pytest.MonkeyPatch, printed: str
    ) -> None:
        module = {"nothing": "keyword", "noise": "this"}[printed]
        monkeypatch.setattr("sonata_aot.aot.doctor._PROBE", module)
        driver = json.loads(invoke("doctor", built, "--json").stdout)["driver"]
        assert not driver["available"]
        assert driver["reason"].startswith("the loader's probe failed: ")


class TestDoctorWithDevices:
    """What it says for devices that this machine does not have."""

    DEVICE = {"index": 0, "name": "Toy", "major": 8, "minor": 9, "multiprocessors": 1}  # noqa: RUF012

    @pytest.fixture(autouse=True)
    def device(self, monkeypatch: pytest.MonkeyPatch) -> None:
        driver = {"available": True, "reason": "", "version": 12090, "library": "libcuda.so.1"}
        server = {"torch": "2.9", "driver": driver, "devices": [self.DEVICE]}
        monkeypatch.setattr("sonata_aot.aot.doctor._probe", lambda: server)
        loaded = {"ms": 12.3, "problem": None}
        monkeypatch.setattr("sonata_aot.aot.doctor._time_load", lambda *given: loaded)

    def test_names_the_choice_and_why_not_the_others(self, invoke: Invoke, built: Path) -> None:
        printed = json.loads(invoke("doctor", built, "--json").stdout)
        (choice,) = printed["places"][0]["choices"]
        assert (choice["device"], choice["arch"], choice["form"]) == (0, "sm86", "cubin")
        assert [(item["arch"], item["form"]) for item in choice["rejected"]] == [("sm90", "cubin")]
        shown = invoke("doctor", built).stdout
        assert "driver      CUDA 12.9 (libcuda.so.1)" in shown
        assert "device 0    Toy, compute capability 8.9" in shown
        assert "device 0: sm86 cubin" in shown
        assert "not sm90 cubin: does not run on 8.9" in shown

    def test_nothing_that_runs(self, invoke: Invoke, built: Path) -> None:
        result = invoke("doctor", built, "--arch", "sm90", "--json")
        (choice,) = json.loads(result.stdout)["places"][0]["choices"]
        assert (result.exit_code, choice["arch"], choice["form"]) == (0, None, None)
        assert "sm90 cubin: does not run on 8.9" in choice["reason"]
        assert "sonata-aot build" in choice["reason"]
