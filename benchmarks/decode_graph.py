"""Time to the first token of a request: a decode graph captured for it, and one for all requests.

    python -m benchmarks.decode_graph build/default --json benchmarks/results/h200/decode_graph.json

What examples/decode_graph.py prints, recorded; host times of requests that wait for each token.
"""

from __future__ import annotations

import statistics
from typing import Any

import torch

from examples import decode_graph
from examples.hybrid_stack import VOCABULARY, HybridStack, make
from sonata_aot.aot.measure import gpu
from sonata_aot.artifacts.errors import SonataError

from . import results
from .decode_step import BATCH, CASE, binaries
from .options import exit_in_one_line, parse

REQUESTS, STEPS = 6, 64


def measure(loaded: gpu.Loaded, stack: HybridStack) -> dict[str, Any]:
    """The record of one architecture.

    Times are medians; `ours` and `opponent` those to the first token with one graph, patched and
    not.

    Raises:
        SonataError: a graph repeats itself.
    """
    requests = [torch.randint(VOCABULARY, (BATCH,), device="cuda") for _ in range(REQUESTS)]
    kernels: Any = loaded.kernels
    report, each, once, unpatched = decode_graph.compare(stack, requests, STEPS, kernels)
    print(report)
    for run in (each, once, unpatched):
        if decode_graph.repeats_itself(run):
            raise SonataError(
                f"{CASE} {loaded.via}: {len(run.outputs)} outputs of {len(run.tokens)} steps",
                remedy="a graph is empty, or its input is not read",
            )
    return {
        "case": f"{CASE} requests={REQUESTS} steps={STEPS}",
        "opponent": "cublas",
        "via": loaded.via,
        "ours_us": _median_us(once.first),
        "opponent_us": _median_us(unpatched.first),
        "captured_each_us": _median_us(each.first),
        "capture_us": _median_us(each.captures),
        "step_us": _median_us(once.steps),
        "opponent_step_us": _median_us(unpatched.steps),
        "outputs": len(once.outputs),
        "flips": decode_graph.flips(each, once),
        "opponent_flips": decode_graph.flips(once, unpatched),
        "error": None,
        "opponent_error": None,
        "binaries": binaries(loaded, stack),
    }


def _median_us(milliseconds: list[float]) -> float:
    return round(1e3 * statistics.median(milliseconds), 1)


def main() -> None:
    """Measure each architecture named; exit 1 if a graph repeats itself."""
    options = parse("decode_graph", __doc__, ("sm90", "sm86"))
    with exit_in_one_line("decode_graph"):
        loaded = gpu.load(options.artifacts, options.archs, ("gemv",))
        stack = make(BATCH, STEPS)
        records = [measure(each, stack) for each in loaded]
    for record in records:
        each, ours, theirs, capture = (
            record[f"{name}_us"] / 1e3 for name in ("captured_each", "ours", "opponent", "capture")
        )
        print(
            f"{record['via']:11} {record['case']}: first token {each:.2f} ms captured for each, "
            f"{ours:.2f} ms captured once, {theirs:.2f} ms unpatched; a capture {capture:.2f} ms; "
            f"later steps {record['step_us']:.0f} us, {record['opponent_step_us']:.0f} us "
            f"unpatched; {record['outputs']} outputs, {record['flips']} flips, "
            f"{record['opponent_flips']} unpatched"
        )
    if options.json:
        results.write(options.json, records, options.artifacts)


if __name__ == "__main__":
    main()
