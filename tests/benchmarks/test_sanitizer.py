"""What is recorded of the tools, and that one which does not end keeps nobody waiting."""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from sonata_aot.artifacts import open_artifacts

ROOT = Path(__file__).resolve().parents[2]
# Stands for compute-sanitizer.
TOOL = """#!/bin/sh
case "$*" in
*memcheck*) echo "26 passed in 1.0s"; echo "========= ERROR SUMMARY: 0 errors" ;;
*racecheck*) {racecheck} ;;
esac
"""


def run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, built: Path, racecheck: str) -> Any:
    monkeypatch.syspath_prepend(ROOT)
    from benchmarks import results, sanitizer

    tool = tmp_path / "compute-sanitizer"
    tool.write_text(TOOL.format(racecheck=racecheck))
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setattr(sanitizer.gpu, "machine", lambda: None)
    found: list[Any] = []
    monkeypatch.setattr(results, "write", lambda path, records, artifacts: found.extend(records))
    arguments = ["sanitizer", str(built), "--json", str(tmp_path / "out.json"), "--limit", "2"]
    monkeypatch.setattr(sys, "argv", arguments)
    status: object = None
    try:
        sanitizer.main()
    except SystemExit as stopped:
        status = stopped.code
    return json.loads(json.dumps(found)), status


def test_each_tool_is_recorded_with_the_binaries_that_ran(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, built: Path
) -> None:
    said = 'echo "13 passed in 1s"; echo "========= RACECHECK SUMMARY: 0 hazards displayed"'
    records, status = run(monkeypatch, tmp_path, built, said)
    assert status is None
    assert [(r["case"], r["via"], r["error"], r["tests"]) for r in records] == [
        *(("tool=memcheck", via, 0, 26) for via in ("sm86-ptx", "sm90-cubin")),
        *(("tool=racecheck", via, 0, 13) for via in ("sm86-ptx", "sm90-cubin")),
    ]
    binaries = [b for b in open_artifacts(built).manifest.binaries if b.arch == "sm90"]
    assert {"gemv", "ssd_scan", "ssd_chunk_cumsum"} <= {binary.kernel for binary in binaries}
    of_bf16 = {b.cubin.sha256 for b in binaries if b.variant.get("dtype") != "f16"}
    assert set(records[1]["binaries"]) == {b.cubin.sha256 for b in binaries} > of_bf16
    assert set(records[3]["binaries"]) == of_bf16


@pytest.mark.parametrize(
    ("racecheck", "problem"),
    [("sleep 60 | cat", "not done after 2 s"), ("echo 1 passed; exit 3", "racecheck failed")],
)
def test_what_one_tool_found_counts_though_the_other_fails(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, built: Path, racecheck: str, problem: str
) -> None:
    began = time.monotonic()
    records, status = run(monkeypatch, tmp_path, built, racecheck)
    assert time.monotonic() - began < 30
    assert [record["case"] for record in records] == ["tool=memcheck"] * 2
    assert problem in str(status)
