"""What `sonata-aot inspect` reads off machine code, by code that is written out here."""

from __future__ import annotations

import dataclasses

import pytest

from machine_code import sass
from sonata_aot.aot.inspect import CLASSES, predict, read
from sonata_aot.aot.machine import Occupancy
from sonata_aot.artifacts import Arch

SM86 = Arch.parse("sm86")


STREAMING = sass(
    "S2R R0, SR_TID.X",
    "CS2R R4, SRZ",
    "@P0 LDG.E.NA.128 R4, [R2.64]",
    "@P0 LDG.E.128 R12, desc[UR4][R24.64+0x10]",
    "LDG.E.NA.128 R8, desc[UR8][R2.64+0x20]",
    "LDG.E.U16 R30, [R26.64]",
    "@!P1 BRA `(.L_x_1)",
    ".L_x_0:",
    "IADD3 R20, R20, 0x1, RZ",
    "HMMA.16816.F32.BF16 R16, R4, R12, R16",
    "HMMA.16816.F32.BF16 R16, R8, R14, R16",
    "LDG.E.NA.128 R4, [R2.64]",
    "LDG.E.NA.128 R8, [R2.64+0x20]",
    "LDG.E.128 R12, [R24.64+0x10]",
    "UIADD3 UR5, UR5, 0x1, URZ",
    "@P1 BRA `(.L_x_0)",
    ".L_x_1:",
    "STS [R3], R16",
    "BAR.SYNC.DEFER_BLOCKING 0x0",
    "LDS R0, [R4.X4]",
    "FADD R0, R0, R16",
    "STG.E.U16 [R4.64], R0",
    "EXIT",
    ".L_x_2:",
    "BRA `(.L_x_2)",
    "NOP",
    "NOP",
)
HELD = Occupancy(warps=24, blocks=3, most_warps=48, limit="registers")


def mix(**counts: int) -> dict[str, int]:
    return {name: counts.get(name, 0) for name in CLASSES}


def test_the_whole_and_its_loop() -> None:
    code = read(STREAMING)
    assert code.instructions == 22  # less the NOPs behind the end
    assert code.mix == mix(global_loads=7, shared=2, tensor=2, fma=1, integer=2, control=5, other=3)
    assert (code.streamed_loads, code.other_loads) == ({16: 4}, {16: 2, 2: 1})
    assert code.in_flight_bytes == 32
    loop = code.loop
    assert loop is not None
    assert loop.instructions == 8
    assert loop.mix == mix(global_loads=3, tensor=2, integer=2, control=1)
    assert (loop.streamed_loads, loop.streamed_bytes) == ({16: 2}, 32)
    assert loop.matrix_fmas == 2 * 2048
    assert loop.issue_slots_per_byte == 8 / (32 * 32)


def test_the_prediction() -> None:
    found = predict(SM86, read(STREAMING), HELD)
    assert found is not None
    assert found.rates == pytest.approx(
        {
            "dram": 600e9,
            "issue": 80 * 4 * 1.71e9 / 8 * 1024,
            "tensor": 80 * 1.71e9 / (2 * 8) * 1024,
            "in_flight": 80 * 24 * 32 * 32 / 0.6e-6,
        }
    )
    assert found.bound == "dram"
    assert found.margin == pytest.approx(80 * 24 * 32 * 32 / 0.6e-6 / 600e9)
    assert predict(Arch.parse("sm80"), read(STREAMING), HELD) is None


def test_each_resource_can_be_the_bound() -> None:
    code, loop = read(STREAMING), read(STREAMING).loop
    assert loop is not None
    slow = dataclasses.replace(code, loop=dataclasses.replace(loop, instructions=8000))
    busy = dataclasses.replace(code, loop=dataclasses.replace(loop, matrix_fmas=10**6))
    few = dataclasses.replace(HELD, warps=1)
    for changed, held, bound in (
        (slow, HELD, "issue"),
        (busy, HELD, "tensor"),
        (code, few, "in_flight"),
    ):
        found = predict(SM86, changed, held)
        assert found is not None
        assert found.bound == bound
        assert found.margin == found.rates[found.bound] / 600e9 < 1


@pytest.mark.parametrize(
    ("user", "is_use"),
    [
        ("FADD R0, R4, R1", True),
        ("FADD R0, R1, R7.reuse", True),
        ("MOV R5, RZ", True),  # has to wait to write it, too
        ("FADD R0, R3, R8", False),
        ("FADD R0, R40, R1", False),
        ("UIADD3 UR5, UR4, 0x1, URZ", False),
        ("STG.E [R6.64], R0", True),
        ("STG.E [R3.64], R0", True),  # an address is two registers
        ("STG.E [R2.64], R0", False),
        ("HMMA.16816.F32 R20, R1, R24, R20", True),  # operand A is four
        ("HMMA.16816.F32 R20, R24, R3, R20", True),  # B is two
        ("HMMA.16816.F32 R20, R24, R2, R20", False),
        ("HMMA.16816.F32 R20, R24, R28, R1", True),  # and C four
        ("LDG.E.128 R1, [R20.64]", True),
        ("LDG.E.64 R2, [R20.64]", False),
        ("LDG.E R12, [R20.64]", False),
    ],
)
def test_what_counts_as_the_first_use(user: str, is_use: bool) -> None:
    load, later = "LDG.E.NA.128 R4, [R2.64]", "LDG.E.NA.64 R12, [R2.64+0x10]"
    assert read(sass(load, user, later, "EXIT")).in_flight_bytes == (16 if is_use else 24)


@pytest.mark.parametrize(
    ("opcode", "width"),
    [
        ("LDG.E.U8", 1),
        ("LDG.E.S16.CONSTANT", 2),
        ("LDG.E", 4),
        ("LDG.E.64.CONSTANT", 8),
        ("LDG.E.LTC128B.64", 8),
        ("LDG.E.128.CONSTANT", 16),
        ("LDG.E.ENL2.256", 32),
        ("LDGSTS.E.BYPASS.128", 16),
    ],
)
def test_the_width_of_a_load(opcode: str, width: int) -> None:
    assert read(sass(f"{opcode} R4, [R2.64]", "EXIT")).other_loads == {width: 1}


@pytest.mark.parametrize(
    ("name", "opcodes"),
    [
        ("tensor", "HMMA.16816.F32 IMMA.16832.S8.S8 HGMMA.64x8x16.F32 UTCHMMA DMMA.884"),
        ("fma", "FFMA FMUL FADD.FTZ HFMA2.MMA HADD2.F32 DFMA"),
        ("integer", "IMAD.MOV.U32 IADD3.X LOP3.LUT UISETP.LT.U32.AND ULOP3.LUT VIADD USHF.L"),
        ("shared", "LDS.128 STS LDSM.16.M88.4 ATOMS.ADD"),
        ("control", "BRA EXIT BSSY WARPSYNC BAR.SYNC ACQBULK PREEXIT"),
        ("other", "S2R CS2R MOV F2FP.BF16.PACK_AB SHFL.BFLY STG.E.U16 MUFU.EX2 ULDC.64 R2UR"),
    ],
)
def test_the_class_of_an_instruction(name: str, opcodes: str) -> None:
    lines = [f"{opcode} R0, R1" for opcode in opcodes.split()]
    assert read(sass(*lines)).mix == mix(**{name: len(lines)})


def test_the_main_loop_is_the_innermost_that_streams_most() -> None:
    loads = ["LDG.E.NA.128 R4, [R2.64]"] * 2
    code = read(
        sass(
            *(".L_x_0:", "MOV R0, RZ"),  # over tiles
            *(".L_x_1:", *loads, "@P0 BRA `(.L_x_1)"),
            *(".L_x_2:", loads[0], "@P0 BRA `(.L_x_2)"),  # what is left over
            *(".L_x_3:", *["HMMA.16816.F32 R0, R4, R8, R0"] * 9, "@P0 BRA `(.L_x_3)"),
            *("@P1 BRA `(.L_x_0)", "EXIT"),
        )
    )
    assert code.loop is not None
    assert (code.loop.instructions, code.loop.streamed_bytes) == (3, 32)


def test_a_loop_ends_with_the_last_branch_to_its_start() -> None:
    load = "LDG.E.NA.128 R4, [R2.64]"
    back = "@P0 BRA `(.L_x_0)"
    code = read(sass(".L_x_0:", load, back, load, "MOV R0, RZ", back, "EXIT"))
    assert code.loop is not None
    assert (code.loop.instructions, code.loop.streamed_bytes) == (5, 32)


def test_code_that_streams_nothing_or_has_no_loop() -> None:
    end = ["STG.E.NA.128 [R2.64], R8", "EXIT", ".L_x_0:", "BRA `(.L_x_0)"]
    straight = read(sass("LDG.E.NA.128 R4, [R2.64]", "FADD R0, R4, R4", *end))
    assert straight.streamed_loads == {16: 1}
    assert (straight.loop, straight.in_flight_bytes) == (None, 16)
    plain = read(STREAMING.replace(".NA", ""))
    assert (plain.streamed_loads, plain.in_flight_bytes) == ({}, None)
    assert plain.loop is not None
    assert (plain.loop.streamed_bytes, plain.loop.issue_slots_per_byte) == (0, None)
    empty = read("")
    assert (empty.instructions, empty.loop, empty.in_flight_bytes) == (0, None, None)
    assert [predict(SM86, code, HELD) for code in (straight, plain, empty)] == [None] * 3


@pytest.mark.parametrize(
    "opcode", ["IMMA.16816.S8.S8", "HMMA.1688.F32.TF32", "HMMA.884.F32.F32", "HGMMA.64x8x16"]
)
def test_unknown_matrix_instructions_allow_no_prediction(opcode: str) -> None:
    code = read(STREAMING.replace("HMMA.16816.F32.BF16", opcode))
    assert code.loop is not None
    assert (code.loop.mix["tensor"], code.loop.matrix_fmas) == (2, None)
    assert predict(SM86, code, HELD) is None
