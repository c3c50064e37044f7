"""What tests of several benchmarks use."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def refused_without_gpu(tmp_path: Path) -> Callable[[str], None]:
    """Requires that `python -m benchmarks.<name>` says in a line that there is no GPU."""

    def require(name: str) -> None:
        done = subprocess.run(
            [sys.executable, "-m", f"benchmarks.{name}", str(tmp_path)],
            cwd=ROOT,
            env={"PATH": "/usr/bin:/bin", "CUDA_VISIBLE_DEVICES": ""},
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 1
        (line,) = done.stderr.splitlines()
        assert line.startswith(f"{name}: ")
        assert "no CUDA device" in line

    return require
