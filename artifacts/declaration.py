"""What a kernel says about itself: parameters, compile-time choices, launch shape, budget.

A declaration is plain data. It is written into the manifest, so that the loader can check and pack
arguments and compute the grid without the kernel's source.
"""

import functools
import struct
from collections.abc import Callable, Iterable, Mapping
from dataclasses import field
from typing import Annotated, Literal

from .errors import ArgumentError, ManifestError
from .expression import Expression
from .record import record
from .schema import Match, Range

Name = Annotated[str, Match(r"[a-z][a-z0-9_]{0,63}")]
ChoiceValue = Annotated[str, Match(r"[a-z][a-z0-9_]{0,31}")] | Annotated[int, Range(0, 2**31 - 1)]
# One compiled combination: a value for each of the declaration's choices.
Variant = dict[Name, ChoiceValue]

Kind = Literal["pointer", "i32", "i64", "f32"]

# Size in bytes and struct code of each kind in the parameter block; alignment equals size.
_KINDS: dict[str, tuple[int, str]] = {
    "pointer": (8, "Q"),
    "i32": (4, "i"),
    "i64": (8, "q"),
    "f32": (4, "f"),
}

# Bytes per element of the dtypes that a pointer parameter may have.
DTYPE_BYTES = {"bf16": 2, "f16": 2, "f32": 4, "i32": 4, "i64": 8, "u8": 1}

# The driver's limit for a kernel's parameters on every arch supported here.
MAX_PARAMETER_BYTES = 4096
MAX_THREADS = 1024
_MAX_GRID = (2**31 - 1, 65535, 65535)


@record
class Parameter:
    """One run-time parameter of a kernel, in the order of its signature.

    `element` (pointers only) is a dtype (`bf16`, `f32`, ...) or the name of a choice whose value is
    one; `align` is the alignment in bytes that the kernel takes for granted.
    """

    name: Name
    kind: Kind
    element: Name | None = None
    align: Annotated[int, Range(1, 256)] | None = None


@record
class Budget:
    """What the machine code of a variant may use, and what it must reach.

    At most: `registers`, `spills` and `stack_bytes`.

    At least, as expressions over integer choices, where 0 asks for nothing: `load_bytes`, the width
    of each streamed load (one that leaves the L1 alone, as those of weights do); `in_flight_bytes`,
    what a thread has under way by such loads before it uses the first; `warps`, how many a
    multiprocessor holds. `dram_bound` is not 0 for a variant that nothing but DRAM may hold up, by
    the prediction for the GPU that stands for the architecture. `tile_bytes` is for a kernel whose
    blocks walk tiles, multiplying on tensor cores: what a tile moves to and from DRAM and no other
    block shares; and `tile_warps` how many warps take it through each of the loops.
    """

    registers: Annotated[int, Range(1, 255)] = 255
    spills: Annotated[int, Range(0, 65536)] = 0
    stack_bytes: Annotated[int, Range(0, 2**20)] = 0
    load_bytes: str = "0"
    in_flight_bytes: str = "0"
    warps: str = "0"
    dram_bound: str = "0"
    tile_bytes: str = "0"
    tile_warps: str = "0"

    @property
    def floors(self) -> dict[str, str]:
        """What must be reached, by name."""
        names = (
            *("load_bytes", "in_flight_bytes", "warps", "dram_bound"),
            *("tile_bytes", "tile_warps"),
        )
        return {name: getattr(self, name) for name in names}

    def floors_of(self, variant: Mapping[str, ChoiceValue]) -> dict[str, int]:
        """What a variant must reach, by name."""
        values = _integers(variant)
        return {name: _parse(text).evaluate(values) for name, text in self.floors.items()}


@record
class Declaration:
    """A kernel's interface.

    `selectors` are the choices that a call decides (its dtype, its M); the others only tune.
    `block`, `grid` and `shared_bytes` (dynamic shared memory) are launch expressions over integer
    choices, and for `grid` integer parameters too.

    `min_sm` is the least architecture, as a number (80, 90), that a variant is built for, and
    `programmatic` is not 0 for a variant whose code waits for the kernels before it by itself
    (griddepcontrol.wait), so that it may be launched while they run. Both are expressions over
    integer choices.
    """

    name: Name
    parameters: tuple[Parameter, ...]
    choices: tuple[Name, ...]
    selectors: tuple[Name, ...]
    block: tuple[str, str, str]
    grid: tuple[str, str, str]
    shared_bytes: str = "0"
    min_sm: str = "80"
    programmatic: str = "0"
    budget: Budget = field(default_factory=Budget)

    def __post_init__(self) -> None:
        """Check what the field types cannot say.

        Raises:
            ManifestError: naming the declaration and the part of it that is wrong.
        """
        names = [parameter.name for parameter in self.parameters]
        self._require(bool(names), "no parameters")
        everything = [*names, *self.choices]
        self._require(len(set(everything)) == len(everything), "a name stands twice")
        self._require(set(self.selectors) <= set(self.choices), "a selector is not a choice")
        self._require(len(set(self.selectors)) == len(self.selectors), "a selector stands twice")
        # Nothing is put into words here that is not wrong: a loader waits for this.
        for parameter in self.parameters:
            pointer, element, align = (
                parameter.kind == "pointer",
                parameter.element,
                parameter.align,
            )
            known = element in DTYPE_BYTES or element in self.choices
            if not (known if pointer else element is None):
                raise self._error(f"parameter {parameter.name!r} has element {element!r}")
            power = align is not None and align & (align - 1) == 0
            if not (power if pointer else align is None):
                raise self._error(f"parameter {parameter.name!r} has align {align!r}")
        integers = frozenset(name for _, name in self.integers)
        self._require(
            self.block_layout.size <= MAX_PARAMETER_BYTES,
            f"parameters take more than {MAX_PARAMETER_BYTES} bytes",
        )
        least = self.budget.floors.values()
        choices = frozenset(self.choices)
        of_choices = (*self.block, self.shared_bytes, self.min_sm, self.programmatic, *least)
        for text in dict.fromkeys(of_choices):  # most are "0"
            self._check_names(text, choices)
        for text in self.grid:
            self._check_names(text, choices | integers)

    def _require(self, condition: bool, problem: str) -> None:
        if not condition:
            raise self._error(problem)

    def _error(self, problem: str) -> ManifestError:
        return ManifestError(
            f"declaration of kernel {self.name!r}: {problem}",
            remedy="correct the kernel's declaration and rebuild",
        )

    def _check_names(self, text: str, allowed: frozenset[str]) -> None:
        names = _parse(text).names
        if not names <= allowed:
            unknown = sorted(names - allowed)
            raise self._error(f"launch expression {text!r} uses unknown {unknown}")

    @property
    def block_layout(self) -> struct.Struct:
        """Packs the run-time arguments, in order, into the kernel's parameter block."""
        return _layout(tuple(parameter.kind for parameter in self.parameters))

    @functools.cached_property
    def pack(self) -> Callable[..., bytes]:
        """Packs the run-time arguments by `block_layout`."""
        return self.block_layout.pack

    @functools.cached_property
    def integers(self) -> tuple[tuple[int, str], ...]:
        """Place in the signature and name of each integer parameter."""
        found = enumerate(self.parameters)
        return tuple((index, p.name) for index, p in found if p.kind in ("i32", "i64"))

    @functools.cached_property
    def offsets(self) -> tuple[tuple[int, int], ...]:
        """Offset and size in bytes of each parameter in the block, by C's layout rules."""
        return _offsets(tuple(parameter.kind for parameter in self.parameters))

    def check_variant(self, variant: Mapping[str, ChoiceValue]) -> None:
        """Require a value for each choice and for nothing else.

        Raises:
            ManifestError: the names differ, or a pointer's element is then not a dtype.
        """
        if tuple(variant) != self.choices:
            raise self._error(f"variant has choices {list(variant)}, not {list(self.choices)}")
        # What is wrong is so with one value of one choice, whatever the others are.
        if self._sound.issuperset(variant.items()):
            return
        for parameter in self._typed_by_choice:
            if variant[str(parameter.element)] not in DTYPE_BYTES:
                self.element(parameter, variant)
        for name, expression in self._computing:
            if isinstance(variant[name], str):
                raise self._error(f"{expression!r} computes with text")
        self._sound.update(variant.items())

    @functools.cached_property
    def _sound(self) -> set[tuple[str, ChoiceValue]]:
        """Choices and values that a variant had that was right."""
        return set()

    @functools.cached_property
    def _typed_by_choice(self) -> tuple[Parameter, ...]:
        """Pointers whose element a choice decides."""
        return tuple(p for p in self.parameters if p.element in self.choices)

    @functools.cached_property
    def _computing(self) -> tuple[tuple[str, str], ...]:
        """Choices that must be integers, each with an expression that computes with it."""
        expressions = (*self.grid, self.min_sm, self.programmatic, *self.budget.floors.values())
        return tuple(
            (name, text)
            for text in expressions
            for name in sorted(_parse(text).names)
            if name in self.choices
        )

    def element(self, parameter: Parameter, variant: Mapping[str, ChoiceValue]) -> str:
        """The dtype that a pointer parameter has in a variant."""
        name = str(parameter.element)
        dtype = str(variant[name]) if name in variant else name
        self._require(dtype in DTYPE_BYTES, f"parameter {parameter.name!r}: no dtype {dtype!r}")
        return dtype

    def block_shape(self, variant: Mapping[str, ChoiceValue]) -> tuple[int, int, int]:
        """Threads of a block of this variant.

        Raises:
            ManifestError: a dimension below 1, or more than 1024 threads.
        """
        x, y, z = (self._value(text, variant) for text in self.block)
        if min(x, y, z) < 1 or x * y * z > MAX_THREADS:
            raise self._error(f"block {x}x{y}x{z} of {dict(variant)}")
        return x, y, z

    def shared_memory(self, variant: Mapping[str, ChoiceValue]) -> int:
        """Dynamic shared memory of a block of this variant, in bytes.

        Raises:
            ManifestError: below 0, or more than any GPU has (256 KB).
        """
        value = self._value(self.shared_bytes, variant)
        if not 0 <= value <= 2**18:
            raise self._error(f"shared memory {value} of {dict(variant)}")
        return value

    def least_sm(self, variant: Mapping[str, ChoiceValue]) -> int:
        """Number of the least architecture that a variant is for, such as 90."""
        return self._value(self.min_sm, variant)

    def is_programmatic(self, variant: Mapping[str, ChoiceValue]) -> bool:
        """Whether a variant may be launched as a programmatic dependent."""
        return self._value(self.programmatic, variant) != 0

    def _value(self, text: str, variant: Mapping[str, ChoiceValue]) -> int:
        """An expression's value, computed once for the values of the choices that it uses."""
        if text not in self._values:
            self._values[text] = tuple(_parse(text).names), {}
        names, known = self._values[text]
        key = tuple([variant.get(name) for name in names])
        if key not in known:
            known[key] = _parse(text).evaluate(_integers(variant))
        return known[key]

    @functools.cached_property
    def _values(self) -> dict[str, tuple[tuple[str, ...], dict[tuple[object, ...], int]]]:
        """By expression: the names that it uses, and what it is for values of these."""
        return {}

    def built_shape(
        self, variant: Mapping[str, ChoiceValue]
    ) -> tuple[tuple[int, int, int], int, int]:
        """`block_shape`, `shared_memory` and `least_sm` of a variant.

        Computed once for all variants that differ only in choices that none of these uses.
        """
        names, known = self._built_shapes
        key = tuple([variant[name] for name in names])
        if key not in known:
            known[key] = (
                self.block_shape(variant),
                self.shared_memory(variant),
                self.least_sm(variant),
            )
        return known[key]

    @functools.cached_property
    def _built_shapes(
        self,
    ) -> tuple[
        tuple[str, ...], dict[tuple[ChoiceValue, ...], tuple[tuple[int, int, int], int, int]]
    ]:
        texts = (*self.block, self.shared_bytes, self.min_sm)
        used = set().union(*(_parse(text).names for text in texts))
        return tuple(name for name in self.choices if name in used), {}

    def grid_shape(
        self, variant: Mapping[str, ChoiceValue], sizes: Mapping[str, int]
    ) -> tuple[int, int, int]:
        """Blocks of a launch, given the run-time integers.

        Raises:
            ArgumentError: an empty grid, or one beyond the driver's limits.
        """
        values = {**_integers(variant), **sizes}
        shape = tuple(_parse(text).evaluate(values) for text in self.grid)
        for axis, value, most in zip("xyz", shape, _MAX_GRID, strict=True):
            if not 1 <= value <= most:
                raise ArgumentError(
                    f"kernel {self.name!r}: grid.{axis} = {value} for {dict(sizes)}",
                    remedy=f"pass sizes that keep it from 1 to {most}",
                )
        return shape[0], shape[1], shape[2]


def variant_name(variant: Mapping[str, ChoiceValue]) -> str:
    """How a variant is shown and asked for: `dtype=bf16,m=1`."""
    return ",".join(f"{name}={value}" for name, value in variant.items())


def entry_prefix(kernel: str, variant: Mapping[str, ChoiceValue]) -> str:
    """Start of the entry symbol, so that a profiler shows the variant and a swap is seen.

    The compiler appends a number of its own.
    """
    return "_".join([kernel, *[f"{name}_{value}" for name, value in variant.items()]])


def is_entry(entry: str, kernel: str, variant: Mapping[str, ChoiceValue]) -> bool:
    """Whether an entry symbol is that of this variant: the prefix, and the compiler's number."""
    start, _, number = entry.rpartition("_")
    return start == entry_prefix(kernel, variant) and number.isdecimal()


def sort_key(variant: Mapping[str, ChoiceValue]) -> tuple[tuple[bool, ChoiceValue], ...]:
    """Orders variants by value, integers before text."""
    return tuple([(isinstance(value, str), value) for value in variant.values()])


def _integers(variant: Mapping[str, ChoiceValue]) -> dict[str, int]:
    return {name: value for name, value in variant.items() if isinstance(value, int)}


@functools.cache
def _offsets(kinds: tuple[Kind, ...]) -> tuple[tuple[int, int], ...]:
    result, end = [], 0
    for size, _ in (_KINDS[kind] for kind in kinds):
        start = end + -end % size
        result.append((start, size))
        end = start + size
    return tuple(result)


@functools.cache
def _layout(kinds: tuple[Kind, ...]) -> struct.Struct:
    code, end = "<", 0
    for kind, (start, size) in zip(kinds, _offsets(kinds), strict=True):
        code += "x" * (start - end) + _KINDS[kind][1]
        end = start + size
    return struct.Struct(code)


@functools.lru_cache(maxsize=4096)
def _parse(text: str) -> Expression:
    return Expression(text)


def product(**choices: Iterable[ChoiceValue]) -> tuple[Variant, ...]:
    """Every combination of the given values, the last choice varying fastest."""
    variants: list[Variant] = [{}]
    for name, values in choices.items():
        fixed = list(values)
        variants = [{**variant, name: value} for variant in variants for value in fixed]
    return tuple(variants)
