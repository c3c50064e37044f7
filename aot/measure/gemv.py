"""`sonata-aot bench gemv`: the skinny GEMV against cuBLAS and against plain reads, in one run.

Weights rotate through 800 MB of random numbers, so that each launch reads its own from memory; at
most the L2's share of that can be a hit, for ours, for cuBLAS and for the reads alike. No figure
is shown that is above what the read kernels reached: see `ceiling`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from ...artifacts import __version__, open_artifacts
from ...artifacts.errors import SonataError
from ...artifacts.manifest import Binary
from . import gpu, timing
from .ceiling import Read, Reader
from .gpu import Loaded, Machine
from .operands import Outputs, References, Rotation
from .shapes import Shape
from .timing import FULL, Call, Effort, Timer

KERNELS = ("gemv", "read")
# Bytes of the buffer for the ceiling, if half of the free memory allows.
LARGE = 8 * 2**30
Progress = Callable[[str], None]


@dataclass(frozen=True)
class Plan:
    """What is to be measured."""

    shapes: Sequence[Shape]
    batches: Sequence[int]
    dtypes: Sequence[str]
    bound: bool = True
    bias: bool = False


@dataclass
class Result:
    """What was measured; `records` as in results files, but for the launcher's digest."""

    records: list[dict[str, Any]]
    large: Read
    ceiling: Read

    def data(self, machine: Machine, directory: Path) -> dict[str, Any]:
        """As JSON data."""
        source = open_artifacts(directory).manifest.source
        return {
            "machine": machine.data(),
            "date": datetime.now(UTC).date().isoformat(),
            "tool": __version__,
            "commit": source.commit,
            "dirty": source.dirty,
            "ceiling": self.ceiling.data(),
            "large_buffer": self.large.data(),
            "records": self.records,
        }


class Bench:
    """Measures a plan; all that needs a GPU is given to it."""

    def __init__(
        self,
        loaded: Sequence[Loaded],
        readers: Sequence[Reader],
        timer: Timer,
        *,
        device: str = "cuda",
        effort: Effort = FULL,
        peak_gbps: float = float("inf"),
        progress: Progress = lambda line: None,
    ) -> None:
        """`readers` are those of `loaded`, one each."""
        self._sets = list(zip(loaded, readers, strict=True))
        self._timer = timer
        self._device = device
        self._effort = effort
        self._peak_gbps = peak_gbps
        self._progress = progress

    def run(self, plan: Plan, large: int) -> Result:
        """Measure the ceiling over a buffer of `large` bytes, and then every case.

        Raises:
            SonataError: a result is wrong, or a figure is above the ceiling.
        """
        reads = (large_read(reader, large, self._device, self._effort) for _, reader in self._sets)
        best = min(reads, key=lambda read: read.us)
        self._progress(f"read {large} bytes")
        records = []
        for dtype in plan.dtypes:
            rotation = Rotation(plan.shapes, dtype, self._device, self._effort.rotation)
            for shape in plan.shapes:
                for loaded, reader in self._sets:
                    records += self._shape(loaded, reader, rotation, shape, dtype, plan)
        ceiling = max(
            (read for _, reader in self._sets for read in reader.seen), key=lambda read: read.gbps
        )
        for record in records:
            require_below(record, ceiling.gbps)
            record["ceiling_gbps"] = round(ceiling.gbps, 1)
        return Result(records, best, ceiling)

    def _shape(
        self,
        loaded: Loaded,
        reader: Reader,
        rotation: Rotation,
        shape: Shape,
        dtype: str,
        plan: Plan,
    ) -> list[dict[str, Any]]:
        weights = rotation.weights(shape)
        addresses = [weight.data_ptr() for weight in weights]
        gemv = loaded.kernels.gemv
        bias = rotation.bias(shape.n) if plan.bias else None
        bound = [gemv.bind(weight, bias) for weight in weights] if plan.bound else []
        reads: dict[bool, Read] = {}
        records = []
        for m in plan.batches:
            x = rotation.activations(m, shape.k)
            references = References(x, weights, bias)
            ours, theirs = (Outputs(x, shape.n, len(weights)) for _ in range(2))
            binary = gemv.binary(x, weights[0], constant=plan.bound)
            programmatic = bool(binary.variant.get("pdl")) and plan.bound
            if programmatic not in reads:
                reads[programmatic] = reader.best(
                    addresses, shape.bytes, programmatic, self._effort
                )
            way = reads[programmatic].way

            def our_call(i: int, x: torch.Tensor = x, outputs: Outputs = ours) -> Call:
                if plan.bound:
                    return lambda: bound[i](x, out=outputs.each[i])
                return lambda: gemv(x, weights[i], bias, out=outputs.each[i])

            def their_call(i: int, x: torch.Tensor = x, outputs: Outputs = theirs) -> Call:
                if bias is not None:
                    added = bias
                    return lambda: torch.addmm(added, x, weights[i].T, out=outputs.each[i])
                return lambda: torch.mm(x, weights[i].T, out=outputs.each[i])

            def poison(outputs: tuple[Outputs, ...] = (ours, theirs)) -> None:
                for each in outputs:
                    each.poison()

            turns = range(len(weights))
            times = self._timer(
                [
                    [our_call(i) for i in turns],
                    [their_call(i) for i in turns],
                    reader.calls(way, addresses, shape.bytes),
                ],
                self._effort,
                poison,
            )
            case = f"M={m} N={shape.n} K={shape.k} dtype={dtype}{' bias=1' if plan.bias else ''}"
            for us in times:
                timing.require_possible(shape.bytes, us, self._peak_gbps, f"{case} {loaded.via}")
            reader.seen.append(Read(way, shape.bytes, times[2]))
            record = {
                "case": case,
                "opponent": "cublas",
                "via": loaded.via,
                "mode": "bound" if plan.bound else "plain",
                "variant": binary.variant_name,
                "ours_us": round(times[0], 3),
                "opponent_us": round(times[1], 3),
                "read_us": round(times[2], 3),
                "error": references.error(ours.all, f"{case} {loaded.via}"),
                "opponent_error": references.error(theirs.all, f"{case} cuBLAS"),
                "bytes": shape.bytes,
                "binaries": [_digest(binary, loaded)],
            }
            records.append(record)
            # No figures yet: they are shown once they are known to be below the ceiling.
            self._progress(f"measured {case} {loaded.via}")
        return records


def large_read(reader: Reader, size: int, device: str, effort: Effort) -> Read:
    """The fastest plain read of a buffer of random numbers, `size` bytes of it.

    Raises:
        SonataError: a figure beyond the memory's peak rate.
    """
    words = torch.empty(size // 8, dtype=torch.int64, device=device).random_()
    return reader.best([words.data_ptr()], size // 8 * 8, False, effort)


def _digest(binary: Binary, loaded: Loaded) -> str:
    return binary.payload(loaded.form).sha256


def require_below(record: dict[str, Any], ceiling: float) -> None:
    """Refuse a record that says that bytes came faster than any read kernel reads.

    There is no tolerance: the ceiling is the best of many readings, and it includes reads of just
    these weights, which are as likely to find a part of them in the L2.

    Raises:
        SonataError: naming the case.
    """
    for who in ("ours", "opponent"):
        if record[f"{who}_us"] is None:
            continue
        rate = timing.gbps(record["bytes"], record[f"{who}_us"])
        if rate > ceiling:
            raise SonataError(
                f"bench bug: {record['case']} {record['via']}: {who}: {record[f'{who}_us']} us "
                f"would be {rate:.0f} GB/s, above the {ceiling:.0f} GB/s that the best read kernel "
                "reached",
                remedy="the measurement is wrong: run it again on an idle GPU, or report it with "
                "this message",
            )


def run(directory: Path, archs: Sequence[str], plan: Plan, progress: Progress) -> Result:
    """Measure a plan on the GPU at hand.

    Raises:
        SonataError: no torch, no GPU, no kernel; or as `Bench.run`.
    """
    machine = gpu.machine()
    loaded = gpu.load(directory, archs, KERNELS)
    sink = torch.zeros(1, dtype=torch.int32, device="cuda")
    readers = [reader(each, machine, sink) for each in loaded]
    free, _ = torch.cuda.mem_get_info()
    bench = Bench(loaded, readers, timing.replayed, peak_gbps=machine.peak_gbps, progress=progress)
    return bench.run(plan, min(LARGE, free // 2))


def reader(loaded: Loaded, machine: Machine, sink: torch.Tensor) -> Reader:
    """The read kernels of one architecture."""
    return Reader(
        {
            key[1:]: binary
            for key, binary in loaded.kernels.table("read").all().items()
            if key[0] == loaded.device
        },
        multiprocessors=machine.multiprocessors,
        peak_gbps=machine.peak_gbps,
        sink=sink.data_ptr(),
        stream=lambda: gpu.stream(loaded.device),
        timer=timing.replayed,
    )
