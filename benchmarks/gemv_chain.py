"""A chain of dependent GEMVs in one CUDA graph: the projections of a stack of Mamba2 layers.

    python -m benchmarks.gemv_chain build/all --json benchmarks/results/h200/gemv_chain.json

34 layers at batch 2 in bf16, each an in_proj (8512 x 2048) and an out_proj (4096 columns, 2048
rows) that reads the first 4096 outputs of the in_proj, and whose result the next in_proj reads. So
no launch can begin before the one before it has ended, but for reading weights. Timed are bound
GEMVs, which may; the same binaries launched in order; plain calls; and cuBLAS. The first two must
give equal bits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from sonata_aot.aot.measure import gpu, timing
from sonata_aot.aot.measure.gemv import LARGE, large_read, reader
from sonata_aot.artifacts.errors import SonataError

from . import results
from .options import exit_in_one_line, parse

LAYERS, BATCH, MODEL, INNER, PROJECTED = 34, 2, 2048, 4096, 8512
CASE = (
    f"M={BATCH} chain={LAYERS}x({PROJECTED}x{MODEL},{MODEL}x{INNER}) launches={2 * LAYERS} "
    "dtype=bf16"
)
BYTES = 2 * LAYERS * (PROJECTED * MODEL + MODEL * INNER)


class Chain:
    """Weights of the stack and the vectors that travel through it."""

    def __init__(self) -> None:
        """Random weights, scaled so that values keep their size along the chain."""

        def random(rows: int, columns: int) -> torch.Tensor:
            values = torch.randn(rows, columns, device="cuda") * columns**-0.5
            return values.to(torch.bfloat16)

        self.ins = [random(PROJECTED, MODEL) for _ in range(LAYERS)]
        self.outs = [random(MODEL, INNER) for _ in range(LAYERS)]
        self.start = random(BATCH, MODEL) * MODEL**0.5
        self.projected = self.start.new_empty(BATCH, PROJECTED)
        self.state = self.start.new_empty(BATCH, MODEL)

    def calls(self, gemvs: Sequence[Callable[..., object]]) -> list[Callable[[], object]]:
        """The launches in order; `gemvs` are `call(x, out=)`, in_proj and out_proj in turn."""
        found: list[Callable[[], object]] = []
        x = self.start
        for first, second in zip(gemvs[::2], gemvs[1::2], strict=True):
            found.append(lambda call=first, x=x: call(x, out=self.projected))
            found.append(
                lambda call=second: call(self.projected[:, :INNER], out=self.state),
            )
            x = self.state
        return found

    def weights(self) -> list[torch.Tensor]:
        """In the order in which they are read."""
        return [weight for pair in zip(self.ins, self.outs, strict=True) for weight in pair]

    def run(self, graph: torch.cuda.CUDAGraph) -> torch.Tensor:
        """What a graph leaves, poisoned before."""
        self.projected.fill_(float("nan"))
        self.state.fill_(float("nan"))
        graph.replay()
        torch.cuda.synchronize()
        return self.state.clone()

    def error(self) -> float:
        """Relative L2 error of the last GEMV against float64, given its own input."""
        expected = self.projected[:, :INNER].double() @ self.outs[-1].double().T
        return float((self.state.double() - expected).norm() / expected.norm())


def measure(loaded: gpu.Loaded, machine: gpu.Machine) -> dict[str, Any]:
    """The record of one architecture.

    Raises:
        SonataError: launched in order the chain gives other bits, or a figure is above the ceiling.
    """
    chain, gemv = Chain(), loaded.kernels.gemv
    weights = chain.weights()
    ordered = [gemv.bind(weight) for weight in weights]
    for weight in weights:
        weight.mul_(1)  # which ends that they count as constant
    bound = [
        gemv.bind(weight, upcoming=upcoming)
        for weight, upcoming in zip(weights, [*weights[1:], weights[0]], strict=True)
    ]
    plain = [lambda x, out, w=w: gemv(x, w, out=out) for w in weights]
    cublas = [lambda x, out, w=w: torch.mm(x, w.T, out=out) for w in weights]
    graphs = [timing.capture(chain.calls(gemvs)) for gemvs in (bound, ordered, plain, cublas)]
    if not torch.equal(chain.run(graphs[0]), chain.run(graphs[1])):
        raise SonataError(
            f"{CASE} {loaded.via}: other bits without programmatic launch",
            remedy="report it with this message",
        )
    errors = []
    for graph in (graphs[0], graphs[3]):
        chain.run(graph)
        errors.append(chain.error())
    ours, in_order, calls, theirs = timing.replay_us(graphs, 1)
    sink = torch.zeros(1, dtype=torch.int32, device="cuda")
    read = reader(loaded, machine, sink)
    ceiling = large_read(read, LARGE, "cuda", timing.FULL).gbps
    timing.require_possible(BYTES, ours, ceiling, f"{CASE} {loaded.via}")
    inputs = ((chain.start, weights[0]), (chain.projected[:, :INNER], weights[1]))
    binaries = [gemv.binary(x, weight, constant=True) for x, weight in inputs]
    return {
        "case": CASE,
        "opponent": "cublas",
        "via": loaded.via,
        "ours_us": round(ours, 2),
        "opponent_us": round(theirs, 2),
        "in_order_us": round(in_order, 2),
        "plain_us": round(calls, 2),
        "bytes": BYTES,
        "ceiling_gbps": round(ceiling, 1),
        "over_ceiling": round(ours * ceiling * 1e3 / BYTES, 4),
        "error": errors[0],
        "opponent_error": errors[1],
        "binaries": sorted({binary.payload(loaded.form).sha256 for binary in binaries}),
    }


def main() -> None:
    """Measure each architecture named."""
    options = parse("gemv_chain", __doc__, ("sm90", "sm86"))
    with exit_in_one_line("gemv_chain"):
        machine = gpu.machine()
        loaded = gpu.load(options.artifacts, options.archs, ("gemv", "read"))
        records = [measure(each, machine) for each in loaded]
    for record in records:
        print(
            f"{record['via']:11} {record['ours_us']:7.1f} us, {record['over_ceiling']:.3f} of "
            f"bytes over {record['ceiling_gbps']:.0f} GB/s; in order {record['in_order_us']:.1f}, "
            f"plain calls {record['plain_us']:.1f}, cuBLAS {record['opponent_us']:.1f} us"
        )
    if options.json:
        results.write(options.json, records, options.artifacts)


if __name__ == "__main__":
    main()
