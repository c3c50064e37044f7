"""Builds that race and builds that are killed, as often as is asked for.

KILLS and RACES say how often (8 and 1 unless told otherwise; `make soak` has the full counts), and
SOAK_SEED where the random moments start. What was really done stands in the report's properties,
which `benchmarks.soak` records.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from sonata_aot.aot.cache import Cache
from sonata_aot.aot.prune import contents
from sonata_aot.artifacts.verify import Passed, verify

if TYPE_CHECKING:
    from tests.aot.canned import Canned

KILLS = int(os.environ.get("KILLS", "8"))
RACES = int(os.environ.get("RACES", "1"))
SEED = int(os.environ.get("SOAK_SEED", "0"))
BUILDERS = 8
Record = Callable[[str, object], None]


def tree(directory: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(directory)): path.read_bytes()
        for path in directory.rglob("*")
        if path.is_file()
    }


def test_builders_at_once_compile_each_kernel_once(canned: Canned, record_property: Record) -> None:
    """Eight on one empty cache; half of them publish into one directory."""
    for race in range(RACES):
        outs = [canned.root / f"out{max(0, number - 3)}" for number in range(BUILDERS)]
        processes = [canned.start("--jobs=2", "--json", "--out", out) for out in outs]
        printed = []
        for process in processes:
            answer, err = process.communicate(timeout=240)
            assert process.returncode == 0, f"race {race}: {err}"
            printed.append(json.loads(answer))
        keys = sorted(printed[0]["compiled"] + printed[0]["cached"])
        assert len(keys) >= 8
        assert sorted(canned.compiled) == keys
        assert sorted(key for item in printed for key in item["compiled"]) == keys
        assert all(sorted(item["compiled"] + item["cached"]) == keys for item in printed)
        assert all(isinstance(outcome, Passed) for out in outs for outcome in verify(out))
        first = tree(outs[0])
        assert sum(item["written"] for item in printed[:4]) == len(first)
        assert all(tree(out) == first for out in outs)
        assert list((canned.cache / "in-use").iterdir()) == []
        for path in (canned.cache, *set(outs)):
            shutil.rmtree(path)
        canned.counted.write_text("")
    record_property("races", RACES)
    record_property("builders", BUILDERS * RACES)


def children(of: int) -> set[int]:
    """Process ids of a process's children."""
    try:
        return set(map(int, Path(f"/proc/{of}/task/{of}/children").read_text().split()))
    except (FileNotFoundError, ProcessLookupError):
        return set()


def ended(process: int) -> bool:
    try:
        state = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return True
    return state == "Z"


def killed(process: subprocess.Popen[str], after: float) -> bool:
    """SIGKILL a build after so many seconds; False if it had ended before."""
    try:
        process.wait(timeout=after)
    except subprocess.TimeoutExpired:
        workers = children(process.pid)
        process.send_signal(signal.SIGKILL)
        process.wait()
        patience = time.monotonic() + 30
        while not all(map(ended, workers)):
            assert time.monotonic() < patience, "a worker outlived its build"
            time.sleep(0.005)
        return True
    finally:
        for pipe in (process.stdout, process.stderr):
            assert pipe is not None
            pipe.close()
    return False


def test_killed_builds_leave_nothing_that_stops_the_next(
    canned: Canned, record_property: Record
) -> None:
    rng = random.Random(SEED)
    out, elsewhere = canned.cache / "artifacts", canned.root / "elsewhere"
    began = time.monotonic()
    assert canned.build("--jobs=2").returncode == 0
    took = time.monotonic() - began
    whole = tree(out)
    kills = builds = 0
    while kills < KILLS:
        if rng.random() < 0.5:  # or there would be nothing left to compile
            shutil.rmtree(canned.cache)
        elif rng.random() < 0.3:
            shutil.rmtree(out, ignore_errors=True)
        for _ in range(min(rng.randint(1, 4), KILLS - kills)):
            place = rng.choice(([], [], ["--out", elsewhere]))
            kills += killed(canned.start("--jobs=2", *place), rng.uniform(0.02, took))
        for directory in (elsewhere, out):
            done = canned.build("--jobs=2", "--json", "--out", directory)
            assert done.returncode == 0, f"seed {SEED}, after {kills} kills: {done.stderr}"
            wrong = [item for item in verify(directory) if not isinstance(item, Passed)]
            assert not wrong, f"seed {SEED}, after {kills} kills: {wrong}"
            assert tree(directory) == whole
            builds += 1
        assert_nothing_is_left_over(canned)
    # And where no build follows: a prune alone.
    for _ in range(2):
        # The build killed last may not have come as far as to make it.
        shutil.rmtree(canned.cache, ignore_errors=True)
        kills += killed(canned.start("--jobs=2"), rng.uniform(0.3, 0.9) * took)
        assert_nothing_is_left_over(canned)
    record_property("kills", kills)
    record_property("builds", builds)


def assert_nothing_is_left_over(canned: Canned) -> None:
    """After a `cache prune` that removes no entry."""
    pruned = canned.command("cache", "prune", "--json")
    assert pruned.returncode == 0, pruned.stderr
    if not canned.cache.exists():
        return
    cache = Cache(canned.cache)
    known = {"compiled", "in-use", "artifacts"}
    assert {path.name for path in canned.cache.iterdir()} <= known
    assert list(cache.in_use.iterdir()) == []
    assert all(cache.find(item.key) for item in contents(cache))
    names = {item.name for item in cache.compiled.iterdir()} if cache.compiled.exists() else set()
    assert names == {item.key for item in contents(cache)}
    out = canned.cache / "artifacts"
    if (out / "manifest.json").exists():
        assert all(isinstance(item, Passed) for item in verify(out))
    elif out.exists():
        assert [path for path in out.rglob("*") if path.name != "objects"] == []
