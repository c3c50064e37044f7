"""compute-sanitizer over every binary of the default set, recorded with the digests of what ran.

    python -m benchmarks.sanitizer artifacts --json benchmarks/results/h200/sanitizer.json

Runs `tests/gpu -k sanitizer`, which launches every variant and layout of the GEMV, of the scan and
of its stages with small ragged shapes, under memcheck and racecheck. `error` is the number of
errors that the tool reports. racecheck watches only our own kernels, and those in bf16: what they
do in shared memory, where sums are fp32, is the same for fp16. Of the scan it watches two tiles, as
it takes any reuse of a buffer behind `bar.arrive` for a race: docs/ssd.md.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

from sonata_aot.aot.measure import gpu
from sonata_aot.artifacts import open_artifacts
from sonata_aot.artifacts.places import default_artifacts
from sonata_aot.kernels import builtin

from . import results
from .options import exit_in_one_line

# What each tool is told, the tests that it runs, and more environment.
TOOLS: dict[str, tuple[list[str], str, dict[str, str]]] = {
    # Without torch's cache each tensor is an allocation of its own, whose end memcheck knows.
    "memcheck": ([], "sanitizer", {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}),
    # References and random numbers come of kernels without such parts in their names. Not all of
    # the scan's have a dtype.
    "racecheck": (
        ["--kernel-name", "kns=gemv", "--kernel-name", "kns=ssd_"],
        "sanitizer and bf16 and not reuse",
        {},
    ),
}
# What those tests launch: all that is built by default.
KERNELS = tuple(name for name, spec in builtin().items() if spec.default)
VIAS = (("sm86", "ptx"), ("sm90", "cubin"))
_SUMMARY = re.compile(r"(?:ERROR|RACECHECK) SUMMARY: (\d+) (?:errors?|hazards?)")
_PASSED = re.compile(r"^(\d+) passed", re.M)


def run(tool: str, artifacts: Path, limit: float | None) -> tuple[int, int]:
    """Errors that a tool found, and tests that ran under it.

    Raises:
        SystemExit: there is no such tool, a test failed, or the tool did not report, or not within
            `limit` seconds.
    """
    options, tests, more = TOOLS[tool]
    pytest = ["-m", "pytest", "-q", "-p", "no:cacheprovider", "-k", tests, "tests/gpu"]
    plugins = ["--noconftest", "-p", "tests.gpu.conftest"]
    if shutil.which("compute-sanitizer") is None:
        raise SystemExit("no compute-sanitizer on PATH: it comes with the CUDA toolkit")
    with subprocess.Popen(
        ["compute-sanitizer", "--tool", tool, *options, sys.executable, *pytest, *plugins],
        env={**os.environ, "SONATA_AOT_DIR": str(artifacts), **more},
        cwd=results.ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    ) as process:
        try:
            output, _ = process.communicate(timeout=limit)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)  # the tool and the tests under it
            output, _ = process.communicate()
            output += f"\nnot done after {limit:g} s"
    summary, passed = _SUMMARY.search(output), _PASSED.search(output)
    if process.returncode != 0 or summary is None or passed is None:
        raise SystemExit(f"{tool} failed:\n{output[-4000:]}")
    return int(summary[1]), int(passed[1])


def main() -> None:
    """Run the tools; exit 1 if one reports an error or does not end, the others are recorded."""
    parser = argparse.ArgumentParser(description=__doc__, prog="python -m benchmarks.sanitizer")
    parser.add_argument("artifacts", type=Path, nargs="?", default=default_artifacts())
    parser.add_argument("--json", type=Path)
    parser.add_argument("--limit", type=float, help="seconds that each tool may take")
    options = parser.parse_args()
    with exit_in_one_line("sanitizer"):
        gpu.machine()
        manifest = open_artifacts(options.artifacts).manifest
    records: list[dict[str, Any]] = []
    failures: list[str] = []
    for tool in TOOLS:
        try:
            errors, tests = run(tool, options.artifacts, options.limit)
        except SystemExit as failure:
            failures.append(str(failure))
            continue
        print(f"{tool}: {errors} errors in {tests} tests")
        for arch, form in VIAS:
            digests = {
                binary.payload("cubin" if form == "cubin" else "ptx").sha256
                for binary in manifest.binaries
                if binary.kernel in KERNELS
                and binary.arch == arch
                and (tool == "memcheck" or binary.variant.get("dtype", "bf16") == "bf16")
            }
            record: dict[str, Any] = {"case": f"tool={tool}", "opponent": None}
            record |= {"via": f"{arch}-{form}", "ours_us": None, "opponent_us": None}
            record |= {"error": errors, "opponent_error": None, "tests": tests}
            records.append({**record, "binaries": sorted(digests)})
    if options.json and records:
        results.write(options.json, records, options.artifacts)
    if any(record["error"] for record in records):
        failures.append("a tool reported errors")
    if failures:
        raise SystemExit("\n".join(failures))


if __name__ == "__main__":
    main()
