"""Records as `bench ssd` writes them, with made-up figures."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sonata_aot.aot.measure.ceiling import Read, Way
from sonata_aot.aot.measure.gpu import Machine
from sonata_aot.aot.measure.ssd_shapes import Shape, fused_estimate_us

MACHINE = Machine("Paper 1", 132, 4900.0, 13000, "2.11")
READ = Read(Way(8, 4, 528, True), 8_000_000, 2.0)


def records(
    shape: Shape, via: str = "sm90-cubin", opponents: bool = True, **changes: Any
) -> list[dict[str, Any]]:
    """Triton takes 100 us, ours 40."""
    plain = {
        "case": shape.case,
        "opponent": None,
        "via": via,
        "ours_us": 40.0,
        "error": 1.9e-3,
        "states_error": 1.6e-3,
        "eager_us": 45.0,
        "host_us": 12.5,
        "opponent_us": None,
        **dict.fromkeys(("opponent_error", "opponent_states_error"), None),
        **dict.fromkeys(("opponent_eager_us", "opponent_host_us"), None),
        "bytes": 80_000_000,
        "ceiling_gbps": 4000.0,
        "floor_us": 20.0,
        "binaries": ["0" * 64],
    }
    if not opponents:
        return [plain | changes]
    triton = {"opponent": "triton", "opponent_us": 100.0, "opponent_eager_us": 900.0}
    triton |= {"opponent_host_us": 890.0, "opponent_error": 2.3e-3}
    found = [plain | triton | {"opponent_states_error": 1.65e-3} | changes]
    estimate = fused_estimate_us(shape, 100.0)
    if estimate is not None:
        named = {"opponent": "triton-fused-estimate", "opponent_us": estimate}
        found.append({**plain, **changes, **named})
    return found


def data(found: Sequence[dict[str, Any]], opponent: dict[str, str] | None = None) -> dict[str, Any]:
    return {
        "machine": MACHINE.data(),
        "date": "2030-01-01",
        "ceiling": READ.data(),
        "opponent": opponent,
        "records": found,
    }
