"""`sonata-aot bench ssd --first-call`: from nothing loaded to the first scan, in fresh processes.

A process has torch imported, its CUDA context up and the inputs ready before the clock starts.
Ours is `load()` and one call, synchronised; PTX is measured with an empty driver cache, and again
in the next process, which finds it filled. The opponent's is its import and one call, in which
Triton compiles and tunes, with an empty cache of its own, once.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from ...artifacts import __version__, open_artifacts
from ...artifacts.errors import SonataError
from . import gpu, mamba_opponent
from .gemv import Progress
from .gpu import Machine
from .ssd_shapes import Shape

SHAPE = Shape(2, 256)
REPEATS = 5
_LIMIT_S = 600
# Modules that would mean a compiler in the process.
_COMPILERS = ("cutlass", "triton", "tvm_ffi", "torch._dynamo")

_READY = """
import json, sys, time
import torch
from sonata_aot.aot.measure import mamba_opponent, ssd_operands
from sonata_aot.aot.measure.ssd_shapes import Shape
arguments = ssd_operands.make(Shape.parse(sys.argv[1]), "cuda")
torch.cuda.synchronize()
torch.set_grad_enabled(False)
before = set(sys.modules)
"""
_OURS = f"""{_READY}
began = time.perf_counter()
from sonata_aot import loader
imported = time.perf_counter()
kernels = loader.load(sys.argv[2], arch=sys.argv[3], allow_ptx=True)
loaded = time.perf_counter()
out, states = kernels.mamba_chunk_scan_combined(**arguments)
torch.cuda.synchronize()
done = time.perf_counter()
new = set(sys.modules) - before
form = kernels.info()["devices"][torch.cuda.current_device()]["form"]
errors = map(ssd_operands.relative, (out, states), ssd_operands.wanted(arguments))
binaries = kernels.mamba_chunk_scan_combined.binaries(**arguments)
print(json.dumps({{
    "import_ms": 1e3 * (imported - began),
    "load_ms": 1e3 * (loaded - imported),
    "first_scan_ms": 1e3 * (done - loaded),
    "errors": list(errors),
    "form": form,
    "binaries": sorted({{binary.payload(form).sha256 for binary in binaries}}),
    "compilers": [n for n in new if any((n + ".").startswith(c + ".") for c in {_COMPILERS!r})],
}}))
"""
_THEIRS = f"""{_READY}
began = time.perf_counter()
opponent = mamba_opponent.load()
imported = time.perf_counter()
out, states = opponent.scan(**arguments)
torch.cuda.synchronize()
done = time.perf_counter()
errors = map(ssd_operands.relative, (out, states), ssd_operands.wanted(arguments))
print(json.dumps({{
    "import_ms": 1e3 * (imported - began),
    "first_scan_ms": 1e3 * (done - imported),
    "errors": list(errors),
}}))
"""

# Runs a script with arguments and more environment, and gives what it printed.
Child = Callable[[str, Sequence[str], dict[str, str]], dict[str, Any]]


def child(script: str, arguments: Sequence[str], environment: dict[str, str]) -> dict[str, Any]:
    """The `Child` that is a fresh process.

    Raises:
        SonataError: it failed.
    """
    try:
        done = subprocess.run(
            [sys.executable, "-c", script, *arguments],
            env={**os.environ, **environment},
            capture_output=True,
            text=True,
            check=False,
            timeout=_LIMIT_S,
        )
    except subprocess.TimeoutExpired:
        raise SonataError(
            f"a first call took more than {_LIMIT_S} s", remedy="run it again on an idle machine"
        ) from None
    if done.returncode != 0:
        last = done.stderr.strip().rpartition("\n")[2]
        raise SonataError(
            f"the measured process failed: {last}", remedy="make a plain call work first"
        )
    return json.loads(done.stdout.strip().rpartition("\n")[2])


def measure(
    directory: Path, arch: str, child: Child = child, shape: Shape = SHAPE
) -> list[dict[str, Any]]:
    """Records of one architecture: `cache=cold` and `cache=warm` for PTX, one for machine code.

    Raises:
        SonataError: a process failed, or a compiler was imported.
    """
    runs: dict[str, list[dict[str, Any]]] = {"cold": [], "warm": []}
    for _ in range(REPEATS):
        with tempfile.TemporaryDirectory() as cache:
            for group in runs.values():
                arguments = (_text(shape), str(directory), arch)
                group.append(child(_OURS, arguments, {"CUDA_CACHE_PATH": cache}))
    form = runs["cold"][0]["form"]
    # Machine code needs no cache: both kinds of run are the same measurement.
    groups = {"": runs["cold"] + runs["warm"]} if form == "cubin" else runs
    return [_record(arch, form, state, group, shape) for state, group in groups.items()]


def _record(
    arch: str, form: str, state: str, group: Sequence[dict[str, Any]], shape: Shape
) -> dict[str, Any]:
    compilers = sorted({name for run in group for name in run["compilers"]})
    if compilers:
        raise SonataError(
            f"{arch}-{form}: a first call imported {', '.join(compilers)}",
            remedy="the loader must not need a compiler: please report it with this message",
        )
    total = statistics.median(run["load_ms"] + run["first_scan_ms"] for run in group)
    return {
        "case": " ".join(["op=load+scan", *([f"cache={state}"] if state else []), shape.case]),
        "opponent": None,
        "via": f"{arch}-{form}",
        "ours_us": round(1e3 * total, 1),
        "opponent_us": None,
        **{
            name: round(statistics.median(run[name] for run in group), 2)
            for name in ("import_ms", "load_ms", "first_scan_ms")
        },
        "error": max(run["errors"][0] for run in group),
        "states_error": max(run["errors"][1] for run in group),
        "opponent_error": None,
        "opponent_states_error": None,
        "binaries": group[0]["binaries"],
    }


def against(records: list[dict[str, Any]], child: Child = child, shape: Shape = SHAPE) -> None:
    """Add the opponent's first call, with nothing cached, to each record.

    Raises:
        SonataError: the process failed.
    """
    with tempfile.TemporaryDirectory() as cache:
        environment = {"TRITON_CACHE_DIR": cache, "CUDA_CACHE_PATH": cache}
        found = child(_THEIRS, (_text(shape),), environment)
    for record in records:
        record["opponent"] = "triton"
        record["opponent_us"] = round(1e3 * found["first_scan_ms"], 1)
        record["opponent_import_ms"] = round(found["import_ms"], 2)
        record["opponent_error"], record["opponent_states_error"] = found["errors"]


def _text(shape: Shape) -> str:
    return str(shape).replace(" ", ",")


def run(
    directory: Path, archs: Sequence[str], progress: Progress, *, alone: bool = False
) -> list[dict[str, Any]]:
    """Measure architectures, and the opponent if it is there and not `alone`.

    Raises:
        SonataError: no torch, no GPU, no kernel, or a process failed.
    """
    gpu.machine()
    vias = [each.arch for each in gpu.load(directory, archs, ("ssd_prepare", "ssd_scan"))]
    records = []
    for arch in vias:
        records += measure(directory, arch)
        progress(f"measured the first call of {arch}")
    if not alone:
        try:
            mamba_opponent.load()
        except SonataError as missing:
            progress(f"without an opponent: {missing}")
        else:
            against(records)
            progress("measured the first call of mamba_ssm")
    return records


def data(records: list[dict[str, Any]], machine: Machine, directory: Path) -> dict[str, Any]:
    """As JSON data."""
    source = open_artifacts(directory).manifest.source
    return {
        "machine": machine.data(),
        "date": datetime.now(UTC).date().isoformat(),
        "tool": __version__,
        "commit": source.commit,
        "dirty": source.dirty,
        "records": records,
    }
