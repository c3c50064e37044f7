"""What single instructions do: their class, how many bytes they move, what they multiply."""

from __future__ import annotations

from collections.abc import Iterable

from .machine import WARP
from .sass import Instruction

_GLOBAL_LOADS = {"LDG", "LD", "LDGSTS", "UBLKCP", "UTMALDG"}
_SHARED = {"LDS", "STS", "LDSM", "STSM", "ATOMS"}
_FMA = {"FFMA", "FADD", "FMUL", "HFMA2", "HADD2", "HMUL2", "DFMA", "DADD", "DMUL", "FFMA2"}
_INTEGER = {
    *("IADD", "IADD3", "IMAD", "IMUL", "IABS", "IMNMX", "ISETP", "ISCADD", "LEA", "LOP", "LOP3"),
    *("SHF", "SHL", "SHR", "PRMT", "SEL", "POPC", "FLO", "BMSK", "SGXT", "BREV", "PLOP3"),
    *("VIADD", "VIMNMX", "VIMNMX3", "VIADDMNMX"),
}
_CONTROL = {
    *("BRA", "BRX", "JMP", "JMX", "CALL", "RET", "EXIT", "BSSY", "BSYNC", "BREAK", "BMOV", "BAR"),
    *("WARPSYNC", "DEPBAR", "LDGDEPBAR", "MEMBAR", "SYNCS", "NANOSLEEP", "YIELD", "NOP", "KILL"),
    *("ERRBAR", "BPT", "ACQBULK", "PREEXIT"),
}
# Classes of the instruction mix, in the order shown. `other` are moves, conversions, stores, ...
CLASSES = ("global_loads", "shared", "tensor", "fma", "integer", "control", "other")

_WIDTHS = {"256": 32, "128": 16, "64": 8, "U16": 2, "S16": 2, "U8": 1, "S8": 1}
# Multiply-adds of a matrix instruction of 16-bit operands, and the registers of its operands.
MATRIX = {"16816": (16 * 8 * 16, (4, 4, 2, 4)), "1688": (16 * 8 * 8, (4, 2, 1, 4))}


def class_of(instruction: Instruction) -> str:
    """Which of `CLASSES` it counts as."""
    name = instruction.mnemonic
    if name in _GLOBAL_LOADS:
        return "global_loads"
    if name.endswith("MMA"):
        return "tensor"
    for label, names in (("shared", _SHARED), ("fma", _FMA), ("control", _CONTROL)):
        if name in names:
            return label
    # The uniform data path has the same instructions under a U.
    return "integer" if name in _INTEGER or name.removeprefix("U") in _INTEGER else "other"


def matrix_shape(instruction: Instruction) -> str:
    """A matrix instruction's sizes, as its opcode has them."""
    parts = instruction.opcode.split(".")
    return parts[1] if len(parts) > 1 else ""


def matrix_fmas(body: Iterable[Instruction]) -> int | None:
    """Multiply-adds of a warp on tensor cores; None if some are not of 16-bit operands."""
    total = 0
    for instruction in body:
        if class_of(instruction) == "tensor":
            shape = matrix_shape(instruction)
            if (
                instruction.mnemonic != "HMMA"
                or shape not in MATRIX
                or "TF32" in instruction.opcode
            ):
                return None
            total += MATRIX[shape][0]
    return total


def width(access: Instruction) -> int:
    """Bytes that a load or store takes for a thread."""
    return next((_WIDTHS[part] for part in access.opcode.split(".") if part in _WIDTHS), 4)


def shared_bytes(instruction: Instruction) -> int:
    """Bytes that shared memory moves for a warp, as if no two lanes asked for the same.

    Shuffles pass through it too.
    """
    name = instruction.mnemonic
    if name in ("LDSM", "STSM"):
        # Matrices of 8 rows of 16 bytes.
        matrices = instruction.opcode.rpartition(".")[2]
        return 128 * (int(matrices) if matrices in ("2", "4") else 1)
    if name in _SHARED or name in ("LDGSTS", "SHFL"):
        return WARP * width(instruction)
    return 0


def global_bytes(instruction: Instruction) -> int:
    """Bytes of global memory that a warp loads or stores."""
    moves = class_of(instruction) == "global_loads" or instruction.mnemonic in ("STG", "ST")
    return WARP * width(instruction) if moves else 0
