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
    Gpu,
    choose_segments,
    cost,
)

H200 = (132, 2)  # multiprocessors, and blocks that one holds
A10G = (80, 1)


@pytest.mark.parametrize(
    ("blocks", "tiles", "gpu", "segments"),
    [
        (128, 32, H200, 1),  # 2 x 2048 tokens, 64 heads
        (64, 512, H200, 4),  # 1 x 32768
        (24, 32, H200, 5),  # 1 x 2048, 24 heads
        (512, 32, H200, 1),  # 8 x 2048
        (32, 32, A10G, 2),
        (64, 32, A10G, 1),
        (4, 100, H200, 25),  # each of four tiles
        (1, 10000, H200, 264),
        (64, 1, H200, 1),
        (64, 0, H200, 1),
        (0, 100, H200, 1),
        (99, 1000, H200, 1),  # three quarters of the GPU
        (66, 1000, H200, 4),
        (67, 1000, H200, 3),  # on two multiprocessors of three two blocks
        (90, 1000, H200, 1),  # twice as many would gain less than they cost
    ],
)
def test_known_cases(blocks: int, tiles: int, gpu: tuple[int, int], segments: int):
    assert choose_segments(blocks, tiles, *gpu) == segments


def test_segments_are_worth_it_fit_at_once_and_are_not_empty():
    for gpu in ((1, 1), (7, 3), A10G, H200):
        for blocks in (1, 2, 3, 24, 64, 100, 500):
            for tiles in (1, 2, 7, 8, 9, 31, 64, 100, 999):
                segments = choose_segments(blocks, tiles, *gpu)
                assert segments >= 1
                if segments == 1:
                    continue
                each = -(-tiles // segments)
                assert each >= LEAST_TILES
                assert (segments - 1) * each < tiles <= segments * each
                assert blocks * segments <= gpu[0] * gpu[1]
                assert cost(blocks, tiles, *gpu, segments) < cost(blocks, tiles, *gpu)


def test_cost_counts_blocks_of_a_multiprocessor_and_the_pass_over_states():
    assert cost(132, 10, *H200) == 10
    assert cost(133, 10, *H200) == 2 * SHARING * 10
    assert cost(81, 10, *A10G) == 20
    assert cost(1, 100, *H200, 10) == (1 + STATES_COST) * 10 + LAUNCHES_COST


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
