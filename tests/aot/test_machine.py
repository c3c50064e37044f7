"""What fits a multiprocessor, and what a GPU allows."""

from __future__ import annotations

import pytest

from sonata_aot.aot.machine import A10G, GPUS, H200, MULTIPROCESSORS, Gpu, Occupancy, occupancy
from sonata_aot.artifacts.arch import KNOWN, Arch
from sonata_aot.artifacts.verify import SHARED_PER_BLOCK

# (arch, threads, registers, dynamic, static shared) and the blocks that NVIDIA's own
# cuda_occupancy.h (CUDA 13.0) gives for it, with what there is not enough of.
CASES = [
    ("sm86", 256, 64, 0, 0, 4, "registers"),
    ("sm86", 256, 65, 0, 0, 3, "registers"),
    ("sm86", 256, 32, 0, 0, 6, "warps"),
    ("sm80", 256, 32, 0, 0, 8, "registers"),
    ("sm86", 32, 32, 0, 0, 16, "blocks"),
    ("sm89", 32, 32, 0, 0, 24, "blocks"),
    ("sm90", 32, 32, 0, 0, 32, "blocks"),
    # 144 registers make 3 warps a sub-partition: 12, not the 14 of the whole file.
    ("sm86", 64, 144, 0, 0, 6, "registers"),
    ("sm86", 160, 128, 0, 0, 3, "registers"),
    # A warp gets 1280 registers here, and not the 1152 that it uses.
    ("sm80", 64, 36, 0, 0, 24, "registers"),
    # 200 or 255 registers make 2 warps a sub-partition, so 1 block of 5 and none of 9.
    ("sm86", 160, 255, 0, 0, 1, "registers"),
    ("sm86", 288, 200, 0, 0, 0, "registers"),
    # 1 KB a block is the system's, and shared memory goes in units of 128 bytes.
    ("sm86", 64, 32, 49 * 1024, 0, 2, "shared memory"),
    ("sm86", 64, 32, 49 * 1024 + 1, 0, 1, "shared memory"),
    ("sm86", 64, 32, 0, 49 * 1024, 2, "shared memory"),
    ("sm86", 32, 32, 5802, 0, 14, "shared memory"),
    # From sm90 on what is static has the system's in it, if there is any.
    ("sm90", 64, 32, 56 * 1024, 0, 4, "shared memory"),
    ("sm90", 64, 32, 56 * 1024, 1024, 4, "shared memory"),
    ("sm90", 64, 32, 56 * 1024, 1025, 3, "shared memory"),
    ("sm86", 33, 32, 0, 0, 16, "blocks"),
    ("sm86", 1024, 16, 0, 0, 1, "warps"),
]


@pytest.mark.parametrize(
    ("arch", "threads", "registers", "dynamic", "static", "blocks", "limit"), CASES
)
def test_blocks_of_a_multiprocessor(
    arch: str, threads: int, registers: int, dynamic: int, static: int, blocks: int, limit: str
) -> None:
    held = occupancy(
        Arch.parse(arch),
        threads=threads,
        registers=registers,
        shared_bytes=dynamic,
        static_shared_bytes=static,
    )
    most = MULTIPROCESSORS[Arch.parse(arch).major, Arch.parse(arch).minor].warps
    assert held == Occupancy(blocks * -(-threads // 32), blocks, most, limit)


def test_every_architecture_is_known_and_one_block_fits_it() -> None:
    for arch in KNOWN:
        most = MULTIPROCESSORS[arch.major, arch.minor]
        assert most.warps in (48, 64)
        assert SHARED_PER_BLOCK[arch.major, arch.minor] <= most.shared_bytes


def test_the_gpus_are_those_stated() -> None:
    assert GPUS == {(8, 6): A10G, (9, 0): H200}
    # 70 and 31 TFLOPS of AWS's data sheet: matrix products in 16 bits, and plain fp32.
    assert A10G.matrix_fmas * 2 * A10G.multiprocessors * A10G.clock == pytest.approx(
        70e12, rel=0.01
    )
    assert (A10G.dram, A10G.multiprocessors, A10G.clock, A10G.schedulers) == (600e9, 80, 1.71e9, 4)
    assert (H200.dram, H200.multiprocessors, H200.clock, H200.schedulers) == (
        4800e9,
        132,
        1.98e9,
        4,
    )


def test_what_a_gpu_allows() -> None:
    gpu = Gpu("toy", 1000.0, 2, 100.0, 4, 64, 0.5)
    # 2 x 4 x 100 instructions a second are 80 trips of 10; 2 x 64 x 100 products are 12.5 of 1024.
    assert gpu.allows(instructions=10, matrix_fmas=1024, bytes_loaded=8, in_flight=30) == {
        "dram": 1000.0,
        "issue": 640.0,
        "in_flight": 120.0,
        "tensor": 100.0,
    }
    assert "tensor" not in gpu.allows(instructions=10, matrix_fmas=0, bytes_loaded=8, in_flight=30)
