"""The benchmark of the scan with a made-up timer: what it compares, checks, and refuses to say."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch

from measure_fakes import FakeScan, Gpu, Launched, binary, loaded_scan, reads
from sonata_aot.aot.measure import ssd, ssd_host, ssd_operands, ssd_shapes, timing
from sonata_aot.aot.measure.ceiling import Reader
from sonata_aot.aot.measure.mamba_opponent import Opponent
from sonata_aot.aot.measure.operands import WrongResult
from sonata_aot.aot.measure.ssd_host import Eager
from sonata_aot.aot.measure.ssd_shapes import BARS, FUSED_AND_UNFUSED_US, Shape
from sonata_aot.artifacts.errors import SonataError, UsageError

SMALL = Shape(2, 70, heads=4, headdim=16, dstate=8, groups=2)
EFFORT = timing.Effort(rounds=1, replays=1, rotation=1)
US = {"sm90": 10.0, "sm86": 12.0, "triton": 30.0, "read": 1.0}


class Scene:
    """Reads at 100 GB/s; two architectures and, unless `alone`, an opponent."""

    def __init__(self, us: dict[str, float] | None = None, *, alone: bool = False) -> None:
        times = US | (us or {})

        def cost(launched: Launched) -> float:
            if launched[0] == "read":
                return launched[4] * 16 / 100e3
            # An extra costs two microseconds.
            return times[launched[0]] + 2 * (len(launched) - 2)

        self.gpu = Gpu(cost)
        runs = [binary({"outputs": i}, "ssd_scan") for i in (0, 1, 0)]
        self.scans = {arch: FakeScan(self.gpu, arch, runs) for arch in ("sm90", "sm86")}
        self.theirs = FakeScan(self.gpu, "triton")
        self.opponent = None if alone else Opponent(self.theirs, {"triton": "3"})
        self.lines: list[str] = []
        self.clocked: list[int] = []

    def clock(self, calls: Sequence[timing.Call]) -> list[Eager]:
        self.clocked.append(len(calls))
        for call in calls:
            call()
        return [Eager(100.0 * i, 10.0 * i) for i in range(1, len(calls) + 1)]

    def run(self, *shapes: Shape) -> ssd.Result:
        reader = Reader(
            reads(self.gpu),
            multiprocessors=4,
            peak_gbps=200.0,
            sink=64,
            stream=lambda: 7,
            timer=self.gpu.timer,
        )
        bench = ssd.Bench(
            [loaded_scan(scan, arch) for arch, scan in self.scans.items()],
            [reader, reader],
            self.gpu.timer,
            self.clock,
            self.opponent,
            device="cpu",
            effort=EFFORT,
            peak_gbps=200.0,
            progress=self.lines.append,
        )
        return bench.run(shapes, 100_000)


def test_each_case_is_a_record_as_results_files_have_it() -> None:
    scene = Scene()
    first, second = scene.run(SMALL).records
    assert first["case"] == "b=2 l=70 h=4 p=16 n=8 g=2 dtype=bf16"
    assert (first["via"], second["via"]) == ("sm90-cubin", "sm86-ptx")
    assert (first["opponent"], second["opponent"]) == ("triton", "triton")
    assert [record["ours_us"] for record in (first, second)] == [10.0, 12.0]
    assert [record["opponent_us"] for record in (first, second)] == [30.0, 30.0]
    assert first["binaries"] == sorted({b.cubin.sha256 for b in scene.scans["sm90"].runs})
    assert second["binaries"] == ["f" * 64]
    assert first["launches"] == ["ssd_scan outputs=0", "ssd_scan outputs=1", "ssd_scan outputs=0"]
    assert (first["eager_us"], second["eager_us"], first["opponent_eager_us"]) == (100, 200, 300)
    assert (first["host_us"], first["opponent_host_us"]) == (10, 30)
    assert first["floor_us"] == pytest.approx(SMALL.bytes / 100e3, abs=1e-3)
    assert first["bytes"] == SMALL.bytes
    assert 1e-4 < first["error"] == first["opponent_error"] < 4e-3
    assert 0 < first["states_error"] == first["opponent_states_error"] < 1e-6


def test_all_are_timed_in_turn_in_one_call() -> None:
    scene = Scene()
    scene.run(SMALL)
    firsts, effort = scene.gpu.timed[-1]
    assert [launched[0] for launched in firsts] == ["sm90", "sm86", "triton"]
    assert effort == EFFORT
    assert scene.clocked == [3]


def test_without_an_opponent_only_ours_is_measured() -> None:
    scene = Scene(alone=True)
    result = scene.run(SMALL)
    record = result.records[0]
    assert result.opponent is None
    names = ("opponent", *(name for name in record if name.startswith("opponent_")))
    assert {record[name] for name in names} == {None}
    assert (record["ours_us"], record["host_us"]) == (10.0, 10)


def test_the_opponent_tunes_anew_for_each_shape_before_it_is_timed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    scene, seen = Scene(), list[str]()
    monkeypatch.setattr(Opponent, "retune", lambda self: seen.append("retune"))
    scene.theirs.damage = lambda *results: seen.append("scan")
    scene.run(SMALL, replace(SMALL, seqlen=71))
    assert seen.count("retune") == 2
    second = seen.index("retune", 1)
    # Each is followed by the call that tunes, and by some that are timed.
    for part in (seen[:second], seen[second:]):
        assert part[0] == "retune"
        assert len(part) > 3


def test_the_fused_kernel_is_an_opponent_by_estimate(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(FUSED_AND_UNFUSED_US, SMALL, (3.0, 2.0))
    records = Scene().run(SMALL).records
    assert [(r["via"], r["opponent"], r["opponent_us"]) for r in records] == [
        ("sm90-cubin", "triton", 30.0),
        ("sm90-cubin", "triton-fused-estimate", 45.0),
        ("sm86-ptx", "triton", 30.0),
        ("sm86-ptx", "triton-fused-estimate", 45.0),
    ]
    fused = records[1]
    assert fused["ours_us"] == 10.0
    assert {fused[f"opponent_{name}"] for name in ("error", "states_error", "eager_us")} == {None}


@pytest.mark.parametrize("name", ["z", "initial", "seq_idx", "strides"])
def test_an_extra_is_held_to_its_bytes(name: str) -> None:
    shape = Shape(2, 70, heads=4, headdim=16, dstate=8, **{name: True})
    scene = Scene()
    record = scene.run(shape).records[0]
    assert record["case"].endswith(f"dtype=bf16 {name}=1")
    firsts, _ = scene.gpu.timed[-1]
    assert [launched[0] for launched in firsts] == ["sm90", "sm86", "sm90", "sm86", "triton"]
    assert firsts[0] != firsts[2] == ("sm90", "dense")
    assert record["base_us"] == 10.0
    assert record["ours_us"] == (10.0 if name == "strides" else 12.0)
    extra = {"z": 2 * 2 * 70 * 64, "initial": 4 * 2 * 64 * 8, "seq_idx": 4 * 2 * 70}.get(name, 0)
    assert record["extra_bytes"] == extra
    assert record["allowed_us"] == pytest.approx(1.05 * (10 + extra / 100e3), abs=2e-3)


@pytest.mark.parametrize("who", ["sm90", "triton"])
def test_a_figure_above_the_ceiling_is_refused(who: str) -> None:
    floor = SMALL.bytes / 100e3
    Scene({who: 1.01 * floor}).run(SMALL)
    for us, limit in ((0.98 * floor, "the 100 GB/s"), (0.4 * floor, "the memory's 200 GB/s")):
        with pytest.raises(SonataError, match=f"bench bug: b=2 l=70 .*above {limit}"):
            Scene({who: us}).run(SMALL)


def test_no_figure_is_said_before_all_are_checked() -> None:
    scene = Scene()
    scene.run(SMALL)
    assert scene.lines
    assert not any(word in line for line in scene.lines for word in ("us", "GB/s"))


@pytest.mark.parametrize("who", ["ours", "theirs"])
@pytest.mark.parametrize("result", [0, 1])
def test_a_wrong_result_is_refused(who: str, result: int) -> None:
    scene = Scene()
    scan = scene.scans["sm86"] if who == "ours" else scene.theirs
    scan.damage = lambda *results: results[result].mul_(1.1)
    name = "sm86-ptx" if who == "ours" else "triton"
    with pytest.raises(WrongResult, match=f"{name}: a replay left .*relative error 0"):
        scene.run(SMALL)


def test_what_a_replay_does_not_write_is_seen() -> None:
    scene = Scene()
    scene.gpu.replays = False
    with pytest.raises(WrongResult, match="not finite"):
        scene.run(SMALL)


def test_a_wrong_last_result_is_seen() -> None:
    scene = Scene()
    turns = itertools.count(1)

    def damage(out: torch.Tensor, states: torch.Tensor) -> None:
        if next(turns) % 2 == 0:
            out[-1, -1] = float("inf")

    scene.scans["sm90"].damage = damage
    with pytest.raises(WrongResult, match="not finite"):
        scene.run(SMALL)


EVERYTHING = Shape(
    2, 70, heads=4, headdim=16, dstate=8, groups=2, z=True, initial=True, seq_idx=True, strides=True
)


@pytest.mark.parametrize("shape", [SMALL, EVERYTHING], ids=str)
def test_bytes_are_those_of_the_tensors(shape: Shape) -> None:
    arguments = ssd_operands.make(shape, "cpu")
    out, states = ssd_operands.wanted(arguments)
    tensors = [value for value in arguments.values() if isinstance(value, torch.Tensor)]
    size = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
    assert shape.bytes == size + 2 * out.numel() + 4 * states.numel()


def test_strides_are_those_of_slices_of_one_projection() -> None:
    arguments = ssd_operands.make(Shape(2, 8, z=True, strides=True), "cpu")
    strides = {name: arguments[name].stride() for name in ("x", "z", "dt", "B", "C")}
    assert strides["x"] == (8 * 4352, 4352, 64, 1)
    assert strides["B"] == strides["C"] == (8 * 4352, 4352, 128, 1)
    assert strides["z"] == (8 * 8512, 8512, 64, 1)
    assert strides["dt"] == (8 * 8512, 8512, 1)
    plain = ssd_operands.plain(arguments)
    assert "z" not in plain
    assert all(v.is_contiguous() for v in plain.values() if isinstance(v, torch.Tensor))


def test_the_reference_by_parts_is_the_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = ssd_operands.make(EVERYTHING, "cpu")
    whole = ssd_operands.scan_in_chunks(**arguments)
    monkeypatch.setattr(ssd_operands, "_AT_ONCE", 70)
    for part, of in zip(ssd_operands.wanted(arguments), whole, strict=True):
        torch.testing.assert_close(part, of, rtol=1e-12, atol=1e-12)


def test_the_shapes() -> None:
    bars = " ".join(str(shape) for shape in BARS)
    assert bars == "2x64 2x128 2x256 2x512 2x1024 2x2048 2x4096 2x8192 1x32768 8x2048"
    assert [str(shape) for shape in ssd_shapes.REPORTED] == [
        "1x2048 heads=24",
        "1x2048 heads=128 groups=8",
        "2x2048 heads=32 headdim=128",
    ]
    assert BARS[5].case == "b=2 l=2048 h=64 p=64 n=128 g=1 dtype=bf16"
    assert ssd_shapes.WITH_EXTRAS[0].case == f"{BARS[5].case} z=1"
    assert {shape.plain for shape in ssd_shapes.WITH_EXTRAS} == {BARS[5]}


def test_estimates_scale_with_the_run() -> None:
    assert list(FUSED_AND_UNFUSED_US) == list(BARS)
    assert ssd_shapes.fused_estimate_us(BARS[0], 48.2) == pytest.approx(77.6)
    assert ssd_shapes.fused_estimate_us(BARS[8], 1237.8) == pytest.approx(1102.7)
    assert ssd_shapes.fused_estimate_us(Shape(2, 2048, z=True), 100.0) is None


def test_a_shape_is_read_from_text() -> None:
    assert Shape.parse("2x2048") == Shape(2, 2048)
    assert Shape.parse("1x64, heads=24,z=1".replace(" ", "")) == Shape(1, 64, heads=24, z=True)
    for text in ("2048", "0x8", "2x8,heads", "2x8,rows=3", "2x8,heads=0", "2x8,heads=3,groups=2"):
        with pytest.raises(UsageError, match="shape"):
            Shape.parse(text)


def test_an_opponent_that_is_missing_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ssd.mamba_opponent, "_NEEDED", {"no_such_package": "pip install it"})
    lines: list[str] = []
    assert ssd.find_opponent(lines.append) is None
    assert lines == ["without an opponent: no_such_package is not installed; pip install it"]


def test_eager_calls_are_timed_until_issued_and_until_done(monkeypatch: pytest.MonkeyPatch) -> None:
    now, pending, made = [0.0], [0.0], [0, 0]

    def call(which: int, host: float, gpu: float) -> None:
        made[which] += 1
        now[0] += host
        pending[0] = max(pending[0], now[0]) + gpu

    def synchronize() -> None:
        now[0] = max(now[0], pending[0])

    monkeypatch.setattr(torch.cuda, "synchronize", synchronize)
    monkeypatch.setattr(ssd_host.time, "perf_counter", lambda: now[0])
    ours, theirs = ssd_host.eager([lambda: call(0, 10e-6, 40e-6), lambda: call(1, 900e-6, 100e-6)])
    # The GPU starts as soon as the first call is issued, and ends after the last.
    assert ours.host_us == pytest.approx(10)
    assert ours.wall_us == pytest.approx(40 + 10 / ssd_host.CALLS)
    assert theirs.host_us == pytest.approx(900)
    assert theirs.wall_us == pytest.approx(900 + 100 / ssd_host.CALLS)
    assert made[0] == made[1] >= ssd_host.ROUNDS * ssd_host.CALLS
