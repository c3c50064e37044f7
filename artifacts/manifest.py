"""The manifest: what an artifact directory holds, schema 1.

`manifest.json` is the only index of a directory. It is read strictly, it carries a digest of
itself, and it must equal, byte for byte, what this module would write for the same content.
"""

import contextlib
import functools
import hashlib
import json
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Annotated, Any, Literal

from .arch import Arch, ArchName, normalise
from .declaration import (
    MAX_THREADS,
    ChoiceValue,
    Declaration,
    Name,
    Variant,
    is_entry,
    sort_key,
    variant_name,
)
from .errors import ManifestError, SonataError
from .record import record
from .rules import Rule, rules_problem
from .schema import Match, Range, canonical_text, decode, encode, parse_json

SCHEMA = 1
FILE_NAME = "manifest.json"
# What `ssh-keygen -Y sign` writes beside it; nobody need have one.
SIGNATURE = f"{FILE_NAME}.sig"
OBJECTS = "objects"
MAX_MANIFEST_BYTES = 64 * 2**20
MAX_OBJECT_BYTES = 64 * 2**20

Sha256 = Annotated[str, Match(r"[0-9a-f]{64}")]
Version = Annotated[str, Match(r"[0-9A-Za-z][0-9A-Za-z.+!_-]{0,63}")]
Cuda = Annotated[str, Match(r"[1-9][0-9]?\.[0-9]{1,2}")]
Symbol = Annotated[str, Match(r"[A-Za-z_$][A-Za-z0-9_$.]{0,511}")]
Form = Literal["cubin", "ptx"]
Small = Annotated[int, Range(0, 2**20)]


@record
class Payload:
    """One file under `objects/`, named by its digest.

    `min_cuda` is the least CUDA version of a driver that takes it. `isa` is the PTX ISA version,
    null for machine code.
    """

    sha256: Sha256
    size: Annotated[int, Range(1, MAX_OBJECT_BYTES)]
    min_cuda: Cuda
    isa: Annotated[str, Match(r"[0-9]\.[0-9]")] | None

    @property
    def file_name(self) -> str:
        """Name inside `objects/`."""
        return f"{self.sha256}.{'cubin' if self.isa is None else 'ptx'}"


@record
class Binary:
    """One variant of one kernel, compiled for one architecture.

    `shared_bytes` is dynamic and `static_shared_bytes` static shared memory of a block;
    `spills` counts instructions that touch local memory.
    """

    kernel: Name
    variant: Variant
    arch: ArchName
    entry: Symbol
    block: tuple[
        Annotated[int, Range(1, MAX_THREADS)],
        Annotated[int, Range(1, MAX_THREADS)],
        Annotated[int, Range(1, MAX_THREADS)],
    ]
    shared_bytes: Small
    static_shared_bytes: Small
    registers: Annotated[int, Range(1, 255)]
    stack_bytes: Small
    spills: Small
    cubin: Payload
    ptx: Payload
    key: Sha256

    def payload(self, form: Form) -> Payload:
        """The machine code or the PTX."""
        return self.cubin if form == "cubin" else self.ptx

    @property
    def variant_name(self) -> str:
        """`dtype=bf16,m=1`."""
        return variant_name(self.variant)

    @property
    def label(self) -> str:
        """How messages name this binary."""
        return f"{self.kernel}[{self.variant_name}] {self.arch}"


@record
class Source:
    """Where the kernels came from.

    `digest` covers every source file that the compiled kernels consist of. `commit` and `dirty` are
    those of the kernels' source tree, null where it is not under git.
    """

    digest: Sha256
    commit: Annotated[str, Match(r"[0-9a-f]{40}([0-9a-f]{24})?")] | None
    dirty: bool | None


@record
class Selection:
    """What the build was asked for, normalised."""

    archs: tuple[ArchName, ...]
    kernels: tuple[Name, ...]


@record
class Manifest:
    """Everything about an artifact directory.

    `tool` is the version of sonata-aot; `compiler` maps each compiler package to its version.
    `rules` are in the order in which they are tried.
    """

    schema: int
    tool: Version
    compiler: dict[Annotated[str, Match(r"[a-z0-9][a-z0-9-]{0,63}")], Version]
    source: Source
    selection: Selection
    kernels: tuple[Declaration, ...]
    rules: tuple[Rule, ...]
    binaries: tuple[Binary, ...]

    def __post_init__(self) -> None:
        """Check that the parts agree with one another.

        Raises:
            ManifestError: the first contradiction, with its place.
        """
        declared = {declaration.name: declaration for declaration in self.kernels}
        _require(len(declared) == len(self.kernels), "kernels", "a kernel stands twice")
        _require(tuple(declared) == self.selection.kernels, "kernels", "not those of selection")
        commit, dirty = self.source.commit, self.source.dirty
        _require((commit is None) == (dirty is None), "source", "only one of commit and dirty")
        archs = [Arch.parse(name) for name in self.selection.archs]
        _require(
            [arch.name for arch in normalise(archs)] == list(self.selection.archs),
            "selection",
            "archs not in normal form",
        )
        variants = self._check_binaries(declared)
        problem = rules_problem(self.rules, declared, self.selection.archs, variants)
        if problem is not None:
            raise _contradiction(problem)

    def _check_binaries(
        self, declared: Mapping[str, Declaration]
    ) -> dict[tuple[str, str], list[Variant]]:
        """Check each binary and their order; returns the variants by kernel and architecture."""
        variants: dict[tuple[str, str], list[Variant]] = {}
        numbers = {name: Arch.parse(name).number for name in self.selection.archs}
        for index, binary in enumerate(self.binaries):
            declaration, number = declared.get(binary.kernel), numbers.get(binary.arch)
            if declaration is None:
                problem = f"kernel {binary.kernel!r} not declared"
            elif number is None:
                problem = f"arch {binary.arch} not in selection"
            else:
                problem = _binary_problem(declaration, binary, number)
            if problem is not None:
                raise _contradiction(f"binaries[{index}]: {problem}")
            variants.setdefault((binary.kernel, binary.arch), []).append(binary.variant)
        if not _in_order(self.binaries):
            places = [binary_order(binary) for binary in self.binaries]
            for index, binary in enumerate(self.binaries):
                twice = places[index] in places[:index]
                _require(not twice, f"binaries[{index}]", f"{binary.label} stands twice")
            raise _contradiction("binaries: not in order")
        return variants

    @classmethod
    def from_bytes(
        cls, data: bytes, where: str = FILE_NAME, only: Callable[[str], bool] | None = None
    ) -> "Manifest":
        """Read the file's bytes.

        With `only`, where the file's digest is right, just the rules and binaries of architectures
        that it takes are read: a loader needs no others. They are checked as ever, but not the
        others, nor the file's form. Such a manifest is not to be written.

        Raises:
            ManifestError: bad JSON, another schema, a field that is wrong, or bytes that differ
                from the canonical file for this content.
        """
        # Of what is wrong in part or in haste, what follows says more.
        with contextlib.suppress(SonataError, ValueError, TypeError, KeyError, RecursionError):
            if only is not None:
                return cls._part(json.loads(data.decode("utf-8")), data, only)
        # Bytes equal to the canonical ones hold nothing that strict parsing, which takes longer,
        # would refuse. Where they are not equal, its reasons come first.
        with contextlib.suppress(ManifestError, ValueError, RecursionError):
            return cls._from_content(json.loads(data.decode("utf-8")), data, where)
        return cls._from_content(parse_json(data, where), data, where)

    @classmethod
    def _part(cls, content: Any, data: bytes, only: Callable[[str], bool]) -> "Manifest":
        """What `only` takes, by architecture, of the content that was read from `data`."""
        end = len(data) - len(_digest_line("")) - 64
        digest = hashlib.sha256(memoryview(data)[:end]).hexdigest()
        _require(data[end:] == _digest_line(digest), "digest", "wrong")
        _require(content.pop("digest") == digest, "digest", "stands elsewhere")
        _require(content["schema"] == SCHEMA, "schema", "another")
        selection = decode(Selection, content["selection"], FILE_NAME)
        taken = [name for name in selection.archs if only(name)]
        for key in ("rules", "binaries"):
            _require(type(content[key]) is list, key, "no list")
            content[key] = [item for item in content[key] if item["arch"] in taken]
        manifest = decode(cls, content, FILE_NAME)
        manifest.__dict__["digest"] = digest
        return manifest

    @classmethod
    def _from_content(cls, content: Any, data: bytes, where: str) -> "Manifest":
        if not isinstance(content, dict):
            raise ManifestError(f"{where}: not an object", remedy="rebuild the artifacts")
        schema = content.get("schema")
        if schema != SCHEMA or type(schema) is not int:
            raise ManifestError(
                f"{where}: schema {repr(schema)[:40]}, but this sonata-aot reads schema {SCHEMA}",
                remedy="rebuild the artifacts with this version, or install the one that made them",
            )
        stated = content.pop("digest", None)
        try:
            manifest = decode(cls, content, where)
        except ManifestError:
            raise
        except SonataError as error:
            # A launch expression or an arch inside the file: the file is what is wrong.
            raise ManifestError(f"{where}: {error.what}", remedy=error.remedy) from None
        # What was decoded is what `encode` would give: `content` itself is compared.
        end = _known_above(content, data)
        if end is None:
            expected, digest = sealed(content)
            canonical = data == expected
        else:
            # Without copies of the file: those of this size cost more than to hash it.
            digest = hashlib.sha256(memoryview(data)[:end]).hexdigest()
            canonical = data[end:] == _digest_line(digest)
        if stated != digest:
            raise ManifestError(
                f"{where}: its digest does not match its content",
                remedy="rebuild the artifacts: the file was edited or damaged",
            )
        if not canonical:
            raise ManifestError(
                f"{where}: not in canonical form",
                remedy="rebuild the artifacts: the file was edited or reformatted",
            )
        manifest.__dict__["digest"] = digest
        return manifest

    @functools.cached_property
    def digest(self) -> str:
        """SHA-256 of the canonical file's bytes above the digest itself."""
        return sealed(encode(self))[1]

    def to_bytes(self) -> bytes:
        """The file's bytes."""
        return sealed(encode(self))[0]

    def declaration(self, kernel: str) -> Declaration | None:
        """The declaration of a kernel, if it is in this directory."""
        return next((item for item in self.kernels if item.name == kernel), None)

    def rules_for(self, kernel: str, arch: str) -> tuple[Rule, ...]:
        """The rules of one kernel and architecture, in order."""
        return tuple(rule for rule in self.rules if (rule.kernel, rule.arch) == (kernel, arch))

    def payloads(self) -> Iterator[tuple[Binary, Payload]]:
        """Each file with the binary that it belongs to; equal files come more than once."""
        for binary in self.binaries:
            yield binary, binary.cubin
            yield binary, binary.ptx


def binary_order(binary: Binary) -> tuple[Any, ...]:
    """Sorts the binaries of a manifest: by kernel, arch, variant."""
    arch = Arch.parse(binary.arch)
    return binary.kernel, arch, sort_key(binary.variant)


def _in_order(binaries: Sequence[Binary]) -> bool:
    # Like `binary_order`, unless an integer meets a text: then this cannot be compared.
    places = [(b.kernel, Arch.parse(b.arch), tuple(b.variant.values())) for b in binaries]
    with contextlib.suppress(TypeError):
        return all(map(operator.lt, places, places[1:]))
    places = [binary_order(binary) for binary in binaries]
    return all(map(operator.lt, places, places[1:]))


def sealed(content: Mapping[str, Any]) -> tuple[bytes, str]:
    """The file for this content, and the digest in it: of all the bytes above its line.

    JSON without spaces, but with line feeds that help people to compare two files: around each key,
    and between the objects of a list.
    """
    return _with_digest(_above(content))


def _above(content: Mapping[str, Any]) -> bytes:
    parts: list[str] = []
    for key, value in content.items():
        text = canonical_text(value)
        if text.startswith("[{"):
            text = "[\n" + text[1:-1].replace("},{", "},\n{") + "\n]"
        parts.append(f'"{key}":{text},\n')
    return ("{\n" + "".join(parts)).encode("ascii")


def _with_digest(above: bytes) -> tuple[bytes, str]:
    digest = hashlib.sha256(above).hexdigest()
    return above + _digest_line(digest), digest


def _digest_line(digest: str) -> bytes:
    return f'"digest":"{digest}"\n}}\n'.encode("ascii")


def _known_above(content: Mapping[str, Any], data: bytes) -> int | None:
    """How far `_above` of the content that was read from `data` goes in it: None where unsure.

    Most of the time to check a manifest would go into writing its long lists again.
    """
    long = ("rules", "binaries")
    start = _above({key: value for key, value in content.items() if key not in long})
    if not data.startswith(start):
        return None
    at = len(start)
    for key in long:
        head, foot = f'"{key}":[\n'.encode(), b"\n],\n"
        end = data.find(foot, at)
        if end < 0 or not data.startswith(head, at):
            return None
        if not _is_plain(data, at + len(head), end, content[key]):
            return None
        at = end + len(foot)
    return at


# In JSON without these there is one way to write a text and one to write an integer.
_AMBIGUOUS = (b"\\", b"-", b" ", b"\t", b"\r", b"\x7f")


def _is_plain(data: bytes, start: int, end: int, items: list[dict[str, Any]]) -> bool:
    """Whether the part of `data` that these objects were read from can only be the canonical one.

    They must have been decoded: alike, and without floats. False says nothing.
    """
    if not items or not data.isascii():
        return False
    if any(data.find(mark, start, end) >= 0 for mark in (*_AMBIGUOUS, b"},{")):
        return False
    if data.count(b"\n", start, end) != data.count(b"},\n{", start, end):
        return False
    # A key that stands twice leaves one key fewer than there are colons after quotation marks.
    inner = [key for key, value in items[0].items() if type(value) is dict]
    keys = sum(map(len, items)) + sum(len(item[key]) for item in items for key in inner)
    return data.count(b'":', start, end) == keys


def _binary_problem(declaration: Declaration, binary: Binary, sm: int) -> str | None:
    declaration.check_variant(binary.variant)
    block, shared_bytes, least_sm = declaration.built_shape(binary.variant)
    if sm < least_sm:
        return "arch is below the variant's min_sm"
    if binary.block != block:
        return "block is not as declared"
    if binary.shared_bytes != shared_bytes:
        return "shared_bytes is not as declared"
    if not is_entry(binary.entry, binary.kernel, binary.variant):
        return f"entry {binary.entry!r} is not named after {binary.label}"
    if binary.cubin.isa is not None or binary.ptx.isa is None:
        return "isa misplaced"
    return None


def _require(condition: bool, where: str, problem: str) -> None:
    if not condition:
        raise _contradiction(f"{where}: {problem}")


def _contradiction(problem: str) -> ManifestError:
    return ManifestError(f"{FILE_NAME}: {problem}", remedy="rebuild the artifacts")


__all__ = [
    "FILE_NAME",
    "OBJECTS",
    "SCHEMA",
    "SIGNATURE",
    "Binary",
    "ChoiceValue",
    "Manifest",
    "Payload",
    "Rule",
    "Selection",
    "Source",
    "binary_order",
]
