"""Several threads read a set's files and load them."""

from __future__ import annotations

import shutil
from collections import Counter
from pathlib import Path

import pytest

HOPPER = {"SONATA_TEST_CUDA_CC": "9.0"}


def digests(manifest) -> set[str]:
    return {b["cubin"]["sha256"] for b in manifest["binaries"] if b["arch"] == "sm90"}


def test_several_threads_give_binaries_to_the_driver(recorder, artifacts, manifest):
    outcome = recorder.loader(
        artifacts,
        """
        import threading
        from sonata_aot.loader import _native, fetch
        busy, plain = threading.Barrier(1 + fetch._HELPERS, timeout=20), _native.load
        first, seen = threading.local(), set()

        def waiting(*given, **named):
            # Each thread's first binary waits for those of all others.
            if not hasattr(first, "past"):
                first.past = True
                seen.add(threading.get_ident())
                busy.wait()
            return plain(*given, **named)

        _native.load = waiting
        k = loader.load(ARTIFACTS, devices=[0])
        say([len(seen), threading.active_count(), len(k.info()["devices"][0]["binaries"])])
        """,
        env=HOPPER,
    )
    threads, left, binaries = outcome.value
    assert threads == 4
    assert left == 1
    assert binaries == sum(binary["arch"] == "sm90" for binary in manifest["binaries"])
    assert {call["sha256"] for call in outcome.named("cuLibraryLoadData")} == digests(manifest)


@pytest.mark.parametrize("first_that_fails", [0, 2])
def test_where_no_more_threads_may_be_had(recorder, artifacts, manifest, first_that_fails):
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
    assert {call["sha256"] for call in outcome.named("cuLibraryLoadData")} == digests(manifest)


@pytest.mark.parametrize("place", [0, 7, -1])
def test_one_damaged_file_is_found_wherever_it_is(recorder, artifacts, manifest, tmp_path, place):
    copy = Path(shutil.copytree(artifacts, tmp_path / "copy"))
    digest = sorted(digests(manifest))[place]
    path = copy / "objects" / f"{digest}.cubin"
    path.write_bytes(path.read_bytes()[:-1] + b"?")
    outcome = recorder.loader(
        copy,
        """
        import threading
        from sonata_aot.artifacts.errors import IntegrityError
        try:
            loader.load(ARTIFACTS, devices=[0])
        except IntegrityError as error:
            say([str(error), threading.active_count()])
        """,
        env=HOPPER,
    )
    message, threads = outcome.value
    assert digest in message
    assert "SHA-256" in message
    assert threads == 1
    assert digest not in {call["sha256"] for call in outcome.named("cuLibraryLoadData")}


def test_what_the_driver_refuses_is_named(recorder, artifacts):
    outcome = recorder.loader(
        artifacts,
        """
        from sonata_aot.artifacts.errors import DriverError
        os.environ["SONATA_TEST_CUDA_FAIL"] = "cuLibraryLoadData=209"
        try:
            loader.load(ARTIFACTS, devices=[0])
        except DriverError as error:
            say(str(error))
        """,
        env=HOPPER,
    )
    assert "cuLibraryLoadData" in outcome.value
    assert "sm90" in outcome.value


def test_loads_at_once_give_each_binary_to_the_driver_once(recorder, artifacts, manifest):
    outcome = recorder.loader(
        artifacts,
        """
        import threading
        from concurrent.futures import ThreadPoolExecutor
        from sonata_aot.loader import _native
        together, plain, begun = threading.Barrier(4, timeout=20), _native.load, []

        def load(_):
            together.wait()
            return loader.load(ARTIFACTS, devices=[0])

        with ThreadPoolExecutor(4) as pool:
            loaded = list(pool.map(load, range(4)))
        say([len(k.info()["devices"][0]["binaries"]) for k in loaded])
        """,
        env=HOPPER,
    )
    assert len(set(outcome.value)) == 1
    calls = Counter(call["sha256"] for call in outcome.named("cuLibraryLoadData"))
    assert calls == dict.fromkeys(digests(manifest), 1)


@pytest.mark.parametrize("enabled", [True, False])
@pytest.mark.parametrize("fails", [True, False])
def test_the_collection_of_cycles_is_as_before(recorder, artifacts, enabled, fails):
    outcome = recorder.loader(
        artifacts,
        f"""
        import gc
        from sonata_aot.loader import _native
        if not {enabled}:
            gc.disable()
        during, plain = set(), _native.load

        def seen(*given, **named):
            during.add(gc.isenabled())
            if {fails}:
                raise MemoryError
            return plain(*given, **named)

        _native.load = seen
        try:
            loader.load(ARTIFACTS, devices=[0])
        except MemoryError:
            during.add("failed")
        say([sorted(map(str, during)), gc.isenabled()])
        """,
        env=HOPPER,
    )
    during, after = outcome.value
    assert during == (["False", "failed"] if fails else ["False"])
    assert after == enabled
