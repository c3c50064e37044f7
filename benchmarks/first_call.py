"""Time from nothing loaded to the first result, each case in a fresh process.

    python -m benchmarks.first_call --json benchmarks/results/h200/first_call.json

The process has torch imported and its CUDA context up; timed are `load()`, the first
`kernels.gemv` and the first scan, each synchronised. PTX is measured twice: with an empty driver
cache, and in the next process, which finds it filled. Afterwards no compiler may have been
imported. Beside machine code stands what the driver takes for it alone (`bare_driver`).
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from sonata_aot.aot.measure import gpu

from . import results
from .options import exit_in_one_line, parse

# Modules that would mean a compiler in the process.
FORBIDDEN = ("cutlass", "triton", "tvm_ffi", "torch._dynamo")
REPEATS = 5
# What makes up the time to be ready.
_TIMES = ("load_ms", "first_gemv_ms", "first_scan_ms")

_CHILD = """
import json, sys, time
import torch
x = torch.randn(2, 2048, device="cuda", dtype=torch.bfloat16)
w = torch.randn(2048, 2048, device="cuda", dtype=torch.bfloat16)
def random(*shape, dtype=torch.bfloat16):
    return torch.randn(shape, device="cuda").to(dtype)
scanned = random(2, 64, 64, 64), random(2, 64, 64), -torch.rand(64, device="cuda"), *(
    random(2, 64, 1, 128) for _ in "BC"
)
reference = x.cpu().double() @ w.cpu().double().T
torch.cuda.synchronize()
before = set(sys.modules)
began = time.perf_counter()
from sonata_aot import loader
imported = time.perf_counter()
kernels = loader.load(sys.argv[1], arch=sys.argv[2], allow_ptx=True)
loaded = time.perf_counter()
y = kernels.gemv(x, w)
torch.cuda.synchronize()
done = time.perf_counter()
kernels.mamba_chunk_scan_combined(*scanned, 256)
torch.cuda.synchronize()
ready = time.perf_counter()
new = set(sys.modules) - before
error = float((y.cpu().double() - reference).norm() / reference.norm())
device = kernels.info()["devices"][0]
print(json.dumps({
    "import_ms": 1e3 * (imported - began),
    "load_ms": 1e3 * (loaded - imported),
    "first_gemv_ms": 1e3 * (done - loaded),
    "first_scan_ms": 1e3 * (ready - done),
    "error": error,
    "form": device["form"],
    "binaries": [b["sha256"] for b in device["binaries"]],
    "compilers": [name for name in new if any((name + ".").startswith(f + ".") for f in FORBIDDEN)],
}))
"""


def run_child(artifacts: Path, arch: str, cache: str) -> dict[str, Any]:
    """One fresh process; `cache` is the driver's compilation cache."""
    script = f"FORBIDDEN = {FORBIDDEN!r}\n{_CHILD}"
    return _answer("-c", script, artifacts, arch, env={**os.environ, "CUDA_CACHE_PATH": cache})


def run_bare(artifacts: Path, arch: str) -> float:
    """Milliseconds of the driver's calls alone, in a fresh process."""
    return _answer("-m", "benchmarks.bare_driver", artifacts, arch, cwd=results.ROOT)["driver_ms"]


def _answer(*command: str | Path, **options: Any) -> dict[str, Any]:
    """What a Python process prints, as JSON."""
    done = subprocess.run(
        [sys.executable, *map(str, command)],
        capture_output=True,
        text=True,
        check=False,
        **options,
    )
    if done.returncode != 0:
        raise SystemExit(f"the measured process failed:\n{done.stderr}")
    return json.loads(done.stdout)


def measure(artifacts: Path, arch: str) -> list[dict[str, Any]]:
    """Records of one architecture: `cache=cold` and `cache=warm` for PTX, one for cubins."""
    runs: dict[str, list[dict[str, Any]]] = {"cold": [], "warm": []}
    bare: list[float] = []
    for _ in range(REPEATS):
        with tempfile.TemporaryDirectory() as cache:
            runs["cold"].append(run_child(artifacts, arch, cache))
            # Machine code needs no cache: the second run would be the same measurement.
            if runs["cold"][0]["form"] == "ptx":
                runs["warm"].append(run_child(artifacts, arch, cache))
            else:
                bare.append(run_bare(artifacts, arch))
    form = runs["cold"][0]["form"]
    groups = {"": runs["cold"]} if form == "cubin" else runs
    found = []
    for state, group in groups.items():
        record: dict[str, Any] = {
            "case": "op=load+gemv+ssd" + (f" cache={state}" if state else ""),
            "opponent": None,
            "via": f"{arch}-{form}",
        }
        for name in ("import_ms", *_TIMES):
            record[name] = round(statistics.median(run[name] for run in group), 2)
        total = statistics.median(sum(run[name] for name in _TIMES) for run in group)
        record |= {"ours_us": round(1e3 * total, 1), "opponent_us": None}
        record["driver_ms"] = round(statistics.median(bare), 2) if bare else None
        record |= {"error": max(run["error"] for run in group), "opponent_error": None}
        record["compilers"] = sorted({name for run in group for name in run["compilers"]})
        record["binaries"] = group[0]["binaries"]
        found.append(record)
    return found


def main() -> None:
    """Measure each architecture named; exit 1 if a compiler was imported."""
    options = parse("first_call", __doc__, ("sm90", "sm86"))
    with exit_in_one_line("first_call"):
        gpu.machine()
    found = [record for arch in options.archs for record in measure(options.artifacts, arch)]
    for record in found:
        print(
            f"{record['via']:11} {record['case']:24} import {record['import_ms']:7.2f} ms  load "
            f"{record['load_ms']:7.2f} ms  first gemv {record['first_gemv_ms']:7.2f} ms  "
            f"first scan {record['first_scan_ms']:7.2f} ms  "
            f"total {record['ours_us'] / 1e3:7.2f} ms  the driver alone {record['driver_ms']} ms  "
            f"compilers {record['compilers']}"
        )
    if options.json:
        results.write(options.json, found, options.artifacts)
    if any(record["compilers"] for record in found):
        raise SystemExit("a compiler was imported")


if __name__ == "__main__":
    main()
