"""Patched `nn.Linear`: decode-shaped calls go to the GEMV, others to the original code."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn import Linear, Module

from ..artifacts.errors import ArgumentError, VariantMissing
from . import fallback
from .compare import Comparison
from .disable import DISABLED, is_disabled
from .fallback import as_rows
from .patch_module import Forward, Runner, original_class
from .patch_report import Entry
from .tensors import DTYPES

if TYPE_CHECKING:
    from .gemv import Gemv
    from .kernels import Kernels


class LinearRunner(Runner):
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
        self._forward: Forward = Linear.forward

    def run(self, original: Forward, module: Module, *arguments: Any, **named: Any) -> Any:
        """Linear.forward(input)."""
        if not arguments and tuple(named) == ("input",):
            arguments, named = (named["input"],), {}
        if len(arguments) != 1 or named:
            return original(module, *arguments, **named)
        (x,) = arguments
        if torch.compiler.is_compiling():
            return self._compiled(original, module, x)
        entry = self.entry.counts
        parameters = parameters_of(module)
        reason = self._why_not(original, x, parameters)
        if reason is None and parameters is not None:
            rows = x if x.dim() == 2 and x.stride(1) == 1 else as_rows(x)
            try:
                result = self._gemv(rows, *parameters)
            except (ArgumentError, VariantMissing) as error:
                reason = error.what
                self.entry.warn_once(reason)
            else:
                if x.dim() != 2:
                    result = result.view(*x.shape[:-1], result.shape[-1])
                entry.calls += 1
                if self._comparison.wanted():
                    self._comparison.check(self.entry, result, lambda: original(module, x))
                return result
        entry.original_calls[reason or fallback.COMPUTED] += 1
        return original(module, x)

    def _why_not(
        self, original: Forward, x: Any, parameters: tuple[Tensor, Tensor | None] | None
    ) -> str | None:
        if is_disabled():
            return DISABLED
        if original is not self._forward:
            return fallback.REPLACED
        if parameters is None:
            return fallback.COMPUTED
        if not isinstance(x, Tensor):
            return fallback.SUBCLASS
        return fallback.why_not(self._devices, x, *parameters)

    def _compiled(self, original: Forward, module: Any, x: Tensor) -> Tensor:
        """What torch.compile and torch.export trace."""
        weight, bias = module.weight, module.bias
        if (
            not self._in_programs
            or is_disabled()
            or not fallback.fits_program(self._devices, x, weight, bias)
        ):
            return original(module, x)
        rows = x.reshape(fallback.row_count(x), x.shape[-1]).contiguous()
        y = torch.ops.sonata_aot.gemv(rows, weight, bias)
        return y.view(*x.shape[:-1], weight.shape[0])


def parameters_of(module: Module) -> tuple[Tensor, Tensor | None] | None:
    """Weight and bias of a Linear; None where its forward would not read its own parameters.

    Parametrizations, pruning and flattened weights take them out of the parameters, and compute
    them or put plain tensors in their place.
    """
    own = module.__dict__
    parameters = own["_parameters"]
    if "weight" not in parameters or "bias" not in parameters or "weight" in own or "bias" in own:
        return None
    weight = parameters["weight"]
    return None if weight is None else (weight, parameters["bias"])


def describe(module: Linear) -> str:
    """Sizes of a Linear."""
    bias = ", bias" if module._parameters.get("bias") is not None else ""
    return f"{module.in_features} -> {module.out_features}{bias}"


def why_left_alone(module: Linear, devices: frozenset[int]) -> str | None:
    """Why no call of a Linear would go to the GEMV; None if some would."""
    kind = original_class(module)
    if kind.forward is not Linear.forward:
        return f"{kind.__name__} has a forward of its own"
    if "forward" in module.__dict__:
        return "its forward was replaced already, by hooks of another library perhaps"
    parameters = parameters_of(module)
    if parameters is None or hasattr(kind, "weight") or hasattr(kind, "bias"):
        return "its weight or bias is computed, by a parametrization perhaps, or is no parameter"
    weight, bias = parameters
    for name, one in (("weight", weight), ("bias", bias)):
        if one is not None and not fallback.is_plain(one):
            return f"its {name} is a {type(one).__name__}"
    if weight.dtype not in DTYPES:
        return f"its weight is {weight.dtype}, and kernels are for bfloat16 and float16"
    if fallback.device_of(weight) not in devices:
        on = ", ".join(f"cuda:{device}" for device in sorted(devices))
        return f"its weight is on {weight.device}, and kernels are on {on}"
    return None
