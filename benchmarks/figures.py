"""Writes the README's tables from the results files, so that no figure in it is typed by hand.

`python -m benchmarks.figures` rewrites the part between the markers; `--check` fails if that would
change anything.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from .results import RESULTS, ROOT

# Shapes below this do not enter a mean: their time is that of a launch.
LARGE_BYTES = 16_000_000
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
        counts = sorted({_case(record)["M"] for record in records}, key=int)
        lines += [
            f"GEMV in bf16 with constant weights, {via}, on one {machine['gpu']}, torch "
            f"{machine['torch']}, read ceiling {ceiling:.0f} GB/s:",
            "",
            "| N x K | " + " | ".join(f"M = {m}" for m in counts) + " |",
            "|---|" + "---|" * len(counts),
        ]
        shapes = _by(records, lambda record: f"{_case(record)['N']} x {_case(record)['K']}")
        for shape, of_shape in shapes.items():
            cells = {_case(record)["M"]: _cell(record) for record in of_shape}
            lines.append(f"| {shape} | " + " | ".join(cells[m] for m in counts) + " |")
        large = [record for record in records if record["bytes"] >= LARGE_BYTES]
        means = [_mean_ratio([r for r in large if _case(r)["M"] == m]) for m in counts]
        lines += ["| mean from 16 MB on | " + " | ".join(f"{m:.2f}x" for m in means) + " |", ""]
    return lines[:-1]


def _by(records: list[dict[str, Any]], key: Callable[[dict[str, Any]], str]) -> _Groups:
    groups: _Groups = {}
    for record in records:
        groups.setdefault(key(record), []).append(record)
    return groups


def _case(record: dict[str, Any]) -> dict[str, str]:
    return dict(part.split("=") for part in record["case"].split())


def _cell(record: dict[str, Any]) -> str:
    return f"{record['ours_us']:.2f} us {record['opponent_us'] / record['ours_us']:.2f}x"


def _mean_ratio(records: list[dict[str, Any]]) -> float:
    ratios = [record["opponent_us"] / record["ours_us"] for record in records]
    return statistics.geometric_mean(ratios)


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


def first_call_table(results: dict[str, Any]) -> list[str]:
    """Milliseconds from nothing loaded to the first result."""
    lines = [
        f"`load()` and the first GEMV on one {results['machine']['gpu']}:",
        "",
        "| code | driver's cache | import | load | first GEMV | load + first |",
        "|---|---|---|---|---|---|",
    ]
    for record in results["records"]:
        cache = dict(pair.split("=") for pair in record["case"].split()).get("cache", "not needed")
        lines.append(
            f"| {record['via']} | {cache} | {record['import_ms']:.1f} ms "
            f"| {record['load_ms']:.1f} ms | {record['first_gemv_ms']:.1f} ms "
            f"| {record['ours_us'] / 1e3:.1f} ms |"
        )
    return lines


_TABLES = {"gemv": gemv_table, "gemv_chain": chain_table, "first_call": first_call_table}


def render() -> str:
    """Everything between the markers."""
    lines: list[str] = []
    for gpu in sorted(RESULTS.glob("*/")):
        for bench, table in _TABLES.items():
            file = gpu / f"{bench}.json"
            if file.exists():
                lines += ["", *table(_load(file))]
    return "\n".join([*lines, ""])


def main() -> None:
    """Rewrite the README, or check it."""
    parser = argparse.ArgumentParser(description=__doc__, prog="python -m benchmarks.figures")
    parser.add_argument("--check", action="store_true")
    options = parser.parse_args()
    readme = ROOT / "README.md"
    text = readme.read_text(encoding="utf-8")
    before, _, rest = text.partition(_BEGIN)
    _, _, after = rest.partition(_END)
    wanted = f"{before}{_BEGIN}\n{render()}\n{_END}{after}"
    if options.check and wanted != text:
        sys.exit("README.md has other figures than the results: run python -m benchmarks.figures")
    if not options.check:
        readme.write_text(wanted, encoding="utf-8")


if __name__ == "__main__":
    main()
