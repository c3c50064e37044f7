"""Launches of the stages of the SSD scan, and the layouts of memory that they ask for."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from ..artifacts.declaration import Declaration
from ..artifacts.errors import VariantMissing
from . import runtime
from .library import Table
from .stage_checks import KINDS, Check, ceildiv
from .stage_known import known_tables

_TILE = 64
# Blocks a multiprocessor, before a block takes more than one tile.
_BLOCKS = 8
# What strides are called after, where it is not the tensor's name.
_LONG_NAMES = {"bias": "dt_bias", "seq": "seq_idx"}


class Binaries:
    """What was loaded of the stages."""

    def __init__(self, tables: Mapping[str, Table]) -> None:
        """Take those of all tables that are of stages.

        Raises:
            ManifestError: the artifacts' kernels are not those that this loader knows.
        """
        self._tables = known_tables(tables)

    def launch(
        self,
        check: Check,
        kernel: str,
        selectors: tuple[str | int, ...],
        tensors: Mapping[str, Tensor | None],
        **numbers: int | float,
    ) -> None:
        """Launch on the current stream: addresses and strides of `tensors`, by name, and `numbers`.

        Strides are those of a tensor's leading dimensions, in order; 0 without a tensor.

        Raises:
            VariantMissing: no binary for these selectors.
            DriverError: the driver refused the launch, or an earlier one had failed.
        """
        if kernel not in self._tables:
            raise VariantMissing(
                f"{check.stage}: no kernel {kernel!r} in the artifacts",
                remedy=f"build again without --kernel, or with --kernel {kernel} among others",
            )
        table, device = self._tables[kernel], check.device
        loaded = table.get(device, *selectors)
        if loaded is None:
            there = sorted(key[1:] for key in table.all() if key[0] == device)
            choices = table.declaration.selectors
            raise VariantMissing(
                f"{check.stage}: no kernel for {_pairs(choices, selectors)}; there are "
                + "; ".join(_pairs(choices, key) for key in there),
                remedy="pass such sizes, or build with --all",
            )
        for name, tensor in tensors.items():
            # Of what was passed, `check` has said so; but a mode of torch may make copies and
            # results that are fake.
            if tensor is not None and tensor.data_ptr() == 0 and tensor.numel():
                check.fail(
                    f"{name} has no memory: a fake tensor", "leave the mode, or use real tensors"
                )
        arguments = _arguments(table.declaration, tensors, numbers)
        sizes = {name: int(arguments[index]) for index, name in table.declaration.integers}
        loaded.enqueue(runtime.current_stream(device), loaded.grid(sizes), arguments)


def _arguments(
    declaration: Declaration,
    tensors: Mapping[str, Tensor | None],
    numbers: Mapping[str, int | float],
) -> list[int | float]:
    """A value for each parameter, in order."""
    strides = {
        name: iter(()) if tensor is None else iter(tensor.stride())
        for name, tensor in tensors.items()
    }
    values: list[int | float] = []
    for parameter in declaration.parameters:
        if parameter.name in numbers:
            values.append(numbers[parameter.name])
        elif parameter.kind == "pointer":
            tensor = tensors[parameter.name]
            values.append(0 if tensor is None else tensor.data_ptr())
        else:
            name, _, _ = parameter.name.partition("_")
            values.append(next(strides[_LONG_NAMES.get(name, name)], 0))
    return values


def sizes(batch: int, seqlen: int, chunks: int, chunk_size: int) -> dict[str, int]:
    """What every launch passes."""
    return {"batch": batch, "seqlen": seqlen, "chunks": chunks, "chunk_size": chunk_size}


def runs(seq_idx: Tensor) -> Tensor:
    """Another index for each sequence, negative for padding; 0 goes on from before the first."""
    before = torch.nn.functional.pad(seq_idx[:, :-1], (1, 0))
    index = (seq_idx != before).cumsum(1, dtype=torch.int32)
    return torch.where(seq_idx < 0, -1 - index, index)


def block_tiles(chunks: int, chunk_size: int, multiprocessors: int) -> int:
    """Tiles of a chunk for one block of `chunk_scan`: all, unless that leaves too few blocks."""
    tiles = ceildiv(chunk_size, _TILE)
    return max(1, min(tiles, chunks * tiles // (_BLOCKS * multiprocessors)))


def kind(tensor: Tensor | None) -> int:
    """The code of a tensor's dtype."""
    return 0 if tensor is None else KINDS[tensor.dtype]


def aligned(tensor: Tensor) -> Tensor:
    """The tensor, or a copy if its rows are not contiguous or do not start 16-byte aligned."""
    size = tensor.element_size()
    *outer, last = zip(tensor.shape, tensor.stride(), strict=True)
    fits = last[0] == 1 or last[1] == 1
    fits = fits and all(length == 1 or stride * size % 16 == 0 for length, stride in outer)
    if fits and tensor.data_ptr() % 16 == 0:
        return tensor
    return tensor.clone(memory_format=torch.contiguous_format)


def with_rows(tensor: Tensor) -> Tensor:
    """The tensor, or a copy if its rows are not contiguous."""
    return tensor if tensor.stride(-1) == 1 or tensor.shape[-1] == 1 else tensor.contiguous()


def with_pairs(cb: Tensor) -> Tensor:
    """The products in fp32, with contiguous rows that start 8-byte aligned."""
    size = cb.shape[-1]
    even = all(
        length == 1 or stride % 2 == 0
        for length, stride in zip(cb.shape[:-1], cb.stride()[:-1], strict=True)
    )
    contiguous = size == 1 or cb.stride(-1) == 1
    if cb.dtype is torch.float32 and even and contiguous and cb.data_ptr() % 8 == 0:
        return cb
    made = cb.new_empty((*cb.shape[:-1], size + size % 2), dtype=torch.float32)[..., :size]
    return made.copy_(cb)


def with_heads(states: Tensor) -> Tensor:
    """The states, or a copy if a head's are not contiguous or not aligned."""
    if states.stride()[-2:] == (states.shape[-1], 1):
        return aligned(states)
    return states.contiguous()


def _pairs(names: Iterable[str], values: Iterable[Any]) -> str:
    return ", ".join(f"{name} {value}" for name, value in zip(names, values, strict=True))
