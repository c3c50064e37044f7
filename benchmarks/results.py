"""Results of GPU runs, tied to what was run: `benchmarks/results/<gpu>/<bench>.json`."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from sonata_aot.artifacts import open_artifacts

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"


def launcher_digest() -> str:
    """SHA-256 over the names and bytes of the native launcher's sources."""
    sources = sorted((ROOT / "loader" / "native").iterdir())
    lines = [f"{hashlib.sha256(path.read_bytes()).hexdigest()}  {path.name}\n" for path in sources]
    return hashlib.sha256("".join(lines).encode()).hexdigest()


def machine() -> dict[str, Any]:
    """The GPU and the software that a result was measured with."""
    import torch

    from sonata_aot.loader import _native

    properties = torch.cuda.get_device_properties(torch.cuda.current_device())
    return {
        "gpu": properties.name,
        "multiprocessors": properties.multi_processor_count,
        "driver_cuda": _native.driver_state()["version"],
        "torch": torch.__version__,
    }


def write(path: Path, records: Sequence[dict[str, Any]], artifacts: Path) -> None:
    """Write a results file; each record gets the launcher's digest.

    The commit is the one that the artifacts were built from.
    """
    digest, source = launcher_digest(), open_artifacts(artifacts).manifest.source
    content = {
        "machine": machine(),
        "date": datetime.now(UTC).date().isoformat(),
        "commit": source.commit,
        "dirty": source.dirty,
        "records": [{**record, "launcher": digest} for record in records],
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
