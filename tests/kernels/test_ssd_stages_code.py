"""What the compiler made of the stages, read off their machine code."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING

import pytest

from sonata_aot.aot.machine import occupancy
from sonata_aot.aot.sass import Instruction, disassembly, parse
from sonata_aot.artifacts import Arch, ArtifactSet, Binary, open_artifacts
from sonata_aot.artifacts.cubin import KernelCode, read_cubin
from sonata_aot.kernels import builtin
from sonata_aot.kernels.models import DSTATES, HEADDIMS, MODELS
from stage_machine import Case, cases

if TYPE_CHECKING:
    from tests.conftest import BuildCases

STAGES = ("chunk_cumsum", "bmm_chunk", "chunk_state", "state_passing", "chunk_scan")
SPECS = {stage: builtin()[f"ssd_{stage}"] for stage in STAGES}
ON_TENSOR_CORES = ("bmm_chunk", "chunk_state", "chunk_scan")
# What models have in bf16, and one size in the other dtype.
SIZES = [
    *({"dtype": "bf16", "headdim": pair[0], "dstate": pair[1]} for pair in MODELS),
    {"dtype": "f16", "headdim": 64, "dstate": 128},
]
CASES = [(arch, *case[1:]) for arch in ("sm86", "sm90") for case in cases(*SIZES)]
# Blocks that a multiprocessor should hold for the size of most models, by architecture.
BLOCKS = {
    ("chunk_cumsum", "sm86"): 2,
    ("chunk_cumsum", "sm90"): 2,
    ("bmm_chunk", "sm86"): 2,
    ("bmm_chunk", "sm90"): 6,
    ("chunk_state", "sm86"): 1,
    ("chunk_state", "sm90"): 4,
    ("state_passing", "sm86"): 4,
    ("state_passing", "sm90"): 4,
    ("chunk_scan", "sm86"): 2,
    ("chunk_scan", "sm90"): 4,
}


@dataclass(frozen=True)
class Code:
    binary: Binary
    kernel: KernelCode
    instructions: tuple[Instruction, ...]

    @property
    def stage(self) -> str:
        return self.binary.kernel.removeprefix("ssd_")

    def count(self, mnemonic: str) -> Counter[str]:
        """How often each opcode of a mnemonic stands there."""
        return Counter(i.opcode for i in self.instructions if i.mnemonic == mnemonic)


@pytest.fixture(scope="module")
def artifacts(build_cases: BuildCases) -> ArtifactSet:
    return open_artifacts(build_cases("stages-code", CASES))


def case_name(case: Case) -> str:
    arch, kernel, variant = case
    return "-".join(map(str, [arch, kernel, *variant.values()]))


@pytest.fixture(scope="module", params=CASES, ids=case_name)
def code(request: pytest.FixtureRequest, artifacts: ArtifactSet) -> Code:
    case = request.param
    (binary,) = (b for b in artifacts.manifest.binaries if (b.arch, b.kernel, b.variant) == case)
    (kernel,) = read_cubin(artifacts.read(binary.cubin)).kernels
    return Code(binary, kernel, parse(disassembly(artifacts.path(binary.cubin))))


def test_nothing_lives_in_local_memory(code: Code) -> None:
    assert not code.count("LDL") + code.count("STL")
    assert (code.kernel.stack_bytes, code.binary.spills) == (0, 0)


def test_a_block_can_be_launched(code: Code) -> None:
    threads = code.binary.block[0]
    assert code.kernel.threads == code.binary.block == (threads, 1, 1)
    assert threads * code.kernel.registers <= 65536
    assert code.binary.shared_bytes + code.kernel.static_shared_bytes <= 99 * 1024


def test_a_multiprocessor_holds_several_blocks(code: Code) -> None:
    sizes = (code.binary.variant.get("headdim", 64), code.binary.variant.get("dstate", 128))
    if sizes == (64, 128):
        held = occupancy(
            Arch.parse(code.binary.arch),
            threads=code.binary.block[0],
            registers=code.kernel.registers,
            shared_bytes=code.binary.shared_bytes,
            static_shared_bytes=code.kernel.static_shared_bytes,
        )
        assert held.blocks >= BLOCKS[code.stage, code.binary.arch]


def test_products_are_the_tensor_cores_in_fp32(code: Code) -> None:
    found = set(code.count("HMMA"))
    dtype = code.binary.variant.get("dtype")
    matrix = {"bf16": {"HMMA.16816.F32.BF16"}, "f16": {"HMMA.16816.F32"}}
    assert found == (matrix[str(dtype)] if code.stage in ON_TENSOR_CORES else set())


def test_products_are_not_predicated(code: Code) -> None:
    """A predicated product takes its time whether it counts or not."""
    assert not [i for i in code.instructions if i.mnemonic == "HMMA" and i.predicate]


def test_tiles_come_by_asynchronous_copies_of_16_bytes(code: Code) -> None:
    copies = code.count("LDGSTS")
    wide = sum(count for opcode, count in copies.items() if opcode.endswith(".128"))
    # What has 4 bytes are decays, step sizes and sequences.
    assert bool(wide) == (code.stage in ON_TENSOR_CORES)
    assert wide >= 2 * (sum(copies.values()) - wide)


def test_sums_have_a_fixed_order(code: Code) -> None:
    assert not {"ATOM", "ATOMG", "ATOMS", "RED"} & {i.mnemonic for i in code.instructions}


def test_the_parameter_table_is_as_declared(code: Code) -> None:
    assert code.kernel.parameters == builtin()[code.binary.kernel].declaration.offsets


class TestVariants:
    @pytest.mark.parametrize("stage", STAGES)
    def test_there_is_one_for_every_size(self, stage: str) -> None:
        spec = SPECS[stage]
        names = spec.declaration.selectors
        values = {"dtype": ("bf16", "f16"), "headdim": HEADDIMS, "dstate": DSTATES}
        expected = {()}
        for name in names:
            expected = {(*key, value) for key in expected for value in values[name]}
        assert {tuple(v[name] for name in names) for v in spec.variants} == expected

    @pytest.mark.parametrize("stage", STAGES)
    def test_those_of_published_models_ship(self, stage: str) -> None:
        spec = SPECS[stage]
        assert spec.default
        shipped = spec.variants if spec.shipped is None else spec.shipped
        names = spec.declaration.selectors
        found = {tuple(v[name] for name in names) for v in shipped}
        expected = set()
        for dtype in ("bf16", "f16"):
            for headdim, dstate in MODELS:
                sizes = {"dtype": dtype, "headdim": headdim, "dstate": dstate}
                expected.add(tuple(sizes[name] for name in names))
        assert found == expected

    def test_all_named_models_are_there(self) -> None:
        named = " ".join(name for names in MODELS.values() for name in names)
        for family in (
            "Mamba2",
            "Zonos",
            "Bamba",
            "Zamba2",
            "Nemotron-H",
            "Falcon-H1",
            "Codestral",
        ):
            assert family in named
        assert {headdim for headdim, _ in MODELS} <= set(HEADDIMS)
        assert {dstate for _, dstate in MODELS} <= set(DSTATES)
