"""Time to first audio: a decode graph captured for every request, and one that all requests replay.

    sonata-aot build --arch sm90
    python -m examples.decode_graph

A stack of the size of Zonos' hybrid backbone with random weights, patched, generates greedily for a
few requests, from random first tokens. Printed for both ways are the time from a request to its
first token, capture included, and the steady time of a step; how many different outputs there were
(a graph that captured nothing repeats itself); and at how many steps tokens differ between the two
ways, and from the unpatched stack. Such flips are information: sums in another order round
otherwise, and with random weights many logits are close.
"""

from __future__ import annotations

import argparse
import statistics
import time
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from sonata_aot import loader

from .hybrid_stack import VOCABULARY, HybridStack, make


class Decoder:
    """A step in a graph: reads `tokens`, leaves the next ones there and their logits."""

    def __init__(self, stack: HybridStack, batch: int) -> None:
        """Nothing is captured yet."""
        self.stack = stack
        self.tokens = torch.zeros(batch, dtype=torch.int64, device="cuda")
        self.logits = torch.zeros(batch, VOCABULARY, device="cuda", dtype=torch.bfloat16)
        self._graph: torch.cuda.CUDAGraph | None = None

    def warm_up(self) -> None:
        """Run a few steps on a side stream, as what is captured must have run before."""
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(3):
                self._step()
        torch.cuda.current_stream().wait_stream(side)
        torch.cuda.synchronize()

    def capture(self) -> None:
        """Capture the step anew."""
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph):
            self._step()

    def start(self, first: Tensor) -> None:
        """Begin a request with these tokens."""
        self.stack.reset()
        self.tokens.copy_(first)

    def step(self) -> list[int]:
        """Replay the step; the next tokens, on the host."""
        assert self._graph is not None
        self._graph.replay()
        return self.tokens.tolist()

    def _step(self) -> None:
        self.logits.copy_(self.stack(self.tokens))
        self.tokens.copy_(self.logits.argmax(-1))


@dataclass
class Run:
    """What the requests of one way took, in milliseconds, and gave."""

    first: list[float] = field(default_factory=list)
    steps: list[float] = field(default_factory=list)
    captures: list[float] = field(default_factory=list)
    tokens: list[list[int]] = field(default_factory=list)
    outputs: set[float] = field(default_factory=set)


def serve(decoder: Decoder, requests: list[Tensor], steps: int, *, capture_each: bool) -> Run:
    """Answer the requests one after another."""
    run = Run()

    def capture(began: float) -> None:
        decoder.capture()
        run.captures.append(1e3 * (time.perf_counter() - began))

    if not capture_each:
        capture(time.perf_counter())
    for first in requests:
        torch.cuda.synchronize()
        began = time.perf_counter()
        if capture_each:
            capture(began)
        decoder.start(first)
        for number in range(steps):
            stepped = time.perf_counter()
            run.tokens.append(decoder.step())
            now = time.perf_counter()
            if number:
                run.steps.append(1e3 * (now - stepped))
            else:
                run.first.append(1e3 * (now - began))
            run.outputs.add(decoder.logits.double().sum().item())
    return run


def compare(
    stack: HybridStack, requests: list[Tensor], steps: int, kernels: loader.Kernels | None = None
) -> tuple[str, Run, Run, Run]:
    """What was patched; and both ways, patched, and one graph for all requests, unpatched.

    `kernels` are those that the process loaded first unless others are given.
    """
    decoder = Decoder(stack, len(requests[0]))
    stack.reset()
    decoder.warm_up()
    unpatched = serve(decoder, requests, steps, capture_each=False)
    with loader.patch(stack, kernels) as report:
        stack.reset()
        decoder.warm_up()
        each = serve(decoder, requests, steps, capture_each=True)
        once = serve(decoder, requests, steps, capture_each=False)
        return str(report), each, once, unpatched


def flips(one: Run, other: Run) -> int:
    """At how many steps the tokens of two runs differ."""
    return sum(a != b for a, b in zip(one.tokens, other.tokens, strict=True))


def table(each: Run, once: Run, unpatched: Run) -> list[str]:
    """The table of both ways, and of the unpatched stack, and what is told besides."""
    steps = len(once.tokens)
    lines = [f"{'':30}{'first token':>14}{'later steps':>14}{'distinct outputs':>18}"]
    for name, run in (
        ("captured for each request", each),
        ("captured once", once),
        ("captured once, unpatched", unpatched),
    ):
        lines.append(
            f"{name:30}{statistics.median(run.first):11.2f} ms{statistics.median(run.steps):11.3f} "
            f"ms{len(run.outputs):11} of {len(run.tokens)}"
        )
    return [
        *lines,
        f"a capture takes {statistics.median(each.captures):.2f} ms; captured once, "
        f"{once.captures[0]:.2f} ms, before the first request",
        f"token flips: {flips(each, once)} of {steps} steps between the two ways, "
        f"{flips(once, unpatched)} of {steps} steps unpatched",
    ]


def repeats_itself(run: Run) -> bool:
    """Whether there are so few outputs that a graph must be empty, or not read its input."""
    return len(run.outputs) < len(run.tokens) // 2


def _number(least: int, text: str) -> int:
    number = int(text)
    if number < least:
        raise argparse.ArgumentTypeError(f"{text} is less than {least}")
    return number


def main() -> None:
    """Print the table; exit 1 if a graph repeats itself."""
    parser = argparse.ArgumentParser(description=__doc__, prog="python -m examples.decode_graph")
    parser.add_argument("directory", type=Path, nargs="?", default=None, help="artifacts")
    for name, default, least, meaning in (
        ("requests", 6, 1, "requests that are answered one after another"),
        ("steps", 64, 2, "tokens of each request"),
        ("batch", 2, 1, "sequences of a request; patched projections take up to 8"),
        ("mamba-layers", 34, 1, "layers of Mamba2"),
        ("attention-layers", 12, 0, "layers of attention and MLP"),
    ):
        kind = partial(_number, least)
        parser.add_argument(f"--{name}", type=kind, default=default, metavar="N", help=meaning)
    options = parser.parse_args()

    try:
        loader.load(options.directory, allow_ptx=True)
    except loader.SonataError as error:
        raise SystemExit(f"decode_graph: {error}") from None
    stack = make(
        options.batch,
        max(options.steps, 4),
        mamba_layers=options.mamba_layers,
        attention_layers=options.attention_layers,
    )
    requests = [
        torch.randint(VOCABULARY, (options.batch,), device="cuda") for _ in range(options.requests)
    ]
    report, each, once, unpatched = compare(stack, requests, options.steps)
    print(report)
    print()
    print("\n".join(table(each, once, unpatched)))
    if repeats_itself(each) or repeats_itself(once):
        raise SystemExit(
            "the outputs repeat themselves: a graph is empty, or its input is not read"
        )


if __name__ == "__main__":
    main()
