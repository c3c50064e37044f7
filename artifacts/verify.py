"""Checks every byte of an artifact directory, with no GPU.

The outcome of each check is one of a closed set of small dataclasses; the command line only prints
them.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from .arch import SHARED_PER_BLOCK, Arch, cubin_min_cuda, dotted, ptx_min_cuda
from .declaration import Declaration
from .errors import SonataError
from .files import locked
from .manifest import FILE_NAME, OBJECTS, SIGNATURE, Binary
from .pack import PACK
from .store import ArtifactSet, open_artifacts

if TYPE_CHECKING:
    from .cubin import Cubin, KernelCode

_PTX_VERSION = re.compile(rb"^\.version (\d)\.(\d)$", re.M)
# What code does that was written for clusters of several blocks, which no launch here makes.
_PTX_CLUSTER = re.compile(
    rb"\bbarrier\.cluster|\bmapa\.|%cluster_|%is_explicit_cluster|%nclusterid|%clusterid"
    rb"|^\.reqnctapercluster|^\.explicitcluster|\.multicast::cluster",
    re.M,
)
_PTX_TARGET = re.compile(rb"^\.target (sm_\d+[af]?)", re.M)


@dataclass(frozen=True)
class Passed:
    """Every check of one binary passed."""

    subject: str


@dataclass(frozen=True)
class Failed:
    """A check failed: `problem` says what is wrong, `remedy` what to do."""

    subject: str
    problem: str
    remedy: str


@dataclass(frozen=True)
class Unexpected:
    """A file that the manifest does not name."""

    subject: str


Outcome = Passed | Failed | Unexpected


def verify(directory: Path) -> list[Outcome]:
    """Every outcome for a directory, the manifest's first.

    Checked: the manifest's schema, digest and consistency; size and SHA-256 of each file; of each
    cubin the architecture, entry, parameter table, block shape, registers, stack, spills and shared
    memory against the manifest, undefined symbols, and that the shared memory fits; of each PTX its
    target, ISA version and entry; least driver versions; files that nothing names.
    """
    with contextlib.ExitStack() as stack:
        with contextlib.suppress(OSError):  # no lock where there is no directory, or no support
            stack.enter_context(locked(directory, shared=True))
        return _verify(directory)


def _verify(directory: Path) -> list[Outcome]:
    try:
        artifacts = open_artifacts(directory)
    except SonataError as error:
        return [Failed(str(directory / FILE_NAME), error.what, error.remedy)]
    outcomes: list[Outcome] = [Passed(FILE_NAME)]
    for binary in artifacts.manifest.binaries:
        problems = list(_problems(artifacts, binary))
        outcomes += problems or [Passed(binary.label)]
    outcomes += _strays(artifacts)
    return outcomes


def check_cubin(binary: Binary, declaration: Declaration, data: bytes) -> list[str]:
    """What is wrong with a cubin, compared with its record and declaration; empty if nothing.

    Raises:
        IntegrityError: the bytes are no cubin at all.
    """
    from .cubin import read_cubin  # the loader imports this module, and reads no machine code

    cubin = read_cubin(data)
    arch = Arch.parse(binary.arch)
    problems = []
    if not cubin.is_for(arch):
        found = f"sm{cubin.sm}{'a' if cubin.specific else ''}"
        problems.append(f"machine code is for {found}, not {arch}")
    if cubin.undefined:
        problems.append(f"undefined symbols: {', '.join(cubin.undefined)}")
    code = {kernel.entry: kernel for kernel in cubin.kernels}.get(binary.entry)
    if code is None:
        found = ", ".join(kernel.entry for kernel in cubin.kernels) or "none"
        return [*problems, f"no entry {binary.entry!r} (entries: {found})"]
    problems += _differences(binary, declaration, code)
    if cubin.spills != binary.spills:
        problems.append(f"spills is {cubin.spills}, not {binary.spills}")
    least = cubin_min_cuda(arch, compiler_cuda_major(cubin))
    problems += _version_problem(binary.cubin.min_cuda, least)
    static = max(binary.static_shared_bytes, arch.system_shared_bytes)
    shared = binary.shared_bytes + static
    if shared > SHARED_PER_BLOCK[arch.major, arch.minor]:
        problems.append(f"{shared} bytes of shared memory do not fit {arch}")
    return problems


def check_ptx(binary: Binary, data: bytes) -> list[str]:
    """What is wrong with PTX, compared with its record; empty if nothing."""
    problems = []
    isa, target = ptx_isa(data), _PTX_TARGET.search(data)
    if isa is None or target is None:
        return ["not PTX: no .version or .target line"]
    # PTX is text and names no length: a file cut short must be told by its end.
    whole = data.count(b"{") == data.count(b"}") and data.rstrip().endswith(b"}")
    if b"\0" in data or not whole:
        problems.append("PTX is cut short or damaged")
    if dotted(isa) != binary.ptx.isa:
        problems.append(f"PTX ISA {dotted(isa)}, not {binary.ptx.isa}")
    if target[1].decode() != Arch.parse(binary.arch).compiler_name:
        problems.append(f"PTX is for {target[1].decode()}, not {binary.arch}")
    # Dynamic shared memory leaves no size in the code; but code that uses some must be given some.
    if binary.shared_bytes == 0 and b".extern .shared" in data:
        problems.append("the code uses dynamic shared memory, and shared_bytes is 0")
    if (cluster := _PTX_CLUSTER.search(data)) is not None:
        used = cluster[0].decode()
        problems.append(f"the code is for clusters of blocks ({used}), and launches make none")
    entry = rb"^(?:\.visible )?\.entry " + re.escape(binary.entry.encode()) + rb"\("
    if re.search(entry, data, re.M) is None:
        problems.append(f"PTX lacks the entry {binary.entry!r}")
    return problems + _version_problem(binary.ptx.min_cuda, ptx_min_cuda(isa))


def ptx_isa(data: bytes) -> tuple[int, int] | None:
    """ISA version that PTX states; None if it states none."""
    match = _PTX_VERSION.search(data)
    return (int(match[1]), int(match[2])) if match else None


def compiler_cuda_major(cubin: Cubin) -> int:
    """CUDA major version of the assembler, as far as the file tells.

    Blackwell's first toolkit already wrote ELF ABI 8, so there only the architecture's own minimum
    counts.
    """
    return 13 if cubin.abi >= 8 and cubin.sm < 100 else 12


def _problems(artifacts: ArtifactSet, binary: Binary) -> Iterator[Failed]:
    declaration = artifacts.manifest.declaration(binary.kernel)
    assert declaration is not None  # a manifest does not parse without it
    for payload in (binary.cubin, binary.ptx):
        try:
            data = artifacts.read(payload)
            if payload is binary.cubin:
                problems = check_cubin(binary, declaration, data)
            else:
                problems = check_ptx(binary, data)
        except SonataError as error:
            yield Failed(binary.label, error.what, error.remedy)
            continue
        for problem in problems:
            subject = f"{binary.label} ({OBJECTS}/{payload.file_name})"
            yield Failed(subject, problem, "rebuild with `sonata-aot build`")


def _differences(binary: Binary, declaration: Declaration, code: KernelCode) -> list[str]:
    problems, declared = [], declaration.offsets
    if code.parameters != declared:
        problems.append(
            f"parameter table {list(code.parameters)} is not the declared {list(declared)}"
        )
    if code.threads is not None and code.threads != binary.block:
        problems.append(f"block {code.threads} is not the declared {binary.block}")
    for name in ("registers", "stack_bytes", "static_shared_bytes"):
        found, stated = getattr(code, name), getattr(binary, name)
        if found != stated:
            problems.append(f"{name} is {found}, not {stated}")
    return problems


def _version_problem(stated: str, least: tuple[int, int]) -> list[str]:
    text = dotted(least)
    return [] if stated == text else [f"needs a driver of CUDA {text}, not {stated}"]


def _strays(artifacts: ArtifactSet) -> list[Outcome]:
    known = {payload.file_name for _, payload in artifacts.manifest.payloads()}
    expected = {FILE_NAME, SIGNATURE, PACK, *(f"{OBJECTS}/{name}" for name in known)}
    root = str(artifacts.directory)
    outcomes: list[Outcome] = []

    def unreadable(error: OSError) -> None:
        place = os.path.relpath(error.filename or root, root)
        outcomes.append(Failed(place, f"cannot be read: {error.strerror}", "correct it"))

    for folder, folders, files in os.walk(root, onerror=unreadable):
        links = [name for name in folders if os.path.islink(os.path.join(folder, name))]
        found = (os.path.relpath(os.path.join(folder, name), root) for name in [*files, *links])
        outcomes += [Unexpected(path) for path in sorted(found) if path not in expected]
    return outcomes
