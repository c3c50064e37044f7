"""Runs compile workers: as many as allowed, one task each, no worker able to hang the build."""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .worker import absolute_entries, environment_for_worker

_WORKER = "sonata_aot.aot.worker"
# Seconds in which a worker must end that has closed its output.
_LAST_BREATH = 2.0


@dataclass(frozen=True)
class Compiled:
    """A task that succeeded: the files it left, and how long it took in seconds."""

    index: int
    cubin: Path
    ptx: Path
    seconds: float


@dataclass(frozen=True)
class CompileFailed:
    """A task that failed: the first line of the reason, and the compiler's whole output.

    `source` is the kernel's line of code that it failed at, empty if that is unknown.
    """

    index: int
    error: str
    log: Path
    source: str = ""


class _Worker:
    def __init__(self, scratch: Path) -> None:
        scratch.mkdir()
        self.log = scratch / "log.txt"
        folder = scratch / "work"
        folder.mkdir()
        with open(self.log, "ab") as log:  # appending, so that `give` can cut it
            self.process = subprocess.Popen(
                [sys.executable, "-m", _WORKER, *absolute_entries(sys.path)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                cwd=folder,
                env=environment_for_worker(dict(os.environ), str(folder), sys.path),
                # Ctrl-C goes to the parent alone, which ends its workers.
                start_new_session=True,
            )
        self.index = -1
        self.started = 0.0
        self._received = b""

    def give(self, index: int, task: dict[str, Any]) -> None:
        assert self.process.stdin is not None
        self.index, self.started = index, time.monotonic()
        os.truncate(self.log, 0)
        # If it has died, its closed output will say so.
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.write(json.dumps(task).encode() + b"\n")
            self.process.stdin.flush()

    def receive(self) -> dict[str, Any] | None:
        """The answer, or None while it is not whole. A dead worker answers with an error."""
        assert self.process.stdout is not None
        chunk = os.read(self.process.stdout.fileno(), 65536)
        self._received += chunk
        line, newline, rest = self._received.partition(b"\n")
        if newline:
            self._received = rest
            answer = _answer(line)
            return self._wrong(f"said {line[:40]!r}") if answer is None else answer
        if chunk:
            return None
        try:
            status = self.process.wait(_LAST_BREATH)
        except subprocess.TimeoutExpired:
            return self._wrong("closed its output")
        reason = f"signal {-status}" if status < 0 else f"exit status {status}"
        return {"ok": False, "error": f"the compile worker died ({reason})"}

    def _wrong(self, what: str) -> dict[str, Any]:
        """End a worker whose answers cannot be relied on: a kernel's module runs in it."""
        os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        return {"ok": False, "error": f"the compile worker {what}: does the kernel's module do so?"}

    def kept_log(self) -> Path:
        """What the compiler printed about this task, in a file that the next task leaves alone."""
        kept = self.log.with_name(f"task{self.index}.txt")
        shutil.copyfile(self.log, kept)
        return kept

    def end(self) -> None:
        # With whatever it has started: it leads a session of its own.
        if self.process.returncode is None:  # or the number may be another's by now
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout):
            assert pipe is not None
            with contextlib.suppress(BrokenPipeError):
                pipe.close()


def run_tasks(
    tasks: Sequence[dict[str, Any]], workers: int, timeout: float, scratch: Path
) -> Generator[Compiled | CompileFailed, None, None]:
    """Compile every task, yielding each outcome as it comes.

    A worker that dies, or takes longer than `timeout` seconds over one task, is replaced; its task
    has failed. All workers end when the iterator does, however it does. `scratch` must be an empty
    directory; outcomes name files in it.
    """
    waiting = list(enumerate(tasks))[::-1]
    names = iter(range(sys.maxsize))
    active: dict[int, _Worker] = {}
    with selectors.DefaultSelector() as selector:

        def start() -> None:
            worker = _Worker(scratch / f"worker{next(names)}")
            assert worker.process.stdout is not None
            active[worker.process.pid] = worker
            selector.register(worker.process.stdout, selectors.EVENT_READ, worker)
            worker.give(*waiting.pop())

        def retire(worker: _Worker) -> None:
            assert worker.process.stdout is not None
            selector.unregister(worker.process.stdout)
            del active[worker.process.pid]
            worker.end()

        try:
            while waiting or active:
                while waiting and len(active) < workers:
                    start()
                now = time.monotonic()
                patience = min(worker.started + timeout - now for worker in active.values())
                for key, _ in selector.select(max(patience, 0)):
                    worker: _Worker = key.data
                    answer = worker.receive()
                    if answer is None:
                        continue
                    yield _outcome(worker, answer)
                    if worker.process.poll() is None and waiting:
                        worker.give(*waiting.pop())
                    else:
                        retire(worker)
                for worker in list(active.values()):
                    if time.monotonic() - worker.started >= timeout:
                        retire(worker)
                        error = f"took longer than {timeout:g} s and was ended"
                        yield CompileFailed(worker.index, error, worker.kept_log())
        finally:
            for worker in list(active.values()):
                retire(worker)


def _answer(line: bytes) -> dict[str, Any] | None:
    """An answer; None if it is none, since a kernel's module can write to any open file."""
    with contextlib.suppress(ValueError, RecursionError):
        match json.loads(line):
            case {"ok": True, "cubin": str(), "ptx": str()} | {"ok": False, "error": str()} as said:
                return said
    return None


def _outcome(worker: _Worker, answer: dict[str, Any]) -> Compiled | CompileFailed:
    if not answer["ok"]:
        source = answer.get("source", "")
        return CompileFailed(worker.index, answer["error"], worker.kept_log(), source)
    seconds = time.monotonic() - worker.started
    return Compiled(worker.index, Path(answer["cubin"]), Path(answer["ptx"]), seconds)
