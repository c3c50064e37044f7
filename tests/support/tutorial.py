"""The blocks of docs/own-kernels.md, and what its kernel must give."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Mapping
from pathlib import Path

PAGE = Path(__file__).parents[2] / "docs" / "own-kernels.md"
_BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.M | re.S)


def files() -> dict[str, str]:
    """The page's files by name: each begins with a comment that has it."""
    found: dict[str, str] = {}
    for language, text in _BLOCK.findall(PAGE.read_text()):
        if language != "sh":
            name = text.partition("\n")[0].removeprefix("# ")
            assert re.fullmatch(r"[\w./]+\.(py|toml)", name), name
            assert name not in found
            found[name] = text
    return found


def commands() -> list[str]:
    """The commands that the page has the reader type, in order."""
    blocks = [text for language, text in _BLOCK.findall(PAGE.read_text()) if language == "sh"]
    return [line for text in blocks for line in text.splitlines()]


def write(folder: Path) -> None:
    """Put the files where the reader would have them."""
    for name, text in files().items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def run(folder: Path, environ: Mapping[str, str]) -> str:
    """Type the commands in a folder; returns what they print."""
    done = subprocess.run(
        ["bash", "-e", "-c", "\n".join(commands())],
        cwd=folder,
        env=dict(environ),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout
