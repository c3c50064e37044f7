"""`sonata-aot diff A B`."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from sonata_aot.artifacts import Binary, open_artifacts, publish

if TYPE_CHECKING:
    from tests.aot.conftest import Invoke

Make = Callable[..., Path]
Change = Callable[[Binary], Binary | None]


@pytest.fixture
def make(built: Path, tmp_path: Path) -> Make:
    """`make("name", change)`: gemv_any of the shared set, its binaries changed."""

    def run(
        name: str, change: Callable[[Binary], Binary | None] = lambda b: b, **more: Any
    ) -> Path:
        source = open_artifacts(built)
        kept = [b for b in source.manifest.binaries if (b.kernel, b.arch) == ("gemv_any", "sm86")]
        objects = {p.file_name: source.read(p) for b in kept for p in (b.cubin, b.ptx)}
        selection = dataclasses.replace(
            source.manifest.selection, archs=("sm86",), kernels=("gemv_any",)
        )
        fields = {
            "binaries": tuple(c for b in kept if (c := change(b)) is not None),
            "kernels": tuple(k for k in source.manifest.kernels if k.name == "gemv_any"),
            "rules": (),
            "selection": selection,
        } | more
        manifest = dataclasses.replace(source.manifest, **fields)
        for _, payload in manifest.payloads():
            if payload.file_name not in objects:
                objects[payload.file_name] = b"x" * payload.size
        names = {payload.file_name for _, payload in manifest.payloads()}
        target = tmp_path / name
        publish(target, manifest, {n: data for n, data in objects.items() if n in names})
        return target

    return run


def larger(binary: Binary) -> Binary:
    """With two more registers, and longer machine code."""
    size = binary.cubin.size + 100
    sha256 = hashlib.sha256(b"x" * size).hexdigest()
    cubin = dataclasses.replace(binary.cubin, size=size, sha256=sha256)
    return dataclasses.replace(binary, registers=binary.registers + 2, cubin=cubin)


def test_equal_sets(invoke: Invoke, make: Make) -> None:
    a, b = make("a"), make("b")
    result = invoke("diff", a, b, "--exit-code")
    assert (result.exit_code, result.stdout) == (0, "nothing differs\n")
    printed = json.loads(invoke("diff", a, b, "--json").stdout)
    assert printed["same"] is True
    assert not any(value for name, value in printed.items() if name != "same")


def test_what_came_went_and_changed(invoke: Invoke, make: Make) -> None:
    first, second, third, *_ = open_artifacts(make("all")).manifest.binaries
    a = make("a", lambda b: None if b.label == first.label else b)
    b = make(
        "b",
        lambda b: None if b.label == second.label else larger(b) if b.label == third.label else b,
        compiler={"nvidia-cutlass-dsl": "9.9"},
    )
    result = invoke("diff", a, b)
    assert result.exit_code == 0
    lines = result.stdout.splitlines()
    assert lines[:3] == [
        f"- {second.label}",
        f"+ {first.label}",
        f"~ {third.label}: registers {third.registers} -> {third.registers + 2}, "
        f"cubin_bytes {third.cubin.size} -> {third.cubin.size + 100}",
    ]
    assert "-> 9.9" in result.stdout
    packages = len(open_artifacts(a).manifest.compiler)
    assert lines[-1] == (
        f"binaries: 1 added, 1 removed, 1 changed; {packages} other compiler packages"
    )
    assert invoke("diff", a, b, "--exit-code").exit_code == 1
    printed = json.loads(invoke("diff", a, b, "--json").stdout)
    assert printed["same"] is False
    (changed,) = printed["changed"]
    assert changed["variant"] == third.variant
    assert changed["before"]["registers"] + 2 == changed["after"]["registers"]
    assert [item["variant"] for item in printed["added"]] == [first.variant]
    assert [item["variant"] for item in printed["removed"]] == [second.variant]
    assert printed["added"][0]["figures"]["registers"] == first.registers


def test_other_bytes_of_one_size(invoke: Invoke, make: Make) -> None:
    def other(binary: Binary) -> Binary:
        sha256 = hashlib.sha256(b"x" * binary.ptx.size).hexdigest()
        return dataclasses.replace(binary, ptx=dataclasses.replace(binary.ptx, sha256=sha256))

    first, *_ = open_artifacts(make("all")).manifest.binaries
    b = make("b", lambda binary: other(binary) if binary.label == first.label else binary)
    result = invoke("diff", make("a"), b)
    assert result.stdout.splitlines() == [
        f"~ {first.label}: other bytes",
        "binaries: 0 added, 0 removed, 1 changed",
    ]


def test_a_declaration_alone(invoke: Invoke, make: Make) -> None:
    (declaration,) = open_artifacts(make("all")).manifest.kernels
    other = dataclasses.replace(declaration, grid=("1", "1", "1"))
    result = invoke("diff", make("a"), make("b", kernels=(other,)), "--exit-code")
    assert (result.exit_code, result.stdout.splitlines()) == (
        1,
        ["~ declaration of gemv_any", "the same binaries; 1 other declaration"],
    )


def test_rules_alone(invoke: Invoke, built: Path, tmp_path: Path) -> None:
    source = open_artifacts(built)
    objects = {p.file_name: source.read(p) for _, p in source.manifest.payloads()}
    rules = tuple(rule for rule in source.manifest.rules if rule.kernel != "gemv")
    publish(tmp_path / "b", dataclasses.replace(source.manifest, rules=rules), objects)
    result = invoke("diff", built, tmp_path / "b", "--exit-code")
    assert (result.exit_code, result.stdout.splitlines()) == (
        1,
        ["~ rules of gemv", "the same binaries; 1 kernel with other rules"],
    )
    assert json.loads(invoke("diff", built, tmp_path / "b", "--json").stdout)["rules"] == ["gemv"]


def test_shared_memory_that_only_the_record_has(invoke: Invoke, make: Make) -> None:
    """What is dynamic leaves no trace in the machine code."""
    (declaration,) = open_artifacts(make("all")).manifest.kernels
    first, *_ = open_artifacts(make("all")).manifest.binaries
    before = first.shared_bytes + first.static_shared_bytes
    more = dataclasses.replace(declaration, shared_bytes=str(first.shared_bytes + 64))
    b = make(
        "b",
        lambda binary: dataclasses.replace(binary, shared_bytes=first.shared_bytes + 64),
        kernels=(more,),
    )
    lines = invoke("diff", make("a"), b).stdout.splitlines()
    assert lines[0] == f"~ {first.label}: shared_bytes {before} -> {before + 64}"
    count = len(open_artifacts(b).manifest.binaries)
    assert lines[-1].startswith(f"binaries: 0 added, 0 removed, {count} changed; 1 other decl")


@pytest.mark.parametrize("name", ["stack_bytes", "static_shared_bytes", "spills"])
def test_each_figure_counts(invoke: Invoke, make: Make, name: str) -> None:
    def more(binary: Binary) -> Binary:
        changes = {name: getattr(binary, name) + 7}
        return dataclasses.replace(larger(binary), **changes)

    first, *_ = open_artifacts(make("all")).manifest.binaries
    b = make("b", lambda binary: more(binary) if binary.label == first.label else binary)
    shown = "shared_bytes" if "shared" in name else name
    line, _ = invoke("diff", make("a"), b).stdout.splitlines()
    assert f"{shown} " in line
    (changed,) = json.loads(invoke("diff", make("a"), b, "--json").stdout)["changed"]
    assert changed["after"][shown] - changed["before"][shown] == 7


def test_what_is_no_set(invoke: Invoke, make: Make, tmp_path: Path) -> None:
    result = invoke("diff", make("a"), tmp_path / "none")
    assert (result.exit_code, result.stdout) == (1, "")
    assert str(tmp_path / "none") in result.stderr
