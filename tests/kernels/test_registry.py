"""The kernels that ship, as declared: plain data, sane variants, and the coverage promised."""

from __future__ import annotations

import json
import pickle
import re
import subprocess
import sys

import pytest

from sonata_aot.artifacts import Declaration
from sonata_aot.artifacts.declaration import DTYPE_BYTES
from sonata_aot.artifacts.errors import ManifestError
from sonata_aot.artifacts.schema import decode, encode
from sonata_aot.artifacts.verify import SHARED_PER_BLOCK
from sonata_aot.kernels import KernelSpec, Variant, builtin, product

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


def test_the_default_set() -> None:
    """Every combination that a call can ask for and that is built without asking."""

    def covered(name: str) -> set[tuple[str | int, ...]]:
        spec = SPECS[name]
        return {
            tuple(variant[selector] for selector in spec.declaration.selectors)
            for variant in spec.variants
        }

    assert [name for name, spec in SPECS.items() if spec.default] == ["gemv"]
    assert SPECS["gemv"].declaration.selectors == ("dtype", "m")
    assert covered("gemv") == {("bf16", 1), ("bf16", 2)}


@pytest.mark.parametrize("name", ["gemv_mma", "gemv_any"])
def test_what_is_built_on_request_covers_every_dtype_and_number_of_rows(name: str) -> None:
    asked = {(variant["dtype"], variant["m"]) for variant in SPECS[name].variants}
    assert asked == {(dtype, m) for dtype in ("bf16", "f16") for m in (1, 2, 4, 8)}


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


class TestKernelSpec:
    @pytest.mark.parametrize(
        "variant",
        [
            {"dtype": "bf16", "m": 1, "rows": 4, "warps": 4},
            {"dtype": "bf16", "m": 1, "rows": 4, "warps": 4, "unroll": 2, "more": 1},
            {"m": 1, "dtype": "bf16", "rows": 4, "warps": 4, "unroll": 2},
            {"dtype": "fp8", "m": 1, "rows": 4, "warps": 4, "unroll": 2},
            {"dtype": "bf16", "m": 1, "rows": 4, "warps": 33, "unroll": 2},
            {"dtype": "bf16", "m": 1, "rows": 4, "warps": 0, "unroll": 2},
        ],
        ids=str,
    )
    def test_refuses_a_bad_variant(self, variant: Variant) -> None:
        with pytest.raises(ManifestError, match="'gemv'"):
            KernelSpec(SPECS["gemv"].declaration, (variant,), "a:b")

    def test_product_varies_the_last_choice_fastest(self) -> None:
        assert product(a=[1, 2], b=["x", "y"]) == (
            {"a": 1, "b": "x"},
            {"a": 1, "b": "y"},
            {"a": 2, "b": "x"},
            {"a": 2, "b": "y"},
        )
