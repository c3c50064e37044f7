"""`kernels.ssd` on a CPU: its calls as they are, and each launch run by `ptx_machine`."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from kernel_runs import Case, Kernel
from ptx_machine import Memory
from sonata_aot.artifacts import ArtifactSet, Declaration
from sonata_aot.artifacts.declaration import Variant
from sonata_aot.kernels import builtin
from sonata_aot.loader.ssd_stages import Stages

ARCH = "sm86"
CPU = -1
"""What `Tensor.get_device` says of a CPU."""
# Parameters that kernels write to.
_WRITTEN = {
    "ssd_chunk_cumsum": {"steps", "decay"},
    "ssd_bmm_chunk": {"out"},
    "ssd_chunk_state": {"states"},
    "ssd_state_passing": {"out", "final"},
    "ssd_chunk_scan": {"out"},
}


class Storages(TorchDispatchMode):
    """Remembers the memory of every tensor that was an argument or a result; poisons new ones."""

    def __init__(self) -> None:
        super().__init__()
        self.found: dict[int, torch.Tensor] = {}

    def remember(self, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        if storage.nbytes():
            flat = torch.empty(0, dtype=torch.uint8).set_(storage)  # pyright: ignore
            self.found[storage.data_ptr()] = flat

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for item in (*args, result):
            if isinstance(item, torch.Tensor):
                self.remember(item)
        if "empty" in str(func):
            storage = torch.empty(0, dtype=torch.uint8).set_(result.untyped_storage())
            storage.fill_(0xFF)  # NaN, of whatever dtype
        return result


class _Loaded:
    def __init__(self, kernel: Kernel, storages: Storages) -> None:
        self._kernel = kernel
        self._storages = storages

    def grid(self, sizes: Mapping[str, int]) -> tuple[int, int, int]:
        return self._kernel.declaration.grid_shape(self._kernel.binary.variant, sizes)

    def enqueue(self, stream: int, grid: Any, arguments: Sequence[int | float]) -> None:
        declaration = self._kernel.declaration
        written = _WRITTEN[declaration.name]
        memory = Memory()
        buffers: dict[int, Any] = {}
        given: dict[str, Any] = {}
        pointers = [p.name for p in declaration.parameters if p.kind == "pointer"]
        values = dict(zip([p.name for p in declaration.parameters], arguments, strict=True))
        bases = {name: self._base(int(values[name])) for name in pointers if values[name]}
        for name, value in values.items():
            if name not in bases:
                given[name] = value
                continue
            base = bases[name]
            if base not in buffers:
                writable = any(bases.get(other) == base for other in written)
                buffers[base] = memory.buffer(
                    self._storages.found[base].numpy(),
                    name,
                    writable=writable,
                    offset=base % 256,
                )
            given[name] = buffers[base].address + int(value) - base
        self._kernel.run(memory, given)

    def _base(self, address: int) -> int:
        for base, storage in self._storages.found.items():
            if base <= address < base + storage.numel():
                return base
        raise AssertionError(f"no memory at {address:#x}")


class _Table:
    def __init__(self, declaration: Declaration) -> None:
        self.declaration = declaration
        self.loaded: dict[tuple[Any, ...], _Loaded] = {}

    def get(self, *key: Any) -> _Loaded | None:
        return self.loaded.get(key)

    def all(self) -> Mapping[tuple[Any, ...], _Loaded]:
        return self.loaded


class OnMachine:
    """Stages whose kernels are those of some cases, for tensors of a CPU."""

    def __init__(self, artifacts: ArtifactSet, cases: Sequence[Case]) -> None:
        self.storages = Storages()
        tables: dict[str, Any] = {}
        for case in cases:
            _, name, variant = case
            table = tables.setdefault(name, _Table(builtin()[name].declaration))
            key = (CPU, *[variant[selector] for selector in table.declaration.selectors])
            table.loaded[key] = _Loaded(Kernel(artifacts, case), self.storages)
        self._tables = tables
        self.stages = Stages(tables, {CPU: 1})

    def on(self, multiprocessors: int) -> OnMachine:
        """The same on a GPU of another size."""
        other = copy.copy(self)
        other.stages = Stages(self._tables, {CPU: multiprocessors})
        return other

    def run(self, stage: str, *args: Any, **kwargs: Any) -> Any:
        """Call a stage."""
        for item in (*args, *kwargs.values()):
            if isinstance(item, torch.Tensor):
                self.storages.remember(item)
        with self.storages:
            return getattr(self.stages, stage)(*args, **kwargs)


def cases(*pairs: Variant) -> list[Case]:
    """Every stage's variants for each dtype, headdim and dstate."""
    found: list[Case] = []
    for name in _WRITTEN:
        spec = builtin()[name]
        for variant in spec.variants:
            wanted = any(
                variant.items() >= {n: v for n, v in sizes.items() if n in variant}.items()
                for sizes in pairs
            )
            if wanted:
                found.append((ARCH, name, dict(variant)))
    return found
