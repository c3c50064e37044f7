"""The command that compares two artifact directories."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from .options import DIRECTORY, json_option, trust_option

if TYPE_CHECKING:
    from ..artifacts.manifest import Binary
    from .diff import Difference


@click.command()
@click.argument("before", type=DIRECTORY, metavar="A")
@click.argument("after", type=DIRECTORY, metavar="B")
@click.option("--exit-code", is_flag=True, help="Exit 1 if anything differs.")
@trust_option
@json_option
def diff(before: Path, after: Path, exit_code: bool, as_json: bool) -> None:
    """Compare two artifact directories.

    Which binaries B has and A has not (+), the other way round (-), and which have other bytes (~),
    with registers, spills, stack, shared memory and sizes where these differ; other declarations,
    rules and versions of the compiler. Needs no compiler.
    """
    from ..artifacts.store import open_artifacts
    from . import report
    from .diff import compare, figures

    found = compare(open_artifacts(before).manifest, open_artifacts(after).manifest)
    if as_json:

        def data(binary: Binary) -> dict[str, Any]:
            return {"kernel": binary.kernel, "variant": binary.variant, "arch": binary.arch}

        report.print_json(
            {
                "same": found.is_empty,
                "added": [{**data(b), "figures": figures(b)} for b in found.added],
                "removed": [{**data(b), "figures": figures(b)} for b in found.removed],
                "changed": [
                    {
                        **data(item.after),
                        "before": figures(item.before),
                        "after": figures(item.after),
                    }
                    for item in found.changed
                ],
                "declarations": list(found.declarations),
                "rules": list(found.rules),
                "compiler": {name: list(pair) for name, pair in found.compiler.items()},
            }
        )
    else:
        lines = [("-", binary.label) for binary in found.removed]
        lines += [("+", binary.label) for binary in found.added]
        for item in found.changed:
            shown = [f"{name} {old} -> {new}" for name, (old, new) in item.figures.items()]
            lines.append(("~", f"{item.after.label}: {', '.join(shown) or 'other bytes'}"))
        lines += [("~", f"declaration of {name}") for name in found.declarations]
        lines += [("~", f"rules of {name}") for name in found.rules]
        for name, (old, new) in found.compiler.items():
            lines.append(("~", f"{name} {old or 'absent'} -> {new or 'absent'}"))
        for mark, text in lines:
            click.echo(f"{mark} {text}")
        click.echo(_summary(found))
    sys.exit(1 if exit_code and not found.is_empty else 0)


def _summary(found: Difference) -> str:
    """How much differs: of the binaries, and beside them."""
    from .report import plural

    if found.is_empty:
        return "nothing differs"
    binaries = {"added": found.added, "removed": found.removed, "changed": found.changed}
    shown = [f"{len(items)} {what}" for what, items in binaries.items()]
    parts = ["binaries: " + ", ".join(shown) if any(binaries.values()) else "the same binaries"]
    for count, one, many in (
        (len(found.declarations), "other declaration", "other declarations"),
        (len(found.rules), "kernel with other rules", "kernels with other rules"),
        (len(found.compiler), "other compiler package", "other compiler packages"),
    ):
        parts += [plural(count, one, many)] if count else []
    return "; ".join(parts)
