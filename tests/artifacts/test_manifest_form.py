"""The file's form: which bytes are a manifest, and how fast they are read."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import re
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from artifact_sets import Made, big_manifest, run_python, seal

from sonata_aot.artifacts import manifest, schema
from sonata_aot.artifacts.errors import ManifestError
from sonata_aot.artifacts.manifest import Manifest

DAMAGE: dict[str, Callable[[bytes], bytes]] = {
    "empty": lambda data: b"",
    "one space": lambda data: b" ",
    "not an object": lambda data: b"[]\n",
    "null": lambda data: b"null\n",
    "trailing space": lambda data: data + b" ",
    "no last newline": lambda data: data[:-1],
    "two newlines": lambda data: data + b"\n",
    "leading space": lambda data: b" " + data,
    "byte order mark": lambda data: b"\xef\xbb\xbf" + data,
    "CRLF": lambda data: data.replace(b"\n", b"\r\n"),
    "tabs": lambda data: data.replace(b"\n{", b"\n\t{"),
    "compact": lambda data: json.dumps(json.loads(data), separators=(",", ":")).encode(),
    "one line": lambda data: data.replace(b"\n", b""),
    "a line broken at its end": lambda data: data.replace(b',"key"', b',\n"key"', 1),
    "two objects on one line": lambda data: b"},{".join(data.rsplit(b"},\n{", 1)),
    "escaped letter below": lambda data: b'"\\u006fdd"'.join(data.rsplit(b'"odd"', 1)),
    "a tab": lambda data: data.replace(b',"arch"', b',\t"arch"', 1),
    "a carriage return": lambda data: data.replace(b',"arch"', b',\r"arch"', 1),
    "same value twice": lambda data: data.replace(b'"slots":16', b'"slots":16,"slots":16', 1),
    "a line broken": lambda data: data.replace(b',"arch"', b',\n"arch"', 1),
    "a space": lambda data: data.replace(b',"arch"', b', "arch"', 1),
    "a space before a colon": lambda data: data.replace(b'"arch":', b'"arch" :', 1),
    "indented": lambda data: json.dumps(json.loads(data), indent=1).encode() + b"\n",
    "sorted keys": lambda data: seal(dict(sorted(json.loads(data).items()))),
    "sorted keys inside": lambda data: _sorted_inside(data),
    "digest first": lambda data: _moved_digest(data),
    "escaped letter": lambda data: data.replace(b'"odd"', b'"\\u006fdd"', 1),
    "duplicate key": lambda data: data.replace(b'"tool"', b'"tool":"0.1.0",\n"tool"', 1),
    "same key twice": lambda data: data.replace(b"{\n", b'{\n"schema":1,\n', 1),
    "same choice twice": lambda data: data.replace(b'"slots":16', b'"slots":48,"slots":16', 1),
    "NaN": lambda data: data.replace(b'"registers":', b'"registers":NaN,"x":', 1),
    "float": lambda data: re.sub(rb'"registers":(\d+)', rb'"registers":\1.0', data),
    "minus zero": lambda data: data.replace(b'"index":[0', b'"index":[-0', 1),
    "exponent": lambda data: data.replace(b'"schema":1', b'"schema":1e0', 1),
    "huge integer": lambda data: re.sub(rb'"spills":\d+', b'"spills":' + b"9" * 5000, data),
    "big integer": lambda data: re.sub(rb'"spills":\d+', b'"spills":' + b"9" * 4000, data),
    "deep nesting": lambda data: data.replace(b'"tool":', b'"tool":' + b"[" * 100_000, 1),
    "deep schema": lambda data: b'{"schema": ' + b"[" * 300 + b"]" * 300 + b"}",
    "not UTF-8": lambda data: data.replace(b'"odd"', b'"\xff\xfe"', 1),
    "UTF-16": lambda data: data.decode().encode("utf-16"),
    "NUL inside": lambda data: data.replace(b"odd", b"o\0d", 1),
    "half": lambda data: data[: len(data) // 2],
    "twice": lambda data: data + data,
}


def _moved_digest(data: bytes) -> bytes:
    content = json.loads(data)
    line = f'"digest":"{content.pop("digest")}",\n'.encode()
    return data.replace(b"{\n", b"{\n" + line, 1).replace(b",\n" + line.replace(b",", b""), b"\n")


def _sorted_inside(data: bytes) -> bytes:
    content = json.loads(data)
    content["binaries"][0] = dict(sorted(content["binaries"][0].items()))
    return seal(content)


def _sealed_again(data: bytes) -> bytes:
    """The same bytes with a digest that fits what now stands above it."""
    above = data[: data.rindex(b'"digest"')]
    return above + f'"digest":"{hashlib.sha256(above).hexdigest()}"\n}}\n'.encode()


@pytest.mark.parametrize("damage", DAMAGE.values(), ids=DAMAGE)
def test_bytes_other_than_the_canonical_ones_are_refused(
    made: Made, damage: Callable[[bytes], bytes]
) -> None:
    data = made.manifest.to_bytes()
    damaged = damage(data)
    assert damaged != data
    with pytest.raises(ManifestError, match=r"^given\.json") as caught:
        Manifest.from_bytes(damaged, "given.json")
    assert len(str(caught.value)) < 400
    # Not where all the damage is below the digest: then it is mended.
    if damaged.count(b'\n"digest"') == 1 and _sealed_again(damaged) != data:
        with pytest.raises(ManifestError, match=r"^given\.json"):
            Manifest.from_bytes(_sealed_again(damaged), "given.json")


def test_a_reason_is_precise_although_it_takes_a_second_look(made: Made) -> None:
    data = made.manifest.to_bytes()
    for old, new, reason in (
        (b'"slots":16', b'"slots":48,"slots":16', "the key 'slots' stands twice"),
        (b'"schema":1', b'"schema":1.0', "the number 1.0 is not an integer"),
        (b'"tool"', b' "tool"', "not in canonical form"),
        (b'"spills":2', b'"spills":3', "its digest does not match"),
    ):
        with pytest.raises(ManifestError, match=reason):
            Manifest.from_bytes(data.replace(old, new, 1))


def test_each_object_in_a_list_has_lines_of_its_own(made: Made) -> None:
    lines = made.manifest.to_bytes().decode().splitlines()
    assert lines[0] == "{"
    assert lines[1:3] == ['"schema":1,', f'"tool":"{made.manifest.tool}",']
    assert [line.split(":")[0] for line in lines[-3:]] == ["],", '"digest"', "}"]
    for key, items in (("rules", made.manifest.rules), ("binaries", made.manifest.binaries)):
        start = lines.index(f'"{key}":[') + 1
        found = [json.loads(line.rstrip(",")) for line in lines[start : start + len(items)]]
        assert [item["arch"] for item in found] == [item.arch for item in items]
        assert lines[start + len(items)] == "],"


def test_the_digest_is_that_of_the_lines_above_it(made: Made) -> None:
    data = made.manifest.to_bytes()
    above, digest = data[: data.rindex(b'"digest"')], made.manifest.digest
    assert hashlib.sha256(above).hexdigest() == digest
    assert Manifest.from_bytes(data).digest == digest
    changed = dataclasses.replace(Manifest.from_bytes(data), tool="9")
    assert changed.digest != digest


@pytest.mark.parametrize("key", ["rules", "binaries"])
def test_a_long_list_is_not_written_again_to_be_checked(
    made: Made, monkeypatch: pytest.MonkeyPatch, key: str
) -> None:
    data = made.manifest.to_bytes()
    written: list[object] = []

    def note(value: object) -> str:
        written.append(value)
        return schema.canonical_text(value)

    monkeypatch.setattr(manifest, "canonical_text", note)
    assert Manifest.from_bytes(data) == made.manifest
    assert json.loads(data)[key] not in written
    assert json.loads(data)["kernels"] in written


def test_a_big_manifest_is_read_in_little_more_time_than_its_json() -> None:
    def best(read: Callable[[bytes], object]) -> float:
        def once() -> float:
            began = time.process_time()
            read(data)
            return time.process_time() - began

        return min(once() for _ in range(8))

    big = big_manifest()
    data = big.to_bytes()
    assert Manifest.from_bytes(data) == big
    assert (len(big.binaries), len(big.rules)) == (152, 152)
    assert best(Manifest.from_bytes) <= 10 * best(json.loads)


def test_a_process_reads_its_first_manifest_with_few_calls(tmp_path: Path) -> None:
    # A loader reads one in its life: nothing is warm. Calls are counted, since times vary.
    script = """
import sys
from pathlib import Path
from sonata_aot.artifacts.manifest import Manifest

data, calls = Path(sys.argv[1]).read_bytes(), 0

def count(frame, event, argument):
    global calls
    calls += event in ("call", "c_call")

sys.setprofile(count)
Manifest.from_bytes(data)
sys.setprofile(None)
print(calls)
"""
    big = big_manifest()
    (tmp_path / "manifest.json").write_bytes(big.to_bytes())
    calls = int(run_python(script, tmp_path / "manifest.json"))
    assert calls <= 65 * (len(big.binaries) + len(big.rules))
