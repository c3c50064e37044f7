"""What the command line's options and arguments share."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click


class Directory(click.ParamType):
    """A path whose faults our own errors explain; only nothing at all is no directory."""

    name = "directory"

    def convert(self, value: Any, param: Any, ctx: Any) -> Path:
        """The path."""
        if not str(value):
            self.fail("an empty path", param, ctx)
        return Path(value)


DIRECTORY = Directory()


class File(click.ParamType):
    """A file to write or read, of which the same holds."""

    name = "file"
    convert = Directory.convert


FILE = File()
