"""The command that says what a build would do, and why."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from .options import json_option, out_option, quiet_option, selection_options, trust_option

if TYPE_CHECKING:
    from .explain import Planned
    from .plan import Selection

# Of what would be added or removed; all of it is in the JSON.
_MOST_NAMES = 8


@click.command()
@selection_options
@out_option
@trust_option
@quiet_option
@json_option
def plan(selection: Selection, out: Path | None, quiet: bool, as_json: bool) -> None:
    """Say what a build with the same options would compile, and why.

    Each variant is cached, new, or changed; of a changed one the inputs that differ from the last
    that was built are named: a source file, a part of the declaration, a version of the compiler.
    Nothing is compiled and nothing written.
    """
    show_plan(selection, None, out, quiet=quiet, as_json=as_json)


def show_plan(
    selection: Selection,
    shard: tuple[int, int] | None,
    out: Path | None,
    *,
    quiet: bool,
    as_json: bool,
) -> None:
    """Print what a build of this selection, or of a shard of it, would do."""
    from ..artifacts.places import default_artifacts
    from ..artifacts.shard import share
    from . import report
    from .build import labels, require_some
    from .cache import Cache
    from .explain import explain

    jobs = selection.jobs()
    require_some(jobs, selection.archs)
    planned = explain([*share(jobs, *shard)] if shard else jobs, Cache())
    directory = out or default_artifacts()
    there, wanted = labels(directory), {item.job.label for item in planned}
    added, removed = ([], []) if shard else (sorted(wanted - there), sorted(there - wanted))
    left_out = selection.left_out()
    if as_json:
        report.print_json(
            {
                "directory": str(directory),
                "binaries": [
                    {
                        **report.job_data(item.job),
                        "key": item.job.key,
                        "state": item.state,
                        "why": list(item.why),
                    }
                    for item in planned
                ],
                "left_out": report.left_out_data(left_out),
                "added": added,
                "removed": removed,
            }
        )
        return
    if quiet:
        return
    for line in (*_lines(planned), *report.left_out_lines(left_out)):
        click.echo(line)
    for what, names in (("add", added), ("remove", removed)):
        if names:
            more = f" and {len(names) - _MOST_NAMES} more" if len(names) > _MOST_NAMES else ""
            click.echo(f"would {what} in {directory}: {', '.join(names[:_MOST_NAMES])}{more}")


def _lines(planned: list[Planned]) -> list[str]:
    """What would be compiled as a table, and how much there is of each."""
    from . import report

    rows: list[tuple[Any, ...]] = [
        (item.state, item.job.spec.name, _variant(item), item.job.arch, "; ".join(item.why))
        for item in planned
        if item.state != "cached"
    ]
    counts = Counter(item.state for item in planned)
    shown = ", ".join(f"{counts[state]} {state}" for state in ("cached", "new", "changed"))
    total = f"{report.plural(len(planned), 'binary', 'binaries')}: {shown}"
    if not rows:
        return [total]
    return [report.table(("state", "kernel", "variant", "arch", "why"), rows), "", total]


def _variant(item: Planned) -> str:
    from ..artifacts.declaration import variant_name

    return variant_name(item.job.variant)
