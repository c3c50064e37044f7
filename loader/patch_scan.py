"""Patched Mamba2 mixers: their prefill's scan goes to our kernels, the rest stays their code."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn import Module

from ..artifacts.errors import ArgumentError, VariantMissing
from . import fallback, operators
from .compare import Comparison
from .disable import DISABLED, is_disabled
from .patch_module import Forward, Runner
from .patch_report import Entry
from .tensors import DTYPES

if TYPE_CHECKING:
    from .kernels import Kernels
    from .ssd import ChunkScan

Function = Callable[..., Any]
_PARAMETERS = inspect.signature(operators.mamba_chunk_scan_combined).parameters
_ALWAYS = frozenset(("x", "dt", "A", "B", "C", "chunk_size"))


class ScanRunner(Runner):
    """Runs one patched mixer: a copy of its forward whose scan is `scan`."""

    def __init__(
        self,
        scan: ChunkScan,
        devices: frozenset[int],
        entry: Entry,
        comparison: Comparison,
        in_programs: bool,
    ) -> None:
        """`in_programs`: whether compiled programs may use the operators."""
        self.entry = entry
        # What `patch` was called with.
        self.kernels: Kernels | None = None
        self.share = 0.0
        self._scan = scan
        self._devices = devices
        self._comparison = comparison
        self._in_programs = in_programs
        # What runs in place of the class's forward, and of methods that it calls.
        self.forward: Forward | None = None

    def run(self, original: Forward, module: Module, *arguments: Any, **named: Any) -> Any:
        """The forward of the mixer."""
        forward = original if self.forward is None else self.forward
        return forward(module, *arguments, **named)

    def scan(self, original: Function, *arguments: Any, **named: Any) -> Any:
        """mamba_chunk_scan_combined, or `original` with the same arguments where that must be."""

        def run_original() -> Any:
            return original(*arguments, **named)

        given = as_named(arguments, named)
        reason = self.why_not_now(*given.values())
        if reason is not None:
            return self.leave(reason, run_original)
        found = self.scan_only(**given)
        if isinstance(found, str):
            return self.leave(found, run_original)
        self.count(found, run_original)
        return found

    def scan_only(self, *arguments: Any, **named: Any) -> Tensor | tuple[Tensor, ...] | str:
        """Our scan's results, or what it lacks for these arguments."""
        if torch.compiler.is_compiling():
            if not _fits_program(**as_named(arguments, named)):
                return fallback.DTYPE
            return operators.mamba_chunk_scan_combined(*arguments, **named)
        try:
            return self._scan(*arguments, **named)
        except (ArgumentError, VariantMissing) as error:
            self.entry.warn_once(error.what)
            return error.what

    def count(self, found: Any, original: Callable[[], Any]) -> None:
        """Count a call that kernels answered, and compare it where that is wanted."""
        if torch.compiler.is_compiling():
            return
        self.entry.counts.calls += 1
        if self._comparison.wanted():
            self._comparison.check(self.entry, found, original)

    def leave(self, reason: str, original: Callable[[], Any]) -> Any:
        """Count a call that the original code answers, and have it answered."""
        if not torch.compiler.is_compiling():
            self.entry.original_calls[reason] += 1
        return original()

    def why_not_now(self, *arguments: Any) -> str | None:
        """Why the original code must answer a call; what a kernel lacks, the kernel says.

        Asked of every tensor among the arguments.
        """
        if is_disabled():
            return DISABLED
        if torch.compiler.is_compiling():
            if not self._in_programs:
                return fallback.WATCHED
        elif fallback.is_watched():
            return fallback.WATCHED
        wants_gradient = torch.is_grad_enabled()
        for one in arguments:
            if not isinstance(one, Tensor):
                continue
            if not torch.compiler.is_compiling() and not fallback.is_plain(one):
                return fallback.SUBCLASS
            if fallback.device_of(one) not in self._devices:
                return fallback.ELSEWHERE
            if wants_gradient and one.requires_grad:
                return fallback.GRADIENT
        return None


def _fits_program(x: Tensor, seq_idx: Tensor | None = None, **others: Any) -> bool:
    """Whether the kernels take tensors of these dtypes, which a program's run would ask for."""
    alike = [others[name] for name in ("B", "C", "z") if others.get(name) is not None]
    return (
        x.dtype in DTYPES
        and all(one.dtype == x.dtype for one in alike)
        and (seq_idx is None or seq_idx.dtype == torch.int32)
    )


def as_named(arguments: tuple[Any, ...], named: dict[str, Any]) -> dict[str, Any]:
    """The arguments of the scan by name, without those that are None and those that it ignores.

    Hugging Face's callers pass on keywords of other functions, as its own scans take any.
    """
    # Hugging Face's name of x.
    given = {"x" if name == "hidden_states" else name: one for name, one in named.items()}
    given.update(zip(_PARAMETERS, arguments, strict=False))
    return {
        name: one
        for name, one in given.items()
        if name in _PARAMETERS and (one is not None or name in _ALWAYS)
    }


def why_left_alone(scan: ChunkScan, heads: int, headdim: int, groups: int, dstate: int,
                   like: Tensor | None, devices: frozenset[int]) -> str | None:  # fmt: skip
    """Why no call of a mixer of these sizes would go to our scan; None if some would.

    `like` is one of its weights: the scan's dtype and device are taken from it.
    """
    if like is None:
        return "neither its projection nor its convolution has a weight in floating point"
    if like.dtype not in DTYPES:
        return f"it is {like.dtype}, and kernels are for bfloat16 and float16"
    if fallback.device_of(like) not in devices:
        on = ", ".join(f"cuda:{device}" for device in sorted(devices))
        return f"it is on {like.device}, and kernels are on {on}"
    x = like.new_empty((1, 1, heads, headdim))
    b = like.new_empty((1, 1, groups, dstate))
    try:
        # Plans a call; nothing runs.
        scan.binaries(
            *(x, x[..., 0], like.new_empty(heads, dtype=torch.float32), b, b, 64),
            return_final_states=True,
        )
    except (ArgumentError, VariantMissing) as error:
        return error.what
    return None
