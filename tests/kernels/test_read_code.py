"""What the compiler made of the read kernel: loads, and nothing that could hold them up."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import pytest

from machine_code import read_code
from sonata_aot.aot.sass import Instruction
from sonata_aot.artifacts import Arch, ArtifactSet, Binary, open_artifacts
from sonata_aot.artifacts.cubin import KernelCode
from sonata_aot.kernels import builtin

if TYPE_CHECKING:
    from tests.conftest import BuildCases

SPEC = builtin()["read"]
CASES = [
    (arch, "read", dict(variant))
    for arch in ("sm86", "sm90")
    for variant in SPEC.variants
    if Arch.parse(arch).number >= SPEC.declaration.least_sm(variant)
]


@dataclass(frozen=True)
class Code:
    binary: Binary
    kernel: KernelCode
    instructions: tuple[Instruction, ...]
    loop: tuple[Instruction, ...]

    def addresses(self, *mnemonics: str) -> list[int]:
        return [i.address for i in self.instructions if i.mnemonic in mnemonics]


@pytest.fixture(scope="module")
def family(build_cases: BuildCases) -> ArtifactSet:
    return open_artifacts(build_cases("read", CASES))


@pytest.fixture(
    scope="module",
    params=CASES,
    ids=lambda case: "-".join(map(str, [case[0], *case[2].values()])),
)
def code(request: pytest.FixtureRequest, family: ArtifactSet) -> Code:
    return Code(*read_code(family, request.param, "LDG"))


def test_it_is_built_on_request() -> None:
    assert not SPEC.default


def test_every_load_is_128_bits_wide_and_past_the_l1(code: Code) -> None:
    loads = [i.opcode for i in code.instructions if i.mnemonic == "LDG"]
    assert set(loads) == {"LDG.E.NA.128"}
    unroll = int(code.binary.variant["unroll"])
    # A first step's, and in the loop those that refill.
    assert len(loads) == 2 * unroll
    assert sum(i.mnemonic == "LDG" for i in code.loop) == unroll
    # Each only where its vector exists.
    assert all(i.predicate for i in code.instructions if i.mnemonic == "LDG")
    assert not code.addresses("LD", "LDGSTS", "ULDG", "TEX", "LDL", "STL", "LDS", "STS")


def test_everything_that_was_read_is_used(code: Code) -> None:
    """A step's four words a vector go into exclusive ors, of two or three numbers."""
    ors = [i for i in code.loop if i.mnemonic == "LOP3" and {"0x96", "0x3c"} & set(words(i))]
    assert len(ors) * 2 >= 4 * int(code.binary.variant["unroll"])


def test_the_one_store_takes_a_condition_that_never_holds(code: Code) -> None:
    (store,) = code.addresses("STG")
    before = [i for i in code.instructions if i.address < store]
    leave = next(i for i in reversed(before) if i.mnemonic in ("EXIT", "BRA"))
    assert leave.predicate is not None
    register = leave.predicate.strip("!@")
    decision = next(i for i in reversed(before) if register in words(i)[:1])
    # `blocks < 0`, beside what the loads decide.
    assert decision.opcode.startswith("ISETP")
    assert {"-0x1", "RZ"} & set(words(decision))
    assert any("0x5eedbeef" in words(i) for i in before if i.mnemonic == "ISETP")


def test_the_loop_only_reads(code: Code) -> None:
    slow = {"CALL", "BAR", "MUFU", "I2F", "F2I", "ATOM", "RED", "STG", "WARPSYNC", "ACQBULK"}
    assert not slow & {i.mnemonic for i in code.loop}
    assert sum(i.mnemonic == "BRA" for i in code.loop) == 1


def test_with_programmatic_launch_the_reads_come_before_the_wait(code: Code) -> None:
    pdl = int(code.binary.variant["pdl"])
    starts, waits = code.addresses("PREEXIT"), code.addresses("ACQBULK")
    assert (len(starts), len(waits)) == (pdl, pdl)
    if pdl:
        assert starts[0] < code.addresses("LDG")[0]
        assert waits[0] > code.addresses("LDG")[-1]
        # Every thread waits, and stores nothing before.
        assert waits[0] < code.addresses("EXIT", "STG")[0]
        assert [i.predicate for i in code.instructions if i.mnemonic == "ACQBULK"] == [None]
    assert SPEC.declaration.is_programmatic(code.binary.variant) == bool(pdl)


def test_registers_leave_room_for_enough_in_flight(code: Code) -> None:
    assert (code.kernel.stack_bytes, code.binary.spills) == (0, 0)
    assert code.kernel.registers <= SPEC.declaration.budget.registers
    warps, unroll = int(code.binary.variant["warps"]), int(code.binary.variant["unroll"])
    blocks = min(65536 // (-(-code.kernel.registers // 8) * 8 * 32 * warps), 48 // warps)
    assert blocks * warps * 32 * 16 * unroll >= 64_000


def test_the_parameter_table_is_as_declared(code: Code) -> None:
    names = [parameter.name for parameter in SPEC.declaration.parameters]
    assert code.kernel.parameters == SPEC.declaration.offsets
    assert dict(zip(names, code.kernel.parameters, strict=True)) == {
        "buffer": (0, 8),
        "sink": (8, 8),
        "vectors": (16, 8),
        "blocks": (24, 4),
    }


def words(instruction: Instruction) -> list[str]:
    return [word.strip() for word in instruction.operands.split(",")]
