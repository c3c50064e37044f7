"""Patched `nn.Linear`: decode-shaped calls go to the GEMV, others to the original code."""

from __future__ import annotations

from collections.abc import Callable
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
    from .bound import BoundGemv
    from .gemv import Gemv
    from .kernels import Kernels


class Order:
    """In which order a model's projections run, so that each asks for the next one's weight."""

    def __init__(self) -> None:
        """Nothing ran yet."""
        self.last: LinearRunner | None = None


class LinearRunner:
    """Runs one patched `nn.Linear`."""

    def __init__(
        self,
        module: Module,
        gemv: Gemv,
        devices: frozenset[int],
        entry: Entry,
        comparison: Comparison,
        order: Order,
        in_programs: bool,
    ) -> None:
        """`in_programs`: whether compiled programs may use the operators."""
        self.entry = entry
        # What `patch` was called with.
        self.kernels: Kernels | None = None
        self.share = 0.0
        self._module = module
        self._gemv = gemv
        self._devices = devices
        self._comparison = comparison
        self._order = order
        self._in_programs = in_programs
        # Of the weight as it was bound last, and whether it shall be bound anew all the same.
        self._bound: BoundGemv | None = None
        self._is_outdated = False
        self._bias_address = 0
        self._next: LinearRunner | None = None
        self._previous: list[LinearRunner] = []

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
        result = self._call(weight, bias)(rows)
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

    def _call(self, weight: Tensor, bias: Tensor | None) -> Callable[[Tensor], Tensor]:
        """The GEMV for the weight that the module has now."""
        order = self._order
        if order.last is not self:
            if order.last is not None:
                order.last._precedes(self)
            order.last = self
        bound = self._bound
        if (
            bound is not None
            and not self._is_outdated
            and bound.weight is weight
            and bound.bias is bias
            and bound.constant
            and (bias is None or bias.data_ptr() == self._bias_address)
        ):
            return bound
        return self._bind(weight, bias)

    def _bind(self, weight: Tensor, bias: Tensor | None) -> Callable[[Tensor], Tensor]:
        if self._bound is not None and self._bound.weight is not weight:
            for each in self._previous:
                each._is_outdated = True  # until they let go of the weight that was next
        self._is_outdated = False
        if weight.is_inference():  # nobody counts what is written to it
            self._bound = None
            return lambda x: self._gemv(x, weight, bias)
        upcoming = None if self._next is None else self._next._weight_like(weight)
        bound = self._bound = self._gemv.bind(weight, bias, upcoming=upcoming)
        self._bias_address = 0 if bias is None else bias.data_ptr()
        return bound

    def _precedes(self, other: LinearRunner) -> None:
        """Note what ran after this one, the first time that something did."""
        if self._next is None:
            self._next = other
            other._previous.append(self)
            self._is_outdated = True

    def _weight_like(self, weight: Tensor) -> Tensor | None:
        own = self._module._parameters.get("weight")
        if own is None or own.dtype is not weight.dtype or own.device != weight.device:
            return None
        return own

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
