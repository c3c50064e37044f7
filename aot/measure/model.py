"""What times on a larger GPU say about an A10G."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ...artifacts.arch import Arch
from ...artifacts.manifest import Binary
from ..machine import A10G, occupancy


def resident_blocks(binary: Binary) -> int:
    """Blocks of a binary that one multiprocessor of its architecture holds at once."""
    x, y, z = binary.block
    return occupancy(
        Arch.parse(binary.arch),
        threads=x * y * z,
        registers=binary.registers,
        shared_bytes=binary.shared_bytes,
        static_shared_bytes=binary.static_shared_bytes,
    ).blocks


def bytes_in_flight(variant: Mapping[str, int | str]) -> int:
    """Bytes of weights that each thread of a variant of `gemv` has under way before it uses any."""
    m, rows, unroll = (int(variant[name]) for name in ("m", "rows", "unroll"))
    parts = 16 // max(m, 2) if variant["side"] == "b" else 8 // m
    # Weight rows that one load of a warp spans.
    load_rows = 8 // parts
    return 16 * unroll * max(1, rows // load_rows)


@dataclass(frozen=True)
class Target:
    """A GPU that is not at hand."""

    name: str
    multiprocessors: int
    gbps: float
    latency_us: float

    @property
    def least_in_flight(self) -> float:
        """Twice the bytes that its memory delivers within its latency (Little's law)."""
        return 2 * self.latency_us * self.gbps * 1e3

    def keeps_busy(self, binary: Binary) -> bool:
        """Whether a binary has enough bytes under way to keep its memory busy."""
        x, y, z = binary.block
        threads = resident_blocks(binary) * x * y * z * self.multiprocessors
        return threads * bytes_in_flight(binary.variant) >= self.least_in_flight

    def factor(self, n: int, rows: int, measured_multiprocessors: int) -> float:
        """What turns a time measured on another number of multiprocessors into a score here."""
        blocks = -(-n // rows)
        return imbalance(blocks, self.multiprocessors) / imbalance(blocks, measured_multiprocessors)

    def sentence(self) -> str:
        """The model, for a table's origin."""
        return (
            f"They are scored for an {self.name}: time x i({self.multiprocessors}) / i(SMs of the "
            "GPU), where i(s) = ceil(blocks / s) x s / blocks; variants with less than "
            f"{self.least_in_flight / 1e3:.0f} KB of weights in flight on {self.multiprocessors} "
            f"SMs (twice {self.latency_us} us x {self.gbps:.0f} GB/s) were left out."
        )


TARGETS = {"a10g": Target(A10G.name, A10G.multiprocessors, A10G.dram / 1e9, A10G.latency * 1e6)}


def imbalance(blocks: int, multiprocessors: int) -> float:
    """Time of the last wave of blocks over a perfect share: 1 where every SM has as many."""
    return -(-blocks // multiprocessors) * multiprocessors / blocks
