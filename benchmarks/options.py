"""What every benchmark of the loader can be told."""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from sonata_aot.artifacts.errors import SonataError
from sonata_aot.artifacts.places import default_artifacts


@dataclass(frozen=True)
class Options:
    """Artifacts to measure, for which architectures, and the file for the results, if any."""

    artifacts: Path
    archs: list[str]
    json: Path | None


def make_parser(module: str, doc: str | None) -> argparse.ArgumentParser:
    """For the command line of `python -m benchmarks.<module>`."""
    parser = argparse.ArgumentParser(description=doc, prog=f"python -m benchmarks.{module}")
    parser.add_argument("artifacts", type=Path, nargs="?", default=default_artifacts())
    parser.add_argument("--arch", action="append", dest="archs")
    parser.add_argument("--json", type=Path)
    return parser


def parse(module: str, doc: str | None, archs: Sequence[str]) -> Options:
    """That command line, where there is no more to tell; `archs` unless others are named."""
    found = make_parser(module, doc).parse_args()
    return Options(found.artifacts, found.archs or list(archs), found.json)


@contextlib.contextmanager
def exit_in_one_line(module: str) -> Iterator[None]:
    """Exit with one line, and 1, where nothing can be measured: without a GPU, for one.

    Raises:
        SystemExit: a `SonataError` came out of the block.
    """
    try:
        yield
    except SonataError as error:
        raise SystemExit(f"{module}: {error}") from None
