"""Several threads read a set's files and load them."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections import Counter
from pathlib import Path

import pytest

from sonata_aot.artifacts import Choice, open_artifacts

HOPPER = {"SONATA_TEST_CUDA_CC": "9.0"}


def test_several_threads_give_binaries_to_the_driver(recorder, artifacts, manifest, digests):
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
    assert threads == 3
    assert left == 1
    assert binaries == sum(binary["arch"] == "sm90" for binary in manifest["binaries"])
    assert {call["sha256"] for call in outcome.named("cuLibraryLoadData")} == digests


@pytest.mark.parametrize("place", [0, 7, -1])
def test_one_damaged_file_is_found_wherever_it_is(recorder, artifacts, digests, tmp_path, place):
    copy = Path(shutil.copytree(artifacts, tmp_path / "copy"))
    digest = sorted(digests)[place]
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


@pytest.mark.parametrize("call", ["cuLibraryLoadData", "cuKernelGetFunction"])
def test_what_the_driver_refuses_is_named(recorder, artifacts, call):
    outcome = recorder.loader(
        artifacts,
        f"""
        import threading
        from sonata_aot.artifacts.errors import DriverError
        os.environ["SONATA_TEST_CUDA_FAIL"] = "{call}=209"
        try:
            loader.load(ARTIFACTS, devices=[0])
        except DriverError as error:
            say([str(error), threading.active_count()])
        """,
        env=HOPPER,
    )
    message, threads = outcome.value
    assert call in message
    assert "sm90" in message
    assert threads == 1


def test_loads_at_once_give_each_binary_to_the_driver_once(recorder, artifacts, digests):
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
    assert calls == dict.fromkeys(digests, 1)


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


@pytest.mark.parametrize("enabled", [True, False])
def test_a_fork_meanwhile_has_the_collection_of_cycles_as_before(recorder, artifacts, enabled):
    outcome = recorder.loader(
        artifacts,
        f"""
        import gc, threading
        from sonata_aot.loader import _native
        if not {enabled}:
            gc.disable()
        plain, begun, forked = _native.load, threading.Event(), threading.Event()

        def load(*given, **named):
            begun.set()
            assert forked.wait(20)
            return plain(*given, **named)

        _native.load = load
        thread = threading.Thread(target=lambda: loader.load(ARTIFACTS, devices=[0]))
        thread.start()
        assert begun.wait(20)
        during, child = gc.isenabled(), os.fork()
        if child == 0:
            os._exit(gc.isenabled())
        _, status = os.waitpid(child, 0)
        forked.set()
        thread.join()
        say([during, os.waitstatus_to_exitcode(status), gc.isenabled()])
        """,
        env=HOPPER,
    )
    assert outcome.value == [False, int(enabled), enabled]


def test_a_missing_file_is_named_whatever_is_wrong_for_others(
    recorder, artifacts, digests, tmp_path
):
    """Entries of other architectures are not looked at, nor when the manifest is read again."""
    copy = Path(shutil.copytree(artifacts, tmp_path / "copy"))
    content = json.loads((copy / "manifest.json").read_text())
    next(b for b in content["binaries"] if b["arch"] == "sm86")["registers"] = 999
    above = "{\n" + "".join(
        f'"{key}":{json.dumps(value)},\n' for key, value in content.items() if key != "digest"
    )
    digest = hashlib.sha256(above.encode()).hexdigest()
    (copy / "manifest.json").write_text(f'{above}"digest":"{digest}"\n}}\n')
    missing = sorted(digests)[0]
    (copy / "objects" / f"{missing}.cubin").unlink()
    case = {"loader.load(ARTIFACTS, devices=[0])": ("IntegrityError", missing, "is missing")}
    recorder.refused(copy, case, env=HOPPER)


def test_devices_of_two_architectures(recorder, artifacts, manifest):
    outcome = recorder.loader(
        artifacts,
        """
        from sonata_aot.loader import _native
        plain = _native.devices
        _native.devices = lambda: [plain()[0], {**plain()[1], "major": 8, "minor": 6}]
        k = loader.load(ARTIFACTS, devices=[1, 0])
        say([[d["arch"], len(d["binaries"])] for d in k.info()["devices"].values()])
        """,
        env={**HOPPER, "SONATA_TEST_CUDA_DEVICES": "2"},
    )
    built = Counter(binary["arch"] for binary in manifest["binaries"])
    assert sorted(outcome.value) == [[arch, built[arch]] for arch in ("sm86", "sm90")]
    given = Counter(call["sha256"] for call in outcome.named("cuLibraryLoadData"))
    assert given == Counter({binary["cubin"]["sha256"] for binary in manifest["binaries"]})


def test_one_device_after_the_other_in_the_order_of_the_manifest(artifacts):
    from sonata_aot.loader.fetch import fetch

    found = open_artifacts(artifacts)
    choices = {
        device: Choice(arch, "ptx", "", ())
        for device, arch in ((1, "sm90"), (0, "sm86"), (2, "sm90"))
    }
    got = [(device, loaded.binary) for device, loaded in fetch(found, choices, ())]
    assert got == [
        (device, binary)
        for device, choice in choices.items()
        for binary in found.manifest.binaries
        if binary.arch == choice.arch
    ]
