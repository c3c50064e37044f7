"""The loader beside threads, forks, and builds that replace what it reads."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

HOPPER = {"SONATA_TEST_CUDA_CC": "9.0"}
PTX = "k = loader.load(ARTIFACTS, arch='sm86', allow_ptx=True, devices=[0])\n"
FORK = """
import threading, time

def in_child(work):
    # What the work returns in a forked child; the child is ended where it hangs.
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reader)
        with open(writer, "w") as out:
            json.dump(work(), out)
        os._exit(0)
    os.close(writer)
    import select
    hangs = not select.select([reader], [], [], 20)[0]
    if hangs:
        os.kill(child, 9)
    with open(reader) as answer:
        text = answer.read()
    os.waitpid(child, 0)
    return "hangs" if hangs else json.loads(text)
"""


def test_a_fork_while_another_thread_loads_ptx(recorder, artifacts):
    """The child inherits the loader's lock, held by a thread that does not exist in it."""
    script = """
from sonata_aot.loader.library import Loaded
os.environ["SONATA_TEST_CUDA_DELAY"] = "cuLibraryLoadData=1500"
loading, plain = [], Loaded.kernel
Loaded.kernel = lambda loaded: (loading.append(loaded), plain(loaded))[1]
worker = threading.Thread(target=lambda: k.gemv(tensor(1, 64), tensor(16, 64)))
worker.start()
time.sleep(0.5)
before = worker.is_alive()
answers = in_child(lambda: [
    failure(lambda: plain(loading[0])),  # the very one, whose lock is held
    *(failure(lambda: k.gemv(tensor(rows, 64), tensor(16, 64))) for rows in (1, 2)),
])
during = worker.is_alive()
worker.join()
k.gemv(tensor(2, 64), tensor(16, 64))  # the parent goes on
say([before, during, answers])
"""
    outcome = recorder.loader(artifacts, FORK + PTX + script, env=HOPPER, timeout=60)
    before, during, answers = outcome.value
    assert before, "the load was over before the fork"
    assert answers != "hangs"
    assert [(a["type"], a["sonata"]) for a in answers] == [("ForkedProcess", True)] * 3
    assert during, "the fork waited for the load"
    assert len(outcome.named("cuLaunchKernel")) == 2


def test_load_in_a_forked_child(recorder, artifacts):
    script = """
loader.load(ARTIFACTS, devices=[0])
say(in_child(lambda: failure(lambda: loader.load(ARTIFACTS, devices=[0]))))
"""
    answer = recorder.loader(artifacts, FORK + script, env=HOPPER).value
    assert answer["type"] == "ForkedProcess"
    assert "'spawn'" in answer["message"]


def test_a_child_of_a_parent_that_only_imported_the_loader_may_load(recorder, artifacts):
    script = "say(in_child(lambda: loader.load(ARTIFACTS, devices=[0]).info()['directory']))"
    assert recorder.loader(artifacts, FORK + script, env=HOPPER).value == str(artifacts)


def test_threads_that_are_first_to_use_ptx_load_it_once(recorder, artifacts):
    script = """
import threading
os.environ["SONATA_TEST_CUDA_DELAY"] = "cuLibraryLoadData=200"
barrier = threading.Barrier(4)
def work():
    barrier.wait()
    k.gemv(tensor(1, 64), tensor(16, 64))
threads = [threading.Thread(target=work) for _ in range(4)]
for thread in threads: thread.start()
for thread in threads: thread.join()
"""
    outcome = recorder.loader(artifacts, PTX + script, env=HOPPER)
    assert len(outcome.named("cuLibraryLoadData")) == 1
    assert len(outcome.named("cuLaunchKernel")) == 4
    assert {call["result"] for call in outcome.calls} == {0}


# Publishes two sets in turn into TARGET, with a pause like that between two builds.
PUBLISHER = """
import sys, time
from pathlib import Path
from sonata_aot.artifacts import open_artifacts, publish
target, *sources = map(Path, sys.argv[1:])
sets = [open_artifacts(source) for source in sources]
objects = [{p.file_name: s.read(p) for _, p in s.manifest.payloads()} for s in sets]
print("ready", flush=True)
while True:
    for source, data in zip(sets, objects):
        publish(target, source.manifest, data)
        time.sleep(0.03)
"""


def test_load_never_fails_while_builds_replace_the_set(recorder, make_set, gemv, tmp_path):
    sources = [make_set(gemv), make_set(gemv, padding=b"\n")]
    target = tmp_path / "target"
    shutil.copytree(sources[0], target)
    command = [sys.executable, "-c", PUBLISHER, str(target), *map(str, sources)]
    with contextlib.ExitStack() as stack:
        publisher = stack.enter_context(subprocess.Popen(command, stdout=subprocess.PIPE))
        stack.callback(publisher.kill)
        assert publisher.stdout is not None
        assert publisher.stdout.readline() == b"ready\n"
        outcome = recorder.loader(
            target,
            """
            import time
            seen, problems, count, end = set(), [], 0, time.monotonic() + 4
            while time.monotonic() < end:
                count += 1
                try:
                    seen.add(loader.load(ARTIFACTS, devices=[0]).info()["digest"])
                except loader.SonataError as error:
                    problems.append(str(error))
            say([count, problems, len(seen)])
            """,
            env=HOPPER,
        )
        assert publisher.poll() is None
    count, problems, seen = outcome.value
    assert problems == []
    assert seen == 2
    assert count > 50


@pytest.fixture
def public(artifacts):
    """A copy of the set that every user may read."""
    if os.geteuid() != 0:
        pytest.skip("only root can become another user")
    folder = Path(tempfile.mkdtemp(prefix="sonata-aot-test-")).resolve()
    shutil.copytree(artifacts, folder / "artifacts")
    for path in (folder, *folder.rglob("*")):
        path.chmod(0o755 if path.is_dir() else 0o644)
    yield folder / "artifacts"
    shutil.rmtree(folder)


def test_a_user_without_a_home_loads_what_is_named(recorder, public):
    """As in a container that runs under a number: no HOME, and in no user database."""
    outcome = recorder.loader(
        public,
        """
        from sonata_aot.loader import _native
        _native.driver_state()  # opened while it can be: the stand-in lies in a folder of root's
        for name in ("SONATA_TEST_CUDA_LOG", "SONATA_AOT_CACHE_DIR", "HOME", "XDG_CACHE_HOME"):
            os.environ.pop(name, None)
        os.setgroups([]); os.setgid(54321); os.setuid(54321)
        nothing = failure(lambda: loader.load(devices=[0]))
        os.environ["SONATA_AOT_DIR"] = ARTIFACTS
        say([nothing, loader.load(devices=[0]).info()["directory"]])
        """,
        env=HOPPER,
    )
    nothing, directory = outcome.value
    assert (nothing["type"], nothing["sonata"]) == ("ArtifactsNotFound", True)
    assert directory == str(public)
