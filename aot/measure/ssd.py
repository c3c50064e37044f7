"""`sonata-aot bench ssd`: the scan of Mamba2 against mamba_ssm's Triton kernels, in one run.

Inputs and outputs of a pass take 400 MB, more than any L2 holds; each call has results of its own.
Ours and the opponent's graphs are replayed in turn. No figure is shown in which memory moves faster
than the read kernels do: see `ceiling`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from ...artifacts import __version__, open_artifacts
from ...artifacts.errors import MissingDependency
from . import gpu, mamba_opponent, ssd_host, ssd_operands, timing
from .ceiling import Read, Reader
from .gemv import LARGE, Progress, large_read, reader, require_below
from .gpu import Loaded, Machine
from .mamba_opponent import Opponent
from .ssd_host import Clock, Eager
from .ssd_operands import Arguments, Pass
from .ssd_shapes import EXTRA_TOLERANCE, Shape, fused_estimate_us
from .timing import Effort, Timer

KERNELS = ("ssd_prepare", "ssd_scan", "read")
EFFORT = Effort(rounds=7, replays=20, rotation=400_000_000)


@dataclass
class Result:
    """What was measured; `records` as in results files, but for the launcher's digest."""

    records: list[dict[str, Any]]
    ceiling: Read
    # Versions of what the opponent runs on; None where there was none.
    opponent: dict[str, str] | None

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
            "opponent": self.opponent,
            "records": self.records,
        }


class Bench:
    """Measures shapes; all that needs a GPU is given to it."""

    def __init__(
        self,
        loaded: Sequence[Loaded],
        readers: Sequence[Reader],
        timer: Timer,
        clock: Clock,
        opponent: Opponent | None,
        *,
        device: str = "cuda",
        effort: Effort = EFFORT,
        peak_gbps: float = float("inf"),
        progress: Progress = lambda line: None,
    ) -> None:
        """`readers` are those of `loaded`, one each."""
        self._loaded = loaded
        self._readers = readers
        self._timer = timer
        self._clock = clock
        self._opponent = opponent
        self._device = device
        self._effort = effort
        self._peak_gbps = peak_gbps
        self._progress = progress

    def run(self, shapes: Sequence[Shape], large: int) -> Result:
        """Measure the ceiling over a buffer of `large` bytes, and then every shape.

        Raises:
            SonataError: a result is wrong, or a figure is above the ceiling.
        """
        reads = [large_read(one, large, self._device, self._effort) for one in self._readers]
        ceiling = max(reads, key=lambda read: read.gbps)
        self._progress(f"read {large} bytes")
        records: list[dict[str, Any]] = []
        # mamba_ssm's function saves its inputs for a backward otherwise.
        with torch.no_grad():
            for shape in shapes:
                records += self._shape(shape)
                self._progress(f"measured {shape}")
                if self._device == "cuda":
                    torch.cuda.empty_cache()
        for record in records:
            require_below(record, ceiling.gbps)
            _add_floor(record, ceiling.gbps)
        return Result(records, ceiling, self._opponent and self._opponent.versions)

    def _shape(self, shape: Shape) -> list[dict[str, Any]]:
        count = timing.copies(shape.bytes, self._effort.rotation)
        sets = [ssd_operands.make(shape, self._device) for _ in range(count)]
        scans = [each.kernels.mamba_chunk_scan_combined for each in self._loaded]
        ours = [Pass(scan, sets) for scan in scans]
        bases: list[Pass] = []
        if shape.extras:
            plain = [ssd_operands.plain(one) for one in sets]
            bases = [Pass(scan, plain) for scan in scans]
        theirs: list[Pass] = []
        if self._opponent is not None:
            # It is held to what is fastest for this very shape.
            self._opponent.retune()
            self._opponent.scan(**sets[0])
            theirs = [Pass(self._opponent.scan, sets)]
        passes = [*ours, *bases, *theirs]
        times = self._timer([one.calls() for one in passes], self._effort, lambda: _poison(passes))
        for us in times:
            timing.require_possible(shape.plain.bytes, us, self._peak_gbps, shape.case)

        wanted = ssd_operands.wanted(sets[0])
        vias = [each.via for each in self._loaded]
        names = [*vias, *["triton" for _ in theirs]]
        errors = [
            one.errors(wanted, f"{shape.case} {name}")
            for one, name in zip([*ours, *theirs], names, strict=True)
        ]
        base_wanted = ssd_operands.wanted(ssd_operands.plain(sets[0])) if bases else ()
        for base, via in zip(bases, vias, strict=False):
            base.errors(base_wanted, f"{shape.plain.case} {via}")
        eager = self._eager([*scans, *([self._opponent.scan] if self._opponent else [])], sets[0])
        records = []
        for i, each in enumerate(self._loaded):
            record = {
                "case": shape.case,
                "opponent": None,
                "via": each.via,
                "ours_us": round(times[i], 3),
                "opponent_us": None,
                **_errors("", errors[i]),
                **_errors("opponent_", errors[-1] if theirs else (None, None)),
                **_host("", eager[i]),
                **_host("opponent_", eager[-1] if theirs else None),
                "bytes": shape.bytes,
                "copies": count,
                **self._binaries(each, sets[0]),
            }
            if bases:
                record["base_us"] = round(times[len(ours) + i], 3)
                record["extra_bytes"] = shape.bytes - shape.plain.bytes
            records += _against(record, shape, times[-1] if theirs else None)
        return records

    def _eager(self, scans: Sequence[Any], arguments: Arguments) -> list[Eager]:
        return self._clock([lambda scan=scan: scan(**arguments) for scan in scans])

    @staticmethod
    def _binaries(each: Loaded, arguments: Arguments) -> dict[str, Any]:
        found = each.kernels.mamba_chunk_scan_combined.binaries(**arguments)
        return {
            "launches": [f"{binary.kernel} {binary.variant_name}" for binary in found],
            "binaries": sorted({binary.payload(each.form).sha256 for binary in found}),
        }


def _poison(passes: Sequence[Pass]) -> None:
    for one in passes:
        one.poison()


def _errors(prefix: str, found: Sequence[float | None]) -> dict[str, float | None]:
    return dict(zip((f"{prefix}error", f"{prefix}states_error"), found, strict=True))


def _host(prefix: str, found: Eager | None) -> dict[str, float | None]:
    return {
        f"{prefix}eager_us": found and round(found.wall_us, 2),
        f"{prefix}host_us": found and round(found.host_us, 2),
    }


def _against(record: dict[str, Any], shape: Shape, triton_us: float | None) -> list[dict[str, Any]]:
    """The record against each opponent, or against none."""
    if triton_us is None:
        return [record]
    found = [{**record, "opponent": "triton", "opponent_us": round(triton_us, 3)}]
    estimate = fused_estimate_us(shape, triton_us)
    if estimate is not None:
        # Only its time is known.
        unknown = {name: None for name in record if name.startswith("opponent_")}
        named = {"opponent": "triton-fused-estimate", "opponent_us": round(estimate, 3)}
        found.append({**record, **unknown, **named})
    return found


def _add_floor(record: dict[str, Any], ceiling_gbps: float) -> None:
    """What moving all bytes takes, and what the extras may."""
    record["ceiling_gbps"] = round(ceiling_gbps, 1)
    record["floor_us"] = round(record["bytes"] / ceiling_gbps / 1e3, 3)
    if "base_us" in record:
        extra = record["extra_bytes"] / ceiling_gbps / 1e3
        record["allowed_us"] = round((record["base_us"] + extra) * (1 + EXTRA_TOLERANCE), 3)


def run(
    directory: Path,
    archs: Sequence[str],
    shapes: Sequence[Shape],
    progress: Progress,
    *,
    alone: bool = False,
) -> Result:
    """Measure shapes on the GPU at hand; without mamba_ssm, or `alone`, only our own times.

    Raises:
        SonataError: no torch, no GPU, no kernel; or as `Bench.run`.
    """
    machine = gpu.machine()
    loaded = gpu.load(directory, archs, KERNELS)
    opponent = None if alone else find_opponent(progress)
    sink = torch.zeros(1, dtype=torch.int32, device="cuda")
    readers = [reader(each, machine, sink) for each in loaded]
    free, _ = torch.cuda.mem_get_info()
    bench = Bench(
        loaded,
        readers,
        timing.replayed,
        ssd_host.eager,
        opponent,
        peak_gbps=machine.peak_gbps,
        progress=progress,
    )
    return bench.run(list(dict.fromkeys(shapes)), min(LARGE, free // 2))


def find_opponent(progress: Progress) -> Opponent | None:
    """mamba_ssm's kernels; where they are missing, says so and how to get them."""
    try:
        return mamba_opponent.load()
    except MissingDependency as missing:
        progress(f"without an opponent: {missing}")
        return None
