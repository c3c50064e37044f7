"""Tables of rules: which one an arch gets, what is refused, and what the shipped ones say."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from sonata_aot.aot.plan import choose_kernels, jobs
from sonata_aot.artifacts import Arch, Rule, first_match, open_artifacts
from sonata_aot.artifacts.errors import ManifestError
from sonata_aot.artifacts.rules import MAX_SIZE
from sonata_aot.artifacts.schema import decode, encode
from sonata_aot.kernels import builtin, tables

GEMV = builtin()["gemv"]
ROOT = Path(__file__).resolve().parents[2]
SHIPPED = sorted(tables.FOLDER.glob("*.toml"))
SM86, SM90 = Arch.parse("sm86"), Arch.parse("sm90")
DTYPES, BATCHES = ("bf16", "f16"), (1, 2, 4, 8)
RULE = {
    "when": "{m = 1, constant = 0}",
    "n": "[1, 2147483647]",
    "k": "[1, 2147483647]",
    "variant": '{side = "a", rows = 4, warps = 8, unroll = 2, persistent = 0, pdl = 0}',
    "launch": "{blocks_per_sm = 0}",
}


def text(**changes: str | None) -> str:
    """A good rule and then one with changes; None leaves a key out."""
    bad = {key: value for key, value in {**RULE, **changes}.items() if value is not None}
    lines = [f"{key} = {value}" for item in (RULE, bad) for key, value in item.items()]
    good, rest = lines[: len(RULE)], lines[len(RULE) :]
    return "\n".join(
        ["[gemv]", 'origin = "paper"', "[[gemv.rules]]", *good, "[[gemv.rules]]", *rest]
    )


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str, str], None]:
    """Writes a file into a folder that stands for the package's own."""
    monkeypatch.setattr(tables, "FOLDER", tmp_path)

    def write(name: str, content: str) -> None:
        (tmp_path / f"{name}.toml").write_text(content)

    return write


def origin(arch: str) -> str:
    found = tables.table(GEMV, Arch.parse(arch))
    assert found is not None
    assert {rule.arch for rule in found.rules} == {arch}
    return found.origin


class TestWhichTable:
    @pytest.mark.parametrize(
        ("arch", "of"),
        [
            *(("sm80", "sm86"), ("sm86", "sm86"), ("sm87", "sm86"), ("sm89", "sm86")),
            *(("sm90", "sm90"), ("sm90a", "sm90"), ("sm100", "sm90"), ("sm120", "sm90")),
        ],
    )
    def test_that_of_the_next_lower_architecture(self, arch: str, of: str) -> None:
        content = tomllib.loads((tables.FOLDER / f"{of}.toml").read_text())
        assert origin(arch) == content["gemv"]["origin"]

    def test_a_new_one_counts_from_its_architecture_on(
        self, write: Callable[[str, str], None]
    ) -> None:
        for name in ("sm86", "sm100", "sm90"):
            write(name, text().replace("paper", name))
        archs = ("sm80", "sm89", "sm90a", "sm100", "sm120")
        assert [origin(arch) for arch in archs] == ["sm86", "sm86", "sm90", "sm100", "sm100"]

    @pytest.mark.parametrize("name", ["gemv_any", "read"])
    def test_a_kernel_that_is_in_none_has_no_rules_and_all_its_variants(self, name: str) -> None:
        spec = builtin()[name]
        assert tables.table(spec, SM90) is None
        assert tables.rules(spec, SM90) == ()
        assert tables.default_variants(spec, SM90) == spec.variants

    def test_no_files_at_all(self, write: Callable[[str, str], None]) -> None:
        assert tables.table(GEMV, SM90) is None


def test_a_rule_is_what_the_file_says(write: Callable[[str, str], None]) -> None:
    write("sm90", text(n="[9, 99]", launch="{blocks_per_sm = 3}"))
    found = tables.table(GEMV, SM90)
    assert found is not None
    assert found.origin == "paper"
    assert found.rules[1] == Rule(
        kernel="gemv",
        arch="sm90",
        when={"m": 1, "constant": 0},
        sizes={"n": (9, 99), "k": (1, MAX_SIZE)},
        variant={
            "m": 1,
            "side": "a",
            "rows": 4,
            "warps": 8,
            "unroll": 2,
            "persistent": 0,
            "pdl": 0,
        },
        launch={"blocks_per_sm": 3},
    )
    # In the order of the choices, as variants are written everywhere.
    choices = [name for name in GEMV.declaration.choices if name != "dtype"]
    assert list(found.rules[1].variant) == choices
    # Built by default are just that variant's two dtypes.
    chosen = tables.default_variants(GEMV, SM90)
    assert [dict(v) for v in chosen] == [{"dtype": d, **found.rules[1].variant} for d in DTYPES]


@pytest.mark.parametrize(
    ("content", "place"),
    [
        ("[gemv", "not valid TOML"),
        ("gemv = 1", "gemv"),
        ("[gemv]\nrules = []", "gemv"),
        ('[gemv]\norigin = ""\nrules = []', "gemv: no rules"),
        (text(when=None), "gemv.rules[1]"),
        (text(more="1"), "gemv.rules[1]"),
        (text(n="[1]"), "gemv.rules[1].n"),
        (text(n="[1, 2, 3]"), "gemv.rules[1].n"),
        (text(n="[-1, 2]"), "gemv.rules[1].n"),
        (text(k="[1, 2147483648]"), "gemv.rules[1].k"),
        (text(k='["1", 2]'), "gemv.rules[1].k"),
        (text(k="7"), "gemv.rules[1].k"),
        (text(when='{m = "1", constant = 0}'), "gemv.rules[1].when"),
        (text(launch="{blocks_per_sm = 0.5}"), "gemv.rules[1].launch"),
        (text(variant="[]"), "gemv.rules[1].variant"),
        (text(variant=RULE["variant"].replace("side", "fetch")), "gemv.rules[1]"),
        (text(variant=RULE["variant"].replace("rows = 4", "rows = 5")), "gemv.rules[1]"),
        (text(when="{m = 8, constant = 0}"), "gemv.rules[1]"),
        # Programmatic launch is for sm90 on.
        (text(variant=RULE["variant"].replace("pdl = 0", "pdl = 1")), "gemv.rules[1]"),
    ],
    ids=str,
)
def test_a_bad_file_is_named_and_the_rule_in_it(
    write: Callable[[str, str], None], tmp_path: Path, content: str, place: str
) -> None:
    write("sm86", content)
    with pytest.raises(ManifestError) as raised:
        tables.table(GEMV, SM86)
    assert raised.value.what.startswith(f"{tmp_path / 'sm86.toml'}: {place}")
    assert "sonata-aot tune gemv" in raised.value.remedy


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
class TestShipped:
    @pytest.fixture
    def table(self, path: Path) -> tables.Table:
        found = tables.table(GEMV, Arch.parse(path.stem))
        assert found is not None
        return found

    def test_rules_are_plain_and_strict(self, table: tables.Table) -> None:
        for rule in table.rules:
            assert decode(Rule, encode(rule), "rule") == rule

    def test_variants_are_declared_and_run_there(self, path: Path, table: tables.Table) -> None:
        number = Arch.parse(path.stem).number
        for rule in table.rules:
            for dtype in DTYPES:
                variant = {"dtype": dtype, **rule.variant}
                assert variant in GEMV.variants
                assert GEMV.declaration.least_sm(variant) <= number

    def test_launches_name_what_the_loader_knows(self, table: tables.Table) -> None:
        names = {"blocks_per_sm", "ahead_kb", "skip_blocks_per_sm"}
        for rule in table.rules:
            assert set(rule.launch) == names
            # Only blocks that take several tiles can be so few, and only pdl asks ahead.
            assert rule.variant["persistent"] or not rule.launch["blocks_per_sm"]
            assert rule.variant["pdl"] or not rule.launch["ahead_kb"]

    def test_every_call_finds_a_rule(self, path: Path, table: tables.Table) -> None:
        constants = {0, 1} if path.stem == "sm90" else {0}
        cases = {(rule.when["m"], rule.when["constant"]) for rule in table.rules}
        assert cases == {(m, constant) for m in BATCHES for constant in constants}
        bounds = {size for rule in table.rules for pair in rule.sizes.values() for size in pair} | {
            1,
            MAX_SIZE,
        }
        for m, constant in cases:
            for n in bounds:
                for k in bounds:
                    found = first_match(
                        table.rules, {"m": m, "constant": constant}, {"n": n, "k": k}
                    )
                    assert found is not None
                    assert found.variant["m"] == m

    def test_calls_that_promise_nothing_are_launched_plainly(self, table: tables.Table) -> None:
        for rule in table.rules:
            if not rule.when["constant"]:
                assert set(rule.launch.values()) == {0}


def test_each_table_says_how_it_came_about() -> None:
    assert [path.stem for path in SHIPPED] == ["sm86", "sm90"]
    modelled, measured = origin("sm86"), origin("sm90")
    assert "Scored for an A10G" in modelled
    assert "via sm86-ptx" in modelled
    assert "scored" not in measured
    assert "via sm90-cubin" in measured
    for said in (modelled, measured):
        assert said.startswith("Measured by sonata-aot tune ")
        assert "NVIDIA H200" in said


def planned(arch: Arch, *, everything: bool) -> dict[str, list[Any]]:
    found: dict[str, list[Any]] = {}
    for job in jobs(choose_kernels((), everything=everything), [arch], everything=everything):
        found.setdefault(job.spec.name, []).append(job.variant)
    return found


@pytest.mark.parametrize("arch", [SM86, SM90], ids=str)
class TestWhatIsBuilt:
    def test_by_default_what_rules_name_for_every_dtype_and_m(self, arch: Arch) -> None:
        default = planned(arch, everything=False)
        every = {(dtype, m) for dtype in DTYPES for m in BATCHES}
        for name in ("gemv", "gemv_any"):
            assert {(v["dtype"], v["m"]) for v in default[name]} == every, name
        assert {(v["dtype"], v["m"], v["wide"]) for v in default["gemv_any"]} == {
            (*case, wide) for case in every for wide in (0, 1)
        }
        named = [rule.variant for rule in tables.rules(GEMV, arch)]
        for variant in default["gemv"]:
            assert {name: variant[name] for name in named[0]} in named
        for dtype in DTYPES:
            for variant in named:
                assert {"dtype": dtype, **variant} in default["gemv"]

    def test_with_everything_all_that_is_declared_for_the_arch(self, arch: Arch) -> None:
        default, every = (planned(arch, everything=flag) for flag in (False, True))
        assert list(every) == list(builtin())
        for name, variants in every.items():
            spec = builtin()[name]
            assert variants == [v for v in spec.variants if spec.is_for(v, arch)]
        assert every["gemv_any"] == default["gemv_any"]
        assert len(every["gemv"]) > len(default["gemv"])

    def test_a_build_has_the_rules_of_the_tables(self, arch: Arch, built: Path) -> None:
        manifest = open_artifacts(built).manifest
        assert manifest.rules_for("gemv", arch.name) == tables.rules(GEMV, arch)
        assert len(manifest.rules) == sum(len(tables.rules(GEMV, a)) for a in (SM86, SM90))
        present = {
            name: [b.variant for b in manifest.binaries if (b.kernel, b.arch) == (name, arch.name)]
            for name in builtin()
        }
        default = planned(arch, everything=False)
        assert {name for name, variants in present.items() if variants} == set(default)
        for name, variants in default.items():
            assert sorted(map(str, variants)) == sorted(map(str, present[name]))


class TestMeasurements:
    """The shipped tables against the measurements that they were made of."""

    @staticmethod
    def raw(arch: str) -> Any:
        from sonata_aot.aot.measure.tune import Raw

        return Raw.read(ROOT / "benchmarks" / "tuning" / f"{arch}.json")

    def test_the_sm90_table_is_what_tune_makes_of_them(self) -> None:
        raw = self.raw("sm90")
        from sonata_aot.aot.measure.tune import make

        def named(words: str) -> list[str]:
            said = re.search(rf"{words}: (.+?)\.( |$)", origin("sm90"))
            return said[1].split(" and ") if said else []

        kept, used = named("Kept in any case"), named("Used where another may be faster alone")
        assert (len(kept), len(used)) == (1, 1)
        text = make(raw, [], None, 0.01, kept, used)
        assert text == (tables.FOLDER / "sm90.toml").read_text(encoding="utf-8")

    @pytest.mark.parametrize("arch", ["sm86", "sm90"])
    def test_a_measured_shape_gets_a_variant_that_is_nearly_its_fastest(self, arch: str) -> None:
        rules = tables.rules(GEMV, Arch.parse(arch))
        cells: dict[tuple[int, ...], list[Any]] = {}
        for item in self.raw(arch).measurements:
            cells.setdefault((item.m, item.constant, *item.shape), []).append(item)
        assert len(cells) == 10 * 4 * (2 if arch == "sm90" else 1)
        for (m, constant, n, k), items in cells.items():
            rule = first_match(rules, {"m": m, "constant": constant}, {"n": n, "k": k})
            assert rule is not None
            (chosen,) = (
                item
                for item in items
                if {**rule.variant, "dtype": "bf16"} == item.variant and rule.launch == item.launch
            )
            if f"n={n},k={k},m={m},constant={constant}," in origin(arch):
                continue  # what is used there, the origin says
            # The model of an A10G may prefer another one than what is fastest here.
            assert chosen.us <= min(item.us for item in items) * 1.02
