"""A build whose compiler hands out what was compiled before, for tests that need many builds.

Everything else is real: the command, its processes, locks, checks of the machine code, the cache
and the published directory.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

WORKER = """
import json, os, sys, time
from pathlib import Path

for line in sys.stdin:
    key = json.loads(line)["stem"]
    with open(os.environ["COUNTED"], "a") as counted:
        counted.write(key + "\\n")
    answer = {"ok": True}
    if len(Path(os.environ["COUNTED"]).read_text().split()) <= int(os.environ.get("FAILS", "0")):
        print(json.dumps({"ok": False, "error": "it fails"}), flush=True)
        continue
    for path in sorted((Path(os.environ["CANNED"]) / "compiled" / key).iterdir()):
        if path.suffix in (".cubin", ".ptx"):
            data, target = path.read_bytes(), Path.cwd() / (key + path.suffix)
            with open(target, "wb") as file:  # in pieces, as a compiler does
                file.write(data[: len(data) // 2])
                file.flush()
                time.sleep(0.002)
                file.write(data[len(data) // 2 :])
            answer[path.suffix[1:]] = str(target)
    print(json.dumps(answer), flush=True)
"""
RUN = """
import signal
from sonata_aot.aot import pool

pool._WORKER = "canned_worker"
# Ctrl-C is ignored in a process whose ancestor a shell put into the background.
signal.signal(signal.SIGINT, signal.default_int_handler)

from sonata_aot.aot.cli import main

main(prog_name="sonata-aot")
"""


@dataclass
class Canned:
    """The command line over a cache of its own, compiling `kernel` for sm86 out of a warm cache."""

    root: Path
    warm_cache: Path
    kernel: str = "ssd_prepare"
    environ: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        (self.root / "canned_worker.py").write_text(WORKER)
        (self.root / "run.py").write_text(RUN)
        self.counted.touch()

    @property
    def cache(self) -> Path:
        return self.root / "cache"

    @property
    def counted(self) -> Path:
        return self.root / "counted"

    @property
    def compiled(self) -> list[str]:
        """The key of each job that a worker was given, in order."""
        return self.counted.read_text().split()

    def start(self, *arguments: str | Path, before: Sequence[str] = ()) -> subprocess.Popen[str]:
        """Start a build in a process of its own."""
        return self._start(
            "build", "--arch=sm86", f"--kernel={self.kernel}", *arguments, before=before
        )

    def build(
        self, *arguments: str | Path, before: Sequence[str] = ()
    ) -> subprocess.CompletedProcess[str]:
        """Run a build to its end."""
        return self._end(self.start(*arguments, before=before))

    def command(self, *arguments: str | Path) -> subprocess.CompletedProcess[str]:
        """Run another command."""
        return self._end(self._start(*arguments))

    def _start(self, *arguments: str | Path, before: Sequence[str] = ()) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [*before, sys.executable, self.root / "run.py", *arguments],
            env={
                **os.environ,
                "PYTHONPATH": str(self.root),
                "SONATA_AOT_CACHE_DIR": str(self.cache),
                "CANNED": str(self.warm_cache),
                "COUNTED": str(self.counted),
                **self.environ,
            },
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            errors="surrogateescape",
        )

    @staticmethod
    def _end(process: subprocess.Popen[str]) -> subprocess.CompletedProcess[str]:
        out, err = process.communicate(timeout=240)
        return subprocess.CompletedProcess(process.args, process.returncode, out, err)


MakeCanned = Callable[[], Canned]
