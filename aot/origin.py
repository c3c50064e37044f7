"""Was an artifact directory built from the kernels that are installed here?"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from ..artifacts.arch import Arch
from ..artifacts.errors import SonataError
from ..artifacts.manifest import Manifest
from ..artifacts.schema import digest
from ..artifacts.store import open_artifacts
from ..artifacts.verify import Failed, Outcome, Passed
from ..kernels import KernelSpec
from .plan import Job, known_kernels
from .sources import source_digest

SUBJECT = "sources"
_REMEDY = "rebuild with `sonata-aot build`, or check out the sources that it was built from"


def check_origin(directory: Path, modules: Iterable[str] = ()) -> list[Outcome]:
    """Compare what a directory's manifest says of its origin with this machine's kernels.

    Declarations, the digest of the device sources, and every binary's cache key, with the compiler
    that the manifest names: none need be installed. Nothing is said of a directory that cannot be
    read, as `verify` says it. `modules` are those that it was built from, as for a build.

    Raises:
        UsageError, BuildError: as for `known_kernels`.
    """
    specs = known_kernels(modules)
    try:
        manifest = open_artifacts(directory).manifest
    except SonataError:
        return []
    problems = [Failed(SUBJECT, problem, _REMEDY) for problem in _problems(manifest, specs)]
    return [*problems] or [Passed(SUBJECT)]


def _problems(manifest: Manifest, specs: Mapping[str, KernelSpec]) -> Iterator[str]:
    unknown = [item.name for item in manifest.kernels if item.name not in specs]
    if unknown:
        yield f"kernels that are not installed here: {', '.join(unknown)}"
        return
    for item in manifest.kernels:
        if specs[item.name].declaration != item:
            yield f"another declaration of {item.name}"
    modules = {item.name: specs[item.name].module for item in manifest.kernels}
    found = digest({name: source_digest(module) for name, module in modules.items()})
    if found != manifest.source.digest:
        yield f"device sources have the digest {found[:12]}, not {manifest.source.digest[:12]}"
    for binary in manifest.binaries:
        job = Job(specs[binary.kernel], binary.variant, Arch.parse(binary.arch))
        if digest(job.inputs(manifest.compiler)) != binary.key:
            yield f"{binary.label} has another cache key"
