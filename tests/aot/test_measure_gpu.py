"""What is said of the GPU at hand."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from sonata_aot.aot.measure import gpu
from sonata_aot.loader import _native, runtime


@pytest.fixture
def properties(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """Those of device 3, the current one."""
    found = SimpleNamespace(name="Paper 1", multi_processor_count=132)
    torch: Any = SimpleNamespace(
        __version__="2.11",
        cuda=SimpleNamespace(get_device_properties=lambda index: {3: found}[index]),
    )
    monkeypatch.setattr(runtime, "require_torch", lambda: torch)
    monkeypatch.setattr(runtime, "device_indices", lambda devices: (3,))
    monkeypatch.setattr(_native, "driver_state", lambda: {"version": 13000})
    return found


def test_the_memorys_peak_rate_is_two_transfers_a_clock(properties: SimpleNamespace) -> None:
    properties.memory_clock_rate, properties.memory_bus_width = 2_000_000, 2000  # kHz, bits
    assert gpu.machine().peak_gbps == pytest.approx(1000.0)


def test_an_older_torch_does_not_tell_the_peak_rate(properties: SimpleNamespace) -> None:
    assert gpu.machine().peak_gbps == float("inf")


def test_results_have_the_gpu_and_the_software(properties: SimpleNamespace) -> None:
    assert gpu.machine().data() == {
        "gpu": "Paper 1",
        "multiprocessors": 132,
        "driver_cuda": 13000,
        "torch": "2.11",
    }
