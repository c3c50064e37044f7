"""Progress of long work: a bar on a terminal, a line a step elsewhere, both on standard error."""

from __future__ import annotations

import os
import sys

import click

_WIDTH = 24


class Progress:
    """Shows steps as they are done; `close` ends a bar's line."""

    def __init__(self, *, quiet: bool) -> None:
        """Choose the form once."""
        self._quiet = quiet
        # Standard error is None in a process that was started with it closed.
        self._bar = sys.stderr is not None and sys.stderr.isatty()
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
        # One short of the width: in the last column some terminals wrap.
        room = (os.get_terminal_size(sys.stderr.fileno()).columns or 80) - 1
        line = f"[{bar}] {done}/{total} {what}"[:room]
        # Padded, not cleared: click strips escape codes where colours are off.
        click.echo(f"\r{line.ljust(room)}", err=True, nl=False)
        self._open = True

    def close(self) -> None:
        """Leave the terminal at the start of a line."""
        if self._open:
            click.echo(err=True)
            self._open = False
