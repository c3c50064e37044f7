"""What `kernels.mamba_chunk_scan_combined` refuses, and in what words."""

from __future__ import annotations

import itertools

from sonata_aot.kernels import builtin
from sonata_aot.loader.ssd_plan import DSTATES, HEADDIMS
from ssd_launches import ENVIRONMENT, SETUP

ARGUMENT = "ArgumentError"
REFUSED = {
    "call(x=[1.0])": (ARGUMENT, "x is a list", "torch.Tensor"),
    "call(B=None)": (ARGUMENT, "B is None"),
    "call(D=1.0)": (ARGUMENT, "D is a float"),
    "call(A=torch.zeros(4))": (ARGUMENT, "A is torch.strided on cpu"),
    "call(x=torch.zeros(2, 128, 4, 64).to_sparse())": (ARGUMENT, "x is torch.sparse_coo"),
    "call(x=tensor(2, 128, 4, 64, dtype=torch.float32))": ("VariantMissing", "x is torch.float32"),
    "call(x=tensor(2, 128, 256))": (ARGUMENT, "x has 3 dimensions", "heads, headdim"),
    "call(B=tensor(2, 128, 128))": (ARGUMENT, "B has 3 dimensions", "groups, dstate"),
    "call(C=tensor(2, 128, 1, 64))": (ARGUMENT, "C has shape (2, 128, 1, 64)", "(2, 128, 1, 128)"),
    "call(B=tensor(2, 127, 1, 128))": (ARGUMENT, "B has shape", "(2, 128, 1, 128)"),
    "call(dt=tensor(2, 128, 3))": (ARGUMENT, "dt has shape (2, 128, 3)", "(2, 128, 4)"),
    "call(dt=tensor(2, 128))": (ARGUMENT, "dt has shape (2, 128)"),
    "call(A=tensor(1))": (ARGUMENT, "A has shape (1,)", "(4,)"),
    "call(D=tensor(4, 1))": (ARGUMENT, "D has shape (4, 1)", "(4,) or (4, 64)"),
    "call(z=tensor(2, 128, 4, 1))": (ARGUMENT, "z has shape"),
    "call(dt_bias=tensor(3))": (ARGUMENT, "dt_bias has shape (3,)"),
    "call(initial_states=tensor(2, 4, 128, 64))": (ARGUMENT, "initial_states has shape"),
    "call(seq_idx=tensor(128, dtype=torch.int32))": (ARGUMENT, "seq_idx has shape (128,)"),
    "call(seq_idx=tensor(2, 128, dtype=torch.int64))": (
        ARGUMENT,
        "seq_idx is torch.int64",
        "int()",
    ),
    "call(cu_seqlens=tensor(3, dtype=torch.int64), sizes=dict(b=1))": (ARGUMENT, "cu_seqlens is"),
    "call(cu_seqlens=tensor(3, dtype=torch.int32))": (ARGUMENT, "a batch of 2", "batch of 1"),
    "call(cu_seqlens=tensor(1, 3, dtype=torch.int32), sizes=dict(b=1))": (ARGUMENT, "(1, 3)"),
    "call(cu_seqlens=tensor(0, dtype=torch.int32), sizes=dict(b=1))": (ARGUMENT, "shape (0,)"),
    "call(return_varlen_states=True)": (ARGUMENT, "without cu_seqlens"),
    "call(B=at('B', 2, 128, 3, 128), C=at('C', 2, 128, 3, 128))": (ARGUMENT, "no multiple of 3"),
    "call(B=at('B', 2, 128, 0, 128), C=at('C', 2, 128, 0, 128))": (ARGUMENT, "0 groups"),
    "call(B=tensor(2, 128, 1, 128, dtype=torch.float16))": (ARGUMENT, "B is torch.float16"),
    "call(z=tensor(2, 128, 4, 64, dtype=torch.float32))": (ARGUMENT, "z is torch.float32"),
    "call(dt=tensor(2, 128, 4, dtype=torch.float64))": (ARGUMENT, "dt is torch.float64"),
    "call(A=tensor(4, dtype=torch.complex64))": (ARGUMENT, "A is torch.complex64"),
    "call(initial_states=tensor(2, 4, 64, 128, dtype=torch.float64))": (ARGUMENT, "float64"),
    "call(A=tensor(4, dtype=torch.float32, device='cuda:1'))": (ARGUMENT, "A is on cuda:1, x on"),
    "call(sizes=dict(device='cuda:2'))": (ARGUMENT, "x is on cuda:2", "devices=[..., 2]"),
    "call(z=tensor(2, 128, 4, 64, negated=True))": (ARGUMENT, "negated", "z.resolve_neg()"),
    "call(x=tensor(2, 128, 4, 64, address=0x1001))": (ARGUMENT, "between two elements"),
    "call(x=tensor(2, 128, 4, 64, address=0))": (ARGUMENT, "x has no memory"),
    "call(chunk_size=0)": (ARGUMENT, "chunk_size is 0"),
    "call(chunk_size=None)": (ARGUMENT, "chunk_size is None"),
    "call(chunk_size=1.5)": (ARGUMENT, "chunk_size is 1.5"),
    "call(dt_limit=(1.0, 0.5))": (ARGUMENT, "dt_limit is (1.0, 0.5)"),
    "call(dt_limit=(float('nan'), 1.0))": (ARGUMENT, "dt_limit is (nan, 1.0)"),
    "call(dt_limit=(0.0,))": (ARGUMENT, "dt_limit is (0.0,)", "two floats"),
    "call(dt_limit=3)": (ARGUMENT, "dt_limit is 3", "two floats"),
    "call(dt_limit=('a', 'b'))": (ARGUMENT, "dt_limit is ('a', 'b')"),
    "call(dt_limit=([], {}))": (ARGUMENT, "dt_limit is ([], {})"),
    "call(dt_limit=(10**400, 1))": (ARGUMENT, "dt_limit is (1000", "lower limit first"),
    "call(dt_limit=(torch.zeros(1), 1))": (ARGUMENT, "dt_limit is (tensor([0.]), 1)"),
    "call(chunk_size=True)": (ARGUMENT, "chunk_size is True"),
    # Their values may change, while what was planned for them does not.
    "call(dt_softplus=torch.ones(1))": (ARGUMENT, "dt_softplus is tensor([1.])", "True or False"),
    "call(return_final_states=torch.ones(2))": (ARGUMENT, "return_final_states is tensor"),
    "call(return_varlen_states=torch.ones(2))": (ARGUMENT, "return_varlen_states is tensor"),
    "call(sizes=dict(p=96))": (
        "VariantMissing",
        "headdim=96 dstate=128",
        "64x128, 128x16",
        "sonata-aot build --all",
        "--kernel ssd_scan",
    ),
    # No build has these.
    "call(sizes=dict(p=48))": (
        "VariantMissing",
        "headdim=48 dstate=128",
        "64x128, 128x16",
        "kernels for headdim 32, 64, 80, 96 or 128 and dstate 16, 32, 64, 128 or 256",
    ),
    "call(sizes=dict(n=48))": ("VariantMissing", "headdim=64 dstate=48", "kernels for headdim 32"),
    "call(sizes=dict(dtype=torch.float16, p=128, n=16))": (
        "VariantMissing",
        "f16",
        "there: 64x128",
    ),
    "call(sizes=dict(n=0, l=0))": ("VariantMissing", "dstate=0"),
}


def test_bad_calls_are_refused(recorder, ssd_artifacts):
    outcome = recorder.refused(ssd_artifacts, REFUSED, SETUP, env=ENVIRONMENT)
    assert not outcome.named("cuLaunchKernel", "cuLaunchKernelEx")


# As under torch.compile and torch.export: of a device, and without memory.
FAKES = """
from torch._subclasses.fake_tensor import FakeTensorMode
def fake(*shape):
    with FakeTensorMode():
        return torch.empty(shape, dtype=torch.bfloat16, device="cuda")
def with_fake_results():
    kept = OnDevice.new_empty
    OnDevice.new_empty = lambda self, shape, dtype=None: fake(*shape)
    try:
        call()
    finally:
        OnDevice.new_empty = kept
"""


def test_fake_tensors_are_refused(recorder, ssd_artifacts):
    cases = {
        "call(x=fake(2, 128, 4, 64))": (ARGUMENT, "x has no memory"),
        "call(D=fake(4))": (ARGUMENT, "D has no memory"),
        "with_fake_results()": (ARGUMENT, "out has no memory"),
    }
    outcome = recorder.refused(ssd_artifacts, cases, SETUP + FAKES, env=ENVIRONMENT)
    assert not outcome.named("cuLaunchKernel", "cuLaunchKernelEx")


def test_a_refusal_is_not_forgotten(recorder, ssd_artifacts):
    """The check is left out for a call that went well, and for no other."""
    cases = {
        "call(D=tensor(3))": (ARGUMENT, "D has shape"),
        "call(D=tensor(3), chunk_size=256)": (ARGUMENT, "D has shape"),
        "(call(), call(chunk_size=-1))": (ARGUMENT, "chunk_size is -1"),
        "(call(), call(chunk_size=256.0))": (ARGUMENT, "chunk_size is 256.0"),
        "(call(chunk_size=1), call(chunk_size=True))": (ARGUMENT, "chunk_size is True"),
        "(call('D'), call(D=tensor(4, address=0)))": (ARGUMENT, "D has no memory"),
        "(call('z'), call(z=tensor(2, 128, 4, 64, negated=True)))": (ARGUMENT, "negated"),
    }
    recorder.refused(ssd_artifacts, cases, SETUP, env=ENVIRONMENT)


def test_the_sizes_that_are_named_are_those_that_can_be_built():
    variants = builtin()["ssd_scan"].variants
    pairs = {(variant["headdim"], variant["dstate"]) for variant in variants}
    assert pairs == set(itertools.product(HEADDIMS, DSTATES))


def test_artifacts_without_the_kernels_say_so(recorder, build_cases):
    without = build_cases("ssd-none", [("sm90", "ssd_pass", {"threads": 256})])
    cases = {"k.mamba_chunk_scan_combined": ("VariantMissing", "ssd_scan", "--kernel")}
    recorder.refused(without, cases, "k = loader.load(ARTIFACTS, devices=[0])", env=ENVIRONMENT)
