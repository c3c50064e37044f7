"""What tests of machine code share."""

from __future__ import annotations

from sonata_aot.aot.sass import Instruction, loops, parse

__all__ = ["assert_fixed_order", "assert_quick", "innermost", "loops"]


def innermost(text: str, mnemonic: str) -> tuple[Instruction, ...]:
    """The shortest loop that has an instruction of this kind in it."""
    instructions = parse(text)
    bodies = [
        tuple(i for i in instructions if start <= i.address <= end) for start, end in loops(text)
    ]
    return min((body for body in bodies if any(i.mnemonic == mnemonic for i in body)), key=len)


def assert_quick(loop: tuple[Instruction, ...]) -> None:
    """A main loop has no call, no barrier, no division, no store, and one branch."""
    slow = {"CALL", "BAR", "MUFU", "I2F", "F2I", "ATOM", "ATOMG", "RED", "STG", "WARPSYNC"}
    assert not slow & {item.opcode.split(".")[0] for item in loop}
    assert sum(i.mnemonic == "BRA" for i in loop) == 1


def assert_fixed_order(instructions: tuple[Instruction, ...]) -> None:
    """A kernel sums without atomics, behind one barrier at most."""
    assert sum(i.mnemonic == "BAR" for i in instructions) <= 1
    assert not {"ATOM", "ATOMG", "RED", "ATOMS"} & {i.mnemonic for i in instructions}
