"""The failures that users of such tools have reported in public, and the tests that hold them off.

`SCENARIOS` has each report, what must hold here, and where that is tested: by tests that stood
elsewhere anyway, and by those at the end of this file, each named after its scenario.
"""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
import small_spec

from recording_libcuda import Recorder

ROOT = Path(__file__).resolve().parents[1]
HERE = "test_peer_scenarios.py"
SUPPORT = ROOT / "tests" / "support"


@dataclass(frozen=True)
class Scenario:
    """A report, what must hold, and the tests: file, `::`, and the name of a function or method."""

    reports: str
    holds: str
    tests: tuple[str, ...]


SCENARIOS: dict[int, Scenario] = {
    1: Scenario(
        "quack#105",
        "what was built in one process loads and launches in the next",
        (
            f"{HERE}::test_peers_01_built_in_one_process_and_launched_in_the_next",
            "aot/test_tutorial.py::test_the_server_launches_it",
        ),
    ),
    2: Scenario(
        "b12x#41",
        "cache keys are equal across processes",
        ("aot/test_plan.py::TestKey.test_is_the_same_in_another_process",),
    ),
    3: Scenario(
        "cutlass#3527",
        "a call is one native call, and the GPU run has a budget of launch overhead",
        (
            "loader/test_native_bound.py::test_a_bound_output_is_written_by_one_native_call",
            "loader/test_gemv_direct.py::test_a_repeated_call_launches_the_same",
            "launcher/test_native_launch.py::test_a_launch_does_nothing_but_launch",
            f"{HERE}::test_peers_03_the_launch_has_a_budget",
        ),
    ),
    4: Scenario(
        "cutlass#3447",
        "extents and strides past 2^31 elements are right, or refused",
        (
            "loader/test_gemv_call.py::test_strides_of_more_than_32_bits",
            "loader/test_gemv_call.py::test_the_greatest_sizes",
            "loader/test_gemv_refusals.py::test_bad_calls_are_refused_before_the_driver",
            "gpu/test_gemv_huge.py::test_offsets_past_2_to_the_31_elements",
        ),
    ),
    5: Scenario(
        "cutlass#3635",
        "`verify` names symbols that nobody provides",
        (
            "artifacts/test_cubin.py::test_an_undefined_symbol_is_found",
            "artifacts/test_verify.py::test_other_machine_code_under_a_manifest_that_fits_it",
        ),
    ),
    6: Scenario(
        "cutlass#3170",
        "a mixture of compiler packages is refused, and the manifest has each package",
        (
            "aot/test_toolchain.py::test_a_mixture_is_refused",
            "aot/test_toolchain.py::test_every_package_with_its_version",
            "aot/test_plan.py::TestKey.test_changes_with_any_compiler_package",
        ),
    ),
    7: Scenario(
        "flashinfer#5145",
        "an older driver is told what is needed",
        (
            "loader/test_load.py::test_an_old_driver_is_told_what_it_lacks",
            "artifacts/test_choose.py::test_a_driver_too_old_for_the_machine_code",
            "artifacts/test_choose.py::test_driver_versions_are_compared_as_numbers",
        ),
    ),
    8: Scenario(
        "flashinfer#5355",
        "where nothing fits, the error lists the architectures that are there",
        ("loader/test_load.py::test_a_device_that_nothing_runs_on",),
    ),
    9: Scenario(
        "flashinfer#4143",
        "import, `--help`, `build` and `verify` ask for no driver",
        (
            f"{HERE}::test_peers_09_nothing_but_the_loader_asks_for_a_driver",
            "loader/test_load.py::test_importing_the_loader_imports_no_torch_and_no_compiler",
            "launcher/test_native_driver.py::test_importing_the_module_touches_neither_driver_nor_torch",
        ),
    ),
    10: Scenario(
        "flashinfer#1274",
        "a build looks at no device, and whatever driver there is changes nothing",
        (
            f"{HERE}::test_peers_10_a_build_looks_at_no_device",
            "aot/test_build.py::TestManyKernels.test_workers_see_no_setting_no_gpu_and_no_torch",
        ),
    ),
    11: Scenario(
        "flashinfer#4062, DeepGEMM#301",
        "processes that race on an empty cache compile each kernel once, and nobody reads half",
        (
            "aot/test_soak.py::test_builders_at_once_compile_each_kernel_once",
            "artifacts/test_store_sharing.py::test_concurrent_publishers_leave_one_whole_set",
            "artifacts/test_store_sharing.py::"
            "test_a_reader_always_finds_a_manifest_while_another_publishes",
        ),
    ),
    12: Scenario(
        "flashinfer#2262",
        "after a killed builder the next proceeds at once",
        (
            "aot/test_interrupted.py::test_a_stopped_build_leaves_nothing_behind",
            "aot/test_soak.py::test_killed_builds_leave_nothing_that_stops_the_next",
        ),
    ),
    13: Scenario(
        "tokenspeed#284",
        "no flag makes a stale or damaged artifact load",
        (
            "loader/test_load.py::test_damage_is_no_matter_of_trust",
            "aot/test_hard_places.py::test_the_flag_allows_no_damage_and_no_link",
            "aot/test_cache.py::test_the_record_is_checked_against_the_files",
        ),
    ),
    14: Scenario(
        "helion#2817",
        "the stream is asked for at every call, so that a graph captured on another stream works",
        (
            "loader/test_native_calls.py::test_the_stream_is_asked_for_at_every_call",
            "gpu/test_gemv_launch.py::test_graph_captured_on_another_stream_follows_changed_inputs",
            "gpu/test_ssd_launch.py::test_a_captured_graph_follows_changed_inputs",
        ),
    ),
    15: Scenario(
        "b12x#168",
        "one flipped bit is refused before the driver sees it",
        ("loader/test_load.py::test_one_flipped_bit_is_refused_before_the_driver_sees_it",),
    ),
    16: Scenario(
        "flash-attention#2013",
        "`torch.compile(fullgraph=True)` passes, and no fake tensor's pointer is taken",
        (
            "loader/test_operators.py::test_a_compiled_module_keeps_the_gemv",
            "loader/test_ssd_refusals.py::test_fake_tensors_are_refused",
            "gpu/test_operators.py::test_a_compiled_module",
        ),
    ),
}


def functions(path: Path) -> dict[str, ast.FunctionDef]:
    """The tests of a file, those of a class as `Class.test_name`."""
    found: dict[str, ast.FunctionDef] = {}
    for node in ast.parse(path.read_bytes()).body:
        if isinstance(node, ast.FunctionDef):
            found[node.name] = node
        if isinstance(node, ast.ClassDef):
            found |= {
                f"{node.name}.{item.name}": item
                for item in node.body
                if isinstance(item, ast.FunctionDef)
            }
    return found


def always_skipped(test: ast.FunctionDef) -> bool:
    marks = {"skip", "xfail"}
    nodes = (node for item in test.decorator_list for node in ast.walk(item))
    return any(isinstance(node, ast.Attribute) and node.attr in marks for node in nodes)


def test_all_of_them_are_here() -> None:
    assert list(SCENARIOS) == list(range(1, 17))


@pytest.mark.parametrize("number", SCENARIOS)
def test_a_scenario_has_its_tests(number: int) -> None:
    """Each exists and runs, and one of them on a machine without a GPU."""
    for name in SCENARIOS[number].tests:
        file, _, function = name.partition("::")
        tests = functions(ROOT / "tests" / file)
        assert function in tests, f"scenario {number}: {name} is gone"
        assert function.rpartition(".")[2].startswith("test_")
        assert not always_skipped(tests[function]), f"scenario {number}: {name} never runs"
    assert any(not name.startswith("gpu/") for name in SCENARIOS[number].tests)


def test_peers_01_built_in_one_process_and_launched_in_the_next(
    built: Path, recording_library: Path, tmp_path: Path
) -> None:
    """`built` is what another process of the command line has published; twice from cold."""
    script = f"""
import json, sys
sys.path.insert(0, {str(SUPPORT)!r})
import torch
from sonata_aot import loader
from sonata_aot.loader import runtime
from on_device import tensor
runtime.current_stream = lambda device: 7
kernels = loader.load({str(built)!r}, devices=[0])
kernels.gemv(tensor(2, 64), tensor(100, 64), out=tensor(2, 100, address=1 << 36))
print(json.dumps(kernels.info()["directory"]))
"""
    recorder = Recorder(recording_library, tmp_path)
    runs = [recorder.run(script, env={"SONATA_TEST_CUDA_CC": "9.0"}) for _ in range(2)]
    launches = [run.named("cuLaunchKernel", "cuLaunchKernelEx") for run in runs]
    assert len(launches[0]) == 1
    assert [len(run.named("cuLibraryLoadData")) for run in runs] == [
        len(runs[0].named("cuLibraryLoadData"))
    ] * 2
    assert launches[0][0]["grid"] == launches[1][0]["grid"]


def test_peers_03_the_launch_has_a_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    """That of the GPU run, as a multiple of a C loop's and of `F.linear`'s time."""
    monkeypatch.syspath_prepend(ROOT)
    from benchmarks.launch import BARS

    assert BARS["bound"] <= 1.25
    assert BARS["checked"] <= 1.7
    assert BARS["F.linear"] <= 0.35


def calls_of(
    arguments: list[str],
    library: Path,
    folder: Path,
    environ: dict[str, str],
) -> list[str]:
    """The driver calls that a command makes where there is a driver."""
    log = folder / "calls.jsonl"
    done = subprocess.run(
        [sys.executable, "-m", "sonata_aot.aot", *arguments],
        env={
            **environ,
            "LD_LIBRARY_PATH": str(library.parent),
            "SONATA_TEST_CUDA_LOG": str(log),
            "SONATA_TEST_CUDA_CC": "9.0",
        },
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    lines = log.read_text().splitlines() if log.exists() else []
    log.unlink(missing_ok=True)
    return [json.loads(line)["call"] for line in lines]


def test_peers_09_nothing_but_the_loader_asks_for_a_driver(
    built: Path,
    warm_cache: Path,
    recording_library: Path,
    tmp_path: Path,
    clean_environ: Callable[..., dict[str, str]],
) -> None:
    environ = clean_environ(SONATA_AOT_CACHE_DIR=str(warm_cache))
    for command in (
        *(["--help"], ["build", "--help"], ["verify", str(built)], ["list", str(built)]),
        ["build", "--arch=sm86", "--out", str(tmp_path / "out")],
        ["plan", "--arch=sm86"],
    ):
        assert calls_of(command, recording_library, tmp_path, environ) == [], command
    # It would be seen: this is what asks.
    assert "cuInit" in calls_of(["doctor", str(built)], recording_library, tmp_path, environ)


def test_peers_10_a_build_looks_at_no_device(
    recording_library: Path, tmp_path: Path, clean_environ: Callable[..., dict[str, str]]
) -> None:
    """Neither the tool nor the compiler in its workers, which really compiles here.

    The compiler asks for the driver's version when it is imported: that changes nothing.
    """
    (tmp_path / "tiny_device.py").write_text(small_spec.DEVICE.format(name="tiny"))
    (tmp_path / "tiny_spec.py").write_text(
        small_spec.SPEC.format(name="tiny", device="tiny_device:tiny")
    )
    sets: list[bytes] = []
    for version in ("", "12000", "13040"):  # no driver at all, an old one, a new one
        out = tmp_path / f"out{version}"
        environ = clean_environ(SONATA_AOT_CACHE_DIR=str(tmp_path / f"cache{version}"))
        environ["SONATA_TEST_CUDA_VERSION"] = version
        library = recording_library if version else tmp_path / "no-driver"
        command = ["build", "--from", "tiny_spec", "--arch=sm86", "--out", str(out)]
        assert set(calls_of(command, library, tmp_path, environ)) <= {"cuDriverGetVersion"}
        sets.append((out / "manifest.json").read_bytes())
    assert sets[0] == sets[1] == sets[2]
