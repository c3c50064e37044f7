"""What needs a GPU says so in a line where there is none."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
# Each is told a directory, and what else it needs.
MODULES = {
    "benchmarks.decode_graph": "DIRECTORY",
    "benchmarks.decode_step": "DIRECTORY",
    "benchmarks.first_call": "DIRECTORY",
    "benchmarks.gemv_chain": "DIRECTORY",
    "benchmarks.launch": "DIRECTORY",
    "benchmarks.mixed_load": "DIRECTORY",
    "benchmarks.profiled": "--artifacts DIRECTORY scan",
    "benchmarks.sanitizer": "DIRECTORY",
    "examples.decode_gemv": "DIRECTORY",
    "examples.decode_graph": "DIRECTORY",
}


@pytest.mark.parametrize("module", MODULES)
def test_without_a_gpu_it_says_so(module: str, tmp_path: Path) -> None:
    arguments = MODULES[module].replace("DIRECTORY", str(tmp_path))
    done = subprocess.run(
        [sys.executable, "-m", module, *arguments.split()],
        cwd=ROOT,
        env={"PATH": "/usr/bin:/bin", "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1
    (line,) = done.stderr.splitlines()
    assert line.startswith(f"{module.partition('.')[2]}: ")
    assert "no CUDA device" in line
