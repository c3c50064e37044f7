"""What `patch` does: each module of a model gets what runs it, or a reason why not."""

from __future__ import annotations

import os
import threading
import weakref
from typing import TYPE_CHECKING

from torch.nn import Linear, Module

from ..artifacts.errors import ArgumentError, VariantMissing
from . import patch_linear, patch_scan
from .compare import Comparison
from .default import get_default, is_default
from .disable import DISABLED, is_disabled
from .log import logger
from .patch_families import Family, family_of, looks_like_mixer
from .patch_globals import NotRebuilt
from .patch_linear import LinearRunner
from .patch_module import install, installed, original_class, remove
from .patch_report import Entry, Report
from .patch_scan import ScanRunner

if TYPE_CHECKING:
    from .gemv import Gemv
    from .kernels import Kernels
    from .ssd import ChunkScan

Runner = LinearRunner | ScanRunner

# Two threads may patch models that share modules.
_lock = threading.Lock()


def _renew_lock() -> None:
    # The child of a fork may have inherited it held, by a thread that does not exist there.
    global _lock
    _lock = threading.Lock()


os.register_at_fork(after_in_child=_renew_lock)


def patch_model(model: Module, kernels: Kernels | None, share: float) -> Report:
    """`loader.patch`, which says what it does."""
    if not isinstance(model, Module):
        raise ArgumentError(
            f"patch: model is a {type(model).__name__}", remedy="pass a torch.nn.Module"
        )
    if isinstance(share, bool) or not isinstance(share, int | float) or not 0 <= share <= 1:
        raise ArgumentError(
            f"patch: compare is {share!r}", remedy="pass the share of calls, from 0 to 1"
        )
    if is_disabled():
        logger.warning("%s: the model is left as it is", DISABLED)
        return Report([], [f"{DISABLED}: nothing is patched"], lambda: None)
    if kernels is not None and not hasattr(kernels, "devices"):
        raise ArgumentError(
            f"patch: kernels is a {type(kernels).__name__}",
            remedy="pass what loader.load() returned, or leave it out",
        )
    patching = Patching(get_default("patch") if kernels is None else kernels, float(share))
    with _lock:
        entries = [
            entry
            for name, module in model.named_modules()
            if (entry := patching.patch(name or "(the model)", module)) is not None
        ]
    report = Report(entries, patching.notes, patching.undo)
    logger.info("patched:\n%s", report)
    return report


class Patching:
    """One call of `patch`."""

    def __init__(self, kernels: Kernels, share: float) -> None:
        """`share` of the calls is compared."""
        self._kernels = kernels
        self._share = share
        self._devices = kernels.devices
        self._comparison = Comparison(share)
        self._in_programs = is_default(kernels)
        # Not kept alive by a report.
        self._patched: list[tuple[weakref.ref[Module], Runner]] = []
        self.notes: list[str] = []
        self._gemv: Gemv | None = None
        self._scan: ChunkScan | None = None
        for name in ("gemv", "mamba_chunk_scan_combined"):
            try:
                setattr(self, "_gemv" if name == "gemv" else "_scan", getattr(kernels, name))
            except VariantMissing as error:
                self.notes.append(error.what)
        if not self._in_programs:
            self.notes.append(
                "compiled programs run the original code: kernels are not the default"
            )

    def patch(self, name: str, module: Module) -> Entry | None:
        """Patch one module if it is of a kind that is patched; None if it is not."""
        family = family_of(module)
        is_linear = isinstance(module, Linear)
        if family is None and not is_linear:
            if not looks_like_mixer(module):
                return None
            reason = f"no mixer of a known class: {original_class(module).__name__}"
            return Entry(name, "", reason=reason)
        runner = installed(module)
        if isinstance(runner, LinearRunner | ScanRunner):
            if self._is_own(runner):
                self._patched.append((weakref.ref(module), runner))
                return runner.entry.renamed(name)
            remove(module, runner)
        if family is not None:
            return self._patch_mixer(name, module, family)
        assert isinstance(module, Linear)
        return self._patch_linear(name, module)

    def undo(self) -> None:
        """Make every module that this call patched, or found patched, run its original code."""
        with _lock:
            for reference, runner in self._patched:
                module = reference()
                if module is not None:
                    remove(module, runner)

    def _is_own(self, runner: Runner) -> bool:
        return runner.kernels is self._kernels and runner.share == self._share

    def _patch_linear(self, name: str, module: Linear) -> Entry:
        shape = patch_linear.describe(module)
        if self._gemv is None:
            return Entry(name, shape, reason="there is no kernel 'gemv'")
        reason = patch_linear.why_left_alone(module, self._devices)
        if reason is not None:
            return Entry(name, shape, reason=reason)
        entry = Entry(name, shape, "gemv")
        return self._install(
            module,
            LinearRunner(self._gemv, self._devices, entry, self._comparison, self._in_programs),
        )

    def _patch_mixer(self, name: str, module: Module, family: Family) -> Entry:
        reason = family.why_left_alone(module)
        try:
            heads, headdim, groups, dstate = sizes = family.sizes(module)
            like = family.like(module)
        except (AttributeError, TypeError, ValueError) as error:  # of another version perhaps
            return Entry(name, "", reason=reason or f"not as its class was: {error}")
        shape = f"{heads} x {headdim}, {groups} groups, state {dstate}"
        if self._scan is None:
            return Entry(name, shape, reason="there is no kernel of the scan")
        reason = reason or patch_scan.why_left_alone(self._scan, *sizes, like, self._devices)
        if reason is not None:
            return Entry(name, shape, reason=reason)
        entry = Entry(name, shape, "mamba_chunk_scan_combined")
        runner = ScanRunner(self._scan, self._devices, entry, self._comparison, self._in_programs)
        try:
            runner.forward = family.forward(runner)
        except NotRebuilt as error:
            return Entry(name, shape, reason=str(error))
        return self._install(module, runner)

    def _install(self, module: Module, runner: Runner) -> Entry:
        runner.kernels, runner.share = self._kernels, self._share
        entry = runner.entry
        try:
            install(module, runner)
        except TypeError as error:
            return Entry(entry.module, entry.shape, reason=f"its class cannot be extended: {error}")
        self._patched.append((weakref.ref(module), runner))
        return entry
