"""What the compiler made of the one-pass scan's kernels, read off their machine code."""

from __future__ import annotations

import functools
import re
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import pytest

from sonata_aot.aot.inspect import Prediction, predict, read
from sonata_aot.aot.machine import Occupancy, occupancy
from sonata_aot.aot.plan import jobs
from sonata_aot.aot.sass import Instruction, disassembly, parse
from sonata_aot.aot.tiles import Tile, per_tile
from sonata_aot.artifacts import Arch, ArtifactSet, Binary, open_artifacts
from sonata_aot.artifacts.cubin import KernelCode, read_cubin
from sonata_aot.kernels import Variant, builtin
from sonata_aot.kernels.ssd.shape import OWNERS, STATE_WARPS, Shape

Case = tuple[str, str, Variant]

SPECS = {name: builtin()[name] for name in ("ssd_copy", "ssd_pass", "ssd_prepare", "ssd_scan")}
# All that ship in bf16, and one size in the other dtype; `inspect --check` is run on the rest too.
CASES: list[Case] = [
    (job.arch.name, job.spec.name, dict(job.variant))
    for job in jobs(SPECS.values(), [Arch.parse("sm86"), Arch.parse("sm90")])
    if job.variant.get("dtype") != "f16"
    or (job.variant.get("headdim", 64), job.variant["dstate"]) == (64, 128)
]
SCANS = [case for case in CASES if case[1] == "ssd_scan"]
MATRIX = {"bf16": {"HMMA.16816.F32.BF16"}, "f16": {"HMMA.16816.F32"}}


def case_name(case: Case) -> str:
    arch, kernel, variant = case
    return "-".join(map(str, [arch, kernel, *variant.values()]))


@dataclass(frozen=True)
class Code:
    binary: Binary
    kernel: KernelCode
    instructions: tuple[Instruction, ...]
    held: Occupancy
    tile: Tile | None
    prediction: Prediction | None

    @property
    def name(self) -> str:
        return self.binary.kernel

    def choice(self, name: str) -> int:
        """An integer choice, or 0 where the kernel has none of that name."""
        return int(self.binary.variant.get(name, 0))

    def count(self, *mnemonics: str) -> Counter[str]:
        """How often each opcode of some mnemonics stands there."""
        return Counter(i.opcode for i in self.instructions if i.mnemonic in mnemonics)

    @property
    def shape(self) -> Shape:
        names = ("headdim", "dstate", "width", "tile", "outputs")
        return Shape(*(self.choice(name) for name in names))


@functools.cache
def opened(directory: Path) -> ArtifactSet:
    return open_artifacts(directory)


@pytest.fixture(scope="module", params=CASES, ids=case_name)
def code(request: pytest.FixtureRequest, built: Path) -> Code:
    artifacts, case = opened(built), request.param
    (binary,) = (b for b in artifacts.manifest.binaries if (b.arch, b.kernel, b.variant) == case)
    (kernel,) = read_cubin(artifacts.read(binary.cubin)).kernels
    text, arch = disassembly(artifacts.path(binary.cubin)), case[0]
    held = occupancy(
        Arch.parse(arch),
        threads=binary.block[0],
        registers=kernel.registers,
        shared_bytes=binary.shared_bytes,
        static_shared_bytes=kernel.static_shared_bytes,
    )
    floors = SPECS[binary.kernel].declaration.budget.floors_of(binary.variant)
    tile = per_tile(text, floors["tile_warps"], floors["tile_bytes"])
    prediction = predict(Arch.parse(arch), read(text), held, tile)
    return Code(binary, kernel, parse(text), held, tile, prediction)


def test_nothing_lives_in_local_memory(code: Code) -> None:
    assert not code.count("LDL", "STL")
    assert (code.kernel.stack_bytes, code.binary.spills) == (0, 0)


def test_a_block_can_be_launched(code: Code) -> None:
    """With its registers, and within the 99 KB of shared memory that a block has on sm86."""
    threads, _, _ = code.kernel.threads or (0, 0, 0)
    assert code.kernel.threads == code.binary.block
    assert threads * -(-code.kernel.registers // 8) * 8 <= 65536
    assert code.held.blocks >= 1
    assert code.binary.shared_bytes + code.kernel.static_shared_bytes <= 99 * 1024
    if code.name == "ssd_scan":
        assert code.binary.shared_bytes == code.shape.shared_bytes
        assert threads == code.shape.threads


def test_budgets_are_kept(code: Code) -> None:
    budget = SPECS[code.name].declaration.budget
    assert code.kernel.registers <= budget.registers < 255
    assert code.held.warps >= budget.floors_of(code.binary.variant)["warps"] >= 4


def test_products_are_the_tensor_cores_in_fp32(code: Code) -> None:
    dtype = str(code.binary.variant.get("dtype"))
    has_products = code.name in ("ssd_prepare", "ssd_scan")
    assert set(code.count("HMMA")) == (MATRIX[dtype] if has_products else set())
    # As compilers write them, HADD2.F32 is a conversion of f16 and HFMA2 a constant.
    assert not set(code.count("HADD2", "HMUL2", "DFMA", "DADD", "DMUL")) - {"HADD2.F32"}


def test_products_are_not_predicated(code: Code) -> None:
    """A predicated product takes its time whether it counts or not."""
    assert not [i for i in code.instructions if i.mnemonic == "HMMA" and i.predicate]


def test_tiles_come_by_asynchronous_copies_of_16_bytes(code: Code) -> None:
    """Past the L1, and operands out of shared memory by whole matrices."""
    copies = code.count("LDGSTS")
    assert bool(copies) == (code.name == "ssd_scan")
    assert all(opcode.endswith(".128") and "BYPASS" in opcode for opcode in copies)
    assert bool(code.count("LDSM")) == (code.name == "ssd_scan")
    assert all(".MT88" in opcode for opcode in code.count("LDSM"))


def test_rows_of_b_and_c_are_loaded_16_bytes_at_a_time(code: Code) -> None:
    loads = code.count("LDG")
    if code.name in ("ssd_prepare", "ssd_scan"):
        # Loads that are narrower are those of scalars whose dtype a launch decides.
        assert any(opcode.endswith(".128") for opcode in loads) == (
            code.name == "ssd_prepare" or bool(code.choice("outputs"))
        )


def test_sums_have_a_fixed_order(code: Code) -> None:
    assert not code.count("ATOM", "ATOMG", "ATOMS", "RED")


def test_what_the_launch_before_has_made_is_awaited_first(code: Code) -> None:
    """Only code that may be launched programmatically waits, and lets the next start."""
    waits = [i.address for i in code.instructions if i.mnemonic == "ACQBULK"]
    starts = [i.address for i in code.instructions if i.mnemonic == "PREEXIT"]
    pdl = code.choice("pdl")
    assert pdl == (code.binary.arch == "sm90" and code.name in ("ssd_prepare", "ssd_scan"))
    programmatic = SPECS[code.name].declaration.is_programmatic(code.binary.variant)
    assert (bool(waits), bool(programmatic)) == (pdl and code.name == "ssd_scan",) * 2
    assert bool(starts) == bool(pdl and code.name == "ssd_prepare")
    if waits:
        # Each sort of warps waits for itself, and before it nothing is stored.
        assert len(waits) == 1 + code.choice("outputs")
        early = {i.mnemonic for i in code.instructions if i.address < min(waits)}
        assert not early & {"STG", "ST", "RED", "ATOMG", "EXIT"}


@pytest.mark.parametrize("dtype", ["bf16", "f16"])
@pytest.mark.parametrize("outputs", [0, 1])
@pytest.mark.parametrize("packed", [0, 1])
def test_what_prepare_makes_is_read_after_the_wait(
    built: Path, dtype: str, packed: int, outputs: int
) -> None:
    """Of all sizes: what comes of addresses of these parameters, in the order of the PTX.

    Inputs may be read before, and copies of x are, or the wait would be for nothing.
    """
    artifacts = opened(built)
    names = [parameter.name for parameter in SPECS["ssd_scan"].declaration.parameters]
    wanted = {"dtype": dtype, "packed": packed, "outputs": outputs, "pdl": 1}
    found = [
        binary
        for binary in artifacts.manifest.binaries
        if binary.kernel == "ssd_scan"
        and binary.arch == "sm90"
        and binary.variant.items() >= wanted.items()
    ]
    assert found
    for binary in found:
        text = artifacts.read(binary.ptx).decode("ascii")
        waits = [match.start() for match in re.finditer(r"griddepcontrol\.wait", text)]
        assert len(waits) == 1 + outputs
        reads = {name: accesses(text, names.index(name)) for name in (*MADE, "initial", "x")}
        # The last wait is that of the warps that own the state, which copy.
        for name in MADE:
            for place, copies in reads[name]:
                assert place > (waits[-1] if copies else waits[0]), (binary.variant_name, name)
        assert reads["initial"]
        assert all(place > waits[-1] for place, _ in reads["initial"])
        assert len(reads["decay"]) >= 2
        assert bool(reads["cb"]) == bool(outputs)
        assert any(place < waits[-1] for place, copies in reads["x"] if copies)


# What `ssd_prepare` leaves.
MADE = ("cb", "decay", "starts")


def accesses(text: str, parameter: int) -> list[tuple[int, bool]]:
    """Where PTX reads memory by an address that a parameter has a part in, and if as a copy."""
    register = re.compile(r"%\w+|\bat\b")  # `at` is that of loads whose dtype is known at run time
    tainted: set[str] = set()
    found = []
    for match in re.finditer(r"[^;]+;", text):
        statement = match[0]
        target, _, sources = statement.partition(",")
        if "ld.param" in statement:
            if re.search(rf"_param_{parameter}\]", statement):
                tainted.update(register.findall(target))
            continue
        if not tainted & set(register.findall(sources)):
            continue
        if re.search(r"\b(ld\.global|cp\.async\.cg)", statement):
            found.append((match.start(), "cp.async" in statement))
        elif not re.search(r"\b(setp|st|ld|bra|bar)\b", statement):
            tainted.update(register.findall(target)[-1:])
    return found


def test_the_parameter_table_is_as_declared(code: Code) -> None:
    assert code.kernel.parameters == SPECS[code.name].declaration.offsets


@pytest.mark.parametrize("code", SCANS, ids=case_name, indirect=True)
class TestScans:
    def test_a_tile_takes_the_products_that_it_must(self, code: Code) -> None:
        """By 16 channels and 8 tokens or columns of dstate: no product is done twice."""
        shape, tile = code.shape, code.tile
        assert tile is not None
        assert tile.loops == 1 + shape.outputs
        step = OWNERS * shape.halves * shape.channel_tiles * shape.outputs
        # The state times C, and C Bᵀ on the diagonal times x; before it up to so many blocks.
        outputs, before = step * (2 * shape.runs + 1), step * (shape.row_blocks - 1)
        columns = shape.state_columns // 8
        states = STATE_WARPS * shape.row_blocks * shape.channel_tiles * columns
        assert tile.least.matrix_fmas == 2048 * (outputs + states)
        assert tile.most.matrix_fmas == 2048 * (outputs + before + states)
        assert tile.dram_bytes == 2 * shape.tile * shape.width * (1 + shape.outputs)

    def test_an_a10g_is_held_up_by_dram_or_its_tensor_cores(self, code: Code) -> None:
        assert code.prediction is not None
        if code.binary.arch == "sm86":
            assert code.prediction.bound in ("dram", "tensor")


@pytest.mark.parametrize(
    "code", [c for c in SCANS if c[2]["outputs"] and c[2]["dstate"] == 128], ids=case_name,
    indirect=True,
)  # fmt: skip
def test_the_bound_of_most_models(code: Code) -> None:
    """What docs/inspect.md says of an A10G, in microseconds for a tile of 64 x 64 x 128."""
    predicted = code.prediction
    assert predicted is not None
    assert predicted.tile_seconds is not None
    if (code.binary.arch, code.choice("headdim")) == ("sm86", 64):
        us = {name: round(1e6 * seconds, 2) for name, seconds in predicted.tile_seconds.items()}
        assert (us["tensor"], us["dram"]) == (2.55, 2.18)
        assert us["shared"] < 0.9
        assert us["issue"] < 0.7
