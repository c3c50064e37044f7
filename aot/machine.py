"""The machines that code runs on: what a multiprocessor holds, and how fast a stated GPU is."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ..artifacts.arch import Arch

WARP = 32
# Of every architecture here: 64 K registers in four sub-partitions, allotted to a warp in units of
# 256; shared memory in units of 128 bytes, of which the system takes 1 KB a block. CUDA C++
# Programming Guide, "Technical Specifications per Compute Capability", and cuda_occupancy.h.
REGISTERS = 65536
PARTITIONS = 4
_REGISTER_UNIT = 256
_SHARED_UNIT = 128
_SYSTEM_SHARED = 1024
# Bytes a clock that a multiprocessor's shared memory moves: 32 banks of 4. Source: the guide, too.
SHARED_RATE = 128


@dataclass(frozen=True)
class Multiprocessor:
    """Most warps, blocks and bytes of shared memory that one holds at a time."""

    warps: int
    blocks: int
    shared_bytes: int


# Source: as above.
MULTIPROCESSORS = {
    (8, 0): Multiprocessor(64, 32, 164 * 1024),
    (8, 6): Multiprocessor(48, 16, 100 * 1024),
    (8, 7): Multiprocessor(48, 16, 164 * 1024),
    (8, 9): Multiprocessor(48, 24, 100 * 1024),
    (9, 0): Multiprocessor(64, 32, 228 * 1024),
    (10, 0): Multiprocessor(64, 32, 228 * 1024),
    (10, 3): Multiprocessor(64, 32, 228 * 1024),
    (12, 0): Multiprocessor(48, 24, 100 * 1024),
    (12, 1): Multiprocessor(48, 24, 100 * 1024),
}


@dataclass(frozen=True)
class Occupancy:
    """How many blocks and warps a multiprocessor holds at a time, of at most `most_warps`.

    `limit` names what there is not enough of for one block more: `registers`, `shared memory`,
    `warps` or `blocks`; the first of these, if there are several.
    """

    warps: int
    blocks: int
    most_warps: int
    limit: str


def occupancy(
    arch: Arch, *, threads: int, registers: int, shared_bytes: int, static_shared_bytes: int
) -> Occupancy:
    """Blocks of one kernel that fit a multiprocessor, as `cuda_occupancy.h` computes it.

    Where shared memory and L1 share their room, shared memory gets all that it can have.
    `registers` are a thread's. `static_shared_bytes` is what the code says, which from sm90 on has
    the system's 1 KB in it if it has anything.
    """
    most = MULTIPROCESSORS[arch.major, arch.minor]
    warps = -(-threads // WARP)
    per_warp = _up(registers * WARP, _REGISTER_UNIT)
    static = static_shared_bytes + _SYSTEM_SHARED
    if arch.major >= 9:
        static = max(static_shared_bytes, _SYSTEM_SHARED)
    fits = {
        # A warp lies in one sub-partition.
        "registers": REGISTERS // PARTITIONS // per_warp * PARTITIONS // warps,
        "shared memory": most.shared_bytes // _up(shared_bytes + static, _SHARED_UNIT),
        "warps": most.warps // warps,
        "blocks": most.blocks,
    }
    limit = min(fits, key=lambda name: fits[name])
    return Occupancy(fits[limit] * warps, fits[limit], most.warps, limit)


def _up(value: int, unit: int) -> int:
    return -(-value // unit) * unit


@dataclass(frozen=True)
class Gpu:
    """A GPU that predictions are for.

    `dram` is in bytes a second; `clock` in Hz; `schedulers` issue one instruction a clock each, on
    every one of `multiprocessors`; `matrix_fmas` are the dense 16-bit multiply-adds with fp32 sums
    that all tensor cores of one multiprocessor do in a clock; `latency` is that of a load from
    DRAM under load, in seconds.
    """

    name: str
    dram: float
    multiprocessors: int
    clock: float
    schedulers: int
    matrix_fmas: int
    latency: float

    def allows(
        self,
        *,
        instructions: int,
        matrix_fmas: int,
        bytes_loaded: int,
        in_flight: int | None = None,
        shared_bytes: int = 0,
    ) -> dict[str, float]:
        """Bytes a second that each resource would allow by itself, of a loop that streams.

        For a trip of one warp through the loop, or of all that share the bytes: the instructions
        issued, the multiply-adds on tensor cores, the bytes that it loads, and those that shared
        memory moves. A resource that is not in use (0) is not in the result. `in_flight` is what
        all warps of a multiprocessor have under way at a time, if that is known: by Little's law,
        no more than that arrives in the time that a load takes.
        """
        trips = self.multiprocessors * self.clock / instructions * self.schedulers
        rates = {"dram": self.dram, "issue": trips * bytes_loaded}
        if in_flight is not None:
            rates["in_flight"] = in_flight * self.multiprocessors / self.latency
        if shared_bytes:
            moved = self.multiprocessors * self.clock * SHARED_RATE
            rates["shared"] = moved / shared_bytes * bytes_loaded
        if matrix_fmas:
            products = self.multiprocessors * self.clock * self.matrix_fmas
            rates["tensor"] = products / matrix_fmas * bytes_loaded
        return rates


# AWS's data sheet of the A10G: 600 GB/s, 80 multiprocessors at 1.71 GHz, and 70 TFLOPS dense in 16
# bits, which is 256 multiply-adds a clock and multiprocessor: the rate that NVIDIA's GA102
# whitepaper has for GeForce cards with fp32 sums, half of the A10's and A40's. So an m16n8k16, of
# 2048, takes a multiprocessor 8 clocks. The latency is an assumption.
A10G = Gpu("A10G", 600e9, 80, 1.71e9, 4, 256, 0.6e-6)
# NVIDIA's data sheet of the H200: 4.8 TB/s, 132 multiprocessors, up to 1.98 GHz. That mma.sync does
# 1024 multiply-adds a clock, as on an A100 and half of what wgmma does, is an assumption, and so is
# the latency.
H200 = Gpu("H200", 4800e9, 132, 1.98e9, 4, 1024, 0.8e-6)

# Which GPU the code for an architecture is judged on.
GPUS: Mapping[tuple[int, int], Gpu] = {(8, 6): A10G, (9, 0): H200}
