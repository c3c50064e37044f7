"""Makes one artifact directory of the shards of a build."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from ..artifacts.errors import IntegrityError
from ..artifacts.manifest import Manifest
from ..artifacts.shard import open_shard, whole
from ..artifacts.store import publish
from ..artifacts.verify import check_cubin, check_ptx
from .build import BuildResult, labels


def merge(shards: Sequence[Path], directory: Path) -> BuildResult:
    """Publish the whole that the shards in these directories are the parts of.

    Raises:
        ArtifactsNotFound: a directory holds no shard.
        ManifestError: a shard is damaged; or they are not all of one build's.
        IntegrityError: an object is damaged, or contradicts its record.
        StoreError, UntrustedPath: a directory cannot be used.
    """
    opened = {place: open_shard(place) for place in dict.fromkeys(shards)}
    manifest = whole({place: shard for place, (shard, _) in opened.items()})
    objects = {name: data for _, files in opened.values() for name, data in files.items()}
    objects = dict(sorted(objects.items()))
    _check(manifest, objects)
    before = labels(directory)
    written = publish(directory, manifest, objects)
    removed = before - {binary.label for binary in manifest.binaries}
    return BuildResult(directory, manifest, written=written, removed=tuple(sorted(removed)))


def _check(manifest: Manifest, objects: Mapping[str, bytes]) -> None:
    """Hold every object against its record and declaration, as a build does."""
    declarations = {declaration.name: declaration for declaration in manifest.kernels}
    for binary in manifest.binaries:
        cubin, ptx = objects[binary.cubin.file_name], objects[binary.ptx.file_name]
        problems = [
            *check_cubin(binary, declarations[binary.kernel], cubin),
            *check_ptx(binary, ptx),
        ]
        if problems:
            raise IntegrityError(
                f"{binary.label}: {'; '.join(problems)}", remedy="build that shard again"
            )
