"""The command that writes a project with a kernel of its own."""

from __future__ import annotations

from pathlib import Path

import click

from .options import DIRECTORY, json_option, quiet_option


@click.command()
@click.argument("name")
@click.option("--out", type=DIRECTORY, help="Directory to write into. Default: ./NAME.")
@quiet_option
@json_option
def new(name: str, out: Path | None, quiet: bool, as_json: bool) -> None:
    """Write a small project with a kernel of its own, to start from.

    A kernel called NAME and its declaration, a function around it, tests that pass without a GPU,
    and a CI file. What is in it is explained in docs/own-kernels.md.
    """
    from . import report
    from .new import new as run

    directory = out or Path(name)
    files = run(name, directory)
    if as_json:
        shown = [str(path.relative_to(directory)) for path in files]
        report.print_json({"directory": str(directory), "files": shown})
    elif not quiet:
        for path in files:
            click.echo(str(path))
        click.echo(f"\nNext: cd {directory} && pip install --editable '.[test]' && pytest")
