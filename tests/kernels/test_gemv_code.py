"""What the compiler made of the GEMV, read off its machine code."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

import pytest

from machine_code import assert_fixed_order, assert_quick, loops
from sonata_aot.aot.sass import Instruction, parse
from sonata_aot.aot.toolchain import run_tool
from sonata_aot.artifacts import Binary, open_artifacts
from sonata_aot.artifacts.cubin import KernelCode, read_cubin
from sonata_aot.kernels import builtin

SPEC = builtin()["gemv"]
CASES = [(arch, dict(variant)) for arch in ("sm86", "sm90") for variant in SPEC.variants]


@dataclass(frozen=True)
class Code:
    binary: Binary
    kernel: KernelCode
    instructions: tuple[Instruction, ...]
    loop: tuple[Instruction, ...]
    """The main loop: what a branch backwards encloses and what has multiply-adds in it."""

    def choice(self, name: str) -> int:
        return int(self.binary.variant[name])

    def loads(self, instructions: tuple[Instruction, ...]) -> list[Instruction]:
        return [item for item in instructions if item.mnemonic == "LDG"]

    def weight_loads(self, instructions: tuple[Instruction, ...]) -> list[Instruction]:
        """Weights are read past the L1 (`NA`: no allocation), x through it."""
        return [item for item in self.loads(instructions) if "NA" in item.opcode.split(".")]


@pytest.fixture(scope="module", params=CASES, ids=lambda case: f"{case[0]}-m{case[1]['m']}")
def code(request: pytest.FixtureRequest, built: Path) -> Code:
    arch, variant = request.param
    artifacts = open_artifacts(built)
    (binary,) = (
        b
        for b in artifacts.manifest.binaries
        if (b.kernel, b.arch, b.variant) == ("gemv", arch, variant)
    )
    (kernel,) = read_cubin(artifacts.read(binary.cubin)).kernels
    text = run_tool("nvdisasm", "-c", str(artifacts.path(binary.cubin)))
    instructions = parse(text)
    bodies = [
        tuple(i for i in instructions if start <= i.address <= end) for start, end in loops(text)
    ]
    (loop,) = (body for body in bodies if any(i.mnemonic == "FFMA" for i in body))
    return Code(binary, kernel, instructions, loop)


def test_nothing_lives_in_local_memory(code: Code) -> None:
    assert [i for i in code.instructions if i.mnemonic in ("LDL", "STL")] == []
    assert (code.kernel.stack_bytes, code.binary.spills) == (0, 0)


def test_every_load_is_128_bits_wide(code: Code) -> None:
    loads = code.loads(code.instructions)
    assert {item.opcode.split(".")[-1] for item in loads} == {"128"}
    other = {"LD", "LDGSTS", "ULDG", "TEX"}
    assert not other & {item.mnemonic for item in code.instructions}


def test_all_weight_loads_of_a_step_are_under_way_before_the_first_use(code: Code) -> None:
    step = code.choice("rows") * code.choice("unroll")
    first = next(i for i in code.instructions if i.mnemonic == "FFMA")
    before = tuple(i for i in code.instructions if i.address < first.address)
    assert len(code.weight_loads(before)) >= step


def test_the_loop_refills_what_it_uses(code: Code) -> None:
    rows, unroll, m = code.choice("rows"), code.choice("unroll"), code.choice("m")
    assert len(code.weight_loads(code.loop)) == rows * unroll
    # Those of x come once a step, not once a row.
    assert len(code.loads(code.loop)) == rows * unroll + m * unroll


def test_the_sums_are_fp32(code: Code) -> None:
    rows, unroll, m = code.choice("rows"), code.choice("unroll"), code.choice("m")
    assert sum(i.mnemonic == "FFMA" for i in code.loop) == 8 * rows * unroll * m
    halves = {"HFMA2", "HMUL2", "HADD2", "HMMA", "DFMA"}
    assert not halves & {item.mnemonic for item in code.loop}
    assert any(i.opcode.startswith("F2F") and "BF16" in i.opcode for i in code.instructions)


def test_the_loop_has_no_call_no_barrier_and_no_division(code: Code) -> None:
    assert_quick(code.loop)


def test_one_barrier_and_a_fixed_order(code: Code) -> None:
    assert_fixed_order(code.instructions)


def test_the_parameter_table_is_as_declared(code: Code) -> None:
    assert code.kernel.parameters == SPEC.declaration.offsets
    names = [parameter.name for parameter in SPEC.declaration.parameters]
    # As the loader packs it; written out, since a swap of equal sizes shows in no table.
    assert dict(zip(names, code.kernel.parameters, strict=True)) == {
        "x": (0, 8),
        "weight": (8, 8),
        "out": (16, 8),
        "n": (24, 4),
        "k": (28, 4),
        "x_stride": (32, 8),
        "weight_stride": (40, 8),
        "out_stride": (48, 8),
    }


def test_the_block_is_the_one_declared(code: Code) -> None:
    assert code.kernel.threads == code.binary.block == (32 * code.choice("warps"), 1, 1)


def test_shared_memory_holds_the_partial_sums_and_fits(code: Code) -> None:
    sums = 4 * code.choice("warps") * code.choice("rows") * code.choice("m")
    uses = any(i.mnemonic in ("LDS", "STS") for i in code.instructions)
    assert code.binary.shared_bytes >= (sums if uses else 0)
    assert code.binary.shared_bytes + code.binary.static_shared_bytes <= 99 * 1024


def test_four_warps_fit_each_quarter_of_a_multiprocessor(code: Code) -> None:
    # 64 K registers, four quarters: 16 warps in all need at most 128 registers a thread.
    assert code.kernel.registers <= 128
    assert code.kernel.registers == code.binary.registers


def test_the_entry_is_named_after_the_variant(code: Code) -> None:
    prefix = "_".join(["gemv", *(f"{n}_{v}" for n, v in code.binary.variant.items())])
    assert re.fullmatch(re.escape(prefix) + r"_\d+", code.binary.entry)
