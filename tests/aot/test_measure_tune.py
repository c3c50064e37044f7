"""Tuning with a made-up timer: what is measured, measured again, noticed and written."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from measure_fakes import FakeGemv, FakeKernels, Gpu, Launched, binary, variant
from sonata_aot.aot.measure import model, table, tune
from sonata_aot.aot.measure.shapes import Shape
from sonata_aot.aot.measure.timing import Effort
from sonata_aot.aot.measure.tune import EVERYTHING_KB, Raw, Tuner, launches
from sonata_aot.artifacts.errors import ArgumentError, SonataError, VariantMissing

QUICK = Effort(rounds=1, replays=1, rotation=20_000)
FULL = Effort(rounds=2, replays=2, rotation=40_000)
SHAPES = [Shape(64, 32), Shape(256, 32)]
PLAIN = [binary(variant(m=m, rows=rows, pdl=0), arch="sm90") for m in (1, 2) for rows in (4, 8)]
DEPENDENT = [binary(variant(rows=4, pdl=1)), binary(variant(rows=8, persistent=1, pdl=1))]
HEAD = {
    "machine": {"gpu": "Paper 1", "multiprocessors": 4, "driver_cuda": 13000, "torch": "2.11"},
    "date": "2030-01-01",
    "tool": "0.1.0",
    "via": "sm90-cubin",
}


def cost(launched: Launched) -> float:
    """Rows of 4 suit few outputs, and rows of 8 many; asking ahead helps a little."""
    _, chosen, launch, constant = launched
    return float(chosen["rows"]) - 0.5 * bool(launch["ahead_kb"]) - 1.0 * constant


def tuner(gpu: Gpu, binaries: Any, **more: Any) -> tuple[Tuner, FakeGemv]:
    gemv = FakeGemv(gpu, binaries[0])

    class OnlyGemv(FakeKernels):
        def table(self, kernel: str) -> Any:
            raise AssertionError(kernel)

    parts: dict[str, Any] = {
        "form": "cubin",
        "multiprocessors": 4,
        "timer": gpu.timer,
        "device": "cpu",
        "quick": QUICK,
        "full": FULL,
        "progress": lambda line: None,
    }
    return Tuner(OnlyGemv(gemv), binaries, **parts | more), gemv


def ways(it: Any, constant: int, shape: Shape, processors: int = 4) -> list[tuple[int, ...]]:
    return [tuple(launch.values()) for launch in launches(it, constant, shape, processors)]


def test_plain_calls_are_offered_every_variant_in_one_plain_launch() -> None:
    """Also the programmatic ones, which may be there for other calls anyway."""
    for it in (PLAIN[0], *DEPENDENT):
        assert ways(it, 0, Shape(16384, 2048)) == [(0, 0, 0)]
    assert ways(PLAIN[0], 1, SHAPES[0]) == []


def test_a_dependent_launch_may_ask_ahead() -> None:
    # 4 blocks of 64 registers and 8 warps are resident; 16 of them on 4 multiprocessors.
    assert ways(DEPENDENT[0], 1, Shape(4 * 16, 8192)) == [(0, 0, 0), (0, EVERYTHING_KB, 0)]
    assert ways(DEPENDENT[0], 1, Shape(4 * 16 + 1, 8192)) == [
        *((0, 0, 0), (0, EVERYTHING_KB, 0), (0, EVERYTHING_KB, 4)),
    ]


def test_a_persistent_variant_is_offered_every_fill_and_amount() -> None:
    large = ways(DEPENDENT[1], 1, Shape(16384, 2048))
    a_tile_a_block = [(0, 0, 0), (0, EVERYTHING_KB, 0)]
    assert large == [
        *(
            (blocks, kb, 0)
            for blocks in (1, 2, 3, 4)
            for kb in (0, 4096, 8192, 24576, EVERYTHING_KB)
        ),
        *a_tile_a_block,
    ]
    # 8 MB: asking for that much is asking for everything.
    small = ways(DEPENDENT[1], 1, Shape(2048, 2048))
    assert small == [
        *((blocks, kb, 0) for blocks in (1, 2, 3, 4) for kb in (0, 4096, EVERYTHING_KB)),
        *a_tile_a_block,
    ]


def test_everything_is_measured_quickly_and_the_best_again() -> None:
    gpu = Gpu(cost)
    it, _ = tuner(gpu, [*PLAIN, *DEPENDENT])
    found: list[table.Measurement] = []
    it.run(SHAPES, found)
    for shape in SHAPES:
        for m, constant, count in ((1, 0, 4), (2, 0, 2), (1, 1, 2 + 10), (2, 1, 0)):
            here = [
                item
                for item in found
                if (item.shape, item.m, item.constant) == ((shape.n, shape.k), m, constant)
            ]
            quick = [item for item in here if not item.full]
            full = [item for item in here if item.full]
            if (shape.n, constant, m) == (256, 1, 1):
                count += 1  # 64 blocks are more than fit at once
            assert len(quick) == count
            assert bool(full) == bool(count)
            assert {item.us for item in quick} >= {item.us for item in full}
    assert {str(effort) for _, effort in gpu.timed} == {str(QUICK), str(FULL)}
    assert {item.binary for item in found} == {b.cubin.sha256 for b in [*PLAIN, *DEPENDENT]}


def test_the_best_meet_in_one_call_of_the_timer() -> None:
    gpu = Gpu(cost)
    it, _ = tuner(gpu, DEPENDENT)
    it.run([Shape(512, 32)], [])
    firsts, effort = gpu.timed[-1]
    assert effort == FULL
    assert len(firsts) == tune.FINALISTS


def test_a_lucky_first_reading_does_not_win() -> None:
    seen: set[str] = set()

    def luck(launched: Launched) -> float:
        lucky = launched[1]["rows"] == 8 and str(launched) not in seen
        seen.add(str(launched))
        return 0.5 if lucky else cost(launched)

    it, _ = tuner(Gpu(luck), PLAIN[:2])
    raw = Raw(HEAD)
    it.run(SHAPES, raw.measurements)
    rules = tomllib.loads(tune.make(raw, PLAIN, None, 0.01))["gemv"]["rules"]
    assert [rule["variant"]["rows"] for rule in rules] == [4]


def test_who_is_measured_again_is_decided_by_score() -> None:
    many = [binary(variant(rows=rows)) for rows in range(1, 9)]

    def slowest_first(item: table.Measurement) -> float:
        return 100.0 / item.us

    it, _ = tuner(Gpu(cost), many, score=slowest_first)
    found: list[table.Measurement] = []
    it.run(SHAPES[:1], found)
    again = {item.variant["rows"] for item in found if item.full}
    assert again == set(range(8, 8 - tune.FINALISTS, -1))


def test_a_wrong_variant_is_left_out_and_the_rest_is_measured() -> None:
    gpu = Gpu(cost)
    it, gemv = tuner(gpu, PLAIN)

    def damage(launched: Launched, out: Any) -> None:
        if launched[1]["rows"] == 4:
            out.mul_(1.1)

    gemv.damage = damage
    found: list[table.Measurement] = []
    with pytest.raises(
        SonataError, match=r"launches that failed: 4,.*N=64 K=32 .*rows=4.*--measured"
    ):
        it.run(SHAPES, found)
    assert {item.variant["rows"] for item in found} == {8}
    assert {item.m for item in found} == {1, 2}
    assert {item.shape for item in found} == {(64, 32), (256, 32)}


def test_a_variant_that_is_wrong_only_now_and_then_does_not_win() -> None:
    it, gemv = tuner(Gpu(cost), PLAIN[:2])
    runs: list[Launched] = []

    def damage(launched: Launched, out: Any) -> None:
        runs.append(launched)
        # Not in the quick round, of 2 x 5 launches for each of two variants.
        if launched[1]["rows"] == 4 and len(runs) > 20:
            out.mul_(1.1)

    gemv.damage = damage
    raw = Raw(dict(HEAD))
    with pytest.raises(SonataError, match=r"launches that failed: 1,.*rows=4"):
        it.run([Shape(64, 32)], raw.measurements)
    assert {item.variant["rows"] for item in raw.measurements if item.full} == {8}
    (rule,) = tomllib.loads(tune.make(raw, PLAIN, None, 0.01))["gemv"]["rules"]
    assert rule["variant"]["rows"] == 8


def test_a_variant_that_does_a_part_of_its_work_is_wrong() -> None:
    gpu = Gpu(cost)
    it, _ = tuner(gpu, PLAIN)
    gpu.replays = False
    with pytest.raises(SonataError, match="nan"):
        it.run(SHAPES, [])


def test_a_launch_that_is_refused_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    it, gemv = tuner(Gpu(cost), DEPENDENT)
    using = gemv.using

    def refusing(variant: Any, launch: Any, *, constant: bool = False) -> Any:
        if launch["blocks_per_sm"] == 3:
            raise ArgumentError("gemv: blocks_per_sm = 3", remedy="pass another")
        return using(variant, launch, constant=constant)

    monkeypatch.setattr(gemv, "using", refusing)
    found: list[table.Measurement] = []
    with pytest.raises(
        SonataError, match=r"launches that failed: 4,.*blocks_per_sm = 3; pass another"
    ):
        it.run(SHAPES, found)
    assert {item.launch["blocks_per_sm"] for item in found} == {0, 1, 2, 4}


def test_a_time_beyond_the_memory_is_refused_in_the_full_round_only() -> None:
    it, _ = tuner(Gpu(cost), PLAIN[:2], peak_gbps=64 * 32 * 2 / 5.0 / 1e3)
    found: list[table.Measurement] = []
    with pytest.raises(SonataError, match=r"bench bug: N=64 K=32 .*rows=4"):
        it.run(SHAPES, found)
    assert [item.full for item in found] == [False, False]


def run(binaries: Any, **more: Any) -> Raw:
    raw = Raw(dict(HEAD))
    it, _ = tuner(Gpu(cost), binaries, **more)
    it.run(SHAPES, raw.measurements)
    return raw


def test_the_table_of_a_run() -> None:
    raw = run([*PLAIN, *DEPENDENT])
    content = tomllib.loads(tune.make(raw, [*PLAIN, *DEPENDENT], None, 0.01))
    assert [rule["when"] for rule in content["gemv"]["rules"]] == [
        {"m": 1, "constant": 0},
        {"m": 1, "constant": 1},
        {"m": 2, "constant": 0},
    ]
    dependent = content["gemv"]["rules"][1]
    assert dependent["variant"] == {
        "side": "a",
        "rows": 4,
        "warps": 8,
        "unroll": 2,
        "persistent": 0,
        "pdl": 1,
    }
    assert dependent["launch"]["ahead_kb"] == EVERYTHING_KB
    origin = content["gemv"]["origin"]
    for part in ("Paper 1", "4 SMs", "CUDA 13.0", "torch 2.11", "2030-01-01", "0.1.0", "2 shapes"):
        assert part in origin
    assert "sm90-cubin" in origin
    assert "within 1%" in origin


def test_what_is_kept_is_chosen_where_it_is_as_fast_and_said() -> None:
    def cost(rows: int) -> float:
        return 10.0 if rows == 8 else 10.04

    raw = Raw(dict(HEAD))
    for rows, warps in ((4, 4), (8, 8)):
        it = binary(variant(m=1, rows=rows, warps=warps, pdl=0), arch="sm90")
        launch = {"blocks_per_sm": 0, "ahead_kb": 0, "skip_blocks_per_sm": 0}
        raw.measurements.append(
            table.Measurement(
                *(64, 64, 1, 0, dict(it.variant), launch), us=cost(rows), full=True, binary="0"
            )
        )

    def chosen(*kept: str) -> tuple[int, str]:
        content = tomllib.loads(tune.make(raw, [], None, 0.0, kept))["gemv"]
        (rule,) = content["rules"]
        return rule["variant"]["rows"], content["origin"]

    assert chosen()[0] == 8
    rows, origin = chosen("m=1,rows=4")
    assert rows == 4  # as fast within the noise, with smaller blocks
    assert "m=1,rows=4" in origin
    with pytest.raises(ArgumentError, match="--keep m=1,rows=5"):
        chosen("m=1,rows=5")


def test_a_model_scores_what_is_measured() -> None:
    score = tune.scorer("a10g", PLAIN)
    raw = run(PLAIN[:2], score=score)
    for item in raw.measurements:
        (it,) = (b for b in PLAIN if b.variant == item.variant)
        assert score(item) == item.us * model.TARGETS["a10g"].factor(it, item.n)
    # Some blocks are too few to keep an A10G's memory busy, so that the order is another.
    assert any(score(item) > item.us for item in raw.measurements)
    rules = tomllib.loads(tune.make(raw, PLAIN[:2], "a10g", 0.01))["gemv"]
    assert "A10G" in rules["origin"]


def test_a_model_leaves_out_what_cannot_keep_its_memory_busy() -> None:
    idle = binary(variant(rows=1, unroll=2), registers=255, arch="sm86")
    score = tune.scorer("a10g", [idle, PLAIN[1]])
    raw = run([idle, PLAIN[1]])
    rules = tomllib.loads(tune.make(raw, [idle, PLAIN[1]], "a10g", 0.01))["gemv"]["rules"]
    assert {rule["variant"]["rows"] for rule in rules} == {8}
    assert min(score(item) for item in raw.measurements if item.variant["rows"] == 1) == float(
        "inf"
    )


def test_a_model_refuses_persistent_variants() -> None:
    with pytest.raises(ArgumentError, match="persistent"):
        tune.make(run(DEPENDENT), DEPENDENT, "a10g", 0.01)


def test_measurements_survive_their_file(tmp_path: Path) -> None:
    raw = run([*PLAIN, *DEPENDENT])
    path = tmp_path / "raw.json"
    path.write_text(raw.text())
    assert Raw.read(path) == raw
    assert len(path.read_text().splitlines()) == len(raw.measurements) + 3
    assert len(json.loads(path.read_text())["measurements"]) == len(raw.measurements)


def test_a_damaged_file_is_refused(tmp_path: Path) -> None:
    raw = run(PLAIN[:1])
    path = tmp_path / "raw.json"
    good = json.loads(raw.text())
    machine = good["head"]["machine"]
    first = good["measurements"][0]
    assert set(machine) == {"gpu", "multiprocessors", "driver_cuda", "torch"}
    heads = [
        *([], {}, "x", {**good["head"], "machine": "x"}, {**good["head"], "via": None}),
        {**good["head"], "machine": {**machine, "driver_cuda": "12"}},
    ]
    changes = [
        *(
            {"us": None},
            {"us": "1"},
            {"us": -1.0},
            {"us": 0.0},
            {"us": float("nan")},
            {"us": 1e999},
        ),
        *({"n": "x"}, {"n": -5}, {"n": [1]}, {"n": 1.5}, {"k": 2**31}, {"m": True}),
        *({"constant": 2}, {"full": 1}, {"variant": [1]}, {"variant": {}}, {"launch": None}),
        *({"launch": {"blocks_per_sm": 0}}, {"variant": {"rows": {"a": 1}}}, {"binary": 3}),
    ]
    damaged = [{**good, "head": head} for head in heads]
    damaged += [{**good, "measurements": [{**first, **change}]} for change in changes]
    for content in [*damaged, {**good, "measurements": {}}]:
        path.write_text(json.dumps(content))
        with pytest.raises(ArgumentError, match=r"raw\.json: no file of measurements: ."):
            Raw.read(path)


NESTED = "[" * 200_000


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", NESTED, '{"head": {}, "measurements": [{"n": 1}]}']
)
def test_another_file_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "raw.json"
    path.write_text(text)
    with pytest.raises(ArgumentError, match=r"raw\.json: no file of measurements"):
        Raw.read(path)
    with pytest.raises(ArgumentError, match="no file of measurements"):
        Raw.read(tmp_path / "absent.json")


def test_nothing_makes_no_table() -> None:
    with pytest.raises(SonataError, match="nothing was measured"):
        tune.make(Raw(dict(HEAD)), PLAIN, None, 0.01)


@pytest.fixture
def declared(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """A directory with PLAIN and more for sm90, and a declaration of just PLAIN."""
    others = [
        binary(variant(rows=64)),
        binary(variant(rows=4, dtype="f16")),
        binary(variant(rows=4), arch="sm86"),
        binary(variant(rows=4), kernel="gemv_any"),
    ]
    manifest = SimpleNamespace(
        binaries=[*PLAIN, *others],
        selection=SimpleNamespace(archs=("sm86", "sm90")),
        kernels=[SimpleNamespace(name="gemv"), SimpleNamespace(name="gemv_any")],
    )
    spec = SimpleNamespace(
        variants=[*(b.variant for b in PLAIN), variant(rows=4, dtype="f16")],
        declaration=SimpleNamespace(least_sm=lambda variant: 80 + 10 * variant["pdl"]),
    )
    monkeypatch.setattr(tune, "open_artifacts", lambda path: SimpleNamespace(manifest=manifest))
    monkeypatch.setattr(tune, "builtin", lambda: {"gemv": spec})
    return spec


def test_declared_variants_of_one_arch_and_dtype_are_tuned(declared: SimpleNamespace) -> None:
    assert tune.tuned_binaries(Path("there"), "sm90") == PLAIN


def test_a_directory_must_hold_every_declared_variant(declared: SimpleNamespace) -> None:
    declared.variants += [variant(rows=2), variant(rows=2, dtype="f16")]
    with pytest.raises(VariantMissing, match=r"there lacks 1 of the 5 .* sm90") as raised:
        tune.tuned_binaries(Path("there"), "sm90")
    assert (
        "`sonata-aot build --all --arch sm86 --arch sm90 --kernel gemv --kernel gemv_any "
        "--kernel read --out there`"
    ) in raised.value.remedy


def test_what_is_for_newer_archs_is_not_missed(declared: SimpleNamespace) -> None:
    declared.variants = [variant(rows=4), variant(rows=4, pdl=1)]
    (found,) = tune.tuned_binaries(Path("there"), "sm86")
    assert (found.arch, found.kernel) == ("sm86", "gemv")
