"""Two builds of the same sources are the same bytes, wherever and however they ran."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

from sonata_aot.artifacts import open_artifacts
from sonata_aot.kernels import builtin


def contents(directory: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(directory)): path.read_bytes()
        for path in directory.rglob("*")
        if path.is_file()
    }


# Other than those of `built`, which came of hash seed 1, two workers, another cache, directory and
# working directory.
CIRCUMSTANCES = {
    "PYTHONHASHSEED": "4242",
    "CUTE_DSL_LINEINFO": "1",
    "CUTE_DSL_KEEP_PTX": "1",
    "CUDA_VISIBLE_DEVICES": "0",
    "TZ": "Asia/Kathmandu",
    "LC_ALL": "C",
}
# Takes out of a cache the first and the last variant of each kernel and arch, and says how many.
THIN = """
import shutil, sys
from sonata_aot.aot import plan
from sonata_aot.aot.cache import Cache
jobs = plan.jobs(plan.choose_kernels([]), plan.choose_archs(["sm86", "sm90"]))
groups = {}
for job in jobs:
    groups.setdefault((job.spec.name, job.arch), []).append(job)
keys = {job.key for group in groups.values() for job in (group[0], group[-1])}
for key in keys:
    shutil.rmtree(Cache().root / "compiled" / key)
print(len(keys))
"""


def test_builds_are_byte_identical(built: Path, own_cache: Path, tmp_path: Path) -> None:
    """The directory, and what a second compilation makes of the ends of every kernel's grid."""
    out = tmp_path / "another place" / "out"
    environ = {**os.environ, **CIRCUMSTANCES}

    def run(*command: str) -> str:
        command = (sys.executable, *command)
        return subprocess.run(
            command, env=environ, cwd=tmp_path, check=True, capture_output=True, text=True
        ).stdout

    missing = int(run("-c", THIN))
    archs = ("--arch=9.0", "--arch=sm_86")
    printed = run("-m", "sonata_aot.aot", "build", *archs, "--jobs=1", "--json", "--out", str(out))
    compiled = set(json.loads(printed)["compiled"])
    binaries = open_artifacts(out).manifest.binaries
    assert len(compiled) == missing
    kinds = {(b.kernel, b.arch) for b in binaries if b.key in compiled}
    assert kinds == {(b.kernel, b.arch) for b in binaries}
    assert len(kinds) == 2 * sum(spec.default for spec in builtin().values())
    first, second = contents(built), contents(out)
    assert sorted(first) == sorted(second)
    assert [name for name in first if first[name] != second[name]] == []


def test_no_trace_of_the_machine(built: Path, warm_cache: Path) -> None:
    for name, data in contents(built).items():
        for trace in (str(built), str(warm_cache), os.getcwd(), os.uname().nodename, sys.prefix):
            # A short name stands in machine code by chance, and in text as a part of a word.
            if len(trace) < 5 and name.endswith(".cubin"):
                continue
            word = rb"(?<![0-9A-Za-z])" + re.escape(trace.encode()) + rb"(?![0-9A-Za-z])"
            assert not re.search(word, data), f"{trace} stands in {name}"
