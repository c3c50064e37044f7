"""What the launch path asks of torch: by C functions of the libraries that it has loaded."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from recording_libcuda import Recorder

# Stand-ins for torch's libraries, with the functions of its shim for compiled models.
LIBRARIES = {
    "libtorch_cuda.so": """
int aoti_torch_get_current_cuda_stream(int device, void **stream) {
  if (device > 1) return 1;
  *stream = (void *)(0x7F0000000000 + device);
  return 0;
}
""",
    "libtorch_cpu.so": """
int enabled = 1;
_Bool aoti_torch_grad_mode_is_enabled(void) { return enabled; }
""",
}
SETUP = """
asked = []
def by_python(answer):
    return lambda *given: asked.append(given) or answer
def torch():
    return native.Torch(by_python(False), by_python(5), by_python(None))
"""


@pytest.fixture(scope="module")
def libraries(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("torch")
    compiler = os.environ.get("CC", "cc").split()
    for name, text in LIBRARIES.items():
        source = folder / f"{name}.c"
        source.write_text(text)
        options = ["-shared", "-fPIC", f"-Wl,-soname,{name}", str(source), "-o", folder / name]
        subprocess.run([*compiler, *options], check=True)
    return folder


def test_without_them_python_is_asked(recorder: Recorder) -> None:
    outcome = recorder.native(
        SETUP
        + "say([torch().current_stream(3), torch().is_grad_enabled(), asked])\n"
        + "wrong = native.Torch(by_python(None), by_python('text'), by_python(None))\n"
        + "say(failure(wrong.current_stream, 0))"
    )
    first, second = outcome.stdout.splitlines()
    assert first == "[5, false, [[3], []]]"
    assert '"TypeError"' in second


def test_where_they_are_loaded_they_are_asked(recorder: Recorder, libraries: Path) -> None:
    """The device is passed on, answers change, and Python is asked where they fail."""
    outcome = recorder.native(
        SETUP
        + f"cuda, cpu = (ctypes.CDLL({str(libraries)!r} + '/' + name) for name in "
        + "('libtorch_cuda.so', 'libtorch_cpu.so'))\n"
        + "made = torch()\n"
        + "found = [made.current_stream(0), made.current_stream(1), made.is_grad_enabled()]\n"
        + "ctypes.c_int.in_dll(cpu, 'enabled').value = 0\n"
        + "found += [made.is_grad_enabled(), list(asked), made.current_stream(2), asked]\n"
        + "say(found)"
    )
    first = 0x7F0000000000
    assert outcome.value == [first, first + 1, True, False, [], 5, [[2]]]


def test_what_is_not_loaded_is_not_looked_for(recorder: Recorder, libraries: Path) -> None:
    """On the library path, but no part of this process."""
    outcome = recorder.native(
        SETUP + "say([torch().current_stream(0), torch().is_grad_enabled()])",
        library_path=[recorder.library.parent, libraries],
    )
    assert outcome.value == [5, False]


def test_capturing_is_asked_of_the_kernels_device(recorder: Recorder) -> None:
    outcome = recorder.native(
        """
kernel = first_kernel(device=1)
os.environ["SONATA_TEST_CUDA_CAPTURING"] = "7"
found = [kernel.is_capturing(7), kernel.is_capturing(8), current_context()]
inject("cuStreamIsCapturing=906")
error = failure(kernel.is_capturing, 0x70)
say([found, error["type"], error["what"]])
""",
        env={"SONATA_TEST_CUDA_DEVICES": "2"},
    )
    found, kind, what = outcome.value
    assert (found, kind) == ([True, False, 0], "DriverError")
    for words in ("cuStreamIsCapturing failed", "stream 0x70", "'first_kernel'", "device 1"):
        assert words in what
    assert {call["context"] for call in outcome.named("cuStreamIsCapturing")} == {4097}
