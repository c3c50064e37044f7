"""`sonata-aot inspect` on compiled kernels, and their budgets."""

from __future__ import annotations

import dataclasses
import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from sonata_aot.aot.budget import breaches
from sonata_aot.aot.inspect import Figures, examine, select
from sonata_aot.artifacts import Binary, Budget, open_artifacts
from sonata_aot.artifacts.errors import UsageError
from sonata_aot.kernels import Variant, builtin

if TYPE_CHECKING:
    from tests.aot.conftest import Invoke
    from tests.conftest import BuildCases

SCRIPT = Path(sys.executable).with_name("sonata-aot")
FAST, ANY = "gemv", "gemv_any"


def some() -> list[tuple[str, str, Variant]]:
    """A few variants of the kernels with budgets: plain, programmatic and persistent, general."""
    fast, general = (
        [v for v in builtin()[name].variants if v["dtype"] == "bf16"] for name in (FAST, ANY)
    )
    plain = next(v for v in fast if v["m"] == 8 and not v["pdl"])
    found = [(arch, FAST, plain) for arch in ("sm86", "sm90")]
    found += [(arch, ANY, v) for arch in ("sm86", "sm90") for v in general if v["m"] == 1]
    return [*found, ("sm90", FAST, next(v for v in fast if v["pdl"] and v["persistent"]))]


@pytest.fixture(scope="module")
def family(build_cases: BuildCases) -> Path:
    return build_cases("inspected", some())


@pytest.fixture(scope="module")
def inspected(family: Path) -> list[tuple[Binary, Figures]]:
    artifacts = open_artifacts(family)
    return [(binary, examine(artifacts, binary)) for binary in artifacts.manifest.binaries]


class TestCompiled:
    def test_resources_are_those_of_the_manifest(
        self, inspected: list[tuple[Binary, Figures]]
    ) -> None:
        names = ("registers", "spills", "stack_bytes", "shared_bytes", "static_shared_bytes")
        for binary, figures in inspected:
            assert [getattr(figures, n) for n in names] == [getattr(binary, n) for n in names]
            assert figures.occupancy.warps == figures.occupancy.blocks * binary.block[0] // 32 > 0

    def test_a_step_is_in_flight_before_the_first_use(
        self, inspected: list[tuple[Binary, Figures]]
    ) -> None:
        """As many loads as a thread has vectors in a step; and the loop loads as many again."""
        for binary, figures in inspected:
            choice: dict[str, Any] = dict(binary.variant)
            narrow = binary.kernel == ANY and not choice["wide"]
            parts = 16 // max(choice["m"], 2) if choice["side"] == "b" else 8 // choice["m"]
            vectors = choice["rows"] * parts // 8 * choice["unroll"]
            code = figures.code
            assert code.in_flight_bytes == (None if narrow else 16 * vectors)
            assert code.loop is not None
            assert code.loop.streamed_loads == ({} if narrow else {16: vectors})
            assert (figures.prediction is None) == narrow

    def test_dram_is_the_bound_of_all_that_have_a_budget(
        self, inspected: list[tuple[Binary, Figures]]
    ) -> None:
        kinds = set()
        for binary, figures in inspected:
            budget = builtin()[binary.kernel].declaration.budget
            assert breaches(figures, budget, binary.variant) == []
            if figures.prediction is not None:
                assert figures.prediction.bound == "dram"
                assert figures.prediction.margin > 1
                kinds.add((binary.kernel, figures.gpu))
        assert {(FAST, "A10G"), (FAST, "H200"), (ANY, "A10G"), (ANY, "H200")} <= kinds


class TestBudgets:
    @pytest.fixture
    def figures(self, inspected: list[tuple[Binary, Figures]]) -> Figures:
        return next(f for b, f in inspected if b.kernel == FAST and b.arch == "sm86")

    def test_each_limit_is_inclusive(self, figures: Figures) -> None:
        exact = Budget(
            registers=figures.registers,
            load_bytes="16",
            in_flight_bytes=str(figures.code.in_flight_bytes),
            warps=str(figures.occupancy.warps),
            dram_bound="1",
        )
        assert breaches(figures, exact, {}) == []
        less = {"registers": exact.registers - 1}
        more = {
            name: f"{getattr(exact, name)} + 1"
            for name in ("load_bytes", "in_flight_bytes", "warps")
        }
        for name, value in {**less, **more}.items():
            broken = breaches(figures, dataclasses.replace(exact, **{name: value}), {})
            assert [breach.field for breach in broken] == [name]

    @pytest.mark.parametrize("name", ["spills", "stack_bytes"])
    def test_local_memory(self, figures: Figures, name: str) -> None:
        (broken,) = breaches(dataclasses.replace(figures, **{name: 1}), Budget(), {})
        assert (broken.field, broken.problem) == (name, f"{name} is 1, over the budget of 0")

    def test_the_narrowest_streamed_load_counts(self, figures: Figures) -> None:
        code = dataclasses.replace(figures.code, streamed_loads={16: 9, 8: 1})
        (broken,) = breaches(dataclasses.replace(figures, code=code), Budget(load_bytes="16"), {})
        assert "a streamed load takes 8 bytes" in broken.problem

    @pytest.mark.parametrize("bound", ["issue", "tensor", "in_flight"])
    def test_another_bound_than_dram(self, figures: Figures, bound: str) -> None:
        assert figures.prediction is not None
        found = dataclasses.replace(
            figures.prediction, bound=bound, rates={**figures.prediction.rates, bound: 350e9}
        )
        (broken,) = breaches(
            dataclasses.replace(figures, prediction=found), Budget(dram_bound="1"), {}
        )
        assert f"on an A10G the bound is {bound}, at 350 GB/s" in broken.problem
        assert broken.remedy

    def test_no_prediction_breaks_it_only_where_a_gpu_stands_for_the_arch(
        self, figures: Figures
    ) -> None:
        none = dataclasses.replace(figures, prediction=None)
        (broken,) = breaches(none, Budget(dram_bound="1"), {})
        assert "no prediction" in broken.problem
        assert breaches(dataclasses.replace(none, gpu=None), Budget(dram_bound="1"), {}) == []
        assert breaches(none, Budget(), {}) == []


@pytest.fixture
def redeclared(family: Path, tmp_path: Path) -> Callable[..., Path]:
    """A copy of the family whose manifest has another budget for `gemv_any`."""

    def write(**budget: int | str) -> Path:
        directory = Path(shutil.copytree(family, tmp_path / "stricter"))
        manifest = open_artifacts(directory).manifest
        kernels = [
            dataclasses.replace(item, budget=dataclasses.replace(item.budget, **budget))
            if item.name == ANY
            else item
            for item in manifest.kernels
        ]
        changed = dataclasses.replace(manifest, kernels=tuple(kernels))
        (directory / "manifest.json").write_bytes(changed.to_bytes())
        return directory

    return write


class TestCommand:
    def test_check_passes_on_what_we_ship(self, built: Path) -> None:
        """Every default binary of sm86 and sm90 keeps to its budget: CI's check of that."""
        command = [SCRIPT, "inspect", built, "--check"]
        result = subprocess.run(command, capture_output=True, text=True, check=False)
        lines = result.stdout.splitlines()
        assert result.returncode == 0, [line for line in lines if not line.startswith("ok")]
        binaries = open_artifacts(built).manifest.binaries
        assert len(lines) == len(binaries) + 1
        for line, binary in zip(lines, binaries, strict=False):
            assert line.startswith(f"ok    {binary.label}: ")
            streams = binary.kernel in (FAST, ANY) and binary.variant.get("wide") != 0
            assert ("DRAM is the bound on an" in line) == streams
        assert lines[-1] == f"{built}: {len(binaries)} within budget, 0 not"

    @pytest.mark.parametrize(
        ("field", "value", "problem"),
        [
            ("registers", 40, "registers is"),
            ("load_bytes", "32 * wide", "takes 16 bytes, and the budget asks for 32 bytes"),
            ("load_bytes", "16", "no load is streamed, and the budget asks for 16 bytes"),
            ("in_flight_bytes", "65 * wide", "has 64 bytes under way before the first use, below"),
            ("warps", "33", "warps, for want of registers, below the budget of 33"),
            ("dram_bound", "1", "the code allows no prediction, and the budget asks for DRAM"),
        ],
    )
    def test_check_fails_on_a_breach(
        self,
        invoke: Invoke,
        redeclared: Callable[..., Path],
        field: str,
        value: int | str,
        problem: str,
    ) -> None:
        wide = 0 if value in ("16", "1") else 1
        directory = redeclared(**{field: value})
        chosen = ("--arch", "sm86", "--kernel", ANY, "--variant", f"wide={wide}")
        result = invoke("inspect", directory, *chosen, "--check")
        assert result.exit_code == 1
        fail, total = result.stdout.splitlines()
        (binary,) = select(
            open_artifacts(directory).manifest.binaries, kernel=ANY, arch="sm86", variant=chosen[-1]
        )
        assert fail.startswith(f"FAIL  {binary.label}: ")
        assert problem in fail
        assert fail.endswith("the budget in the declaration")
        assert total == f"{directory}: 0 within budget, 1 not"
        # Without --check it is shown and no failure.
        shown = invoke("inspect", directory, *chosen)
        assert shown.exit_code == 0
        assert problem in shown.stdout

    def test_json(self, invoke: Invoke, redeclared: Callable[..., Path]) -> None:
        directory = redeclared(warps="33")
        chosen = ("--arch=sm86", "--kernel", ANY, "--json")
        result = invoke("inspect", directory, *chosen)
        assert (result.exit_code, result.stderr) == (0, "")
        content = json.loads(result.stdout)
        assert set(content) == {"directory", "ok", "binaries"}
        assert (content["directory"], content["ok"]) == (str(directory), False)
        narrow, wide = sorted(content["binaries"], key=lambda item: item["variant"]["wide"])
        names = {field.name for field in dataclasses.fields(Figures)}
        assert set(wide) == {"kernel", "variant", "arch", "breaches"} | names
        assert wide["code"]["streamed_loads"] == {"16": 8}
        assert wide["code"]["loop"]["mix"]["tensor"] == 4
        assert set(wide["prediction"]) == {"rates", "bound", "margin", "tile_seconds"}
        assert [breach["field"] for breach in wide["breaches"]] == ["warps"]
        assert (narrow["prediction"], narrow["code"]["in_flight_bytes"]) == (None, None)
        assert invoke("inspect", directory, *chosen, "--check").exit_code == 1

    def test_a_table_for_many_and_a_block_for_one(self, invoke: Invoke, family: Path) -> None:
        many = invoke("inspect", family, "--arch", "8.6").stdout
        assert f"{ANY} sm86, bound on an A10G\ndtype  m  " in many
        assert f"{FAST} sm86, bound on an A10G\n" in many
        assert "sm90" not in many
        one = invoke("inspect", family, "--arch", "sm86", "--kernel", FAST).stdout
        assert one.startswith(f"{FAST}[dtype=bf16,m=8,")
        for word in ("warps a multiprocessor", "before the first use", "issue slots a byte"):
            assert word in one
        assert "A10G        DRAM is the bound, at 600 GB/s; " in one

    @pytest.mark.parametrize(
        ("arguments", "problem"),
        [
            (("--arch", "sm99"), "unknown arch"),
            (("--arch", "sm80"), "no such binary"),
            (("--kernel", "none"), "no such binary"),
            (("--variant", "m=3"), "no such binary"),
            (("--variant", "nothing=1"), "no such binary"),
            (("--variant", "m"), "variant 'm'"),
            (("--variant", "m=1,"), "variant 'm=1,'"),
        ],
    )
    def test_what_is_not_there(
        self, invoke: Invoke, family: Path, arguments: tuple[str, ...], problem: str
    ) -> None:
        result = invoke("inspect", family, *arguments)
        assert (result.exit_code, result.stdout) == (2, "")
        assert problem in result.stderr

    def test_a_directory_without_artifacts(self, invoke: Invoke, tmp_path: Path) -> None:
        result = invoke("inspect", tmp_path)
        assert result.exit_code == 1
        assert "no artifacts in" in result.stderr

    def test_a_damaged_object(self, invoke: Invoke, copied: Path) -> None:
        artifacts = open_artifacts(copied)
        path = artifacts.path(artifacts.manifest.binaries[0].cubin)
        path.write_bytes(path.read_bytes()[:-1])
        result = invoke("inspect", copied, "--check")
        assert (result.exit_code, result.stdout) == (1, "")
        assert path.name in result.stderr


def test_selecting_takes_all_that_is_asked_for(family: Path) -> None:
    binaries = open_artifacts(family).manifest.binaries
    assert select(binaries) == list(binaries)
    found = select(binaries, arch="9.0", kernel=ANY, variant="m=1,wide=1")
    assert [(b.arch, b.kernel, b.variant["wide"]) for b in found] == [("sm90", ANY, 1)]
    with pytest.raises(UsageError):
        select([])
