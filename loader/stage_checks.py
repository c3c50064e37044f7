"""What the stages of the SSD scan ask of their arguments."""

# ruff: noqa: N803 - A, B, C and D are the names of the calls.

from __future__ import annotations

from collections.abc import Iterable
from typing import NoReturn

import torch
from torch import Tensor

from ..artifacts.errors import ArgumentError
from .ssd_tensors import UNREADABLE, two_limits

Shape = tuple[int, ...]

# The dtypes of x, B, C and z, as declarations name them, and the codes of those that a launch says.
DTYPES = {torch.bfloat16: "bf16", torch.float16: "f16"}
KINDS = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
# Sizes are 32-bit in kernels, and tiles reach past the end.
LARGEST = 2**30


class Check:
    """What a call asks of its tensors; all have to be on one device."""

    def __init__(self, stage: str, devices: Iterable[int]) -> None:
        """`stage` is what messages begin with; `devices` are those that kernels were loaded on."""
        self.stage = stage
        self.device = -1
        self._devices = sorted(devices)
        self._first: tuple[str, Tensor] | None = None

    def fail(self, what: str, remedy: str) -> NoReturn:
        """Refuse the call.

        Raises:
            ArgumentError: always.
        """
        raise ArgumentError(f"{self.stage}: {what}", remedy=remedy)

    def tensor(
        self,
        name: str,
        tensor: Tensor,
        meaning: str,
        dtypes: Iterable[torch.dtype],
        shape: tuple[int | None, ...] | None = None,
    ) -> Shape:
        """The shape of a tensor, which is `shape` but where that has None."""
        if not isinstance(tensor, Tensor):
            self.fail(f"{name} is a {type(tensor).__name__}", "pass a torch.Tensor")
        if tensor.is_nested:  # it has no shape
            self.fail(f"{name} is nested", "pass a dense tensor")
        found = tuple(tensor.shape)
        expected = (
            meaning.count(",") + (not meaning.endswith(",)")) if shape is None else len(shape)
        )
        fits = shape is None or all(w in (None, f) for f, w in zip(found, shape, strict=False))
        if len(found) != expected or not fits:
            wanted = meaning if shape is None else f"{meaning}, here {tuple(shape)}"
            self.fail(f"{name} has shape {found}", f"pass {wanted}")
        if max(found, default=0) > LARGEST:
            self.fail(f"{name} has shape {found}", "pass sizes of at most 2**30")
        if tensor.dtype not in dtypes:
            self.fail(f"{name} is {tensor.dtype}", f"pass {names(dtypes)}")
        self._check_memory(name, tensor)
        return found

    def _check_memory(self, name: str, tensor: Tensor) -> None:
        if tensor.layout is not torch.strided:
            self.fail(f"{name} is {tensor.layout}", f"pass {name}.to_dense()")
        device = tensor.get_device()
        if self._first is None:
            if device not in self._devices:
                self.fail(
                    f"{name} is on {tensor.device}, and kernels were loaded on {self._devices}",
                    "move it to such a device, or load kernels on its own",
                )
            self._first, self.device = (name, tensor), device
        elif device != self.device:
            first, other = self._first
            self.fail(f"{name} is on {tensor.device}, {first} on {other.device}", "move one")
        try:
            address = tensor.data_ptr()
        except UNREADABLE as error:
            reason = str(error).strip().partition("\n")[0]
            self.fail(f"{name} cannot be read: {reason}", "pass a plain tensor")
        if address == 0 and tensor.numel():
            self.fail(f"{name} has no memory: a fake tensor, or freed storage", "pass a real one")
        if tensor.is_neg():
            self.fail(f"{name} is a negated view", f"pass {name}.resolve_neg()")
        if address % tensor.element_size():
            self.fail(f"{name} starts between two elements", "pass an aligned tensor")
        if tensor.requires_grad and torch.is_grad_enabled():
            self.fail(
                f"{name} requires grad, and there is no backward",
                "call it under torch.inference_mode() or torch.no_grad()",
            )

    def optional(
        self,
        name: str,
        tensor: Tensor | None,
        meaning: str,
        dtypes: Iterable[torch.dtype],
        shape: Shape,
    ) -> None:
        """As `tensor`, of one that may be absent."""
        if tensor is not None:
            self.tensor(name, tensor, meaning, dtypes, shape)

    def same_dtype(self, name: str, tensor: Tensor, other_name: str, other: Tensor) -> None:
        """Require the same dtype of two tensors."""
        if tensor.dtype is not other.dtype:
            self.fail(f"{name} is {tensor.dtype}, {other_name} {other.dtype}", "convert one")

    def grouped(self, name: str, tensor: Tensor, x: Tensor) -> tuple[int, int]:
        """Groups and dstate of B or C, which fit x."""
        batch, seqlen, heads, _ = x.shape
        meaning = "(batch, seqlen, groups, dstate)"
        wanted = (batch, seqlen, None, None)
        _, _, groups, dstate = self.tensor(name, tensor, meaning, DTYPES, wanted)
        if groups == 0 or heads % groups:
            self.fail(
                f"{name} has {groups} groups, x {heads} heads", "pass groups that divide the heads"
            )
        self.same_dtype(name, tensor, "x", x)
        return groups, dstate

    def chunked(
        self,
        name: str,
        tensor: Tensor,
        batch: int,
        heads: int,
        seqlen: int,
        shape: Shape | None = None,
    ) -> tuple[int, int]:
        """Number and size of the chunks of a result of `chunk_cumsum`."""
        meaning = "(batch, heads, chunks, chunk_size)"
        wanted = (batch, heads, None, None) if shape is None else shape
        found = self.tensor(name, tensor, meaning, (torch.float32,), wanted)
        chunks, chunk_size = found[2:]
        if chunk_size < 1 or ceildiv(seqlen, chunk_size) != chunks:
            self.fail(
                f"{name} has {chunks} chunks of {chunk_size}, x {seqlen} tokens",
                "pass what chunk_cumsum made of as many tokens",
            )
        return chunks, chunk_size

    def sequences(self, seq_idx: Tensor | None, batch: int, seqlen: int) -> None:
        """Require one index a token."""
        self.optional("seq_idx", seq_idx, "(batch, seqlen)", (torch.int32,), (batch, seqlen))

    def scan(self, x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor) -> None:
        """Require what every scan has."""
        batch, seqlen, heads, _ = self.tensor("x", x, "(batch, seqlen, heads, headdim)", DTYPES)
        self.tensor("dt", dt, "(batch, seqlen, heads)", KINDS, (batch, seqlen, heads))
        self.tensor("A", A, "(heads,)", KINDS, (heads,))
        self.grouped("B", B, x)
        self.tensor("C", C, "(batch, seqlen, groups, dstate)", (x.dtype,), tuple(B.shape))

    def outputs(self, x: Tensor, D: Tensor | None, z: Tensor | None) -> None:
        """Require what the output takes besides x, as far as it is there."""
        _, _, heads, headdim = x.shape
        wanted = (heads,) if isinstance(D, Tensor) and D.dim() == 1 else (heads, headdim)
        self.optional("D", D, "(heads,) or (heads, headdim)", KINDS, wanted)
        self.optional("z", z, "(batch, seqlen, heads, headdim)", (x.dtype,), tuple(x.shape))

    def states(
        self, x: Tensor, B: Tensor, dt_bias: Tensor | None, initial_states: Tensor | None
    ) -> None:
        """Require what states begin with and step sizes take, as far as it is there."""
        batch, _, heads, headdim = x.shape
        self.optional("dt_bias", dt_bias, "(heads,)", KINDS, (heads,))
        shape = (batch, heads, headdim, B.shape[-1])
        self.optional("initial_states", initial_states, str(shape), KINDS, shape)

    def chunk_size(self, chunk_size: int) -> None:
        """Require a size that a chunk can have."""
        if not isinstance(chunk_size, int) or isinstance(chunk_size, bool):
            self.fail(f"chunk_size is {chunk_size!r}", "pass an int")
        if not 1 <= chunk_size <= LARGEST:
            self.fail(f"chunk_size is {chunk_size}", "pass 1 to 2**30")

    def limits(self, limit: tuple[float, float]) -> tuple[float, float]:
        """Two limits as fp32 holds them."""
        found = two_limits(limit)
        if found is None:
            self.fail(f"dt_limit is {limit!r}", "pass two numbers, the lower one first")
        return found


def ceildiv(number: int, divisor: int) -> int:
    """The quotient, rounded up."""
    return -(-number // divisor)


def names(dtypes: Iterable[torch.dtype]) -> str:
    """The dtypes, for a message."""
    return " or ".join(str(dtype) for dtype in dtypes)
