"""compute-sanitizer over every binary of the default set, recorded with the digests of what ran.

    python -m benchmarks.sanitizer artifacts --json benchmarks/results/h200/sanitizer.json

Runs `tests/gpu -k sanitizer`, which launches every variant and layout once with small ragged
shapes, under memcheck and racecheck. `error` is the number of errors that the tool reports.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

from sonata_aot.artifacts import open_artifacts
from sonata_aot.artifacts.places import default_artifacts

from . import results

TOOLS = ("memcheck", "racecheck")
VIAS = (("sm86", "ptx"), ("sm90", "cubin"))
_SUMMARY = re.compile(r"(?:ERROR|RACECHECK) SUMMARY: (\d+) (?:errors?|hazards?)")
_PASSED = re.compile(r"^(\d+) passed", re.M)


def run(tool: str, artifacts: Path) -> tuple[int, int]:
    """Errors that a tool found, and tests that ran under it.

    Raises:
        SystemExit: a test failed, or the tool did not report.
    """
    pytest = ["-m", "pytest", "-q", "-p", "no:cacheprovider", "-k", "sanitizer", "tests/gpu"]
    plugins = ["--noconftest", "-p", "tests.gpu.conftest"]
    done = subprocess.run(
        ["compute-sanitizer", "--tool", tool, sys.executable, *pytest, *plugins],
        # Without torch's cache each tensor is an allocation of its own, whose end memcheck knows.
        env={
            **os.environ,
            "SONATA_AOT_DIR": str(artifacts),
            "PYTORCH_NO_CUDA_MEMORY_CACHING": "1",
        },
        cwd=results.ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    summary, passed = _SUMMARY.search(done.stdout), _PASSED.search(done.stdout)
    if done.returncode != 0 or summary is None or passed is None:
        raise SystemExit(f"{tool} failed:\n{done.stdout[-4000:]}{done.stderr[-2000:]}")
    return int(summary[1]), int(passed[1])


def main() -> None:
    """Run both tools; exit 1 if one reports an error."""
    parser = argparse.ArgumentParser(description=__doc__, prog="python -m benchmarks.sanitizer")
    parser.add_argument("artifacts", type=Path, nargs="?", default=default_artifacts())
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    manifest = open_artifacts(options.artifacts).manifest
    records: list[dict[str, Any]] = []
    for tool in TOOLS:
        errors, tests = run(tool, options.artifacts)
        print(f"{tool}: {errors} errors in {tests} tests")
        for arch, form in VIAS:
            digests = {
                binary.payload("cubin" if form == "cubin" else "ptx").sha256
                for binary in manifest.binaries
                if binary.arch == arch
            }
            record: dict[str, Any] = {"case": f"tool={tool}", "opponent": None}
            record |= {"via": f"{arch}-{form}", "ours_us": None, "opponent_us": None}
            record |= {"error": errors, "opponent_error": None, "tests": tests}
            records.append({**record, "binaries": sorted(digests)})
    if options.json:
        results.write(options.json, records, options.artifacts)
    if any(record["error"] for record in records):
        raise SystemExit("a tool reported errors")


if __name__ == "__main__":
    main()
