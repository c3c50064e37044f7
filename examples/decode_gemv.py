"""The projections of a Zonos decode step: load, launch, check against float64, time beside cuBLAS.

    sonata-aot build --arch sm86 --arch sm90
    python -m examples.decode_gemv --json benchmarks/results/h200/gemv.json

Each shape runs from every architecture of the artifact directory that this GPU can run, older ones
through their PTX.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from benchmarks import results
from sonata_aot import loader
from sonata_aot.aot.measure import gpu, timing
from sonata_aot.artifacts import open_artifacts
from sonata_aot.artifacts.places import default_artifacts

# N x K of out_proj, in_proj and fc1.
SHAPES = ((2048, 4096), (8512, 2048), (16384, 2048))
# M: one sequence, and one with classifier-free guidance.
BATCHES = (1, 2)


def relative_error(y: torch.Tensor, reference: torch.Tensor) -> float:
    """||y - reference|| / ||reference|| in float64; NaN where something was not written."""
    return float((y.double() - reference).norm() / reference.norm())


def measure(kernels: loader.Kernels, m: int, n: int, k: int) -> dict[str, Any]:
    """Errors and times of one shape, ours and cuBLAS's."""
    copies = timing.copies(2 * n * k, timing.FULL.rotation)
    weights = [torch.randn(n, k, device="cuda", dtype=torch.bfloat16) for _ in range(copies)]
    x = torch.randn(m, k, device="cuda", dtype=torch.bfloat16)
    reference = x.double() @ weights[0].double().T

    def outputs() -> list[torch.Tensor]:
        return [x.new_full((m, n), float("nan")) for _ in range(copies)]

    ours, theirs = outputs(), outputs()

    def our_call(i: int) -> Callable[[], object]:
        return lambda: kernels.gemv(x, weights[i], out=ours[i])

    def their_call(i: int) -> Callable[[], object]:
        return lambda: torch.mm(x, weights[i].T, out=theirs[i])

    graphs = [
        timing.capture([our_call(i) for i in range(copies)]),
        timing.capture([their_call(i) for i in range(copies)]),
    ]
    # Only the replays count: what the warm-up wrote is poisoned again.
    for output in (*ours, *theirs):
        output.fill_(float("nan"))
    ours_us, theirs_us = timing.replay_us(graphs, copies)
    peak = gpu.machine().peak_gbps
    for us in (ours_us, theirs_us):
        timing.require_possible(2 * n * k, us, peak, f"M={m} N={n} K={k}")
    for weight, y in zip(weights, ours, strict=True):
        error = relative_error(y, x.double() @ weight.double().T)
        assert error < 2**-8, f"a replay left something wrong: error {error}"
    return {
        "ours_us": round(ours_us, 3),
        "opponent_us": round(theirs_us, 3),
        "error": relative_error(ours[0], reference),
        "opponent_error": relative_error(theirs[0], reference),
    }


def records(directory: Path) -> list[dict[str, Any]]:
    """One record for each architecture, shape and batch."""
    manifest = open_artifacts(directory).manifest
    found = []
    for arch in sorted({binary.arch for binary in manifest.binaries}):
        try:
            kernels = loader.load(directory, arch=arch, allow_ptx=True)
        except loader.SonataError as error:
            print(f"{arch}: {error}")
            continue
        device = kernels.info()["devices"][torch.cuda.current_device()]
        binaries = [binary for binary in device["binaries"] if binary["kernel"] == "gemv"]
        for n, k in SHAPES:
            for m in BATCHES:
                used = [b["sha256"] for b in binaries if f"m={m}," in b["variant"] + ","]
                record = {
                    "case": f"M={m} N={n} K={k} dtype=bf16",
                    "opponent": "cublas",
                    "via": f"{arch}-{device['form']}",
                    **measure(kernels, m, n, k),
                    "binaries": used,
                }
                found.append(record)
                print(row(record, n * k * 2), flush=True)
    return found


def row(record: dict[str, Any], weight_bytes: int) -> str:
    """A line of the printed table."""
    ours, theirs = record["ours_us"], record["opponent_us"]
    return (
        f"{record['case']:30}  {record['via']:11}  ours {ours:7.2f} us  cuBLAS {theirs:7.2f} us  "
        f"{theirs / ours:5.2f}x  {weight_bytes / ours / 1e3:5.0f} GB/s  "
        f"error {record['error']:.2e} / {record['opponent_error']:.2e}"
    )


def main() -> None:
    """Run every shape; exit 1 if an error is not that of bf16 rounding."""
    parser = argparse.ArgumentParser(description=__doc__, prog="python -m examples.decode_gemv")
    parser.add_argument("directory", type=Path, nargs="?", default=None, help="artifacts")
    parser.add_argument("--json", type=Path, help="write the results to this file")
    options = parser.parse_args()
    torch.seed()  # fresh data every run
    directory = options.directory or default_artifacts()
    found = records(directory)
    if options.json:
        results.write(options.json, found, directory)
    # Both round once to bf16, which is at most 2**-8 of each element; NaN is no good either.
    wrong = [
        record["case"]
        for record in found
        if not record["error"] <= min(2**-8, 1.05 * record["opponent_error"])
    ]
    if wrong or not found:
        raise SystemExit(f"wrong results: {wrong}" if found else "nothing here runs on this GPU")


if __name__ == "__main__":
    main()
