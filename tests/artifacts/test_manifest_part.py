"""Reading the entries of some architectures alone, as a loader does."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from artifact_sets import Made, put, seal, unsealed

from sonata_aot.artifacts import open_artifacts
from sonata_aot.artifacts.errors import IntegrityError, ManifestError
from sonata_aot.artifacts.manifest import Manifest
from sonata_aot.artifacts.pack import PACK, pack_ptx

ARCHS = ("sm86", "sm90")


def only(*archs: str) -> Callable[[str], bool]:
    return lambda name: name in archs


def refusal(data: bytes, taken: Callable[[str], bool] | None) -> str:
    with pytest.raises(ManifestError) as caught:
        Manifest.from_bytes(data, "there", taken)
    return str(caught.value)


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
    whole = open_artifacts(directory)
    (directory / PACK).write_bytes(pack_ptx(whole.manifest, whole.read))
    for path in (directory / "objects").glob("*.ptx"):
        path.unlink()
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
