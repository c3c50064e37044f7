"""Benchmark results for people: a table, and a picture. Needs no GPU."""

from __future__ import annotations

import importlib
import io
import math
import statistics
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from ...artifacts.errors import MissingDependency, UsageError
from .. import result_files

PICTURES = (".png", ".svg", ".pdf")
# Shapes below this do not enter a mean: their time is that of a launch.
LARGE_BYTES = 16_000_000
_COLUMNS = (
    *("case", "code", "ours us", "cuBLAS us", "ratio", "GB/s", "cuBLAS GB/s"),
    *("of ceiling", "of read", "error", "cuBLAS error"),
)


def gbps(record: dict[str, Any], who: str) -> float:
    """GB/s of weights: `who` is ours, opponent or read."""
    return record["bytes"] / record[f"{who}_us"] / 1e3


def ratio(record: dict[str, Any]) -> float:
    """How many times as long cuBLAS takes."""
    return record["opponent_us"] / record["ours_us"]


def table(data: dict[str, Any]) -> str:
    """Every case on a line, and the geometric means over the larger shapes."""
    rows = [_row(record) for record in data["records"]]
    widths = [max(map(len, column)) for column in zip(_COLUMNS, *rows, strict=True)]
    lines = [
        "  ".join(
            cell.ljust(width) if index < 2 else cell.rjust(width)
            for index, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in (_COLUMNS, *rows)
    ]
    lines += ["", *_means(data["records"]), *_ceilings(data)]
    return "\n".join(lines)


def _row(record: dict[str, Any]) -> tuple[str, ...]:
    return (
        record["case"],
        f"{record['via']} {record['mode']}",
        f"{record['ours_us']:.2f}",
        f"{record['opponent_us']:.2f}",
        f"{ratio(record):.2f}x",
        f"{gbps(record, 'ours'):.0f}",
        f"{gbps(record, 'opponent'):.0f}",
        f"{gbps(record, 'ours') / record['ceiling_gbps']:.1%}",
        f"{record['read_us'] / record['ours_us']:.1%}",
        f"{record['error']:.2e}",
        f"{record['opponent_error']:.2e}",
    )


def parts(record: dict[str, Any]) -> dict[str, str]:
    """The case's parts by name: M, N, K, dtype of a GEMV."""
    return dict(part.split("=") for part in record["case"].split())


def _means(records: Sequence[dict[str, Any]]) -> Iterable[str]:
    groups: dict[tuple[str, str, str], list[float]] = {}
    for record in records:
        if record["bytes"] >= LARGE_BYTES:
            case = parts(record)
            key = (record["via"], case["dtype"], case["M"])
            groups.setdefault(key, []).append(ratio(record))
    for (via, dtype, m), ratios in groups.items():
        mean = statistics.geometric_mean(ratios)
        shapes = f"{len(ratios)} shapes" if len(ratios) > 1 else "1 shape"
        yield f"{via} {dtype} M={m}: {mean:.2f}x, geometric mean of {shapes} from 16 MB on"


def _ceilings(data: dict[str, Any]) -> Iterable[str]:
    for name, key in (("best read", "ceiling"), ("read of a large buffer", "large_buffer")):
        read = data[key]
        style = "programmatic" if read["programmatic"] else "plain"
        yield (
            f"{name}: {read['gbps']:.0f} GB/s ({read['bytes'] / 1e6:.1f} MB a launch, {style}, "
            f"{read['blocks']} blocks of {read['warps']} warps, {read['unroll']} loads under way)"
        )
    yield "of ceiling: of the best read; of read: of a read of as many bytes, launched likewise"
    gpu = data["machine"]
    yield f"{gpu['gpu']}, {gpu['multiprocessors']} SMs, torch {gpu['torch']}, {data['date']}"


def check_picture(path: Path) -> None:
    """Require that a picture of this name can be drawn, before anything is measured.

    Raises:
        UsageError: a format that is not offered.
        MissingDependency: matplotlib is not installed, or does not work.
    """
    if path.suffix.lower() not in PICTURES:
        raise UsageError(f"picture {str(path)!r}", remedy=f"end its name in {' '.join(PICTURES)}")
    matplotlib_module("matplotlib.figure")


def save(figure: Any, path: Path) -> None:
    """Write a picture.

    Raises:
        StoreError: the file cannot be written.
    """
    drawn = io.BytesIO()
    figure.savefig(drawn, format=path.suffix[1:].lower(), dpi=150)
    result_files.write(path, drawn.getvalue())


def matplotlib_module(name: str) -> Any:
    """One of matplotlib's modules, which only a picture needs.

    Raises:
        MissingDependency: matplotlib is not installed, or does not work.
    """
    try:
        return importlib.import_module(name)
    except ImportError as error:
        missing = isinstance(error, ModuleNotFoundError) and error.name == "matplotlib"
        what = "is not installed" if missing else f"cannot be imported: {error}"
        raise MissingDependency(
            f"a picture needs matplotlib, which {what}",
            remedy="install it with `pip install 'sonata-aot[bench]'`, or leave out --picture",
        ) from None


_OURS, _THEIRS, _READ = "#1f5fa8", "#d9731a", "#8a8a8a"


def draw(data: dict[str, Any], path: Path) -> None:
    """A roofline: GB/s over MB of weights, a panel for each number of rows, a mark for each shape.

    Raises:
        StoreError: the file cannot be written.
    """
    check_picture(path)
    figures = matplotlib_module("matplotlib.figure")
    panels: dict[tuple[str, str, str], list[dict[str, Any]]] = {}
    for record in data["records"]:
        case = parts(record)
        panels.setdefault((record["via"], case["dtype"], case["M"]), []).append(record)
    columns = 1 if len(panels) == 1 else 2
    rows = -(-len(panels) // columns)
    figure = figures.Figure(figsize=(7 * columns, 4.8 * rows + 1), layout="constrained")
    axes = figure.subplots(rows, columns, squeeze=False, sharex=True, sharey=True).flatten()
    ceiling = data["ceiling"]["gbps"]
    for index, (axis, (title, records)) in enumerate(zip(axes, panels.items(), strict=False)):
        _panel(axis, " ".join(title[:2]) + f" M={title[2]}", records, ceiling)
        if index % columns == 0:
            axis.set_ylabel("GB/s of weights")
        if index == 0:
            axis.legend(loc="center right", frameon=False, fontsize=9)
    for axis in axes[len(panels) :]:
        axis.set_visible(False)
    gpu = data["machine"]
    figure.suptitle(
        f"Skinny GEMV, y = x W^T, on one {gpu['gpu']} (torch {gpu['torch']}, {data['date']})",
        fontsize=12,
    )
    save(figure, path)


def _panel(axis: Any, title: str, records: Sequence[dict[str, Any]], ceiling: float) -> None:
    megabytes = [record["bytes"] / 1e6 for record in records]
    axis.axhline(ceiling, color="black", linewidth=1)
    axis.annotate(
        f"measured read ceiling {ceiling:.0f} GB/s",
        (0.01, ceiling),
        xycoords=("axes fraction", "data"),
        xytext=(0, 3),
        textcoords="offset points",
        fontsize=8,
    )
    for record, x in zip(records, megabytes, strict=True):
        ends = [gbps(record, "opponent"), gbps(record, "ours")]
        axis.plot([x, x], ends, color="#d0d0d0", linewidth=1, zorder=1)
    style = {"linestyle": "none", "zorder": 3}
    reads = [gbps(record, "read") for record in records]
    axis.plot(megabytes, reads, marker="_", ms=14, color=_READ, label="read alone", **style)
    theirs = [gbps(record, "opponent") for record in records]
    axis.plot(megabytes, theirs, marker="s", mfc="white", color=_THEIRS, label="cuBLAS", **style)
    ours = [gbps(record, "ours") for record in records]
    axis.plot(megabytes, ours, marker="o", color=_OURS, label="sonata-aot", **style)
    axis.set_xscale("log")
    axis.set_ylim(0, ceiling * 1.08)
    axis.set_title(title, fontsize=10, loc="left")
    axis.set_xlabel("weight, N x K, and its MB")
    places, names = zip(*_neighbours(records), strict=True)
    axis.set_xticks(places, ["\n".join(lines) for lines in names], rotation=90, fontsize=7)
    axis.minorticks_off()
    axis.label_outer()
    axis.grid(alpha=0.25)
    for side in ("top", "right"):
        axis.spines[side].set_visible(False)


def _neighbours(records: Sequence[dict[str, Any]]) -> Iterable[tuple[float, list[str]]]:
    """Shapes of about one size share a label, so that labels do not overlap."""
    groups: list[tuple[list[float], list[str]]] = []
    for record in sorted(records, key=lambda record: record["bytes"]):
        case, size = parts(record), record["bytes"] / 1e6
        if not groups or size > 1.15 * groups[-1][0][0]:
            groups.append(([], []))
        groups[-1][0].append(size)
        groups[-1][1].append(f"{case['N']}x{case['K']}  {size:.1f}")
    for sizes, names in groups:
        yield math.sqrt(sizes[0] * sizes[-1]), names
