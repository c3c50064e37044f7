"""Progress of long work: a bar on a terminal, a line a step elsewhere, both on standard error."""

from __future__ import annotations

import shutil
import sys

import click

_WIDTH = 24


class Progress:
    """Shows steps as they are done; `close` ends a bar's line."""

    def __init__(self, *, quiet: bool) -> None:
        """Choose the form once."""
        self._quiet = quiet
        self._bar = sys.stderr.isatty()
        self._open = False

    def __call__(self, done: int, total: int, what: str) -> None:
        """Report that `what` is done, as step `done` of `total`."""
        if self._quiet:
            return
        if not self._bar:
            click.echo(f"[{done}/{total}] {what}", err=True)
            return
        filled = _WIDTH * done // total
        bar = "#" * filled + "-" * (_WIDTH - filled)
        counter = f"[{bar}] {done}/{total} "
        room = shutil.get_terminal_size().columns - len(counter) - 1
        click.echo(f"\r\x1b[2K{counter}{what[: max(room, 0)]}", err=True, nl=False)
        self._open = True

    def close(self) -> None:
        """Leave the terminal at the start of a line."""
        if self._open:
            click.echo(err=True)
            self._open = False
