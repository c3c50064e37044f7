"""The part of `docs/cli.md` that says what each command does, made from the commands themselves.

python -m sonata_aot.aot.reference docs/cli.md
python -m sonata_aot.aot.reference --check docs/cli.md
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterator
from pathlib import Path

import click

from ..artifacts import environment
from .cli import main as root

BEGIN = "<!-- commands: begin (python -m sonata_aot.aot.reference docs/cli.md) -->\n"
END = "<!-- commands: end -->\n"


def render() -> str:
    """Every command with its options, and every environment variable, as Markdown."""
    commands = list(_commands(root, ("sonata-aot",)))
    parts = ["\n| command | |\n|---|---|\n"]
    for way, command in commands:
        if not isinstance(command, click.Group):
            summary = inspect.cleandoc(command.help or "").partition("\n\n")[0]
            link = f"[`{' '.join(way)}`](#{'-'.join(way)})"
            parts.append(f"| {link} | {_cell(summary)} |\n")
    parts.append("\n")
    parts += [_section(way, command) for way, command in commands]
    parts.append("## Environment variables\n\n| variable | meaning | value |\n|---|---|---|\n")
    parts += [f"| `{v.name}` | {_cell(v.doc)} | {_cell(v.expects)} |\n" for v in environment.ALL]
    return "".join([*parts, "\n"])


def _commands(
    group: click.Group, way: tuple[str, ...]
) -> Iterator[tuple[tuple[str, ...], click.Command]]:
    for name, command in sorted(group.commands.items()):
        yield (*way, name), command
        if isinstance(command, click.Group):
            yield from _commands(command, (*way, name))


def _section(way: tuple[str, ...], command: click.Command) -> str:
    context = click.Context(command, info_name=" ".join(way))
    lines = [f"{'##' if len(way) == 2 else '###'} {' '.join(way)}\n"]
    if not isinstance(command, click.Group):
        usage = " ".join([" ".join(way), *command.collect_usage_pieces(context)])
        lines.append(f"```\n{usage}\n```\n")
    lines.append(inspect.cleandoc(command.help or "") + "\n")
    records = [
        item.get_help_record(context) for item in command.params if isinstance(item, click.Option)
    ]
    if records:
        rows = "".join(f"| `{_cell(r[0])}` | {_cell(r[1])} |\n" for r in records if r is not None)
        lines.append("| option | |\n|---|---|\n" + rows)
    return "\n".join(lines) + "\n"


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


def main(arguments: list[str]) -> int:
    """Rewrite the part between the marks, or with `--check` say whether it is up to date."""
    *flags, name = arguments
    path = Path(name)
    text = path.read_text(encoding="utf-8")
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    current = f"{before}{BEGIN}{render()}{END}{after}"
    if flags == ["--check"]:
        if text != current:
            print(f"{path} is out of date: run `make docs`", file=sys.stderr)
        return int(text != current)
    path.write_text(current, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
