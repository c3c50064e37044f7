"""`benchmarks.launch`: what its loop in C launches, and that it says so where there is no GPU."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

import pytest

from recording_libcuda import Recorder
from sonata_aot.artifacts.errors import SonataError

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def launch(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(ROOT)
    from benchmarks import launch

    return launch


SCRIPT = """
library = ctypes.CDLL({library!r})
library.loop.restype = ctypes.c_double
set_context(4096)
native.devices()
function = ctypes.c_void_p()
image = ctypes.create_string_buffer(IMAGE)
found = [library.load(image, b"first_kernel", 70000, ctypes.byref(function))]

class Config(ctypes.Structure):
    _fields_ = (
        ("grid", ctypes.c_uint * 3), ("block", ctypes.c_uint * 3), ("shared", ctypes.c_uint),
        ("stream", ctypes.c_void_p), ("attributes", ctypes.c_void_p), ("count", ctypes.c_uint),
    )

config = Config((3, 5, 7), (32, 4, 2), 70000, 0x77)
for early in (0, 1):
    size = ctypes.c_size_t(32)
    took = library.loop(function, ctypes.byref(config), early, bytes(range(32)), size, 3)
    found.append(took > 0)
inject("cuLaunchKernel=700")
found.append(library.loop(function, ctypes.byref(config), 0, b"", ctypes.c_size_t(0), 3))
say(found)
"""


def test_the_loop_launches_what_it_is_given(
    launch: ModuleType, recording_library: Path, tmp_path: Path
) -> None:
    launch.compiled(tmp_path)
    script = SCRIPT.format(library=str(tmp_path / "launch_loop.so"))
    outcome = Recorder(recording_library, tmp_path).native(script)
    assert outcome.value == [0, True, True, -700]
    plain, early = outcome.named("cuLaunchKernel")[:3], outcome.named("cuLaunchKernelEx")
    assert len(early) == 3
    for each in (*plain, *early):
        assert (each["entry"], each["grid"], each["block"]) == (
            "first_kernel",
            [3, 5, 7],
            [32, 4, 2],
        )
        assert (each["shared"], each["stream"]) == (70000, 0x77)
        assert bytes.fromhex(each["params"]) == bytes(range(32))
    assert {str(each["attributes"]) for each in early} == {"[[6, 1]]"}


def test_a_compiler_that_is_missing_or_fails_is_named(
    launch: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for compiler, words in (("no-such-compiler", "no-such-compiler: "), ("false", "not compile")):
        monkeypatch.setenv("CC", compiler)
        with pytest.raises(SonataError, match=words):
            launch.compiled(tmp_path)
