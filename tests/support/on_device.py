"""Tensors that say they are on a GPU, for a torch without CUDA and a driver that is a stand-in.

Imported by the scripts that the loader's tests run, not by the tests.
"""

from __future__ import annotations

import json
from typing import Any

import torch
from torch.utils._pytree import tree_map

from gemv_launches import SETTLED
from sonata_aot import loader
from sonata_aot.loader import runtime

STREAM = 0x7F00_1234_5678
runtime.current_stream = lambda device: STREAM + device


class OnDevice(torch.Tensor):
    """A tensor of a GPU at an address of one's choice; `memory` is what holds its elements."""

    # As of an ordinary tensor: operations see no subclass until they are dispatched.
    __torch_function__ = torch._C._disabled_torch_function_impl  # pyright: ignore
    address: int
    memory: torch.Tensor
    negated: bool

    @staticmethod
    def __new__(
        cls,
        memory: torch.Tensor,
        device: str | torch.device = "cuda:0",
        address: int | None = None,
        negated: bool = False,
    ):
        self = torch.Tensor._make_wrapper_subclass(  # pyright: ignore[reportAttributeAccessIssue]
            cls,
            memory.shape,
            strides=memory.stride(),
            dtype=memory.dtype,
            device=torch.device(device),
            requires_grad=memory.requires_grad,
        )
        self.address = memory.data_ptr() if address is None else address
        self.memory = memory.detach()
        self.negated = negated
        return self

    def data_ptr(self):
        return self.address

    def is_neg(self):
        return self.negated

    def __getitem__(self, index):
        # Torch's own asks CUDA for the device first. This one shares no version with `self`.
        part = self.memory[index]
        return OnDevice(part, self.device, self.address + part.data_ptr() - self.memory.data_ptr())

    def new_empty(self, shape, dtype=None):  # pyright: ignore[reportIncompatibleMethodOverride]
        return OnDevice(torch.empty(shape, dtype=dtype or self.dtype), self.device)

    def contiguous(self):  # pyright: ignore[reportIncompatibleMethodOverride]
        return self if self.is_contiguous() else OnDevice(self.memory.contiguous(), self.device)

    def copy_(self, other, non_blocking=False):
        # Torch's own asks CUDA for the device first; it counts so.
        self.memory.copy_(getattr(other, "memory", other))
        torch.autograd.graph.increment_version(self)
        return self

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        given = [i for i in (*args, *(kwargs or {}).values()) if isinstance(i, OnDevice)]
        plain_args, plain_kwargs = tree_map(
            lambda item: item.memory if isinstance(item, OnDevice) else item, (args, kwargs or {})
        )
        if "device" in plain_kwargs:
            plain_kwargs["device"] = "cpu"
        result = function(*plain_args, **plain_kwargs)
        if not isinstance(result, torch.Tensor):
            return result
        first = given[0]
        for item in given:
            if result is item.memory:  # an in-place operation
                return item
        address = None  # memory of its own
        if result.untyped_storage().data_ptr() == first.memory.untyped_storage().data_ptr():
            address = first.address + result.data_ptr() - first.memory.data_ptr()
        return OnDevice(result, first.device, address)


def tensor(
    *shape: int,
    address: int = 0x1000,
    dtype: torch.dtype = torch.bfloat16,
    device: str = "cuda:0",
    stride: tuple[int, ...] | None = None,
    negated: bool = False,
) -> OnDevice:
    """A tensor at an address, contiguous unless strides are given."""
    if stride is None:
        stride = torch.empty(shape, device="meta").stride()
    size = sum((most - 1) * step for most, step in zip(shape, stride, strict=True))
    memory = "cpu" if size < 2**20 else "meta"
    made = torch.empty_strided(shape, stride, dtype=dtype, device=memory)
    return OnDevice(made, device, address, negated)


def swap(tensor: OnDevice, other: OnDevice) -> None:
    """`tensor.data = other`, which for a tensor with memory takes the memory too."""
    tensor.data = other
    tensor.address, tensor.memory = other.address, other.memory


def say(value: Any) -> None:
    """An answer to the test."""
    print(json.dumps(value), flush=True)


def failure(call: Any, *args: Any, **kwargs: Any) -> dict[str, Any] | None:
    """What a call raises, as data."""
    try:
        call(*args, **kwargs)
    except Exception as error:
        return {
            "type": type(error).__name__,
            "message": str(error),
            "sonata": isinstance(error, loader.SonataError),
        }
    return None


def settled(bound: Any) -> Any:
    """A bound GEMV after the launch that is in order as it is the first on its stream."""
    n, k = bound.weight.shape
    dtype, device = bound.weight.dtype, bound.weight.device
    x = tensor(1, k, address=1 << 34, dtype=dtype, device=device)
    bound(x, tensor(1, n, address=SETTLED, dtype=dtype, device=device))
    return bound
