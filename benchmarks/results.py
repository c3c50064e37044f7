"""Results of GPU runs, tied to what was run: `benchmarks/results/<gpu>/<bench>.json`.

    sonata-aot bench gemv --json gemv.json
    python -m benchmarks.results gemv.json benchmarks/results/h200/gemv.json

The second adds the digest of the launcher's sources, which an installed tool does not have.
"""

from __future__ import annotations

import argparse
import hashlib
import json
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from sonata_aot.aot import result_files
from sonata_aot.aot.measure import gpu
from sonata_aot.artifacts import open_artifacts

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"


def launcher_digest() -> str:
    """SHA-256 over the names and bytes of the native launcher's sources."""
    sources = sorted((ROOT / "loader" / "native").iterdir())
    lines = [f"{hashlib.sha256(path.read_bytes()).hexdigest()}  {path.name}\n" for path in sources]
    return hashlib.sha256("".join(lines).encode()).hexdigest()


def write(path: Path, records: Sequence[dict[str, Any]], artifacts: Path) -> None:
    """Write a results file; each record gets the launcher's digest.

    The commit is the one that the artifacts were built from.
    """
    source = open_artifacts(artifacts).manifest.source
    content = {
        "machine": gpu.machine().data(),
        "date": datetime.now(UTC).date().isoformat(),
        "commit": source.commit,
        "dirty": source.dirty,
        "records": list(records),
    }
    _write(path, content)


def _write(path: Path, content: dict[str, Any]) -> None:
    digest = launcher_digest()
    records = [{**record, "launcher": digest} for record in content["records"]]
    content = {**content, "records": records}
    path.parent.mkdir(parents=True, exist_ok=True)
    result_files.write(path, (json.dumps(content, indent=1) + "\n").encode("utf-8"))


def main() -> None:
    """Make a results file of what `sonata-aot bench` has just written from these sources."""
    parser = argparse.ArgumentParser(description=main.__doc__, prog="python -m benchmarks.results")
    parser.add_argument("measured", type=Path, help="what `sonata-aot bench ... --json` wrote")
    parser.add_argument("results", type=Path, help="benchmarks/results/<gpu>/<bench>.json")
    options = parser.parse_args()
    _write(options.results, json.loads(options.measured.read_text(encoding="utf-8")))


if __name__ == "__main__":
    main()
