"""What every benchmark of the loader can be told."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

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
