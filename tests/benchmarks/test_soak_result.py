"""The record of the slow runs: what makes it stale, and what it must have done."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
REPORT = """<?xml version="1.0"?><testsuites><testsuite>
<testcase name="a" time="1.6"><properties><property name="kills" value="150"/></properties>
</testcase>
<testcase name="b" time="2.0"><properties><property name="kills" value="50"/>
<property name="mutants" value="20000"/></properties></testcase>{more}
</testsuite></testsuites>"""


@pytest.fixture
def soak(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(ROOT)
    from benchmarks import soak

    return soak


@pytest.fixture
def result(soak: ModuleType) -> dict[str, Any]:
    done = {"builders": 40, "kills": 200, "mutants": 20000}
    return {"sources": soak.sources_digest(), "tests": {"passed": 3}, "done": done}


def test_a_report_is_summed_up(soak: ModuleType, tmp_path: Path) -> None:
    report = tmp_path / "report.xml"
    report.write_text(REPORT.format(more=""))
    assert soak.read_report(report) == {
        "tests": {"passed": 2},
        "seconds": 4,
        "done": {"kills": 200, "mutants": 20000},
    }


@pytest.mark.parametrize("tag", ["failure", "error", "skipped"])
def test_what_did_not_pass_is_seen(
    soak: ModuleType, tmp_path: Path, result: dict[str, Any], tag: str
) -> None:
    report = tmp_path / "report.xml"
    report.write_text(REPORT.format(more=f'<testcase name="c" time="0"><{tag}/></testcase>'))
    (problem,) = soak.problems({**result, "tests": soak.read_report(report)["tests"]})
    assert "not all tests passed" in problem


def test_a_full_run_of_these_sources_counts(soak: ModuleType, result: dict[str, Any]) -> None:
    assert list(soak.problems(result)) == []


@pytest.mark.parametrize("name", ["builders", "kills", "mutants"])
def test_too_small_a_run_does_not(soak: ModuleType, result: dict[str, Any], name: str) -> None:
    for done in (result["done"] | {name: soak.BARS[name] - 1}, {}):
        assert any(name in problem for problem in soak.problems({**result, "done": done}))


# What the command line imports to have its commands and options, or for a plan of another kind.
NOT_EXERCISED = {
    *("cli", "completion_cli", "diff_cli", "measure_cli", "merge_cli", "new_cli", "options"),
    *("plan_cli", "shapes_cli", "report", "result_files", "needed", "shapes", "wheel_cli"),
    *("inspect", "instructions", "machine", "sass", "tiles"),  # floors of a budget, for `inspect`
}


def test_the_sources_are_those_that_a_build_and_a_prune_run_through(
    soak: ModuleType, warm_cache: Path, tmp_path: Path
) -> None:
    """So that a change of another command leaves the result fresh, and none of these does."""
    script = """
import sys
from sonata_aot.aot.cli import main

main(sys.argv[1:], standalone_mode=False)
print("modules", *sys.modules)
"""
    found: set[str] = set()
    for command in (("build", "--arch=sm86", "--out", str(tmp_path / "out")), ("cache", "prune")):
        done = subprocess.run(
            [sys.executable, "-c", script, *command],
            env={**os.environ, "SONATA_AOT_CACHE_DIR": str(warm_cache)},
            capture_output=True,
            text=True,
            check=True,
        )
        found.update(done.stdout.rpartition("modules ")[2].split())
    names = {path.relative_to(soak.ROOT).as_posix() for path in soak.sources()}
    run = {name.removeprefix("sonata_aot.") for name in found if name.count(".") > 1}
    room = {name.removeprefix("aot.") for name in run if name.startswith("aot.")}
    assert room - NOT_EXERCISED == set(soak.BUILD)
    for name in run:
        if name.startswith("artifacts.") and name.partition(".")[2] not in soak.NOT_FORMAT:
            assert f"{name.replace('.', '/')}.py" in names
    assert not names & {"aot/shapes.py", "aot/doctor.py", "aot/cli.py", "artifacts/choose.py"}


def test_other_sources_do_not(
    soak: ModuleType, result: dict[str, Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    names = {str(path.relative_to(soak.ROOT)) for path in soak.sources()}
    assert {"aot/pool.py", "artifacts/store.py", "tests/aot/test_soak.py"} <= names
    changed = tmp_path / "more.py"
    changed.write_text("")
    monkeypatch.setattr(soak, "ROOT", tmp_path)
    monkeypatch.setattr(soak, "sources", lambda: [changed])
    assert "the sources have changed" in list(soak.problems(result))


def test_the_command_judges(
    soak: ModuleType, result: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "soak.json"

    def status(*arguments: str) -> object:
        monkeypatch.setattr("sys.argv", ["soak", *arguments, "--result", str(path)])
        with pytest.raises(SystemExit) as exited:
            soak.main()
        return exited.value.code

    assert (status("--check"), status("--report")) == (1, 0)
    path.write_text(json.dumps(result))
    assert (status("--check"), status("--report")) == (0, 0)
    path.write_text(json.dumps(result | {"sources": "0" * 64}))
    assert (status("--check"), status("--report")) == (1, 0)
