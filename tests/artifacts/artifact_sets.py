"""Builders of artifact sets, sound and unsound, for the tests beside this file."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import re
import shutil
import struct
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sonata_aot.artifacts.declaration import Variant, entry_prefix
from sonata_aot.artifacts.manifest import (
    Binary,
    Manifest,
    Payload,
    Selection,
    Source,
    binary_order,
)
from sonata_aot.artifacts.rules import MAX_SIZE, Rule
from sonata_aot.artifacts.verify import Passed, verify
from sonata_aot.kernels.spec import Budget, Declaration, KernelSpec, Parameter, product

ODD = KernelSpec(
    declaration=Declaration(
        name="odd",
        parameters=(
            Parameter("scale", "f32"),
            Parameter("source", "pointer", element="dtype", align=4),
            Parameter("first", "i32"),
            Parameter("target", "pointer", element="f32", align=4),
            Parameter("index", "i32"),
            Parameter("stride", "i64"),
        ),
        choices=("dtype", "slots"),
        selectors=("dtype",),
        block=("32 * 2", "1", "1"),
        grid=("ceildiv(first, 64)", "max(index, 1)", "1"),
        shared_bytes="4 * slots",
        budget=Budget(spills=1000, stack_bytes=4096),
    ),
    variants=product(dtype=["f32"], slots=[16, 48]),
    device="odd_kernel:odd",
)


def rules_for(arch: str) -> tuple[Rule, ...]:
    """Sound rules for both variants of `odd` on an architecture."""

    def rule(wide: int, first: tuple[int, int], slots: int) -> Rule:
        sizes = {"first": first, "index": (0, MAX_SIZE)}
        return Rule("odd", arch, {"wide": wide}, sizes, {"slots": slots}, {"waves": wide + 2})

    every = (1, MAX_SIZE)
    return (rule(0, (64, 4096), 48), rule(0, every, 16), rule(1, every, 48))


@dataclass(frozen=True)
class Made:
    """A manifest with the objects that it names."""

    manifest: Manifest = field(repr=False)
    objects: dict[str, bytes] = field(repr=False)

    def only(self, *indices: int) -> Made:
        """The same set with these binaries alone, and the rules where they all remain."""
        binaries = tuple(self.manifest.binaries[index] for index in indices)
        lost = {b.arch for b in self.manifest.binaries if b not in binaries}
        manifest = dataclasses.replace(
            self.manifest,
            rules=tuple(rule for rule in self.manifest.rules if rule.arch not in lost),
            binaries=binaries,
            selection=dataclasses.replace(
                self.manifest.selection, archs=tuple(sorted({b.arch for b in binaries}))
            ),
        )
        names = {payload.file_name for _, payload in manifest.payloads()}
        return Made(manifest, {name: self.objects[name] for name in sorted(names)})

    def of(self, arch: str) -> Made:
        """The same set with the binaries of one architecture alone."""
        return self.only(*(i for i, b in enumerate(self.manifest.binaries) if b.arch == arch))

    def changed(self, index: int, **changes: Any) -> Made:
        """The same set with other fields in one binary; the digest is right for them."""
        binaries = list(self.manifest.binaries)
        binaries[index] = dataclasses.replace(binaries[index], **changes)
        return Made(dataclasses.replace(self.manifest, binaries=tuple(binaries)), self.objects)

    def with_bytes(self, index: int, kind: str, data: bytes) -> Made:
        """The same set with another cubin or PTX in one binary, its size and SHA-256 right."""
        payload = getattr(self.manifest.binaries[index], kind)
        new = dataclasses.replace(payload, sha256=hashlib.sha256(data).hexdigest(), size=len(data))
        made = self.changed(index, **{kind: new})
        others = {k: v for k, v in self.objects.items() if k != payload.file_name}
        return Made(made.manifest, {**others, new.file_name: data})

    def cubin(self, index: int) -> bytes:
        return self.objects[self.manifest.binaries[index].cubin.file_name]

    def ptx(self, index: int) -> bytes:
        return self.objects[self.manifest.binaries[index].ptx.file_name]

    def content(self) -> dict[str, Any]:
        """The manifest as plain data, with its digest."""
        return json.loads(self.manifest.to_bytes())

    def write(self, directory: Path) -> Path:
        """Lay the files down as they are, without any of the product's checks."""
        return write_files(directory, self.manifest.to_bytes(), self.objects)


def write_files(directory: Path, manifest: bytes, objects: dict[str, bytes]) -> Path:
    shutil.rmtree(directory, ignore_errors=True)
    (directory / "objects").mkdir(parents=True, mode=0o700)
    directory.chmod(0o700)
    for name, data in objects.items():
        (directory / "objects" / name).write_bytes(data)
    (directory / "manifest.json").write_bytes(manifest)
    return directory


def seal(content: dict[str, Any]) -> bytes:
    """What somebody who knows the format would write for changed content: a digest that fits."""
    return _laid_out({key: value for key, value in content.items() if key != "digest"})


def unsealed(content: dict[str, Any]) -> bytes:
    """What somebody would write who does not know about the digest: the old one stays."""
    digest = content["digest"]
    return re.sub(rb'"digest":"\w+"\n', f'"digest":"{digest}"\n'.encode(), seal(content))


def _laid_out(content: dict[str, Any]) -> bytes:
    above = "{\n"
    for key, value in content.items():
        above += json.dumps(key) + ":"
        if isinstance(value, list) and value and isinstance(value[0], dict):
            items = (json.dumps(item, separators=(",", ":")) for item in value)
            above += "[\n" + ",\n".join(items).replace("},{", "},\n{") + "\n],\n"
        else:
            above += json.dumps(value, separators=(",", ":")) + ",\n"
    digest = hashlib.sha256(above.encode()).hexdigest()
    return f'{above}"digest":"{digest}"\n}}\n'.encode()


def leaves(
    data: Any, at: tuple[str | int, ...] = ()
) -> Iterator[tuple[tuple[str | int, ...], Any]]:
    """Every value that is not a container, with the way to it."""
    items: Any = data.items() if isinstance(data, dict) else enumerate(data)
    for key, value in items:
        if isinstance(value, dict | list):
            yield from leaves(value, (*at, key))
        else:
            yield (*at, key), value


def put(content: Any, way: tuple[str | int, ...], value: Any) -> None:
    for key in way[:-1]:
        content = content[key]
    content[way[-1]] = value


def tree(directory: Path) -> dict[str, bytes | None]:
    """Everything below a directory; folders map to None."""
    return {
        str(path.relative_to(directory)): None if path.is_dir() else path.read_bytes()
        for path in sorted(directory.rglob("*"))
    }


def assert_holds(directory: Path, made: Made) -> None:
    """The directory is exactly this set, with nothing beside it."""
    assert tree(directory) == {
        "manifest.json": made.manifest.to_bytes(),
        "objects": None,
        **{f"objects/{name}": data for name, data in made.objects.items()},
    }
    wrong = [outcome for outcome in verify(directory) if not isinstance(outcome, Passed)]
    assert wrong == []


def run_python(script: str, *arguments: object) -> str:
    """Output of a Python process that must succeed."""
    result = subprocess.run(
        [sys.executable, "-c", script, *map(str, arguments)],
        capture_output=True,
        text=True,
        check=False,
        cwd="/",
        timeout=60,
    )
    assert result.returncode == 0, result.stderr
    return result.stdout


def for_archs(made: Made, *archs: str, **fields: Any) -> Manifest:
    """A manifest whose first binary stands there once for each architecture."""
    first = made.manifest.binaries[0]
    binaries: tuple[Binary, ...] = tuple(
        dataclasses.replace(first, arch=arch, **fields) for arch in archs
    )
    selection = dataclasses.replace(made.manifest.selection, archs=archs)
    return dataclasses.replace(made.manifest, rules=(), binaries=binaries, selection=selection)


class Elf:
    """Just enough of an ELF64 file to edit one place of it; independent of the product's reader."""

    def __init__(self, data: bytes) -> None:
        self.data = bytearray(data)
        self.table, self.count = (
            struct.unpack_from("<Q", data, 40)[0],
            struct.unpack_from("<H", data, 60)[0],
        )
        names = self.header(struct.unpack_from("<H", data, 62)[0])
        self.sections = {
            self._text(names[4] + self.header(index)[0]): index for index in range(self.count)
        }

    def header(self, index: int) -> tuple[int, ...]:
        return struct.unpack_from("<IIQQQQIIQQ", self.data, self.table + 64 * index)

    def header_offset(self, section: str) -> int:
        return self.table + 64 * self.sections[section]

    def span(self, section: str) -> tuple[int, int]:
        """Offset and size of a section's content."""
        header = self.header(self.sections[section])
        return header[4], header[5]

    def symbol_offset(self, name: str) -> int:
        """Where the 24-byte record of a symbol starts."""
        start, size = self.span(".symtab")
        strings = self.span(".strtab")[0]
        return next(
            at
            for at in range(start, start + size, 24)
            if self._text(strings + struct.unpack_from("<I", self.data, at)[0]) == name
        )

    def edited(self, form: str, offset: int, *values: int) -> bytes:
        """The file with these values at an offset."""
        result = bytearray(self.data)
        struct.pack_into(form, result, offset, *values)
        return bytes(result)

    def _text(self, offset: int) -> str:
        return self.data[offset : self.data.index(0, offset)].decode()


def big_manifest(count: int = 152) -> Manifest:
    """`count` made-up binaries for two archs, of a kernel like the tuned ones, and a rule each."""
    names = ("m", "side", "rows", "warps", "unroll", "persistent", "pdl", "fetch", "ahead", "late")
    sizes = ("n", "k", "x_rows", "block_rows", "constant", "x_stride", "weight_stride")
    declaration = Declaration(
        name="big",
        parameters=(
            *(Parameter(name, "pointer", element="dtype", align=16) for name in ("x", "weight")),
            *(Parameter(name, "i32" if name < "x" else "i64") for name in sizes),
            Parameter("scale", "f32"),
        ),
        choices=("dtype", *names),
        selectors=("dtype", "m"),
        block=("32 * warps", "1", "1"),
        grid=("ceildiv(n, block_rows)", "1", "1"),
        shared_bytes="max(16 * m * warps * rows, 4 * rows * unroll * (1 + persistent) + 64)",
        min_sm="80 + 10 * max(pdl, persistent)",
        programmatic="pdl",
    )
    binaries: list[Binary] = []
    rules: list[Rule] = []
    for arch in ("sm90", "sm100"):
        for number in range(count // 4):
            digits = (1 + number // 64, number // 16 % 4, number // 4 % 4, number % 4)
            fixed: Variant = dict(zip(names, (*digits, 4, 0, 0, 0, 0, 0), strict=True))
            fixed |= {"side": "abcd"[digits[1]], "rows": 2 ** digits[2], "warps": 2 ** digits[3]}
            for dtype in ("bf16", "f16"):
                variant: Variant = {"dtype": dtype, **fixed}
                binaries.append(_made_up(declaration, variant, arch))
        built = [b.variant for b in binaries if (b.arch, b.variant["dtype"]) == (arch, "bf16")]
        half = count // 2
        for index in range(half):
            variant = {k: v for k, v in built[index % len(built)].items() if k != "dtype"}
            last = index + 1 in (half // 2, half)
            n = (1, MAX_SIZE) if last else (64 * (count - index), MAX_SIZE - index)
            case = {"most": int(index >= half // 2), "constant": 0}
            launch = {"blocks_per_sm": 0, "ahead_kb": 0, "skip_blocks_per_sm": 0}
            ranges = {"n": n, "k": (1, MAX_SIZE)}
            rules.append(Rule("big", arch, case, ranges, variant, launch))
    return Manifest(
        schema=1,
        tool="0.1.0",
        compiler={"nvidia-cutlass-dsl": "4.8.1"},
        source=Source(digest="0" * 64, commit=None, dirty=None),
        selection=Selection(archs=("sm90", "sm100"), kernels=("big",)),
        kernels=(declaration,),
        rules=tuple(rules),
        binaries=tuple(sorted(binaries, key=binary_order)),
    )


def _made_up(declaration: Declaration, variant: Variant, arch: str) -> Binary:
    entry = f"{entry_prefix(declaration.name, variant)}_0"

    def payload(isa: str | None) -> Payload:
        name = f"{entry} {arch} {isa}"
        return Payload(hashlib.sha256(name.encode()).hexdigest(), 12345, "12.9", isa)

    return Binary(
        kernel=declaration.name,
        variant=variant,
        arch=arch,
        entry=entry,
        block=declaration.block_shape(variant),
        shared_bytes=declaration.shared_memory(variant),
        static_shared_bytes=1024,
        registers=64,
        stack_bytes=0,
        spills=0,
        cubin=payload(None),
        ptx=payload("8.8"),
        key=hashlib.sha256(entry.encode()).hexdigest(),
    )
