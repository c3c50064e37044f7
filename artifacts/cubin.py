"""Reads what a cubin says about itself, with no GPU and no toolkit.

A cubin is an ELF64 file. What is read here is undocumented by NVIDIA but plain in its tools' output
(`cuobjdump --dump-elf`): the target in `e_flags`, and per kernel an `.nv.info.<entry>` section of
EIATTR records. `tests/artifacts/test_cubin.py` compares it with `cuobjdump` itself.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

from .arch import Arch
from .errors import IntegrityError

_HEADER = struct.Struct("<16sHHIQQQIHHHHHH")
_SECTION = struct.Struct("<IIQQQQIIQQ")
_SYMBOL = struct.Struct("<IBBHQQ")
_EM_CUDA = 190
_MAX_SECTIONS = 4096
_MAX_NAME = 1024
_MAX_INFO_BYTES = 65536

# EIATTR codes in .nv.info sections.
_FRAME_SIZE = 0x11
_REGCOUNT = 0x2F
_KPARAM_INFO = 0x17
_REQNTID = 0x10
# Of the low 12 bits of an instruction, those of LDL and STL, on all architectures from sm80 on.
_LOCAL = {0x983, 0x387}
_INSTRUCTION_BYTES = 16
# Undefined symbols that the driver itself resolves: reserved shared memory, device-side printf,
# heap and assert.
_DRIVER_SYMBOLS = {"vprintf", "malloc", "free", "__assertfail"}
_DRIVER_PREFIX = ".nv.reserved"
# Forms of an EIATTR record: only the last carries a payload after its 16-bit size.
_FORM_SIZED = 4


@dataclass(frozen=True)
class KernelCode:
    """One entry of a cubin; sizes in bytes.

    `parameters` are (offset, size) by ordinal; `threads` is the required block shape, if the code
    states one.
    """

    entry: str
    parameters: tuple[tuple[int, int], ...]
    registers: int
    stack_bytes: int
    static_shared_bytes: int
    threads: tuple[int, int, int] | None


@dataclass(frozen=True)
class Cubin:
    """A whole cubin.

    `sm` is 86 for sm86; `specific` is true for an `a` target; `spills` counts instructions that
    touch local memory, where spilled registers and indexed arrays live; `undefined` are the symbols
    that neither the file nor the driver provides.
    """

    sm: int
    specific: bool
    abi: int
    kernels: tuple[KernelCode, ...]
    spills: int
    undefined: tuple[str, ...]

    def is_for(self, arch: Arch) -> bool:
        """Whether the ELF flags are those of this target.

        A family target (`sm100f`) has the flags of its plain one.
        """
        return self.sm == arch.number and self.specific == (arch.suffix == "a")


@dataclass(frozen=True)
class _Section:
    name: str
    size: int
    data: memoryview
    link: int


def read_cubin(data: bytes) -> Cubin:
    """Parse a cubin.

    Raises:
        IntegrityError: it is not an ELF64 file for CUDA, or an offset in it leads outside.
    """
    try:
        return _read(data)
    except (struct.error, IndexError, OverflowError, ValueError) as error:
        raise _broken(str(error)) from None


def _broken(problem: str) -> IntegrityError:
    return IntegrityError(f"not a usable cubin: {problem}", remedy="rebuild the artifacts")


def _read(data: bytes) -> Cubin:
    header = _HEADER.unpack_from(data)
    ident, _, machine, _, _, segment_offset, section_offset, flags = header[:8]
    _, segment_size, segments, entry_size, count, names_index = header[8:]
    if ident[:6] != b"\x7fELF\x02\x01" or machine != _EM_CUDA:
        raise _broken("no ELF header of a CUDA device")
    if entry_size != _SECTION.size or not 0 < count <= _MAX_SECTIONS:
        raise _broken(f"{count} sections of {entry_size} bytes")
    _slice(data, segment_offset, segment_size * segments)
    sections = _sections(data, section_offset, count, names_index)
    by_name = {section.name: section for section in sections}
    symbols = _symbols(by_name.get(".symtab"), sections)
    registers, frames = _resources(by_name.get(".nv.info"), symbols)
    abi = ident[8]
    # The flags moved with ELF ABI 8 (Blackwell): 8 bits of SM number one byte up, 'a' at bit 3.
    sm, specific = (
        ((flags >> 8) & 0xFF, bool(flags & 0x8))
        if abi >= 8
        else (flags & 0xFF, bool(flags & 0x800))
    )
    kernels = []
    for section in sections:
        prefix = ".nv.info."
        entry = section.name.removeprefix(prefix)
        if not section.name.startswith(prefix) or f".text.{entry}" not in by_name:
            continue
        parameters, threads = _interface(section.data)
        shared = by_name.get(f".nv.shared.{entry}")
        kernels.append(
            KernelCode(
                entry=entry,
                parameters=parameters,
                registers=registers.get(entry, 0),
                stack_bytes=frames.get(entry, 0),
                static_shared_bytes=shared.size if shared else 0,
                threads=threads,
            )
        )
    undefined = tuple(
        sorted(
            name
            for name, section_index in symbols
            if name and section_index == 0 and not _from_driver(name)
        )
    )
    spills = sum(_spills(item.data) for item in sections if item.name.startswith(".text."))
    ordered = tuple(sorted(kernels, key=lambda k: k.entry))
    return Cubin(sm, specific, abi, ordered, spills, undefined)


def _spills(code: memoryview) -> int:
    if len(code) % _INSTRUCTION_BYTES:
        raise _broken(f"{len(code)} bytes of instructions")
    first = code.cast("H")[:: _INSTRUCTION_BYTES // 2]
    return sum(half & 0xFFF in _LOCAL for half in first)


def _from_driver(symbol: str) -> bool:
    return symbol in _DRIVER_SYMBOLS or symbol.startswith(_DRIVER_PREFIX)


def _slice(data: bytes | memoryview, offset: int, size: int) -> memoryview:
    if offset > len(data) or size > len(data) - offset:
        raise _broken(f"bytes {offset}..{offset + size} of {len(data)}")
    return memoryview(data)[offset : offset + size]


def _string(table: memoryview, offset: int) -> str:
    text, end, _ = bytes(table[offset : offset + _MAX_NAME]).partition(b"\0")
    if not end:
        raise _broken(f"a name without an end at {offset}")
    return text.decode("ascii")


def _sections(data: bytes, offset: int, count: int, names_index: int) -> list[_Section]:
    raw = [_SECTION.unpack_from(data, offset + index * _SECTION.size) for index in range(count)]
    names = _slice(data, raw[names_index][4], raw[names_index][5])
    nobits = 8
    return [
        _Section(
            name=_string(names, name),
            size=size,
            data=memoryview(b"") if kind == nobits or kind == 0 else _slice(data, start, size),
            link=link,
        )
        for name, kind, _, _, start, size, link, _, _, _ in raw
    ]


def _symbols(table: _Section | None, sections: list[_Section]) -> list[tuple[str, int]]:
    """Name and section index of each symbol, in order."""
    if table is None:
        raise _broken("no symbol table")
    strings = sections[table.link].data
    return [
        (_string(strings, name), section_index)
        for name, _, _, section_index, _, _ in _SYMBOL.iter_unpack(table.data)
    ]


def _records(data: bytes | memoryview) -> list[tuple[int, memoryview]]:
    """The EIATTR records of a section that carry a payload."""
    if len(data) > _MAX_INFO_BYTES:
        raise _broken(f"{len(data)} bytes of attributes")
    result, at = [], 0
    while at < len(data):
        form, code, size = struct.unpack_from("<BBH", data, at)
        at += 4
        if form == _FORM_SIZED:
            result.append((code, _slice(data, at, size)))
            at += size
    return result


def _resources(
    info: _Section | None, symbols: list[tuple[str, int]]
) -> tuple[dict[str, int], dict[str, int]]:
    """Registers and stack frame bytes by entry."""
    registers: dict[str, int] = {}
    frames: dict[str, int] = {}
    for code, payload in _records(info.data if info else b""):
        if code in (_REGCOUNT, _FRAME_SIZE):
            symbol, value = struct.unpack_from("<II", payload)
            target = registers if code == _REGCOUNT else frames
            target[symbols[symbol][0]] = value
    return registers, frames


def _interface(
    info: memoryview,
) -> tuple[tuple[tuple[int, int], ...], tuple[int, int, int] | None]:
    """Parameters by ordinal, and the required block shape."""
    parameters: dict[int, tuple[int, int]] = {}
    threads = None
    for code, payload in _records(info):
        if code == _KPARAM_INFO:
            _, ordinal, offset, packed = struct.unpack_from("<IHHI", payload)
            parameters[ordinal] = (offset, packed >> 18)
        elif code == _REQNTID:
            threads = struct.unpack_from("<III", payload)
    if sorted(parameters) != list(range(len(parameters))):
        raise _broken("parameter ordinals are not 0, 1, 2, ...")
    return tuple(parameters[ordinal] for ordinal in sorted(parameters)), threads
