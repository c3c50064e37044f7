"""A wheel in a clean environment: no compiler on PATH, no build extra, no network."""

from __future__ import annotations

import json
import textwrap
from importlib.metadata import version
from pathlib import Path

import pytest

import recording_libcuda
from packaging_runs import Environment, Install
from sonata_aot.aot.wheel_base import BUNDLED
from sonata_aot.aot.wheel_file import read_wheel

# Milliseconds of CPU time that importing the loader may take where torch is there already.
MOST_IMPORT_MS = 30
# Of this many runs the best counts: others share this machine.
RUNS = 7

LAUNCH = """
import pathlib
folder = pathlib.Path(ARTIFACTS)
binary = json.loads((folder / "manifest.json").read_text())["binaries"][0]
image = (folder / "objects" / (binary["cubin"]["sha256"] + ".cubin")).read_bytes()
kernel = native.load(image, binary["kernel"], 0).kernel(binary["entry"], binary["shared_bytes"])
kernel.launch((3, 5, 7), tuple(binary["block"]), 7, b"parameters")
"""


@pytest.fixture(params=["3.11", "3.12", "3.13"])
def installed(
    request: pytest.FixtureRequest,
    install: Install,
    wheel_311: Path,
    wheel_312: Path,
    torch_path: Path,
) -> Environment:
    """The wheel in a clean environment; that of 3.11 has torch too, the developer's."""
    if request.param == "3.11":
        return install_beside_torch(install, wheel_311, torch_path)
    return install(request.param, wheel_312)


def install_beside_torch(install: Install, wheel: Path, torch_path: Path) -> Environment:
    """For 3.11, with the pip of that Python, the oldest of all."""
    return install("3.11", wheel, purpose="torch", path=(torch_path,), own_pip=True)


def test_pip_adds_only_click_and_platformdirs(installed: Environment) -> None:
    found = {path.name.partition("-")[0] for path in installed.packages.glob("*.dist-info")}
    assert found - {"pip", "setuptools"} == {"sonata_aot", "click", "platformdirs"}


def test_verify(installed: Environment) -> None:
    said = installed.run("sonata-aot", "verify")  # as recipes and image do: it finds the wheel's
    assert said.splitlines()[-1] == f"{installed.artifacts}: 123 ok, 0 wrong"


def test_doctor(installed: Environment, recording_library: Path) -> None:
    environ = {"LD_LIBRARY_PATH": str(recording_library.parent), "SONATA_TEST_CUDA_CC": "8.6"}
    said = json.loads(installed.run("sonata-aot", "doctor", "--json", **environ))
    assert said["driver"]["available"]
    place = said["places"][0]
    assert (Path(place["path"]), place["usable"]) == (installed.artifacts, True)
    assert [(x["arch"], x["form"]) for x in place["choices"]] == [("sm86", "cubin")]
    problem = place["load"]["problem"]
    with_torch = installed.folder.name == "torch-3.11"
    assert said["torch"] == (version("torch") if with_torch else None)
    if with_torch:
        assert (problem, place["load"]["ms"] > 0) == (None, True)
    else:
        assert "torch, which is not installed" in problem


def test_the_launcher_launches(
    installed: Environment, recording_library: Path, tmp_path: Path
) -> None:
    log = tmp_path / "calls"
    script = f"{recording_libcuda.PRELUDE}\nARTIFACTS = {str(installed.artifacts)!r}\n{LAUNCH}"
    environ = {
        "LD_LIBRARY_PATH": str(recording_library.parent),
        "SONATA_TEST_CUDA_LOG": str(log),
    }
    installed.run("python", "-c", script, **environ)
    calls = [json.loads(line) for line in log.read_text().splitlines()]
    (launch,) = (call for call in calls if call["call"] == "cuLaunchKernel")
    assert (launch["result"], launch["grid"], launch["stream"]) == (0, [3, 5, 7], 7)
    assert bytes.fromhex(launch["params"]) == b"parameters"


def test_nothing_of_the_build_is_there(installed: Environment) -> None:
    script = """
    import importlib.util, shutil
    for name in ("cutlass", "triton", "scikit_build_core", "nanobind"):
        assert importlib.util.find_spec(name) is None, name
    for name in ("c++", "g++", "cc", "gcc", "nvcc", "ptxas", "cmake", "ninja"):
        assert shutil.which(name) is None, name
    """
    installed.run("python", "-c", textwrap.dedent(script))


def test_importing_the_loader_beside_torch_is_quick(
    install: Install, wheel_311: Path, torch_path: Path
) -> None:
    installed = install_beside_torch(install, wheel_311, torch_path)
    script = """
    import time, torch
    began = time.process_time()
    from sonata_aot import loader
    print(1e3 * (time.process_time() - began))
    """
    took: list[float] = []
    while not took or (len(took) < RUNS and min(took) >= MOST_IMPORT_MS):
        took.append(float(installed.run("python", "-c", textwrap.dedent(script))))
    assert min(took) < MOST_IMPORT_MS, took


def test_artifacts_of_a_wheel_of_their_own_are_found(
    install: Install, base_312: Path, data_wheel: Path, recording_library: Path
) -> None:
    installed = install("3.12", base_312, data_wheel, purpose="data")
    environ = {"LD_LIBRARY_PATH": str(recording_library.parent), "SONATA_TEST_CUDA_CC": "8.6"}
    said = json.loads(installed.run("sonata-aot", "doctor", "--json", **environ))
    bundled, found, _ = said["places"]
    assert (bundled["usable"], found["usable"]) == (False, True)
    assert found["origin"] == "the installed sonata-aot-kernels-sm86"
    assert [(x["arch"], x["form"]) for x in found["choices"]] == [("sm86", "cubin")]
    script = "import sonata_aot_kernels_sm86 as kernels; print(kernels.ARTIFACTS)"
    folder = installed.run("python", "-c", script).strip()
    assert found["path"] == folder
    assert "123 ok, 0 wrong" in installed.run("sonata-aot", "verify", folder)


def test_packed_ptx_reaches_the_driver(
    install: Install, wheel_311: Path, torch_path: Path, recording_library: Path, tmp_path: Path
) -> None:
    installed = install_beside_torch(install, wheel_311, torch_path)
    log = tmp_path / "calls"
    environ = {
        "LD_LIBRARY_PATH": str(recording_library.parent),
        "SONATA_TEST_CUDA_LOG": str(log),
        "SONATA_TEST_CUDA_CC": "9.0",
    }
    script = """
    from sonata_aot import loader
    loader.load(allow_ptx=True, preload=["ssd_state_passing"], devices=[0])
    """
    installed.run("python", "-c", textwrap.dedent(script), **environ)
    wheel = read_wheel(wheel_311)
    manifest = json.loads(wheel.files[f"{BUNDLED}/manifest.json"])
    (binary,) = (x for x in manifest["binaries"] if x["kernel"] == "ssd_state_passing")
    calls = [json.loads(line) for line in log.read_text().splitlines()]
    (loaded,) = (call for call in calls if call["call"] == "cuLibraryLoadData")
    assert loaded["sha256"] == binary["ptx"]["sha256"]
