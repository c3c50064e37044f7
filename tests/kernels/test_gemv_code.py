"""What the compiler made of the GEMV, read off its machine code."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import pytest

from machine_code import assert_fixed_order, assert_quick, read_code
from sonata_aot.aot.machine import occupancy
from sonata_aot.aot.sass import Instruction
from sonata_aot.artifacts import Arch, ArtifactSet, Binary, open_artifacts
from sonata_aot.artifacts.cubin import KernelCode
from sonata_aot.kernels import Variant, builtin

if TYPE_CHECKING:
    from tests.conftest import BuildCases

Case = tuple[str, str, Variant]


def cases() -> Iterator[Case]:
    """All of the grid in bf16, where it was meant to run, and one variant for each M in f16."""
    others = set()
    for name in ("gemv", "gemv_any"):
        for variant in builtin()[name].variants:
            arch = "sm90" if variant.get("pdl") else "sm86"
            key = (name, variant["m"])
            if variant["dtype"] == "bf16" or key not in others:
                yield arch, name, dict(variant)
            if variant["dtype"] != "bf16":
                others.add(key)


CASES = list(cases())
MATRIX = {"bf16": "HMMA.16816.F32.BF16", "f16": "HMMA.16816.F32"}


@dataclass(frozen=True)
class Code:
    binary: Binary
    kernel: KernelCode
    instructions: tuple[Instruction, ...]
    loop: tuple[Instruction, ...]
    """The main loop: the innermost that has matrix instructions in it."""

    def choice(self, name: str) -> int:
        """An integer choice, or 0 where the kernel has none of that name."""
        return int(self.binary.variant.get(name, 0))

    @property
    def narrow(self) -> bool:
        """Whether weights are read element by element."""
        return self.binary.kernel == "gemv_any" and not self.choice("wide")

    @property
    def weight_vectors(self) -> int:
        """Vectors of 8 elements of the weights that a thread takes in a step."""
        m, b = self.choice("m"), self.binary.variant["side"] == "b"
        parts = 16 // max(m, 2) if b else 8 // m
        return self.choice("rows") * parts // 8 * self.choice("unroll")

    @property
    def x_vectors(self) -> int:
        return (2 if self.binary.variant["side"] == "b" else 1) * self.choice("unroll")

    def loads(self, instructions: tuple[Instruction, ...]) -> list[Instruction]:
        return [item for item in instructions if item.mnemonic == "LDG"]

    def weight_loads(self, instructions: tuple[Instruction, ...]) -> list[Instruction]:
        """Vectors of weights are read past the L1 (`NA`: no allocation), all else through it."""
        return [item for item in self.loads(instructions) if "NA" in item.opcode.split(".")]

    def before_first_use(self) -> tuple[Instruction, ...]:
        """What precedes the main loop, which has every matrix instruction."""
        return tuple(i for i in self.instructions if i.address < self.loop[0].address)


def case_name(case: Case) -> str:
    arch, kernel, variant = case
    return "-".join(map(str, [arch, kernel, *variant.values()]))


@pytest.fixture(scope="module")
def family(build_cases: BuildCases) -> ArtifactSet:
    return open_artifacts(build_cases("family", CASES))


@pytest.fixture(scope="module", params=CASES, ids=case_name)
def code(request: pytest.FixtureRequest, family: ArtifactSet) -> Code:
    return Code(*read_code(family, request.param, "HMMA"))


def test_nothing_lives_in_local_memory(code: Code) -> None:
    assert [i for i in code.instructions if i.mnemonic in ("LDL", "STL")] == []
    assert (code.kernel.stack_bytes, code.binary.spills) == (0, 0)


def test_every_load_but_the_biass_is_128_bits_wide_where_rows_are_aligned(code: Code) -> None:
    other = {"LD", "LDGSTS", "ULDG", "TEX"}
    assert not other & {item.mnemonic for item in code.instructions}
    weights = code.weight_loads(code.instructions)
    assert {item.opcode.split(".")[-1] for item in weights} == (set() if code.narrow else {"128"})
    assert bool(weights) != code.narrow
    rest = [item.opcode for item in code.loads(code.instructions) if item not in weights]
    if code.binary.kernel == "gemv":
        # A first bias, and in a loop over tiles the next one's.
        assert rest.count("LDG.E.U16") == 1 + code.choice("persistent")
        assert set(rest) == {"LDG.E.U16", "LDG.E.128"}
    else:
        assert set(rest) == {"LDG.E.U16"}


def test_all_weight_loads_of_a_step_are_under_way_before_the_first_use(code: Code) -> None:
    before = code.before_first_use()
    if code.narrow:
        # Loads of weights and x look alike; one more is that of the bias.
        each, loads = 2, len(code.loads(before)) - 8 * code.x_vectors - 1
        assert loads == 8 * code.weight_vectors
    else:
        each, loads = 16, len(code.weight_loads(before))
        assert loads == code.weight_vectors
    assert each * loads >= 64


def test_a_multiprocessor_has_enough_in_flight(code: Code) -> None:
    """An H200 delivers 4.8 TB/s after some 0.8 us: 29 KB for each of 132 multiprocessors."""
    warps = code.choice("warps")
    registers = -(-code.kernel.registers // 8) * 8 * 32 * warps
    shared = code.binary.shared_bytes + code.binary.static_shared_bytes + 1024
    blocks = min(65536 // registers, 48 // warps, 100 * 1024 // shared, 16)
    assert blocks * warps * 32 * 16 * code.weight_vectors >= 29_000


def test_a_multiprocessor_holds_the_warps_of_the_budget(code: Code) -> None:
    held = occupancy(
        Arch.parse(code.binary.arch),
        threads=32 * code.choice("warps"),
        registers=code.kernel.registers,
        shared_bytes=code.binary.shared_bytes,
        static_shared_bytes=code.kernel.static_shared_bytes,
    )
    budget = builtin()[code.binary.kernel].declaration.budget
    assert held.warps >= budget.floors_of(code.binary.variant)["warps"]


def test_the_loop_refills_what_it_uses(code: Code) -> None:
    weights, x = code.weight_vectors, code.x_vectors
    if code.binary.kernel == "gemv":
        expected = weights, weights + x
    elif code.narrow:
        expected = 0, 8 * (weights + x)
    else:
        expected = weights, weights + 8 * x
    assert (len(code.weight_loads(code.loop)), len(code.loads(code.loop))) == expected


def test_products_and_sums_are_the_tensor_cores_in_fp32(code: Code) -> None:
    dtype = str(code.binary.variant["dtype"])
    matrix = [i.opcode for i in code.instructions if i.mnemonic == "HMMA"]
    assert set(matrix) == {MATRIX[dtype]}
    each = 2 if code.binary.variant["side"] == "b" else 1
    assert len(matrix) == each * code.weight_vectors
    assert sum(i.mnemonic == "HMMA" for i in code.loop) == len(matrix)
    halves = {"HMUL2", "HADD2", "HFMA2", "DFMA"}
    assert not halves & {item.mnemonic for item in code.loop}


def test_each_result_is_rounded_once(code: Code) -> None:
    packed = [i.opcode for i in code.instructions if i.mnemonic in ("F2F", "F2FP")]
    assert len(packed) == sum(i.mnemonic == "STG" for i in code.instructions) == 1
    assert ("BF16" in packed[0]) == (code.binary.variant["dtype"] == "bf16")


def test_the_loop_has_no_call_no_barrier_and_no_division(code: Code) -> None:
    assert_quick(code.loop)


def test_one_barrier_and_a_fixed_order(code: Code) -> None:
    assert_fixed_order(code.instructions)


def test_only_weights_are_read_before_the_wait_for_the_kernel_before(code: Code) -> None:
    waits = [i.address for i in code.instructions if i.mnemonic == "ACQBULK"]
    starts = [i.address for i in code.instructions if i.mnemonic == "PREEXIT"]
    pdl = code.choice("pdl")
    assert (bool(waits), len(starts)) == (bool(pdl), pdl)
    if pdl:
        early = [i for i in code.instructions if i.address < waits[-1]]
        loads = code.loads(tuple(early))
        assert loads == code.weight_loads(tuple(early))
        assert len(loads) == code.weight_vectors
        assert not {"STG", "HMMA"} & {i.mnemonic for i in early}
        # Every thread waits: nothing leaves before.
        assert "EXIT" not in {i.mnemonic for i in early}
        assert starts[0] < waits[0]


def test_the_parameter_table_is_as_declared(code: Code) -> None:
    declaration = builtin()[code.binary.kernel].declaration
    assert code.kernel.parameters == declaration.offsets
    names = [parameter.name for parameter in declaration.parameters]
    # As the loader packs it; written out, since a swap of equal sizes shows in no table.
    pointers = {"x": (0, 8), "weight": (8, 8), "bias": (16, 8), "out": (24, 8)}
    sizes = {"n": (32, 4), "k": (36, 4), "x_rows": (40, 4)}
    rest = {
        "gemv": {
            "block_rows": (44, 4),
            "constant": (48, 4),
            "x_stride": (56, 8),
            "weight_stride": (64, 8),
            "out_stride": (72, 8),
            "ahead_skip": (80, 4),
            "ahead_rows": (84, 4),
            "ahead_blocks": (88, 4),
            "upcoming": (96, 8),
            "upcoming_bytes": (104, 4),
        },
        "gemv_any": {"x_stride": (48, 8), "weight_stride": (56, 8), "out_stride": (64, 8)},
    }
    expected = pointers | sizes | rest[code.binary.kernel]
    assert list(dict(zip(names, code.kernel.parameters, strict=True)).items()) == list(
        expected.items()
    )


def test_the_block_is_the_one_declared(code: Code) -> None:
    assert code.kernel.threads == code.binary.block == (32 * code.choice("warps"), 1, 1)


def test_shared_memory_holds_the_partial_sums_and_fits(code: Code) -> None:
    sums = 4 * code.choice("warps") * code.choice("m") * code.choice("rows")
    assert code.binary.shared_bytes >= sums * (1 + code.choice("persistent"))
    assert code.binary.shared_bytes + code.binary.static_shared_bytes <= 99 * 1024


def test_a_thread_has_each_result_of_a_tile(code: Code) -> None:
    m, rows, warps = code.choice("m"), code.choice("rows"), code.choice("warps")
    assert rows * m <= 32 * warps


def test_the_registers_are_within_the_budget(code: Code) -> None:
    budget = builtin()[code.binary.kernel].declaration.budget
    assert code.kernel.registers <= budget.registers
    assert code.kernel.registers == code.binary.registers


def test_the_entry_is_named_after_the_variant(code: Code) -> None:
    variant = code.binary.variant
    prefix = "_".join([code.binary.kernel, *(f"{n}_{v}" for n, v in variant.items())])
    assert re.fullmatch(re.escape(prefix) + r"_\d+", code.binary.entry)
