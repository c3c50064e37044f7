"""What the caller of `load` and its helpers leave to one another, and what ends them."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from sonata_aot.artifacts import open_artifacts
from sonata_aot.artifacts.pack import PACK, pack_ptx

HOPPER = {"SONATA_TEST_CUDA_CC": "9.0"}


@pytest.mark.parametrize("first_that_fails", [0, 1])
def test_where_no_more_threads_may_be_had(recorder, artifacts, manifest, digests, first_that_fails):
    outcome = recorder.loader(
        artifacts,
        f"""
        import threading
        begun, plain = [], threading.Thread.start

        def start(thread):
            begun.append(1)
            if len(begun) > {first_that_fails}:
                raise RuntimeError("can't start new thread")
            plain(thread)

        threading.Thread.start = start
        k = loader.load(ARTIFACTS, devices=[0])
        say([len(begun), len(k.info()["devices"][0]["binaries"])])
        """,
        env=HOPPER,
    )
    begun, binaries = outcome.value
    assert begun == first_that_fails + 1
    assert binaries == sum(binary["arch"] == "sm90" for binary in manifest["binaries"])
    assert {call["sha256"] for call in outcome.named("cuLibraryLoadData")} == digests


# The script's `bringing` is called before a kernel is brought to the device.
LIBRARY = """
import threading
from sonata_aot.loader import _native
main, plain = threading.main_thread(), _native.load

class Library:
    def __init__(self, *given, **named):
        self.plain = plain(*given, **named)

    def kernel(self, *given):
        bringing()
        return self.plain.kernel(*given)
"""


def test_the_caller_has_kernels_brought_while_helpers_load_libraries(recorder, artifacts, digests):
    outcome = recorder.loader(
        artifacts,
        LIBRARY
        + """
brought, helped, by_the_caller = threading.Event(), [], []

def bringing():
    by_the_caller.append(threading.current_thread() is main)
    brought.set()

def load(*given, **named):
    if threading.current_thread() is not main:
        # A helper's second library waits for the kernel of one before.
        assert not helped or brought.wait(20)
        helped.append(1)
    return Library(*given, **named)

_native.load = load
loader.load(ARTIFACTS, devices=[0])
say([len(helped), by_the_caller])
""",
        env=HOPPER,
    )
    helped, by_the_caller = outcome.value
    assert helped > 1
    assert by_the_caller == [True] * len(digests)


def test_the_caller_brings_a_kernel_before_it_reads_another_file(recorder, artifacts):
    """So that what one thread at a time may do begins at once."""
    outcome = recorder.loader(
        artifacts,
        LIBRARY
        + """
enough, loaded, before = threading.Event(), [], []

def bringing():
    before.append(len(loaded))
    if len(before) == 20:
        enough.set()

def load(*given, **named):
    if threading.current_thread() is main:
        loaded.append(1)
    else:
        assert enough.wait(20)
    return Library(*given, **named)

_native.load = load
loader.load(ARTIFACTS, devices=[0])
say(before[:20])
""",
        env=HOPPER,
    )
    assert outcome.value == list(range(1, 21))


@pytest.mark.parametrize("error", ["MemoryError", "KeyboardInterrupt"])
def test_a_helper_that_fails_when_the_caller_waits(recorder, artifacts, error):
    outcome = recorder.loader(
        artifacts,
        f"""
        import threading
        from sonata_aot.loader import _native, fetch
        main, plain, waiting = threading.main_thread(), _native.load, threading.Event()

        class Queue(fetch.SimpleQueue):
            def get(self):
                waiting.set()
                return super().get()

        def load(*given, **named):
            if threading.current_thread() is not main:
                assert waiting.wait(20)
                raise {error}("here")
            return plain(*given, **named)

        fetch.SimpleQueue, _native.load = Queue, load
        try:
            loader.load(ARTIFACTS, devices=[0])
        except {error} as error:
            say([str(error), threading.active_count()])
        """,
        env=HOPPER,
    )
    assert outcome.value == ["here", 1]


@pytest.mark.parametrize("fails", [False, True])
def test_a_helper_that_began_though_it_could_not_be_started(recorder, artifacts, digests, fails):
    """What interrupts a start, a handler of signals perhaps, may come when the thread is there."""
    outcome = recorder.loader(
        artifacts,
        f"""
        import threading
        from sonata_aot.loader import fetch
        counted, begun, over = [], threading.Event(), threading.Event()
        plain_read, plain_finish = fetch._Fetch._read, fetch._Fetch._finish

        class Pool(fetch.ThreadPoolExecutor):
            def submit(self, *given):
                super().submit(*given)
                if counted:
                    assert begun.wait(20)
                    raise RuntimeError("interrupted")
                counted.append(1)

        def read(self, file):
            # A helper's first file comes when the caller has finished with all others.
            if threading.current_thread() is not main and not begun.is_set():
                begun.set()
                assert over.wait(20)
                if {fails}:
                    raise MemoryError("here")
            plain_read(self, file)

        def finish(self, helpers):
            if helpers:
                helpers = 0  # as if the other one had ended
            plain_finish(self, helpers)
            over.set()

        main = threading.main_thread()
        fetch.ThreadPoolExecutor = Pool
        fetch._Fetch._read, fetch._Fetch._finish = read, finish
        try:
            k = loader.load(ARTIFACTS, devices=[0])
            tables = [k.table(name) for name in k]
            say([loaded._kernel is not None for table in tables for loaded in table.all().values()])
        except MemoryError as error:
            say(str(error))
        """,
        env=HOPPER,
    )
    assert outcome.value == ("here" if fails else [True] * len(digests))


# The caller takes files only when no helper does any more.
HELPERS_FIRST = """
import threading
from sonata_aot.loader import fetch
plain_help, plain_finish = fetch._Fetch._help, fetch._Fetch._finish
others_done = threading.Semaphore(0)

def help(self):
    try:
        return plain_help(self)
    finally:
        others_done.release()

def finish(self, helpers):
    assert all(others_done.acquire(timeout=20) for _ in range(helpers))
    return plain_finish(self, helpers)

fetch._Fetch._help, fetch._Fetch._finish = help, finish
"""


def test_helpers_may_what_the_caller_allows(recorder, artifacts, tmp_path):
    """Packed PTX makes them read the manifest, and so look at who could have changed it."""
    copy = Path(shutil.copytree(artifacts, tmp_path / "copy"))
    whole = open_artifacts(copy)
    (copy / PACK).write_bytes(pack_ptx(whole.manifest, whole.read))
    for path in (copy / "objects").glob("*.ptx"):
        path.unlink()
    copy.chmod(0o777)
    outcome = recorder.loader(
        copy,
        HELPERS_FIRST
        + """
k = loader.load(ARTIFACTS, arch="sm86", allow_ptx=True, devices=[0], allow_untrusted=True)
say([k.info()["untrusted"], k.info()["devices"][0]["form"]])
""",
        env=HOPPER,
    )
    assert outcome.value == [[f"{copy} is writable by everybody"], "ptx"]


@pytest.mark.parametrize("error", ["MemoryError", "KeyboardInterrupt"])
def test_what_ends_a_helper_ends_load(recorder, artifacts, error):
    """And the others begin with no other file."""
    outcome = recorder.loader(
        artifacts,
        HELPERS_FIRST
        + f"""
from sonata_aot.loader import _native
plain, all_there = _native.load, threading.Barrier(fetch._HELPERS, timeout=20)

def load(*given, **named):
    if all_there.wait() == 0:
        raise {error}("here")
    failed.wait(20)
    return plain(*given, **named)

class Failed(threading.Event):
    def __set__(self, fetching, value):
        fetching.__dict__["_error"] = value
        if value:
            self.set()

    def __get__(self, fetching, kind=None):
        return fetching.__dict__["_error"]

failed = fetch._Fetch._error = Failed()
_native.load = load
try:
    loader.load(ARTIFACTS, devices=[0])
except {error} as error:
    say([str(error), threading.active_count()])
""",
        env=HOPPER,
    )
    assert outcome.value == ["here", 1]
    assert len(outcome.named("cuLibraryLoadData")) == 1


def test_an_interrupt_while_helpers_are_started(recorder, artifacts):
    outcome = recorder.loader(
        artifacts,
        """
        import threading
        from sonata_aot.loader import _native, fetch
        submitted, begun, plain = [], threading.Event(), _native.load
        over = threading.Event()

        class Pool(fetch.ThreadPoolExecutor):
            def submit(self, *given):
                if submitted:
                    assert begun.wait(20)
                    raise KeyboardInterrupt
                submitted.append(1)
                return super().submit(*given)

            def __exit__(self, *given):
                over.set()
                return super().__exit__(*given)

        def load(*given, **named):
            begun.set()
            assert over.wait(20)
            return plain(*given, **named)

        _native.load, fetch.ThreadPoolExecutor = load, Pool
        try:
            loader.load(ARTIFACTS, devices=[0])
        except KeyboardInterrupt:
            say(threading.active_count())
        """,
        env=HOPPER,
    )
    assert outcome.value == 1
    assert len(outcome.named("cuLibraryLoadData")) == 1
