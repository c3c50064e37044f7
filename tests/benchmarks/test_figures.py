"""The README's figures are those of the results files."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
BEGIN = "<!-- figures: begin (python -m benchmarks.figures) -->"
END = "<!-- figures: end -->"


@pytest.fixture
def figures(
    tmp_path: Path, clean_environ: Callable[..., dict[str, str]]
) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Runs benchmarks.figures over a copy of the README and the results, in `tmp_path`."""
    shutil.copy(ROOT / "README.md", tmp_path)
    shutil.copytree(ROOT / "benchmarks", tmp_path / "benchmarks")
    shutil.copytree(ROOT / "docs", tmp_path / "docs")

    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "benchmarks.figures", *arguments],
            cwd=tmp_path,
            env=clean_environ(),
            capture_output=True,
            text=True,
            check=False,
        )

    assert run().returncode == 0
    return run


def edit_text(root: Path) -> None:
    readme = root / "README.md"
    before, _, rest = readme.read_text().partition(BEGIN)
    table, _, after = rest.partition(END)
    assert " us |" in table
    faster = table.replace(" us |", "0 us |", 1)
    readme.write_text(f"{before}{BEGIN}{faster}{END}{after}")


def edit_result(root: Path) -> None:
    file = min((root / "benchmarks" / "results").glob("*/gemv.json"))
    content = json.loads(file.read_text())
    content["records"][0]["ours_us"] += 1
    file.write_text(json.dumps(content))


def remove_result(root: Path) -> None:
    min((root / "benchmarks" / "results").glob("*/gemv_chain.json")).unlink()


@pytest.mark.parametrize("edit", [edit_text, edit_result, remove_result])
def test_another_figure_in_the_readme_than_in_the_results_fails(
    figures: Callable[..., subprocess.CompletedProcess[str]],
    tmp_path: Path,
    edit: Callable[[Path], None],
) -> None:
    readme = tmp_path / "README.md"
    good = readme.read_text()
    assert figures("--check").returncode == 0
    edit(tmp_path)
    edited = readme.read_text()
    failed = figures("--check")
    assert failed.returncode == 1
    assert "run python -m benchmarks.figures" in failed.stderr
    assert "Traceback" not in failed.stderr
    assert readme.read_text() == edited  # checking changes nothing
    assert figures().returncode == 0
    assert figures("--check").returncode == 0
    again = readme.read_text()
    assert (again == good) == (edit is edit_text)
    assert again.partition(BEGIN)[0] == good.partition(BEGIN)[0]
    assert again.partition(END)[2] == good.partition(END)[2]
