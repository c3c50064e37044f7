"""Where the command's output goes: nowhere, a full disk, a terminal of some width."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from sonata_aot.artifacts.verify import Passed, verify

SCRIPT = Path(sys.executable).with_name("sonata-aot")
# Of all that is built, four: disassembling takes its time.
FEW = ("--kernel=gemv_any", "--variant=m=1,dtype=bf16")


@pytest.fixture(autouse=True)
def cached(warm_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SONATA_AOT_CACHE_DIR", str(warm_cache))


def in_a_shell(
    redirection: str, *arguments: str | Path, **environ: str
) -> subprocess.CompletedProcess[str]:
    command = " ".join(shlex.quote(str(part)) for part in (SCRIPT, *arguments))
    return subprocess.run(
        ["sh", "-c", f"{command} {redirection}"],
        env={**os.environ, **environ},
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )


@pytest.mark.parametrize(
    "arguments",
    [
        *(["list"], ["list", "--json"], ["verify"], ["verify", "--json"], ["doctor"]),
        *(["doctor", "--json"], ["--help"], ["build", "--help"], ["--version"]),
        *(["build", "--arch=sm86"], ["build", "--arch=sm86", "--json"]),
        *(["inspect", *FEW], ["inspect", "--check", *FEW]),
    ],
    ids=" ".join,
)
def test_output_that_cannot_be_written_is_an_error(
    built: Path, tmp_path: Path, arguments: list[str]
) -> None:
    directory = tmp_path / "out" if arguments[0] == "build" else built
    result = in_a_shell("> /dev/full", *arguments, SONATA_AOT_DIR=str(directory))
    assert result.returncode == 1
    *steps, line = result.stderr.splitlines()
    assert line == "sonata-aot: cannot write the output: No space left on device"
    assert all(step.startswith("[") for step in steps)


def test_standard_error_that_cannot_be_written_is_an_error(tmp_path: Path) -> None:
    result = in_a_shell("2> /dev/full", "build", "--arch=sm86", "--out", tmp_path / "out")
    assert result.returncode == 1


@pytest.mark.parametrize("closed", ["2>&-", ">&-", "<&-", "<&- >&- 2>&-"])
def test_a_build_with_a_closed_stream(tmp_path: Path, closed: str) -> None:
    out = tmp_path / "out"
    result = in_a_shell(closed, "build", "--arch=sm86", "--out", out)
    assert "Traceback" not in result.stdout + result.stderr
    assert result.returncode == 0, result.stderr
    assert all(isinstance(outcome, Passed) for outcome in verify(out))


def test_an_error_with_standard_error_closed(tmp_path: Path) -> None:
    result = in_a_shell("2>&-", "list", tmp_path / "nowhere")
    assert (result.returncode, result.stdout) == (1, "")
