"""How results are shown: tables for people, JSON for programs."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import click

from ..artifacts.arch import Arch
from ..artifacts.manifest import Binary, Manifest
from ..artifacts.schema import encode
from ..artifacts.trust import overridden

if TYPE_CHECKING:
    from .plan import Job

_COLUMNS = ("kernel", "variant", "arch", "registers", "spills", "shared", "bytes")


def table(columns: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """A plain table: text to the left, numbers to the right."""
    cells = [tuple(columns), *(tuple(map(str, row)) for row in rows)]
    widths = [max(len(line[index]) for line in cells) for index in range(len(columns))]
    right = [
        bool(rows) and all(isinstance(row[i], int) for row in rows) for i in range(len(widths))
    ]
    lines = [
        "  ".join(
            cell.rjust(width) if numeric else cell.ljust(width)
            for cell, width, numeric in zip(line, widths, right, strict=True)
        ).rstrip()
        for line in cells
    ]
    return "\n".join([click.style(lines[0], bold=True), *lines[1:]])


def binary_table(binaries: Sequence[Binary]) -> str:
    """The binaries of a directory; `bytes` is machine code plus PTX."""
    return table(
        _COLUMNS,
        [
            (
                binary.kernel,
                binary.variant_name,
                binary.arch,
                binary.registers,
                binary.spills,
                binary.shared_bytes + binary.static_shared_bytes,
                binary.cubin.size + binary.ptx.size,
            )
            for binary in binaries
        ],
    )


def left_out_lines(items: Iterable[tuple[Job, str]]) -> list[str]:
    """A line for each architecture and reason: how many variants of which kernels."""
    groups: dict[tuple[Arch, str], Counter[str]] = {}
    for job, reason in items:
        groups.setdefault((job.arch, reason), Counter())[job.spec.name] += 1
    return [
        f"left out of {arch}: "
        + ", ".join(f"{count} of {kernel}" for kernel, count in counts.items())
        + f" ({reason})"
        for (arch, reason), counts in groups.items()
    ]


def left_out_data(items: Iterable[tuple[Job, str]]) -> list[dict[str, Any]]:
    """The same as JSON data, each variant by itself."""
    return [{**job_data(job), "reason": reason} for job, reason in items]


def job_data(job: Job) -> dict[str, Any]:
    """Which variant of which kernel, and for what, as JSON data."""
    return {"kernel": job.spec.name, "variant": job.variant, "arch": job.arch.name}


def manifest_data(manifest: Manifest) -> dict[str, Any]:
    """A manifest as JSON data, its digest included."""
    return {**encode(manifest), "digest": manifest.digest}


def print_json(data: dict[str, Any]) -> None:
    """Print JSON for a program to read: one object, on standard output.

    With `--allow-untrusted` it also says, under `untrusted`, what would have been refused.
    """
    faults = overridden()
    if faults is not None:
        data = {**data, "untrusted": faults}
    click.echo(json.dumps(data, indent=2))


def plural(count: int, one: str, many: str) -> str:
    """`1 binary`, `2 binaries`."""
    return f"{count} {one if count == 1 else many}"
