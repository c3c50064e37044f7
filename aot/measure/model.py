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

    def factor(self, binary: Binary, n: int) -> float:
        """What turns a time measured on a larger GPU into a score here: 1, or more for a poor end.

        Blocks come in waves of as many as fit, and memory is busy while enough of their loads are
        under way. In the last wave there may be too few blocks for that: then its share of the
        bytes takes longer by as much as bytes under way lack.
        """
        blocks = -(-n // int(binary.variant["rows"]))
        wave = self.multiprocessors * max(1, resident_blocks(binary))
        last = blocks % wave or wave
        x, y, z = binary.block
        under_way = last * x * y * z * bytes_in_flight(binary.variant)
        lack = max(1.0, self.least_in_flight / under_way)
        return 1 + last / blocks * (lack - 1)

    def sentence(self) -> str:
        """The model, for a table's origin."""
        return (
            f"Scored for an {self.name}, which was not at hand: time x (1 + f (max(1, b / u) - 1)),"
            f" where f is the share of the blocks in the last wave on {self.multiprocessors} SMs, "
            f"u their bytes in flight, and b = {self.least_in_flight / 1e3:.0f} KB (twice "
            f"{self.latency_us:g} us x {self.gbps:.0f} GB/s); variants that never have b in flight "
            "were left out."
        )


TARGETS = {"a10g": Target(A10G.name, A10G.multiprocessors, A10G.dram / 1e9, A10G.latency * 1e6)}
