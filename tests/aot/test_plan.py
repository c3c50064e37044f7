"""What a build consists of, and that a cache key covers all that can change the output."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from sonata_aot.aot import plan, toolchain
from sonata_aot.aot.plan import Job, choose_archs, choose_kernels, jobs
from sonata_aot.aot.sources import source_files
from sonata_aot.artifacts import Arch, Budget, Declaration, Parameter
from sonata_aot.artifacts.errors import UsageError
from sonata_aot.kernels import KernelSpec, builtin, product

if TYPE_CHECKING:
    Package = Callable[[dict[str, str]], Path]

DECLARATION = Declaration(
    name="toy",
    parameters=(Parameter("out", "pointer", element="f32", align=4), Parameter("n", "i32")),
    choices=("m", "rows"),
    selectors=("m",),
    block=("64", "1", "1"),
    grid=("n", "1", "1"),
)
FILES = {
    "toy/__init__.py": "",
    "toy/device.py": "from . import helper\nimport shared\n",
    "toy/helper.py": "from .deeper import x\n",
    "toy/deeper.py": "x = 1\n",
    "toy/spec.py": "",
    "toy/unrelated.py": "",
    "shared.py": "",
}

CHANGES: list[dict[str, Any]] = [
    {"arch": "sm89"},
    {"m": 2},
    {"device": "toy.device:other"},
    {"name": "toy2"},
    {"parameters": (*DECLARATION.parameters, Parameter("k", "i64"))},
    {
        "parameters": (
            dataclasses.replace(DECLARATION.parameters[0], align=16),
            DECLARATION.parameters[1],
        )
    },
    {
        "parameters": (
            dataclasses.replace(DECLARATION.parameters[0], element="bf16"),
            DECLARATION.parameters[1],
        )
    },
    {"block": ("128", "1", "1")},
    {"block": ("1", "64", "1")},
    {"shared_bytes": "16"},
    {"grid": ("n", "2", "1")},
    {"budget": Budget(registers=32)},
    {"selectors": ("m", "rows")},
    {"min_sm": "81"},
    {"programmatic": "1"},
]


def job(arch: str = "sm86", device: str = "toy.device:toy", m: int = 1, **changes: Any) -> Job:
    declaration = dataclasses.replace(DECLARATION, **changes)
    spec = KernelSpec(declaration, product(m=[m], rows=[4]), device)
    return Job(spec, spec.variants[0], Arch.parse(arch))


@pytest.fixture(autouse=True)
def files(package: Package) -> Package:
    package(FILES)
    return package


def test_a_variant_is_built_for_no_architecture_below_its_least() -> None:
    declaration = dataclasses.replace(DECLARATION, min_sm="80 + 10 * (m - 1)")
    spec = KernelSpec(declaration, product(m=[1, 2, 5], rows=[4]), "toy.device:toy")
    archs = [Arch.parse(name) for name in ("sm80", "sm89", "sm90", "sm90a", "sm120")]
    planned = [(job.arch.name, job.variant["m"]) for job in jobs([spec], archs)]
    assert planned == [
        *(("sm80", 1), ("sm89", 1)),
        *(("sm90", 1), ("sm90", 2), ("sm90a", 1), ("sm90a", 2)),
        *(("sm120", 1), ("sm120", 2), ("sm120", 5)),
    ]
    assert jobs([dataclasses.replace(spec, variants=spec.variants[2:])], archs[:2]) == []


class TestKey:
    def test_is_stable(self, forget: Callable[[], None]) -> None:
        before = job().key
        forget()
        assert job().key == before

    @pytest.mark.parametrize("changes", CHANGES, ids=str)
    def test_changes_with_the_declaration_the_variant_and_the_arch(
        self, changes: dict[str, Any]
    ) -> None:
        assert job(**changes).key != job().key

    def test_a_target_and_its_specific_one_differ(self) -> None:
        assert len({job(arch).key for arch in ("sm100", "sm100a", "sm100f", "sm90", "sm90a")}) == 5

    def test_tuning_choices_count(self) -> None:
        spec = KernelSpec(DECLARATION, product(m=[1], rows=[4, 8]), "toy.device:toy")
        assert len({Job(spec, variant, Arch(8, 6)).key for variant in spec.variants}) == 2

    @pytest.mark.parametrize(
        "name", ["toy/device.py", "toy/helper.py", "toy/deeper.py", "shared.py"]
    )
    def test_changes_with_every_source(self, files: Package, name: str) -> None:
        before = job().key
        files({name: FILES[name] + "# a comment\n"})
        assert job().key != before

    @pytest.mark.parametrize(
        "name", ["toy/unrelated.py", "toy/spec.py", "unrelated.py", "toy/a.txt"]
    )
    def test_does_not_change_with_other_files(self, files: Package, name: str) -> None:
        before = job().key
        files({name: "# a comment\n"})
        assert job().key == before

    def test_does_not_change_when_a_source_is_touched(self, files: Package) -> None:
        before = job().key
        os.utime(files({}) / "toy" / "device.py", (1, 1))
        files({})
        assert job().key == before

    @pytest.mark.parametrize("changed", ["toy/device.py", "toy/helper.py", "other/device.py"])
    def test_a_source_counts_for_the_kernels_that_use_it_alone(
        self, files: Package, changed: str
    ) -> None:
        files({"other/__init__.py": "", "other/device.py": "import shared\n"})
        modules = ("toy.device:toy", "other.device:toy")
        before = [job(device=device).key for device in modules]
        files({changed: FILES.get(changed, "import shared\n") + "# a comment\n"})
        after = [job(device=device).key for device in modules]
        differ = [one != other for one, other in zip(before, after, strict=True)]
        assert differ == [changed.startswith("toy"), changed.startswith("other")]

    def test_kernels_share_only_what_they_import(self) -> None:
        """Of the product's own: touching the GEMV rebuilds no scan, and the other way round."""
        files = {name: set(source_files(spec.module)) for name, spec in builtin().items()}
        assert "sonata_aot.kernels.gemv.device" in files["gemv"]
        for name, used in files.items():
            folders = {item.split(".")[2] for item in used if item.count(".") > 2}
            assert len(folders) == 1 or name.startswith("ssd"), (name, folders)
            assert ("gemv" in folders) == name.startswith("gemv"), name
            assert not any(".spec" in item or item.endswith("tables") for item in used)

    def test_has_no_input_that_no_test_changes(self) -> None:
        assert set(job().inputs({})) == {
            "declaration",
            "device",
            "resident",
            "variant",
            "arch",
            "recipe",
            "sources",
            "compiler",
            "entry_format",
        }

    def test_every_field_of_the_declaration_is_changed_by_a_test(self) -> None:
        changed = {name for changes in CHANGES for name in changes}
        # Choices cannot change without the variants, which are in the key themselves.
        fields = {item.name for item in dataclasses.fields(Declaration)}
        assert fields - changed == {"choices"}

    def test_changes_with_what_should_be_resident(self) -> None:
        before = job()
        for resident in ("1", "m + 1"):
            spec = dataclasses.replace(before.spec, resident=resident)
            assert Job(spec, before.variant, before.arch).key != before.key

    def test_changes_with_the_form_of_an_entry(self, monkeypatch: pytest.MonkeyPatch) -> None:
        before = job().key
        monkeypatch.setattr(plan, "ENTRY_FORMAT", plan.ENTRY_FORMAT + 1)
        assert job().key != before

    def test_changes_with_the_recipe(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, forget: Callable[[], None]
    ) -> None:
        before = job().key
        recipe = Path(plan.__file__).with_name("recipe.py").read_text()
        monkeypatch.setattr(plan, "__file__", str(tmp_path / "plan.py"))
        for text, same in ((recipe, True), (recipe.replace("--keep-ptx", "--keep-ptx -O1"), False)):
            (tmp_path / "recipe.py").write_text(text)
            forget()
            assert (job().key == before) is same

    def test_changes_with_any_compiler_package(self, monkeypatch: pytest.MonkeyPatch) -> None:
        installed = toolchain.compiler_versions()
        before = job().key
        for name in installed:
            versions = {**installed, name: "0.0.1"}
            monkeypatch.setattr(plan, "compiler_versions", lambda versions=versions: versions)
            assert job().key != before
        extra = {**installed, "nvidia-cutlass-dsl-more": "1"}
        monkeypatch.setattr(plan, "compiler_versions", lambda: extra)
        assert job().key != before

    def test_is_the_same_in_another_process(self, files: Package, tmp_path: Path) -> None:
        program = (
            "import json\n"
            "from sonata_aot.aot.plan import choose_archs, choose_kernels, jobs\n"
            "plan = jobs(choose_kernels([]), choose_archs(['sm86', 'sm90']))\n"
            "print(json.dumps([job.key for job in plan]))\n"
        )
        expected = [job.key for job in jobs(choose_kernels([]), choose_archs(["sm86", "sm90"]))]
        for seed in ("1", "2"):
            environ = {**os.environ, "PYTHONHASHSEED": seed, "MAX_JOBS": "7", "NO_COLOR": seed}
            printed = subprocess.run(
                [sys.executable, "-c", program],
                env=environ,
                cwd=tmp_path,
                capture_output=True,
                check=True,
            ).stdout
            assert json.loads(printed) == expected


class TestChoices:
    def test_archs_are_sorted_and_each_stands_once(self) -> None:
        assert [arch.name for arch in choose_archs(["9.0", "sm86", "86", "sm90a"])] == [
            "sm86",
            "sm90",
            "sm90a",
        ]

    def test_the_variable_counts_only_without_a_request(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", "9.0;8.6+PTX")
        assert [arch.name for arch in choose_archs([])] == ["sm86", "sm90"]
        assert [arch.name for arch in choose_archs(["sm80"])] == ["sm80"]

    def test_no_arch_at_all(self) -> None:
        with pytest.raises(UsageError, match="--arch"):
            choose_archs([])

    def test_the_default_kernels_without_a_request(self) -> None:
        default = sorted(name for name, spec in builtin().items() if spec.default)
        assert [spec.name for spec in choose_kernels([])] == default
        assert "gemv_any" in builtin()
        assert [spec.name for spec in choose_kernels(["gemv_any"])] == ["gemv_any"]

    def test_an_unknown_kernel(self) -> None:
        with pytest.raises(UsageError, match=r"'gemm'.*gemv"):
            choose_kernels(["gemv", "gemm"])

    def test_a_job_for_every_combination(self) -> None:
        spec = KernelSpec(DECLARATION, product(m=[1, 2], rows=[4]), "toy.device:toy")
        combined = jobs([spec], [Arch(8, 6), Arch(9, 0)])
        assert [(item.arch.name, item.variant["m"]) for item in combined] == [
            ("sm86", 1),
            ("sm86", 2),
            ("sm90", 1),
            ("sm90", 2),
        ]
        assert combined[0].label == "toy[m=1,rows=4] sm86"
        assert len({item.key for item in combined}) == 4
