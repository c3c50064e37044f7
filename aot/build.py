"""One build from the plan to a published artifact directory."""

from __future__ import annotations

import contextlib
import functools
import logging
import os
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..artifacts import __version__, environment
from ..artifacts.arch import Arch, cubin_min_cuda, dotted, normalise, ptx_min_cuda
from ..artifacts.cubin import read_cubin
from ..artifacts.declaration import entry_prefix, is_entry
from ..artifacts.errors import BuildError, SonataError, StoreError
from ..artifacts.files import explained
from ..artifacts.manifest import (
    FILE_NAME,
    MAX_OBJECT_BYTES,
    SCHEMA,
    Binary,
    Manifest,
    Payload,
    Selection,
    Source,
    binary_order,
)
from ..artifacts.places import default_artifacts
from ..artifacts.rules import Rule
from ..artifacts.schema import digest
from ..artifacts.shard import SHARD_FILE, Shard, publish_shard, share
from ..artifacts.store import open_artifacts, prepare, publish, sha256
from ..artifacts.verify import check_cubin, check_ptx, compiler_cuda_major, ptx_isa
from ..kernels import KernelSpec
from ..kernels.tables import rules
from .budget import over_budget
from .cache import Cache, Entry
from .plan import Job, jobs, left_out
from .pool import Compiled, CompileFailed, run_tasks
from .provenance import git_state
from .sources import source_digest, source_files
from .toolchain import compiler_versions

if TYPE_CHECKING:
    from .needed import Needed

log = logging.getLogger(__name__)

# Called with the number of jobs done, how many there are, and what has just been done.
Progress = Callable[[int, int, str], None]


@dataclass
class BuildResult:
    """What a build did.

    `manifest` holds what was built: for a shard its part, without rules. `written` counts files
    that changed in the directory; `removed` names the binaries that it held before and holds no
    longer; `left_out` what its declaration does not allow for an architecture, with the reason.
    """

    directory: Path
    manifest: Manifest
    compiled: set[str] = field(default_factory=set)
    written: int = 0
    removed: tuple[str, ...] = ()
    left_out: tuple[tuple[Job, str], ...] = ()


def build(
    specs: Sequence[KernelSpec],
    archs: Sequence[Arch],
    *,
    everything: bool = False,
    only: Needed | None = None,
    shard: tuple[int, int] | None = None,
    out: Path | None = None,
    workers: int | None = None,
    timeout: float = 300.0,
    keep_going: bool = True,
    progress: Progress = lambda done, total, what: None,
) -> BuildResult:
    """Compile what the cache lacks and publish the whole selection.

    With `everything` that is every declared variant, with `only` what that has, else what the
    tables of rules name. The directory (`out`, SONATA_AOT_DIR or the cache's default) afterwards
    holds exactly the selection; or, with `shard` (index, count), that part of it, for `merge`.
    `timeout` is in seconds, for one job. Without `keep_going` the first kernel that fails ends the
    build.

    Raises:
        MissingDependency: the compiler is not installed.
        BuildError: a kernel did not compile, or broke its declaration or budget, or there is
            nothing to build for an architecture. What did compile stays in the cache.
        StoreError, UntrustedPath: the directory or the cache cannot be used.
    """
    specs, archs = sorted(specs, key=lambda spec: spec.name), normalise(archs)
    directory = out or default_artifacts()
    compiler_versions()
    _worker_count(workers, 1)  # a wrong MAX_JOBS is an error also where nothing is compiled
    cache = Cache()
    _require_apart(directory, cache)
    prepare(directory, SHARD_FILE if shard else FILE_NAME)  # before the work and not after it
    plan = jobs(specs, archs, everything=everything, only=only)
    without = tuple(left_out(specs, archs, everything=everything, only=only))
    require_some(plan, archs)
    mine = [*share(plan, *shard)] if shard else plan
    cache.require_trusted()
    log.info("%d binaries planned, %d of them here; cache %s", len(plan), len(mine), cache.root)
    with cache.using([job.key for job in mine]):
        entries, compiled = _entries(mine, cache, workers, timeout, keep_going, progress)
    binaries = [entries[job.key].binary for job in mine]
    rules_of = rules if only is None else only.rules
    every_rule = tuple(rule for spec in specs for arch in archs for rule in rules_of(spec, arch))
    objects = {name: data for entry in entries.values() for name, data in entry.objects.items()}
    objects = dict(sorted(objects.items()))
    if shard:
        keys = tuple(job.key for job in plan)
        # Rules name variants that other parts have.
        part = _manifest(specs, archs, (), binaries)
        whole = Shard(SCHEMA, *shard, keys=keys, rules=every_rule, part=part)
        written = publish_shard(directory, whole, objects)
        return BuildResult(directory, part, compiled, written, left_out=without)
    manifest = _manifest(specs, archs, every_rule, binaries)
    before = labels(directory)
    written = publish(directory, manifest, objects)
    removed = before - {binary.label for binary in manifest.binaries}
    return BuildResult(directory, manifest, compiled, written, tuple(sorted(removed)), without)


def _require_apart(directory: Path, cache: Cache) -> None:
    """Refuse to publish where the cache has its own files, or around it.

    Raises:
        StoreError: naming both.
    """
    out, root = (Path(os.path.realpath(path)) for path in (directory, cache.root))
    parts = (root / path.name for path in (cache.compiled, cache.in_use, cache.logs, cache.scratch))
    if root.is_relative_to(out) or any(out.is_relative_to(part) for part in parts):
        raise StoreError(
            f"cannot publish to {directory}: the compile cache {cache.root} lies there",
            remedy="choose another place with --out or SONATA_AOT_CACHE_DIR",
        )


def require_some(plan: Sequence[Job], archs: Sequence[Arch]) -> None:
    """Refuse an architecture that nothing is built for.

    Raises:
        BuildError: naming it.
    """
    for arch in archs:
        if not any(job.arch == arch for job in plan):
            raise BuildError(
                f"no variant of these kernels is for {arch}",
                remedy="name other kernels, or leave this architecture out",
            )


def _entries(
    plan: Sequence[Job],
    cache: Cache,
    workers: int | None,
    timeout: float,
    keep_going: bool,
    progress: Progress,
) -> tuple[dict[str, Entry], set[str]]:
    """The entry of every job by key, and the keys of those that were compiled."""
    entries = {job.key: entry for job in plan if (entry := _cached(cache, job)) is not None}
    if entries:
        progress(len(entries), len(plan), f"{len(entries)} cached")
    missing = [job for job in plan if job.key not in entries]
    compiled: set[str] = set()
    if not missing:
        return entries, compiled
    waits = functools.partial(progress, len(entries), len(plan), "waiting for another build")
    with cache.building(waits) as scratch:
        # Another build may have filled the cache while this one waited for its turn.
        for job in missing:
            if (entry := _cached(cache, job)) is not None:
                entries[job.key] = entry
        missing = [job for job in missing if job.key not in entries]
        count = _worker_count(workers, len(missing))
        done = len(plan) - len(missing)
        failures: list[str] = []
        log.info("%d to compile, %d workers", len(missing), count)
        compiling = _compile(missing, cache, count, timeout, scratch)
        with contextlib.closing(compiling):  # the workers end before their folders go
            for job, outcome in compiling:
                if isinstance(outcome, str):
                    failures.append(outcome)
                    progress(done, len(plan), f"failed: {job.label}")
                    if not keep_going:
                        break
                    continue
                entry, took = outcome
                cache.add(entry, job.record())
                entries[entry.binary.key] = entry
                compiled.add(entry.binary.key)
                done += 1
                progress(done, len(plan), f"compiled in {took:.1f} s: {entry.binary.label}")
    if failures:
        raise BuildError("\n".join(failures), remedy="mend what is named above and build again")
    return entries, compiled


def labels(directory: Path) -> set[str]:
    """What a directory holds now; nothing if it holds no good set."""
    try:
        return {binary.label for binary in open_artifacts(directory).manifest.binaries}
    except SonataError:
        return set()


def _cached(cache: Cache, job: Job) -> Entry | None:
    entry = cache.find(job.key)
    wanted = (job.spec.name, job.variant, job.arch.name)
    binary = entry.binary if entry else None
    return entry if binary and (binary.kernel, binary.variant, binary.arch) == wanted else None


def _worker_count(requested: int | None, tasks: int) -> int:
    most = requested or environment.MAX_JOBS.get() or len(os.sched_getaffinity(0))
    return max(1, min(most, tasks))


def _task(job: Job) -> dict[str, Any]:
    declaration, (module, _, function) = job.spec.declaration, job.spec.device.partition(":")
    return {
        "module": module,
        "function": function,
        "arch": job.arch.compiler_name,
        "prefix": entry_prefix(job.spec.name, job.variant),
        "parameters": [
            {
                "name": parameter.name,
                "kind": parameter.kind,
                "align": parameter.align,
                "dtype": declaration.element(parameter, job.variant)
                if parameter.kind == "pointer"
                else None,
            }
            for parameter in declaration.parameters
        ],
        "constants": job.variant,
        "elements": [p.element for p in declaration.parameters if p.element in job.variant],
        "block": declaration.block_shape(job.variant),
        "shared_bytes": declaration.shared_memory(job.variant),
        "resident": job.spec.resident_blocks(job.variant),
        "stem": job.key,
    }


def _compile(
    missing: Sequence[Job], cache: Cache, workers: int, timeout: float, scratch: Path
) -> Generator[tuple[Job, tuple[Entry, float] | str], None, None]:
    """Yield of each job its entry and its seconds, or what is wrong with it."""
    tasks = [_task(job) for job in missing]
    with (
        explained(scratch, "compile in"),
        contextlib.closing(run_tasks(tasks, workers, timeout, scratch)) as outcomes,
    ):
        for outcome in outcomes:
            job = missing[outcome.index]
            match outcome:
                case CompileFailed(error=error, log=output, source=source):
                    kept = cache.keep_log(job.key, output)
                    shown = f"\n    {source}" if source else ""
                    yield job, f"{job.label}: {error} (whole output: {kept}){shown}"
                case Compiled(cubin=cubin, ptx=ptx, seconds=seconds):
                    try:
                        _require_unchanged(job)
                        yield job, (measure(job, cubin, ptx), seconds)
                    except SonataError as error:
                        yield job, f"{job.label}: {error.what}"
                    finally:
                        cubin.unlink(missing_ok=True)
                        ptx.unlink(missing_ok=True)


def _require_unchanged(job: Job) -> None:
    # Else the cache would have code of one source under the key of another, for good.
    if digest(job.inputs(compiler_versions())) != job.key:
        raise BuildError("its source changed while it was compiled", remedy="build again")


def measure(job: Job, cubin_file: Path, ptx_file: Path) -> Entry:
    """Read off a compiled job what the manifest records, and check it.

    Raises:
        BuildError: the machine code contradicts the declaration, is for another architecture, or
            breaks the budget.
        IntegrityError: it is no machine code.
    """
    cubin, ptx = cubin_file.read_bytes(), ptx_file.read_bytes()
    code = read_cubin(cubin)
    declaration = job.spec.declaration
    if len(code.kernels) != 1 or max(len(cubin), len(ptx)) > MAX_OBJECT_BYTES:
        raise _broken(f"{len(code.kernels)} entries, {len(cubin)} bytes")
    kernel = code.kernels[0]
    if not is_entry(kernel.entry, job.spec.name, job.variant):
        raise _broken(f"the compiled entry {kernel.entry!r} is another variant's")
    isa = ptx_isa(ptx)
    if isa is None:
        raise _broken("the PTX has no .version line")
    binary = Binary(
        kernel=job.spec.name,
        variant=job.variant,
        arch=job.arch.name,
        entry=kernel.entry,
        block=declaration.block_shape(job.variant),
        shared_bytes=declaration.shared_memory(job.variant),
        static_shared_bytes=kernel.static_shared_bytes,
        registers=kernel.registers,
        stack_bytes=kernel.stack_bytes,
        spills=code.spills,
        cubin=Payload(
            sha256(cubin),
            len(cubin),
            dotted(cubin_min_cuda(job.arch, compiler_cuda_major(code))),
            None,
        ),
        ptx=Payload(sha256(ptx), len(ptx), dotted(ptx_min_cuda(isa)), dotted(isa)),
        key=job.key,
    )
    problems = [
        *check_cubin(binary, declaration, cubin),
        *check_ptx(binary, ptx),
        *over_budget(binary, declaration.budget),
    ]
    if problems:
        raise _broken("; ".join(problems))
    return Entry(binary, cubin, ptx)


def _broken(problem: str) -> BuildError:
    return BuildError(problem, remedy="correct the kernel or its declaration")


def _manifest(
    specs: Sequence[KernelSpec],
    archs: Sequence[Arch],
    rules: tuple[Rule, ...],
    binaries: Sequence[Binary],
) -> Manifest:
    modules = [spec.module for spec in specs]
    files = {path for module in modules for path in source_files(module).values()}
    commit, dirty = git_state(files)
    return Manifest(
        schema=SCHEMA,
        tool=__version__,
        compiler=compiler_versions(),
        source=Source(
            digest=digest({spec.name: source_digest(spec.module) for spec in specs}),
            commit=commit,
            dirty=dirty,
        ),
        selection=Selection(
            archs=tuple(arch.name for arch in archs), kernels=tuple(spec.name for spec in specs)
        ),
        kernels=tuple(spec.declaration for spec in specs),
        rules=rules,
        binaries=tuple(sorted(binaries, key=binary_order)),
    )
