"""`sonata-aot build` as a user types it: what it prints, where it writes, how it refuses."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from sonata_aot.artifacts import Manifest, open_artifacts
from sonata_aot.artifacts.verify import Passed, verify

if TYPE_CHECKING:
    from tests.aot.conftest import Cli, Invoke

COLUMNS = ["kernel", "variant", "arch", "registers", "spills", "shared", "bytes"]


@pytest.fixture(autouse=True)
def cached(warm_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing here is compiled: what is tested lies around the compiler."""
    monkeypatch.setenv("SONATA_AOT_CACHE_DIR", str(warm_cache))


def archs_of(directory: Path) -> list[str]:
    return sorted({binary.arch for binary in open_artifacts(directory).manifest.binaries})


def test_publishes_a_verified_set_and_shows_it(cli: Cli, tmp_path: Path) -> None:
    out = tmp_path / "out"
    result = cli("build", "--arch", "sm86", "--out", out)
    assert result.returncode == 0, result.stderr
    assert all(isinstance(outcome, Passed) for outcome in verify(out))
    binaries = open_artifacts(out).manifest.binaries
    lines = result.stdout.splitlines()
    assert lines[0].split() == COLUMNS
    assert [line.split() for line in lines[1 : 1 + len(binaries)]] == [
        [
            binary.kernel,
            # A kernel without choices has an empty cell.
            *binary.variant_name.split(),
            "sm86",
            str(binary.registers),
            str(binary.spills),
            str(binary.shared_bytes + binary.static_shared_bytes),
            str(binary.cubin.size + binary.ptx.size),
        ]
        for binary in binaries
    ]
    assert f"{len(binaries)} binaries: everything was cached" in result.stdout
    assert f"published in {out}" in result.stdout


def test_progress_goes_to_standard_error_alone(cli: Cli, tmp_path: Path) -> None:
    """What is cached in one line: a log of CI is to be read."""
    result = cli("build", "--arch", "sm86", "--out", tmp_path / "out")
    total = len(open_artifacts(tmp_path / "out").manifest.binaries)
    assert result.stderr == f"[{total}/{total}] {total} cached\n"
    assert not re.search(r"^\[\d+/\d+\]", result.stdout, re.M)


def test_a_second_run_changes_nothing_and_says_so(invoke: Invoke, tmp_path: Path) -> None:
    out = tmp_path / "out"
    invoke("build", "--arch", "sm86", "--out", out)
    before = {path: path.stat().st_mtime_ns for path in out.rglob("*")}
    result = invoke("build", "--arch", "sm86", "--out", out)
    assert "everything was cached" in result.stdout
    assert f"unchanged in {out}" in result.stdout
    assert {path: path.stat().st_mtime_ns for path in out.rglob("*")} == before


def test_json_holds_the_manifest_and_nothing_else_is_printed(cli: Cli, tmp_path: Path) -> None:
    out = tmp_path / "out"
    result = cli("build", "--arch", "sm86", "--out", out, "--json")
    assert (result.returncode, result.stderr) == (0, "")
    printed = json.loads(result.stdout)
    manifest = open_artifacts(out).manifest
    assert printed["directory"] == str(out)
    assert printed["compiled"] == []
    assert printed["cached"] == sorted(binary.key for binary in manifest.binaries)
    assert printed["written"] == 1 + 2 * len(manifest.binaries)
    assert printed["manifest"] == json.loads((out / "manifest.json").read_bytes())


@pytest.mark.parametrize("spelling", ["sm86", "sm_86", "8.6", "86", "SM86", " sm86 "])
def test_every_spelling_of_an_arch(invoke: Invoke, tmp_path: Path, spelling: str) -> None:
    result = invoke("build", "--arch", spelling, "--out", tmp_path / "out")
    assert result.exit_code == 0, result.stderr
    assert archs_of(tmp_path / "out") == ["sm86"]


@pytest.mark.parametrize(
    ("arguments", "variable", "expected"),
    [
        (["--arch", "sm90", "--arch", "8.6", "--arch", "sm_86"], "", ["sm86", "sm90"]),
        (["--arch", "sm86"], "9.0", ["sm86"]),
        (["--arch", "sm86"], "Hopper", ["sm86"]),
        ([], "8.6;9.0+PTX", ["sm86", "sm90"]),
        ([], "9.0 8.6", ["sm86", "sm90"]),
        ([], "8.6", ["sm86"]),
    ],
)
def test_which_archs_are_built(
    invoke: Invoke, tmp_path: Path, arguments: list[str], variable: str, expected: list[str]
) -> None:
    out = tmp_path / "out"
    result = invoke("build", *arguments, "--out", out, TORCH_CUDA_ARCH_LIST=variable)
    assert result.exit_code == 0, result.stderr
    assert archs_of(out) == expected
    assert list(open_artifacts(out).manifest.selection.archs) == expected


def test_the_directory_holds_only_the_last_selection(invoke: Invoke, tmp_path: Path) -> None:
    out = tmp_path / "out"
    invoke("build", "--arch", "sm86", "--arch", "sm90", "--out", out)
    invoke("build", "--arch", "sm90", "--out", out)
    assert archs_of(out) == ["sm90"]
    assert all(isinstance(outcome, Passed) for outcome in verify(out))


def test_what_a_smaller_selection_costs_is_said(invoke: Invoke, tmp_path: Path) -> None:
    out = tmp_path / "out"
    both = ("build", "--arch", "sm86", "--arch", "sm90", "--out", out)
    assert "removed" not in invoke(*both).stdout
    lost = [b.label for b in open_artifacts(out).manifest.binaries if b.arch == "sm86"]
    assert len(lost) >= 2
    only = ("build", "--arch", "sm90", "--out", out)
    (line,) = (x for x in invoke(*only).stdout.splitlines() if x.startswith("removed"))
    assert line.endswith(": " + ", ".join(sorted(lost)))
    assert "removed" not in invoke(*only).stdout
    assert json.loads(invoke(*both, "--json").stdout)["removed"] == []
    assert json.loads(invoke(*only, "--json").stdout)["removed"] == sorted(lost)


def test_one_kernel_by_name(invoke: Invoke, tmp_path: Path) -> None:
    out = tmp_path / "out"
    chosen = ["--kernel", "gemv", "--kernel", "gemv"]
    assert invoke("build", "--arch", "sm86", *chosen, "--out", out).exit_code == 0
    assert open_artifacts(out).manifest.selection.kernels == ("gemv",)


@pytest.mark.parametrize("name", ["with two spaces", "Größe-数据", "-dash", "quote'\"$x"])
def test_odd_directory_names(cli: Cli, tmp_path: Path, name: str) -> None:
    out = tmp_path / name / "deep er"
    result = cli("build", "--arch", "sm86", "--out", out, PYTHONUTF8="1")
    assert result.returncode == 0, result.stderr
    assert str(out) in result.stdout
    assert isinstance(open_artifacts(out).manifest, Manifest)


def test_the_directory_can_come_from_the_environment(invoke: Invoke, tmp_path: Path) -> None:
    chosen = tmp_path / "chosen"
    assert invoke("build", "--arch", "sm86", SONATA_AOT_DIR=chosen).exit_code == 0
    assert archs_of(chosen) == ["sm86"]
    named = tmp_path / "named"
    invoke("build", "--arch", "sm90", "--out", named, SONATA_AOT_DIR=chosen)
    assert (archs_of(chosen), archs_of(named)) == (["sm86"], ["sm90"])


def test_the_default_directory_is_in_the_cache(invoke: Invoke, own_cache: Path) -> None:
    assert invoke("build", "--arch", "sm86").exit_code == 0
    assert archs_of(own_cache / "artifacts") == ["sm86"]


@pytest.mark.parametrize(
    ("arguments", "environ", "named"),
    [
        (["--arch", "sm999"], {}, ["'sm999'", "sm86", "sm90a"]),
        (["--arch", "sm86", "--arch", ""], {}, ["''", "sm86"]),
        (["--arch", "75"], {}, ["'75'", "sm86"]),
        (["--arch", "native"], {}, ["'native'", "sm86"]),
        ([], {"TORCH_CUDA_ARCH_LIST": "8.6;Hopper"}, ["'Hopper'", "sm86"]),
        (["--arch", "sm86", "--kernel", "gem"], {}, ["'gem'", "gemv"]),
        ([], {}, ["--arch sm86"]),
        ([], {"TORCH_CUDA_ARCH_LIST": " ; "}, ["--arch sm86"]),
    ],
)
def test_a_usage_error_is_one_line_that_names_what_is_allowed(
    cli: Cli, tmp_path: Path, arguments: list[str], environ: dict[str, str], named: list[str]
) -> None:
    out = tmp_path / "out"
    result = cli("build", *arguments, "--out", out, **environ)
    assert (result.returncode, result.stdout) == (2, "")
    assert len(result.stderr.splitlines()) == 1
    assert result.stderr.startswith("sonata-aot: ")
    for text in named:
        assert text in result.stderr
    assert not out.exists()


@pytest.mark.parametrize("text", ["x", "0", "-3"])
def test_a_wrong_number_of_jobs_is_no_matter_of_what_is_cached(
    invoke: Invoke, tmp_path: Path, text: str
) -> None:
    chosen = ("build", "--arch=sm86", "--kernel=gemv_any", "--out", tmp_path / "out")
    result = invoke(*chosen, MAX_JOBS=text)
    assert (result.exit_code, result.stdout) == (1, "")
    assert f"MAX_JOBS='{text}'; set it to an integer of 1 or more" in result.stderr
    assert invoke(*chosen, "--jobs=1", MAX_JOBS=text).exit_code == 0


@pytest.mark.parametrize(
    "option",
    [
        *("--jobs=0", "--jobs=x", "--nonsense"),
        *("--timeout=0", "--timeout=86401", "--timeout=1.5", "--timeout=nan", "--timeout=inf"),
    ],
)
def test_a_malformed_option_exits_2(invoke: Invoke, option: str) -> None:
    result = invoke("build", "--arch", "sm86", option)
    assert result.exit_code == 2
    assert option.partition("=")[0] in result.stderr


@pytest.mark.parametrize("seconds", [1, 86400])
def test_the_least_and_the_longest_timeout(invoke: Invoke, tmp_path: Path, seconds: int) -> None:
    out = ("--out", tmp_path / "out")
    assert invoke("build", "--arch=sm86", f"--timeout={seconds}", *out).exit_code == 0


def test_out_that_is_or_passes_through_a_file(cli: Cli, tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("mine")
    for out in (file, file / "below"):
        result = cli("build", "--arch", "sm86", "--out", out)
        assert (result.returncode, result.stdout) == (1, "")
        assert len(result.stderr.splitlines()) == 1
        assert str(file) in result.stderr
        assert "not a directory" in result.stderr.lower()
        assert "--out" in result.stderr
    assert file.read_text() == "mine"


def test_out_that_everybody_may_write(invoke: Invoke, tmp_path: Path) -> None:
    out = tmp_path / "open"
    out.mkdir()
    out.chmod(0o777)
    result = invoke("build", "--arch", "sm86", "--out", out)
    assert result.exit_code == 1
    assert f"chmod o-w {out}" in result.stderr
    assert list(out.iterdir()) == []


def test_files_of_somebody_else_are_not_removed(invoke: Invoke, tmp_path: Path) -> None:
    # A bare git repository, for one, has an `objects` folder too.
    out = tmp_path / "repository.git"
    theirs = out / "objects" / "ab" / "cdef"
    theirs.parent.mkdir(parents=True)
    theirs.write_text("theirs")
    result = invoke("build", "--arch", "sm86", "--out", out)
    assert (result.exit_code, result.stdout) == (1, "")
    assert str(out) in result.stderr
    assert "'ab'" in result.stderr
    assert {path for path in out.rglob("*") if path.is_file()} == {theirs}
    assert theirs.read_text() == "theirs"


@pytest.mark.parametrize("kind", ["file", "folder", "file beside an empty folder"])
def test_a_manifest_of_somebody_else_is_kept(invoke: Invoke, tmp_path: Path, kind: str) -> None:
    # Browser extensions, web applications and packages have a `manifest.json`.
    out = tmp_path / "extension"
    theirs = out / "manifest.json" / "notes" if kind == "folder" else out / "manifest.json"
    theirs.parent.mkdir(parents=True)
    theirs.write_text('{"name": "theirs"}')
    if kind == "file beside an empty folder":
        (out / "objects").mkdir()
    result = invoke("build", "--arch", "sm86", "--out", out)
    assert theirs.read_text() == '{"name": "theirs"}'
    assert not list(out.rglob("*.cubin"))
    assert (result.exit_code, result.stdout) == (1, "")
    assert "'manifest.json', which is no artifact" in result.stderr


def test_an_empty_out_is_refused(
    invoke: Invoke, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # `--out "$UNSET"` must not publish into whatever the current directory is.
    monkeypatch.chdir(tmp_path)
    result = invoke("build", "--arch", "sm86", "--out", "")
    assert result.exit_code == 2
    assert "--out" in result.stderr
    assert list(tmp_path.iterdir()) == []


def test_a_reader_that_stops_early_sees_no_traceback(cli: Cli, tmp_path: Path) -> None:
    out = tmp_path / "out"
    cli("build", "--arch", "sm86", "--arch", "sm90", "--out", out)
    script = Path(sys.executable).with_name("sonata-aot")
    command = f"{shlex.quote(str(script))} list --json {shlex.quote(str(out))} | true"
    result = subprocess.run(["sh", "-c", command], capture_output=True, text=True, check=False)
    assert (result.returncode, result.stderr) == (0, "")
