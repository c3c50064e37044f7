"""The GEMV benchmark with a made-up timer: what it compares, checks, and refuses to say."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

from measure_fakes import FakeGemv, Gpu, Launched, binary, loaded, reads, variant
from sonata_aot.aot.measure import render, timing
from sonata_aot.aot.measure.ceiling import Reader
from sonata_aot.aot.measure.gemv import Bench, Plan, Result, require_below
from sonata_aot.aot.measure.operands import Outputs, References, Rotation, WrongResult
from sonata_aot.aot.measure.shapes import Shape
from sonata_aot.artifacts.errors import SonataError, UsageError

SMALL = Shape(16, 64)
WIDE = Shape(48, 128)
EFFORT = timing.Effort(rounds=1, replays=1, rotation=3 * WIDE.bytes)
LARGE = 100_000


def bytes_of(launched: Launched) -> int:
    return launched[4] * 16


class Scene:
    """Reads at 100 GB/s, programmatic ones at 110; ours in 1 us, cuBLAS in 2 us."""

    def __init__(self, pdl: int = 1, ours: float = 1.0, theirs: float = 2.0) -> None:
        def cost(launched: Launched) -> float:
            if launched[0] == "read":
                return bytes_of(launched) / (110e3 if launched[-1] else 100e3)
            return ours if launched[0] == "gemv" else theirs

        self.gpu = Gpu(cost)
        self.gemv = FakeGemv(self.gpu, binary(variant(pdl=pdl)))
        self.reader = Reader(
            reads(self.gpu),
            multiprocessors=4,
            peak_gbps=200.0,
            sink=64,
            stream=lambda: 7,
            timer=self.gpu.timer,
        )
        self.lines: list[str] = []

    def run(self, **plan: Any) -> Result:
        bench = Bench(
            [loaded(self.gemv)],
            [self.reader],
            self.gpu.timer,
            device="cpu",
            effort=EFFORT,
            peak_gbps=200.0,
            progress=self.lines.append,
        )
        parts: dict[str, Any] = {"shapes": [SMALL, WIDE], "batches": [1, 4], "dtypes": ["bf16"]}
        return bench.run(Plan(**parts | plan), LARGE)


def test_each_case_is_a_record_as_results_files_have_it() -> None:
    scene = Scene()
    result = scene.run(dtypes=["bf16", "f16"])
    assert [record["case"] for record in result.records] == [
        f"M={m} N={shape.n} K={shape.k} dtype={dtype}"
        for dtype in ("bf16", "f16")
        for shape in (SMALL, WIDE)
        for m in (1, 4)
    ]
    record = result.records[0]
    assert (record["opponent"], record["via"], record["mode"]) == ("cublas", "sm90-cubin", "bound")
    assert (record["ours_us"], record["opponent_us"]) == (1.0, 2.0)
    assert record["binaries"] == [scene.gemv.chosen.cubin.sha256]
    assert record["bytes"] == SMALL.bytes
    assert 0 < record["error"] == record["opponent_error"] < 2**-8


def test_all_three_are_timed_in_turn_in_one_call() -> None:
    scene = Scene()
    scene.run(shapes=[SMALL], batches=[2])
    firsts, effort = scene.gpu.timed[-1]
    assert [launched[0] for launched in firsts] == ["gemv", "cublas", "read"]
    assert effort == EFFORT


def test_reads_are_launched_as_ours_is() -> None:
    for pdl, bound, programmatic in ((1, True, True), (0, True, False), (1, False, False)):
        scene = Scene(pdl)
        scene.run(bound=bound, shapes=[WIDE])
        firsts, _ = scene.gpu.timed[-1]
        assert firsts[0] == ("gemv", "bound" if bound else "plain")
        assert firsts[2][-1] is programmatic
        assert bytes_of(firsts[2]) == WIDE.bytes


@pytest.mark.parametrize("bound", [True, False])
def test_a_bias_is_added_by_all_and_said(bound: bool) -> None:
    scene = Scene()
    result = scene.run(shapes=[SMALL], batches=[2], bound=bound, bias=True)
    (record,) = result.records
    assert record["case"] == f"M=2 N={SMALL.n} K={SMALL.k} dtype=bf16 bias=1"
    # Without it in one of them and in the reference alike, an error would be of the bias's size.
    assert 0 < record["error"] == record["opponent_error"] < 2**-8


def test_a_forgotten_bias_is_an_error() -> None:
    scene = Scene()
    scene.gemv.damage = lambda launched, out: out.sub_(10)
    with pytest.raises(SonataError, match="bias=1"):
        scene.run(shapes=[SMALL], batches=[2], bias=True)


def test_the_ceiling_is_the_best_of_all_reads() -> None:
    result = Scene().run()
    assert result.large.gbps == pytest.approx(100)
    assert result.large.size == LARGE // 8 * 8
    assert result.ceiling.gbps == pytest.approx(110)
    assert {record["ceiling_gbps"] for record in result.records} == {110.0}


@pytest.mark.parametrize("who", ["ours", "theirs"])
def test_a_figure_above_the_ceiling_is_refused(who: str) -> None:
    ceiling_us = WIDE.bytes / 110e3

    def scene(us: float) -> Scene:
        return Scene(ours=us) if who == "ours" else Scene(theirs=us)

    scene(1.01 * ceiling_us).run(shapes=[WIDE])
    with pytest.raises(SonataError, match=r"bench bug: M=1 N=48 K=128 .*above the 110 GB/s"):
        scene(0.98 * ceiling_us).run(shapes=[WIDE])


def test_no_figure_is_said_before_all_are_checked() -> None:
    scene = Scene()
    scene.run()
    assert scene.lines
    assert not any(word in line for line in scene.lines for word in ("us", "GB/s"))


def test_at_the_ceiling_is_not_above_it() -> None:
    record = {"case": "c", "via": "v", "bytes": 1000, "ours_us": 1.0, "opponent_us": 1.0}
    require_below(record, 1.0)
    with pytest.raises(SonataError):
        require_below(record, 0.999)


def test_a_time_that_no_memory_can_deliver_is_refused() -> None:
    with pytest.raises(SonataError, match=r"M=1 N=48 K=128.*above the memory's 200 GB/s"):
        Scene(ours=WIDE.bytes / 201e3).run(shapes=[WIDE])


def test_what_the_replays_do_not_write_is_noticed() -> None:
    scene = Scene()
    scene.gpu.replays = False
    with pytest.raises(WrongResult, match=r"M=1 N=16 K=64 .*sm90-cubin.*nan"):
        scene.run()


def test_one_wrong_output_among_many_is_noticed() -> None:
    scene = Scene()
    seen: list[torch.Tensor] = []

    def damage(launched: Launched, out: torch.Tensor) -> None:
        seen.append(out)
        if len(seen) % 5 == 0:
            out[0, 3] *= 1.5

    scene.gemv.damage = damage
    with pytest.raises(WrongResult, match="something wrong"):
        scene.run(shapes=[SMALL])


def test_weights_of_a_rotation_do_not_overlap_and_exceed_it() -> None:
    rotation = Rotation([SMALL, WIDE], "bf16", "cpu", rotation=10_000)
    for shape in (SMALL, WIDE):
        weights = rotation.weights(shape)
        assert sum(weight.numel() * 2 for weight in weights) >= 10_000
        starts = [weight.data_ptr() for weight in weights]
        assert all(b - a >= shape.bytes for a, b in itertools.pairwise(starts))
        assert all(start % 16 == starts[0] % 16 for start in starts)
        assert all(weight.is_contiguous() and weight.std() > 0.5 for weight in weights)
    few = rotation.weights(SMALL, 4_100)
    assert len(few) == 3
    assert few[1].data_ptr() == rotation.weights(SMALL)[1].data_ptr()


def test_references_see_an_error_of_one_element() -> None:
    x, weights = torch.randn(2, 64), [torch.randn(8, 64) for _ in range(3)]
    outputs = Outputs(x, 8, 3)
    references = References(x, weights)
    with pytest.raises(WrongResult):
        references.error(outputs.all, "nothing written")
    for out, weight in zip(outputs.each, weights, strict=True):
        torch.mm(x, weight.T, out=out)
    assert references.error(outputs.all, "case") < 1e-5
    outputs.all[1, 1, 7] += 1
    with pytest.raises(WrongResult, match="case"):
        references.error(outputs.all, "case")


@pytest.mark.parametrize("text", ["", "2048", "2048x", "0x8", "axb", "8x8x8", "-1x8", "1e3x8"])
def test_a_shape_that_is_none(text: str) -> None:
    with pytest.raises(UsageError, match="shape"):
        Shape.parse(text)


def test_a_shape() -> None:
    assert Shape.parse(" 2048X4096 ") == Shape(2048, 4096)
    assert str(Shape(2048, 4096)) == "2048x4096"
    assert Shape(2048, 4096).bytes == 2**24


def data() -> dict[str, Any]:
    result = Scene().run()
    return {
        "machine": {"gpu": "Paper 1", "multiprocessors": 4, "torch": "2"},
        "date": "2030-01-01",
        "ceiling": result.ceiling.data(),
        "large_buffer": result.large.data(),
        "records": result.records,
    }


def test_the_table_has_every_case_and_what_it_compares_with() -> None:
    content = data()
    record = content["records"][0]
    record |= {"bytes": 50_000_000, "ours_us": 500.0, "opponent_us": 1000.0, "read_us": 475.0}
    text = render.table(content)
    line = next(line for line in text.splitlines() if record["case"] in line)
    for part in ("2.00x", "500.00", "1000.00", " 100 ", " 50 ", "90.9%", "95.0%"):
        assert part in line
    for other in content["records"]:
        assert other["case"] in text
    assert "geometric mean of 1 shape from 16 MB on" in text
    assert "110 GB/s" in text
    assert "100 GB/s" in text


def test_a_mean_is_geometric_and_leaves_small_shapes_out() -> None:
    content = data()
    content["records"] = [
        {**content["records"][0], "bytes": size, "ours_us": 1.0, "opponent_us": ratio}
        for size, ratio in ((16_000_000, 1.0), (99_000_000, 4.0), (15_999_999, 100.0))
    ]
    assert "sm90-cubin bf16 M=1: 2.00x, geometric mean of 2 shapes" in render.table(content)


def test_shapes_of_one_size_share_a_label() -> None:
    records = [
        {"case": f"M=1 N={n} K={k} dtype=bf16", "bytes": 2 * n * k}
        for n, k in ((4096, 4096), (256, 2048), (2048, 8192), (8512, 2048))
    ]
    labels = [names for _, names in render._neighbours(records)]
    assert labels == [
        ["256x2048  1.0"],
        ["4096x4096  33.6", "2048x8192  33.6", "8512x2048  34.9"],
    ]
