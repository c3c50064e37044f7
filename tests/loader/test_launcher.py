"""`kernels["name"](...)`: any kernel, launched by its declaration, down to the driver call."""

from __future__ import annotations

import dataclasses
import json
import struct
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from sonata_aot.artifacts import Declaration, Parameter

if TYPE_CHECKING:
    from tests.loader.conftest import LoaderRecorder

ENVIRONMENT = {"SONATA_TEST_CUDA_CC": "9.0", "SONATA_TEST_CUDA_DEVICES": "2"}
STREAM = 0x7F00_1234_5678
SETUP = """
k = loader.load(ARTIFACTS, devices=[0, 1])
mine = k["mine"]
x = tensor(4, 64, address=0x10000)
scale = tensor(4, address=0x20004, dtype=torch.float32)
where = tensor(4, address=0x30008, dtype=torch.int64)
full = (x, scale, where, 4, 1 << 40, 0.5)
"""


@pytest.fixture(scope="session")
def mine(gemv: Declaration) -> Declaration:
    """A kernel of one's own; its binaries have m = 1 and 2."""
    return dataclasses.replace(
        gemv,
        name="mine",
        parameters=(
            Parameter("x", "pointer", element="dtype", align=16),
            Parameter("scale", "pointer", element="f32", align=4),
            Parameter("where", "pointer", element="i64", align=8),
            Parameter("lines", "i32"),
            Parameter("stride", "i64"),
            Parameter("eps", "f32"),
        ),
        selectors=("dtype", "m"),
        grid=("ceildiv(lines, m)", "2", "1"),
    )


@pytest.fixture
def own(make_set: Callable[..., Path], mine: Declaration) -> Path:
    return make_set(mine)


def test_the_declared_block_and_grid_on_the_current_stream(
    recorder: LoaderRecorder, own: Path
) -> None:
    outcome = recorder.loader(
        own, SETUP + "assert mine(*full, m=2) is None; say(0)", env=ENVIRONMENT
    )
    (launch,) = outcome.named("cuLaunchKernel")
    block = struct.pack("<3Qi4xqf", 0x10000, 0x20004, 0x30008, 4, 1 << 40, 0.5)
    assert launch["params"] == block.hex()
    assert launch["grid"] == [2, 2, 1]
    assert launch["stream"] == STREAM
    (built,) = [
        b
        for b in json.loads((own / "manifest.json").read_text())["binaries"]
        if (b["arch"], b["variant"]["m"]) == ("sm90", 2)
    ]
    assert launch["entry"] == built["entry"]
    assert launch["block"] == built["block"]
    assert launch["shared"] == built["shared_bytes"]


def test_selectors_and_integers_decide_the_launch(recorder: LoaderRecorder, own: Path) -> None:
    script = """
    mine(*full, m=1)
    mine(*full, m=2)
    mine(x, scale, where, 7, 0, 1, m=2)
    mine(x, None, where, True, 0, 0.0, m=1)
    there = [tensor(4, 64, address=0x90000, device="cuda:1"), None, None]
    mine(*there, 4, 0, 0.0, m=1)
    say([name for name in k] + [repr(mine), "mine" in k, "gemv" in k])
    """
    outcome = recorder.loader(own, SETUP + textwrap.dedent(script), env=ENVIRONMENT)
    launches = outcome.named("cuLaunchKernel")
    assert [launch["grid"][0] for launch in launches] == [4, 2, 4, 1, 4]
    assert ["_m_2_" in launch["entry"] for launch in launches] == [False, True, True, False, False]
    assert launches[2]["params"].endswith(struct.pack("<f", 1.0).hex())
    assert launches[3]["params"] == struct.pack("<3Qi4xqf", 65536, 0, 0x30008, 1, 0, 0.0).hex()
    assert launches[4]["stream"] == STREAM + 1
    assert outcome.value == [
        "mine",
        "<kernel mine(x: dtype*, scale: f32*, where: i64*, lines: int, stride: int, eps: float, "
        "m=1|2)>",
        True,
        False,
    ]


def test_a_selector_with_one_value_may_be_left_out(
    recorder: LoaderRecorder, make_set: Callable[..., Path], mine: Declaration
) -> None:
    several = make_set(dataclasses.replace(mine, selectors=("dtype", "side", "m")))
    outcome = recorder.loader(several, SETUP + "mine(*full, m=2); say(0)", env=ENVIRONMENT)
    assert len(outcome.named("cuLaunchKernel")) == 1


REFUSED = {
    "mine(*full[:-1], m=1)": ("ArgumentError", "5 arguments for 6", "x, scale, where, lines"),
    "mine(*full)": ("ArgumentError", "m is not given", "m=: one of 1, 2"),
    "mine(*full, m=1, n=2)": ("ArgumentError", "no selector 'n'", "m="),
    "mine(*full, m=1, dtype='bf16')": ("ArgumentError", "no selector 'dtype'"),
    "mine(*full, m=[1])": ("ArgumentError", "selectors {'m': [1]}"),
    "mine(*full, m=4)": ("VariantMissing", "no binary for dtype=bf16,m=4", "dtype=bf16,m=1"),
    "mine(tensor(4, dtype=torch.float16), *full[1:], m=1)": (
        *("VariantMissing", "dtype=f16,m=1", "dtype=bf16,m=2"),
    ),
    "mine(tensor(4, dtype=torch.float64), *full[1:], m=1)": ("ArgumentError", "x is", "float64"),
    "mine(x, tensor(4), *full[2:], m=1)": ("ArgumentError", "scale is torch.bfloat16", "f32"),
    "mine(x, tensor(4, dtype=torch.float32, device='cuda:1'), *full[2:], m=1)": (
        *("ArgumentError", "scale is on cuda:1, x on cuda:0"),
    ),
    "mine(tensor(4, address=0x10008), *full[1:], m=1)": (
        *("ArgumentError", "x starts at 0x10008", "multiple of 16", "x.clone()"),
    ),
    "mine(x, tensor(4, dtype=torch.float32, address=0x20002), *full[2:], m=1)": (
        *("ArgumentError", "scale starts at", "multiple of 4"),
    ),
    "mine(torch.zeros(4, dtype=torch.bfloat16), *full[1:], m=1)": ("ArgumentError", "x is", "cpu"),
    "mine(tensor(4, address=0), *full[1:], m=1)": ("ArgumentError", "x has no memory"),
    "mine(tensor(4, negated=True), *full[1:], m=1)": ("ArgumentError", "negated"),
    "mine(0x10000, *full[1:], m=1)": ("ArgumentError", "x is a int"),
    "mine(None, None, None, 4, 0, 0.0, m=1)": ("ArgumentError", "no tensor"),
    "mine(*full[:3], 4.0, 0, 0.5, m=1)": ("ArgumentError", "lines is a float"),
    "mine(*full[:3], torch.tensor(4), 0, 0.5, m=1)": ("ArgumentError", "lines is a Tensor"),
    "mine(*full[:3], 4, 0, torch.tensor(0.5), m=1)": ("ArgumentError", "eps is a Tensor"),
    "mine(*full[:3], 4, 1 << 63, 0.5, m=1)": ("ArgumentError", "mine", "do not fit"),
    "mine(*full[:3], 4, 0, 1e300, m=1)": ("ArgumentError", "mine", "do not fit"),
    "mine(*full[:3], 0, 0, 0.5, m=1)": ("ArgumentError", "grid.x = 0"),
    "mine(tensor(4, device='cuda:2'), None, None, 4, 0, 0.5, m=1)": (
        *("ArgumentError", "x is on cuda:2", "[0, 1]"),
    ),
    "mine(grad, *full[1:], m=1)": ("ArgumentError", "x requires grad", "no_grad"),
    "k['gemv']": ("VariantMissing", "no kernel 'gemv'", "mine", "--from"),
}


def test_what_is_refused(recorder: LoaderRecorder, own: Path) -> None:
    prelude = SETUP + "grad = OnDevice(torch.zeros(4, dtype=torch.bfloat16, requires_grad=True))\n"
    outcome = recorder.refused(own, REFUSED, prelude, env=ENVIRONMENT)
    assert outcome.named("cuLaunchKernel") == []


def test_dtypes_that_differ(
    recorder: LoaderRecorder, make_set: Callable[..., Path], mine: Declaration
) -> None:
    parameters = (mine.parameters[0], Parameter("y", "pointer", element="dtype", align=2))
    pair = make_set(dataclasses.replace(mine, parameters=parameters, grid=("1", "1", "1")))
    cases = {
        "k['mine'](tensor(4), tensor(4, dtype=torch.float16), m=1)": (
            *("ArgumentError", "y is torch.float16, x bf16"),
        )
    }
    recorder.refused(pair, cases, "k = loader.load(ARTIFACTS, devices=[0])\n", env=ENVIRONMENT)


# Plain tensors of the CPU can be described; that they are on a GPU is pretended.
KNOWN = """
class Pretend(type(mine)):
    def _address(self, name, value):
        return value.data_ptr()
torch.Tensor.get_device = lambda self: 0
pretend = Pretend(k.table("mine"), frozenset([0]))
base = torch.zeros(4096, dtype=torch.bfloat16)
start = -base.data_ptr() // 2 % 8
a, b = base[start : start + 64], base[start + 64 : start + 128]
odd = base[start + 1 : start + 65]
calls = []
check = pretend._check
pretend._check = lambda arguments: calls.append(1) or check(arguments)
"""


@pytest.mark.skipif(
    "not __import__('sonata_aot.loader.direct', fromlist=['x']).make_reader()",
    reason="this torch has no DLPack functions",
)
def test_a_call_like_one_before_is_not_checked_again(recorder: LoaderRecorder, own: Path) -> None:
    script = """
    pretend(a, None, None, 4, 0, 0.5, m=1)
    pretend(b, None, None, 4, 0, 0.5, m=1)
    first = len(calls)
    for other in ((a, 5, 0.5, 1), (a, 4, 0.25, 1), (a, 4, 0.5, 2), (a[:32], 4, 0.5, 1)):
        pretend(other[0], None, None, other[1], 0, other[2], m=other[3])
    second = len(calls)
    wrong = failure(pretend, odd, None, None, 4, 0, 0.5, m=1)
    wrong = [wrong, failure(pretend, a, None, None, 4.0, 0, 0.5, m=1)]
    wrong += [failure(pretend, a, None, None, 4, 0, 0.5, m=1.0)]
    say([first, second, [w and w["type"] for w in wrong], a.data_ptr(), b.data_ptr()])
    """
    prelude = SETUP + KNOWN
    outcome = recorder.loader(own, prelude + "\n" + textwrap.dedent(script), env=ENVIRONMENT)
    first, second, wrong, a, b = outcome.value
    assert (first, second) == (1, 5)
    assert wrong == ["ArgumentError"] * 3
    launches = outcome.named("cuLaunchKernel")
    tail = struct.pack("<2Qi4xqf", 0, 0, 4, 0, 0.5)
    assert [launch["params"] for launch in launches[:2]] == [
        (struct.pack("<Q", address) + tail).hex() for address in (a, b)
    ]
    for name in ("entry", "grid", "block", "shared", "stream"):
        assert launches[0][name] == launches[1][name]
    assert len(launches) == 6
    assert [launch["grid"][0] for launch in launches[2:]] == [5, 4, 2, 4]
