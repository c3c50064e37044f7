"""The command that makes one artifact directory of the shards of a build."""

from __future__ import annotations

from pathlib import Path

import click

from .options import DIRECTORY, json_option, out_option, quiet_option, trust_option


@click.command()
@click.argument("shards", nargs=-1, required=True, type=DIRECTORY, metavar="SHARD...")
@out_option
@trust_option
@quiet_option
@json_option
def merge(shards: tuple[Path, ...], out: Path | None, quiet: bool, as_json: bool) -> None:
    """Make one artifact directory of all the shards of a build.

    Each SHARD is the --out of a `sonata-aot build --shard I/N`. The result is, byte for byte, what
    one build without --shard makes. Needs no GPU and no compiler. Everything is verified, as by
    `sonata-aot verify`, before it is published.
    """
    from ..artifacts.places import default_artifacts
    from . import report
    from .merge import merge as run

    directory = out or default_artifacts()
    result = run(shards, directory)
    if as_json:
        report.print_json(
            {
                "directory": str(directory),
                "shards": len(shards),
                "written": result.written,
                "removed": list(result.removed),
                "manifest": report.manifest_data(result.manifest),
            }
        )
        return
    if quiet:
        return
    count = report.plural(len(result.manifest.binaries), "binary", "binaries")
    click.echo(f"{count} of {report.plural(len(shards), 'shard', 'shards')}")
    if result.removed:
        click.echo(f"removed, since not in them: {', '.join(result.removed)}")
    click.echo(f"{'published in' if result.written else 'unchanged in'} {directory}")
