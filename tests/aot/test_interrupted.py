"""Builds that are interrupted or killed while they compile; `test_soak.py` has the rest."""

from __future__ import annotations

import json
import os
import shutil
import signal
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from sonata_aot.artifacts.verify import Passed, verify

if TYPE_CHECKING:
    from tests.aot.canned import Canned
    from tests.aot.conftest import Toys

PATIENCE = 30
# Of many instructions: its PTX has several KB.
KERNEL = """
@cute.kernel
def {name}(out: cute.Pointer, n: Int32, *, m: cutlass.Constexpr):
    for i in cutlass.range_constexpr(64):
        (out + n * i).store(Float32(m))
"""
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
    # Nothing to wait for: the rest of these seconds is for a busy machine. A worker alone would
    # run for ten minutes.
    out, err = process.communicate(timeout=PATIENCE)
    assert process.returncode != 0
    assert out == ""
    assert "Traceback" not in err
    while any(alive(pid) for pid in pids):
        assert time.monotonic() - stopped < PATIENCE, "a worker outlived its build"
        time.sleep(0.02)
    # The lock went with its holder: the next build starts at once, and clears the scratch.
    again = hanging.build("--kernel=good", "--json")
    assert again.returncode == 0, again.stderr
    assert len(json.loads(again.stdout)["compiled"]) == 1
    assert hanging.scratch == []


def test_ptx_cut_short_by_a_full_disk_fails_and_is_not_cached(toys: Toys) -> None:
    # The compiler writes files and reads them back, and does not look at what has become of them.
    toys.write('spec("one"), spec("two")', KERNEL.format(name="one") + KERNEL.format(name="two"))
    out = toys.root / "out"
    # 1 KB: the PTX is larger. So is what Python itself would write, for later processes to stumble
    # over: Python 3.11 does not look, either.
    limit = ["env", "PYTHONDONTWRITEBYTECODE=1", "bash", "-c", 'ulimit -f 1; exec "$@"', "bash"]
    done = toys.build("--out", str(out), before=limit)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.count("the compiler's PTX is cut short: is the disk full?") == 2, done.stderr
    assert "Traceback" not in done.stderr
    assert list((toys.cache / "compiled").iterdir()) == []
    assert list(out.iterdir()) == []
    again = toys.build("--out", str(out), "--json")
    assert len(json.loads(again.stdout)["compiled"]) == 2
    assert all(isinstance(outcome, Passed) for outcome in verify(out))


def test_the_others_are_compiled_where_a_kernel_fails(canned: Canned) -> None:
    canned.environ["FAILS"] = "2"
    done = canned.build("--jobs=1")
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.count(": it fails (whole output: ") == 2
    assert len(canned.compiled) == 8
    assert list((canned.cache / "artifacts").iterdir()) == []
    again = canned.build("--json", "--keep-going")
    assert again.returncode == 0, again.stderr
    assert sorted(json.loads(again.stdout)["compiled"]) == sorted(canned.compiled[:2])


def test_a_build_that_stops_at_the_first_failure(canned: Canned) -> None:
    canned.environ["FAILS"] = "2"
    done = canned.build("--jobs=1", "--fail-fast")
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.count(": it fails (whole output: ") == 1
    # One more may have been handed out before the failure was read.
    assert len(canned.compiled) <= 2
    canned.environ["FAILS"] = "0"
    assert canned.build().returncode == 0


def test_what_failed_leaves_the_set_from_before(canned: Canned) -> None:
    assert canned.build().returncode == 0
    directory = canned.cache / "artifacts"
    before = {path: path.read_bytes() for path in directory.rglob("*") if path.is_file()}
    shutil.rmtree(canned.cache / "compiled")
    canned.environ["FAILS"] = "9"
    assert canned.build().returncode == 1
    assert {path: path.read_bytes() for path in directory.rglob("*") if path.is_file()} == before
