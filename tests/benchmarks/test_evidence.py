"""The tie between GPU results and sources: it must hold for fresh results and break for stale."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]

# Runs the check with the GEMV's device code taken from another module.
CHANGED = """
import dataclasses, sys
from sonata_aot.aot import plan
from benchmarks import evidence
spec = plan.builtin()["gemv"]
plan.builtin = lambda: {"gemv": dataclasses.replace(spec, device="other_gemv:gemv")}
sys.argv = ["evidence", "--results", sys.argv[1]]
evidence.main()
"""


@pytest.fixture(scope="module")
def environment(
    tmp_path_factory: pytest.TempPathFactory, clean_environ: Callable[..., dict[str, str]]
) -> dict[str, str]:
    folder = str(tmp_path_factory.mktemp("evidence"))
    return clean_environ(SONATA_AOT_CACHE_DIR=folder, PYTHONPATH=folder)


def run(*arguments: str | Path, environment: dict[str, str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *arguments], cwd=ROOT, env=environment, capture_output=True, text=True
    )


def check(results: Path, environment: dict[str, str], *more: str):
    return run(
        "-m", "benchmarks.evidence", "--results", results, *more, environment=environment
    )  # fmt: skip


@pytest.fixture
def results(environment: dict[str, str], tmp_path: Path) -> Path:
    """A results file as a GPU run of today's sources would leave it."""
    built = run(
        "-m", "sonata_aot.aot", "build", "--arch", "sm86", "--arch", "sm90", "--json",
        "--out", tmp_path / "set", environment=environment,
    )  # fmt: skip
    launcher = run(
        "-c", "from benchmarks.results import launcher_digest as d; print(d())",
        environment=environment,
    )  # fmt: skip
    manifest = json.loads(built.stdout)["manifest"]
    records = [
        {
            "case": f"variant={index}",
            "via": f"{binary['arch']}-{form}",
            "binaries": [binary[form]["sha256"]],
            "launcher": launcher.stdout.strip(),
        }
        for index, binary in enumerate(manifest["binaries"])
        for form in ("cubin", "ptx")
    ]
    folder = tmp_path / "results" / "some-gpu"
    folder.mkdir(parents=True)
    (folder / "gemv.json").write_text(json.dumps({"records": records}))
    return folder.parent


def edit(results: Path, **changes: Any) -> None:
    file = results / "some-gpu" / "gemv.json"
    content = json.loads(file.read_text())
    content["records"][0] |= changes
    file.write_text(json.dumps(content))


def test_results_of_todays_sources_are_fresh(results: Path, environment: dict[str, str]):
    done = check(results, environment)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "8 of 8 records are fresh" in done.stdout


def test_a_changed_kernel_makes_every_result_stale(results: Path, environment: dict[str, str]):
    source = (ROOT / "kernels" / "gemv" / "device.py").read_text()
    other = Path(environment["PYTHONPATH"]) / "other_gemv.py"

    other.write_text(source)
    same = run("-c", CHANGED, results, environment=environment)
    assert same.returncode == 0, same.stdout + same.stderr  # moved, but the same machine code

    assert source.count("sums.fill(0.0)") == 1
    other.write_text(source.replace("sums.fill(0.0)", "sums.fill(1.0)"))
    changed = run("-c", CHANGED, results, environment=environment)
    assert changed.returncode == 1, changed.stdout + changed.stderr
    assert changed.stdout.count("stale: ") == 8
    assert "0 of 8 records are fresh" in changed.stdout


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"binaries": ["0" * 64]}, "other bytes"),
        ({"binaries": []}, "names no binary"),
        ({"launcher": "0" * 64}, "launcher's sources"),
        ({"via": "sm86-cubin", "binaries": ["f" * 64]}, "other bytes"),
    ],
)
def test_one_stale_record_fails_and_is_named(
    results: Path, environment: dict[str, str], changes: dict[str, Any], reason: str
):
    edit(results, case="M=9", **changes)
    done = check(results, environment)
    assert done.returncode == 1
    assert "stale: some-gpu/gemv.json M=9" in done.stdout
    assert reason in done.stdout
    assert "7 of 8" in done.stdout
    assert check(results, environment, "--report").returncode == 0


def test_no_results_at_all_are_no_evidence(environment: dict[str, str], tmp_path: Path):
    assert check(tmp_path, environment).returncode == 1
    assert check(tmp_path, environment, "--report").returncode == 0
