"""docs/own-kernels.md, followed to the letter: what it has is built, is right, and is launched."""

from __future__ import annotations

import os
import struct
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import recording_libcuda
import tutorial
from kernel_runs import Kernel
from ptx_machine import Memory
from ptx_numbers import from_bf16, to_bf16
from recording_libcuda import Recorder
from sonata_aot.aot.provenance import git_state
from sonata_aot.artifacts import ArtifactSet, open_artifacts

if TYPE_CHECKING:
    from tests.aot.conftest import Invoke

SUPPORT = Path(recording_libcuda.__file__).parents[1]
COLUMNS = (2048, 4096)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The reader's folder, with everything on the page done."""
    folder = tmp_path_factory.mktemp("tutorial")
    tutorial.write(folder)
    environ = {
        **{name: value for name, value in os.environ.items() if not name.startswith("SONATA_")},
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        "SONATA_AOT_CACHE_DIR": str(folder / "cache"),
    }
    printed = tutorial.run(folder, environ)
    assert "8 compiled, 0 cached" in printed
    assert "ok    sources" in printed
    assert "8 within budget, 0 not" in printed
    assert "dist/rms_gate_artifacts-" in printed
    return folder


@pytest.fixture(scope="module")
def artifacts(folder: Path) -> ArtifactSet:
    return open_artifacts(folder / "artifacts")


def test_the_page_has_what_the_tests_take_from_it() -> None:
    assert list(tutorial.files()) == [
        *("rms_gate/device.py", "rms_gate/spec.py", "pyproject.toml"),
        *("rms_gate/__init__.py", "serve.py"),
    ]
    assert [command.split()[1] for command in tutorial.commands()] == [
        *("build", "verify", "inspect", "wheel")
    ]


def test_the_manifest_has_the_kernel(folder: Path, artifacts: ArtifactSet) -> None:
    manifest = artifacts.manifest
    assert manifest.selection.kernels == ("rms_norm_gate",)
    assert manifest.rules == ()
    assert {(b.arch, *b.variant.values()) for b in manifest.binaries} == {
        (arch, dtype, columns, 8)
        for arch in ("sm86", "sm90")
        for dtype in ("bf16", "f16")
        for columns in COLUMNS
    }
    # A folder under no git has no commit, whatever is around.
    assert (manifest.source.commit, manifest.source.dirty) == git_state(folder.glob("*/*.py"))


def test_verifying_its_sources_needs_its_module(invoke: Invoke, folder: Path) -> None:
    result = invoke("verify", "--sources", folder / "artifacts")
    assert result.exit_code == 1
    assert "kernels that are not installed here: rms_norm_gate" in result.stdout
    assert invoke("verify", "--from=rms_gate.spec", folder / "artifacts").exit_code == 2


def random_case(rows: int, columns: int) -> tuple[Any, Any, Any]:
    random = np.random.default_rng(columns)
    x, gate = (random.standard_normal((rows, columns)).astype(np.float32) for _ in range(2))
    gate[0, :8] = [-200, -90, -1e-3, 0, 1e-3, 20, 90, 200]
    x[-1] = 0
    weight = random.standard_normal(columns).astype(np.float32)
    return x, gate * 2, weight


@pytest.mark.parametrize("dtype", ["bf16", "f16"])
@pytest.mark.parametrize("columns", COLUMNS)
def test_results_are_those_of_float64(artifacts: ArtifactSet, dtype: str, columns: int) -> None:
    variant = {"dtype": dtype, "columns": columns, "warps": 8}
    kernel = Kernel(artifacts, ("sm86", "rms_norm_gate", variant))
    rows, pads, eps = 3, (8, 24), 1e-5

    def bits(values: Any) -> Any:
        return to_bf16(values) if dtype == "bf16" else values.astype(np.float16).view(np.uint16)

    def value(found: Any) -> Any:
        wide = from_bf16(found) if dtype == "bf16" else found.view(np.float16)
        return wide.astype(np.float64)

    x, gate, weight = random_case(rows, columns)
    memory, given = Memory(), []
    for name, values, pad in (("x", x, pads[0]), ("gate", gate, pads[1])):
        padded = np.full((rows, columns + pad), 0xFFFF, np.uint16)
        padded[:, :columns] = bits(values)
        given.append((memory.buffer(padded.reshape(-1), name), value(padded[:, :columns])))
    out = np.full(rows * columns, 0xFFFF, np.uint16)
    written = memory.buffer(out, "out", writable=True)
    kernel.run(
        memory,
        {
            "x": given[0][0],
            "gate": given[1][0],
            "weight": memory.buffer(bits(weight), "weight"),
            "out": written,
            "rows": rows,
            "x_stride": columns + pads[0],
            "gate_stride": columns + pads[1],
            "eps": eps,
        },
    )
    assert written.written.all()
    exact, gates = given[0][1], given[1][1]
    u = exact * gates / (1 + np.exp(-gates))
    expected = u / np.sqrt((u * u).mean(-1, keepdims=True) + eps) * value(bits(weight))
    # One rounding to the dtype, and what sums and the exponential of float32 lose.
    bound = 2**-8 if dtype == "bf16" else 2**-11
    off = np.abs(value(out).reshape(rows, columns) - expected)
    assert (off <= (bound + 2**-16) * np.abs(expected) + 2**-24).all(), off.max()


# A GPU for a torch without one.
PRETEND = """
import sys
sys.path.insert(0, {folder!r})
import torch
from on_device import tensor
addresses = iter(range(0x100000, 0x1000000, 0x100000))
def made(*shape, dtype, device):
    shape = shape[0] if isinstance(shape[0], tuple) else shape
    stride = (shape[1], 1) if len(shape) == 2 else (1,)
    return tensor(*shape, dtype=dtype, address=next(addresses), stride=stride)
torch.randn = torch.ones = torch.empty = made
torch.cuda.is_available = lambda: True
torch.cuda.current_device = lambda: 0
import os
os.chdir({folder!r})
exec(open("serve.py").read())
y = rms_norm_gate(kernels, x[:, :2048], gate[:, 2048:], weight[:2048], eps=0.5)
"""


def test_the_server_launches_it(folder: Path, recording_library: Path, tmp_path: Path) -> None:
    recorder = Recorder(recording_library, tmp_path)
    environ = {"SONATA_TEST_CUDA_CC": "8.9", "PYTHONPATH": str(SUPPORT)}
    outcome = recorder.run(PRETEND.format(folder=str(folder)), env=environ)
    whole, part = outcome.named("cuLaunchKernel")
    for launch, columns in ((whole, 4096), (part, 2048)):
        assert launch["entry"].startswith(f"rms_norm_gate_dtype_bf16_columns_{columns}_warps_8_")
        assert (launch["grid"], launch["block"], launch["shared"]) == ([4, 1, 1], [256, 1, 1], 32)
    pointers = (0x100000, 0x200000, 0x300000, 0x400000)
    block = struct.pack("<4Qi4x2qf", *pointers, 4, 4096, 4096, 1e-5)
    assert whole["params"] == block.hex()
    pointers = (0x100000, 0x200000 + 4096, 0x300000, 0x500000)
    assert part["params"] == struct.pack("<4Qi4x2qf", *pointers, 4, 4096, 4096, 0.5).hex()


def test_its_entry_point_makes_it_part_of_every_build(folder: Path, tmp_path: Path) -> None:
    """As an installer would leave it: the package's metadata beside its modules."""
    site = tmp_path / "site"
    metadata = site / "rms_gate-0.1.0.dist-info"
    metadata.mkdir(parents=True)
    (site / "rms_gate").symlink_to(folder / "rms_gate")
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: rms-gate\nVersion: 0.1.0\n")
    lines = (folder / "pyproject.toml").read_text().partition('"sonata_aot.kernels"]\n')[2]
    points = "[sonata_aot.kernels]\n" + lines.replace('"', "")
    (metadata / "entry_points.txt").write_text(points)
    program = (
        "from sonata_aot.aot.plan import choose_kernels\n"
        "from sonata_aot.kernels import builtin\n"
        "names = {spec.name for spec in choose_kernels([])}\n"
        "default = {name for name, spec in builtin().items() if spec.default}\n"
        "assert names == {'rms_norm_gate', *default}, names\n"
        "assert {s.name for s in choose_kernels([], ['sonata_aot.kernels'])} < names\n"
    )
    environ = {**os.environ, "PYTHONPATH": str(site)}
    subprocess.run([sys.executable, "-c", program], env=environ, cwd=tmp_path, check=True)
