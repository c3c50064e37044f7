"""Fixtures of the artifact format's tests: one small real build, shared by all of them."""

from __future__ import annotations

import dataclasses
import fcntl
import json
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings

sys.path.insert(0, str(Path(__file__).parent))  # for the helpers beside this file

from artifact_sets import ODD, Made, rules_for, run_python

from sonata_aot.aot.build import build
from sonata_aot.artifacts import open_artifacts, publish
from sonata_aot.artifacts.arch import Arch

settings.register_profile("same-every-run", derandomize=True, max_examples=100, deadline=None)
settings.load_profile("same-every-run")

NOBODY = 65534


@pytest.fixture(autouse=True)
def no_endless_wait() -> Iterator[None]:
    """Ends a test that waits for ever, as a reader of a FIFO does."""

    def expired(signal_number: int, frame: object) -> None:
        raise TimeoutError("this test takes too long")

    before = signal.signal(signal.SIGALRM, expired)
    signal.alarm(60)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


@pytest.fixture(scope="session")
def both(shared_directory: Path) -> Made:
    """`odd` in two variants for sm86 and sm90, compiled once per test run by the build itself."""
    directory = shared_directory / "odd-artifacts"
    with open(shared_directory / "odd.lock", "w") as lock, pytest.MonkeyPatch.context() as patch:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not directory.exists():
            patch.setenv("SONATA_AOT_CACHE_DIR", str(shared_directory / "odd-cache"))
            # For the compile workers to find `odd_kernel`.
            patch.setenv("PYTHONPATH", str(Path(__file__).parent), prepend=os.pathsep)
            staging = shared_directory / "odd-staging"
            archs = (Arch.parse("sm86"), Arch.parse("sm90"))
            build((ODD,), archs, out=staging, workers=2, timeout=120)
            staging.rename(directory)
    artifacts = open_artifacts(directory)
    objects = {p.file_name: artifacts.read(p) for _, p in artifacts.manifest.payloads()}
    # Whatever the state of this checkout is, the tests see the same.
    source = dataclasses.replace(artifacts.manifest.source, commit="c" * 40, dirty=False)
    rules = (*rules_for("sm86"), *rules_for("sm90"))
    return Made(dataclasses.replace(artifacts.manifest, source=source, rules=rules), objects)


@pytest.fixture(scope="session")
def made(both: Made) -> Made:
    """The two binaries for sm86."""
    return both.of("sm86")


@pytest.fixture
def directory(made: Made, tmp_path: Path) -> Path:
    """`made`, published."""
    target = tmp_path / "artifacts"
    publish(target, made.manifest, made.objects)
    return target


@pytest.fixture
def open_place() -> Iterator[Path]:
    """A new directory that every user can enter, in the system's sticky temporary directory."""
    place = Path(tempfile.mkdtemp(prefix="sonata-aot-test-")).resolve()
    place.chmod(0o755)
    yield place
    shutil.rmtree(place, ignore_errors=True)


@pytest.fixture
def as_nobody() -> Callable[..., Any]:
    """Runs code in a process of user 65534; returns what it assigns to `answer`.

    A `SonataError` comes back as the name of its class and its message.
    """
    if os.geteuid() != 0:
        pytest.skip("only root can become another user")

    def call(code: str, *arguments: object) -> Any:
        # Everything is imported first: the other user may have no access to the interpreter.
        script = f"""
import encodings.idna, json, os, shutil, sys
from pathlib import Path
from sonata_aot.artifacts import SonataError, open_artifacts, publish
from sonata_aot.artifacts.verify import verify
from sonata_aot.artifacts.trust import require_trusted
arguments = [Path(text) for text in sys.argv[1:]]
if {"True" if "SOURCE" in code else "False"}:
    SOURCE = open_artifacts(arguments[-1])
    OBJECTS = {{p.file_name: SOURCE.read(p) for _, p in SOURCE.manifest.payloads()}}
os.setgroups([]); os.setgid({NOBODY}); os.setuid({NOBODY})
answer = None
try:
{code}
except SonataError as error:
    answer = [type(error).__name__, str(error)]
print(json.dumps(answer))
"""
        return json.loads(run_python(script, *arguments))

    return call
