from __future__ import annotations

import random
import re
import struct
import tracemalloc
from pathlib import Path

import pytest
from artifact_sets import Elf, Made

from sonata_aot.aot.toolchain import run_tool
from sonata_aot.artifacts.arch import Arch
from sonata_aot.artifacts.cubin import Cubin, KernelCode, read_cubin
from sonata_aot.artifacts.errors import IntegrityError

FOUR = range(4)


def reads_or_refuses(data: bytes) -> bool:
    """Whether it was read; anything but an `IntegrityError` fails the test."""
    try:
        read_cubin(data)
    except IntegrityError as error:
        problem = error.what
    else:
        return True
    assert problem.startswith("not a usable cubin: ")
    return False


def entry(cubin: Cubin) -> KernelCode:
    assert len(cubin.kernels) == 1
    return cubin.kernels[0]


@pytest.mark.parametrize("index", FOUR)
def test_resources_are_those_that_cuobjdump_prints(both: Made, tmp_path: Path, index: int) -> None:
    file = tmp_path / "k.cubin"
    file.write_bytes(both.cubin(index))
    printed = run_tool("cuobjdump", "--dump-resource-usage", str(file))
    found = re.search(r"Function (\S+):\s+REG:(\d+) STACK:(\d+) SHARED:(\d+)", printed)
    assert found is not None
    code = entry(read_cubin(both.cubin(index)))
    assert found[1] == code.entry == both.manifest.binaries[index].entry
    assert [int(found[group]) for group in (2, 3, 4)] == [
        code.registers,
        code.stack_bytes,
        code.static_shared_bytes,
    ]
    # The kernel was written to use some of each: zeros on both sides would prove nothing.
    assert min(code.registers, code.stack_bytes, code.static_shared_bytes) > 0


@pytest.mark.parametrize("index", FOUR)
def test_spills_are_those_that_cuobjdump_prints(both: Made, tmp_path: Path, index: int) -> None:
    file = tmp_path / "k.cubin"
    file.write_bytes(both.cubin(index))
    printed = run_tool("cuobjdump", "--dump-sass", str(file))
    found = re.findall(r"^\s*/\*[0-9a-f]{4,}\*/\s+(?:@\S+\s+)?(LDL|STL)\b", printed, re.M)
    assert set(found) == {"LDL", "STL"}
    assert read_cubin(both.cubin(index)).spills == len(found)


def test_half_an_instruction_is_refused(made: Made) -> None:
    elf = Elf(made.cubin(0))
    (name,) = (name for name in elf.sections if name.startswith(".text."))
    size = elf.span(name)[1]
    assert reads_or_refuses(elf.edited("<Q", elf.header_offset(name) + 32, size - 16))
    assert not reads_or_refuses(elf.edited("<Q", elf.header_offset(name) + 32, size - 8))


@pytest.mark.parametrize("index", FOUR)
def test_interface_is_that_which_cuobjdump_prints(both: Made, tmp_path: Path, index: int) -> None:
    file = tmp_path / "k.cubin"
    file.write_bytes(both.cubin(index))
    printed = run_tool("cuobjdump", "--dump-elf", str(file))
    rows = re.findall(r"Ordinal : 0x(\w+)\s+Offset\s+: 0x(\w+)\s+Size\s+: 0x(\w+)", printed)
    table = {int(a, 16): (int(b, 16), int(c, 16)) for a, b, c in rows}
    code = entry(read_cubin(both.cubin(index)))
    assert code.parameters == tuple(table[ordinal] for ordinal in range(len(table)))
    assert code.parameters == both.manifest.kernels[0].offsets
    threads = re.search(r"EIATTR_REQNTID.*?Value:\s+0x(\w+) 0x(\w+) 0x(\w+)", printed, re.S)
    assert threads is not None
    assert code.threads == tuple(int(part, 16) for part in threads.groups()) == (64, 1, 1)


@pytest.mark.parametrize("index", FOUR)
def test_target_is_read_from_the_flags(both: Made, index: int) -> None:
    cubin = read_cubin(both.cubin(index))
    arch = Arch.parse(both.manifest.binaries[index].arch)
    assert (cubin.sm, cubin.specific, cubin.undefined) == (arch.number, False, ())
    assert cubin.is_for(arch)
    assert not cubin.is_for(Arch(8, 9))
    assert not cubin.is_for(Arch(arch.major, arch.minor, "a"))


@pytest.mark.parametrize(
    ("abi", "flags", "fits", "others"),
    [
        (7, 0x560556, "sm86", ["sm80", "sm90", "sm90a"]),
        (7, 0x5A055A, "sm90", ["sm90a", "sm86"]),
        (7, 0x5A0D5A, "sm90a", ["sm90"]),
        (8, 0x6006402, "sm100", ["sm100a", "sm103"]),
        (8, 0x600640A, "sm100a", ["sm100", "sm100f"]),
        (8, 0x6006402, "sm100f", ["sm100a", "sm120f"]),
        (8, 0x6007802, "sm120", ["sm121", "sm120a"]),
    ],
)
def test_both_layouts_of_the_flags(
    made: Made, abi: int, flags: int, fits: str, others: list[str]
) -> None:
    data = bytearray(made.cubin(0))
    data[8] = abi
    struct.pack_into("<I", data, 48, flags)
    cubin = read_cubin(bytes(data))
    assert cubin.is_for(Arch.parse(fits))
    assert [name for name in others if cubin.is_for(Arch.parse(name))] == []


@pytest.mark.parametrize(
    "name", ["odd_dtype_f32_slots_16_0", ".nv.shared.odd_dtype_f32_slots_16_0"]
)
def test_an_undefined_symbol_is_found(made: Made, name: str) -> None:
    elf = Elf(made.cubin(0))
    assert read_cubin(elf.edited("<H", elf.symbol_offset(name) + 6, 0)).undefined == (name,)


@pytest.mark.parametrize("symbol", ["vprintf", "malloc", "free", "__assertfail", ".nv.reserved.x"])
def test_symbols_of_the_driver_are_not_undefined(made: Made, symbol: str) -> None:
    elf = Elf(made.cubin(0))
    name = ".nv.shared.odd_dtype_f32_slots_16_0"
    record = elf.symbol_offset(name)
    text = elf.span(".strtab")[0] + struct.unpack_from("<I", elf.data, record)[0]
    elf.data = bytearray(elf.edited("<H", record + 6, 0))
    assert read_cubin(bytes(elf.data)).undefined == (name,)
    elf.data[text : text + len(symbol) + 1] = symbol.encode() + b"\0"
    assert read_cubin(bytes(elf.data)).undefined == ()


@pytest.mark.parametrize(
    "data",
    [b"", b"\x7fELF", bytes(64), bytes(10_000), b"\x7fELF" + bytes(100), b".version 8.8\n" * 20],
    ids=["empty", "magic", "zeros", "many zeros", "ELF of zeros", "text"],
)
def test_what_is_no_cubin_is_refused(data: bytes) -> None:
    assert not reads_or_refuses(data)


@pytest.mark.parametrize(
    ("form", "offset", "value"),
    [
        ("<B", 4, 1),  # 32-bit
        ("<B", 5, 2),  # big-endian
        ("<H", 18, 62),  # x86-64
        ("<Q", 40, 2**64 - 1),  # section table: beyond what an index can be
        ("<Q", 40, 2**63),
        ("<Q", 40, 2**63 - 1),
        ("<Q", 40, 10**6),
        ("<H", 58, 65),  # size of its rows
        ("<H", 60, 0),  # their count
        ("<H", 60, 65535),
        ("<H", 60, 4096),
        ("<H", 62, 65535),  # row of the names
    ],
)
def test_a_broken_header_is_refused(made: Made, form: str, offset: int, value: int) -> None:
    assert not reads_or_refuses(Elf(made.cubin(0)).edited(form, offset, value))


def test_a_file_without_symbols_is_refused(made: Made) -> None:
    elf = Elf(made.cubin(0))
    renamed = bytes(elf.data).replace(b".symtab\0", b".symtax\0")
    assert renamed != made.cubin(0)
    assert not reads_or_refuses(renamed)


def test_a_gap_in_the_ordinals_is_refused(made: Made) -> None:
    elf = Elf(made.cubin(0))
    start, size = elf.span(".nv.info.odd_dtype_f32_slots_16_0")
    at = elf.data.index(b"\x04\x17\x0c\x00", start, start + size)  # KPARAM_INFO, 12 bytes
    assert elf.data[at + 8] == 5  # the last ordinal stands first
    assert not reads_or_refuses(elf.edited("<H", at + 8, 6))


@pytest.mark.parametrize("index", [0, 2])
def test_every_truncation_is_refused(both: Made, index: int) -> None:
    data = both.cubin(index)
    accepted = [length for length in range(len(data)) if reads_or_refuses(data[:length])]
    assert accepted == []


@pytest.mark.parametrize("seed", range(4))
def test_random_damage_is_read_or_refused(both: Made, seed: int) -> None:
    rng = random.Random(seed)
    original = both.cubin(seed)
    refused = 0
    for _ in range(1500):
        data = bytearray(original)
        for _ in range(rng.choice((1, 1, 2, 8, 64))):
            data[rng.randrange(len(data))] = rng.choice(
                (0, 1, 0x7F, 0x80, 0xFF, rng.randrange(256))
            )
        refused += not reads_or_refuses(bytes(data))
    assert refused > 100


@pytest.mark.parametrize("value", [0, 1, 0x7F, 0x80, 0xFF])
def test_damage_to_each_byte_of_the_structure_is_read_or_refused(made: Made, value: int) -> None:
    elf = Elf(made.cubin(0))
    spans = [(0, 64), (elf.table, 64 * elf.count)]
    spans += [elf.span(name) for name in elf.sections if "text" not in name and "const" not in name]
    for start, size in spans:
        for at in range(start, min(start + size, len(elf.data))):
            reads_or_refuses(elf.edited("<B", at, value))


def _with_tables(symbols: bytes, strings: bytes, copies: int) -> bytes:
    """A file whose `copies` further sections all cover the strings."""
    names = b"\0.symtab\0.strtab\0"
    body = names + strings + symbols
    rows = [
        (0, 0, 0, 0, 0, 0, 0, 0, 0, 0),
        (9, 3, 0, 0, 64 + len(names), len(strings), 0, 0, 0, 0),
        (1, 2, 0, 0, 64 + len(names) + len(strings), len(symbols), 1, 0, 0, 24),
        (0, 3, 0, 0, 64, len(names), 0, 0, 0, 0),
        *[(0, 1, 0, 0, 64 + len(names), len(strings), 0, 0, 0, 0)] * copies,
    ]
    ident = b"\x7fELF\x02\x01\x01\x33\x07" + bytes(7)
    header = struct.pack(
        "<16sHHIQQQIHHHHHH",
        *(ident, 2, 190, 1, 0, 0, 64 + len(body), 0x560556, 64, 0, 0, 64, len(rows), 3),
    )
    return header + body + b"".join(struct.pack("<IIQQQQIIQQ", *row) for row in rows)


@pytest.mark.parametrize("kind", ["sections", "symbols"])
def test_reading_takes_memory_in_proportion_to_the_file(kind: str) -> None:
    strings = b"a" * 2**17 + b"\0"
    data = (
        _with_tables(bytes(24), strings, copies=2000)
        if kind == "sections"
        else _with_tables(struct.pack("<IBBHQQ", 0, 0, 0, 1, 0, 0) * 2000, strings, copies=0)
    )
    tracemalloc.start()
    try:
        reads_or_refuses(data)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 32 * len(data)
