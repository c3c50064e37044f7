"""A measured file becomes a results file: the launcher's digest is added, and nothing else."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def test_every_record_gets_the_launchers_digest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(ROOT)
    from benchmarks import results

    content = {"machine": {"gpu": "Paper 1"}, "records": [{"case": "a"}, {"case": "b"}]}
    measured, filed = tmp_path / "measured.json", tmp_path / "paper" / "gemv.json"
    measured.write_text(json.dumps(content))
    monkeypatch.setattr(sys, "argv", ["results", str(measured), str(filed)])
    results.main()
    digest = results.launcher_digest()
    assert json.loads(filed.read_text()) == {
        "machine": {"gpu": "Paper 1"},
        "records": [{"case": "a", "launcher": digest}, {"case": "b", "launcher": digest}],
    }
