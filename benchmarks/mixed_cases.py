"""What each thread of `benchmarks.mixed_load` calls: decode and prefill, with inputs of its own.

Weights are shared by all threads, as a server's are. Inputs and outputs are not: a launch that got
another thread's addresses leaves its own output unwritten, or computes something else.
"""

from __future__ import annotations

import ctypes
import hashlib
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

from sonata_aot.aot.measure import ssd_operands
from sonata_aot.aot.measure.gpu import Loaded
from sonata_aot.aot.measure.operands import WrongResult
from sonata_aot.aot.measure.ssd_shapes import Shape

# Rows, N and K of plain calls; rows of 1031 elements are not aligned, and take `gemv_any`.
PLAIN = ((1, 2048, 2048), (2, 8512, 2048), (5, 1024, 4096), (3, 515, 1031))
# The same of bound ones.
BOUND = ((2, 8512, 2048), (1, 2048, 4096), (8, 1024, 4096))
# N and K of a decode step: each reads the first columns of what the one before wrote.
STEP_ROWS = 2
STEP = ((8512, 2048), (2048, 4096), (8512, 2048), (2048, 4096))
# Inputs of the step that replays take in turn.
STEP_INPUTS = 3
# Prefill: one token and many, a sequence that is cut into segments, and a z that is copied first
# (its rows are not aligned).
SCANS = (
    Shape(1, 1, heads=4, initial=True),
    Shape(2, 64, heads=4),
    Shape(1, 200, heads=4, z=True, strides=True),
    Shape(1, 300, heads=4, initial=True, seq_idx=True),
    Shape(2, 130, heads=8, groups=2, z=True, initial=True, seq_idx=True),
    Shape(1, 1500, heads=4),
)
KERNELS = ("gemv", "gemv_any", "ssd_copy", "ssd_prepare", "ssd_pass", "ssd_scan")
# Most relative L2 error of a GEMV; of out and states of a scan. One rounding to bf16 makes at most
# 2.3e-3, of a few elements by chance a third more; out may come of three.
GEMV_BOUND = 4e-3
SCAN_BOUNDS = (3.8e-3, 3e-3)
Results = Sequence[Tensor]


class Graph(Protocol):
    """A captured CUDA graph."""

    def replay(self) -> None:
        """Launch it on the current stream."""
        ...


# The graph of calls, in order.
Capture = Callable[[Sequence[Callable[[], object]]], Graph]


@dataclass
class Case:
    """A call, and what it must leave."""

    kind: str
    name: str
    call: Callable[[], Results]
    # Of results, their relative errors against float64.
    errors: Callable[[Results], Sequence[float]]
    bounds: Sequence[float]
    # Where results are copied to, on the host, its bytes, and the SHA-256 of what must be there.
    host: list[Tensor] = field(default_factory=list)
    _bytes: list[memoryview] = field(default_factory=list)
    digest: str = ""

    def issue(self) -> None:
        """Call; have the results copied to the host and their memory poisoned.

        What is freed here is what the next call on the stream gets: one that does not write it, or
        is written to by an earlier one, then has NaN.
        """
        for result, copy in zip(self.call(), self.host, strict=True):
            copy.copy_(result, non_blocking=True)
            result.fill_(float("nan"))

    def found(self) -> str:
        """SHA-256 of the bytes on the host."""
        digest = hashlib.sha256()
        for each in self._bytes:
            digest.update(each)
        return digest.hexdigest()

    def require(self) -> None:
        """Require that the results that were copied have the bits of the reference.

        Raises:
            WrongResult: they have others.
        """
        if self.found() != self.digest:
            raise WrongResult(
                f"{self.kind} {self.name}: other bits than alone on one stream",
                remedy="report it with this message",
            )

    def refer(self, host: Callable[[Tensor], Tensor]) -> float:
        """Take what one call on an idle GPU leaves for the reference; returns its worst error.

        `host` makes the memory that a result is copied to.

        Raises:
            WrongResult: it is further from float64 than rounding explains.
        """
        results = self.call()
        errors = self.errors(results)
        for error, bound in zip(errors, self.bounds, strict=True):
            if not error <= bound:  # NaN, too
                raise WrongResult(
                    f"{self.kind} {self.name}: relative error {error:.3g}, over {bound:g}",
                    remedy="report it with this message",
                )
        self.host = [host(result) for result in results]
        self._bytes = [
            memoryview((ctypes.c_char * copy.nbytes).from_address(copy.data_ptr()))
            for copy in self.host
        ]
        for result, copy in zip(results, self.host, strict=True):
            copy.copy_(result)  # waits for it
            result.fill_(float("nan"))
        self.digest = self.found()
        return max(errors)


class Step:
    """A decode step: GEMVs, each of which reads the one before; bound, with outputs of its own."""

    def __init__(self, gemv: Any, weights: Sequence[Tensor], inputs: Sequence[Tensor]) -> None:
        """`inputs` are what `run` copies to where the first GEMV reads."""
        self._weights = weights
        self._inputs = inputs
        self._x = inputs[0].clone()
        self._outs = [self._x.new_empty(STEP_ROWS, weight.shape[0]) for weight in weights]
        followers = (*weights[1:], weights[0])
        self._bound = [
            gemv.bind(weight, out=out, upcoming=upcoming)
            for weight, out, upcoming in zip(weights, self._outs, followers, strict=True)
        ]
        self._graph: Graph | None = None

    def _reads(self) -> list[Tensor]:
        wrote = zip(self._outs, self._weights[1:], strict=False)
        return [self._x, *(out[:, : weight.shape[1]] for out, weight in wrote)]

    def _calls(self) -> list[Callable[[], object]]:
        pairs = zip(self._bound, self._reads(), strict=True)
        return [lambda bound=bound, x=x: bound(x) for bound, x in pairs]

    def capture(self, capture: Capture) -> None:
        """Replay a graph of the calls from now on."""
        self._graph = capture(self._calls())

    def run(self, number: int) -> Results:
        """The step for one of the inputs; the results are the outputs of all GEMVs."""
        self._x.copy_(self._inputs[number])
        if self._graph is not None:
            self._graph.replay()
        else:
            for call in self._calls():
                call()
        return self._outs

    def errors(self, results: Results) -> Sequence[float]:
        """The error of each GEMV given what it read."""
        made = zip(self._reads(), self._weights, results, strict=True)
        return [gemv_error(x, weight, out) for x, weight, out in made]


def gemv_error(x: Tensor, weight: Tensor, out: Tensor) -> float:
    """Relative L2 error against float64."""
    return ssd_operands.relative(out, x.double() @ weight.double().T)


class Weights:
    """Weights by shape, and a GEMV bound to each, shared by all threads."""

    def __init__(self, gemv: Any, device: str) -> None:
        """Random ones, scaled so that products keep the size of x."""
        shapes = {(n, k) for _, n, k in (*PLAIN, *BOUND)} | set(STEP)
        self.all = {
            (n, k): (torch.randn(n, k, device=device) * k**-0.5).to(torch.bfloat16)
            for n, k in sorted(shapes)
        }
        self.bound = {shape: gemv.bind(weight) for shape, weight in self.all.items()}

    def step(self) -> list[Tensor]:
        """Those of the decode step, in order."""
        return [self.all[shape] for shape in STEP]


@dataclass
class Work:
    """The cases of one thread, and its decode step, to be captured on that thread."""

    cases: list[Case]
    step: Step


def make_work(loaded: Loaded, weights: Weights, device: str) -> Work:
    """One thread's, with random inputs."""
    gemv: Any = loaded.kernels.gemv
    cases = []

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, device=device).to(torch.bfloat16)

    def add_gemv(kind: str, x: Tensor, n: int, call: Callable[[], Tensor]) -> None:
        rows, k = x.shape
        weight = weights.all[n, k]
        name = f"M={rows} N={n} K={k}"
        errors = lambda results: (gemv_error(x, weight, results[0]),)  # noqa: E731
        cases.append(Case(kind, name, lambda: (call(),), errors, (GEMV_BOUND,)))

    for rows, n, k in PLAIN:
        x, weight = normal(rows, k), weights.all[n, k]
        add_gemv("plain", x, n, lambda x=x, weight=weight: gemv(x, weight))
    for rows, n, k in BOUND:
        x, outs = normal(rows, k), [normal(rows, n) for _ in range(2)]
        own, shared = gemv.bind(weights.all[n, k], out=outs[0]), weights.bound[n, k]
        add_gemv("bound", x, n, lambda own=own, x=x: own(x))
        add_gemv("shared", x, n, lambda shared=shared, x=x, out=outs[1]: shared(x, out=out))
    inputs = [normal(STEP_ROWS, STEP[0][1]) for _ in range(STEP_INPUTS)]
    step = Step(gemv, weights.step(), inputs)
    for number in range(STEP_INPUTS):
        run = lambda number=number: step.run(number)  # noqa: E731
        cases.append(Case("graph", f"input={number}", run, step.errors, [GEMV_BOUND] * len(STEP)))
    scan = loaded.kernels.mamba_chunk_scan_combined
    for shape in SCANS:
        arguments = ssd_operands.make(shape, device)
        wanted = ssd_operands.wanted(arguments)

        def errors(results: Results, wanted: Results = wanted) -> Sequence[float]:
            return [ssd_operands.relative(*pair) for pair in zip(results, wanted, strict=True)]

        call = lambda arguments=arguments: scan(**arguments)  # noqa: E731
        cases.append(Case("scan", shape.case, call, errors, SCAN_BOUNDS))
    return Work(cases, step)


def binaries(loaded: Loaded, weights: Weights, device: str) -> list[str]:
    """SHA-256 of all that the cases run, sorted."""
    gemv, found = loaded.kernels.gemv, []
    promised = itertools.chain(
        ((shape, False) for shape in PLAIN),
        ((shape, True) for shape in BOUND),
        (((STEP_ROWS, *shape), True) for shape in STEP),
    )
    for (rows, n, k), constant in promised:
        x = torch.zeros(rows, k, dtype=torch.bfloat16, device=device)
        found.append(gemv.binary(x, weights.all[n, k], constant=constant))
    for shape in SCANS:
        arguments = ssd_operands.make(shape, device)
        found += loaded.kernels.mamba_chunk_scan_combined.binaries(**arguments)
    return sorted({binary.payload(loaded.form).sha256 for binary in found})
