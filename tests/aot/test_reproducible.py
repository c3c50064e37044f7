"""Two builds of the same sources are the same bytes, wherever and however they ran."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from sonata_aot.artifacts import open_artifacts


def contents(directory: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(directory)): path.read_bytes()
        for path in directory.rglob("*")
        if path.is_file()
    }


def test_builds_are_byte_identical(built: Path, tmp_path: Path) -> None:
    """`built` came of hash seed 1, two workers, another cache, directory and working directory."""
    out = tmp_path / "another place" / "out"
    archs = ["--arch=9.0", "--arch=sm_86"]
    subprocess.run(
        [sys.executable, "-m", "sonata_aot.aot", "build", *archs, "--jobs=1", "--out", str(out)],
        env={
            **os.environ,
            "PYTHONHASHSEED": "4242",
            "SONATA_AOT_CACHE_DIR": str(tmp_path / "cache"),
            "CUTE_DSL_LINEINFO": "1",
            "CUTE_DSL_KEEP_PTX": "1",
            "CUDA_VISIBLE_DEVICES": "0",
            "TZ": "Asia/Kathmandu",
            "LC_ALL": "C",
        },
        cwd=tmp_path,
        check=True,
        capture_output=True,
    )
    first, second = contents(built), contents(out)
    assert sorted(first) == sorted(second)
    assert [name for name in first if first[name] != second[name]] == []
    archs = {binary.arch for binary in open_artifacts(out).manifest.binaries}
    assert archs == {"sm86", "sm90"}


def test_no_trace_of_the_machine(built: Path, warm_cache: Path) -> None:
    for name, data in contents(built).items():
        for trace in (str(built), str(warm_cache), os.getcwd(), os.uname().nodename, sys.prefix):
            assert trace.encode() not in data, f"{trace} stands in {name}"
