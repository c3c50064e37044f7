"""The read ceiling: every variant is tried, and no lucky reading wins."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from measure_fakes import FakeRead, Gpu, Launched, reads
from sonata_aot.aot.measure import timing
from sonata_aot.aot.measure.ceiling import FINALISTS, Reader
from sonata_aot.artifacts.errors import SonataError

SIZE = 2**20
EFFORT = timing.FULL


def reader(gpu: Gpu, peak: float = float("inf")) -> Reader:
    return Reader(
        reads(gpu),
        multiprocessors=10,
        peak_gbps=peak,
        sink=64,
        stream=lambda: 7,
        timer=gpu.timer,
    )


def test_ways_are_all_variants_of_the_style_in_grids_that_have_work() -> None:
    plain = reader(Gpu(lambda launched: 1.0)).ways(SIZE, programmatic=False)
    assert {(way.warps, way.unroll) for way in plain} == {(8, 4), (8, 8), (16, 4), (16, 8)}
    assert not any(way.programmatic for way in plain)
    # 65536 vectors: blocks of 8 warps with 4 loads each take 1024 of them at once.
    assert [w.blocks for w in plain if (w.warps, w.unroll) == (8, 4)] == [10, 20, 40, 64]
    large = reader(Gpu(lambda launched: 1.0)).ways(2**30, programmatic=True)
    assert {way.programmatic for way in large} == {True}
    assert [w.blocks for w in large if (w.warps, w.unroll) == (16, 8)] == [
        *(10, 20, 40, 80, 160, 16384)
    ]


@pytest.mark.parametrize("size", [1, 16, 17, 40_000])
def test_every_grid_has_a_block(size: int) -> None:
    for way in reader(Gpu(lambda launched: 1.0)).ways(size, programmatic=False):
        assert way.blocks >= 1


def test_the_fastest_variant_wins_and_reads_every_address() -> None:
    def cost(launched: Launched) -> float:
        _, warps, unroll, pdl, vectors, blocks, programmatic = launched
        assert vectors == SIZE // 16
        assert programmatic == bool(pdl)
        return 5.0 if (warps, unroll, blocks) == (16, 4, 20) else 9.0

    gpu = Gpu(cost)
    it = reader(gpu)
    best = it.best([1000, 2000], SIZE, programmatic=True, effort=EFFORT)
    way = best.way
    assert (way.warps, way.unroll, way.blocks, way.programmatic) == (16, 4, 20, True)
    assert best.gbps == pytest.approx(SIZE / 5.0 / 1e3)
    assert it.seen == [best]
    for key, binary in it._binaries.items():
        assert isinstance(binary, FakeRead)
        assert set(binary.addresses) == ({1000, 2000} if key[2] else set())


def test_a_lucky_first_reading_does_not_win() -> None:
    def luck() -> Callable[[Launched], float]:
        seen: set[Launched] = set()

        def cost(launched: Launched) -> float:
            lucky = launched[1:3] == (8, 8) and launched not in seen
            seen.add(launched)
            return 1.0 if lucky else {(16, 8): 5.0}.get(launched[1:3], 6.0)

        return cost

    gpu = Gpu(luck())
    it = reader(gpu)
    best = it.best([0], SIZE, programmatic=False, effort=EFFORT)
    assert best.us > 1.0
    firsts, effort = gpu.timed[-1]
    assert len(firsts) == FINALISTS
    assert effort == EFFORT
    assert all(read.us > 1.0 for read in it.seen)


def test_two_lucky_readings_do_not_hide_the_fastest() -> None:
    """It comes third among the first readings, and wins when they meet again."""
    lucky = {("read", 8, 8, 0, SIZE // 16, blocks, False) for blocks in (10, 20)}
    fastest = ("read", 16, 8, 0, SIZE // 16, 10, False)
    seen: set[Launched] = set()

    def cost(launched: Launched) -> float:
        first = launched not in seen
        seen.add(launched)
        if launched in lucky:
            return 1.0 if first else 6.0
        return 5.0 if launched == fastest else 9.0

    best = reader(Gpu(cost)).best([0], SIZE, programmatic=False, effort=EFFORT)
    assert lucky < seen
    assert (best.way.warps, best.way.unroll, best.way.blocks, best.us) == (16, 8, 10, 5.0)


def test_a_read_that_no_memory_can_deliver_is_a_bug() -> None:
    with pytest.raises(SonataError, match=r"bench bug.*above the memory's 1000 GB/s"):
        reader(Gpu(lambda launched: 1.0), peak=1000.0).best([0], SIZE, False, EFFORT)


@pytest.mark.parametrize(("size", "us"), [(10_000_000, 10.01), (10_000_000, 50.0), (1, 1.0)])
def test_a_time_that_the_memory_allows(size: int, us: float) -> None:
    timing.require_possible(size, us, 1000.0, "case")


@pytest.mark.parametrize("us", [9.99, 0.5, 0.0, -1.0, float("nan")])
def test_a_time_that_the_memory_does_not_allow(us: float) -> None:
    with pytest.raises(SonataError, match=r"case.*above the memory's 1000 GB/s"):
        timing.require_possible(10_000_000, us, 1000.0, "case")


def test_copies_make_a_whole_rotation() -> None:
    assert timing.copies(100, 800) == 8
    assert timing.copies(101, 800) == 8
    assert timing.copies(99, 800) == 9
    assert timing.copies(5000, 800) == 2
