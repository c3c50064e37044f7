"""`kernels.gemv` down to the driver call: parameter block, grid, stream."""

from __future__ import annotations

import struct

import pytest

from gemv_launches import Call, expected, launches
from recording_libcuda import FIRST_CONTEXT

HOPPER = {"SONATA_TEST_CUDA_CC": "9.0", "SONATA_TEST_CUDA_DEVICES": "2"}
OPEN = "k = loader.load(ARTIFACTS, devices=[0, 1])\n"
# A call of a size, with its operands where `Call` has them.
PLAIN = """
def plain(rows, n, k_size, dtype=torch.bfloat16, device="cuda:0", **options):
    return k.gemv(
        tensor(rows, k_size, dtype=dtype, device=device),
        tensor(n, k_size, dtype=dtype, device=device, address=0x100000),
        out=tensor(rows, n, dtype=dtype, device=device, address=0x10000000000),
        **options,
    )
"""
OPERANDS = (0x1000, 0x100000, 0, 0x10000000000)


def call(recorder, artifacts, script, **env):
    return recorder.loader(artifacts, OPEN + PLAIN + script, env={**HOPPER, **env})


def test_the_kernel_gets_the_declared_block_on_the_current_stream(recorder, artifacts, manifest):
    outcome = call(
        recorder,
        artifacts,
        "out = tensor(2, 100, address=0x30002, stride=(104, 1))\n"
        "x = tensor(2, 64, address=0x10000, stride=(72, 1))\n"
        "weight = tensor(100, 64, address=0x20000, stride=(80, 1))\n"
        "bias = tensor(100, address=0x40006)\n"
        "assert k.gemv(x, weight, bias, out) is out; say(0)",
    )
    (launch,) = outcome.named("cuLaunchKernel")
    (found,) = [
        b
        for b in manifest["binaries"]
        if b["entry"] == launch["entry"] and b["arch"] == "sm90" and b["kernel"] == "gemv"
    ]
    rows = found["variant"]["rows"]
    # Each byte of it, as C lays the parameters out: padding is zero.
    block = struct.pack("<4Q", 0x10000, 0x20000, 0x40006, 0x30002)
    block += struct.pack("<5i4x", 100, 64, 2, rows, 0)
    block += struct.pack("<3q", 72, 80, 104)
    block += struct.pack("<3i4xQi", 0, 0, 0, 0, 0)
    assert launch["params"] == block.hex()
    assert found["variant"]["m"] == 2
    assert launch["grid"] == [-(-100 // rows), 1, 1]
    assert launch["block"] == found["block"]
    assert launch["shared"] == found["shared_bytes"]
    assert launch["stream"] == 0x7F00_1234_5678


def test_the_general_kernel_gets_its_own_block(recorder, artifacts, manifest):
    outcome = call(
        recorder,
        artifacts,
        "out = tensor(3, 100, address=0x30002, stride=(101, 1))\n"
        "x = tensor(3, 63, address=0x10002, stride=(65, 1))\n"
        "weight = tensor(100, 63, address=0x20006, stride=(67, 1))\n"
        "k.gemv(x, weight, tensor(100, address=0x40006), out); say(0)",
    )
    (launch,) = outcome.named("cuLaunchKernel")
    block = struct.pack("<4Q", 0x10002, 0x20006, 0x40006, 0x30002)
    block += struct.pack("<3i4x", 100, 63, 3) + struct.pack("<3q", 65, 67, 101)
    assert launch["params"] == block.hex()
    assert launch["entry"].startswith("gemv_any_dtype_bf16_m_4_wide_0_")


@pytest.mark.parametrize("arch", ["sm86", "sm90"])
def test_rows_and_dtypes_choose_the_binary(recorder, artifacts, manifest, arch):
    """As many rows as a binary has at least; x_rows is how many there are."""
    outcome = call(
        recorder,
        artifacts,
        "for dtype in (torch.bfloat16, torch.float16):\n"
        "    for rows in range(1, 9): plain(rows, 512, 1024, dtype)\n"
        "say(0)",
        SONATA_TEST_CUDA_CC=f"{arch[2]}.{arch[3]}",
    )
    assert launches(outcome) == [
        expected(manifest, Call(rows, 512, 1024, dtype, arch, pointers=OPERANDS))
        for dtype in ("bf16", "f16")
        for rows in range(1, 9)
    ]
    assert [launch["params"]["x_rows"] for launch in launches(outcome)] == [*range(1, 9)] * 2


# x and weight (shape, strides, address), and the layout that they have.
LAYOUTS = {
    "rows with padding": ((2, 64, 72, 0x1000), (48, 64, 80, 0x100000), "aligned"),
    "rows that are one": ((2, 64, 0, 0x1000), (48, 64, 0, 0x100000), "aligned"),
    "one row, any stride": ((1, 64, 7, 0x1000), (1, 64, 3, 0x100000), "aligned"),
    "x off by one element": ((2, 64, 72, 0x1002), (48, 64, 64, 0x100000), "wide"),
    "x off by half a vector": ((1, 64, 64, 0x1008), (48, 64, 64, 0x100000), "wide"),
    "x with odd rows": ((2, 64, 65, 0x1000), (48, 64, 64, 0x100000), "wide"),
    "x with rows of half vectors": ((8, 64, 68, 0x1000), (48, 64, 64, 0x100000), "wide"),
    "weight off by one element": ((2, 64, 64, 0x1000), (48, 64, 64, 0x100002), "any"),
    "weight with odd rows": ((2, 64, 64, 0x1000), (48, 64, 65, 0x100000), "any"),
    "weight with rows of half vectors": ((4, 64, 64, 0x1000), (48, 64, 68, 0x100000), "any"),
    "neither": ((2, 64, 65, 0x1002), (48, 64, 65, 0x100002), "any"),
    "K no multiple of 8": ((2, 60, 64, 0x1000), (48, 60, 64, 0x100000), "any"),
    "K of 1": ((2, 1, 1, 0x1000), (48, 1, 1, 0x100000), "any"),
    "the least": ((1, 8, 8, 0x1000), (1, 8, 8, 0x100000), "aligned"),
}


def test_layouts_choose_the_kernel(recorder, artifacts, manifest):
    script = "out = tensor(8, 48, address=0x10000000000)\n"
    wanted = []
    for (rows, k, x_stride, x), (n, _, stride, weight), layout in LAYOUTS.values():
        script += (
            f"k.gemv(tensor({rows}, {k}, stride=({x_stride}, 1), address={x}),"
            f" tensor({n}, {k}, stride=({stride}, 1), address={weight}), out=out[:{rows}, :{n}])\n"
        )
        pointers = (x, weight, 0, 0x10000000000)
        strides = (x_stride, stride, 48)
        wanted.append(Call(rows, n, k, layout=layout, pointers=pointers, strides=strides))
    outcome = call(recorder, artifacts, script + "say(0)")
    found = dict(zip(LAYOUTS, launches(outcome), strict=True))
    for name, each in zip(LAYOUTS, wanted, strict=True):
        assert found[name] == expected(manifest, each), name


def test_an_element_step_without_meaning_is_not_checked(recorder, artifacts):
    """K = 1 or N = 1: there is no second element that a row's own stride could place."""
    outcome = call(
        recorder,
        artifacts,
        "k.gemv(tensor(2, 1, stride=(1, 9)), tensor(1, 1, stride=(5, 7), address=0x9000),"
        " tensor(1, stride=(4,), address=0xa000), tensor(2, 1, stride=(3, 8), address=0xb000))\n"
        "say(0)",
    )
    (launch,) = launches(outcome)
    strides = [launch["params"][f"{name}_stride"] for name in ("x", "weight", "out")]
    assert strides == [1, 5, 3]


def test_strides_of_more_than_32_bits(recorder, artifacts):
    outcome = call(
        recorder,
        artifacts,
        "far = 2**33\n"
        "k.gemv(tensor(2, 64, stride=(far, 1)), tensor(48, 64, stride=(2 * far, 1), "
        "address=0x1000 + 8 * far), out=tensor(2, 48, stride=(3 * far, 1), address=1 << 50))\n"
        "say(0)",
    )
    (launch,) = launches(outcome)
    strides = [launch["params"][f"{name}_stride"] for name in ("x", "weight", "out")]
    assert strides == [2**33, 2**34, 3 * 2**33]


def test_the_greatest_sizes(recorder, artifacts, manifest):
    """N and K just below 2**31: the grid and the rules still hold."""
    sizes = [(1, 2**31 - 1, 8), (1, 2, 2**31 - 8), (8, 2**31 - 1, 8), (1, 3, 2**31 - 1)]
    script = "".join(f"plain({rows}, {n}, {k})\n" for rows, n, k in sizes)
    outcome = call(recorder, artifacts, script + "say(0)")
    for launch, (rows, n, k) in zip(launches(outcome), sizes, strict=True):
        layout = "any" if k % 8 else "aligned"
        found = expected(manifest, Call(rows, n, k, layout=layout, pointers=OPERANDS))
        assert launch == found, (rows, n, k)


def test_the_output_is_allocated_like_x(recorder, artifacts):
    outcome = call(
        recorder,
        artifacts,
        "y = k.gemv(tensor(1, 64), tensor(48, 64))\n"
        "say([list(y.shape), str(y.dtype), str(y.device), y.data_ptr()])",
    )
    shape, dtype, device, address = outcome.value
    assert (shape, dtype, device) == ([1, 48], "torch.bfloat16", "cuda:0")
    (launch,) = launches(outcome)
    assert launch["params"]["out"] == address
    assert launch["params"]["out_stride"] == 48


def test_the_tensors_device_decides_context_and_stream(recorder, artifacts, manifest):
    outcome = call(recorder, artifacts, "plain(1, 16, 64, device='cuda:1'); say(0)")
    (launch,) = launches(outcome)
    assert launch == expected(manifest, Call(1, 16, 64, pointers=OPERANDS, device=1))
    assert launch["stream"] == 0x7F00_1234_5678 + 1
    assert launch["context"] == FIRST_CONTEXT + 1


def test_touching_memory_is_not_overlap(recorder, artifacts):
    outcome = call(
        recorder,
        artifacts,
        "k.gemv(tensor(1, 64), tensor(16, 64, address=0x5000), None,"
        " tensor(1, 16, address=0x1080))\n"
        "k.gemv(tensor(1, 64), tensor(16, 64, address=0x5000), tensor(16, address=0x4fc0),"
        " tensor(1, 16, address=0x4fe0))\n"
        "say(0)",
    )
    assert len(launches(outcome)) == 2


def test_inputs_may_overlap_one_another(recorder, artifacts):
    outcome = call(
        recorder,
        artifacts,
        "w = tensor(16, 64)\nk.gemv(w[:4], w, w[0, :16]); say(0)",
    )
    (launch,) = launches(outcome)
    assert [launch["params"][name] for name in ("x", "weight", "bias")] == [0x1000] * 3


def test_grad_is_fine_where_it_is_off(recorder, artifacts):
    outcome = call(
        recorder,
        artifacts,
        "memory = torch.zeros(1, 64, dtype=torch.bfloat16, requires_grad=True)\n"
        "x = OnDevice(memory, address=0x1000)\n"
        "for off in (torch.inference_mode, torch.no_grad):\n"
        "    with off(): k.gemv(x, tensor(16, 64))\n"
        "say(0)",
    )
    assert len(launches(outcome)) == 2


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
