"""A part of a build: what one of several machines compiled, to be merged with the other parts.

    DIRECTORY/shard.json          the index
    DIRECTORY/objects/<sha256>.*  as in an artifact directory

It is no artifact directory, and no loader takes it: the rules for choosing a variant hold only for
the whole.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, TypeVar

from .errors import ArtifactsNotFound, ManifestError, SonataError
from .manifest import OBJECTS, SCHEMA, Manifest, Sha256, binary_order, sealed
from .rules import Rule
from .schema import Range, decode, encode, parse_json
from .store import SHARD_FILE, publish_index, read_index, read_object

MAX_SHARDS = 10_000
T = TypeVar("T")
_REMEDY = "build this shard again with the same sonata-aot as the others"


@dataclass(frozen=True)
class Shard:
    """Part `index` of `count`, the first being 1.

    `keys` are the cache keys of the whole build, in the order of its plan: part i has every key
    whose position is i - 1 modulo the count. `rules` are those of the whole. `part` is the whole
    build's manifest, without rules and with only this part's binaries.
    """

    schema: int
    index: Annotated[int, Range(1, MAX_SHARDS)]
    count: Annotated[int, Range(1, MAX_SHARDS)]
    keys: tuple[Sha256, ...]
    rules: tuple[Rule, ...]
    part: Manifest

    def __post_init__(self) -> None:
        """Check that the parts agree with one another.

        Raises:
            ManifestError: the first contradiction.
        """
        problem = None
        if self.index > self.count:
            problem = f"shard {self.index} of {self.count}"
        elif len(set(self.keys)) != len(self.keys):
            problem = "a key stands twice"
        elif {binary.key for binary in self.part.binaries} != set(share(self.keys, *self.place)):
            problem = "its binaries are not those of its keys"
        elif self.part.rules:
            problem = "a part with rules"
        if problem is not None:
            raise ManifestError(f"{SHARD_FILE}: {problem}", remedy=_REMEDY)

    @property
    def place(self) -> tuple[int, int]:
        """Index and count."""
        return self.index, self.count

    def to_bytes(self) -> bytes:
        """The file's bytes."""
        return sealed(encode(self))[0]

    @classmethod
    def from_bytes(cls, data: bytes, where: str = SHARD_FILE) -> "Shard":
        """Read the file's bytes, as strictly as a manifest's.

        Raises:
            ManifestError: bad JSON, another schema, a field that is wrong, or bytes that differ
                from the canonical file for this content.
        """
        content = parse_json(data, where)
        if not isinstance(content, dict) or content.get("schema") != SCHEMA:
            raise ManifestError(f"{where}: not a shard of schema {SCHEMA}", remedy=_REMEDY)
        content.pop("digest", None)
        try:
            shard = decode(cls, content, where)
        except ManifestError:
            raise
        except SonataError as error:
            raise ManifestError(f"{where}: {error.what}", remedy=error.remedy) from None
        if shard.to_bytes() != data:
            raise ManifestError(f"{where}: edited or damaged", remedy=_REMEDY)
        return shard


def share(items: Sequence[T], index: int, count: int) -> Sequence[T]:
    """The part `index` of `count`: neighbours, which take as long as each other, go apart."""
    return items[index - 1 :: count]


def publish_shard(directory: Path, shard: Shard, objects: Mapping[str, bytes]) -> int:
    """As `publish_index`."""
    return publish_index(directory, SHARD_FILE, shard.to_bytes(), objects)


def open_shard(directory: Path) -> tuple[Shard, dict[str, bytes]]:
    """A shard and its objects, verified, by file name.

    Raises:
        ArtifactsNotFound: there is no shard.
        ManifestError, IntegrityError: its index or an object is damaged.
        UntrustedPath: somebody else can write there.
    """
    data = read_index(directory, SHARD_FILE)
    if data is None:
        raise ArtifactsNotFound(
            f"no shard in {directory}", remedy="build one with `sonata-aot build --shard I/N`"
        )
    shard = Shard.from_bytes(data, str(directory / SHARD_FILE))
    payloads = [payload for _, payload in shard.part.payloads()]
    return shard, {
        payload.file_name: read_object(directory / OBJECTS / payload.file_name, payload)
        for payload in payloads
    }


def whole(shards: Mapping[Path, Shard]) -> Manifest:
    """The manifest of the whole build, from the shards in these directories.

    Raises:
        ManifestError: they are not the parts of one build, or some are missing.
    """
    places = list(shards)
    (first_place, first), *others = shards.items()
    for place, shard in others:
        differing = _difference(first, shard)
        if differing is not None:
            raise ManifestError(
                f"{place} and {first_place} are parts of different builds: not the same "
                f"{differing}",
                remedy="build all shards from one commit, with the same options and compiler",
            )
    by_index: dict[int, Path] = {}
    for place in places:
        index = shards[place].index
        if index in by_index:
            raise ManifestError(
                f"{place} and {by_index[index]} are both shard {index}/{first.count}",
                remedy="name each shard once",
            )
        by_index[index] = place
    missing = [str(i) for i in range(1, first.count + 1) if i not in by_index]
    if missing:
        shown = ", ".join(missing[:20]) + (", ..." if len(missing) > 20 else "")
        raise ManifestError(
            f"shards missing of {first.count}: {shown}", remedy="name the directories of all"
        )
    binaries = [binary for shard in shards.values() for binary in shard.part.binaries]
    return dataclasses.replace(
        first.part, rules=first.rules, binaries=tuple(sorted(binaries, key=binary_order))
    )


def _difference(one: Shard, other: Shard) -> str | None:
    """What differs that must not; None if nothing does."""
    if one.count != other.count:
        return "number of shards"
    for name in ("tool", "compiler", "source", "selection", "kernels"):
        if getattr(one.part, name) != getattr(other.part, name):
            return {"source": "sources or commit", "kernels": "declarations"}.get(name, name)
    return next((n for n in ("keys", "rules") if getattr(one, n) != getattr(other, n)), None)
