"""`sonata-aot tune gemv`: measure every variant in every launch, and make a selection table of it.

Each variant is measured quickly, with every launch that it is offered, for each shape and number of
rows. Then the best few of each meet again under the full rules, so that no lucky reading wins.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path

import torch

from ...artifacts import __version__, open_artifacts
from ...artifacts.arch import Arch, cuda_version
from ...artifacts.errors import ArgumentError, SonataError, VariantMissing
from ...artifacts.manifest import Binary, Form
from ...kernels.registry import builtin
from . import gpu, model, table, timing
from .gpu import Kernels
from .operands import Outputs, References, Rotation, WrongResult
from .raw import DTYPE, KERNEL, Raw
from .shapes import Shape
from .table import Measurement, Score
from .timing import FULL, Call, Effort, Timer

QUICK = Effort(rounds=3, replays=10, rotation=400_000_000)
FINALISTS = 5
# A quick reading this much above the best may yet be within tolerance of it.
NEARLY = 1.05
BLOCKS_PER_SM = (1, 2, 3, 4)
AHEAD_KB = (0, 4096, 8192, 24576)
# More than any L2 holds, and so all of the weights.
EVERYTHING_KB = 2**20
Progress = Callable[[str], None]
Launch = dict[str, int]


def launches(binary: Binary, constant: int, shape: Shape, multiprocessors: int) -> Iterator[Launch]:
    """The ways to launch a variant that are measured; none if it is not for such calls."""
    variant = binary.variant
    if not constant:
        yield _launch()
        return
    if not variant.get("pdl", 0):
        return
    kilobytes = shape.bytes / 1024
    amounts = [kb for kb in AHEAD_KB if kb < kilobytes] + [EVERYTHING_KB]
    if variant["persistent"]:
        for blocks in BLOCKS_PER_SM:
            for kb in amounts:
                yield _launch(blocks_per_sm=blocks, ahead_kb=kb)
    # A persistent variant does a tile a block as well, which may save the binary that is for that.
    yield _launch()
    yield _launch(ahead_kb=EVERYTHING_KB)
    if variant["persistent"]:
        return  # it asks for its own rows only
    resident = model.resident_blocks(binary)
    # Beyond the first wave there must be rows to ask for.
    if -(-shape.n // int(variant["rows"])) > resident * multiprocessors:
        yield _launch(ahead_kb=EVERYTHING_KB, skip_blocks_per_sm=resident)


def _launch(blocks_per_sm: int = 0, ahead_kb: int = 0, skip_blocks_per_sm: int = 0) -> Launch:
    return dict(zip(table.LAUNCH, (blocks_per_sm, ahead_kb, skip_blocks_per_sm), strict=True))


@dataclass(frozen=True)
class _Inputs:
    """One x, the weights that it meets in turn, and the first and last result."""

    x: torch.Tensor
    weights: Sequence[torch.Tensor]
    ends: References
    effort: Effort


@dataclass
class Tuner:
    """Measures variants; all that needs a GPU is given to it."""

    kernels: Kernels
    binaries: Sequence[Binary]
    form: Form
    multiprocessors: int
    timer: Timer
    score: Score = table.measured_us
    peak_gbps: float = math.inf
    device: str = "cuda"
    quick: Effort = QUICK
    full: Effort = FULL
    progress: Progress = print
    # Launches that were refused, or computed something else; the others are measured all the same.
    failures: list[SonataError] = field(default_factory=list)

    def run(self, shapes: Sequence[Shape], into: list[Measurement]) -> None:
        """Append a measurement of everything to `into`, which is of use at any moment.

        Raises:
            SonataError: at the end, if a launch was refused or computed something else; at once, if
                a figure is beyond the memory's peak rate.
        """
        began = time.monotonic()
        rotation = Rotation(shapes, DTYPE, self.device, self.full.rotation)
        for index, shape in enumerate(shapes):
            for m in sorted({int(binary.variant["m"]) for binary in self.binaries}):
                before = len(into)
                for constant in (0, 1):
                    self._cell(self._inputs(rotation, shape, m), shape, m, constant, into)
                quick = sum(not item.full for item in into[before:])
                self.progress(
                    f"{time.monotonic() - began:5.0f} s  shape {index + 1} of {len(shapes)}, "
                    f"{shape} m={m}: {quick} launches, {len(into) - before - quick} of them again"
                )
        if self.failures:
            first = self.failures[0]
            raise SonataError(
                f"launches that failed: {len(self.failures)}, the first: {first.what}",
                remedy=f"{first.remedy}; or make the table of the others with --measured",
            )

    def _inputs(self, rotation: Rotation, shape: Shape, m: int) -> tuple[_Inputs, _Inputs]:
        """Those of the quick round, and all."""
        x = rotation.activations(m, shape.k)
        efforts = (self.quick, self.full)
        each = [(rotation.weights(shape, effort.rotation), effort) for effort in efforts]
        # Two results suffice: it is the times that are wanted, but a variant that does only a part
        # of its work must not look fast.
        quick, full = (
            _Inputs(x, weights, References(x, [weights[0], weights[-1]]), effort)
            for weights, effort in each
        )
        return quick, full

    def _cell(
        self,
        inputs: tuple[_Inputs, _Inputs],
        shape: Shape,
        m: int,
        constant: int,
        into: list[Measurement],
    ) -> None:
        """Measure all that is offered to one kind of call."""
        quick, full = inputs
        found: list[Measurement] = []
        for binary in self.binaries:
            if binary.variant["m"] != m:
                continue
            for launch in launches(binary, constant, shape, self.multiprocessors):
                blank = Measurement(
                    *(shape.n, shape.k, m, constant, dict(binary.variant), launch),
                    us=math.inf,
                    full=False,
                    binary=binary.payload(self.form).sha256,
                )
                measured = self._time([blank], quick)
                found += measured
                into += measured
        best = table.finalists(found, self.score, most=FINALISTS, within=NEARLY)
        if best:
            again = self._time([replace(item, full=True) for item in best], full)
            for item in again:
                # Not of the quick round: of its smaller rotation more may be left in the L2.
                size = 2 * item.n * item.k
                timing.require_possible(size, item.us, self.peak_gbps, _case(item))
            into += again

    def _time(self, items: Sequence[Measurement], inputs: _Inputs) -> list[Measurement]:
        """Measure variants in turn, and keep those that wrote what they should."""
        outputs = [Outputs(inputs.x, items[0].n, len(inputs.weights)) for _ in items]

        def calls(item: Measurement, into: Outputs) -> list[Call]:
            run = self.kernels.gemv.using(item.variant, item.launch, constant=bool(item.constant))

            def call(i: int) -> Call:
                return lambda: run(inputs.x, inputs.weights[i], out=into.each[i])

            return [call(i) for i in range(len(inputs.weights))]

        def poison() -> None:
            for each in outputs:
                each.poison()

        try:
            passes = [calls(*pair) for pair in zip(items, outputs, strict=True)]
            times = self.timer(passes, inputs.effort, poison)
        except ArgumentError as error:
            self.failures.append(error)
            return []
        kept = []
        for item, us, output in zip(items, times, outputs, strict=True):
            try:
                inputs.ends.error(output.all[[0, -1]], _case(item))
            except WrongResult as error:
                self.failures.append(error)
            else:
                kept.append(replace(item, us=us))
        return kept


def _case(item: Measurement) -> str:
    launch = ",".join(f"{name}={value}" for name, value in item.launch.items())
    return f"N={item.n} K={item.k} {item.key} constant={item.constant} {launch}"


def tuned_binaries(directory: Path, arch: str) -> list[Binary]:
    """The binaries to measure, which must be all that are declared.

    Raises:
        VariantMissing: some are not in the directory, with the build that adds them.
    """
    manifest = open_artifacts(directory).manifest
    spec = builtin()[KERNEL]
    number = Arch.parse(arch).number
    wanted = [
        variant
        for variant in spec.variants
        if variant.get("dtype") == DTYPE and spec.declaration.least_sm(variant) <= number
    ]
    present = [
        binary
        for binary in manifest.binaries
        if (binary.kernel, binary.arch) == (KERNEL, arch) and binary.variant in wanted
    ]
    missing = len(wanted) - len(present)
    if missing:
        archs = sorted({*manifest.selection.archs, arch})
        names = sorted({KERNEL, "read", *(d.name for d in manifest.kernels)})
        raise VariantMissing(
            f"{directory} lacks {missing} of the {len(wanted)} declared variants of {KERNEL} for "
            f"{arch}",
            remedy=f"build them: `{gpu.build_command(directory, archs, names, '--all')}`",
        )
    return present


def scorer(target: str | None, binaries: Sequence[Binary]) -> Score:
    """How times become scores: as they are, or by the model of another GPU.

    Raises:
        ArgumentError: the model has no persistent variants.
    """
    if target is None:
        return table.measured_us
    other = model.TARGETS[target]
    busy = {binary.variant_name: binary for binary in binaries if other.keeps_busy(binary)}

    def score(item: Measurement) -> float:
        if item.launch["blocks_per_sm"]:
            raise ArgumentError(
                f"--model {target} does not know persistent variants",
                remedy="use it with an arch below sm90",
            )
        if item.key not in busy:
            return math.inf
        return item.us * other.factor(busy[item.key], item.n)

    return score


def measure(
    directory: Path,
    arch: str,
    shapes: Sequence[Shape],
    target: str | None,
    raw: Raw,
    progress: Progress,
) -> None:
    """Measure on the GPU at hand; `raw` holds what there is, whatever happens.

    Raises:
        SonataError: no torch, no GPU, not the whole grid; or as `Tuner.run`.
    """
    machine = gpu.machine()
    binaries = tuned_binaries(directory, arch)
    (loaded,) = gpu.load(directory, [arch], [KERNEL])
    raw.head = {
        "machine": machine.data(),
        "date": datetime.now(UTC).date().isoformat(),
        "tool": __version__,
        "via": loaded.via,
    }
    Tuner(
        loaded.kernels,
        binaries,
        loaded.form,
        machine.multiprocessors,
        timing.replayed,
        score=scorer(target, binaries),
        peak_gbps=machine.peak_gbps,
        progress=progress,
    ).run(shapes, raw.measurements)


def make(
    raw: Raw,
    binaries: Sequence[Binary],
    target: str | None,
    tolerance: float,
    kept: Sequence[str] = (),
    used: Sequence[str] = (),
) -> str:
    """The text of a table; `kept` are variants as text, such as `m=2,side=a`.

    `used` are cases with what they get, such as `n=8512,k=2048,m=2,constant=1,rows=8`.

    Raises:
        SonataError: nothing was measured, or a model leaves nothing over.
    """
    if not raw.measurements:
        raise SonataError("nothing was measured", remedy="measure at least one shape")
    score = scorer(target, binaries)
    wanted = [_variant(text) for text in kept]
    for variant, text in zip(wanted, kept, strict=True):
        if not any(variant.items() <= item.variant.items() for item in raw.measurements):
            raise ArgumentError(
                f"--keep {text}: no measured variant has these values",
                remedy="name choices and values as `sonata-aot list` shows them",
            )
    chosen = table.choose(
        raw.measurements,
        score=score,
        tolerance=tolerance,
        kept=wanted,
        used=[_variant(text) for text in used],
    )
    return table.toml(KERNEL, origin(raw, target, tolerance, kept, used), table.rows(chosen))


def _variant(text: str) -> dict[str, int | str]:
    pairs = (part.partition("=") for part in text.split(","))
    return {name.strip(): int(v) if v.strip().isdecimal() else v.strip() for name, _, v in pairs}


def origin(
    raw: Raw,
    target: str | None,
    tolerance: float,
    kept: Sequence[str] = (),
    used: Sequence[str] = (),
) -> str:
    """How a table came about."""
    machine = raw.head["machine"]
    major, minor = cuda_version(machine["driver_cuda"])
    shapes = len({item.shape for item in raw.measurements})
    variants = len({item.key for item in raw.measurements})
    text = (
        f"Measured by sonata-aot tune {raw.head['tool']} on one {machine['gpu']} "
        f"({machine['multiprocessors']} SMs), driver for CUDA {major}.{minor}, torch "
        f"{machine['torch']}, {raw.head['date']}, via {raw.head['via']}: {variants} variants in "
        f"{DTYPE}, {shapes} shapes; each shape has a variant within {100 * tolerance:g}% of its "
        "fastest."
    )
    if kept:
        text += f" Kept in any case: {' and '.join(kept)}."
    if used:
        text += f" Used where another may be faster alone: {' and '.join(used)}."
    return text if target is None else f"{text} {model.TARGETS[target].sentence()}"
