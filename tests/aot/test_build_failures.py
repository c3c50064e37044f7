"""Builds of kernels that never end, change, or are nowhere."""

from __future__ import annotations

import os

import pytest
from conftest import Toys


def test_a_kernel_that_hangs_is_ended(toys: Toys) -> None:
    toys.write(
        f'spec("good", "{toys.package}.hangs")',
        hangs="import os, time\nopen(os.environ['PID'], 'w').write(str(os.getpid()))\n"
        "time.sleep(600)\n",
    )
    toys.environ["PID"] = str(toys.root / "pid")
    result = toys.build("--timeout=8")
    assert result.returncode == 1
    assert "good[m=1] sm86: took longer than 8 s and was ended" in result.stderr
    pid = int((toys.root / "pid").read_text())
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)
    assert toys.scratch == []


CHANGES = """
from .device import cutlass, cute, Int32, Float32

@cute.kernel
def good(out: cute.Pointer, n: Int32, *, m: cutlass.Constexpr):
    (out + n).store(Float32(m))
"""


def test_a_source_that_changes_while_it_is_compiled(toys: Toys) -> None:
    """The cache would have code under the key of a source that it is not of."""
    edit = 'with open(__file__, "a") as file:\n    file.write("# more")\n'
    toys.write(f'spec("good", "{toys.package}.changes")', changes=CHANGES + edit)
    result = toys.build()
    assert (result.returncode, result.stdout) == (1, "")
    assert "good[m=1] sm86: its source changed while it was compiled" in result.stderr
    toys.write(f'spec("good", "{toys.package}.changes")', changes=CHANGES)
    assert "1 compiled" in toys.build().stdout


def test_a_missing_device_module_is_one_line(toys: Toys) -> None:
    toys.write('spec("good", "nowhere.device")')
    result = toys.build()
    assert (result.returncode, result.stdout) == (1, "")
    assert len(result.stderr.splitlines()) == 1
    assert "'nowhere.device' not found" in result.stderr
