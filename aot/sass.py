"""Reads the disassembly of a cubin: which instructions a kernel consists of."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from .toolchain import run_tool

# "        /*0120*/                   @!P0 LDG.E.128 R4, [R2.64] ;"
_INSTRUCTION = re.compile(
    r"^\s*/\*(?P<address>[0-9a-f]{4,})\*/\s+(?:@(?P<predicate>!?U?P[0-9T]+)\s+)?"
    r"(?P<opcode>[A-Z][A-Z0-9_]*(?:\.[A-Z0-9_]+)*)\b(?P<operands>[^;]*);",
    re.M,
)
_LABEL = re.compile(r"\s*(\.L_x_\d+):\s*")
_TARGET = re.compile(r"\.L_x_\d+")
# Branches through a table, and such as all threads take alike.
_INDIRECT = ("BRX", "BRXU")
# Loads and stores of local memory, where spilled registers and indexed arrays live.
_LOCAL = ("LDL", "STL")


@dataclass(frozen=True)
class Instruction:
    """One instruction: `LDG.E.128` is its opcode, `LDG` its mnemonic."""

    address: int
    predicate: str | None
    opcode: str
    operands: str

    @property
    def mnemonic(self) -> str:
        """The opcode without its modifiers."""
        return self.opcode.partition(".")[0]

    @property
    def falls_through(self) -> bool:
        """Whether the next instruction may follow: all but branches and exits in any case."""
        if self.predicate or self.mnemonic not in ("BRA", *_INDIRECT, "EXIT"):
            return True
        # Before its target a branch may name a predicate, too.
        return self.mnemonic == "BRA" and not self.operands.startswith("`")


def disassembly(cubin: Path) -> str:
    """The code of a cubin in nvdisasm's own words.

    Raises:
        MissingDependency: nvdisasm is not installed.
        BuildError: nvdisasm refused the file.
    """
    # Without its data-flow analysis, which takes a quarter of the time, and of what is read here
    # adds only where branches through a table lead.
    text = run_tool("nvdisasm", "-c", "-ndf", str(cubin))
    return run_tool("nvdisasm", "-c", str(cubin)) if re.search(r"\bBRXU?\b", text) else text


def parse(text: str) -> tuple[Instruction, ...]:
    """The instructions in nvdisasm's output."""
    return tuple(
        Instruction(
            int(match["address"], 16),
            match["predicate"],
            match["opcode"],
            match["operands"].strip(),
        )
        for match in _INSTRUCTION.finditer(text)
    )


def branches(text: str) -> dict[int, tuple[int, ...]]:
    """Where each branch in nvdisasm's output may lead, by its address: through a table, several."""
    labels: dict[str, int] = {}
    waiting: list[str] = []
    found: dict[int, list[str]] = {}
    for line in text.splitlines():
        if label := _LABEL.fullmatch(line):
            waiting.append(label[1])
        for instruction in parse(line):
            labels.update(dict.fromkeys(waiting, instruction.address))
            waiting.clear()
            if instruction.mnemonic in ("BRA", *_INDIRECT):
                found[instruction.address] = _TARGET.findall(instruction.operands)
    places = {
        address: tuple(labels[target] for target in targets if target in labels)
        for address, targets in found.items()
    }
    return {address: targets for address, targets in places.items() if targets}


def loops(text: str) -> list[tuple[int, int]]:
    """Address of the first instruction and of the branch back, of each loop in nvdisasm's output.

    An instruction that branches to itself, as compilers put behind a kernel's end, is none.
    """
    return [
        (start, end) for end, starts in branches(text).items() for start in starts if start < end
    ]


def spills(instructions: tuple[Instruction, ...]) -> int:
    """How many instructions touch local memory."""
    return sum(instruction.mnemonic in _LOCAL for instruction in instructions)
