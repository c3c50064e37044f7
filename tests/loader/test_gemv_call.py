"""`kernels.gemv` down to the driver call: parameter block, grid, stream, refused arguments."""

from __future__ import annotations

import struct

import pytest

from recording_libcuda import FIRST_CONTEXT

HOPPER = {"SONATA_TEST_CUDA_CC": "9.0", "SONATA_TEST_CUDA_DEVICES": "2"}
OPEN = "k = loader.load(ARTIFACTS, devices=[0, 1])\n"


def call(recorder, artifacts, script):
    return recorder.loader(artifacts, OPEN + script, env=HOPPER)


def test_the_kernel_gets_the_declared_block_on_the_current_stream(recorder, artifacts, manifest):
    outcome = call(
        recorder,
        artifacts,
        "out = tensor(2, 100, address=0x30002, stride=(104, 1))\n"
        "x = tensor(2, 64, address=0x10000, stride=(72, 1))\n"
        "weight = tensor(100, 64, address=0x20000, stride=(80, 1))\n"
        "assert k.gemv(x, weight, out=out) is out; say(0)",
    )
    (launch,) = outcome.named("cuLaunchKernel")
    expected = struct.pack("<QQQiiqqq", 0x10000, 0x20000, 0x30002, 100, 64, 72, 80, 104)
    assert bytes.fromhex(launch["params"]) == expected
    (binary,) = [b for b in manifest["binaries"] if b["arch"] == "sm90" and b["variant"]["m"] == 2]
    rows = binary["variant"]["rows"]
    assert launch["grid"] == [-(-100 // rows), 1, 1]
    assert launch["block"] == binary["block"]
    assert launch["shared"] == binary["shared_bytes"]
    assert launch["stream"] == 0x7F00_1234_5678


def test_the_output_is_allocated_like_x(recorder, artifacts):
    outcome = call(
        recorder,
        artifacts,
        "y = k.gemv(tensor(1, 64), tensor(48, 64))\n"
        "say([list(y.shape), str(y.dtype), str(y.device), y.data_ptr()])",
    )
    shape, dtype, device, address = outcome.value
    assert (shape, dtype, device) == ([1, 48], "torch.bfloat16", "cuda:0")
    (launch,) = outcome.named("cuLaunchKernel")
    assert struct.unpack_from("<QQQ", bytes.fromhex(launch["params"]))[2] == address


def test_the_tensors_device_decides_context_and_stream(recorder, artifacts):
    outcome = call(
        recorder,
        artifacts,
        "k.gemv(tensor(1, 64, device='cuda:1'), tensor(16, 64, device='cuda:1')); say(0)",
    )
    (launch,) = outcome.named("cuLaunchKernel")
    assert launch["stream"] == 0x7F00_1234_5678 + 1
    assert launch["context"] == FIRST_CONTEXT + 1


def test_a_row_stride_without_meaning_is_not_checked(recorder, artifacts):
    outcome = call(
        recorder,
        artifacts,
        "k.gemv(tensor(1, 64, stride=(7, 1)), tensor(1, 64, stride=(3, 1))); say(0)",
    )
    assert len(outcome.named("cuLaunchKernel")) == 1


CASES = {
    "[1.0], tensor(16, 64)": ("ArgumentError", "x is a list"),
    "tensor(1, 64), None": ("ArgumentError", "weight is a NoneType"),
    "torch.zeros(1, 64, dtype=torch.bfloat16), tensor(16, 64)": ("ArgumentError", "cpu"),
    "tensor(1, 64), torch.zeros(16, 64, dtype=torch.bfloat16)": ("ArgumentError", "cpu"),
    "tensor(64), tensor(16, 64)": ("ArgumentError", "1 dimensions"),
    "tensor(1, 64), tensor(16, 72)": ("ArgumentError", "one K"),
    "tensor(1, 64), tensor(16, 64, dtype=torch.float16)": ("ArgumentError", "float16"),
    "tensor(1, 60), tensor(16, 60)": ("ArgumentError", "multiple of 8"),
    "tensor(1, 0, stride=(8, 1)), tensor(16, 0, stride=(8, 1))": ("ArgumentError", "K = 0"),
    "tensor(1, 64), tensor(0, 64)": ("ArgumentError", "N = 0"),
    "tensor(1, 64), tensor(16, 64, device='cuda:1')": ("ArgumentError", "cuda:1"),
    "tensor(1, 64, device='cuda:2'), tensor(16, 64, device='cuda:2')": ("ArgumentError", "[0, 1]"),
    "tensor(1, 64, address=0x1002), tensor(16, 64)": ("ArgumentError", "2 bytes past"),
    "tensor(1, 64), tensor(16, 64, address=0x1008)": ("ArgumentError", "8 bytes past"),
    "tensor(2, 64, stride=(68, 1)), tensor(16, 64)": ("ArgumentError", "row stride 68"),
    "tensor(2, 64, stride=(1, 2)), tensor(16, 64)": ("ArgumentError", "x.contiguous()"),
    "tensor(1, 64), tensor(16, 64, stride=(1, 16))": ("ArgumentError", "weight.contiguous()"),
    "tensor(3, 64), tensor(16, 64)": ("VariantMissing", "bf16 M=1, bf16 M=2"),
    "tensor(0, 64), tensor(16, 64)": ("VariantMissing", "0 rows"),
    "tensor(1, 64, dtype=torch.float32), tensor(16, 64, dtype=torch.float32)": (
        "VariantMissing",
        "torch.nn.functional.linear",
    ),
    "tensor(1, 64), tensor(16, 64), torch.zeros(1, 16)": ("ArgumentError", "out is"),
    "tensor(1, 64), tensor(16, 64), tensor(1, 17)": ("ArgumentError", "(1, 17)"),
    "tensor(1, 64), tensor(16, 64), tensor(1, 16, dtype=torch.float16)": (
        "ArgumentError",
        "float16",
    ),
    "tensor(1, 64), tensor(16, 64), tensor(1, 16, device='cuda:1')": ("ArgumentError", "cuda:1"),
    "tensor(2, 64), tensor(16, 64), tensor(2, 16, stride=(8, 1), address=0x9000)": (
        "ArgumentError",
        "overlap",
    ),
    "tensor(1, 64), tensor(16, 64, address=0x5000), tensor(1, 16, address=0x107e)": (
        "ArgumentError",
        "out overlaps x",
    ),
    "tensor(1, 64), tensor(16, 64, address=0x5000), tensor(1, 16, address=0x4fe2)": (
        "ArgumentError",
        "out overlaps weight",
    ),
    "tensor(1, 64, address=0), tensor(16, 64)": ("ArgumentError", "x has no memory"),
    "tensor(1, 64), tensor(16, 64, address=0)": ("ArgumentError", "weight has no memory"),
    "tensor(1, 64), tensor(16, 64), tensor(1, 16, address=0)": ("ArgumentError", "out has no mem"),
    "fake(1, 64), tensor(16, 64)": ("ArgumentError", "x has no memory"),
    "tensor(1, 64), fake(16, 64)": ("ArgumentError", "weight has no memory"),
    "tensor(1, 64), tensor(16, 64), fake(1, 16)": ("ArgumentError", "out has no memory"),
    "tensor(1, 64, negated=True), tensor(16, 64)": ("ArgumentError", "x.resolve_neg()"),
    "tensor(1, 64), tensor(16, 64, negated=True)": ("ArgumentError", "weight.resolve_neg()"),
    "tensor(1, 64), tensor(16, 64), tensor(1, 16, address=0x9000, negated=True)": (
        "ArgumentError",
        "out.resolve_neg()",
    ),
    "tensor(1, 64), tensor(16, 64), tensor(1, 16, address=0x9001)": (
        "ArgumentError",
        "out starts between two elements",
    ),
    "OnDevice(torch.zeros(1, 64, dtype=torch.bfloat16, requires_grad=True)), tensor(16, 64)": (
        "ArgumentError",
        "no backward",
    ),
}


# As torch.compile and torch.export make them: of a device, and without memory.
FAKE = """
import warnings
from torch._subclasses.fake_tensor import FakeTensorMode
warnings.filterwarnings("ignore", message="Accessing the data pointer")
def fake(*shape):
    with FakeTensorMode():
        return torch.empty(*shape, dtype=torch.bfloat16, device="cuda:0")
"""


def test_bad_calls_are_refused_before_the_driver(recorder, artifacts):
    cases = {f"k.gemv({arguments})": expected for arguments, expected in CASES.items()}
    outcome = recorder.refused(artifacts, cases, FAKE + OPEN, env=HOPPER)
    assert not outcome.named("cuLaunchKernel")


def test_touching_memory_is_not_overlap(recorder, artifacts):
    outcome = call(
        recorder,
        artifacts,
        "k.gemv(tensor(1, 64), tensor(16, 64, address=0x5000), tensor(1, 16, address=0x1080))\n"
        "k.gemv(tensor(1, 64), tensor(16, 64, address=0x5000), tensor(1, 16, address=0x4fe0))\n"
        "say(0)",
    )
    assert len(outcome.named("cuLaunchKernel")) == 2


def test_grad_is_fine_where_it_is_off(recorder, artifacts):
    outcome = call(
        recorder,
        artifacts,
        "memory = torch.zeros(1, 64, dtype=torch.bfloat16, requires_grad=True)\n"
        "x = OnDevice(memory, address=0x1000)\n"
        "with torch.inference_mode(): k.gemv(x, tensor(16, 64))\n"
        "say(0)",
    )
    assert len(outcome.named("cuLaunchKernel")) == 1


@pytest.mark.parametrize("entry", ["cuLaunchKernel=700", "cuLaunchKernel=1"])
def test_a_failed_launch_names_kernel_grid_and_stream(recorder, artifacts, entry):
    outcome = call(
        recorder,
        artifacts,
        f"os.environ['SONATA_TEST_CUDA_FAIL'] = {entry!r}\n"
        "say(failure(lambda: k.gemv(tensor(1, 64), tensor(16, 64))))",
    )
    error = outcome.value
    assert error["type"] == "DriverError"
    for words in ("gemv[dtype=bf16,m=1", "grid", "stream", "CUDA_ERROR_"):
        assert words in error["message"]
