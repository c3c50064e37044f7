"""What a multiprocessor holds, and the model of a GPU that is not at hand."""

from __future__ import annotations

import pytest

from measure_fakes import binary, variant
from sonata_aot.aot.measure import model

A10G = model.TARGETS["a10g"]


@pytest.mark.parametrize(
    ("arch", "warps", "registers", "shared", "blocks"),
    [
        ("sm86", 8, 32, 0, 6),  # 48 warps
        ("sm90", 8, 32, 0, 8),  # 64 warps
        ("sm86", 8, 64, 0, 4),  # 4 x 8 warps of 2048 registers
        ("sm86", 8, 72, 0, 3),  # 7 warps a scheduler
        ("sm86", 8, 73, 0, 3),  # 80 by units of 8: 6 warps a scheduler
        ("sm90", 1, 73, 0, 24),  # and not the 25 of all registers together
        ("sm90", 16, 168, 0, 0),  # 3 warps a scheduler are 12
        ("sm86", 1, 32, 0, 16),  # blocks
        ("sm90", 1, 32, 0, 32),
        ("sm86", 1, 32, 24 * 1024, 4),  # 25 KB each with what is reserved
        ("sm86", 1, 32, 24 * 1024 + 1, 3),
    ],
)
def test_resident_blocks(arch: str, warps: int, registers: int, shared: int, blocks: int) -> None:
    it = binary(variant(warps=warps), arch=arch, registers=registers, shared_bytes=shared)
    assert model.resident_blocks(it) == blocks


def test_static_shared_memory_counts() -> None:
    it = binary(variant(warps=1), arch="sm86", registers=32, static_shared_bytes=49 * 1024)
    assert model.resident_blocks(it) == 2


@pytest.mark.parametrize(
    ("m", "side", "rows", "unroll", "size"),
    [
        (1, "a", 2, 4, 128),  # a load of a warp is one row
        (2, "a", 8, 4, 256),  # two rows
        (4, "a", 16, 2, 128),  # four rows
        (8, "b", 4, 4, 64),  # four rows
        (8, "b", 16, 4, 256),
        (4, "b", 8, 2, 128),  # two rows
    ],
)
def test_bytes_in_flight(m: int, side: str, rows: int, unroll: int, size: int) -> None:
    assert model.bytes_in_flight(variant(m=m, side=side, rows=rows, unroll=unroll)) == size


def test_a_last_wave_with_too_little_under_way_takes_longer() -> None:
    # 255 registers: one block of 8 warps a multiprocessor, 80 a wave, with 32 KB under way each.
    it = binary(variant(m=1, rows=2, unroll=4, warps=8), arch="sm86", registers=255)
    each = 128 * 256
    assert A10G.factor(it, 2 * 80) == 1
    assert A10G.factor(it, 2 * 800) == 1
    # Enough of them: 720 KB are those of 22 blocks.
    assert A10G.factor(it, 2 * (80 + 22)) == 1
    assert A10G.factor(it, 2 * (80 + 10)) == pytest.approx(
        1 + 10 / 90 * (720_000 / (10 * each) - 1)
    )
    # The same when they are all that there is, also with a ragged last block.
    assert A10G.factor(it, 2 * 10) == A10G.factor(it, 19) == pytest.approx(720_000 / (10 * each))


def test_a_wave_has_as_many_blocks_as_fit() -> None:
    it = binary(variant(m=1, rows=2, unroll=4, warps=8), arch="sm86", registers=64)
    assert model.resident_blocks(it) == 4
    assert A10G.factor(it, 2 * 320) == 1
    assert A10G.factor(it, 2 * 321) > 1


def test_what_keeps_an_a10g_busy() -> None:
    # 720 KB are 9000 bytes for each of 80 multiprocessors.
    assert A10G.least_in_flight == pytest.approx(720_000)
    enough = variant(m=1, rows=2, unroll=4, warps=8)  # 128 bytes x 256 threads x 1 block
    assert A10G.keeps_busy(binary(enough, arch="sm86", registers=255))
    short = variant(m=1, rows=1, unroll=2, warps=8)  # 8 KB
    assert not A10G.keeps_busy(binary(short, arch="sm86", registers=255))
    assert A10G.keeps_busy(binary(short, arch="sm86", registers=64))


def test_the_model_says_itself_in_full() -> None:
    sentence = A10G.sentence()
    for part in ("A10G", "80 SMs", "720 KB", "600 GB/s", "0.6 us"):
        assert part in sentence
