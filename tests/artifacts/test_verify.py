from __future__ import annotations

import dataclasses
import os
import re
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from artifact_sets import Elf, Made

from sonata_aot.artifacts.cubin import Cubin
from sonata_aot.artifacts.errors import IntegrityError
from sonata_aot.artifacts.verify import (
    Failed,
    Outcome,
    Passed,
    Unexpected,
    check_cubin,
    check_ptx,
    compiler_cuda_major,
    verify,
)

ENTRY = "odd_dtype_f32_slots_16_0"


def failures(outcomes: list[Outcome]) -> list[Failed]:
    return [outcome for outcome in outcomes if isinstance(outcome, Failed)]


def only_failure(made: Made, directory: Path) -> Failed:
    """The one thing that is wrong with the set, once the manifest itself is in order."""
    outcomes = verify(made.write(directory))
    assert outcomes[0] == Passed("manifest.json")
    assert not any(isinstance(outcome, Unexpected) for outcome in outcomes)
    assert len(outcomes) == 1 + len(made.manifest.binaries)
    (failure,) = failures(outcomes)
    assert failure.remedy
    return failure


def test_a_sound_set_passes_with_an_outcome_for_each_binary(both: Made, tmp_path: Path) -> None:
    assert verify(both.write(tmp_path / "set")) == [
        Passed("manifest.json"),
        *(Passed(binary.label) for binary in both.manifest.binaries),
    ]


@pytest.mark.parametrize("damage", ["no directory", "no manifest", "edited", "world-writable"])
def test_a_set_that_cannot_be_opened_is_one_failure(directory: Path, damage: str) -> None:
    manifest = directory / "manifest.json"
    match damage:
        case "no directory":
            directory = directory / "nowhere"
        case "no manifest":
            manifest.unlink()
        case "edited":
            manifest.write_bytes(manifest.read_bytes().replace(b'"spills":2', b'"spills":0', 1))
        case _:
            directory.chmod(0o777)
    (failure,) = verify(directory)
    assert isinstance(failure, Failed)
    assert failure.subject == str(directory / "manifest.json")
    assert failure.remedy


@pytest.mark.parametrize("kind", ["cubin", "ptx"])
@pytest.mark.parametrize(
    ("damage", "problem"),
    [("edited", "SHA-256"), ("cut", "bytes, not"), ("removed", "is missing"), ("link", "link")],
)
def test_a_damaged_file_fails_its_binary_alone(
    made: Made, directory: Path, kind: str, damage: str, problem: str
) -> None:
    binary = made.manifest.binaries[1]
    path = directory / "objects" / getattr(binary, kind).file_name
    data = path.read_bytes()
    path.unlink()
    if damage == "edited":
        path.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    elif damage == "cut":
        path.write_bytes(data[:-1])
    elif damage == "link":
        (directory.parent / "copy").write_bytes(data)
        path.symlink_to(directory.parent / "copy")
    outcomes = verify(directory)
    assert outcomes[:2] == [Passed("manifest.json"), Passed(made.manifest.binaries[0].label)]
    (failure,) = outcomes[2:]
    assert isinstance(failure, Failed)
    assert failure.subject == binary.label
    assert problem in failure.problem


@pytest.mark.parametrize(
    ("field", "value", "problem"),
    [
        ("registers", 254, r"registers is \d+, not 254"),
        ("stack_bytes", 0, r"stack_bytes is \d+, not 0"),
        ("static_shared_bytes", 0, r"static_shared_bytes is 256, not 0"),
        ("entry", ENTRY[:-1] + "1", "no entry"),
    ],
)
def test_a_record_that_differs_from_the_machine_code(
    made: Made, tmp_path: Path, field: str, value: Any, problem: str
) -> None:
    changed = made.changed(0, **{field: value})
    found = failures(verify(changed.write(tmp_path / "set")))
    assert re.search(problem, found[0].problem)
    assert made.manifest.binaries[0].cubin.sha256 in found[0].subject
    # The entry is looked for in the PTX, too.
    assert len(found) == (2 if field == "entry" else 1)


def _other_arch(both: Made) -> bytes:
    return both.cubin(2)


def _undefined(both: Made) -> bytes:
    elf = Elf(both.cubin(0))
    return elf.edited("<H", elf.symbol_offset(f".nv.shared.{ENTRY}") + 6, 0)


def _other_entry(both: Made) -> bytes:
    return both.cubin(0).replace(ENTRY.encode(), ENTRY[:-1].encode() + b"7")


def _other_offset(both: Made) -> bytes:
    elf = Elf(both.cubin(0))
    start, size = elf.span(f".nv.info.{ENTRY}")
    at = elf.data.index(b"\x04\x17\x0c\x00", start, start + size)
    ordinal, offset = struct.unpack_from("<HH", elf.data, at + 8)
    assert (ordinal, offset) == (5, 40)
    return elf.edited("<H", at + 10, 48)


def _other_size(both: Made) -> bytes:
    elf = Elf(both.cubin(0))
    start, size = elf.span(f".nv.info.{ENTRY}")
    at = elf.data.index(b"\x04\x17\x0c\x00", start, start + size)
    (packed,) = struct.unpack_from("<I", elf.data, at + 12)
    return elf.edited("<I", at + 12, packed & 0x3FFFF | 4 << 18)


def _other_block(both: Made) -> bytes:
    elf = Elf(both.cubin(0))
    start, size = elf.span(f".nv.info.{ENTRY}")
    at = elf.data.index(b"\x04\x10\x0c\x00\x40", start, start + size)
    return elf.edited("<III", at + 4, 128, 1, 1)


def _other_registers(both: Made) -> bytes:
    elf = Elf(both.cubin(0))
    start, size = elf.span(".nv.info")
    at = elf.data.index(b"\x04\x2f\x08\x00", start, start + size)
    return elf.edited("<I", at + 8, 200)


def _own_exact_gpu(both: Made) -> bytes:
    elf = Elf(both.cubin(0))
    return elf.edited("<I", 48, struct.unpack_from("<I", elf.data, 48)[0] | 0x800)


@pytest.mark.parametrize(
    ("make", "problem"),
    [
        (_other_arch, "machine code is for sm90, not sm86"),
        (_own_exact_gpu, "machine code is for sm86a, not sm86"),
        (_undefined, f"undefined symbols: .nv.shared.{ENTRY}"),
        (_other_entry, f"no entry '{ENTRY}' (entries: {ENTRY[:-1]}7)"),
        (_other_offset, "parameter table"),
        (_other_size, "parameter table"),
        (_other_block, "block (128, 1, 1) is not the declared (64, 1, 1)"),
        (_other_registers, "registers is 200, not"),
        (lambda both: both.ptx(0), "not a usable cubin: no ELF header"),
        (lambda both: both.cubin(1), f"no entry '{ENTRY}' (entries: odd_dtype_f32_slots_48_0)"),
        (lambda both: both.cubin(0)[:-64], "not a usable cubin"),
        (lambda both: bytes(100), "not a usable cubin"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_other_machine_code_under_a_manifest_that_fits_it(
    both: Made, tmp_path: Path, make: Callable[[Made], bytes], problem: str
) -> None:
    data = make(both)
    assert data != both.cubin(0)
    forged = both.of("sm86").with_bytes(0, "cubin", data)
    outcomes = verify(forged.write(tmp_path / "set"))
    assert outcomes[0] == Passed("manifest.json")
    assert problem in failures(outcomes)[0].problem
    assert outcomes[-1] == Passed(both.manifest.binaries[1].label)


def _ptx(old: bytes, new: bytes) -> Callable[[bytes], bytes]:
    def change(data: bytes) -> bytes:
        assert old in data
        return data.replace(old, new)

    return change


def _entry_in_a_comment(data: bytes) -> bytes:
    line = f".visible .entry {ENTRY}(".encode()
    assert line in data
    return data.replace(line, b"// " + line + b"\n.visible .entry other(")


@pytest.mark.parametrize("cut", range(1, 20))
def test_ptx_cut_anywhere_is_told(made: Made, cut: int) -> None:
    data = made.ptx(0)
    problems = check_ptx(made.manifest.binaries[0], data[: len(data) * cut // 20])
    assert problems
    assert "PTX is cut short or damaged" in problems or "not PTX" in problems[0]


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (_ptx(b".target sm_86", b".target sm_90"), "PTX is for sm_90, not sm86"),
        (_ptx(b".target sm_86", b".target sm_86a"), "PTX is for sm_86a, not sm86"),
        (_ptx(b".version 8.8", b".version 8.5"), "PTX ISA 8.5, not 8.8"),
        (_ptx(ENTRY.encode(), b"even"), f"PTX lacks the entry '{ENTRY}'"),
        (_ptx(f".entry {ENTRY}(".encode(), f".func {ENTRY}(".encode()), "PTX lacks the entry"),
        (_entry_in_a_comment, "PTX lacks the entry"),
        (lambda data: data[: len(data) // 2], "cut short or damaged"),
        (lambda data: data[: data.rindex(b"}")], "cut short or damaged"),
        (lambda data: data + b"}\n", "cut short or damaged"),
        (lambda data: data + b"// an end\n", "cut short or damaged"),
        (lambda data: data.replace(b"ret;", b"ret\0", 1), "cut short or damaged"),
        (lambda data: data + b"\0", "cut short or damaged"),
        (_ptx(b".version ", b"// version "), "not PTX"),
        (_ptx(b".target ", b"// target "), "not PTX"),
        (lambda data: b"\x7fELF" + data[:100].replace(b".", b"!"), "not PTX"),
    ],
)
def test_other_ptx_under_a_manifest_that_fits_it(
    made: Made, tmp_path: Path, change: Callable[[bytes], bytes], problem: str
) -> None:
    forged = made.with_bytes(0, "ptx", change(made.ptx(0)))
    found = failures(verify(forged.write(tmp_path / "set")))
    assert problem in found[0].problem
    assert forged.manifest.binaries[0].ptx.file_name in found[0].subject


@pytest.mark.parametrize(
    ("kind", "stated", "needed"), [("cubin", "12.1", "12.0"), ("ptx", "12.8", "12.9")]
)
def test_a_wrong_least_driver(
    made: Made, tmp_path: Path, kind: str, stated: str, needed: str
) -> None:
    payload = dataclasses.replace(getattr(made.manifest.binaries[0], kind), min_cuda=stated)
    failure = only_failure(made.changed(0, **{kind: payload}), tmp_path / "set")
    assert failure.problem == f"needs a driver of CUDA {needed}, not {stated}"


@pytest.mark.parametrize(
    ("abi", "sm", "major"), [(7, 86, 12), (7, 90, 12), (8, 86, 13), (8, 90, 13), (8, 100, 12)]
)
def test_the_assemblers_major_version(abi: int, sm: int, major: int) -> None:
    assert compiler_cuda_major(Cubin(sm, False, abi, (), 0, ())) == major


def test_shared_memory_that_does_not_fit_the_arch(made: Made) -> None:
    def problems(dynamic: int) -> list[str]:
        binary = dataclasses.replace(made.manifest.binaries[0], shared_bytes=dynamic)
        return check_cubin(binary, made.manifest.kernels[0], made.cubin(0))

    static = made.manifest.binaries[0].static_shared_bytes
    assert problems(99 * 1024 - static) == []
    assert problems(99 * 1024 - static + 1) == [
        f"{99 * 1024 + 1} bytes of shared memory do not fit sm86"
    ]


def test_all_of_a_gpus_shared_memory_may_be_used_where_the_system_has_some_too(both: Made) -> None:
    # An sm90 block may have 227 KB, besides the 1 KB that the system keeps; `odd` declares 256
    # bytes of its own.
    def problems(dynamic: int) -> list[str]:
        binary = dataclasses.replace(both.manifest.binaries[2], shared_bytes=dynamic)
        return check_cubin(binary, both.manifest.kernels[0], both.cubin(2))

    assert problems(227 * 1024 - 256) == []
    assert "shared memory do not fit sm90" in problems(227 * 1024 - 255)[0]


def test_the_systems_shared_memory_counts_where_the_code_declares_none(both: Made) -> None:
    elf = Elf(both.cubin(2))
    data = elf.edited("<I", elf.header_offset(f".nv.shared.{ENTRY}"), 0)  # it has no name now
    binary = dataclasses.replace(
        both.manifest.binaries[2], static_shared_bytes=0, shared_bytes=228 * 1024
    )
    problems = check_cubin(binary, both.manifest.kernels[0], data)
    assert any("shared memory do not fit sm90" in text for text in problems)


def test_code_that_uses_dynamic_shared_memory_must_be_given_some(made: Made) -> None:
    binary = made.manifest.binaries[0]
    declared = b"\n.extern .shared .align 16 .b8 buffer[];\n"
    data = made.ptx(0).replace(b"\n.address_size 64\n", b"\n.address_size 64\n" + declared, 1)
    assert declared in data
    assert check_ptx(binary, data) == []
    (problem,) = check_ptx(dataclasses.replace(binary, shared_bytes=0), data)
    assert "dynamic shared memory" in problem


def test_several_problems_are_all_told(both: Made, tmp_path: Path) -> None:
    forged = both.of("sm86").with_bytes(0, "cubin", _other_arch(both))
    forged = forged.with_bytes(0, "ptx", both.ptx(2))
    found = [failure.problem for failure in failures(verify(forged.write(tmp_path / "set")))]
    assert "machine code is for sm90, not sm86" in found
    assert "PTX is for sm_90, not sm86" in found
    assert any("static_shared_bytes" in problem for problem in found)


def test_no_cubin_at_all_is_an_error_of_integrity(made: Made) -> None:
    with pytest.raises(IntegrityError):
        check_cubin(made.manifest.binaries[0], made.manifest.kernels[0], b"no cubin")


def _make(path: Path, kind: str) -> None:
    path.parent.mkdir(exist_ok=True)
    match kind:
        case "file":
            path.write_bytes(b"x")
        case "FIFO":
            os.mkfifo(path)
        case "link":
            path.symlink_to("/etc")
        case _:
            path.symlink_to(path)


@pytest.mark.parametrize("kind", ["file", "FIFO", "link", "loop"])
@pytest.mark.parametrize(
    "name", ["notes", ".hidden", "objects/notes", "objects/manifest.json", "deep/manifest.json"]
)
def test_what_nothing_names_is_unexpected(
    made: Made, directory: Path, name: str, kind: str
) -> None:
    _make(directory / name, kind)
    outcomes = verify(directory)
    assert outcomes[-1] == Unexpected(name)
    assert [type(outcome) for outcome in outcomes[:-1]] == [Passed] * 3


def test_an_object_in_the_wrong_folder_is_unexpected(made: Made, directory: Path) -> None:
    name = made.manifest.binaries[0].cubin.file_name
    (directory / name).write_bytes(made.cubin(0))
    assert verify(directory)[3:] == [Unexpected(name)]


def test_verifying_changes_nothing(directory: Path) -> None:
    paths = [directory, *sorted(directory.rglob("*"))]
    before = [path.stat().st_mtime_ns for path in paths]
    verify(directory)
    assert [directory, *sorted(directory.rglob("*"))] == paths
    assert [path.stat().st_mtime_ns for path in paths] == before
