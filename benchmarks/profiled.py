r"""A few launches of one kernel, for a profiler to look at.

    ncu --clock-control none --section SpeedOfLight --section WarpStateStats \
        --section ComputeWorkloadAnalysis --kernel-name regex:gemv --launch-skip 2 \
        python -m benchmarks.profiled --artifacts DIR --arch sm86 gemv --m 4 --n 14336 --k 4096

`scan` takes `--shape`, as `sonata-aot bench ssd` does. Launches come one after the other, each on
operands of its own, so that nothing is left of them in the L2.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch

from sonata_aot import loader
from sonata_aot.aot.measure import ssd_operands
from sonata_aot.aot.measure.ssd_shapes import Shape
from sonata_aot.artifacts.places import default_artifacts

from .options import exit_in_one_line

LAUNCHES = 4


def gemv(kernels: loader.Kernels, m: int, n: int, k: int) -> None:
    """Launch the GEMV with weights that are declared constant, as a decode step has them."""
    for _ in range(LAUNCHES):
        x, weight = (torch.randn(rows, k, device="cuda").to(torch.bfloat16) for rows in (m, n))
        kernels.gemv.bind(weight)(x)
    torch.cuda.synchronize()


def scan(kernels: loader.Kernels, shape: Shape) -> None:
    """Launch the scan."""
    for _ in range(LAUNCHES):
        kernels.mamba_chunk_scan_combined(**ssd_operands.make(shape, "cuda"))
    torch.cuda.synchronize()


def main() -> None:
    """Launch what is asked for."""
    parser = argparse.ArgumentParser(description=__doc__, prog="python -m benchmarks.profiled")
    parser.add_argument("--artifacts", type=Path, default=default_artifacts())
    parser.add_argument("--arch", default="sm90")
    kinds = parser.add_subparsers(dest="kernel", required=True)
    of_gemv = kinds.add_parser("gemv")
    for name in ("m", "n", "k"):
        of_gemv.add_argument(f"--{name}", type=int, required=True)
    of_scan = kinds.add_parser("scan")
    of_scan.add_argument("--shape", type=Shape.parse, default=Shape(2, 2048))
    options = parser.parse_args()
    with exit_in_one_line("profiled"):
        kernels = loader.load(options.artifacts, arch=options.arch, allow_ptx=True)
    if options.kernel == "gemv":
        gemv(kernels, options.m, options.n, options.k)
    else:
        scan(kernels, options.shape)


if __name__ == "__main__":
    main()
