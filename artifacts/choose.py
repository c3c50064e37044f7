"""Which binaries of a directory a device should run, and why not the others."""

from __future__ import annotations

from .arch import KNOWN, Arch, dotted, normalise
from .errors import VariantMissing
from .manifest import Form, Manifest
from .record import record

_NOTHING = "nothing was built for it"


@record
class Rejected:
    """An architecture that was passed over."""

    arch: str
    form: Form
    reason: str


@record
class Choice:
    """The architecture and form chosen for a device, with what was rejected on the way."""

    arch: str
    form: Form
    reason: str
    rejected: tuple[Rejected, ...]


def choose(
    manifest: Manifest,
    device: tuple[int, int],
    *,
    driver_cuda: tuple[int, int],
    arch: str | None = None,
    allow_ptx: bool = False,
) -> Choice:
    """Pick for a device of compute capability `device`.

    Machine code is preferred to PTX, and the highest architecture to lower ones. `arch` restricts
    the choice to one architecture of the directory.

    Raises:
        VariantMissing: nothing here runs on the device; the message says why for each architecture.
        UsageError: `arch` is not an architecture.
    """
    wanted = Arch.parse(arch) if arch is not None else None
    present = sorted(map(Arch.parse, manifest.selection.archs), reverse=True)
    rejected: list[Rejected] = []
    for form in ("cubin", "ptx"):
        for candidate in present:
            reason = _reason_against(
                manifest, candidate, form, device, driver_cuda, wanted, allow_ptx
            )
            if reason is None:
                why = f"highest {form} here that runs on compute capability {dotted(device)}"
                return Choice(candidate.name, form, why, tuple(rejected))
            rejected.append(Rejected(candidate.name, form, reason))
    details = "; ".join(f"{r.arch} {r.form}: {r.reason}" for r in rejected) or "it is empty"
    raise VariantMissing(
        f"no artifacts for compute capability {dotted(device)} ({details})",
        remedy=_remedy(device, present, wanted, allow_ptx, rejected),
    )


def could_run(arch: str, device: tuple[int, int], *, wanted: str | None, allow_ptx: bool) -> bool:
    """Whether `choose` may pick this architecture for a device, if the driver is new enough."""
    one = Arch.parse(arch)
    fits = one.cubin_runs_on(device) or (allow_ptx and one.ptx_runs_on(device))
    return fits and wanted in (None, one.name)


def _remedy(
    device: tuple[int, int],
    present: list[Arch],
    wanted: Arch | None,
    allow_ptx: bool,
    rejected: list[Rejected],
) -> str:
    """What helps: PTX that is there, or a build, which must name what is there already too."""
    empty = {item.arch for item in rejected if item.reason == _NOTHING}
    usable = [
        arch
        for arch in present
        if arch.ptx_runs_on(device) and wanted in (None, arch) and arch.name not in empty
    ]
    if usable and not allow_ptx:
        ptx = "let the driver compile PTX with allow_ptx=True (doctor: --allow-ptx), or "
        return ptx + build_command(present, device)
    return build_command(present, device)


def build_command(present: list[Arch], device: tuple[int, int]) -> str:
    """How to build for a device without losing the architectures that are there."""
    own = Arch(*device)
    if own not in KNOWN:
        return f"use a GPU of compute capability {dotted((KNOWN[0].major, KNOWN[0].minor))} or more"
    archs = " ".join(f"--arch {arch}" for arch in normalise([*present, own]))
    return f"build with `sonata-aot build {archs}`, and keep the driver up to date"


def _reason_against(
    manifest: Manifest,
    arch: Arch,
    form: Form,
    device: tuple[int, int],
    driver_cuda: tuple[int, int],
    wanted: Arch | None,
    allow_ptx: bool,
) -> str | None:
    if wanted is not None and arch != wanted:
        return f"not the requested {wanted}"
    runs = arch.cubin_runs_on(device) if form == "cubin" else arch.ptx_runs_on(device)
    if not runs:
        return f"does not run on {dotted(device)}"
    if form == "ptx" and not allow_ptx:
        return "PTX is not allowed"
    found = {b.payload(form).min_cuda for b in manifest.binaries if b.arch == arch.name}
    if not found:
        return _NOTHING
    needed = max(map(_version, found))
    if driver_cuda < needed:
        return f"needs a driver of CUDA {dotted(needed)}, this one is {dotted(driver_cuda)}"
    return None


def _version(text: str) -> tuple[int, int]:
    major, minor = text.split(".")
    return int(major), int(minor)
