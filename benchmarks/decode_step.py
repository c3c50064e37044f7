"""A decode step of a hybrid stack in a CUDA graph, patched against unpatched.

    python -m benchmarks.decode_step build/default --json benchmarks/results/h200/decode_step.json

The stack of examples/hybrid_stack.py, of the size of Zonos' hybrid backbone: 34 Mamba2 layers, 12
of attention and MLP, random weights, batch 2. What lies between the projections is fused by
torch.compile in both. The floor is the projections' weight bytes over the measured rate of reading.
"""

from __future__ import annotations

from typing import Any

import torch

from examples.hybrid_stack import ATTENTION_LAYERS, MAMBA_LAYERS, VOCABULARY, HybridStack, make
from sonata_aot import loader
from sonata_aot.aot.measure import gpu, timing
from sonata_aot.aot.measure.gemv import LARGE, large_read, reader
from sonata_aot.artifacts.errors import SonataError

from . import results
from .options import exit_in_one_line, parse

BATCH, LENGTH = 2, 512
CASE = f"layers={MAMBA_LAYERS}xMamba2+{ATTENTION_LAYERS}xattention batch={BATCH} dtype=bf16"


def error(stack: HybridStack, exact: HybridStack, tokens: torch.Tensor) -> float:
    """Relative L2 error of the first step's logits against the same weights in fp32."""
    stack.reset()
    exact.reset()
    found, wanted = stack(tokens).double(), exact(tokens).double()
    stack.reset()
    return float((found - wanted).norm() / wanted.norm())


def binaries(loaded: gpu.Loaded, stack: HybridStack) -> list[str]:
    """SHA-256 of the binaries that the stack's projections get when it is patched."""
    linears = [module for module in stack.modules() if isinstance(module, torch.nn.Linear)]
    shapes = {linear.weight.shape: linear for linear in linears}
    found = [
        loaded.kernels.gemv.binary(
            torch.zeros(BATCH, linear.in_features, device="cuda", dtype=torch.bfloat16),
            linear.weight,
        )
        for linear in shapes.values()
    ]
    return sorted({binary.payload(loaded.form).sha256 for binary in found})


def measure(loaded: gpu.Loaded, machine: gpu.Machine, stack: HybridStack) -> dict[str, Any]:
    """The record of one architecture."""
    tokens = torch.randint(VOCABULARY, (BATCH,), device="cuda")
    kernels: Any = loaded.kernels
    exact = make(BATCH, LENGTH, fused=False)
    exact.load_state_dict(stack.state_dict())
    exact.float()
    opponent_error = error(stack, exact, tokens)
    theirs_graph = timing.capture([lambda: stack(tokens)])
    with loader.patch(stack, kernels) as report:
        ours_error = error(stack, exact, tokens)
        ours_graph = timing.capture([lambda: stack(tokens)])
        print(report)
    del exact
    # Each replay moves on by one position; the caches have room for all of them.
    stack.reset()
    ours, theirs = timing.replay_us([ours_graph, theirs_graph], 1)
    if int(stack.position) > LENGTH:
        raise SonataError(f"{CASE}: {int(stack.position)} steps", remedy=f"raise {LENGTH=}")
    sink = torch.zeros(1, dtype=torch.int32, device="cuda")
    ceiling = large_read(reader(loaded, machine, sink), LARGE, "cuda", timing.FULL).gbps
    size = stack.weight_bytes()
    timing.require_possible(size, ours, ceiling, f"{CASE} {loaded.via}")
    return {
        "case": CASE,
        "opponent": "cublas",
        "via": loaded.via,
        "ours_us": round(ours, 2),
        "opponent_us": round(theirs, 2),
        "bytes": size,
        "ceiling_gbps": round(ceiling, 1),
        "over_ceiling": round(ours * ceiling * 1e3 / size, 4),
        "error": ours_error,
        "opponent_error": opponent_error,
        "binaries": binaries(loaded, stack),
    }


def main() -> None:
    """Measure each architecture named; exit 1 if a figure is above what memory can deliver."""
    options = parse("decode_step", __doc__, ("sm90", "sm86"))
    with exit_in_one_line("decode_step"):
        machine = gpu.machine()
        loaded = gpu.load(options.artifacts, options.archs, ("gemv", "read"))
        stack = make(BATCH, LENGTH)
        records = [measure(each, machine, stack) for each in loaded]
    for record in records:
        ours, theirs = record["ours_us"], record["opponent_us"]
        print(
            f"{record['via']:11} {CASE}: patched {ours:.1f} us, unpatched {theirs:.1f} us, "
            f"{theirs / ours:.3f}x, {100 * (1 - ours / theirs):.1f}% less time; "
            f"{record['over_ceiling']:.3f} of the weights' {record['bytes'] / 1e9:.2f} GB over "
            f"{record['ceiling_gbps']:.0f} GB/s; errors {record['error']:.1e} and "
            f"{record['opponent_error']:.1e}"
        )
    if options.json:
        results.write(options.json, records, options.artifacts)


if __name__ == "__main__":
    main()
