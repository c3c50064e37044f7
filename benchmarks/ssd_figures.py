"""Tables of the SSD scan for README.md and docs/ssd.md, from results files."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sonata_aot.aot.measure.render import parts
from sonata_aot.aot.measure.ssd_render import FUSED, TRITON, Row, number, rows

Results = dict[str, Any]


def _table(head: str, lines: Sequence[Sequence[str]]) -> list[str]:
    columns = head.split(" | ")
    return [
        f"| {head} |",
        "|" + "---|" * len(columns),
        *(f"| {' | '.join(line)} |" for line in lines),
    ]


def _by_code(results: Results) -> dict[str, list[Row]]:
    groups: dict[str, list[Row]] = {}
    for row in rows(results["records"]):
        groups.setdefault(row.record["via"], []).append(row)
    return groups


def scan_table(results: Results) -> list[str]:
    """For each code, graph and eager times of all shapes without extras, beside the opponents'."""
    machine, lines = results["machine"], []
    for via, found in _by_code(results).items():
        lines += [
            f"SSD scan in bf16, {via}, on one {machine['gpu']}, torch {machine['torch']}, read "
            f"ceiling {results['ceiling']['gbps']:.0f} GB/s:",
            "",
            *_table(
                "batch x tokens | ours | Triton | fused, estimate | over the better | memory floor "
                "| eager | Triton, eager",
                [_times(row) for row in found if "base_us" not in row.record],
            ),
            "",
        ]
    return lines[:-1]


def _times(row: Row) -> list[str]:
    record = row.record
    return [
        row.name,
        number(record["ours_us"], unit=" us"),
        number(row.opponents.get(TRITON), unit=" us"),
        number(row.opponents.get(FUSED), unit=" us"),
        number(row.ratio, ".2f", "x"),
        number(record["floor_us"], unit=" us"),
        number(record["eager_us"], unit=" us"),
        number(record["opponent_eager_us"], unit=" us"),
    ]


def error_table(results: Results) -> list[str]:
    """Errors of out and of final states, and host time a call, ours and Triton's."""
    return [
        f"Relative L2 errors against float64, and host time a call, {results['machine']['gpu']}:",
        "",
        *_table(
            "case | code | out | Triton | states | Triton | host | Triton",
            [
                [
                    row.name,
                    via,
                    *(
                        number(row.record[f"{who}{name}"], ".2e")
                        for name in ("error", "states_error")
                        for who in ("", "opponent_")
                    ),
                    number(row.record["host_us"], unit=" us"),
                    number(row.record["opponent_host_us"], unit=" us"),
                ]
                for via, found in _by_code(results).items()
                for row in found
            ],
        ),
    ]


def extras_table(results: Results) -> list[str]:
    """What z, initial states, seq_idx and strides cost, and what they may; says if none did."""
    if not any("base_us" in record for record in results["records"]):
        return [
            "Calls with z, initial states, `seq_idx` or strides: no measurement on "
            f"{results['machine']['gpu']} is recorded yet."
        ]
    return [
        f"A call with extras, without them, and the most that it may take, "
        f"{results['machine']['gpu']}:",
        "",
        *_table(
            "case | code | with | without | bytes more | at most | Triton",
            [
                [
                    row.name,
                    via,
                    number(row.record["ours_us"], unit=" us"),
                    number(row.record["base_us"], unit=" us"),
                    number(row.record["extra_bytes"] / 1e6, unit=" MB"),
                    number(row.record["allowed_us"], unit=" us"),
                    number(row.opponents.get(TRITON), unit=" us"),
                ]
                for via, found in _by_code(results).items()
                for row in found
                if "base_us" in row.record
            ],
        ),
    ]


def first_scan_table(results: Results) -> list[str]:
    """Milliseconds from nothing loaded to the first scan."""
    return [
        f"`load()` and the first scan on one {results['machine']['gpu']}; Triton's first scan with "
        "nothing cached:",
        "",
        *_table(
            "code | driver's cache | import | load | first scan | load + first | Triton",
            [
                [
                    record["via"],
                    parts(record).get("cache", "not needed"),
                    *(
                        number(record[name], unit=" ms")
                        for name in ("import_ms", "load_ms", "first_scan_ms")
                    ),
                    number(record["ours_us"] / 1e3, unit=" ms"),
                    number(record["opponent_us"] and record["opponent_us"] / 1e6, unit=" s"),
                ]
                for record in results["records"]
            ],
        ),
    ]
