"""Binaries of an artifact set, loaded into the driver: eagerly as machine code, lazily as PTX."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from ..artifacts.declaration import Declaration
from ..artifacts.errors import ArgumentError, ManifestError
from ..artifacts.manifest import Binary, Form
from ..artifacts.rules import Rule, first_match
from .log import logger

if TYPE_CHECKING:
    from ._native import Kernel, Library

# What the driver has loaded stays for the life of the process: a CUDA graph may hold its kernels.
# So loading the same bytes again costs nothing and takes no memory.
_loaded: dict[tuple[str, int], Library] = {}
# One for each, so that several can be loaded at once.
_locks: dict[tuple[str, int], threading.Lock] = {}

# The child of a fork may have inherited some held, by a thread that does not exist there.
os.register_at_fork(after_in_child=_locks.clear)


class Loaded:
    """One binary on one device, ready to launch."""

    def __init__(
        self, binary: Binary, declaration: Declaration, image: bytes, form: Form, device: int
    ) -> None:
        """Hold the verified bytes; nothing is loaded yet."""
        self.binary = binary
        self.declaration = declaration
        self._image = image
        self._form: Form = form
        self._device = device
        self._library: Library | None = None
        self._kernel: Kernel | None = None
        self._pack = declaration.pack
        self._waits_by_itself = declaration.is_programmatic(binary.variant)
        self._scalars = declaration.integers

    def library(self) -> Library:
        """What the driver makes of the bytes, given to it at the first call.

        Raises:
            DriverError: the driver refused them.
            ForkedProcess: in a child of the process that loaded the driver.
        """
        if self._library is None:
            from . import _native

            key = self.binary.payload(self._form).sha256, self._device
            with _locks.setdefault(key, threading.Lock()):
                library = _loaded.get(key)
                if library is None:
                    library = _native.load(
                        self._image, self.binary.label, self._device, ptx=self._form == "ptx"
                    )
                    _loaded[key] = library
            self._library = library
        return self._library

    def kernel(self) -> Kernel:
        """The driver's kernel, brought to the device at the first call.

        Raises:
            DriverError: the driver refused the bytes, or has no room for the kernel.
            ForkedProcess: in a child of the process that loaded the driver.
        """
        if self._kernel is None:
            began = time.perf_counter()
            kernel = self.library().kernel(self.binary.entry, self.binary.shared_bytes)
            if self._form == "ptx":
                took = 1e3 * (time.perf_counter() - began)
                logger.info("the driver took PTX of %s in %.1f ms", self.binary.label, took)
            self._kernel = kernel
        return self._kernel

    def launch(self, stream: int, *arguments: int | float, programmatic: bool = False) -> None:
        """Launch on a stream, given the declaration's parameters in order (pointers as addresses).

        With `programmatic` a variant whose declaration allows it may begin before what precedes it
        on the stream has ended; others ignore it.

        Raises:
            ArgumentError: a value does not fit its parameter, or gives an empty or too large grid.
            DriverError: the driver refused the launch, or an earlier one had failed.
        """
        if len(arguments) != len(self.declaration.parameters):
            raise self._misfit(arguments, f"{len(self.declaration.parameters)} are expected")
        grid = self.grid({name: int(arguments[index]) for index, name in self._scalars})
        self.enqueue(stream, grid, arguments, programmatic=programmatic)

    def grid(self, sizes: Mapping[str, int]) -> tuple[int, int, int]:
        """Blocks of a launch, given the integer parameters that the declaration's grid uses.

        Raises:
            ArgumentError: an empty or too large grid.
        """
        return self.declaration.grid_shape(self.binary.variant, sizes)

    def enqueue(
        self,
        stream: int,
        grid: tuple[int, int, int],
        arguments: Sequence[int | float],
        *,
        programmatic: bool = False,
    ) -> None:
        """As `launch`, with a grid that is known already.

        Raises:
            ArgumentError: a value does not fit its parameter.
            DriverError: the driver refused the launch, or an earlier one had failed.
        """
        kernel = self._kernel or self.kernel()
        try:
            block = self._pack(*arguments)
        except Exception as error:  # struct.error is made anew for each struct module
            raise self._misfit(arguments, str(error)) from None
        kernel.launch(
            grid, self.binary.block, stream, block, programmatic and self._waits_by_itself
        )

    def _misfit(self, arguments: Sequence[int | float], problem: str) -> ArgumentError:
        return ArgumentError(
            f"{self.binary.label}: arguments {tuple(arguments)} do not fit the parameters: "
            f"{problem}",
            remedy="pass sizes and strides within the kernel's integer types",
        )


class Table:
    """The loaded binaries of one kernel, by device and selectors."""

    def __init__(self, declaration: Declaration) -> None:
        """Start empty."""
        self.declaration = declaration
        self._binaries: dict[tuple[object, ...], Loaded] = {}
        self._rules: dict[int, tuple[Rule, ...]] = {}

    def add(self, device: int, loaded: Loaded) -> None:
        """Enter a binary under its device and the values of its selectors.

        Raises:
            ManifestError: another one has the same.
        """
        variant = loaded.binary.variant
        key = (device, *[variant[name] for name in self.declaration.selectors])
        if key in self._binaries:
            raise ManifestError(
                f"{loaded.binary.label} and {self._binaries[key].binary.label} have the same "
                f"selectors {self.declaration.selectors}",
                remedy="rebuild the artifacts with this version",
            )
        self._binaries[key] = loaded

    def add_rules(self, device: int, rules: Sequence[Rule]) -> None:
        """Enter the rules of the architecture that a device got."""
        self._rules[device] = tuple(rules)

    def select(
        self, device: int, when: Mapping[str, int], sizes: Mapping[str, int], **call: str | int
    ) -> tuple[Loaded, Mapping[str, int]] | None:
        """The binary that the rules name, and how it is launched; None if they have no such case.

        `call` has the choices that the rules leave open, such as the dtype.
        """
        rule = first_match(self._rules.get(device, ()), when, sizes)
        if rule is None:
            return None
        variant = {**call, **rule.variant}
        loaded = self.get(device, *(variant.get(name, "") for name in self.declaration.selectors))
        return None if loaded is None else (loaded, rule.launch)

    def get(self, device: int, *selectors: str | int) -> Loaded | None:
        """The binary for a device and these selectors' values, in the declaration's order."""
        return self._binaries.get((device, *selectors))

    def all(self) -> Mapping[tuple[object, ...], Loaded]:
        """Every binary by (device, *selectors)."""
        return self._binaries
