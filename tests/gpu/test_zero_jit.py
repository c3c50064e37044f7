"""No compiler runs for the operations that this package replaces: from fresh processes.

What else a patched model has compiled is printed: run with -rP to see it.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import zero_jit
from sonata_aot.aot.measure import mamba_opponent

pytest.importorskip("transformers")

SUPPORT = Path(zero_jit.__file__).parent
# Where mamba_ssm's scan is; its other kernels are not replaced.
REPLACED = "mamba_ssm.ops.triton.ssd_"
TOOLS = {"cc", "gcc", "g++", "c++", "clang", "ld", "nvcc", "cicc", "ptxas", "nvlink", "fatbinary"}


@pytest.fixture
def mamba_ssm() -> None:
    script = "-m", mamba_opponent.__name__
    found = subprocess.run([sys.executable, *script], capture_output=True, text=True, check=False)
    if found.returncode:
        pytest.skip(found.stderr.strip() or found.stdout.strip())


def run(tmp_path: Path, *options: str) -> dict[str, Any]:
    """What the script answers. Triton and the driver find nothing that was compiled earlier."""
    kept = os.environ.get("PYTHONPATH", "")
    result = subprocess.run(
        [sys.executable, zero_jit.__file__, *options],
        cwd=tmp_path,
        env={
            **os.environ,
            "PYTHONPATH": f"{SUPPORT}:{kept}",
            "TRITON_CACHE_DIR": str(tmp_path / "triton"),
            "CUDA_CACHE_PATH": str(tmp_path / "driver"),
            "HF_HUB_OFFLINE": "1",
        },
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    print(result.stdout)
    return json.loads(result.stdout.splitlines()[-1])


def compiles(command: str) -> bool:
    """Whether a process is a compiler; `ctypes.util.find_library` has one trace its search."""
    name, *options = command.split() or [""]
    return Path(name).name in TOOLS and not {"-Wl,-t", "-t"} & set(options)


def check_entries(entries: list[dict[str, Any]]) -> None:
    """Our scan ran in every layer's prefill, our GEMV in every projection's decode steps."""
    mixers = [entry for entry in entries if entry["kernel"] == "mamba_chunk_scan_combined"]
    assert [entry["calls"] for entry in mixers] == [1, 1]
    assert all(not entry["left"] for entry in mixers)
    projections = [entry for entry in entries if entry["kernel"] == "gemv"]
    assert len(projections) == 2 * 2 + 1
    for entry in projections:
        is_head = entry["module"] == "lm_head"
        # The prompt's tokens are too many rows, but for the last one, which the head sees.
        assert entry["calls"] == zero_jit.DECODED - (not is_head), entry
        assert sum(entry["left"].values()) == (not is_head), entry
    assert len(entries) == len(mixers) + len(projections)


def test_a_patched_model_compiles_nothing(tmp_path: Path):
    found = run(tmp_path, "--patch")
    check_entries(found["entries"])
    assert found["compiled"] == []
    assert found["tuned"] == []
    assert [command for command in found["processes"] if compiles(command)] == []
    assert not [name for name in found["libraries"] if "ptxjit" in name]
    assert not (tmp_path / "triton").exists()


def test_beside_mamba_ssm_nothing_that_is_replaced_is_compiled(tmp_path: Path, mamba_ssm: None):
    found = run(tmp_path, "--patch", "--mamba-ssm")
    check_entries(found["entries"])
    replaced = [name for name in found["compiled"] + found["tuned"] if name.startswith(REPLACED)]
    assert replaced == []
    print("compiled all the same:", sorted(set(found["compiled"])))


def test_unpatched_the_scan_is_compiled(tmp_path: Path, mamba_ssm: None):
    found = run(tmp_path, "--mamba-ssm", "--stop")
    assert [name for name in found["compiled"] + found["tuned"] if name.startswith(REPLACED)]
