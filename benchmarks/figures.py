"""Writes tables of README.md and docs/ from the results files: no figure is typed by hand.

`python -m benchmarks.figures` rewrites the parts between the markers and the picture of each GPU,
`docs/speedups-<gpu>.svg`; `--check` fails if that would change anything.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import statistics
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from sonata_aot.aot.measure.render import LARGE_BYTES, parts, ratio

from . import host_figures, speedups, ssd_figures
from .results import RESULTS, ROOT

# From here on a GEMV can be held against reading alone.
LONG_BYTES = 64_000_000
_Groups = dict[str, list[dict[str, Any]]]

_BEGIN = "<!-- figures: begin (python -m benchmarks.figures) -->"
_END = "<!-- figures: end -->"


def _load(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text(encoding="utf-8"))


def gemv_table(results: dict[str, Any]) -> list[str]:
    """For each architecture's code, times by shape and rows of x, with cuBLAS's time over ours."""
    machine, ceiling = results["machine"], results["ceiling"]["gbps"]
    lines = []
    for via, records in _by(results["records"], lambda record: record["via"]).items():
        counts = sorted({parts(record)["M"] for record in records}, key=int)
        lines += [
            f"GEMV in bf16 with constant weights, {via}, on one {machine['gpu']}, torch "
            f"{machine['torch']}, read ceiling {ceiling:.0f} GB/s:",
            "",
            "| N x K | " + " | ".join(f"M = {m}" for m in counts) + " |",
            "|---|" + "---|" * len(counts),
        ]
        shapes = _by(records, lambda record: f"{parts(record)['N']} x {parts(record)['K']}")
        for shape, of_shape in shapes.items():
            cells = {parts(record)["M"]: _cell(record) for record in of_shape}
            lines.append(f"| {shape} | " + " | ".join(cells[m] for m in counts) + " |")
        large = [record for record in records if record["bytes"] >= LARGE_BYTES]
        means = [
            statistics.geometric_mean(ratio(r) for r in large if parts(r)["M"] == m) for m in counts
        ]
        lines += ["| mean from 16 MB on | " + " | ".join(f"{m:.2f}x" for m in means) + " |", ""]
    return lines[:-1]


def _by(records: list[dict[str, Any]], key: Callable[[dict[str, Any]], str]) -> _Groups:
    groups: _Groups = {}
    for record in records:
        groups.setdefault(key(record), []).append(record)
    return groups


def _cell(record: dict[str, Any]) -> str:
    return f"{record['ours_us']:.2f} us {ratio(record):.2f}x"


def chain_table(results: dict[str, Any]) -> list[str]:
    """A chain of dependent GEMVs against reading its weights at the ceiling, and cuBLAS."""
    lines = [
        f"68 dependent GEMVs (34 Mamba2 layers, batch 2) in one graph on one "
        f"{results['machine']['gpu']}:",
        "",
        "| code | bound | over the read ceiling | in order | plain calls | cuBLAS |",
        "|---|---|---|---|---|---|",
    ]
    for record in results["records"]:
        lines.append(
            f"| {record['via']} | {record['ours_us']:.1f} us | {record['over_ceiling']:.3f}x "
            f"| {record['in_order_us']:.1f} us | {record['plain_us']:.1f} us "
            f"| {record['opponent_us']:.1f} us |"
        )
    return lines


def share_of_read_table(results: dict[str, Any]) -> list[str]:
    """Our rate over that of a read of as many bytes, for the shapes whose reading takes long."""
    lines = [
        f"Rate over that of a read of as many bytes in the same launch style, "
        f"{results['machine']['gpu']}:",
        "",
    ]
    large = [record for record in results["records"] if record["bytes"] >= LONG_BYTES]
    counts = sorted({parts(record)["M"] for record in large}, key=int)
    lines += ["| N x K | code | " + " | ".join(f"M = {m}" for m in counts) + " |"]
    lines += ["|---|---|" + "---|" * len(counts)]
    rows = _by(
        large, lambda record: f"{parts(record)['N']} x {parts(record)['K']} | {record['via']}"
    )
    for name, records in rows.items():
        shares = {parts(r)["M"]: f"{r['read_us'] / r['ours_us']:.1%}" for r in records}
        lines.append(f"| {name} | " + " | ".join(shares[m] for m in counts) + " |")
    return lines


def _against(
    title: str, results: dict[str, Any], base: dict[str, Any], like: dict[str, str]
) -> str:
    """A line: the worst case of some results against bf16 without bias at a like number of rows."""

    def key(record: dict[str, Any], like: dict[str, str]) -> tuple[str, ...]:
        case = parts(record)
        return record["via"], like.get(case["M"], case["M"]), case["N"], case["K"]

    times = {key(record, {}): record["ours_us"] for record in base["records"]}
    codes = ", ".join(dict.fromkeys(record["via"] for record in results["records"]))

    def slower(record: dict[str, Any]) -> float:
        return record["ours_us"] / times[key(record, like)]

    worst = max(results["records"], key=slower)
    ratio = slower(worst)
    return (
        f"| {title} | {codes} | {len(results['records'])} | {ratio:.3f}x "
        f"| {worst['case']} {worst['via']} |"
    )


def cases_table(folder: Path) -> list[str]:
    """How much slower other calls are at worst."""
    base, rows = _load(folder / "gemv.json"), _load(folder / "gemv_rows.json")
    next_power = {"3": "4", "5": "8", "6": "8", "7": "8"}
    between = {"records": [r for r in rows["records"] if parts(r)["M"] in next_power]}
    return [
        f"Worst time over that of bf16 without bias, {base['machine']['gpu']}:",
        "",
        "| calls | code | cases | ratio | worst |",
        "|---|---|---|---|---|",
        _against("M = 3, 5, 6, 7 over M = 4, 8", between, rows, next_power),
        _against("fp16", _load(folder / "gemv_f16.json"), base, {}),
        _against("with a bias", _load(folder / "gemv_bias.json"), base, {}),
    ]


Table = Callable[[Path], list[str]]


def _of(bench: str, table: Callable[[dict[str, Any]], list[str]]) -> Table:
    return lambda folder: table(_load(folder / f"{bench}.json"))


def _scan(bench: str, what: str, *tables: Callable[[dict[str, Any]], list[str]]) -> Table:
    """Tables of the scan; they say so where it has not been measured."""

    def all_of(folder: Path) -> list[str]:
        path = folder / f"{bench}.json"
        if not path.exists():
            return [f"{what}: no measurement on `{folder.name}` is recorded yet."]
        found = [line for table in tables for line in ["", *table(_load(path))]]
        return found[1:]

    return all_of


_DOCUMENTS: dict[str, list[Table]] = {
    "README.md": [
        speedups.summary_table,
        _of("first_call", host_figures.first_call_table),
        _of("launch", host_figures.launch_table),
    ],
    "docs/gemv.md": [
        _of("gemv", gemv_table),
        _of("gemv_chain", chain_table),
        _of("gemv", share_of_read_table),
        cases_table,
    ],
    "docs/launch.md": [
        _of("launch", host_figures.launch_table),
        _of("first_call", host_figures.first_call_table),
    ],
    "docs/patching.md": [
        _of("decode_step", host_figures.decode_table),
        _of("decode_graph", host_figures.requests_table),
    ],
    "docs/ssd.md": [
        _scan("ssd", "SSD scan", ssd_figures.scan_table),
        _scan("ssd", "Errors and extras", ssd_figures.error_table, ssd_figures.extras_table),
        _scan("ssd_first_call", "First scan", ssd_figures.first_scan_table),
    ],
}


def render(tables: list[Table]) -> str:
    """Everything between the markers."""
    lines: list[str] = []
    for folder in sorted(RESULTS.glob("*/")):
        for table in tables:
            # What has not been measured on that GPU is left out.
            with contextlib.suppress(FileNotFoundError):
                lines += ["", *table(folder)]
    return "\n".join([*lines, ""])


def documents() -> Iterator[tuple[str, str]]:
    """Every file with figures, and what it should hold."""
    for name, tables in _DOCUMENTS.items():
        before, _, rest = (ROOT / name).read_text(encoding="utf-8").partition(_BEGIN)
        _, _, after = rest.partition(_END)
        yield name, f"{before}{_BEGIN}\n{render(tables)}\n{_END}{after}"
    for folder in sorted(RESULTS.glob("*/")):
        with contextlib.suppress(FileNotFoundError):
            yield f"docs/speedups-{folder.name}.svg", speedups.picture(folder)


def main() -> None:
    """Rewrite the documents, or check them."""
    parser = argparse.ArgumentParser(description=__doc__, prog="python -m benchmarks.figures")
    parser.add_argument("--check", action="store_true")
    options = parser.parse_args()
    for name, wanted in documents():
        path = ROOT / name
        if not options.check:
            path.write_text(wanted, encoding="utf-8")
        elif not path.exists() or path.read_text(encoding="utf-8") != wanted:
            sys.exit(f"{name} has other figures than the results: run python -m benchmarks.figures")


if __name__ == "__main__":
    main()
