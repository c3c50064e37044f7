"""Results of `bench ssd` for people: tables, and a picture. Needs no GPU."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .render import check_picture, matplotlib_module, parts, save
from .ssd_shapes import BARS, EXTRA_TOLERANCE, EXTRAS

TRITON, FUSED = "triton", "triton-fused-estimate"
_USUAL = {"h": "64", "p": "64", "n": "128", "g": "1"}
_LONG = {"h": "heads", "p": "headdim", "n": "dstate", "g": "groups"}
_BAR_CASES = tuple(shape.case for shape in BARS)


@dataclass
class Row:
    """One case of one architecture's code, against all of its opponents."""

    record: dict[str, Any]
    opponents: dict[str, float] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """`2x2048 heads=24 z=1`."""
        case = parts(self.record)
        more = [f"{_LONG[k]}={case[k]}" for k, usual in _USUAL.items() if case[k] != usual]
        more += [f"{k}={case[k]}" for k in ("chunk", *EXTRAS) if k in case]
        return " ".join([f"{case['b']}x{case['l']}", *more])

    @property
    def is_bar(self) -> bool:
        """Whether the case is one of those that have to be won."""
        return self.record["case"] in _BAR_CASES

    @property
    def best(self) -> float | None:
        """Microseconds of the better opponent."""
        return min(self.opponents.values(), default=None)

    @property
    def ratio(self) -> float | None:
        """How many times as long the better opponent takes."""
        return None if self.best is None else self.best / self.record["ours_us"]

    @property
    def eager_ratio(self) -> float | None:
        """How many times as long an eager call of mamba_ssm's takes."""
        theirs = self.record["opponent_eager_us"]
        return None if theirs is None else theirs / self.record["eager_us"]

    @property
    def is_exact(self) -> bool:
        """Whether no error is larger than the opponent's; so if there is none."""
        return all(
            self.record[f"opponent_{name}"] is None
            or self.record[name] <= self.record[f"opponent_{name}"]
            for name in ("error", "states_error")
        )


def rows(records: Iterable[dict[str, Any]]) -> list[Row]:
    """Records of one case and code are one row; its record is that against mamba_ssm's kernels."""
    found: dict[tuple[str, str], Row] = {}
    for record in records:
        row = found.setdefault((record["case"], record["via"]), Row(record))
        if record["opponent"] is not None:
            row.opponents[record["opponent"]] = record["opponent_us"]
        if record["opponent"] == TRITON:
            row.record = record
    return list(found.values())


def _columns(table: Sequence[Sequence[str]], left: int) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    return [
        "  ".join(
            cell.ljust(width) if index < left else cell.rjust(width)
            for index, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in table
    ]


def number(value: float | None, form: str = ".1f", unit: str = "") -> str:
    """A figure, or a dash."""
    return "-" if value is None else f"{value:{form}}{unit}"


_TIMES = ("case", "code", "ours us", "Triton us", "fused us*", "ratio", "floor us", "of floor")
_HOST = (
    *("case", "code", "eager us", "Triton", "ratio", "host us", "Triton"),
    *("out error", "Triton", "states error", "Triton"),
)


def table(data: dict[str, Any]) -> str:
    """GPU times, host times and errors of every case, and what the bars ask."""
    found = rows(data["records"])
    lines = _columns([_TIMES, *map(_times, found)], 2)
    lines += ["", *_columns([_HOST, *map(_host, found)], 2), ""]
    for via in dict.fromkeys(row.record["via"] for row in found):
        lines += _summary(via, [row for row in found if row.record["via"] == via])
    for row in found:
        lines += _extra(row)
    read, gpu = data["ceiling"], data["machine"]
    lines += [
        "us: a call in a CUDA graph; ratio: over the better opponent; floor: all inputs and "
        f"outputs once at {read['gbps']:.0f} GB/s, the best read",
        "* the published fused Triton kernel: Triton's time here times their ratio elsewhere",
    ]
    if data["opponent"] is None:
        lines.append(
            "mamba_ssm was not measured: see `python -m sonata_aot.aot.measure.mamba_opponent`"
        )
    else:
        lines.append(", ".join(f"{name} {found}" for name, found in data["opponent"].items()))
    lines.append(
        f"{gpu['gpu']}, {gpu['multiprocessors']} SMs, torch {gpu['torch']}, {data['date']}"
    )
    return "\n".join(lines)


def _times(row: Row) -> tuple[str, ...]:
    record = row.record
    return (
        row.name,
        record["via"],
        number(record["ours_us"]),
        number(row.opponents.get(TRITON)),
        number(row.opponents.get(FUSED)),
        number(row.ratio, ".2f", "x"),
        number(record["floor_us"]),
        number(record["ours_us"] / record["floor_us"], ".2f", "x"),
    )


def _host(row: Row) -> tuple[str, ...]:
    record = row.record
    return (
        row.name,
        record["via"],
        number(record["eager_us"]),
        number(record["opponent_eager_us"]),
        number(row.eager_ratio, ".1f", "x"),
        number(record["host_us"]),
        number(record["opponent_host_us"]),
        number(record["error"], ".2e"),
        number(record["opponent_error"], ".2e"),
        number(record["states_error"], ".2e"),
        number(record["opponent_states_error"], ".2e"),
    )


def _summary(via: str, found: Sequence[Row]) -> Iterable[str]:
    compared = [(row.ratio, row.name) for row in found if row.is_bar and row.ratio is not None]
    if compared:
        least, where = min(compared)
        mean = statistics.geometric_mean(ratio for ratio, _ in compared)
        yield (
            f"{via}: {least:.2f}x at least ({where}), {mean:.2f}x in the geometric mean of "
            f"{len(compared)} shapes"
        )
    inexact = [row.name for row in found if not row.is_exact]
    if inexact:
        yield f"{via}: errors above Triton's: {', '.join(inexact)}"
    elif any(row.opponents for row in found):
        yield f"{via}: no error is above Triton's"


def _extra(row: Row) -> Iterable[str]:
    record = row.record
    if "base_us" in record:
        verdict = "within" if record["ours_us"] <= record["allowed_us"] else "ABOVE"
        extra = record["extra_bytes"] / record["ceiling_gbps"] / 1e3
        yield (
            f"{row.name} {record['via']}: {record['ours_us']:.1f} us, without "
            f"{record['base_us']:.1f}; its bytes take {extra:.1f}; {verdict} "
            f"{record['allowed_us']:.1f}, which is both and {EXTRA_TOLERANCE:.0%}"
        )


def first_call_table(data: dict[str, Any]) -> str:
    """Milliseconds from nothing loaded to the first result."""
    head = ("code", "driver's cache", "import ms", "load ms", "first ms", "both ms", "Triton ms")
    lines = [
        (
            record["via"],
            parts(record).get("cache", "not needed"),
            *(number(record[name]) for name in ("import_ms", "load_ms", "first_scan_ms")),
            number(record["ours_us"] / 1e3),
            number(record["opponent_us"] and record["opponent_us"] / 1e3),
        )
        for record in data["records"]
    ]
    gpu = data["machine"]
    return "\n".join(
        [
            *_columns([head, *lines], 2),
            "both: load() and the first call, synchronised; Triton: its first call, nothing cached",
            f"{gpu['gpu']}, torch {gpu['torch']}, {data['date']}",
        ]
    )


_OURS, _THEIRS, _FUSED, _FLOOR = "#1f5fa8", "#d9731a", "#8a5aa8", "black"


def draw(data: dict[str, Any], path: Path) -> None:
    """Time against length, a panel for each code: a line for batch 2, marks for other batches.

    Raises:
        StoreError: the file cannot be written.
    """
    check_picture(path)
    figures = matplotlib_module("matplotlib.figure")
    found = rows(data["records"])
    # Others are of other heads; if nothing else was measured, they are drawn all the same.
    found = [row for row in found if row.is_bar] or found
    vias = list(dict.fromkeys(row.record["via"] for row in found))
    figure = figures.Figure(figsize=(6.5 * len(vias), 5.2), layout="constrained")
    axes = figure.subplots(1, len(vias), squeeze=False, sharex=True, sharey=True).flatten()
    for axis, via in zip(axes, vias, strict=True):
        _panel(axis, via, [row for row in found if row.record["via"] == via])
    axes[0].set_ylabel("microseconds a call, in a CUDA graph")
    axes[0].legend(frameon=False, fontsize=9)
    gpu = data["machine"]
    figure.suptitle(
        f"mamba_chunk_scan_combined on one {gpu['gpu']} (torch {gpu['torch']}, {data['date']})",
        fontsize=12,
    )
    save(figure, path)


def _panel(axis: Any, via: str, found: Sequence[Row]) -> None:
    gbps = found[0].record["ceiling_gbps"]
    series = (
        ("Triton (mamba_ssm)", _THEIRS, "s", lambda row: row.opponents.get(TRITON)),
        ("fused Triton, estimate", _FUSED, "^", lambda row: row.opponents.get(FUSED)),
        ("sonata-aot", _OURS, "o", lambda row: row.record["ours_us"]),
        (f"memory floor at {gbps:.0f} GB/s", _FLOOR, "_", lambda row: row.record["floor_us"]),
    )
    batches = [parts(row.record)["b"] for row in found]
    usual = statistics.mode(batches)
    for label, colour, marker, value in series:
        points = [
            (batch, int(parts(row.record)["l"]), us)
            for batch, row in zip(batches, found, strict=True)
            if (us := value(row)) is not None
        ]
        line = sorted((length, us) for batch, length, us in points if batch == usual)
        others = [(length, us) for batch, length, us in points if batch != usual]
        if line:
            axis.plot(*zip(*line, strict=True), marker=marker, ms=5, color=colour, label=label)
        if others:
            style = {"linestyle": "none", "mfc": "white", "color": colour}
            axis.plot(*zip(*others, strict=True), marker=marker, ms=7, **style)
    for batch, row in zip(batches, found, strict=True):
        if batch != usual:
            top = max(row.record["ours_us"], *row.opponents.values(), 0)
            place = (int(parts(row.record)["l"]), top)
            axis.annotate(
                f"batch {batch}",
                place,
                xytext=(0, 7),
                textcoords="offset points",
                ha="center",
                fontsize=8,
            )
    axis.set_xscale("log", base=2)
    axis.set_yscale("log")
    lengths = sorted({int(parts(row.record)["l"]) for row in found})
    axis.set_xticks(lengths, [str(length) for length in lengths], rotation=45, fontsize=8)
    axis.minorticks_off()
    axis.set_title(f"{via}, batch {usual}", fontsize=10, loc="left")
    axis.set_xlabel("tokens of a sequence")
    axis.grid(alpha=0.25)
    for side in ("top", "right"):
        axis.spines[side].set_visible(False)
