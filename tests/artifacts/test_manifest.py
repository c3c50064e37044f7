from __future__ import annotations

import copy
import dataclasses
import json
import re
from pathlib import Path
from typing import Any

import pytest
from artifact_sets import Made, leaves, put, seal, unsealed

from sonata_aot.artifacts import Budget, open_artifacts
from sonata_aot.artifacts.choose import choose
from sonata_aot.artifacts.errors import IntegrityError, ManifestError, SonataError
from sonata_aot.artifacts.manifest import MAX_MANIFEST_BYTES, Manifest, binary_order
from sonata_aot.artifacts.verify import Passed, verify

# A plausible change of each field, and who notices it where the digest has been made to fit:
# "manifest", which contradicts itself; "verify", which compares with the files; or nobody, since
# the digest is no signature. Those are statements about origin and tuning, and the interface's
# own words: only a trusted directory protects them.
CHANGES: list[tuple[str, Any, str]] = [
    ("schema", 2, "manifest"),
    ("tool", "9.9.9", "nobody"),
    ("compiler.nvidia-cutlass-dsl", "9.9.9", "nobody"),
    ("source.digest", "0" * 64, "nobody"),
    ("source.commit", "0" * 40, "nobody"),
    ("source.dirty", True, "nobody"),
    ("selection.archs.0", "sm80", "manifest"),
    ("selection.archs.0", "sm086", "manifest"),
    ("selection.archs.0", "sm75", "manifest"),
    ("selection.kernels.0", "even", "manifest"),
    ("kernels.0.name", "even", "manifest"),
    ("kernels.0.parameters.0.name", "factor", "nobody"),
    ("kernels.0.parameters.0.name", "first", "manifest"),
    ("kernels.0.parameters.0.kind", "i64", "verify"),
    ("kernels.0.parameters.0.kind", "i32", "nobody"),
    ("kernels.0.parameters.1.element", "bf16", "nobody"),
    ("kernels.0.parameters.1.element", "slots", "manifest"),
    ("kernels.0.parameters.1.align", 16, "nobody"),
    ("kernels.0.parameters.1.align", 12, "manifest"),
    ("kernels.0.choices.0", "kind", "manifest"),
    ("kernels.0.selectors.0", "slots", "nobody"),
    ("kernels.0.selectors.0", "first", "manifest"),
    ("kernels.0.block.0", "32 * 4", "manifest"),
    ("kernels.0.grid.0", "first", "nobody"),
    ("kernels.0.grid.0", "scale", "manifest"),
    ("kernels.0.shared_bytes", "8 * slots", "manifest"),
    ("kernels.0.min_sm", "90", "manifest"),
    ("kernels.0.min_sm", "81", "nobody"),
    ("kernels.0.programmatic", "1", "nobody"),
    ("kernels.0.budget.registers", 254, "nobody"),
    ("kernels.0.budget.spills", 999, "nobody"),
    ("kernels.0.budget.stack_bytes", 4095, "nobody"),
    ("rules.0.kernel", "even", "manifest"),
    ("rules.0.arch", "sm90", "manifest"),
    ("rules.0.when.wide", 1, "nobody"),
    ("rules.2.when.wide", 0, "manifest"),
    ("rules.0.sizes.first.0", 65, "nobody"),
    ("rules.0.sizes.first.0", 4097, "manifest"),
    ("rules.1.sizes.first.0", 2, "manifest"),
    ("rules.0.sizes.first.1", 4095, "nobody"),
    ("rules.0.sizes.index.0", 1, "nobody"),
    ("rules.0.sizes.index.1", 4096, "nobody"),
    ("rules.1.sizes.index.1", 4096, "manifest"),
    ("rules.0.variant.slots", 16, "nobody"),
    ("rules.0.variant.slots", 17, "manifest"),
    ("rules.0.launch.waves", 1, "nobody"),
    *((f"kernels.0.budget.{name}", "1", "nobody") for name in Budget().floors),
    ("binaries.0.kernel", "even", "manifest"),
    ("binaries.0.variant.dtype", "bf16", "manifest"),
    ("binaries.0.variant.slots", 17, "manifest"),
    ("binaries.0.arch", "sm80", "manifest"),
    ("binaries.0.entry", "even_dtype_f32_slots_16_0", "manifest"),
    ("binaries.0.entry", "odd_dtype_f32_slots_16_1", "verify"),
    ("binaries.0.block.0", 128, "manifest"),
    ("binaries.0.shared_bytes", 128, "manifest"),
    ("binaries.0.static_shared_bytes", 128, "verify"),
    ("binaries.0.registers", 254, "verify"),
    ("binaries.0.stack_bytes", 8, "verify"),
    ("binaries.0.spills", 999, "verify"),
    ("binaries.0.cubin.sha256", "0" * 64, "verify"),
    ("binaries.0.cubin.size", 5000, "verify"),
    ("binaries.0.cubin.size", 1, "verify"),
    ("binaries.0.cubin.min_cuda", "11.8", "verify"),
    ("binaries.0.cubin.isa", "8.8", "manifest"),
    ("binaries.0.ptx.sha256", "0" * 64, "verify"),
    ("binaries.0.ptx.size", 5000, "verify"),
    ("binaries.0.ptx.min_cuda", "12.0", "verify"),
    ("binaries.0.ptx.isa", "8.7", "verify"),
    ("binaries.0.ptx.isa", None, "manifest"),
    ("binaries.0.key", "0" * 64, "nobody"),
]


def way_of(path: str) -> tuple[str | int, ...]:
    return tuple(int(part) if part.isdigit() else part for part in path.split("."))


def field_of(way: tuple[str | int, ...]) -> str:
    """The field, whatever the index in a list or the package."""
    text = ".".join("0" if isinstance(part, int) else part for part in way)
    return re.sub(r"^compiler\..*", "compiler", text)


def test_a_manifest_is_read_back_as_it_was_written(both: Made) -> None:
    data = both.manifest.to_bytes()
    again = Manifest.from_bytes(data)
    assert again == both.manifest
    assert again.to_bytes() == data == seal(json.loads(data))
    assert len(again.binaries) == 4


@pytest.mark.parametrize(("path", "value", "noticed"), CHANGES)
def test_a_changed_field_is_refused(
    made: Made, tmp_path: Path, path: str, value: Any, noticed: str
) -> None:
    content = made.content()
    put(content, way_of(path), value)
    assert content != made.content()
    with pytest.raises(ManifestError):
        Manifest.from_bytes(unsealed(content))
    sealed = seal(content)
    directory = made.write(tmp_path / "set")
    (directory / "manifest.json").write_bytes(sealed)
    if noticed == "manifest":
        with pytest.raises(ManifestError):
            Manifest.from_bytes(sealed)
        with pytest.raises(ManifestError):
            open_artifacts(directory)
    else:
        assert Manifest.from_bytes(sealed).to_bytes() == sealed
        passed = all(isinstance(outcome, Passed) for outcome in verify(directory))
        assert passed is (noticed == "nobody")


def test_the_changes_above_cover_every_field(made: Made) -> None:
    fields = {field_of(way) for way, _ in leaves(made.content())} - {"digest"}
    assert fields == {field_of(way_of(path)) for path, _, _ in CHANGES}


def test_the_old_digest_holds_for_no_other_value_of_any_field(made: Made) -> None:
    accepted = []
    for way, value in leaves(made.content()):
        for new in (value + 1 if type(value) is int else f"{value}1", None if value else "x"):
            content = made.content()
            put(content, way, new)
            try:
                Manifest.from_bytes(unsealed(content))
            except ManifestError:
                continue
            accepted.append((way, new))
    assert accepted == []


def test_no_field_takes_another_type(made: Made) -> None:
    accepted = []
    for way, value in leaves(made.content()):
        if way == ("digest",):
            continue
        for new in (True, False, 10**20, -1, [], {}, "", "\ud800", [value], {"x": value}):
            if type(new) is type(value) is bool or (way[-1] == "dirty" and type(new) is bool):
                continue
            content = made.content()
            put(content, way, new)
            try:
                Manifest.from_bytes(seal(content))
            except ManifestError:
                continue
            accepted.append((way, new))
    assert accepted == []


def _without(content: dict[str, Any], way: tuple[str | int, ...]) -> dict[str, Any]:
    target: Any = content
    for key in way[:-1]:
        target = target[key]
    del target[way[-1]]
    return content


def _objects(data: Any, at: tuple[str | int, ...] = ()) -> list[tuple[str | int, ...]]:
    items: Any = data.items() if isinstance(data, dict) else enumerate(data)
    inner = [o for k, v in items if isinstance(v, dict | list) for o in _objects(v, (*at, k))]
    return [at, *inner] if isinstance(data, dict) else inner


def test_keys_are_neither_added_nor_left_out(made: Made) -> None:
    content = made.content()
    for way in _objects(content):
        for key in (*_at(content, way), "unknown"):
            if way == ("compiler",) or key == "digest":
                continue  # a table of packages, free by design; the digest is put back by `seal`
            changed = copy.deepcopy(content)
            if key == "unknown":
                put(changed, (*way, key), 1)
            else:
                _without(changed, (*way, key))
            with pytest.raises(ManifestError):
                Manifest.from_bytes(seal(changed))


def _at(content: Any, way: tuple[str | int, ...]) -> Any:
    for key in way:
        content = content[key]
    return content


def test_a_missing_digest_is_refused(made: Made) -> None:
    data = re.sub(rb',\n"digest":"\w+"', b"", made.manifest.to_bytes())
    assert json.loads(data) == _without(made.content(), ("digest",))
    with pytest.raises(ManifestError, match="digest"):
        Manifest.from_bytes(data)


@pytest.mark.parametrize("found", [0, 2, 99, "1", True, None, [1], {"a": 1}, 10**4000])
def test_another_schema_is_named_beside_ones_own(made: Made, found: Any) -> None:
    content = {**made.content(), "schema": found}
    with pytest.raises(ManifestError) as caught:
        Manifest.from_bytes(seal(content))
    assert f"schema {str(found)[:40]}" in caught.value.what
    assert "reads schema 1" in caught.value.what
    assert "install" in caught.value.remedy


def test_a_newer_schema_is_named_even_if_all_else_differs() -> None:
    with pytest.raises(ManifestError, match="schema 7, but this sonata-aot reads schema 1"):
        Manifest.from_bytes(b'{"schema": 7, "unheard_of": []}')


@pytest.mark.parametrize(
    "value",
    [
        *("../x", "/etc/passwd", "", ".", "../../" + "a" * 58, "a" * 32 + "/../" + "a" * 28),
        *("A" * 64, "a" * 63, "a" * 65, "a" * 60 + "é" * 4),
        *("a" * 64 + "\n", "a" * 63 + "/", "a" * 63 + "\0"),
    ],
)
@pytest.mark.parametrize("kind", ["cubin", "ptx"])
def test_a_digest_cannot_lead_out_of_the_directory(made: Made, kind: str, value: str) -> None:
    content = made.content()
    content["binaries"][0][kind]["sha256"] = value
    with pytest.raises(ManifestError, match="sha256"):
        Manifest.from_bytes(seal(content))


@pytest.mark.parametrize(
    "key",
    [
        "\x1b[31mdtype",
        "dtype\n",
        "dty\0pe",
        "\x07",
        "dtype\u202e",
        "\u00a0dtype",
        "D",
        "",
        "x" * 10**5,
    ],
    ids=lambda key: ascii(key)[:20],
)
def test_the_name_of_a_choice_is_a_name(made: Made, key: str) -> None:
    content = made.content()
    binary = content["binaries"][0]
    binary["variant"] = {key: "f32", "slots": 16}
    with pytest.raises(ManifestError, match=r"binaries\[0\]\.variant key: expected") as caught:
        Manifest.from_bytes(seal(content))
    assert str(caught.value).isprintable()
    assert len(str(caught.value)) < 300


@pytest.mark.parametrize("size", [MAX_MANIFEST_BYTES + 1, 2**42])
def test_an_oversize_manifest_is_refused_without_reading_it(directory: Path, size: int) -> None:
    with open(directory / "manifest.json", "r+b") as file:
        file.truncate(size)  # sparse: reading four terabytes of zeros would not end in time
    with pytest.raises(IntegrityError, match=f"{size} bytes, more than"):
        open_artifacts(directory)


def test_a_binary_stands_once(made: Made) -> None:
    twice = (*made.manifest.binaries, made.manifest.binaries[0])
    with pytest.raises(ManifestError, match="stands twice"):
        dataclasses.replace(made.manifest, binaries=twice)


def test_a_kernel_stands_once(made: Made) -> None:
    content = made.content()
    content["kernels"] *= 2
    with pytest.raises(ManifestError, match="kernel stands twice"):
        Manifest.from_bytes(seal(content))


def test_an_entry_named_after_a_longer_number_is_another_variants(made: Made) -> None:
    content = made.only(0).content()
    content["binaries"][0]["variant"]["slots"] = 1  # the entry says slots_16
    content["binaries"][0]["shared_bytes"] = 4
    with pytest.raises(ManifestError, match="not named after"):
        Manifest.from_bytes(seal(content))


@pytest.mark.parametrize("spelling", ["sm086", "sm0806"])
def test_an_arch_has_one_spelling_in_a_manifest(made: Made, spelling: str) -> None:
    content = made.content()
    content["selection"]["archs"] = [spelling]
    for binary in content["binaries"]:
        binary["arch"] = spelling
    with pytest.raises(SonataError):
        choose(Manifest.from_bytes(seal(content)), (8, 6), driver_cuda=(13, 0))


@pytest.mark.parametrize("archs", [["sm90", "sm86"], ["sm86", "sm86", "sm90"]])
def test_a_selection_is_normalised(both: Made, archs: list[str]) -> None:
    content = both.content()
    content["selection"]["archs"] = archs
    with pytest.raises(ManifestError, match="selection"):
        Manifest.from_bytes(seal(content))


def test_binaries_stand_in_their_one_order(both: Made) -> None:
    content = both.content()
    content["binaries"].reverse()
    with pytest.raises(ManifestError, match="order"):
        Manifest.from_bytes(seal(content))


def test_order_of_binaries_is_by_number(both: Made) -> None:
    binaries = both.manifest.binaries
    assert list(binaries) == sorted(binaries, key=binary_order)
    archs = ("sm120", "sm90a", "sm90", "sm100", "sm86")
    many = [dataclasses.replace(binaries[0], arch=arch) for arch in archs]
    ordered = [b.arch for b in sorted(many, key=binary_order)]
    assert ordered == ["sm86", "sm90", "sm90a", "sm100", "sm120"]


def test_a_manifest_from_before_there_were_rules_is_refused(made: Made) -> None:
    content = made.content()
    del content["rules"]
    with pytest.raises(ManifestError, match=r"manifest\.json: missing key 'rules'"):
        Manifest.from_bytes(seal(content))


def test_rules_are_checked(made: Made) -> None:
    with pytest.raises(ManifestError, match=r"^manifest\.json: rules\[1\]: never used"):
        dataclasses.replace(made.manifest, rules=made.manifest.rules[:1] * 2)


def test_payloads_and_declarations_are_found(made: Made) -> None:
    files = [payload.file_name for _, payload in made.manifest.payloads()]
    assert sorted(files) == sorted(made.objects)
    assert [name.rpartition(".")[2] for name in files] == ["cubin", "ptx"] * 2
    assert made.manifest.declaration("odd") is made.manifest.kernels[0]
    assert made.manifest.declaration("even") is None
    assert made.manifest.binaries[0].label == "odd[dtype=f32,slots=16] sm86"
