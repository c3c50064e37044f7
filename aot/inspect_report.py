"""How `sonata-aot inspect` shows what was read off machine code."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import click

from ..artifacts.manifest import Binary
from ..artifacts.schema import encode
from .budget import Breach
from .inspect import CLASSES, Figures, Prediction
from .machine import WARP
from .report import plural, table
from .tiles import Tile

Inspected = tuple[Binary, Figures, list[Breach]]

_CLASS_NAMES = {name: name.replace("_", " ") for name in CLASSES}
_RESOURCE_NAMES = {"dram": "DRAM", "in_flight": "bytes in flight", "shared": "shared memory"}
# As heads of a column: the mix in one cell, in the order of CLASSES.
_MIX = "load/shared/tensor/fma/int/control/other"


def data(inspected: Iterable[Inspected]) -> list[dict[str, Any]]:
    """As JSON data; rates are in bytes a second, all sizes in bytes."""
    return [
        {
            "kernel": binary.kernel,
            "variant": binary.variant,
            "arch": binary.arch,
            **encode(figures),
            "breaches": [encode(breach) for breach in breaches],
        }
        for binary, figures, breaches in inspected
    ]


def tables(inspected: Iterable[Inspected]) -> str:
    """A table for each kernel and architecture, a line a binary."""
    groups = itertools.groupby(inspected, lambda item: (item[0].kernel, item[0].arch))
    return "\n\n".join(_table(kernel, arch, list(group)) for (kernel, arch), group in groups)


def _table(kernel: str, arch: str, inspected: Sequence[Inspected]) -> str:
    choices = tuple(inspected[0][0].variant)
    gpu = inspected[0][1].gpu
    columns = ("registers", "warps", "limit", "in flight", "loop", _MIX, "slots/B", "bound", "next")
    rows = [
        (*(str(value) for value in binary.variant.values()), *_cells(figures))
        for binary, figures, _ in inspected
    ]
    title = f"{kernel} {arch}" + (f", bound on an {gpu}" if gpu else "")
    return f"{click.style(title, bold=True)}\n{table((*choices, *columns), rows)}"


def _cells(figures: Figures) -> tuple[object, ...]:
    code, held, loop = figures.code, figures.occupancy, figures.code.loop
    predicted = figures.prediction
    return (
        figures.registers,
        f"{held.warps}/{held.most_warps}",
        held.limit,
        "-" if code.in_flight_bytes is None else f"{code.in_flight_bytes} B",
        "-" if loop is None else loop.instructions,
        "-" if loop is None else "/".join(str(loop.mix[name]) for name in CLASSES),
        "-" if loop is None or loop.issue_slots_per_byte is None else _slots(loop),
        "-" if predicted is None else _resource(predicted.bound),
        "-" if predicted is None else _next(predicted),
    )


def _slots(loop: Any) -> str:
    return f"{loop.issue_slots_per_byte:.3f}"


def _resource(name: str) -> str:
    return _RESOURCE_NAMES.get(name, name)


def _others(predicted: Prediction) -> list[tuple[str, float]]:
    """What does not bound, the closest first, as times the bound."""
    least = predicted.rates[predicted.bound]
    rates = [(name, rate / least) for name, rate in predicted.rates.items()]
    return sorted((item for item in rates if item[0] != predicted.bound), key=lambda item: item[1])


def _next(predicted: Prediction) -> str:
    name, times = _others(predicted)[0]
    return f"{_resource(name)} at {times:.1f}x"


def block(binary: Binary, figures: Figures, breaches: Sequence[Breach]) -> str:
    """All that is known of one binary."""
    code, held = figures.code, figures.occupancy
    shared = figures.shared_bytes + figures.static_shared_bytes
    lines = [
        (
            "resources",
            f"{figures.registers} registers, {plural(figures.spills, 'spill', 'spills')}, "
            f"{figures.stack_bytes} B of stack, {shared} B of shared memory",
        ),
        (
            "occupancy",
            f"{held.warps} of {held.most_warps} warps a multiprocessor "
            f"({plural(held.blocks, 'block', 'blocks')}), limited by {held.limit}",
        ),
        ("streamed", _streamed(figures)),
        ("other loads", _loads(code.other_loads)),
        ("main loop", _loop(figures)),
        *([("a tile", _tile(figures.tile, figures.prediction))] if figures.tile else []),
        ("whole code", f"{code.instructions} instructions: {_mix(code.mix)}"),
        (figures.gpu or "prediction", _prediction(figures)),
        *(("BUDGET", f"{breach.problem}; {breach.remedy}") for breach in breaches),
    ]
    head = click.style(binary.label, bold=True)
    return "\n".join([head, *(f"  {name:<12}{text}" for name, text in lines)])


def _loads(widths: Mapping[int, int]) -> str:
    return ", ".join(f"{count} x {width} B" for width, count in widths.items()) or "none"


def _streamed(figures: Figures) -> str:
    under_way = figures.code.in_flight_bytes
    if under_way is None:
        return "no load is marked no-allocate"
    held = under_way * WARP * figures.occupancy.warps
    return (
        f"{_loads(figures.code.streamed_loads)}; before the first use {under_way} B a thread, "
        f"{held / 1024:.0f} KB a multiprocessor"
    )


def _loop(figures: Figures) -> str:
    loop = figures.code.loop
    if loop is None:
        return "none"
    text = f"{loop.instructions} instructions: {_mix(loop.mix)}"
    if loop.issue_slots_per_byte is None:
        return text
    return (
        f"{text}; {loop.streamed_bytes} B streamed a thread and trip, "
        f"{_slots(loop)} issue slots a byte"
    )


def _tile(tile: Tile, predicted: Prediction | None) -> str:
    least, most = tile.least, tile.most
    text = (
        f"{least.matrix_fmas} to {most.matrix_fmas} multiply-adds, "
        f"{least.instructions} to {most.instructions} instructions, "
        f"{least.shared_bytes / 1024:.0f} to {most.shared_bytes / 1024:.0f} KB through shared "
        f"memory, {least.global_bytes / 1024:.0f} to {most.global_bytes / 1024:.0f} KB of global "
        f"memory, {tile.dram_bytes / 1024:.0f} KB of DRAM, "
        f"in {plural(tile.loops, 'loop', 'loops')}"
    )
    if predicted is None or predicted.tile_seconds is None:
        return text
    times = sorted(predicted.tile_seconds.items(), key=lambda item: -item[1])
    return text + "; at least " + ", ".join(f"{_resource(n)} {t * 1e6:.2f} us" for n, t in times)


def _mix(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{count} {_CLASS_NAMES[name]}" for name, count in counts.items() if count)


def _prediction(figures: Figures) -> str:
    predicted = figures.prediction
    if predicted is None:
        if figures.gpu is None:
            return "no GPU stands for this architecture"
        loop = figures.code.loop
        if loop is None or not loop.streamed_bytes:
            return "none: no loop with streamed loads"
        return "none: how fast its matrix instructions are is not known here"
    others = ", ".join(
        f"{_resource(name)} would allow {predicted.rates[name] / 1e9:.0f} ({times:.1f}x)"
        for name, times in _others(predicted)
    )
    rate = predicted.rates[predicted.bound] / 1e9
    return f"{_resource(predicted.bound)} is the bound, at {rate:.0f} GB/s; {others}"


def verdict(binary: Binary, figures: Figures, breaches: Sequence[Breach]) -> str:
    """What a check says of one binary: a line, or one a breach."""
    if breaches:
        return "\n".join(
            f"FAIL  {binary.label}: {breach.problem}; {breach.remedy}" for breach in breaches
        )
    predicted = figures.prediction
    if predicted is None:
        return f"ok    {binary.label}: no prediction"
    bound = f"{_resource(predicted.bound)} is the bound on an {figures.gpu}"
    return f"ok    {binary.label}: {bound}, then {_next(predicted)}"
