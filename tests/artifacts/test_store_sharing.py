"""The artifact directory with more than one process or user."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from artifact_sets import Made, assert_holds, tree

from sonata_aot.artifacts import open_artifacts, publish
from sonata_aot.artifacts.verify import Passed, verify

PUBLISHER = """
import sys
from pathlib import Path
from sonata_aot.artifacts import open_artifacts, publish
target = Path(sys.argv[1])
sets = [open_artifacts(Path(text)) for text in sys.argv[2:]]
objects = [{p.file_name: s.read(p) for _, p in s.manifest.payloads()} for s in sets]
print("ready", flush=True)
sys.stdin.readline()
for _ in range(20):
    for source, data in zip(sets, objects):
        publish(target, source.manifest, data)
"""


@contextlib.contextmanager
def publisher(*arguments: Path) -> Iterator[subprocess.Popen[str]]:
    """A process that waits for `go` and then publishes the sets in turn, many times."""
    command = [sys.executable, "-c", PUBLISHER, *map(str, arguments)]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, text=True) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "ready\n"
            yield process
        finally:
            process.kill()


def go(process: subprocess.Popen[str]) -> None:
    assert process.stdin is not None
    process.stdin.write("go\n")
    process.stdin.flush()


def ended_well(process: subprocess.Popen[str]) -> None:
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 0, errors


def test_concurrent_publishers_leave_one_whole_set(both: Made, tmp_path: Path) -> None:
    sets = [both.only(0), both.only(0, 1, 2, 3)]
    sources = [made.write(tmp_path / str(number)) for number, made in enumerate(sets)]
    target = tmp_path / "target"
    with publisher(target, *sources) as one, publisher(target, *reversed(sources)) as other:
        go(one)
        go(other)
        ended_well(one)
        ended_well(other)
    last = sets[open_artifacts(target).manifest != sets[0].manifest]
    assert_holds(target, last)


def test_a_reader_always_finds_a_manifest_while_another_publishes(
    both: Made, tmp_path: Path
) -> None:
    sets = [both.only(0), both.only(0, 1, 2, 3)]
    target = tmp_path / "target"
    publish(target, sets[0].manifest, sets[0].objects)
    sources = [made.write(tmp_path / made.manifest.digest) for made in sets]
    seen: set[str] = set()
    with publisher(target, *sources) as process:
        go(process)
        while process.poll() is None:
            artifacts = open_artifacts(target)
            seen.add(artifacts.manifest.digest)
            shared = artifacts.manifest.binaries[0].cubin  # in both sets, so never to be missed
            assert artifacts.read(shared) == sets[0].cubin(0)
        ended_well(process)
    assert seen <= {made.manifest.digest for made in sets}


def test_verify_finds_nothing_wrong_while_another_publishes(both: Made, tmp_path: Path) -> None:
    sets = [both.of("sm86"), both.of("sm90")]  # without a file in common
    target = tmp_path / "target"
    publish(target, sets[0].manifest, sets[0].objects)
    sources = [made.write(tmp_path / made.manifest.digest) for made in sets]
    count, wrong = 0, []
    with publisher(target, *sources) as process:
        go(process)
        while process.poll() is None:
            wrong += [outcome for outcome in verify(target) if not isinstance(outcome, Passed)]
            count += 1
        ended_well(process)
    assert wrong == []
    assert count > 1


def _read_only(directory: Path) -> None:
    for path in [directory, *directory.rglob("*")]:
        path.chmod(0o555 if path.is_dir() else 0o444)


def test_a_read_only_set_of_root_is_read_by_another_user(
    made: Made, open_place: Path, as_nobody: Callable[..., Any]
) -> None:
    target = made.write(open_place / "artifacts")
    _read_only(target)
    answer = as_nobody(
        """
    artifacts = open_artifacts(arguments[0])
    data = [artifacts.read(payload) for _, payload in artifacts.manifest.payloads()]
    outcomes = [type(outcome).__name__ for outcome in verify(arguments[0])]
    answer = [sorted(map(len, data)), outcomes, os.geteuid(), os.access(arguments[0], os.W_OK)]
    """,
        target,
    )
    sizes = sorted(len(data) for data in made.objects.values())
    assert answer == [sizes, ["Passed"] * 3, 65534, False]


@pytest.mark.parametrize("exists", [True, False])
def test_another_user_cannot_publish_and_is_told_what_to_do(
    made: Made, open_place: Path, as_nobody: Callable[..., Any], exists: bool
) -> None:
    target, source = open_place / "artifacts", made.write(open_place / "source")
    if exists:
        shutil.copytree(source, target)
        _read_only(target)
    before = tree(open_place)
    kind, message = as_nobody(
        "\n    publish(arguments[0], SOURCE.manifest, {'a.ptx': b'x', **OBJECTS})", target, source
    )
    assert kind == "StoreError"
    assert str(target) in message
    assert "Permission denied" in message
    assert "--out" in message
    assert "SONATA_AOT_DIR" in message
    assert tree(open_place) == before


def test_files_that_another_user_may_not_read_are_named(
    made: Made, open_place: Path, as_nobody: Callable[..., Any]
) -> None:
    target = made.write(open_place / "artifacts")
    target.chmod(0o755)
    (target / "objects").chmod(0o755)
    payload = made.manifest.binaries[0].cubin
    path = target / "objects" / payload.file_name
    path.chmod(0o600)
    code = "\n    artifacts = open_artifacts(arguments[0])\n    answer = [artifacts.read(p).hex() "
    code += "for _, p in artifacts.manifest.payloads()]"
    kind, message = as_nobody(code, target)
    assert kind == "IntegrityError"
    assert f"{path} cannot be read: Permission denied" in message
    (target / "manifest.json").chmod(0o600)
    kind, message = as_nobody(code, target)
    assert kind == "IntegrityError"
    assert "manifest.json cannot be read: Permission denied" in message
    target.chmod(0o700)
    kind, message = as_nobody(code, target)
    assert kind == "IntegrityError"
    assert "permissions" in message


def test_a_published_set_is_this_users_alone(
    directory: Path, open_place: Path, as_nobody: Callable[..., Any]
) -> None:
    moved = open_place / "artifacts"
    shutil.move(directory, moved)
    code = "\n    answer = [os.access(p, os.R_OK) for p in arguments]"
    assert as_nobody(code, moved, moved / "manifest.json") == [False, False]
    assert os.access(moved, os.R_OK)
