"""The picture and the table of speed-ups in README.md, from results files.

The picture is written as text, so that the same results give the same bytes everywhere.
"""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

from sonata_aot.aot.measure.render import LARGE_BYTES, parts, ratio
from sonata_aot.aot.measure.ssd_render import rows

Results = dict[str, Any]
# Of the codes that were measured, in order.
_COLOURS = ("#2a6f97", "#e09f3e", "#9e2a2b", "#5b8e7d")
_FORMS = {"cubin": "machine code for {}", "ptx": "{} code, through its PTX"}
_WIDTH, _LEFT, _RIGHT = 860, 250, 60
_BAR, _GAP, _PANEL = 13, 9, 46
_PLOT = _WIDTH - _LEFT - _RIGHT


@dataclass(frozen=True)
class Panel:
    """Bars under one title: for each label, how many times as long the opponent takes, by code."""

    title: str
    bars: dict[str, dict[str, float]]

    def of(self, via: str) -> list[float]:
        """The ratios of one code."""
        return [ratios[via] for ratios in self.bars.values() if via in ratios]


def read(folder: Path, bench: str) -> Results:
    """The results of one benchmark."""
    return json.loads((folder / f"{bench}.json").read_text(encoding="utf-8"))


def means(results: Results) -> dict[str, dict[str, float]]:
    """By rows of x: geometric means over the shapes whose weights are large."""
    found: dict[str, dict[str, list[float]]] = {}
    for record in results["records"]:
        if record["bytes"] >= LARGE_BYTES:
            of_rows = found.setdefault(f"M = {parts(record)['M']}", {})
            of_rows.setdefault(record["via"], []).append(ratio(record))
    return {
        name: {via: statistics.geometric_mean(ratios) for via, ratios in by_code.items()}
        for name, by_code in found.items()
    }


def scans(results: Results) -> dict[str, dict[str, float]]:
    """By shape: the better opponent's time over ours."""
    found: dict[str, dict[str, float]] = {}
    for row in rows(results["records"]):
        if "base_us" not in row.record and row.ratio is not None:
            found.setdefault(row.name, {})[row.record["via"]] = row.ratio
    return found


def steps(chain: Results, step: Results) -> dict[str, dict[str, float]]:
    """What a whole step gains."""
    launches = parts(chain["records"][0])["launches"]
    named = {f"{launches} dependent GEMVs": chain, "decode step of a hybrid model": step}
    return {
        name: {record["via"]: ratio(record) for record in results["records"]}
        for name, results in named.items()
    }


def panels(folder: Path) -> list[Panel]:
    """What the picture has.

    Raises:
        FileNotFoundError: one of the benchmarks has not been run on this GPU.
    """
    return [
        Panel(
            "GEMV: cuBLAS's time over ours, mean of weights from 16 MB on",
            means(read(folder, "gemv")),
        ),
        Panel(
            "SSD scan, batch x tokens: the better Triton kernel's time over ours",
            scans(read(folder, "ssd")),
        ),
        Panel(
            "Steps in one CUDA graph: time with cuBLAS over ours",
            steps(read(folder, "gemv_chain"), read(folder, "decode_step")),
        ),
    ]


def codes(drawn: list[Panel]) -> list[str]:
    """What was measured, such as `sm86-ptx`, in order."""
    return list(dict.fromkeys(via for p in drawn for ratios in p.bars.values() for via in ratios))


def picture(folder: Path) -> str:
    """The panels as an SVG."""
    drawn, gpu = panels(folder), read(folder, "gemv")["machine"]["gpu"]
    colours = dict(zip(codes(drawn), _COLOURS, strict=False))
    most = math.ceil(max(value for panel in drawn for via in colours for value in panel.of(via)))
    lines = [
        *_text(_LEFT, 24, f"How many times as fast, on one {gpu}", "bold 15px"),
        *_legend(colours),
    ]
    top = 66
    for panel in drawn:
        lines += _text(_LEFT, top, panel.title, "bold 12px")
        bottom = top + 12 + len(panel.bars) * (_BAR * len(colours) + _GAP)
        lines += [*_grid(top + 8, bottom, most), *_bars(panel, top + 12, most, colours)]
        top = bottom + _PANEL - _GAP
    height = top - 20
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}" '
            f'width="{_WIDTH}" height="{height}" role="img" font-family="sans-serif">',
            f"<title>{escape(f'Speed-ups on one {gpu}', quote=False)}</title>",
            # A ground of its own, for readers with a dark page.
            f'<rect width="{_WIDTH}" height="{height}" fill="#ffffff"/>',
            *lines,
            "</svg>",
            "",
        ]
    )


def _text(x: float, y: float, text: str, font: str, anchor: str = "start") -> list[str]:
    weight, _, size = font.rpartition(" ")
    bold = ' font-weight="bold"' if weight else ""
    return [
        f'<text x="{x:g}" y="{y:g}" font-size="{size}"{bold} text-anchor="{anchor}" '
        f'fill="#1b1b1b">{escape(text, quote=False)}</text>'
    ]


def _legend(colours: Mapping[str, str]) -> Iterator[str]:
    x = _LEFT
    for via, colour in colours.items():
        arch, _, form = via.partition("-")
        yield f'<rect x="{x}" y="34" width="12" height="12" fill="{colour}"/>'
        yield from _text(x + 17, 44, _FORMS[form].format(arch), "12px")
        x += 230


def _x(value: float, most: int) -> float:
    return round(_LEFT + _PLOT * value / most, 1)


def _grid(top: int, bottom: int, most: int) -> Iterator[str]:
    for value in range(most + 1):
        x = _x(value, most)
        # What no gain at all would be stands out.
        colour, width = ("#1b1b1b", 1.5) if value == 1 else ("#d0d0d0", 1)
        yield (
            f'<line x1="{x:g}" y1="{top}" x2="{x:g}" y2="{bottom}" stroke="{colour}" '
            f'stroke-width="{width:g}"/>'
        )
        yield from _text(x, bottom + 13, f"{value}x", "11px", "middle")


def _bars(panel: Panel, top: int, most: int, colours: Mapping[str, str]) -> Iterator[str]:
    for label, ratios in panel.bars.items():
        yield from _text(_LEFT - 8, top + _BAR * len(colours) / 2 + 4, label, "12px", "end")
        for index, (via, colour) in enumerate(colours.items()):
            if via not in ratios:
                continue
            y, end = top + index * _BAR, _x(ratios[via], most)
            yield (
                f'<rect x="{_LEFT}" y="{y}" width="{end - _LEFT:g}" height="{_BAR - 1}" '
                f'fill="{colour}"/>'
            )
            yield from _text(end + 4, y + _BAR - 3, f"{ratios[via]:.2f}x", "10px")
        top += _BAR * len(colours) + _GAP


def summary_table(folder: Path) -> list[str]:
    """The main figures of every benchmark, a column for each code."""
    gemv, scan, step = drawn = panels(folder)
    columns = codes(drawn)
    table = [
        f"How many times as long the other takes, on one {read(folder, 'gemv')['machine']['gpu']}:",
        "",
        f"| | beside | {' | '.join(columns)} |",
        "|---|---|" + "---|" * len(columns),
    ]
    for name, ratios in gemv.bars.items():
        cells = [_times(ratios.get(via)) for via in columns]
        table.append(_row(f"GEMV, {name}, mean of weights from 16 MB on", "cuBLAS", cells))
    spread = [scan.of(via) for via in columns]
    cells = [f"{_times(min(each))} to {_times(max(each))}" if each else "-" for each in spread]
    table.append(_row(f"SSD scan, {len(scan.bars)} shapes", "the better Triton kernel", cells))
    for name, ratios in step.bars.items():
        table.append(_row(name, "cuBLAS", [_times(ratios.get(via)) for via in columns]))
    return table


def _times(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}x"


def _row(name: str, beside: str, cells: list[str]) -> str:
    return f"| {name} | {beside} | {' | '.join(cells)} |"
