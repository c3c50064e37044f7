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
from sonata_aot.artifacts.declaration import DTYPE_BYTES, Variant
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
    """Remembers the memory of every tensor that was an argument or a result; poisons new ones.

    With `far` what a launch reads of a second batch lies so many elements after the first, with
    `apart` a token's so many after the one before.
    """

    def __init__(self) -> None:
        super().__init__()
        self.found: dict[int, torch.Tensor] = {}
        self.far = 0
        self.apart = 0

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
        given: dict[str, Any] = dict(
            zip([p.name for p in declaration.parameters], arguments, strict=True)
        )
        pointers = [p.name for p in declaration.parameters if p.kind == "pointer"]
        bases = {name: self._base(given[name]) for name in pointers if given[name]}
        memory, buffers = Memory(), {}
        for name, base in bases.items():
            array = self._storages.found[base].numpy()
            if base not in buffers:
                writable = any(bases.get(other) == base for other in written)
                buffers[base] = memory.buffer(array, name, writable=writable, offset=base % 256)
            for dimension, far, count in (
                ("batch", self._storages.far, 2),
                ("token", self._storages.apart, given["seqlen"]),
            ):
                stride = f"{name.removesuffix('_idx')}_{dimension}"
                if not far or name in written or not given.get(stride):
                    continue
                # The same once more, for the second batch, or for each token.
                step = (far - given[stride]) * self._size(name, given)
                for place in range(1, count):
                    address = buffers[base].address + place * step
                    memory.buffer(array, f"{name}, {dimension} {place}", address=address)
                given[stride] = far
            given[name] = buffers[base].address + given[name] - base
        self._kernel.run(memory, given)

    def _size(self, name: str, given: Mapping[str, Any]) -> int:
        """Bytes of an element."""
        if f"{name}_kind" in given:
            return 2 if given[f"{name}_kind"] else 4
        declaration, variant = self._kernel.declaration, self._kernel.binary.variant
        (parameter,) = (p for p in declaration.parameters if p.name == name)
        return DTYPE_BYTES[declaration.element(parameter, variant)]

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
