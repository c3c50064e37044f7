"""Reads off machine code what decides a kernel's speed: loads, instruction mix, occupancy, bound.

Nothing here runs a kernel. Bytes that stream through, a GEMV's weights, are told by their loads:
those marked no-allocate (`ld.global.L1::no_allocate`, `LDG...NA`), here called streamed.
"""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from ..artifacts import environment
from ..artifacts.arch import Arch
from ..artifacts.cubin import read_cubin
from ..artifacts.errors import IntegrityError, UsageError
from ..artifacts.manifest import Binary
from ..artifacts.store import ArtifactSet
from .instructions import CLASSES, MATRIX, class_of, matrix_fmas, matrix_shape, width
from .machine import GPUS, WARP, Occupancy, occupancy
from .sass import Instruction, disassembly, loops, parse, spills
from .tiles import Tile, per_tile

_REGISTER = re.compile(r"(?<![A-Z])R(\d+)(\.(?:reuse\.)?64)?")


@dataclass(frozen=True)
class Loop:
    """The main loop: of the innermost ones, the one that streams most, else computes most.

    `streamed_bytes` is what a thread loads in a trip, `matrix_fmas` the multiply-adds of a warp on
    tensor cores, null if they are not all of 16-bit operands; `issue_slots_per_byte` is null where
    nothing is streamed.
    """

    instructions: int
    mix: dict[str, int]
    streamed_loads: dict[int, int]
    streamed_bytes: int
    matrix_fmas: int | None
    issue_slots_per_byte: float | None


@dataclass(frozen=True)
class Code:
    """What the instructions say; loads are counted by their width in bytes.

    `in_flight_bytes` is what a thread has under way by streamed loads before it uses the first,
    null if it has none.
    """

    instructions: int
    mix: dict[str, int]
    streamed_loads: dict[int, int]
    other_loads: dict[int, int]
    in_flight_bytes: int | None
    loop: Loop | None


@dataclass(frozen=True)
class Prediction:
    """Bytes a second that each resource of a GPU would allow, the least of which is the bound.

    `margin` is how many times DRAM's rate the least of the others allows. Of a kernel whose blocks
    walk tiles, rates are those of a tile's bytes of DRAM, and `tile_seconds` is how long each
    resource of one multiprocessor takes for a tile, at least; null elsewhere.
    """

    rates: dict[str, float]
    bound: str
    margin: float
    tile_seconds: dict[str, float] | None


@dataclass(frozen=True)
class Figures:
    """Everything about one binary; `gpu` is null for an architecture that none stands for.

    `tile` is null but for a kernel whose budget says what a tile moves.
    """

    registers: int
    spills: int
    stack_bytes: int
    shared_bytes: int
    static_shared_bytes: int
    occupancy: Occupancy
    code: Code
    tile: Tile | None
    gpu: str | None
    prediction: Prediction | None


def inspect(
    artifacts: ArtifactSet,
    binaries: Sequence[Binary],
    progress: Callable[[int, int, str], None] = lambda done, total, what: None,
) -> list[Figures]:
    """The figures of some of a directory's binaries, in their order.

    Raises:
        MissingDependency: nvdisasm is not installed.
        IntegrityError: a file is not the one that the manifest names.
        BuildError: nvdisasm refused a file.
    """
    workers = environment.MAX_JOBS.get() or len(os.sched_getaffinity(0))
    found = []
    with ThreadPoolExecutor(workers) as pool:
        try:
            for figures in pool.map(lambda binary: examine(artifacts, binary), binaries):
                found.append(figures)
                progress(len(found), len(binaries), f"read: {binaries[len(found) - 1].label}")
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise
    return found


def select(
    binaries: Iterable[Binary],
    *,
    arch: str | None = None,
    kernel: str | None = None,
    variant: str | None = None,
) -> list[Binary]:
    """Those binaries that have all that is asked for; `variant` as in `m=2,side=a`.

    Raises:
        UsageError: there are none, the arch is unknown, or `variant` is not such a text.
    """
    name = arch and Arch.parse(arch).name
    choices = [text.partition("=") for text in variant.split(",")] if variant else []
    for choice, equals, value in choices:
        if not (choice and equals and value):
            raise UsageError(f"variant {variant!r}", remedy="write it as `m=2` or `m=2,side=a`")
    found = [
        binary
        for binary in binaries
        if name in (None, binary.arch)
        and kernel in (None, binary.kernel)
        and all(str(binary.variant.get(choice)) == value for choice, _, value in choices)
    ]
    if not found:
        raise UsageError(
            "the directory has no such binary", remedy="see `sonata-aot list` for what it has"
        )
    return found


def examine(artifacts: ArtifactSet, binary: Binary) -> Figures:
    """The figures of one binary; see `inspect`."""
    kernels = {kernel.entry: kernel for kernel in read_cubin(artifacts.read(binary.cubin)).kernels}
    if len(kernels) != 1 or binary.entry not in kernels:
        raise IntegrityError(
            f"{binary.label}: the machine code is not that of {binary.entry!r} alone",
            remedy="rebuild with `sonata-aot build`",
        )
    kernel = kernels[binary.entry]
    text = disassembly(artifacts.path(binary.cubin))
    x, y, z = binary.block
    arch = Arch.parse(binary.arch)
    held = occupancy(
        arch,
        threads=x * y * z,
        registers=kernel.registers,
        shared_bytes=binary.shared_bytes,
        static_shared_bytes=kernel.static_shared_bytes,
    )
    code = read(text)
    declaration = artifacts.manifest.declaration(binary.kernel)
    floors = {} if declaration is None else declaration.budget.floors_of(binary.variant)
    tile = per_tile(text, -(-x * y * z // WARP), floors.get("tile_bytes", 0))
    gpu = GPUS.get((arch.major, arch.minor))
    return Figures(
        registers=kernel.registers,
        spills=spills(parse(text)),
        stack_bytes=kernel.stack_bytes,
        shared_bytes=binary.shared_bytes,
        static_shared_bytes=kernel.static_shared_bytes,
        occupancy=held,
        code=code,
        tile=tile,
        gpu=gpu and gpu.name,
        prediction=predict(arch, code, held, tile),
    )


def predict(arch: Arch, code: Code, held: Occupancy, tile: Tile | None = None) -> Prediction | None:
    """What bounds the code on the GPU that stands for an architecture.

    None if no GPU does, if there is no tile and the main loop streams nothing, or if it has matrix
    instructions of another kind than 16-bit ones: how fast those are is not known here.
    """
    gpu, loop = GPUS.get((arch.major, arch.minor)), code.loop
    if gpu is None:
        return None
    seconds = None
    if tile is not None:
        rates = gpu.allows(
            instructions=tile.least.instructions,
            matrix_fmas=tile.least.matrix_fmas,
            bytes_loaded=tile.dram_bytes,
            shared_bytes=tile.least.shared_bytes,
        )
        total = tile.dram_bytes * gpu.multiprocessors
        seconds = {name: total / rate for name, rate in rates.items()}
    elif loop is None or not loop.streamed_bytes or loop.matrix_fmas is None:
        return None
    else:
        rates = gpu.allows(
            instructions=loop.instructions,
            matrix_fmas=loop.matrix_fmas,
            bytes_loaded=WARP * loop.streamed_bytes,
            in_flight=WARP * held.warps * (code.in_flight_bytes or 0),
        )
    others = [rate for name, rate in rates.items() if name != "dram"]
    bound = min(rates, key=lambda name: rates[name])
    return Prediction(rates, bound, min(others) / rates["dram"], seconds)


def read(text: str) -> Code:
    """What nvdisasm's output of one kernel says."""
    instructions = _without_padding(parse(text))
    main = _main_loop(text, instructions)
    return Code(
        instructions=len(instructions),
        mix=_mix(instructions),
        streamed_loads=_widths(item for item in instructions if _is_streamed(item)),
        other_loads=_widths(
            item
            for item in instructions
            if class_of(item) == "global_loads" and not _is_streamed(item)
        ),
        in_flight_bytes=_in_flight(instructions),
        loop=None if main is None else _loop(main),
    )


def _without_padding(instructions: tuple[Instruction, ...]) -> tuple[Instruction, ...]:
    """Less the NOPs that fill up the last cache line."""
    end = len(instructions)
    while end and instructions[end - 1].mnemonic == "NOP":
        end -= 1
    return instructions[:end]


def _main_loop(text: str, instructions: tuple[Instruction, ...]) -> tuple[Instruction, ...] | None:
    # Of several branches back to one place the last ends the loop.
    ends = dict(sorted(loops(text)))
    innermost = [
        (start, end)
        for start, end in ends.items()
        if not any(start < other and ends[other] <= end for other in ends)
    ]
    bodies = [
        tuple(item for item in instructions if start <= item.address <= end)
        for start, end in innermost
    ]
    return max(bodies, key=_weight, default=None)


def _weight(body: tuple[Instruction, ...]) -> tuple[int, ...]:
    mix = _mix(body)
    return (
        sum(width(item) for item in body if _is_streamed(item)),
        *(mix[name] for name in ("tensor", "fma", "global_loads")),
        len(body),
    )


def _loop(body: tuple[Instruction, ...]) -> Loop:
    streamed = [item for item in body if _is_streamed(item)]
    total = sum(width(item) for item in streamed)
    return Loop(
        instructions=len(body),
        mix=_mix(body),
        streamed_loads=_widths(streamed),
        streamed_bytes=total,
        matrix_fmas=matrix_fmas(body),
        issue_slots_per_byte=len(body) / (WARP * total) if total else None,
    )


def _in_flight(instructions: tuple[Instruction, ...]) -> int | None:
    """Bytes of the streamed loads before the first instruction that needs one of them.

    That is any which names a register still to be filled, be it to write it: it has to wait too.
    Instructions count in the order of their addresses, whatever branches there are.
    """
    pending: set[int] = set()
    total = 0
    for instruction in instructions:
        if pending & _registers(instruction):
            break
        if _is_streamed(instruction):
            pending |= _registers(instruction, loaded=True)
            total += width(instruction)
    return total or None


def _registers(instruction: Instruction, *, loaded: bool = False) -> set[int]:
    """Registers that an instruction names; `loaded`: only those that a load fills.

    Of an operand that takes several registers, the first is named and all count in matrix
    instructions, addresses and loads; elsewhere only the first does.
    """
    found: set[int] = set()
    _, spans = MATRIX.get(matrix_shape(instruction), (0, (4, 4, 4, 4)))
    is_load = instruction.mnemonic == "LDG"
    for place, match in enumerate(_REGISTER.finditer(instruction.operands)):
        first, span = int(match[1]), 2 if match[2] else 1
        if class_of(instruction) == "tensor" and place < len(spans):
            span = spans[place]
        if is_load and place == 0:
            span = -(-width(instruction) // 4)
        found.update(range(first, first + span))
        if loaded:
            break
    return found


def _widths(loads: Iterable[Instruction]) -> dict[int, int]:
    return dict(sorted(Counter(map(width, loads)).items(), reverse=True))


def _is_streamed(instruction: Instruction) -> bool:
    return instruction.mnemonic == "LDG" and "NA" in instruction.opcode.split(".")


def _mix(instructions: Iterable[Instruction]) -> dict[str, int]:
    counts = Counter(map(class_of, instructions))
    return {name: counts[name] for name in CLASSES}
