"""One build spread over machines: `build --shard` and `merge`."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from sonata_aot.artifacts import open_artifacts
from sonata_aot.artifacts.declaration import variant_name
from sonata_aot.artifacts.errors import ArtifactsNotFound, ManifestError, SonataError
from sonata_aot.artifacts.manifest import sealed
from sonata_aot.artifacts.shard import Shard, open_shard, share, whole
from sonata_aot.artifacts.verify import Passed, verify

if TYPE_CHECKING:
    from tests.aot.conftest import Invoke

# The GEMV has rules, which no shard has.
CHOSEN = ("build", "--arch=sm86", "--arch=sm90", "--kernel=gemv", "--kernel=ssd_prepare")


@pytest.fixture(autouse=True)
def cached(warm_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing here is compiled."""
    monkeypatch.setenv("SONATA_AOT_CACHE_DIR", str(warm_cache))


@pytest.fixture
def parts(invoke: Invoke, tmp_path: Path) -> list[Path]:
    """The three shards of one build."""
    places = [tmp_path / f"part{index}" for index in (1, 2, 3)]
    for index, place in enumerate(places, start=1):
        result = invoke(*CHOSEN, "--shard", f"{index}/3", "--out", place)
        assert result.exit_code == 0, result.stderr
    return places


def contents(directory: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(directory)): path.read_bytes()
        for path in directory.rglob("*")
        if path.is_file()
    }


def test_the_merged_set_is_that_of_one_build(
    invoke: Invoke, parts: list[Path], tmp_path: Path
) -> None:
    assert invoke(*CHOSEN, "--out", tmp_path / "one").exit_code == 0
    result = invoke("merge", *parts[::-1], "--out", tmp_path / "merged")
    assert result.exit_code == 0, result.stderr
    assert contents(tmp_path / "merged") == contents(tmp_path / "one")
    count = len(open_artifacts(tmp_path / "one").manifest.binaries)
    assert f"{count} binaries of 3 shards" in result.stdout
    again = invoke("merge", *parts, "--out", tmp_path / "one")
    assert f"unchanged in {tmp_path / 'one'}" in again.stdout
    assert "removed" not in again.stdout
    before = invoke(
        "build", "--arch=sm86", "--kernel=gemv_any", "--json", "--out", tmp_path / "one"
    )
    result = invoke("merge", *parts, "--out", tmp_path / "one")
    names = [f"gemv_any[{variant_name(b['variant'])}] sm86" for b in binaries_of(before.stdout)]
    assert f"removed, since not in them: {', '.join(sorted(names))}\n" in result.stdout


def binaries_of(printed: str) -> list[dict[str, Any]]:
    return json.loads(printed)["manifest"]["binaries"]


def test_each_shard_has_its_share(parts: list[Path], invoke: Invoke, tmp_path: Path) -> None:
    invoke(*CHOSEN, "--out", tmp_path / "one")
    total = len(open_artifacts(tmp_path / "one").manifest.binaries)
    counts = [len(open_shard(place)[0].part.binaries) for place in parts]
    assert sum(counts) == total >= 6
    assert max(counts) - min(counts) <= 1


def test_a_shard_is_the_same_wherever_it_is_built(
    parts: list[Path], invoke: Invoke, tmp_path: Path
) -> None:
    invoke(*CHOSEN, "--jobs=1", "--shard=2/3", "--out", tmp_path / "another")
    assert contents(tmp_path / "another") == contents(parts[1])


def test_more_shards_than_kernels(invoke: Invoke, tmp_path: Path) -> None:
    chosen = ("build", "--arch=sm86", "--kernel=ssd_prepare")
    assert invoke(*chosen, "--out", tmp_path / "one").exit_code == 0
    count = len(open_artifacts(tmp_path / "one").manifest.binaries) + 1
    places = [tmp_path / str(index) for index in range(count)]
    for index, place in enumerate(places, start=1):
        assert invoke(*chosen, f"--shard={index}/{count}", "--out", place).exit_code == 0
    assert invoke("merge", *places, "--out", tmp_path / "merged").exit_code == 0
    assert contents(tmp_path / "merged") == contents(tmp_path / "one")


def test_json(invoke: Invoke, parts: list[Path], tmp_path: Path) -> None:
    built = json.loads(invoke(*CHOSEN, "--shard=1/3", "--json", "--out", tmp_path / "part").stdout)
    assert built["shard"] == "1/3"
    assert built["manifest"]["rules"] == []
    printed = json.loads(invoke("merge", *parts, "--json", "--out", tmp_path / "merged").stdout)
    manifest = json.loads((tmp_path / "merged" / "manifest.json").read_bytes())
    assert printed["manifest"] == manifest
    assert printed["written"] == len(contents(tmp_path / "merged"))
    assert (printed["shards"], printed["removed"]) == (3, [])


def test_no_loader_takes_a_shard_for_a_set(parts: list[Path]) -> None:
    with pytest.raises(ArtifactsNotFound, match="holds one shard of a build") as caught:
        open_artifacts(parts[0])
    assert "sonata-aot merge" in caught.value.remedy


@pytest.mark.parametrize("command", ["verify", "list", "inspect", "doctor"])
def test_whoever_takes_a_shard_for_a_set_is_told(
    invoke: Invoke, parts: list[Path], command: str
) -> None:
    result = invoke(command, parts[0])
    assert result.exit_code == (0 if command == "doctor" else 1)
    assert f"{parts[0]} holds one shard of a build, which is no artifact set" in result.output
    assert "sonata-aot merge SHARD... --out DIRECTORY" in result.output


def test_a_set_and_a_shard_do_not_replace_each_other(
    invoke: Invoke, parts: list[Path], tmp_path: Path
) -> None:
    before = contents(parts[0])
    result = invoke(*CHOSEN, "--out", parts[0])
    assert (result.exit_code, contents(parts[0])) == (1, before)
    assert "'shard.json'" in result.stderr
    invoke(*CHOSEN, "--out", tmp_path / "one")
    result = invoke(*CHOSEN, "--shard=1/3", "--out", tmp_path / "one")
    assert result.exit_code == 1
    assert "'manifest.json'" in result.stderr
    assert all(isinstance(outcome, Passed) for outcome in verify(tmp_path / "one"))


@pytest.mark.parametrize("text", ["0/3", "4/3", "1", "1/0", "1/10001", "-1/3", "1/3/3", "a/b", ""])
def test_what_is_no_shard(invoke: Invoke, tmp_path: Path, text: str) -> None:
    result = invoke(*CHOSEN, "--shard", text, "--out", tmp_path / "out")
    assert result.exit_code == 2
    assert "--shard" in result.stderr
    assert not (tmp_path / "out").exists()


def test_a_shard_needs_a_place_of_its_own(invoke: Invoke, tmp_path: Path) -> None:
    result = invoke(*CHOSEN, "--shard=1/3", SONATA_AOT_DIR=tmp_path / "out")
    assert result.exit_code == 2
    assert "--shard needs --out" in result.stderr
    assert invoke("merge").exit_code == 2


def missing(parts: list[Path]) -> list[Path]:
    return parts[1:]


def twice(parts: list[Path]) -> list[Path]:
    return [*parts, Path(shutil.copytree(parts[1], parts[1].with_name("copy")))]


def of_another_number(parts: list[Path]) -> list[Path]:
    edit(parts[2], count=4, index=3)
    return parts


def of_other_sources(parts: list[Path]) -> list[Path]:
    edit_part(parts[1], source={"digest": "0" * 64, "commit": None, "dirty": None})
    return parts


def of_another_compiler(parts: list[Path]) -> list[Path]:
    edit_part(parts[2], compiler={"nvidia-cutlass-dsl": "4.8.2"})
    return parts


def of_another_tool(parts: list[Path]) -> list[Path]:
    edit_part(parts[2], tool="9.9.9")
    return parts


def of_another_selection(parts: list[Path]) -> list[Path]:
    edit_part(
        parts[1], selection=part_of(parts[1])["selection"] | {"archs": ["sm86", "sm90", "sm120"]}
    )
    return parts


def of_another_declaration(parts: list[Path]) -> list[Path]:
    kernels = part_of(parts[2])["kernels"]
    kernels[0]["budget"]["registers"] += 1
    edit_part(parts[2], kernels=kernels)
    return parts


def of_another_plan(parts: list[Path]) -> list[Path]:
    keys = index_of(parts[0])["keys"]
    edit(parts[0], keys=[keys[0], "0" * 64, *keys[2:]])  # the second is another shard's
    return parts


def of_other_rules(parts: list[Path]) -> list[Path]:
    edit(parts[1], rules=index_of(parts[1])["rules"][1:])
    return parts


def without_an_object(parts: list[Path]) -> list[Path]:
    next((parts[1] / "objects").iterdir()).unlink()
    return parts


def with_a_flipped_bit(parts: list[Path]) -> list[Path]:
    path = next((parts[0] / "objects").glob("*.cubin"))
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    return parts


def with_a_false_record(parts: list[Path]) -> list[Path]:
    content = json.loads((parts[0] / "shard.json").read_bytes())
    binaries = content["part"]["binaries"]
    binaries[0]["registers"] += 1
    edit_part(parts[0], binaries=binaries)
    return parts


def with_a_false_record_of_ptx(parts: list[Path]) -> list[Path]:
    binaries = part_of(parts[1])["binaries"]
    binaries[0]["ptx"]["isa"] = "7.0"
    edit_part(parts[1], binaries=binaries)
    return parts


def with_a_link(parts: list[Path]) -> list[Path]:
    objects = parts[0] / "objects"
    objects.rename(parts[0].parent / "elsewhere")
    objects.symlink_to(parts[0].parent / "elsewhere")
    return parts


def that_others_can_write(parts: list[Path]) -> list[Path]:
    parts[2].chmod(0o777)
    return parts


def that_is_a_set(parts: list[Path]) -> list[Path]:
    (parts[0] / "shard.json").rename(parts[0] / "manifest.json")
    return parts


def edit(place: Path, **changes: Any) -> None:
    """Change fields of a shard's index, and seal it again."""
    path = place / "shard.json"
    content = json.loads(path.read_bytes()) | changes
    del content["digest"]
    path.write_bytes(sealed(content)[0])


def index_of(place: Path) -> dict[str, Any]:
    return json.loads((place / "shard.json").read_bytes())


def part_of(place: Path) -> dict[str, Any]:
    return index_of(place)["part"]


def edit_part(place: Path, **changes: Any) -> None:
    edit(place, part=part_of(place) | changes)


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (missing, "shards missing of 3: 1"),
        (twice, "are both shard 2/3"),
        (of_another_number, ""),
        (of_other_sources, "not the same sources or commit"),
        (of_another_compiler, "not the same compiler"),
        (of_another_tool, "not the same tool"),
        (of_another_selection, "not the same selection"),
        (of_another_declaration, "not the same declarations"),
        (of_another_plan, "not the same keys"),
        (of_other_rules, "not the same rules"),
        (without_an_object, "is missing"),
        (with_a_flipped_bit, "does not have the SHA-256"),
        (with_a_false_record, "registers is"),
        (with_a_false_record_of_ptx, "PTX ISA"),
        (with_a_link, "is not a directory of its own"),
        (that_others_can_write, "is writable by everybody"),
        (that_is_a_set, "no shard in"),
    ],
)
def test_what_is_not_all_of_one_build_is_refused(
    invoke: Invoke,
    parts: list[Path],
    tmp_path: Path,
    spoil: Callable[[list[Path]], list[Path]],
    words: str,
) -> None:
    result = invoke("merge", *spoil(parts), "--out", tmp_path / "merged")
    assert (result.exit_code, result.stdout) == (1, "")
    (line,) = result.stderr.splitlines()
    assert words in line
    assert not (tmp_path / "merged").exists()


@pytest.mark.parametrize(
    "changes",
    [
        {"schema": 2},
        {"schema": True},
        {"index": 4},
        {"index": 0},
        {"index": 2},
        {"count": 10_001},
        {"keys": []},
        {"more": 1},
        {"rules": [{"kernel": "x"}]},
    ],
    ids=str,
)
def test_an_index_that_contradicts_itself(parts: list[Path], changes: dict[str, Any]) -> None:
    edit(parts[0], **changes)
    with pytest.raises(ManifestError):
        open_shard(parts[0])


def test_a_key_that_stands_twice(parts: list[Path]) -> None:
    keys = index_of(parts[0])["keys"]
    edit(parts[0], keys=[keys[0], keys[2], *keys[2:]])  # both are other shards'
    with pytest.raises(ManifestError, match="a key stands twice"):
        open_shard(parts[0])


@pytest.mark.parametrize("old", [b'"count":3', b'"digest":"', b"\n", b'"schema":1'])
def test_other_bytes_for_the_same_content(parts: list[Path], old: bytes) -> None:
    data = (parts[0] / "shard.json").read_bytes()
    for new in (old + b" ", old[:-1] + b"9", b" " + old):
        with pytest.raises(ManifestError):
            Shard.from_bytes(data.replace(old, new, 1))
    for cut in (0, 1, len(data) // 2, len(data) - 1):
        with pytest.raises(ManifestError):
            Shard.from_bytes(data[:cut])
    assert Shard.from_bytes(data).to_bytes() == data


def test_shares_are_all_there_is() -> None:
    whole_plan = list(range(11))
    for count in (1, 2, 3, 11, 20):
        shares = [list(share(whole_plan, index, count)) for index in range(1, count + 1)]
        assert sorted(item for part in shares for item in part) == whole_plan


def test_many_missing_shards_are_not_all_listed(parts: list[Path]) -> None:
    edit(
        parts[0],
        keys=[],
        part=json.loads((parts[0] / "shard.json").read_bytes())["part"] | {"binaries": []},
        count=5000,
    )
    shard, _ = open_shard(parts[0])
    with pytest.raises(SonataError) as caught:
        whole({parts[0]: shard})
    assert len(str(caught.value)) < 300


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")
def test_shards_of_another_user_where_they_are_allowed(
    invoke: Invoke, parts: list[Path], tmp_path: Path
) -> None:
    os.chown(parts[1], 12345, -1)
    out = ("--out", tmp_path / "merged")
    assert invoke("merge", *parts, *out).exit_code == 1
    result = invoke("merge", *parts, *out, "--allow-untrusted", "--json")
    assert result.exit_code == 0
    fault = f"{parts[1]} belongs to user 12345, not to root or the current user"
    assert json.loads(result.stdout)["untrusted"] == [fault]
    assert result.stderr == f"sonata-aot: warning: used all the same: {fault}\n"
