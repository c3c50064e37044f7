"""The pool around compile workers, with a worker that does as it is told instead of compiling."""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from sonata_aot.aot import pool
from sonata_aot.aot.pool import Compiled, CompileFailed, run_tasks

WORKER = """
import json, os, signal, sys, time

log = open(os.environ["TOLD"], "a")
for line in sys.stdin:
    task = json.loads(line)
    log.write(json.dumps({"pid": os.getpid(), "cwd": os.getcwd(), "task": task}) + "\\n")
    log.flush()
    good = {"ok": True, "cubin": f"{task['name']}.cubin", "ptx": f"{task['name']}.ptx"}
    do = task["do"]
    if do == "hang":
        time.sleep(60)
    elif do == "child":
        import subprocess
        child = subprocess.Popen(["sleep", "600"])
        log.write(json.dumps({"pid": child.pid, "cwd": "", "task": task}) + "\\n")
        log.flush()
        time.sleep(60)
    elif do == "exit":
        os._exit(7)
    elif do == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    elif do == "fail":
        print("the whole story", file=sys.stderr, flush=True)
        good = {"ok": False, "error": "the short story"}
    elif do == "close":
        os.closerange(0, 100)
        time.sleep(60)
    elif do in ("words", "[1]", '{"ok": true}'):
        os.write(1, do.encode() + b"\\n")
    elif do == "long":
        good["more"] = "x" * 300_000
    elif do == "slow":
        time.sleep(0.2)
    answer = json.dumps(good) + "\\n"
    if do == "pieces":
        for start in range(0, len(answer), 9):
            sys.stdout.write(answer[start : start + 9])
            sys.stdout.flush()
            time.sleep(0.002)
    else:
        print(answer, end="", flush=True)
"""

Run = Callable[..., list[Compiled | CompileFailed]]


@pytest.fixture
def told(
    package: Callable[[dict[str, str]], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[[], list[dict[str, Any]]]:
    """What workers were told, in order."""
    root = package({"told_worker.py": WORKER})
    monkeypatch.setattr(pool, "_WORKER", "told_worker")
    monkeypatch.setenv("PYTHONPATH", str(root))
    monkeypatch.setenv("TOLD", str(tmp_path / "told"))
    return lambda: [json.loads(line) for line in (tmp_path / "told").read_text().splitlines()]


@pytest.fixture
def run(told: Callable[[], list[dict[str, Any]]], tmp_path: Path) -> Run:
    def run(*does: str, workers: int = 1, timeout: float = 30) -> list[Compiled | CompileFailed]:
        tasks = [{"name": f"task{number}", "do": do} for number, do in enumerate(does)]
        scratch = tmp_path / "scratch"
        scratch.mkdir()
        return sorted(run_tasks(tasks, workers, timeout, scratch), key=lambda o: o.index)

    return run


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def state(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


def test_no_task(run: Run) -> None:
    assert run() == []


@pytest.mark.parametrize("workers", [1, 3])
def test_every_task_once(run: Run, told: Callable[[], list[dict[str, Any]]], workers: int) -> None:
    outcomes = run(*["good"] * 7, workers=workers)
    assert [outcome.index for outcome in outcomes] == list(range(7))
    for outcome in outcomes:
        assert isinstance(outcome, Compiled)
        assert outcome.cubin == Path(f"task{outcome.index}.cubin")
        assert outcome.ptx == Path(f"task{outcome.index}.ptx")
    lines = told()
    assert sorted(line["task"]["name"] for line in lines) == [f"task{n}" for n in range(7)]
    assert 1 <= len({line["pid"] for line in lines}) <= workers


def test_workers_work_at_once(run: Run) -> None:
    started = time.monotonic()
    outcomes = run(*["hang"] * 4, workers=4, timeout=2)
    assert len(outcomes) == 4
    assert time.monotonic() - started < 7.5  # one after the other they take 8 on any machine


def test_each_worker_starts_in_an_empty_folder_of_its_own(
    run: Run, told: Callable[[], list[dict[str, Any]]]
) -> None:
    run("slow", "slow", "slow", workers=2)
    by_pid = {line["pid"]: Path(line["cwd"]) for line in told()}
    assert len(set(by_pid.values())) == len(by_pid) == 2
    assert all(list(folder.iterdir()) == [] for folder in by_pid.values())


@pytest.mark.parametrize("do", ["pieces", "long"])
def test_an_answer_in_pieces(run: Run, do: str) -> None:
    assert all(isinstance(outcome, Compiled) for outcome in run(do, do))


def test_a_failed_task_leaves_the_others_alone(run: Run) -> None:
    first, failed, last = run("good", "fail", "good")
    assert isinstance(first, Compiled)
    assert isinstance(last, Compiled)
    assert isinstance(failed, CompileFailed)
    assert failed.error == "the short story"
    assert failed.log.read_text() == "the whole story\n"


@pytest.mark.parametrize(("do", "reason"), [("exit", "exit status 7"), ("kill", "signal 9")])
def test_a_dead_worker_is_replaced(
    run: Run, told: Callable[[], list[dict[str, Any]]], do: str, reason: str
) -> None:
    first, dead, last = run("good", do, "good")
    assert isinstance(first, Compiled)
    assert isinstance(last, Compiled)
    assert isinstance(dead, CompileFailed)
    assert reason in dead.error
    assert len({line["pid"] for line in told()}) == 2


@pytest.mark.parametrize(
    ("do", "reason"),
    [
        ("close", "closed its output"),
        ("words", "said b'words'"),
        ("[1]", "said b'[1]'"),
        ('{"ok": true}', "said b'{"),
    ],
)
def test_a_worker_that_breaks_the_protocol_is_replaced(
    run: Run, told: Callable[[], list[dict[str, Any]]], do: str, reason: str
) -> None:
    """A kernel's module runs in it, and can do all this."""
    started = time.monotonic()
    wrong, last = run(do, "good")
    assert time.monotonic() - started < 20
    assert isinstance(wrong, CompileFailed)
    assert reason in wrong.error
    assert isinstance(last, Compiled)
    assert len({line["pid"] for line in told()}) == 2
    assert not any(alive(line["pid"]) for line in told())


def test_workers_that_all_die(run: Run) -> None:
    outcomes = run(*["exit"] * 5, workers=2)
    assert [isinstance(outcome, CompileFailed) for outcome in outcomes] == [True] * 5


def test_a_hanging_worker_is_ended_and_replaced(
    run: Run, told: Callable[[], list[dict[str, Any]]]
) -> None:
    hung, last = run("hang", "good", timeout=2.5)
    assert isinstance(hung, CompileFailed)
    assert "longer than 2.5 s" in hung.error
    assert isinstance(last, Compiled)
    assert not any(alive(line["pid"]) for line in told())


def test_what_a_hanging_worker_has_started_ends_with_it(
    run: Run, told: Callable[[], list[dict[str, Any]]]
) -> None:
    (hung,) = run("child", timeout=2.5)
    assert isinstance(hung, CompileFailed)
    assert len(told()) == 2
    # The child is nobody's to wait for here: it ends when it is its turn, and may stay as a zombie.
    pids, until = [line["pid"] for line in told()], time.monotonic() + 10
    while any(alive(pid) and state(pid) != "Z" for pid in pids):
        assert time.monotonic() < until
        time.sleep(0.05)


def test_the_time_limit_is_for_one_task(run: Run) -> None:
    assert all(isinstance(outcome, Compiled) for outcome in run(*["slow"] * 10, timeout=1.5))


def test_a_worker_that_does_not_start(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool, "_WORKER", "no_such_module_at_all")
    outcomes = run("good", "good")
    assert all(isinstance(outcome, CompileFailed) for outcome in outcomes)
    first = outcomes[0]
    assert isinstance(first, CompileFailed)
    assert "no_such_module_at_all" in first.log.read_text()


def test_workers_end_when_the_caller_stops_early(
    told: Callable[[], list[dict[str, Any]]], tmp_path: Path
) -> None:
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    tasks = [{"name": str(number), "do": do} for number, do in enumerate(["good", "hang", "hang"])]
    outcomes = run_tasks(tasks, 2, 30, scratch)
    with contextlib.closing(outcomes):  # pyright: ignore[reportArgumentType]
        next(outcomes)
    assert not any(alive(line["pid"]) for line in told())


@pytest.mark.usefixtures("told")
def test_the_log_of_a_task_holds_nothing_of_other_tasks(tmp_path: Path) -> None:
    # One worker serves both; the second log must not blame the second task for the first's error.
    tasks = [{"name": "one", "do": "fail"}, {"name": "two", "do": "fail"}]
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    for outcome in run_tasks(tasks, 1, 30, scratch):
        assert isinstance(outcome, CompileFailed)
        assert outcome.log.read_text() == "the whole story\n"
