from __future__ import annotations

import copy
import dataclasses
import pickle
import struct
from typing import Any

import pytest

from sonata_aot.artifacts.declaration import (
    Budget,
    Declaration,
    Parameter,
    Variant,
    entry_prefix,
    product,
    sort_key,
    variant_name,
)
from sonata_aot.artifacts.errors import ArgumentError, ManifestError
from sonata_aot.artifacts.schema import decode, encode

KERNEL = Declaration(
    name="scale",
    parameters=(
        Parameter("factor", "f32"),
        Parameter("x", "pointer", element="dtype", align=16),
        Parameter("n", "i32"),
        Parameter("stride", "i64"),
        Parameter("out", "pointer", element="f32", align=4),
        Parameter("last", "i32"),
    ),
    choices=("dtype", "warps"),
    selectors=("dtype",),
    block=("32 * warps", "2", "1"),
    grid=("ceildiv(n, warps)", "stride", "1"),
    shared_bytes="1024 * warps",
)
VARIANT: Variant = {"dtype": "bf16", "warps": 4}


def changed(**fields: Any) -> Declaration:
    return dataclasses.replace(KERNEL, **fields)


def test_a_declaration_is_plain_data() -> None:
    for again in (
        pickle.loads(pickle.dumps(KERNEL)),
        copy.deepcopy(KERNEL),
        decode(Declaration, encode(KERNEL), "here"),
    ):
        assert again == KERNEL
        assert again.offsets == KERNEL.offsets


def test_parameters_are_laid_out_by_c_rules() -> None:
    assert KERNEL.offsets == ((0, 4), (8, 8), (16, 4), (24, 8), (32, 8), (40, 4))
    assert KERNEL.block_layout.size == 44
    packed = KERNEL.block_layout.pack(1.5, 2**63, -3, -4, 5, 6)
    for (offset, size), code, value in zip(
        KERNEL.offsets, "fQiqQi", (1.5, 2**63, -3, -4, 5, 6), strict=True
    ):
        assert struct.unpack_from("<" + code, packed, offset) == (value,)
        assert struct.calcsize("<" + code) == size
    assert packed[4:8] == packed[20:24] == bytes(4)


@pytest.mark.parametrize(
    ("fields", "problem"),
    [
        ({"parameters": ()}, "no parameters"),
        ({"parameters": (*KERNEL.parameters, Parameter("n", "i32"))}, "a name stands twice"),
        ({"parameters": (*KERNEL.parameters, Parameter("warps", "i32"))}, "a name stands twice"),
        ({"choices": ("dtype", "warps", "warps")}, "a name stands twice"),
        ({"selectors": ("m",)}, "a selector is not a choice"),
        ({"selectors": ("n",)}, "a selector is not a choice"),
        ({"selectors": ("dtype", "dtype")}, "selector"),
        ({"parameters": (Parameter("x", "pointer", align=4),)}, "element None"),
        ({"parameters": (Parameter("x", "pointer", "f64", 4),)}, "element 'f64'"),
        ({"parameters": (Parameter("x", "i32", "bf16"),)}, "element 'bf16'"),
        ({"parameters": (Parameter("x", "pointer", "bf16"),)}, "align None"),
        ({"parameters": (Parameter("x", "pointer", "bf16", 3),)}, "align 3"),
        ({"parameters": (Parameter("x", "i32", None, 4),)}, "align 4"),
        ({"block": ("n", "1", "1")}, "unknown \\['n'\\]"),
        ({"shared_bytes": "4 * n"}, "unknown \\['n'\\]"),
        ({"grid": ("factor", "1", "1")}, "unknown \\['factor'\\]"),
        ({"grid": ("x", "1", "1")}, "unknown \\['x'\\]"),
        ({"grid": ("n * nowhere", "1", "1")}, "unknown \\['nowhere'\\]"),
        ({"grid": ("n +", "1", "1")}, "launch expression"),
        ({"block": ("eval(1, 2)", "1", "1")}, "unknown function"),
    ],
)
def test_a_contradiction_is_refused(fields: dict[str, Any], problem: str) -> None:
    with pytest.raises(ManifestError, match=problem):
        changed(**fields)


def test_parameters_beyond_the_drivers_limit_are_refused() -> None:
    def with_count(count: int) -> Declaration:
        parameters = tuple(Parameter(f"p{i}", "i64") for i in range(count))
        return changed(
            parameters=parameters, grid=("1", "1", "1"), choices=("warps",), selectors=()
        )

    assert with_count(512).block_layout.size == 4096
    with pytest.raises(ManifestError, match="more than 4096 bytes"):
        with_count(513)


@pytest.mark.parametrize(
    "variant",
    [
        {},
        {"dtype": "bf16"},
        {"warps": 4, "dtype": "bf16"},
        {"dtype": "bf16", "warps": 4, "more": 1},
        {"dtype": "bf16", "other": 4},
    ],
)
def test_a_variant_has_each_choice_in_order_and_nothing_else(variant: Variant) -> None:
    KERNEL.check_variant(VARIANT)
    with pytest.raises(ManifestError, match="variant has choices"):
        KERNEL.check_variant(variant)


def test_an_element_is_a_dtype_in_every_variant() -> None:
    pointer, fixed = KERNEL.parameters[1], KERNEL.parameters[4]
    assert KERNEL.element(pointer, VARIANT) == "bf16"
    assert KERNEL.element(fixed, VARIANT) == "f32"
    for wrong in ("f64", "x", 7):
        with pytest.raises(ManifestError, match="no dtype"):
            KERNEL.check_variant({"dtype": wrong, "warps": 4})


def test_shapes_of_a_variant() -> None:
    assert KERNEL.block_shape(VARIANT) == (128, 2, 1)
    assert KERNEL.shared_memory(VARIANT) == 4096
    assert KERNEL.grid_shape(VARIANT, {"n": 9, "stride": 7}) == (3, 7, 1)


@pytest.mark.parametrize(
    ("block", "good"),
    [
        (("1024", "1", "1"), True),
        (("32", "32", "1"), True),
        (("1025", "1", "1"), False),
        (("32", "32", "2"), False),
        (("0", "1", "1"), False),
        (("warps - 5", "1", "1"), False),
        (("0 - 1", "0 - 1", "1"), False),
    ],
)
def test_block_limits(block: tuple[str, str, str], good: bool) -> None:
    declaration = changed(block=block)
    if good:
        declaration.block_shape(VARIANT)
    else:
        with pytest.raises(ManifestError, match="block"):
            declaration.block_shape(VARIANT)


@pytest.mark.parametrize("text", ["0 - 1", "262145", "warps * 1000000"])
def test_shared_memory_limits(text: str) -> None:
    assert changed(shared_bytes="262144").shared_memory(VARIANT) == 2**18
    with pytest.raises(ManifestError, match="shared memory"):
        changed(shared_bytes=text).shared_memory(VARIANT)


@pytest.mark.parametrize(
    ("grid", "sizes", "problem"),
    [
        (("n", "1", "1"), {"n": 0}, "grid.x = 0"),
        (("n", "1", "1"), {"n": -5}, "grid.x = -5"),
        (("n", "1", "1"), {"n": 2**31}, "grid.x = 2147483648"),
        (("1", "n", "1"), {"n": 65536}, "grid.y = 65536"),
        (("1", "1", "n"), {"n": 65536}, "grid.z = 65536"),
        (("n * n", "1", "1"), {"n": 2**62}, "64 bits"),
        (("n", "1", "1"), {}, "no value for 'n'"),
        (("n", "1", "1"), {"n": 2**70}, "grid.x"),
    ],
)
def test_an_empty_or_impossible_grid_is_refused(
    grid: tuple[str, str, str], sizes: dict[str, int], problem: str
) -> None:
    with pytest.raises(ArgumentError, match=problem):
        changed(grid=grid).grid_shape(VARIANT, {"stride": 1, **sizes})


def test_grid_limits_are_inclusive() -> None:
    declaration = changed(grid=("n", "stride", "stride"))
    shape = declaration.grid_shape(VARIANT, {"n": 2**31 - 1, "stride": 65535})
    assert shape == (2**31 - 1, 65535, 65535)


def test_names_of_a_variant() -> None:
    assert variant_name(VARIANT) == "dtype=bf16,warps=4"
    assert entry_prefix("scale", VARIANT) == "scale_dtype_bf16_warps_4"


def test_variants_sort_by_value_not_by_digit() -> None:
    variants = [{"m": 10}, {"m": "auto"}, {"m": 9}, {"m": 1}, {"m": "a"}]
    assert [v["m"] for v in sorted(variants, key=sort_key)] == [1, 9, 10, "a", "auto"]


def test_product_varies_the_last_choice_fastest() -> None:
    assert product(dtype=["a", "b"], m=range(1, 3)) == (
        {"dtype": "a", "m": 1},
        {"dtype": "a", "m": 2},
        {"dtype": "b", "m": 1},
        {"dtype": "b", "m": 2},
    )


@pytest.mark.parametrize(
    ("way", "value"),
    [
        (("name",), "Scale"),
        (("name",), "a" * 65),
        (("name",), "../scale"),
        (("parameters", 0, "kind"), "f64"),
        (("parameters", 1, "align"), 0),
        (("parameters", 1, "align"), 512),
        (("budget", "registers"), 256),
        (("budget", "registers"), 0),
        (("budget", "spills"), -1),
        (("budget", "warps"), 1),
        (("block",), ["1", "1"]),
        (("grid", 0), 1),
    ],
)
def test_field_types_are_enforced_when_read(way: tuple[str | int, ...], value: Any) -> None:
    data = encode(KERNEL)
    target: Any = data
    for key in way[:-1]:
        target = target[key]
    target[way[-1]] = value
    with pytest.raises(ManifestError):
        decode(Declaration, data, "here")


def test_the_default_budget_allows_no_spill_and_asks_for_nothing() -> None:
    assert Budget() == Budget(registers=255, spills=0, stack_bytes=0)
    assert Budget().floors_of(VARIANT) == {
        "load_bytes": 0,
        "in_flight_bytes": 0,
        "warps": 0,
        "dram_bound": 0,
        "tile_bytes": 0,
    }


def asking(field: str, text: str) -> Budget:
    return dataclasses.replace(Budget(), **{field: text})


@pytest.mark.parametrize(
    "field", ["load_bytes", "in_flight_bytes", "warps", "dram_bound", "tile_bytes"]
)
class TestWhatABudgetAsksFor:
    def test_it_is_an_expression_over_the_choices(self, field: str) -> None:
        floors = changed(budget=asking(field, "2 * warps + 1")).budget.floors_of(VARIANT)
        assert floors.pop(field) == 9
        assert set(floors.values()) == {0}

    @pytest.mark.parametrize("text", ["n", "nothing", "2 * stride", "2 *", "warps / 2", ""])
    def test_of_nothing_else(self, field: str, text: str) -> None:
        with pytest.raises(ManifestError, match="launch expression"):
            changed(budget=asking(field, text))

    def test_and_of_no_text(self, field: str) -> None:
        with pytest.raises(ManifestError, match="computes with text"):
            changed(budget=asking(field, "dtype")).check_variant(VARIANT)


@pytest.mark.parametrize(
    ("text", "value"), [("80", 80), ("80 + warps", 84), ("max(80, 30 * warps)", 120)]
)
def test_the_least_architecture_of_a_variant(text: str, value: int) -> None:
    assert changed(min_sm=text).least_sm(VARIANT) == value


@pytest.mark.parametrize(
    ("text", "expected"), [("0", False), ("1", True), ("warps - 4", False), ("warps", True)]
)
def test_which_variants_are_programmatic(text: str, expected: bool) -> None:
    assert changed(programmatic=text).is_programmatic(VARIANT) is expected


@pytest.mark.parametrize("field", ["min_sm", "programmatic"])
@pytest.mark.parametrize("text", ["n", "nothing", "stride + 1", "80 +", "warps / 2", ""])
def test_properties_of_a_variant_use_its_choices_alone(field: str, text: str) -> None:
    with pytest.raises(ManifestError, match="launch expression"):
        changed(**{field: text})
