"""When a sequence is cut into segments."""

from __future__ import annotations

from types import SimpleNamespace
from typing import cast

import pytest

from sonata_aot.artifacts import Binary
from sonata_aot.loader.ssd_occupancy import (
    LAUNCHES_COST,
    LEAST_TILES,
    SHARING,
    STATES_COST,
    STATES_SHARING,
    Cut,
    Gpu,
    Room,
    choose_cut,
    cost,
)

# Multiprocessors, and blocks that one holds.
H200 = Room(132, 1, 3)
PAIRS = Room(132, 2, 3)
A10G = Room(80, 1, 1)


@pytest.mark.parametrize(
    ("blocks", "tiles", "room", "segments"),
    [
        (128, 32, H200, 1),  # 2 x 2048 tokens, 64 heads
        (64, 512, H200, 2),  # 1 x 32768
        (64, 512, PAIRS, 4),
        (24, 32, H200, 4),  # 1 x 2048, 24 heads
        (512, 32, H200, 1),  # 8 x 2048
        (32, 32, A10G, 2),
        (64, 32, A10G, 1),
        (4, 100, H200, 25),  # each of four tiles
        (64, 1, H200, 1),
        (64, 0, H200, 1),
        (0, 100, H200, 1),
        (99, 1000, H200, 1),  # three quarters of the GPU
        (67, 1000, H200, 1),  # twice as many are more than one each
    ],
)
def test_known_cases(blocks: int, tiles: int, room: Room, segments: int):
    assert choose_cut(blocks, tiles, room).segments == segments


def test_cuts_are_worth_it_fit_at_once_and_are_not_empty():
    for room in (Room(1, 1, 1), Room(7, 3, 2), A10G, H200, PAIRS):
        for blocks in (1, 2, 3, 24, 64, 100, 500):
            for tiles in (1, 2, 7, 8, 9, 31, 64, 100, 999):
                cut = choose_cut(blocks, tiles, room)
                assert cut.segments >= 1
                assert (cut.segments - 1) * cut.segment_tiles < tiles
                assert tiles <= cut.segments * cut.segment_tiles
                if cut.segments == 1:
                    continue
                assert cut.segment_tiles >= LEAST_TILES
                assert cut.part_tiles * cut.ratio == cut.segment_tiles
                assert cut.parts * cut.part_tiles < tiles
                assert blocks * cut.segments <= room.multiprocessors * room.resident
                assert cost(blocks, cut, room) < cost(blocks, Cut(1, tiles), room)


def test_cost_counts_blocks_of_a_multiprocessor_and_the_pass_over_states():
    whole = Cut(1, 10)
    assert cost(132, whole, H200) == 10
    assert cost(133, whole, H200) == 20
    assert cost(133, whole, PAIRS) == 2 * SHARING * 10
    cut = Cut(10, 10, 2)
    assert cost(1, cut, H200) == 10 + STATES_COST * 5 + LAUNCHES_COST
    assert cost(13, cut, H200) == 10 + STATES_COST * 5 * 2 * STATES_SHARING + LAUNCHES_COST


def test_a_cut_of_so_many_segments_has_whole_parts():
    for tiles in range(1, 60):
        for segments in range(1, tiles + 1):
            for ratio in (1, 2, 3):
                cut = Cut.of(tiles, segments, ratio)
                assert cut.segment_tiles % ratio == 0
                assert (cut.segments - 1) * cut.segment_tiles < tiles
                assert tiles <= cut.segments * cut.segment_tiles
                assert cut.segments <= segments


@pytest.mark.parametrize(
    ("shared", "registers", "on_h200", "on_a10g"),
    [
        (97792, 128, 2, 1),  # of both
        (97792, 129, 1, 1),  # registers come in eights
        (49152, 64, 4, 2),
        (0, 64, 4, 4),
        (0, 255, 1, 1),
        (2**20, 64, 1, 1),  # more than there is: the launch will say so
    ],
)
def test_residency_follows_shared_memory_and_registers(
    shared: int, registers: int, on_h200: int, on_a10g: int
):
    fields = {"shared_bytes": shared, "static_shared_bytes": 0, "block": (256, 1, 1)}
    binary = cast(Binary, SimpleNamespace(**fields, registers=registers))
    assert Gpu(132, 232448).resident(binary) == on_h200
    assert Gpu(80, 101376).resident(binary) == on_a10g
