"""`sonata-aot doctor` from end to end, on the recording driver."""

from __future__ import annotations

import json
import os
import re
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from tests.aot.conftest import Cli

Doctor = Callable[..., tuple[dict[str, Any], str]]


@pytest.fixture
def doctor(cli: Cli, built: Path, recording_library: Path) -> Doctor:
    """What it says as JSON and to a person; `version="12040"` is SONATA_TEST_CUDA_VERSION."""

    def run(*arguments: str, library: Path = recording_library, **driver: str):
        environ = {f"SONATA_TEST_CUDA_{name.upper()}": value for name, value in driver.items()}
        environ["LD_LIBRARY_PATH"] = str(library.parent)
        report, text = (
            cli("doctor", built, *arguments, *flags, **environ) for flags in (["--json"], [])
        )
        assert (report.returncode, report.stderr) == (0, "")
        assert (text.returncode, text.stderr) == (0, "")
        return json.loads(report.stdout), text.stdout

    return run


def chosen(report: dict[str, Any]) -> list[tuple[int, str | None, str | None]]:
    (place,) = report["places"]
    assert place["usable"]
    return [(choice["device"], choice["arch"], choice["form"]) for choice in place["choices"]]


@pytest.mark.parametrize(
    ("version", "shown"), [("12040", "12.4"), ("12090", "12.9"), ("13000", "13.0")]
)
def test_the_drivers_version(
    doctor: Doctor, recording_library: Path, version: str, shown: str
) -> None:
    report, text = doctor(version=version)
    assert report["driver"] == {
        "available": True,
        "reason": None,
        "version": int(version),
        "library": os.path.realpath(recording_library),
    }
    assert f"driver      CUDA {shown} ({os.path.realpath(recording_library)})" in text


def test_two_devices_and_their_choices(doctor: Doctor) -> None:
    report, text = doctor(devices="2", cc="9.0")
    assert report["devices"] == [
        {
            "index": index,
            "name": f"Recording GPU {index}",
            "major": 9,
            "minor": 0,
            "multiprocessors": 132,
            "shared_per_block_optin": 232448,
        }
        for index in range(2)
    ]
    assert chosen(report) == [(0, "sm90", "cubin"), (1, "sm90", "cubin")]
    for index in range(2):
        device = f"device {index}    Recording GPU {index}, compute capability 9.0, 132 multi"
        assert device in text
        assert f"            device {index}: sm90 cubin, highest cubin here that runs on" in text


def test_how_long_load_takes(doctor: Doctor) -> None:
    report, text = doctor(cc="9.0")
    (place,) = report["places"]
    assert place["load"]["problem"] is None
    assert 0 < place["load"]["ms"] < 60_000
    assert re.search(r"\n            load\(\) on device 0: [0-9.]+ ms", text)


def test_why_load_fails(doctor: Doctor) -> None:
    report, text = doctor(cc="9.0", fail="cuLibraryLoadData=200")
    (place,) = report["places"]
    assert place["load"]["ms"] is None
    assert "CUDA_ERROR_INVALID_IMAGE" in place["load"]["problem"]
    assert f"            load(): {place['load']['problem']}" in text


def test_what_was_passed_over_and_why(doctor: Doctor) -> None:
    report, text = doctor(cc="8.9")
    assert chosen(report) == [(0, "sm86", "cubin")]
    assert report["places"][0]["choices"][0]["rejected"] == [
        {"arch": "sm90", "form": "cubin", "reason": "does not run on 8.9"}
    ]
    assert "              not sm90 cubin: does not run on 8.9" in text


def test_arch_and_ptx_are_the_loaders(doctor: Doctor) -> None:
    refused, text = doctor("--arch", "8.6", cc="9.0")
    assert chosen(refused) == [(0, None, None)]
    reason = refused["places"][0]["choices"][0]["reason"]
    assert f"device 0: {reason}" in text
    for words in ("not the requested sm86", "sm86 ptx: PTX is not allowed", "--allow-ptx"):
        assert words in reason
    allowed, text = doctor("--arch", "8.6", "--allow-ptx", cc="9.0")
    assert chosen(allowed) == [(0, "sm86", "ptx")]
    assert "device 0: sm86 ptx, highest ptx here that runs on compute capability 9.0" in text


def test_a_driver_too_old_for_the_ptx(doctor: Doctor) -> None:
    report, _ = doctor("--allow-ptx", cc="12.0", version="12080")
    assert chosen(report) == [(0, None, None)]
    reason = report["places"][0]["choices"][0]["reason"]
    assert "sm90 ptx: needs a driver of CUDA 12.9, this one is 12.8" in reason


def test_a_driver_that_does_not_tell_its_version(doctor: Doctor) -> None:
    report, text = doctor(fail="cuDriverGetVersion=999", cc="8.6")
    assert report["driver"]["version"] is None
    assert len(report["devices"]) == len(report["places"][0]["choices"]) == 1
    assert "Recording GPU 0" in text


def test_a_driver_without_devices(doctor: Doctor) -> None:
    report, text = doctor(fail="cuInit=100")
    assert (report["driver"]["available"], report["devices"]) == (False, [])
    assert "CUDA_ERROR_NO_DEVICE" in report["driver"]["reason"]
    assert f"driver      none: {report['driver']['reason']}" in text
    assert "binaries for sm86, sm90" in text


def test_devices_that_cannot_be_examined(doctor: Doctor) -> None:
    report, _ = doctor(fail="cuDeviceGetAttribute=802")
    assert (report["driver"]["available"], report["devices"]) == (False, [])
    assert "cuDeviceGetAttribute" in report["driver"]["reason"]


@pytest.mark.parametrize(
    ("body", "status"), [("abort();", "-6"), ("_exit(3);", "3"), ("*(volatile int *)0 = 1;", "-11")]
)
def test_a_driver_that_takes_the_process_along(
    doctor: Doctor, tmp_path: Path, body: str, status: str
) -> None:
    source, library = tmp_path / "crash.cpp", tmp_path / "lib" / "libcuda.so.1"
    library.parent.mkdir()
    source.write_text(
        "#include <stdlib.h>\n#include <unistd.h>\n"
        f"static int crash = [] {{ {body} return 0; }}();\n"
    )
    compiler = os.environ.get("CXX", "c++").split()
    subprocess.run([*compiler, "-shared", "-fPIC", source, "-o", library], check=True)
    report, text = doctor(library=library)
    assert (report["driver"]["available"], report["devices"]) == (False, [])
    reason = report["driver"]["reason"]
    assert reason.startswith(f"the loader's probe ended with status {status}")
    assert f"driver      none: {reason}" in text
    assert report["torch"]
