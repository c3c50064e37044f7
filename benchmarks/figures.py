"""Writes the README's tables from the results files, so that no figure in it is typed by hand.

`python -m benchmarks.figures` rewrites the part between the markers; `--check` fails if that would
change anything.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from .results import RESULTS, ROOT

_BEGIN = "<!-- figures: begin (python -m benchmarks.figures) -->"
_END = "<!-- figures: end -->"


def _load(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text(encoding="utf-8"))


def gemv_table(results: dict[str, Any]) -> list[str]:
    """Times and errors of ours and cuBLAS's, by case and binary."""
    lines = [
        f"GEMV on one {results['machine']['gpu']}, torch {results['machine']['torch']}:",
        "",
        "| case | code | ours | cuBLAS | ratio | error, ours / cuBLAS |",
        "|---|---|---|---|---|---|",
    ]
    for record in results["records"]:
        ours, theirs = record["ours_us"], record["opponent_us"]
        lines.append(
            f"| {record['case']} | {record['via']} | {ours:.2f} us | {theirs:.2f} us "
            f"| {theirs / ours:.2f}x | {record['error']:.2e} / {record['opponent_error']:.2e} |"
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


_TABLES = {"gemv": gemv_table, "first_call": first_call_table}


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
