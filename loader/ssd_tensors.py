"""What the scan asks of its arguments, once for each layout of them.

`describe` reads at every call what decides whether a tensor will do and how kernels find its
elements. What it returns is part of the key under which a plan is kept, so that `check`, which
says what is wrong, runs where no plan is known.
"""

from __future__ import annotations

import math
import numbers
import operator
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor

from ..artifacts.errors import ArgumentError, VariantMissing
from ..artifacts.record import record
from .tensors import DTYPES, LARGEST

# The tensors of a call, in the order in which a launch takes their addresses.
INPUTS = (
    "x", "dt", "A", "B", "C", "D", "z", "dt_bias", "initial_states", "seq_idx", "cu_seqlens",
)  # fmt: skip
# Codes of dtypes, as kernels take them where a launch decides: kernels/scalars.py.
KINDS = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
# Elements in the 16 bytes that kernels read at once.
VECTOR = 8

# A tensor that is no plain one is refused by what it answers; what cannot answer raises one of
# these.
UNREADABLE = (AttributeError, TypeError, ValueError, RuntimeError, NotImplementedError)


def describe(tensor: Tensor | None) -> tuple[Any, ...] | None:
    """The fields of `Layout`, as fast as they can be read; None for None."""
    if tensor is None:
        return None
    address = tensor.data_ptr()
    return (
        tensor.shape,
        tensor.stride(),
        tensor.dtype,
        tensor.get_device(),
        tensor.is_cuda,
        tensor.is_neg(),
        tensor.requires_grad,
        address % 16 if address else -1,
    )


class Layout(NamedTuple):
    """A tensor but for its address, of which there is the remainder by 16; -1 is no address."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype
    device: int
    is_cuda: bool
    negated: bool
    requires_grad: bool
    remainder: int

    @property
    def steps(self) -> tuple[int, ...]:
        """The strides, 0 where there is no second element."""
        return tuple(
            0 if size <= 1 else stride
            for size, stride in zip(self.shape, self.strides, strict=True)
        )

    def inner_dense(self, first: int) -> bool:
        """Whether the elements of the dimensions from `first` on lie side by side, in order."""
        step = 1
        for size, stride in reversed(list(zip(self.shape, self.strides, strict=True))[first:]):
            if size > 1 and stride != step:
                return False
            step *= size
        return True

    @property
    def has_rows(self) -> bool:
        """Whether the last dimension is contiguous and starts aligned to 16 bytes everywhere."""
        *outer, last = self.steps
        return (
            self.remainder <= 0
            and last in (0, 1)
            and (last == 1 or self.shape[-1] <= 1)
            and not any(step % VECTOR for step in outer)
        )

    @property
    def kind(self) -> int:
        """The code of the dtype."""
        return KINDS[self.dtype]


@record
class Options:
    """The arguments that are no tensors, but for `chunk_size`, which decides nothing."""

    softplus: bool
    limit: tuple[float, float]
    final_states: bool
    varlen_states: bool
    grad_enabled: bool


@record
class Call:
    """A call whose arguments fit together; `layouts` has those that were given."""

    batch: int
    seqlen: int
    heads: int
    headdim: int
    groups: int
    dstate: int
    dtype: str
    device: int
    layouts: Mapping[str, Layout]
    options: Options

    @property
    def sequences(self) -> int:
        """Sequences of which states are wanted."""
        bounds = self.layouts.get("cu_seqlens")
        return bounds.shape[0] - 1 if bounds is not None and self.options.varlen_states else 0


def check(tensors: Sequence[Tensor | None], options: Options, devices: frozenset[int]) -> Call:
    """The call of these tensors, in the order of `INPUTS`.

    Raises:
        ArgumentError: an argument is not what the call takes, or does not fit the others.
        VariantMissing: there are no kernels for the dtype.
    """
    layouts: dict[str, Layout] = {}
    for name, tensor in zip(INPUTS, tensors, strict=True):
        if tensor is not None:
            layouts[name] = _layout(name, tensor, options)
    for name in INPUTS[:5]:
        if name not in layouts:
            fail(f"{name} is None", "pass a tensor")
    x = layouts["x"]
    if x.device not in devices:
        fail(
            f"x is on cuda:{x.device}, and kernels were loaded on {sorted(devices)}",
            f"load them there too: load(devices=[..., {x.device}])",
        )
    for name, layout in layouts.items():
        if layout.device != x.device:
            fail(f"{name} is on cuda:{layout.device}, x on cuda:{x.device}", "move one of them")
    _check_dtypes(layouts)
    sizes = _check_shapes(layouts)
    _check_sequences(layouts, options, sizes[0])
    return Call(*sizes, DTYPES[x.dtype], x.device, layouts, options)


def _layout(name: str, tensor: object, options: Options) -> Layout:
    if not isinstance(tensor, Tensor):
        fail(f"{name} is a {type(tensor).__name__}", "pass a torch.Tensor")
    if not tensor.is_cuda or tensor.layout is not torch.strided or tensor.is_nested:
        fail(
            f"{name} is {tensor.layout} on {tensor.device}", "pass a dense tensor on a CUDA device"
        )
    try:
        fields = describe(tensor)
    except UNREADABLE as error:
        reason = str(error).strip().partition("\n")[0]
        fail(f"{name} cannot be read: {reason}", "pass a plain tensor")
    assert fields is not None
    layout = Layout(*fields)
    if layout.remainder < 0 and tensor.numel():
        fail(f"{name} has no memory: a fake tensor, or freed storage", "pass a real tensor")
    if layout.negated:
        fail(f"{name} is a negated view", f"pass {name}.resolve_neg()")
    if layout.requires_grad and options.grad_enabled:
        fail(
            f"{name} requires grad, and this scan has no backward",
            "call it under torch.inference_mode() or torch.no_grad()",
        )
    if layout.remainder > 0 and layout.remainder % tensor.element_size():
        fail(f"{name} starts between two elements", "pass an aligned tensor")
    return layout


def check_chunk_size(size: object) -> None:
    """Require a chunk size.

    Raises:
        ArgumentError: it is no integer, or less than 1.
    """
    try:
        whole = 0 if isinstance(size, bool | Tensor) else operator.index(size)  # pyright: ignore[reportArgumentType]
    except TypeError:
        whole = 0
    if whole < 1:
        fail(f"chunk_size is {size!r}", "pass 1 or more; the result does not depend on it")


def switch(name: str, value: object) -> bool:
    """An argument that is True or False.

    Raises:
        ArgumentError: it is a tensor, whose value may change, or has no truth value.
    """
    try:
        chosen = None if isinstance(value, Tensor) else bool(value)
    except (TypeError, ValueError):
        chosen = None
    if chosen is None:
        fail(f"{name} is {value!r}", "pass True or False")
    return chosen


def two_limits(limit: object) -> tuple[float, float] | None:
    """The limits of step sizes as fp32 holds them; None if they are not two numbers in order.

    What is too large for fp32 counts as infinite.
    """
    try:
        low, high = limit  # pyright: ignore[reportGeneralTypeIssues]
    except (TypeError, ValueError):
        return None
    if not (isinstance(low, numbers.Real) and isinstance(high, numbers.Real) and low <= high):
        return None  # NaN, too
    return _single(low), _single(high)


def _single(value: Any) -> float:
    if abs(value) <= torch.finfo(torch.float32).max:
        return float(value)
    return math.copysign(math.inf, 1 if value > 0 else -1)


def _check_dtypes(layouts: Mapping[str, Layout]) -> None:
    x = layouts["x"]
    if x.dtype not in DTYPES:
        raise VariantMissing(
            f"mamba_chunk_scan_combined: x is {x.dtype}, and kernels are for bfloat16 and float16",
            remedy="convert x, B, C and z to one of them",
        )
    for name in ("B", "C", "z"):
        layout = layouts.get(name)
        if layout is not None and layout.dtype is not x.dtype:
            fail(f"{name} is {layout.dtype}, x {x.dtype}", "convert one of them")
    for name in ("dt", "A", "D", "dt_bias", "initial_states"):
        layout = layouts.get(name)
        if layout is not None and layout.dtype not in KINDS:
            fail(f"{name} is {layout.dtype}", "convert it to float32, bfloat16 or float16")
    for name in ("seq_idx", "cu_seqlens"):
        layout = layouts.get(name)
        if layout is not None and layout.dtype is not torch.int32:
            fail(f"{name} is {layout.dtype}", f"pass {name}.int()")


def _check_shapes(layouts: Mapping[str, Layout]) -> tuple[int, int, int, int, int, int]:
    """Batch, seqlen, heads, headdim, groups and dstate."""
    for name, meaning in (("x", "heads, headdim"), ("B", "groups, dstate")):
        if len(layouts[name].shape) != 4:
            fail(
                f"{name} has {len(layouts[name].shape)} dimensions",
                f"pass 4: (batch, seqlen, {meaning})",
            )
    batch, seqlen, heads, headdim = layouts["x"].shape
    groups, dstate = layouts["B"].shape[2:]
    wanted = {
        "dt": (batch, seqlen, heads),
        "A": (heads,),
        "B": (batch, seqlen, groups, dstate),
        "C": (batch, seqlen, groups, dstate),
        "D": (heads,),
        "z": (batch, seqlen, heads, headdim),
        "dt_bias": (heads,),
        "initial_states": (batch, heads, headdim, dstate),
        "seq_idx": (batch, seqlen),
    }
    if "D" in layouts and len(layouts["D"].shape) == 2:
        wanted["D"] = (heads, headdim)
    for name, shape in wanted.items():
        if name in layouts and tuple(layouts[name].shape) != shape:
            other = f"{(heads,)} or {(heads, headdim)}" if name == "D" else f"{shape}"
            fail(
                f"{name} has shape {tuple(layouts[name].shape)}, x {tuple(layouts['x'].shape)}",
                f"pass {name} as {other}",
            )
    if groups < 1 or heads % groups:
        fail(f"{heads} heads are no multiple of {groups} groups", "pass B and C with such groups")
    if max(batch, seqlen, heads) > LARGEST:
        fail(f"x has shape {tuple(layouts['x'].shape)}", "pass sizes of up to 2**31 - 1")
    return batch, seqlen, heads, headdim, groups, dstate


def _check_sequences(layouts: Mapping[str, Layout], options: Options, batch: int) -> None:
    bounds = layouts.get("cu_seqlens")
    if bounds is None:
        if options.varlen_states:
            fail("return_varlen_states without cu_seqlens", "pass the bounds of the sequences")
        return
    if len(bounds.shape) != 1 or bounds.shape[0] < 1:
        fail(f"cu_seqlens has shape {tuple(bounds.shape)}", "pass (sequences + 1,): 0, their ends")
    if batch != 1:
        fail(f"cu_seqlens with a batch of {batch}", "pass the sequences as one row: a batch of 1")


def fail(what: str, remedy: str) -> NoReturn:
    """Refuse a call of the scan.

    Raises:
        ArgumentError: always.
    """
    raise ArgumentError(f"mamba_chunk_scan_combined: {what}", remedy=remedy)
