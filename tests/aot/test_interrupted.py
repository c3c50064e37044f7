"""Builds that are interrupted, killed, or race each other."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from sonata_aot.artifacts import verify
from sonata_aot.artifacts.verify import Passed

if TYPE_CHECKING:
    from tests.aot.conftest import Toys

SCRIPT = Path(sys.executable).with_name("sonata-aot")
HANGS = """
import os, time
with open(os.path.join(os.environ["PIDS"], str(os.getpid())), "w"):
    pass
time.sleep(600)
"""


@pytest.fixture
def hanging(toys: Toys) -> Toys:
    """A kernel that compiles, and two that never do."""
    hangs = f"{toys.package}.hangs"
    toys.write(f'spec("good"), spec("one", "{hangs}"), spec("two", "{hangs}")', hangs=HANGS)
    pids = toys.root / "pids"
    pids.mkdir()
    toys.environ["PIDS"] = str(pids)
    return toys


def alive(pid: int) -> bool:
    """Whether a process runs; one that has ended and was not waited for does not."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state != "Z"


def started_workers(toys: Toys, count: int) -> list[int]:
    """Process ids of the workers, once they all hang."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        pids = [int(name) for name in os.listdir(toys.environ["PIDS"])]
        if len(pids) == count:
            return pids
        time.sleep(0.02)
    raise AssertionError("the workers did not start")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_a_stopped_build_leaves_nothing_behind(hanging: Toys, number: signal.Signals) -> None:
    process = hanging.start("--jobs=2", "--kernel=one", "--kernel=two")
    pids = started_workers(hanging, 2)
    stopped = time.monotonic()
    process.send_signal(number)
    out, err = process.communicate(timeout=20)
    assert time.monotonic() - stopped < 2
    assert process.returncode != 0
    assert out == ""
    assert "Traceback" not in err
    while any(alive(pid) for pid in pids):
        assert time.monotonic() - stopped < 3, "a worker outlived its build"
        time.sleep(0.02)
    # The lock went with its holder: the next build starts at once, and clears the scratch.
    again = hanging.build("--kernel=good", "--json")
    assert again.returncode == 0, again.stderr
    assert len(json.loads(again.stdout)["compiled"]) == 1
    assert hanging.scratch == []


def test_builders_at_once_compile_each_kernel_once(tmp_path: Path) -> None:
    environ = {**os.environ, "SONATA_AOT_CACHE_DIR": str(tmp_path / "cache")}
    processes = [
        subprocess.Popen(
            [SCRIPT, "build", "--arch=sm86", "--json", "--jobs=1", "--out", tmp_path / "out"],
            env=environ,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for _ in range(3)
    ]
    printed = []
    for process in processes:
        out, err = process.communicate(timeout=100)
        assert process.returncode == 0, err
        printed.append(json.loads(out))
    keys = sorted(printed[0]["compiled"] + printed[0]["cached"])
    assert sorted(key for item in printed for key in item["compiled"]) == keys
    assert all(sorted(item["compiled"] + item["cached"]) == keys for item in printed)
    assert printed[0]["manifest"] == printed[1]["manifest"] == printed[2]["manifest"]
    assert sum(item["written"] for item in printed) == 1 + 2 * len(keys)
    assert all(isinstance(outcome, Passed) for outcome in verify(tmp_path / "out"))
