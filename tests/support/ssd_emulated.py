"""The scan as the loader plans it, its kernels run by `ptx_machine`: real values, no GPU."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kernel_runs import Kernel
from ptx_machine import Memory
from sonata_aot.artifacts import ArtifactSet
from sonata_aot.loader import ssd, ssd_plan, ssd_tensors
from sonata_aot.loader.library import Loaded, Table
from sonata_aot.loader.ssd_launches import Address, Launches
from sonata_aot.loader.ssd_occupancy import Gpu

# Bits of NaN, whatever they are read as.
POISON = 0xFF


class Emulated:
    """`kernels.mamba_chunk_scan_combined` for tensors in main memory."""

    def __init__(self, artifacts: ArtifactSet, arch: str, multiprocessors: int = 132) -> None:
        """Of the binaries for `arch`, as if they ran on such a GPU."""
        self._artifacts = artifacts
        self._kernels: dict[str, Kernel] = {}
        tables = {}
        for declaration in artifacts.manifest.kernels:
            tables[declaration.name] = table = Table(declaration)
            for binary in artifacts.manifest.binaries:
                if (binary.kernel, binary.arch) == (declaration.name, arch):
                    table.add(0, Loaded(binary, declaration, b"", "ptx", 0))
        self.planner = ssd_plan.Planner(tables, lambda device: Gpu(multiprocessors, 232448))
        self.launched: list[str] = []
        # A kernel that is not run, to see that it would be missed.
        self.left_out = ""

    def __call__(self, **arguments: Any) -> tuple[Tensor, ...]:
        """The results: out, and the states that were asked for."""
        tensors = tuple(arguments.get(name) for name in ssd_tensors.INPUTS)
        options = ssd_tensors.Options(
            arguments.get("dt_softplus", False),
            arguments.get("dt_limit", (0.0, float("inf"))),
            arguments.get("return_final_states", False),
            arguments.get("return_varlen_states", False),
            False,
        )
        call = _call(tensors, options)
        kept = Launches.sequence
        launches: list[Launches] = []
        Launches.sequence = lambda self, operands: launches.append(self)  # type: ignore
        try:
            plan = self.planner.plan(call)
        finally:
            Launches.sequence = kept
        tensors = ssd._made_dense(tensors, plan.dense)
        return self._run(plan, launches[0], tensors)

    def _run(
        self, plan: ssd_plan.Plan, launches: Launches, tensors: tuple[Tensor | None, ...]
    ) -> tuple[Tensor, ...]:
        x = tensors[0]
        assert x is not None
        memory = Memory()
        places: dict[int, int] = {}
        for number, tensor in enumerate(tensors):
            if tensor is not None and tensor.numel():
                data = _bytes(tensor)
                buffer = memory.buffer(data, ssd_tensors.INPUTS[number])
                places[number] = buffer.address + tensor.data_ptr() - data.ctypes.data
        results = [x.new_empty(plan.out.shape)]
        numbers = [ssd_plan.OUT]
        if plan.final is not None:
            results.append(x.new_empty(plan.final.shape, dtype=torch.float32))
            numbers.append(ssd_plan.FINAL)
        if plan.varlen is not None:
            results.append(x.new_empty(plan.varlen.shape))
            numbers.append(ssd_plan.VARLEN)
        size = 0 if plan.workspace is None else plan.workspace.shape[0]
        results.append(torch.empty(size, dtype=torch.uint8))
        numbers.append(ssd_plan.WORKSPACE)
        for number, result in zip(numbers, results, strict=True):
            if result.numel():
                data = _bytes(result)
                data[:] = POISON
                places[number] = memory.buffer(data, f"made {number}", writable=True).address
        self.launched = []
        for loaded, values, _ in launches.items:
            self.launched.append(loaded.binary.kernel)
            if loaded.binary.kernel != self.left_out:
                self._kernel(loaded).run(memory, _placed(values, places))
        return tuple(results[:-1])

    def _kernel(self, loaded: Loaded) -> Kernel:
        binary = loaded.binary
        if binary.entry not in self._kernels:
            case = (binary.arch, binary.kernel, binary.variant)
            self._kernels[binary.entry] = Kernel(self._artifacts, case)
        return self._kernels[binary.entry]


def _placed(values: Mapping[str, Any], places: Mapping[int, int]) -> dict[str, Any]:
    return {
        name: places[value.operand] + value.added if isinstance(value, Address) else value
        for name, value in values.items()
    }


def _bytes(tensor: Tensor) -> np.ndarray[Any, Any]:
    """All memory that a tensor is a part of."""
    return torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage()).numpy()


def _call(tensors: tuple[Tensor | None, ...], options: ssd_tensors.Options) -> ssd_tensors.Call:
    """A checked call of tensors in main memory, as if they were on device 0."""
    kept = ssd_tensors._layout

    def layout(name: str, tensor: Any, options: ssd_tensors.Options) -> ssd_tensors.Layout:
        fields = ssd_tensors.describe(tensor)
        assert fields is not None
        # Main memory is aligned less than device memory: what counts is the place in the storage.
        data = _bytes(tensor)
        offset = (tensor.data_ptr() - data.ctypes.data) % 16 if tensor.numel() else -1
        return ssd_tensors.Layout(*fields)._replace(device=0, is_cuda=True, remainder=offset)

    ssd_tensors._layout = layout
    try:
        return ssd_tensors.check(tensors, options, frozenset([0]))
    finally:
        ssd_tensors._layout = kept
