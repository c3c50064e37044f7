"""What tests of machine code share."""

from __future__ import annotations

from sonata_aot.aot.sass import Instruction, disassembly, loops, parse
from sonata_aot.artifacts import ArtifactSet, Binary
from sonata_aot.artifacts.cubin import KernelCode, read_cubin
from sonata_aot.artifacts.declaration import Variant

__all__ = ["assert_fixed_order", "assert_quick", "innermost", "loops", "read_code", "sass"]

# Arch, kernel, variant.
Case = tuple[str, str, Variant]


def sass(*lines: str) -> str:
    """As nvdisasm writes it; a line that ends in a colon is a label."""
    text, address = [".text.kernel:"], 0
    for line in lines:
        text.append(line if line.endswith(":") else f"        /*{address:04x}*/   {line} ;")
        address += 0 if line.endswith(":") else 16
    return "\n".join(text) + "\n"


def read_code(
    artifacts: ArtifactSet, case: Case, mnemonic: str
) -> tuple[Binary, KernelCode, tuple[Instruction, ...], tuple[Instruction, ...]]:
    """The binary of a case, its code, instructions, and innermost loop that has a `mnemonic`."""
    (binary,) = (b for b in artifacts.manifest.binaries if (b.arch, b.kernel, b.variant) == case)
    (kernel,) = read_cubin(artifacts.read(binary.cubin)).kernels
    text = disassembly(artifacts.path(binary.cubin))
    return binary, kernel, parse(text), innermost(text, mnemonic)


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
