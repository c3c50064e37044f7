"""`kernels.gemv`: checks a call's tensors and launches the skinny GEMV."""

from __future__ import annotations

from typing import TYPE_CHECKING, NoReturn

from ..artifacts.errors import ArgumentError, ManifestError, VariantMissing
from . import runtime
from .library import Loaded, Table

if TYPE_CHECKING:
    from torch import Tensor

# Elements in the 16 bytes that the kernel reads at once.
_VECTOR = 8
_ALIGNMENT = 16
_LARGEST = 2**31 - 1
# What `__call__` passes, in order; the artifacts must have been built for it.
_PARAMETERS = (
    ("x", "pointer"),
    ("weight", "pointer"),
    ("out", "pointer"),
    ("n", "i32"),
    ("k", "i32"),
    ("x_stride", "i64"),
    ("weight_stride", "i64"),
    ("out_stride", "i64"),
)
_SELECTORS = ("dtype", "m")
_LINEAR = "use torch.nn.functional.linear"


class Gemv:
    """y = x W^T for decode batches; see `__call__`."""

    def __init__(self, table: Table) -> None:
        """Look up variants in a kernel's table.

        Raises:
            ManifestError: the artifacts' gemv takes other arguments than this loader passes.
        """
        declaration = table.declaration
        found = tuple((p.name, p.kind) for p in declaration.parameters), declaration.selectors
        if found != (_PARAMETERS, _SELECTORS):
            raise ManifestError(
                "the artifacts' gemv has other parameters than this loader passes",
                remedy="rebuild the artifacts with this version of sonata-aot",
            )
        self._table = table

    def __call__(self, x: Tensor, weight: Tensor, out: Tensor | None = None) -> Tensor:
        """Launch out = x @ weight.T on torch's current stream of the tensors' device.

        Sums in fp32 and rounds once. Never synchronises; can be captured in a CUDA graph.

        Args:
            x: (M, K) bfloat16, M a number of rows that was built (1 and 2 by default), K a multiple
                of 8. Rows are contiguous and start 16-byte aligned: the row stride is a multiple of
                8 elements.
            weight: (N, K), the layout of `torch.nn.Linear.weight`; dtype and rows as for x.
            out: (M, N) of the same dtype, rows contiguous, any row stride; allocated if None. Must
                not overlap x or weight.

        Returns:
            out.

        Raises:
            ArgumentError: an argument breaks one of these conditions, is on another device than the
                others or one that `load` was not given, or requires grad.
            VariantMissing: no binary for this dtype and M.
            DriverError: the driver refused the launch, or an earlier one had failed.
        """
        m, n, k, loaded, device = self._check(x, weight)
        if out is None:
            out = x.new_empty((m, n))
        else:
            _check_out(out, x, weight, m, n)
        loaded.launch(
            runtime.current_stream(device),
            x.data_ptr(),
            weight.data_ptr(),
            out.data_ptr(),
            n,
            k,
            x.stride(0),
            weight.stride(0),
            out.stride(0),
        )
        return out

    def _check(self, x: Tensor, weight: Tensor) -> tuple[int, int, int, Loaded, int]:
        _check_tensor("x", x)
        _check_tensor("weight", weight)
        (m, k), (n, weight_k) = x.shape, weight.shape
        if weight_k != k:
            _fail(
                f"weight has shape {(n, weight_k)}, x {(m, k)}",
                "pass x as (M, K) and weight as (N, K) with one K",
            )
        if weight.dtype != x.dtype:
            _fail(f"weight is {weight.dtype}, x {x.dtype}", "convert one of them")
        if not 1 <= n <= _LARGEST or not 1 <= k <= _LARGEST or k % _VECTOR:
            _fail(
                f"N = {n}, K = {k}",
                f"pass N from 1 and K from {_VECTOR} to 2**31 - 1, K a multiple of {_VECTOR}; "
                f"or {_LINEAR}",
            )
        if x.device != weight.device:
            _fail(f"weight is on {weight.device}, x on {x.device}", "move one of them")
        device = x.device.index
        dtype = runtime.DTYPE_NAMES.get(str(x.dtype), str(x.dtype))
        loaded = self._table.get(device, dtype, m)
        if loaded is None:
            self._missing(x, device, dtype, m)
        _check_rows("x", x, m)
        _check_rows("weight", weight, n)
        return m, n, k, loaded, device

    def _missing(self, x: Tensor, device: int, dtype: str, m: int) -> NoReturn:
        there = sorted(self._table.all(), key=str)
        devices = sorted({key[0] for key in there}, key=str)
        if device not in devices:
            _fail(
                f"x is on cuda:{device}, and kernels were loaded on {devices}",
                f"load them there too: load(devices=[..., {device}])",
            )
        known = ", ".join(f"{key[1]} M={key[2]}" for key in there if key[0] == device)
        raise VariantMissing(
            f"gemv: x is {x.dtype} with {m} rows; loaded are {known}",
            remedy=f"{_LINEAR} for other dtypes and sizes",
        )


def _check_tensor(name: str, tensor: Tensor) -> None:
    import torch

    if not isinstance(tensor, torch.Tensor):
        _fail(f"{name} is a {type(tensor).__name__}", "pass a torch.Tensor")
    if tensor.dim() != 2:
        _fail(f"{name} has {tensor.dim()} dimensions", "pass 2: x (M, K), weight (N, K)")
    if tensor.device.type != "cuda" or tensor.layout != torch.strided:
        _fail(
            f"{name} is {tensor.layout} on {tensor.device}", "pass a dense tensor on a CUDA device"
        )
    if tensor.data_ptr() == 0 and tensor.numel():
        _fail(f"{name} has no memory: a fake tensor, or freed storage", "pass a real tensor")
    if tensor.is_neg():
        _fail(f"{name} is a negated view", f"pass {name}.resolve_neg()")
    if tensor.requires_grad and torch.is_grad_enabled():
        _fail(
            f"{name} requires grad, and gemv has no backward",
            f"call it under torch.inference_mode() or torch.no_grad(), or {_LINEAR}",
        )


def _check_rows(name: str, tensor: Tensor, rows: int) -> None:
    """Rows contiguous, and each of them 16-byte aligned."""
    row, column = tensor.stride()
    if column != 1 and tensor.shape[1] > 1:
        _fail(
            f"{name} has strides {(row, column)}: its rows are not contiguous",
            f"pass {name}.contiguous()",
        )
    if tensor.data_ptr() % _ALIGNMENT or (rows > 1 and row % _VECTOR):
        _fail(
            f"{name} has row stride {row} and starts {tensor.data_ptr() % _ALIGNMENT} bytes past "
            f"a multiple of {_ALIGNMENT}",
            f"pass rows that start {_ALIGNMENT}-byte aligned ({name}.clone() does), or {_LINEAR}",
        )


def _check_out(out: Tensor, x: Tensor, weight: Tensor, m: int, n: int) -> None:
    _check_tensor("out", out)
    if tuple(out.shape) != (m, n) or out.dtype != x.dtype or out.device != x.device:
        _fail(
            f"out is {tuple(out.shape)} {out.dtype} on {out.device}",
            f"pass {(m, n)} {x.dtype} on {x.device}, or leave it out",
        )
    if out.data_ptr() % out.element_size():
        _fail("out starts between two elements", "pass an aligned tensor, or leave it out")
    row, column = out.stride()
    if (column != 1 and n > 1) or (m > 1 and row < n):
        _fail(
            f"out has strides {(row, column)}: its rows are not contiguous, or overlap",
            "pass a tensor of torch.empty, or leave it out",
        )
    for name, other in (("x", x), ("weight", weight)):
        if _first(out) < _end(other) and _first(other) < _end(out):
            _fail(f"out overlaps {name} in memory", "pass memory of its own, or leave it out")


def _first(tensor: Tensor) -> int:
    return tensor.data_ptr()


def _end(tensor: Tensor) -> int:
    """Address just past the last element; strides are not negative in torch."""
    last = sum(
        (size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True)
    )
    return tensor.data_ptr() + (last + 1) * tensor.element_size()


def _fail(what: str, remedy: str) -> NoReturn:
    raise ArgumentError(f"gemv: {what}", remedy=remedy)
