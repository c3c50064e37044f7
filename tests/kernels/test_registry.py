"""The kernels that ship, as declared: plain data, sane variants, and the coverage promised."""

from __future__ import annotations

import itertools
import json
import pickle
import re
import subprocess
import sys

import pytest

from sonata_aot.aot.plan import jobs
from sonata_aot.artifacts import Arch, Declaration
from sonata_aot.artifacts.declaration import DTYPE_BYTES
from sonata_aot.artifacts.errors import ManifestError
from sonata_aot.artifacts.schema import decode, encode
from sonata_aot.artifacts.verify import SHARED_PER_BLOCK
from sonata_aot.kernels import KernelSpec, Variant, builtin, product
from sonata_aot.kernels.models import MODELS

SPECS = builtin()


def test_finds_every_kernel_by_its_name() -> None:
    assert "gemv" in SPECS
    assert list(SPECS) == sorted(SPECS)
    assert all(name == spec.name for name, spec in SPECS.items())


def test_finding_them_imports_no_compiler_and_no_torch() -> None:
    program = "import sys, sonata_aot.kernels as k; k.builtin(); print(' '.join(sys.modules))"
    printed = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    ).stdout
    assert not {name.partition(".")[0] for name in printed.split()} & {"torch", "cutlass", "numpy"}
    assert "sonata_aot.kernels.gemv.device" not in printed.split()


def covered(kernel: str, *choices: str) -> set[tuple[str | int, ...]]:
    return {tuple(variant[name] for name in choices) for variant in SPECS[kernel].variants}


def default(kernel: str, arch: str, *choices: str) -> list[tuple[str | int, ...]]:
    """Of all variants that a default build makes for an architecture; each of them once."""
    planned = jobs([SPECS[kernel]], [Arch.parse(arch)])
    return sorted(tuple(job.variant[name] for name in choices) for job in planned)


SCAN = ("ssd_pass", "ssd_prepare", "ssd_scan")
STAGES = (
    *("ssd_bmm_chunk", "ssd_chunk_cumsum", "ssd_chunk_scan", "ssd_chunk_state"),
    "ssd_state_passing",
)
# (headdim, dstate) of Mamba2, Zonos, Codestral Mamba, Bamba, Zamba2, Nemotron-H and Falcon-H1.
PAIRS = {(64, 64), (64, 128), (64, 256), (80, 128), (128, 256)}


def test_the_default_set() -> None:
    """Every combination that a call can ask for and that is built without asking."""
    assert {name for name, spec in SPECS.items() if spec.default} == {
        *("gemv", "gemv_any", "ssd_copy", *SCAN, *STAGES)
    }
    assert set(MODELS) == PAIRS
    every = {(dtype, m) for dtype in ("bf16", "f16") for m in (1, 2, 4, 8)}
    assert covered("gemv", "dtype", "m") == every
    assert covered("gemv_any", "dtype", "m", "wide") == {(*c, w) for c in every for w in (0, 1)}
    assert SPECS["gemv_any"].declaration.selectors == ("dtype", "m", "wide")


@pytest.mark.parametrize(("arch", "pdl"), [("sm86", 0), ("sm90", 1)])
class TestTheDefaultSetOfTheScan:
    """Every pair of every named model, in both dtypes, on every architecture."""

    def test_the_one_pass_scan_with_sequences_or_not_with_out_or_not(
        self, arch: str, pdl: int
    ) -> None:
        choices = ("dtype", "headdim", "dstate", "packed", "outputs", "pdl")
        assert default("ssd_scan", arch, *choices) == sorted(
            (dtype, *pair, packed, outputs, pdl)
            for dtype in ("bf16", "f16")
            for pair in PAIRS
            for packed in (0, 1)
            for outputs in (0, 1)
        )

    def test_what_prepares_it_in_the_same_tiles(self, arch: str, pdl: int) -> None:
        scans = default("ssd_scan", arch, "dtype", "dstate", "tile", "pdl")
        assert default("ssd_prepare", arch, "dtype", "dstate", "tile", "pdl") == sorted({*scans})

    @pytest.mark.parametrize(
        ("kernel", "choices"),
        [
            ("ssd_bmm_chunk", ("dtype", "dstate")),
            ("ssd_chunk_state", ("dtype", "headdim", "dstate")),
            ("ssd_chunk_scan", ("dtype", "headdim", "dstate")),
        ],
    )
    def test_the_stages(self, arch: str, pdl: int, kernel: str, choices: tuple[str, ...]) -> None:
        sizes = {
            tuple({"dtype": dtype, "headdim": p, "dstate": n}[name] for name in choices)
            for dtype in ("bf16", "f16")
            for p, n in PAIRS
        }
        assert default(kernel, arch, *choices) == sorted(sizes)

    @pytest.mark.parametrize(
        "kernel", ["ssd_copy", "ssd_pass", "ssd_chunk_cumsum", "ssd_state_passing"]
    )
    def test_what_serves_all_sizes(self, arch: str, pdl: int, kernel: str) -> None:
        assert len(default(kernel, arch)) == 1


@pytest.mark.parametrize("kernel", ["ssd_scan", "ssd_chunk_scan", "ssd_chunk_state"])
def test_the_others_build_on_request(kernel: str) -> None:
    assert covered(kernel, "dtype", "headdim", "dstate") == {
        (dtype, *pair)
        for dtype in ("bf16", "f16")
        for pair in itertools.product((32, 64, 80, 96, 128), (16, 32, 64, 128, 256))
    }


def test_every_number_of_rows_has_a_variant_for_every_architecture() -> None:
    """Without programmatic launch, which sm86 lacks, and with it."""
    assert covered("gemv", "dtype", "m", "pdl") == {
        (dtype, m, pdl) for dtype in ("bf16", "f16") for m in (1, 2, 4, 8) for pdl in (0, 1)
    }
    persistent = {(variant["persistent"], variant["pdl"]) for variant in SPECS["gemv"].variants}
    assert persistent == {(0, 0), (0, 1), (1, 1)}


def test_the_choices_of_the_gemv() -> None:
    """By these names, in this order, tables and callers name variants."""
    choices = ("dtype", "m", "side", "rows", "warps", "unroll", "persistent", "pdl")
    declaration = SPECS["gemv"].declaration
    assert declaration.choices == declaration.selectors == choices


@pytest.mark.parametrize("spec", SPECS.values(), ids=list(SPECS))
class TestEverySpec:
    def test_is_plain_data(self, spec: KernelSpec) -> None:
        assert pickle.loads(pickle.dumps(spec)) == spec
        text = json.dumps(encode(spec.declaration))
        assert decode(Declaration, json.loads(text), "text") == spec.declaration

    def test_names_a_device_function(self, spec: KernelSpec) -> None:
        assert re.fullmatch(r"sonata_aot\.kernels\.\w+\.\w+:\w+", spec.device)
        assert spec.module == spec.device.partition(":")[0]

    def test_variants_are_valid_and_each_stands_once(self, spec: KernelSpec) -> None:
        declaration = spec.declaration
        seen = {tuple(variant.items()) for variant in spec.variants}
        assert len(seen) == len(spec.variants) > 0
        for variant in spec.variants:
            declaration.check_variant(variant)
            assert declaration.shared_memory(variant) <= min(SHARED_PER_BLOCK.values())
            x, y, z = declaration.block_shape(variant)
            assert x * y * z % 32 == 0
            for parameter in declaration.parameters:
                if parameter.kind == "pointer":
                    assert (parameter.align or 0) >= DTYPE_BYTES[
                        declaration.element(parameter, variant)
                    ]

    def test_one_variant_for_each_call(self, spec: KernelSpec) -> None:
        # Two that differ in tuning alone could not be told apart by a launch.
        selectors = spec.declaration.selectors
        chosen = [tuple(variant[name] for name in selectors) for variant in spec.variants]
        assert len(set(chosen)) == len(chosen)

    def test_spills_are_never_allowed(self, spec: KernelSpec) -> None:
        assert spec.declaration.budget.spills == 0
        assert spec.declaration.budget.stack_bytes == 0


def test_what_the_gemv_is_held_to() -> None:
    """Each load of a weight 16 bytes wide, 64 in flight, two blocks a multiprocessor, and DRAM."""
    for name in ("gemv", "gemv_any"):
        for variant in SPECS[name].variants:
            floors = SPECS[name].declaration.budget.floors_of(variant)
            streams = int(variant.get("wide", 1))
            wanted = {"load_bytes": 16, "in_flight_bytes": 64, "dram_bound": 1}
            assert {field: floors[field] for field in wanted} == {
                field: value * streams for field, value in wanted.items()
            }
            assert floors["warps"] == 2 * int(variant["warps"])


def test_what_the_scan_is_held_to() -> None:
    """A block of twelve warps, or of four where states alone are made; x and out from DRAM."""
    for variant in SPECS["ssd_scan"].variants:
        budget = SPECS["ssd_scan"].declaration.budget
        floors = budget.floors_of(variant)
        moved = 2 * int(variant["width"]) * int(variant["tile"]) * (1 + int(variant["outputs"]))
        assert (floors["tile_bytes"], floors["tile_warps"]) == (moved, 4)
        assert floors["warps"] >= (12 if variant["outputs"] else 4)
        assert budget.registers < 255


GOOD = SPECS["gemv"].variants[0]


class TestKernelSpec:
    @pytest.mark.parametrize(
        "variant",
        [
            {name: value for name, value in GOOD.items() if name != "pdl"},
            {**GOOD, "more": 1},
            dict(reversed(GOOD.items())),
            {**GOOD, "dtype": "fp8"},
            {**GOOD, "warps": 33},
            {**GOOD, "warps": 0},
        ],
        ids=str,
    )
    def test_refuses_a_bad_variant(self, variant: Variant) -> None:
        KernelSpec(SPECS["gemv"].declaration, (GOOD,), "a:b")
        with pytest.raises(ManifestError, match="'gemv'"):
            KernelSpec(SPECS["gemv"].declaration, (variant,), "a:b")

    def test_product_varies_the_last_choice_fastest(self) -> None:
        assert product(a=[1, 2], b=["x", "y"]) == (
            {"a": 1, "b": "x"},
            {"a": 1, "b": "y"},
            {"a": 2, "b": "x"},
            {"a": 2, "b": "y"},
        )
