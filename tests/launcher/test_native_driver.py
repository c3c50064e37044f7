"""Finding and initialising the driver, and saying why there is none."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from recording_libcuda import Recorder, build

UNAVAILABLE = """
    state = native.driver_state()
    errors = [
        failure(native.devices),
        failure(native.load, IMAGE, "gemv", 0),
    ]
    say([state, errors])
"""


def test_a_working_driver(recorder: Recorder) -> None:
    outcome = recorder.native(
        "say([native.driver_state(), native.devices()])",
        env={
            "SONATA_TEST_CUDA_DEVICES": "2",
            "SONATA_TEST_CUDA_CC": "8.6",
            "SONATA_TEST_CUDA_VERSION": "12060",
        },
    )
    state, devices = outcome.value
    assert state == {
        "available": True,
        "reason": None,
        "version": 12060,
        "library": str(recorder.library),
    }
    assert devices == [
        {
            "index": index,
            "name": f"Recording GPU {index}",
            "major": 8,
            "minor": 6,
            "multiprocessors": 132,
            "shared_per_block_optin": 232448,
        }
        for index in (0, 1)
    ]
    assert outcome.named("cuDevicePrimaryCtxRetain") == [], "asking makes no context"


def test_importing_the_module_touches_neither_driver_nor_torch(recorder: Recorder) -> None:
    found = recorder.run("import sonata_aot.loader._native as n; print(n.__file__)")
    outcome = recorder.run(
        f"""
import importlib.util, json, sys
spec = importlib.util.spec_from_file_location("_native", {found.stdout.strip()!r})
module = importlib.util.module_from_spec(spec)
spec.loader.exec_module(module)
print(json.dumps([
    sorted(name for name in sys.modules if name.split(".")[0] in ("torch", "sonata_aot")),
    "libcuda" in open("/proc/self/maps").read(),
]))
"""
    )
    assert outcome.value == [[], False]
    assert outcome.calls == []


def _system_has_a_driver() -> bool:
    probe = "import ctypes; ctypes.CDLL('libcuda.so.1')"
    return subprocess.run([sys.executable, "-c", probe], capture_output=True).returncode == 0


@pytest.mark.skipif(_system_has_a_driver(), reason="this machine has a driver")
def test_no_driver(recorder: Recorder) -> None:
    outcome = recorder.native(UNAVAILABLE, library_path=[])
    state, errors = outcome.value
    assert (state["available"], state["version"], state["library"]) == (False, None, None)
    assert "libcuda.so.1: cannot open shared object file" in state["reason"]
    for error in errors:
        assert error["type"] == "DriverUnavailable"
        assert error["what"] == state["reason"]
        assert "install the NVIDIA driver" in error["remedy"]


def test_a_driver_file_that_is_none(recorder: Recorder, tmp_path: Path) -> None:
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "libcuda.so.1").write_bytes(b"not a library" * 100)
    outcome = recorder.native(UNAVAILABLE, library_path=[tmp_path / "broken"])
    state, errors = outcome.value
    assert state["available"] is False
    assert "libcuda.so.1" in state["reason"]
    assert "invalid ELF header" in state["reason"]
    assert {error["type"] for error in errors} == {"DriverUnavailable"}


@pytest.mark.parametrize(
    "symbol", ["cuLibraryLoadData", "cuKernelGetFunction", "cuCtxPopCurrent_v2"]
)
def test_a_driver_that_is_too_old(recorder: Recorder, tmp_path: Path, symbol: str) -> None:
    library = build(tmp_path / "old", omit=[symbol])
    outcome = recorder.native(
        UNAVAILABLE, library_path=[library.parent], env={"SONATA_TEST_CUDA_VERSION": "11040"}
    )
    state, errors = outcome.value
    assert state == {
        "available": False,
        "reason": f"driver too old: it lacks {symbol} (needs CUDA 12.0 or newer)",
        "version": 11040,
        "library": str(library),
    }
    for error in errors:
        assert error["type"] == "DriverUnavailable"
        assert error["what"] == state["reason"]
        assert error["remedy"] == "update the NVIDIA driver"
    assert outcome.named("cuInit") == []


def test_a_driver_without_the_optional_entries(recorder: Recorder, tmp_path: Path) -> None:
    library = build(tmp_path / "cuda-12.0", omit=["cuFuncLoad"])
    outcome = recorder.native(
        "first_kernel().launch((1, 1, 1), (1, 1, 1), 0, b'')", library_path=[library.parent]
    )
    assert [call["result"] for call in outcome.named("cuLaunchKernel")] == [0]


def test_initialisation_fails(recorder: Recorder) -> None:
    outcome = recorder.native(UNAVAILABLE, env={"SONATA_TEST_CUDA_FAIL": "cuInit=100"})
    state, errors = outcome.value
    words = "cuInit failed with CUDA_ERROR_NO_DEVICE (100): no CUDA-capable device is detected"
    assert state == {
        "available": False,
        "reason": words,
        "version": 13000,
        "library": str(recorder.library),
    }
    for error in errors:
        assert (error["type"], error["what"]) == ("DriverUnavailable", words)
        assert "CUDA_VISIBLE_DEVICES" in error["remedy"]


def test_a_failed_initialisation_is_tried_again(recorder: Recorder) -> None:
    outcome = recorder.native(
        """
        inject("cuInit=802")
        before = native.driver_state()
        inject("")
        first_kernel()
        say([before["available"], native.driver_state()["available"]])
        """
    )
    assert outcome.value == [False, True]
    assert [call["result"] for call in outcome.named("cuInit")] == [802, 0]


def test_no_devices(recorder: Recorder) -> None:
    outcome = recorder.native(
        "say([native.devices(), failure(native.load, IMAGE, 'gemv', 0)])",
        env={"SONATA_TEST_CUDA_DEVICES": "0"},
    )
    devices, error = outcome.value
    assert devices == []
    assert error["type"] == "ArgumentError"
    assert "0 devices" in error["what"]
