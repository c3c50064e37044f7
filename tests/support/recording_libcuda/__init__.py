"""A recording stand-in for the CUDA driver: built here, put on a subprocess's library path.

The launcher opens `libcuda.so.1` by that name and no setting can redirect it, so a test that wants
another driver starts a process whose `LD_LIBRARY_PATH` begins with the folder that `build` fills.
What the stand-in does, and the variables that steer it, is written at the top of its source.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .build import build

__all__ = ["FIRST_CONTEXT", "Outcome", "Recorder", "build"]

PRELUDE = """
import ctypes, json, os, sys, threading, time
from sonata_aot.loader import _native as native

IMAGE = b"image with first_kernel and second_kernel"

def say(value):
    print(json.dumps(value), flush=True)

def failure(call, *args, **kwargs):
    # The exception that a call raises, as data.
    try:
        call(*args, **kwargs)
    except Exception as error:
        kinds = [kind.__name__ for kind in type(error).__mro__]
        return {"type": kinds[0], "kinds": kinds, "message": str(error), **vars(error)}
    return None

def inject(calls):
    os.environ["SONATA_TEST_CUDA_FAIL"] = calls

def driver():
    # The stand-in itself, for what the launcher does not do.
    return ctypes.CDLL("libcuda.so.1")

def set_context(handle):
    assert driver().cuInit(0) == 0
    assert driver().cuCtxSetCurrent(ctypes.c_void_p(handle)) == 0

def current_context():
    handle = ctypes.c_void_p()
    assert driver().cuCtxGetCurrent(ctypes.byref(handle)) == 0
    return handle.value or 0

def first_kernel(shared_bytes=0, device=0):
    return native.load(IMAGE, "gemv", device).kernel("first_kernel", shared_bytes)
"""
"""What `Recorder.native` puts before a script."""

FIRST_CONTEXT = 4096
"""The handle of device 0's primary context; device n has the n-th after it."""


@dataclass(frozen=True)
class Outcome:
    """What a script did: its output, and the driver calls that it made."""

    returncode: int
    stdout: str
    stderr: str
    calls: list[dict[str, Any]] = field(repr=False)

    @property
    def value(self) -> Any:
        """The last line of the output, as JSON."""
        return json.loads(self.stdout.splitlines()[-1])

    def named(self, *names: str) -> list[dict[str, Any]]:
        return [call for call in self.calls if call["call"] in names]

    @property
    def names(self) -> list[str]:
        return [call["call"] for call in self.calls]


@dataclass(frozen=True)
class Recorder:
    """Runs Python scripts against a built stand-in."""

    library: Path
    folder: Path

    def run(
        self,
        script: str,
        *,
        env: Mapping[str, str] | None = None,
        library_path: Sequence[Path] | None = None,
        check: bool = True,
        timeout: float = 120,
    ) -> Outcome:
        """Run a script in a fresh process; `env` holds the stand-in's variables, if any.

        `library_path` replaces the folder of the stand-in. With `check`, a script that fails
        raises with its output.
        """
        log = self.folder / "calls.jsonl"
        log.unlink(missing_ok=True)
        folders = [self.library.parent] if library_path is None else library_path
        # No setting of the developer's: neither the stand-in's nor the product's.
        steering = ("SONATA_TEST_", "SONATA_AOT_")
        environment = {k: v for k, v in os.environ.items() if not k.startswith(steering)}
        environment["LD_LIBRARY_PATH"] = os.pathsep.join(map(str, folders))
        environment["SONATA_TEST_CUDA_LOG"] = str(log)
        environment.update(env or {})
        done = subprocess.run(
            [sys.executable, "-X", "faulthandler", "-c", script],
            cwd=self.folder,  # not the repository, whose folders would shadow installed packages
            env=environment,
            capture_output=True,
            text=True,
            timeout=timeout,
        )
        if check and done.returncode != 0:
            raise AssertionError(f"exit status {done.returncode}\n{done.stdout}{done.stderr}")
        lines = log.read_text().splitlines() if log.exists() else []
        return Outcome(done.returncode, done.stdout, done.stderr, [json.loads(x) for x in lines])

    def native(self, script: str, **options: Any) -> Outcome:
        """Run a script that uses the native launcher: `PRELUDE` comes first."""
        return self.run(PRELUDE + textwrap.dedent(script), **options)
