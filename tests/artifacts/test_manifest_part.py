"""Reading the entries of some architectures alone, as a loader does."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from artifact_sets import Made, put, run_python, seal, unsealed

from sonata_aot.artifacts import open_artifacts, store
from sonata_aot.artifacts.choose import could_run
from sonata_aot.artifacts.errors import IntegrityError, ManifestError
from sonata_aot.artifacts.manifest import Manifest
from sonata_aot.artifacts.pack import PACK, pack_ptx, unpack_ptx

ARCHS = ("sm86", "sm90")


def only(*archs: str) -> Callable[[str], bool]:
    return lambda name: name in archs


def refusal(data: bytes, taken: Callable[[str], bool] | None) -> str:
    with pytest.raises(ManifestError) as caught:
        Manifest.from_bytes(data, "there", taken)
    return str(caught.value)


def pack(directory: Path) -> None:
    whole = open_artifacts(directory)
    (directory / PACK).write_bytes(pack_ptx(whole.manifest, whole.read))
    for path in (directory / "objects").glob("*.ptx"):
        path.unlink()


@pytest.mark.parametrize("taken", [("sm86",), ("sm90",), ARCHS, ()])
def test_a_part_has_the_same_entries_as_the_whole(both: Made, taken: tuple[str, ...]) -> None:
    whole = both.manifest
    assert {binary.arch for binary in whole.binaries} == set(ARCHS)
    part = Manifest.from_bytes(whole.to_bytes(), "there", only(*taken))
    assert part.binaries == tuple(b for b in whole.binaries if b.arch in taken)
    assert part.rules == tuple(rule for rule in whole.rules if rule.arch in taken)
    assert (part.selection, part.kernels) == (whole.selection, whole.kernels)
    assert (part.source, part.digest) == (whole.source, whole.digest)


@pytest.mark.parametrize(
    ("way", "value"),
    [
        (("registers",), 256),
        (("block", 0), 32),
        (("shared_bytes",), 4),
        (("entry",), "another"),
        (("cubin", "sha256"), "0" * 63),
        (("ptx", "isa"), None),
        (("variant", "slots"), -1),
    ],
)
def test_what_is_wrong_with_an_entry(both: Made, way: tuple[str | int, ...], value: Any) -> None:
    """Is refused where it is read, in the words of who reads all, and not looked at elsewhere."""
    content = both.content()
    index = next(i for i, b in enumerate(content["binaries"]) if b["arch"] == "sm90")
    put(content["binaries"][index], way, value)
    data = seal(content)
    assert refusal(data, only("sm90")) == refusal(data, None)
    part = Manifest.from_bytes(data, "there", only("sm86"))
    assert part.binaries == both.of("sm86").manifest.binaries


def test_rules_are_checked_against_what_is_read(both: Made) -> None:
    content = both.content()
    content["rules"] = [rule for rule in content["rules"] if rule["arch"] != "sm90"][1:]
    content["rules"][-1]["variant"]["slots"] = 17
    data = seal(content)
    assert refusal(data, only("sm86")) == refusal(data, None)
    assert Manifest.from_bytes(data, "there", only("sm90")).rules == ()


def test_any_change_under_the_old_digest_is_refused(both: Made) -> None:
    data = both.manifest.to_bytes()
    for at in range(0, len(data), 41):
        changed = data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]
        assert refusal(changed, only("sm86")) == refusal(changed, None)
    content = both.content()
    content["binaries"][0]["registers"] += 1
    assert "digest" in refusal(unsealed(content), only("sm86"))


@pytest.mark.parametrize(
    "change",
    [
        lambda data: b"",
        lambda data: data[:-1],
        lambda data: data + b"\n",
        lambda data: data.replace(b'"schema":1', b'"schema":2', 1),
        lambda data: b"[" * 100_000,
        lambda data: b"null\n",
        lambda data: b"\xff" + data,
        lambda data: re.sub(rb'"digest":"\w+"\n', b"", data),
        lambda data: re.sub(rb'"archs":\[[^]]*\]', b'"archs":7', data),
        lambda data: re.sub(rb'"binaries":\[', b'"binaries":[7,', data),
    ],
)
def test_what_is_no_manifest_is_refused_alike(both: Made, change: Callable[[bytes], bytes]) -> None:
    data = change(both.manifest.to_bytes())
    assert refusal(data, only("sm86")) == refusal(data, None)
    above, found, _ = data.rpartition(b'"digest"')
    if found:  # also where the digest is right
        import hashlib

        digest = hashlib.sha256(above).hexdigest()
        data = above + f'"digest":"{digest}"\n}}\n'.encode()
        if data != both.manifest.to_bytes():
            assert refusal(data, only("sm86")) == refusal(data, None)


def test_packed_ptx_of_a_part_is_found_in_that_of_the_whole(both: Made, tmp_path: Path) -> None:
    directory = both.write(tmp_path / "set")
    pack(directory)
    for arch in ARCHS:
        part = open_artifacts(directory, only(arch))
        for binary in part.manifest.binaries:
            assert part.read(binary.ptx) == both.objects[binary.ptx.file_name]


def test_a_pack_of_another_manifest_is_refused(both: Made, tmp_path: Path) -> None:
    directory = both.write(tmp_path / "set")
    part = open_artifacts(directory, only("sm86"))
    (directory / PACK).write_bytes(b"")
    other = both.changed(0, key="0" * 64)
    (directory / "manifest.json").write_bytes(other.manifest.to_bytes())
    with pytest.raises(IntegrityError, match="not of this manifest any more"):
        part.read(part.manifest.binaries[0].ptx)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("selection", {"archs": [86, "sm90"], "kernels": ["odd"]}),
        ("selection", {"archs": ["sm90", "sm90"], "kernels": ["odd"]}),
        ("selection", ["sm86", "sm90"]),
        ("schema", True),
        ("schema", 1.0),
        ("rules", {}),
        ("rules", ""),
        ("binaries", {}),
    ],
)
def test_what_nobody_writes_under_a_digest_that_is_right(both: Made, key: str, value: Any) -> None:
    """Is refused alike, and is no other error where `only` reads names as a loader does."""
    data = seal({**both.content(), key: value})

    def could(name: str) -> bool:
        return could_run(name, (9, 0), wanted=None, allow_ptx=True)

    assert refusal(data, could) == refusal(data, None)


def test_a_child_unpacks_though_a_thread_of_its_parent_does(both: Made, tmp_path: Path) -> None:
    directory = both.write(tmp_path / "set")
    pack(directory)
    script = """
import os, sys, threading
from pathlib import Path
from sonata_aot.artifacts import open_artifacts, store
artifacts = open_artifacts(Path(sys.argv[1]))
payload = artifacts.manifest.binaries[0].ptx
begun, forked, plain = threading.Event(), threading.Event(), store.unpack_ptx

def unpack(*given):
    begun.set()
    assert forked.wait(20)
    return plain(*given)

store.unpack_ptx = unpack
thread = threading.Thread(target=artifacts.read, args=(payload,))
thread.start()
assert begun.wait(20)
child = os.fork()
if child == 0:
    import signal
    signal.alarm(20)  # ends a child that hangs
    forked.set()
    os._exit(len(artifacts.read(payload)) == payload.size)
forked.set()
thread.join()
_, status = os.waitpid(child, 0)
print(os.waitstatus_to_exitcode(status))
"""
    assert run_python(script, directory) == "1\n"


def test_threads_unpack_once(both: Made, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = both.write(tmp_path / "set")
    pack(directory)
    whole = open_artifacts(directory)
    together, unpacked = threading.Barrier(4, timeout=20), []

    def unpack(path: Path, manifest: Manifest) -> dict[str, bytes]:
        unpacked.append(path)
        time.sleep(0.1)  # time for the others to get here, if they may
        return unpack_ptx(path, manifest)

    monkeypatch.setattr(store, "unpack_ptx", unpack)

    def read(_: int) -> bytes:
        together.wait()
        return whole.read(whole.manifest.binaries[0].ptx)

    with ThreadPoolExecutor(4) as pool:
        assert len(set(pool.map(read, range(4)))) == 1
    assert len(unpacked) == 1
