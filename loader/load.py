"""`load`: find artifacts, verify them, choose for each device, and hand the bytes to the driver."""

from __future__ import annotations

import contextlib
import gc
import time
from collections.abc import Iterable, Iterator
from os import PathLike, fspath, register_at_fork
from pathlib import Path
from typing import TYPE_CHECKING

from ..artifacts.arch import Arch, cuda_version
from ..artifacts.choose import Choice, build_command, choose, could_run
from ..artifacts.errors import (
    ArgumentError,
    ArtifactsNotFound,
    DriverUnavailable,
    IntegrityError,
    SonataError,
    VariantMissing,
)
from ..artifacts.places import Place, search
from ..artifacts.record import record
from ..artifacts.store import ArtifactSet, open_artifacts
from ..artifacts.trust import untrusted_allowed
from .default import offer_default
from .fetch import fetch
from .kernels import Kernels
from .library import Loaded, Table
from .log import configure, logger
from .runtime import device_indices, nvtx_ranges, refuse_free_threading, require_torch
from .strict import refuse_ptx, require_kernels

if TYPE_CHECKING:
    import torch

# A directory that changes more often than this while it is read is not being built but fought over.
_ATTEMPTS = 3


@record
class Device:
    """A device that kernels are loaded on."""

    index: int
    name: str
    capability: tuple[int, int]
    multiprocessors: int


def load(
    path: str | PathLike[str] | None = None,
    arch: str | None = None,
    allow_ptx: bool = False,
    *,
    devices: Iterable[int | str | torch.device] | None = None,
    preload: Iterable[str] = (),
    nvtx: bool = False,
    strict: bool = False,
    allow_untrusted: bool = False,
) -> Kernels:
    """Load compiled kernels.

    Artifacts are looked for at `path`; at SONATA_AOT_DIR; inside the installed wheel; in the user's
    cache. A place that was named, by `path` or the variable, must be right: nothing else is then
    tried.

    Args:
        path: An artifact directory.
        arch: Take only this architecture's binaries, such as `sm86`.
        allow_ptx: Let the driver compile PTX where no machine code fits. Each kernel is then
            compiled when it is first used, or taken from the driver's own cache.
        devices: CUDA devices to load on; torch's current one if None.
        preload: Names of kernels whose PTX is compiled now and not at first use.
        nvtx: Put an NVTX range, which profilers show, around each call of the GEMV and the scan.
        strict: Promise that nothing is compiled or loaded later: take machine code only, and fail
            unless the GEMV and the scan have their kernels on every device.
        allow_untrusted: Take artifacts that another user owns or can write, which are refused
            otherwise; `info()` and a warning name each place that would have been.

    Raises:
        ArgumentError: an argument is of the wrong type, or names nothing.
        UsageError: `arch` is no architecture.
        MissingDependency: torch is not installed, or has no NVTX where that is asked for; or this
            is a free-threaded Python.
        DriverUnavailable: no driver, or no such device.
        ForkedProcess: in a child of a process that has used the driver.
        ArtifactsNotFound: no place holds artifacts that can be used; says why for each.
        ArtifactError: the named place's manifest or a file in it is wrong.
        VariantMissing: what was found has nothing for a device, or, if strict, lacks a kernel.
        DriverError: the driver refused a binary.
    """
    began = time.perf_counter()
    configure()
    refuse_free_threading()
    require_torch()
    ranges = nvtx_ranges() if nvtx else None
    if strict:
        refuse_ptx(allow_ptx)
    names, place = _names(preload), _path(path)
    arch = _arch(arch)
    chosen_devices, cuda = _devices(device_indices(devices))
    wanted = _Search(place, chosen_devices, cuda, arch, allow_ptx)
    with contextlib.ExitStack() as stack:
        stack.enter_context(_no_collection())
        untrusted = stack.enter_context(untrusted_allowed()) if allow_untrusted else []
        artifacts, choices, binaries = _open(wanted, names)
    for fault in untrusted:
        logger.warning("loaded all the same, as allow_untrusted says: %s", fault)
    tables = {declaration.name: Table(declaration) for declaration in artifacts.manifest.kernels}
    for device, choice in choices.items():
        for name, table in tables.items():
            table.add_rules(device.index, artifacts.manifest.rules_for(name, choice.arch))
    for device, loaded in binaries:
        tables[loaded.binary.kernel].add(device, loaded)
    if strict:
        require_kernels(tables, {device.index: choice for device, choice in choices.items()})
    kernels = Kernels(
        artifacts,
        {device.index: choice for device, choice in choices.items()},
        tables,
        {device.index: device.multiprocessors for device in choices},
        ranges,
        tuple(untrusted),
    )
    kernels.load_ms = 1e3 * (time.perf_counter() - began)
    for device, choice in choices.items():
        logger.info(
            "device %d (%s): %s %s from %s, ready in %.1f ms",
            *(device.index, device.name, choice.arch, choice.form, artifacts.directory),
            kernels.load_ms,
        )
    offer_default(kernels)
    return kernels


# Loads under way that will turn the collection of cycles on again.
_without_collection: set[object] = set()


def _collect_in_child() -> None:
    """In the child of a fork loads under way do not go on, unless one of them has forked."""
    if _without_collection:
        _without_collection.clear()
        gc.enable()


register_at_fork(after_in_child=_collect_in_child)


@contextlib.contextmanager
def _no_collection() -> Iterator[None]:
    """Leave out the collection of cycles meanwhile, if it is on.

    What is read is thousands of objects, all of which stay: to look for garbage among them, and
    among those of torch, takes a fifth of the time to load.
    """
    if not gc.isenabled():
        yield
        return
    this = object()
    try:
        _without_collection.add(this)
        gc.disable()
        yield
    finally:
        gc.enable()
        _without_collection.discard(this)


def _names(preload: Iterable[str]) -> frozenset[str]:
    names = list(preload) if isinstance(preload, Iterable) else [preload]
    if isinstance(preload, str) or not all(isinstance(name, str) for name in names):
        raise ArgumentError(
            f"preload is {preload!r}", remedy="pass a list of kernel names, such as ['gemv']"
        )
    return frozenset(names)


def _path(path: str | PathLike[str] | None) -> Path | None:
    if path is None:
        return None
    if (
        not isinstance(path, str | PathLike)
        or not isinstance(text := fspath(path), str)
        or not text
    ):
        raise ArgumentError(f"path is {path!r}", remedy="pass the path of a directory")
    return Path(text)


def _arch(arch: str | None) -> str | None:
    if arch is None:
        return None
    if not isinstance(arch, str):
        raise ArgumentError(f"arch is {arch!r}", remedy="pass text such as 'sm86'")
    return Arch.parse(arch).name


def _devices(indices: tuple[int, ...]) -> tuple[list[Device], tuple[int, int]]:
    """The devices of these numbers, and the driver's CUDA version."""
    from . import _native

    present = _native.devices()  # says what is wrong, if there is no usable driver
    version = _native.driver_state()["version"] or 0
    for index in indices:
        if index >= len(present):
            raise DriverUnavailable(
                f"no device {index}: this process sees {len(present)}",
                remedy="pass another number in devices=, or check CUDA_VISIBLE_DEVICES",
            )
    chosen = [
        Device(
            index,
            present[index]["name"],
            (present[index]["major"], present[index]["minor"]),
            present[index]["multiprocessors"],
        )
        for index in indices
    ]
    return chosen, cuda_version(version)


@record
class _Search:
    """What `load` was asked for, checked."""

    path: Path | None
    devices: list[Device]
    cuda: tuple[int, int]
    arch: str | None
    allow_ptx: bool

    def could_take(self, arch: str) -> bool:
        """Whether a device may get binaries of an architecture."""
        return any(
            could_run(arch, device.capability, wanted=self.arch, allow_ptx=self.allow_ptx)
            for device in self.devices
        )


def _open(
    wanted: _Search, preload: frozenset[str]
) -> tuple[ArtifactSet, dict[Device, Choice], list[tuple[int, Loaded]]]:
    """Find artifacts and load what each device gets, all from one manifest."""
    attempt = 1
    while True:
        artifacts, choices = _find(wanted)
        known = artifacts.manifest.selection.kernels
        for name in preload:
            if name not in known:
                raise ArgumentError(
                    f"preload: no kernel {name!r} in {artifacts.directory}",
                    remedy="use one of " + " ".join(known),
                )
        try:
            by_index = {device.index: choice for device, choice in choices.items()}
            return artifacts, choices, fetch(artifacts, by_index, preload)
        except IntegrityError:
            # A build may have published another set since the manifest was read.
            current = open_artifacts(artifacts.directory, wanted.could_take).manifest
            if attempt == _ATTEMPTS or current.digest == artifacts.manifest.digest:
                raise
        attempt += 1


def _find(wanted: _Search) -> tuple[ArtifactSet, dict[Device, Choice]]:
    """The first place with artifacts for every device, and what each device gets from it."""
    rejected: list[str] = []
    unsuitable: VariantMissing | None = None
    for place in search(wanted.path):
        try:
            artifacts = open_artifacts(place.path, wanted.could_take)
            choices = {
                device: choose(
                    artifacts.manifest,
                    device.capability,
                    driver_cuda=wanted.cuda,
                    arch=wanted.arch,
                    allow_ptx=wanted.allow_ptx,
                )
                for device in wanted.devices
            }
        except SonataError as error:
            if place.named:
                raise
            if isinstance(error, VariantMissing):
                unsuitable = error
            _pass_over(place, error, rejected)
            continue
        return artifacts, choices
    if unsuitable is not None:
        raise unsuitable
    raise ArtifactsNotFound(
        "no usable artifacts: " + "; ".join(rejected),
        remedy=f"{build_command([], wanted.devices[0].capability)}, or name a directory",
    )


def _pass_over(place: Place, error: SonataError, rejected: list[str]) -> None:
    rejected.append(f"{place.origin}: {error.what}")
    # Nothing there is ordinary; something wrong there is worth a line.
    log = logger.debug if isinstance(error, ArtifactsNotFound) else logger.warning
    log("passed over %s (%s): %s", place.origin, place.path, error)
