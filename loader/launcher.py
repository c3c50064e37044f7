"""`kernels["name"](*arguments)`: any kernel of a set, launched by its declaration alone."""

from __future__ import annotations

import struct
from numbers import Integral, Real
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import Tensor

from ..artifacts.declaration import ChoiceValue, Parameter
from ..artifacts.errors import ArgumentError, VariantMissing
from . import direct, runtime
from .library import Loaded, Table
from .ssd_launches import Address, Launches, Value

if TYPE_CHECKING:
    from ._native import Sequence, TensorReader

# The dtype of a tensor, as declarations name them; `u8` are bytes.
_DTYPES = {
    torch.bfloat16: "bf16",
    torch.float16: "f16",
    torch.float32: "f32",
    torch.int32: "i32",
    torch.int64: "i64",
    torch.uint8: "u8",
}
# What the tensor reader tells of addresses and tensors; other calls are checked each time.
_READER_ALIGNMENT = 16
_MOST_READ = 16
_MOST_KNOWN = 4096
# Of scalar parameters, as `struct` packs them for a call's key.
_CODES = {"i32": "i", "i64": "q", "f32": "f"}
_WORDS = {"i32": "int", "i64": "int", "f32": "float"}

_strided = torch.strided
_grad_is_enabled = torch.is_grad_enabled


class Launcher:
    """A kernel to be called with its parameters; see `__call__`."""

    def __init__(self, table: Table, devices: frozenset[int]) -> None:
        """Launch what is in `table`, on one of `devices`."""
        declaration = table.declaration
        self._table = table
        self._devices = devices
        self._name = declaration.name
        self._parameters = declaration.parameters
        self._pointers = tuple(i for i, p in enumerate(self._parameters) if p.kind == "pointer")
        self._scalars = tuple(i for i, p in enumerate(self._parameters) if p.kind != "pointer")
        elements = {p.element for p in self._parameters}
        # The selectors that tensors decide by their dtype, and those that the call names.
        self._by_dtype = tuple(name for name in declaration.selectors if name in elements)
        self._by_name = tuple(name for name in declaration.selectors if name not in elements)
        self._key = struct.Struct(
            "=" + "".join(_CODES[self._parameters[i].kind] for i in self._scalars)
        )
        self._reader = self._make_reader()
        self._known: dict[tuple[object, ...], tuple[int, Sequence]] = {}

    def __call__(self, *arguments: Tensor | int | float | None, **selectors: ChoiceValue) -> None:
        """Launch on torch's current stream of the tensors' device; waits for nothing.

        The grid is the declaration's, computed from the integers among the arguments. What the
        kernel writes it writes into tensors that are passed; torch is not told (see
        `torch.autograd.graph.increment_version`). Sizes and strides are not compared with the
        tensors' own, as a declaration does not say what they mean.

        Args:
            *arguments: The declaration's parameters, in order. For a pointer a tensor of its dtype
                on a CUDA device, whose address is aligned as declared, or None for a null pointer;
                for the others Python numbers.
            **selectors: Values of those selectors that are not the dtype of a tensor. One of which
                the set has only one value may be left out.

        Raises:
            ArgumentError: an argument breaks one of these conditions, is on another device than the
                others or on one that `load` was not given, or requires grad; or the grid is empty
                or too large.
            VariantMissing: the set has no such variant.
            DriverError: the driver refused the launch, or an earlier one had failed.
        """
        tensors, key = self._recognise(arguments, selectors)
        known = None if key is None else self._known.get(key)
        if known is not None and self._reader is not None:
            device, sequence = known
            sequence.launch_tensors(self._reader, runtime.current_stream(device), tensors)
            return
        device, values, dtypes = self._check(arguments)
        loaded = self._select(device, dtypes, selectors)
        self._check_alignment(values)
        loaded.launch(runtime.current_stream(device), *values)
        if key is not None:
            if len(self._known) >= _MOST_KNOWN:
                self._known.clear()
            self._known[key] = (device, self._sequence(loaded, values))

    def __repr__(self) -> str:
        shown = [
            f"{p.name}: {p.element if p.kind == 'pointer' else _WORDS[p.kind]}"
            + ("*" if p.kind == "pointer" else "")
            for p in self._parameters
        ]
        named = [f"{name}={'|'.join(map(str, self._values(name)))}" for name in self._by_name]
        return f"<kernel {self._name}({', '.join([*shown, *named])})>"

    def _recognise(
        self, arguments: tuple[Any, ...], selectors: dict[str, ChoiceValue]
    ) -> tuple[tuple[Any, ...], tuple[object, ...] | None]:
        """The tensors of a call, and what is the same for calls that are launched alike, if known.

        For calls that are wrong it is the same only as for others that are.
        """
        if self._reader is None or len(arguments) != len(self._parameters):
            return (), None
        tensors = tuple([arguments[index] for index in self._pointers])
        scalars = [arguments[index] for index in self._scalars]
        layouts = self._reader.describe(tensors, _grad_is_enabled())
        plain = all(type(value) in (int, float) for value in scalars)
        if layouts is None or not plain or not _are_named(selectors):
            return (), None
        try:
            return tensors, (layouts, self._key.pack(*scalars), *selectors.items())
        except Exception:  # struct.error is made anew for each struct module
            return (), None

    def _make_reader(self) -> TensorReader | None:
        aligned = all((self._parameters[i].align or 1) <= _READER_ALIGNMENT for i in self._pointers)
        return direct.make_reader() if aligned and len(self._pointers) <= _MOST_READ else None

    def _sequence(self, loaded: Loaded, values: list[int | float]) -> Sequence:
        """The launch, complete but for the addresses of tensors."""
        every: dict[str, Value] = {
            parameter.name: value for parameter, value in zip(self._parameters, values, strict=True)
        }
        for operand, index in enumerate(self._pointers):
            every[self._parameters[index].name] = Address(operand)
        launches = Launches()
        launches.add(loaded, every)
        return launches.sequence(len(self._pointers))

    def _check(self, arguments: tuple[Any, ...]) -> tuple[int, list[int | float], dict[str, str]]:
        """The device of a call, its values with tensors as addresses, and its dtypes by choice."""
        if len(arguments) != len(self._parameters):
            names = ", ".join(parameter.name for parameter in self._parameters)
            self._fail(
                f"{len(arguments)} arguments for {len(self._parameters)} parameters",
                f"pass {names}",
            )
        device: int | None = None
        first = ""
        values: list[int | float] = []
        dtypes: dict[str, str] = {}
        by: dict[str, str] = {}
        for parameter, value in zip(self._parameters, arguments, strict=True):
            name = parameter.name
            if parameter.kind != "pointer":
                values.append(self._number(parameter, value))
                continue
            if value is None:
                values.append(0)
                continue
            values.append(self._address(name, value))
            index = value.get_device()
            if device is None:
                device, first = index, name
            elif index != device:
                self._fail(
                    f"{name} is on cuda:{index}, {first} on cuda:{device}", "move one of them"
                )
            dtype, element = _DTYPES.get(value.dtype), str(parameter.element)
            if element in self._table.declaration.choices:
                if dtype is None or dtypes.setdefault(element, dtype) != dtype:
                    wanted = dtypes.get(element, "one of " + ", ".join(_DTYPES.values()))
                    as_what = f", {by[element]} {wanted}" if element in by else ""
                    self._fail(f"{name} is {value.dtype}{as_what}", "pass tensors of one dtype")
                by.setdefault(element, name)
            elif dtype != element:
                self._fail(f"{name} is {value.dtype}, and declared as {element}", "convert it")
        if device is None:
            self._fail("no tensor among the arguments", "pass one: it says on which device to run")
        if device not in self._devices:
            self._fail(
                f"{first} is on cuda:{device}, and kernels were loaded on {sorted(self._devices)}",
                f"load them there too: load(devices=[..., {device}])",
            )
        return device, values, dtypes

    def _number(self, parameter: Parameter, value: Any) -> int | float:
        if not _is_number(parameter.kind, value):
            word = _WORDS[parameter.kind]
            self._fail(f"{parameter.name} is a {type(value).__name__}", f"pass a Python {word}")
        return float(value) if parameter.kind == "f32" else int(value)

    def _address(self, name: str, tensor: Any) -> int:
        if not isinstance(tensor, Tensor):
            self._fail(f"{name} is a {type(tensor).__name__}", "pass a torch.Tensor, or None")
        if not tensor.is_cuda or tensor.layout is not _strided:
            self._fail(
                f"{name} is {tensor.layout} on {tensor.device}",
                "pass a dense tensor on a CUDA device",
            )
        address = tensor.data_ptr()
        if address == 0 and tensor.numel():
            self._fail(
                f"{name} has no memory: a fake tensor, or freed storage", "pass a real tensor"
            )
        if tensor.is_neg() or tensor.is_conj():
            self._fail(f"{name} is a negated or conjugated view", f"pass {name}.clone()")
        if tensor.requires_grad and _grad_is_enabled():
            self._fail(
                f"{name} requires grad, and this kernel has no backward",
                "call it under torch.inference_mode() or torch.no_grad()",
            )
        return address

    def _check_alignment(self, values: list[int | float]) -> None:
        for index in self._pointers:
            parameter, address = self._parameters[index], int(values[index])
            if address % (parameter.align or 1):
                self._fail(
                    f"{parameter.name} starts at {address:#x}, and must start at a multiple of "
                    f"{parameter.align} bytes",
                    f"pass {parameter.name}.clone()",
                )

    def _select(
        self, device: int, dtypes: dict[str, str], selectors: dict[str, ChoiceValue]
    ) -> Loaded:
        declaration = self._table.declaration
        for name in selectors:
            if name not in self._by_name:
                known = ", ".join(f"{each}=" for each in self._by_name) or "none"
                self._fail(f"no selector {name!r} to be named by a call", f"use {known}")
        if not _are_named(selectors):
            self._fail(f"selectors {selectors}", "pass an int or text for each")
        wanted: dict[str, ChoiceValue] = {}
        for name in declaration.selectors:
            if name in dtypes or name in selectors:
                wanted[name] = dtypes.get(name) or selectors[name]
                continue
            values = self._values(name, device)
            if len(values) != 1:
                shown = ", ".join(map(str, values))
                how = "a tensor" if name in self._by_dtype else f"{name}="
                self._fail(f"{name} is not given", f"pass {how}: one of {shown}")
            wanted[name] = values[0]
        loaded = self._table.get(device, *wanted.values())
        if loaded is None:
            there = [
                ",".join(f"{n}={v}" for n, v in zip(wanted, key[1:], strict=True))
                for key in self._table.all()
                if key[0] == device
            ]
            asked = ",".join(f"{name}={value}" for name, value in wanted.items())
            raise VariantMissing(
                f"{self._name}: no binary for {asked}; there are {'; '.join(there) or 'none'}",
                remedy=f"declare that variant of {self._name}, and build again",
            )
        return loaded

    def _values(self, selector: str, device: int | None = None) -> list[Any]:
        """The values that binaries have of a selector, on one device or on any."""
        at = 1 + self._table.declaration.selectors.index(selector)
        found = {key[at] for key in self._table.all() if device in (None, key[0])}
        return sorted(found, key=lambda value: (isinstance(value, str), value))

    def _fail(self, what: str, remedy: str) -> NoReturn:
        raise ArgumentError(f"{self._name}: {what}", remedy=remedy)


def _are_named(selectors: dict[str, ChoiceValue]) -> bool:
    """Whether selectors have values of the types that choices have."""
    return all(type(value) in (int, str) for value in selectors.values())


def _is_number(kind: str, value: object) -> bool:
    """Whether a value is a number of a kind; a tensor would do, and wait for the device."""
    return isinstance(value, Real if kind == "f32" else Integral)
