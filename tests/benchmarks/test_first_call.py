"""`benchmarks.first_call` and its yardstick, without a GPU."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from recording_libcuda import Recorder
from sonata_aot.artifacts import open_artifacts

ROOT = Path(__file__).resolve().parents[2]
# `bare_driver` as it runs, but for a context that is not torch's.
BARE = """
import ctypes, sys, types
driver = ctypes.CDLL("libcuda.so.1")
context = ctypes.c_void_p()
assert driver.cuInit(0) == driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), 0) == 0
assert driver.cuCtxSetCurrent(context) == 0
cuda = types.SimpleNamespace(synchronize=lambda: None)
sys.modules["torch"] = types.SimpleNamespace(zeros=lambda *given, **named: None, cuda=cuda)
sys.path.insert(0, {root!r})
sys.argv = ["bare_driver", {directory!r}, "sm90"]
from benchmarks import bare_driver
bare_driver.main()
"""
CALLS = ("cuLibraryLoadData", "cuLibraryGetKernel", "cuKernelGetFunction", "cuFuncLoad")


@pytest.fixture
def recorder(recording_library: Path, tmp_path: Path) -> Recorder:
    return Recorder(recording_library, tmp_path)


def test_the_yardstick_makes_the_calls_of_a_loader(recorder: Recorder, built: Path) -> None:
    outcome = recorder.run(BARE.format(root=str(ROOT), directory=str(built)))
    wanted = [b for b in open_artifacts(built).manifest.binaries if b.arch == "sm90"]
    calls = outcome.named(*CALLS)
    assert [call["call"] for call in calls] == [*CALLS] * len(wanted)
    assert [call["sha256"] for call in calls[::4]] == [b.cubin.sha256 for b in wanted]
    assert [call["entry"] for call in calls[1::4]] == [b.entry for b in wanted]
    assert outcome.value["binaries"] == len(wanted)
    assert 0 < outcome.value["driver_ms"] < 60_000


@pytest.mark.parametrize("call", CALLS)
def test_a_call_that_fails_is_no_measurement(recorder: Recorder, built: Path, call: str) -> None:
    script = BARE.format(root=str(ROOT), directory=str(built))
    outcome = recorder.run(script, env={"SONATA_TEST_CUDA_FAIL": f"{call}=209"}, check=False)
    assert outcome.returncode == 1
    assert "CUDA error 209" in outcome.stderr


def test_records_are_medians_of_fresh_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(ROOT)
    from benchmarks import first_call

    started: list[tuple[str, ...]] = []

    def run(command: list[str], *, env: dict[str, str] | None = None, **_: Any) -> SimpleNamespace:
        arch, count = command[-1], len(started)
        started.append((arch, *command[1:3][:1], (env or {}).get("CUDA_CACHE_PATH", "")))
        if "benchmarks.bare_driver" in command:
            return SimpleNamespace(returncode=0, stdout=json.dumps({"driver_ms": 10.0 + count}))
        found = {
            "import_ms": 20.0,
            "load_ms": 100.0 * (count == 0) + count,
            "first_gemv_ms": 1.0,
            "first_scan_ms": 2.0,
            "error": 1e-3 * count,
            "form": "cubin" if arch == "sm90" else "ptx",
            "binaries": [hashlib.sha256(arch.encode()).hexdigest()],
            "compilers": ["triton"] if count == 3 else [],
        }
        return SimpleNamespace(returncode=0, stdout=json.dumps(found))

    monkeypatch.setattr(first_call.subprocess, "run", run)
    (record,) = first_call.measure(Path("set"), "sm90")
    # Measured first, third, ..., ninth; the yardstick in between.
    assert [place for _, place, _ in started] == ["-c", "-m"] * 5
    assert (record["load_ms"], record["ours_us"], record["driver_ms"]) == (6.0, 9_000.0, 15.0)
    assert (record["error"], record["compilers"]) == (8e-3, [])
    started.clear()
    cold, warm = first_call.measure(Path("set"), "sm86")
    assert [place for _, place, _ in started] == ["-c"] * 10
    caches = [cache for _, _, cache in started]
    assert caches[::2] == caches[1::2]
    assert len(set(caches)) == 5
    assert (cold["case"], warm["case"]) == tuple(
        f"op=load+gemv+ssd cache={state}" for state in ("cold", "warm")
    )
    assert (cold["driver_ms"], warm["driver_ms"]) == (None, None)
    assert (cold["compilers"], warm["compilers"]) == ([], ["triton"])


def test_a_process_that_fails_ends_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(ROOT)
    from benchmarks import first_call

    failed = SimpleNamespace(returncode=1, stdout="", stderr="why")
    monkeypatch.setattr(first_call.subprocess, "run", lambda *given, **named: failed)
    with pytest.raises(SystemExit, match="why"):
        first_call.run_bare(Path("set"), "sm90")
    with pytest.raises(SystemExit, match="why"):
        first_call.run_child(Path("set"), "sm90", "cache")


def test_the_table_has_the_yardstick_where_it_was_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(ROOT)
    from benchmarks import host_figures

    times = {"import_ms": 20.0, "load_ms": 21.0, "first_gemv_ms": 1.0, "first_scan_ms": 2.0}
    cubin = {"case": "op=load", "via": "sm90-cubin", **times, "ours_us": 24_000.0}
    ptx = {**cubin, "case": "op=load cache=warm", "via": "sm86-ptx"}
    results = {"machine": {"gpu": "GPU"}, "records": [cubin, ptx]}
    *_, heads, _, first, second = host_figures.first_call_table(results)
    assert heads.endswith("| first scan | load and both |")
    assert first == ("| sm90-cubin | not needed | 20.0 ms | 21.0 ms | 1.0 ms | 2.0 ms | 24.0 ms |")
    results["records"] = [{**cubin, "driver_ms": 12.5}, {**ptx, "driver_ms": None}]
    *_, heads, _, first, second = host_figures.first_call_table(results)
    assert heads.endswith("| load and both | the driver's calls for machine code alone |")
    assert first.endswith("| 24.0 ms | 12.5 ms |")
    assert second.endswith("| warm | 20.0 ms | 21.0 ms | 1.0 ms | 2.0 ms | 24.0 ms |  |")
