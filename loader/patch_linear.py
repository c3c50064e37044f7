"""Patched `nn.Linear`: decode-shaped calls go to the GEMV, others to the original code."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn import Linear, Module

from . import fallback
from .compare import Comparison
from .disable import DISABLED, is_disabled
from .fallback import as_rows
from .gemv_plan import MOST_ROWS
from .patch_module import Forward, original_class
from .patch_report import Entry
from .tensors import DTYPES

if TYPE_CHECKING:
    from .gemv import Gemv
    from .kernels import Kernels


class LinearRunner:
    """Runs one patched `nn.Linear`.

    Weights are not bound: a launch that may start early pays where a GEMV precedes it, and in a
    model something else mostly does (docs/patching.md).
    """

    def __init__(
        self,
        gemv: Gemv,
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
        self._gemv = gemv
        self._devices = devices
        self._comparison = comparison
        self._in_programs = in_programs

    def run(self, original: Forward, module: Module, *arguments: Any, **named: Any) -> Any:
        """Linear.forward(input)."""
        if len(arguments) != 1 or named:
            return original(module, *arguments, **named)
        (x,) = arguments
        if torch.compiler.is_compiling():
            return self._compiled(original, module, x)
        entry = self.entry
        parameters = module._parameters
        weight, bias = parameters.get("weight"), parameters.get("bias")
        reason = self._why_not(x, weight, bias)
        if reason is not None or weight is None:
            entry.original_calls[reason or fallback.SUBCLASS] += 1
            return original(module, x)
        rows = x if x.dim() == 2 and x.stride(1) == 1 else as_rows(x)
        result = self._gemv(rows, weight, bias)
        if x.dim() != 2:
            result = result.view(*x.shape[:-1], result.shape[-1])
        entry.calls += 1
        if self._comparison.wanted():
            self._comparison.check(entry, result, lambda: original(module, x))
        return result

    def _why_not(self, x: Any, weight: Any, bias: Any) -> str | None:
        if is_disabled():
            return DISABLED
        if not isinstance(x, Tensor):
            return fallback.SUBCLASS
        return fallback.why_not(self._devices, x, weight, bias)

    def _compiled(self, original: Forward, module: Any, x: Tensor) -> Tensor:
        """What torch.compile and torch.export trace."""
        weight, bias = module.weight, module.bias
        if (
            not self._in_programs
            or is_disabled()
            or fallback.device_of(x) not in self._devices
            or weight.device != x.device
            or x.dtype not in DTYPES
            or weight.dtype != x.dtype
            or torch.is_autocast_enabled("cuda")
            or (torch.is_grad_enabled() and (x.requires_grad or weight.requires_grad))
        ):
            return original(module, x)
        rows = 1
        for size in x.shape[:-1]:
            rows = rows * size
        if not 1 <= rows <= MOST_ROWS:
            return original(module, x)
        y = torch.ops.sonata_aot.gemv(x.reshape(rows, x.shape[-1]).contiguous(), weight, bias)
        return y.view(*x.shape[:-1], weight.shape[0])


def describe(module: Linear) -> str:
    """Sizes of a Linear."""
    bias = ", bias" if module._parameters.get("bias") is not None else ""
    return f"{module.in_features} -> {module.out_features}{bias}"


def why_left_alone(module: Linear, devices: frozenset[int]) -> str | None:
    """Why no call of a Linear would go to the GEMV; None if some would."""
    if original_class(module).forward is not Linear.forward:
        return f"{original_class(module).__name__} has a forward of its own"
    if "forward" in module.__dict__:
        return "its forward was replaced already, by hooks of another library perhaps"
    weight = module._parameters.get("weight")
    if weight is None:
        return "its weight is computed, by a parametrization perhaps"
    if not fallback.is_plain(weight):
        return f"its weight is a {type(weight).__name__}"
    if weight.dtype not in DTYPES:
        return f"its weight is {weight.dtype}, and kernels are for bfloat16 and float16"
    if fallback.device_of(weight) not in devices:
        on = ", ".join(f"cuda:{device}" for device in sorted(devices))
        return f"its weight is on {weight.device}, and kernels are on {on}"
    return None
