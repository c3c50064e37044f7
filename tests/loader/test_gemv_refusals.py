"""Calls of the GEMV that are refused before the driver hears of them."""

from __future__ import annotations

HOPPER = {"SONATA_TEST_CUDA_CC": "9.0", "SONATA_TEST_CUDA_DEVICES": "2"}
OPEN = "k = loader.load(ARTIFACTS, devices=[0, 1])\n"

CASES = {
    "[1.0], tensor(16, 64)": ("ArgumentError", "x is a list"),
    "tensor(1, 64), None": ("ArgumentError", "weight is a NoneType"),
    "tensor(1, 64), tensor(16, 64), 1.0": ("ArgumentError", "bias is a float"),
    "tensor(1, 64), tensor(16, 64), out=[]": ("ArgumentError", "out is a list"),
    "torch.zeros(1, 64, dtype=torch.bfloat16), tensor(16, 64)": ("ArgumentError", "cpu"),
    "tensor(1, 64), torch.zeros(16, 64, dtype=torch.bfloat16)": ("ArgumentError", "cpu"),
    "tensor(1, 64), tensor(16, 64), torch.zeros(16, dtype=torch.bfloat16)": (
        *("ArgumentError", "bias is torch.strided on cpu"),
    ),
    "tensor(64), tensor(16, 64)": ("ArgumentError", "x has 1 dimensions"),
    "tensor(1, 64), tensor(64)": ("ArgumentError", "weight has 1 dimensions"),
    "tensor(1, 64), tensor(2, 16, 64)": ("ArgumentError", "weight has 3 dimensions"),
    "tensor(1, 64), tensor(16, 64), tensor(1, 16)": ("ArgumentError", "bias has 2 dimensions"),
    "tensor(1, 64), tensor(16, 64), tensor(15)": ("ArgumentError", "bias has 15 elements"),
    "tensor(1, 64), tensor(16, 64), tensor(16, stride=(2,))": (
        *("ArgumentError", "bias.contiguous()"),
    ),
    "tensor(1, 64), tensor(16, 64), tensor(16, stride=(0,))": (
        *("ArgumentError", "bias.contiguous()"),
    ),
    "tensor(1, 64), tensor(16, 64), tensor(16, dtype=torch.float16)": (
        *("ArgumentError", "bias is torch.float16"),
    ),
    "tensor(1, 64), tensor(16, 64), tensor(16, device='cuda:1')": ("ArgumentError", "bias is on"),
    "tensor(1, 64), tensor(16, 72)": ("ArgumentError", "one K"),
    "tensor(1, 64), tensor(16, 64, dtype=torch.float16)": ("ArgumentError", "float16"),
    "tensor(1, 0, stride=(8, 1)), tensor(16, 0, stride=(8, 1))": ("ArgumentError", "K = 0"),
    "tensor(1, 64), tensor(0, 64)": ("ArgumentError", "N = 0"),
    "tensor(1, 8), tensor(2**31, 8)": (
        *("ArgumentError", "N = 2147483648", "torch.nn.functional.linear"),
    ),
    "tensor(1, 2**31), tensor(2, 2**31)": (
        *("ArgumentError", "K = 2147483648", "torch.nn.functional.linear"),
    ),
    "tensor(0, 64), tensor(16, 64)": ("ArgumentError", "0 rows", "torch.nn.functional.linear"),
    "tensor(9, 64), tensor(16, 64)": (
        *("ArgumentError", "9 rows", "1 to 8", "torch.nn.functional.linear"),
    ),
    "tensor(9, 64), tensor(16, 64), batch_invariant=True": ("ArgumentError", "9 rows"),
    "tensor(1, 64), tensor(16, 64, device='cuda:1')": ("ArgumentError", "cuda:1"),
    "tensor(1, 64, device='cuda:2'), tensor(16, 64, device='cuda:2')": ("ArgumentError", "[0, 1]"),
    "tensor(2, 64, stride=(1, 2)), tensor(16, 64)": ("ArgumentError", "x.contiguous()"),
    "tensor(2, 64, stride=(64, 0)), tensor(16, 64)": ("ArgumentError", "x.contiguous()"),
    "tensor(1, 64), tensor(16, 64, stride=(1, 16))": ("ArgumentError", "weight.contiguous()"),
    "tensor(1, 64, dtype=torch.float32), tensor(16, 64, dtype=torch.float32)": (
        *("VariantMissing", "torch.nn.functional.linear"),
    ),
    "tensor(1, 64, dtype=torch.complex64), tensor(16, 64, dtype=torch.complex64)": (
        *("VariantMissing", "complex64"),
    ),
    "tensor(1, 64), tensor(16, 64), out=torch.zeros(1, 16)": ("ArgumentError", "out is"),
    "tensor(1, 64), tensor(16, 64), out=tensor(1, 17)": ("ArgumentError", "(1, 17)"),
    "tensor(1, 64), tensor(16, 64), out=tensor(16)": ("ArgumentError", "out has 1 dimensions"),
    "tensor(1, 64), tensor(16, 64), out=tensor(1, 16, dtype=torch.float16)": (
        *("ArgumentError", "float16"),
    ),
    "tensor(1, 64), tensor(16, 64), out=tensor(1, 16, device='cuda:1')": (
        *("ArgumentError", "cuda:1"),
    ),
    "tensor(2, 64), tensor(16, 64), out=tensor(2, 16, stride=(8, 1), address=0x9000)": (
        *("ArgumentError", "overlap"),
    ),
    "tensor(2, 64), tensor(16, 64), out=tensor(2, 16, stride=(0, 1), address=0x9000)": (
        *("ArgumentError", "overlap"),
    ),
    "tensor(2, 64), tensor(1, 64), out=tensor(2, 1, stride=(0, 1), address=0x9000)": (
        *("ArgumentError", "overlap"),
    ),
    "tensor(2, 64), tensor(16, 64), out=tensor(2, 16, stride=(1, 2), address=0x9000)": (
        *("ArgumentError", "not contiguous"),
    ),
    "tensor(1, 64), tensor(16, 64, address=0x5000), out=tensor(1, 16, address=0x107e)": (
        *("ArgumentError", "out overlaps x"),
    ),
    "tensor(1, 64), tensor(16, 64, address=0x5000), out=tensor(1, 16, address=0x4fe2)": (
        *("ArgumentError", "out overlaps weight"),
    ),
    "tensor(1, 64), tensor(16, 64, address=0x5000), tensor(16, address=0x9000), "
    "tensor(1, 16, address=0x901e)": ("ArgumentError", "out overlaps bias"),
    "tensor(2, 64, stride=(2**20, 1)), tensor(16, 64, address=1 << 40), "
    "out=tensor(2, 16, address=0x200000)": ("ArgumentError", "out overlaps x"),
    "tensor(1, 64, address=0), tensor(16, 64)": ("ArgumentError", "x has no memory"),
    "tensor(1, 64), tensor(16, 64, address=0)": ("ArgumentError", "weight has no memory"),
    "tensor(1, 64), tensor(16, 64), tensor(16, address=0)": ("ArgumentError", "bias has no mem"),
    "tensor(1, 64), tensor(16, 64), out=tensor(1, 16, address=0)": (
        *("ArgumentError", "out has no mem"),
    ),
    "tensor(1, 64, address=0x1001), tensor(16, 64)": ("ArgumentError", "x starts between"),
    "tensor(1, 64), tensor(16, 64, address=0x1001)": ("ArgumentError", "weight starts between"),
    "tensor(1, 64), tensor(16, 64), tensor(16, address=0x9001)": (
        *("ArgumentError", "bias starts between two elements"),
    ),
    "tensor(1, 64), tensor(16, 64), out=tensor(1, 16, address=0x9001)": (
        *("ArgumentError", "out starts between two elements"),
    ),
    "fake(1, 64), tensor(16, 64)": ("ArgumentError", "x has no memory"),
    "tensor(1, 64), fake(16, 64)": ("ArgumentError", "weight has no memory"),
    "tensor(1, 64), tensor(16, 64), out=fake(1, 16)": ("ArgumentError", "out has no memory"),
    "no_output(1, 64), tensor(16, 64)": ("ArgumentError", "out has no memory"),
    "tensor(1, 64, negated=True), tensor(16, 64)": ("ArgumentError", "x.resolve_neg()"),
    "tensor(1, 64), tensor(16, 64, negated=True)": ("ArgumentError", "weight.resolve_neg()"),
    "tensor(1, 64), tensor(16, 64), tensor(16, negated=True)": (
        *("ArgumentError", "bias.resolve_neg()"),
    ),
    "tensor(1, 64), tensor(16, 64), out=tensor(1, 16, address=0x9000, negated=True)": (
        *("ArgumentError", "out.resolve_neg()"),
    ),
    "grad(1, 64), tensor(16, 64)": ("ArgumentError", "x requires grad", "no backward"),
    "tensor(1, 64), grad(16, 64)": ("ArgumentError", "weight requires grad", "no backward"),
    "tensor(1, 64), tensor(16, 64), grad(16)": ("ArgumentError", "bias requires grad"),
    "tensor(1, 64), tensor(16, 64), out=grad(1, 16)": ("ArgumentError", "out requires grad"),
}

# Fakes are as torch.compile and torch.export make them: of a device, and without memory.
MAKERS = """
import warnings
from torch._subclasses.fake_tensor import FakeTensorMode
warnings.filterwarnings("ignore", message="Accessing the data pointer")
def fake(*shape):
    with FakeTensorMode():
        return torch.empty(*shape, dtype=torch.bfloat16, device="cuda:0")
class NoOutput(OnDevice):
    # As under a mode that makes fake outputs of real inputs.
    def new_empty(self, shape):
        return tensor(*shape, address=0)
def no_output(*shape):
    return NoOutput(torch.empty(shape, dtype=torch.bfloat16))
def grad(*shape):
    return OnDevice(torch.zeros(shape, dtype=torch.bfloat16, requires_grad=True), address=0x1000)
"""


def test_bad_calls_are_refused_before_the_driver(recorder, artifacts):
    cases = {f"k.gemv({arguments})": expected for arguments, expected in CASES.items()}
    outcome = recorder.refused(artifacts, cases, MAKERS + OPEN, env=HOPPER)
    assert not outcome.named("cuLaunchKernel", "cuLaunchKernelEx")


BINDINGS = {
    "None": ("ArgumentError", "weight is a NoneType"),
    "torch.zeros(16, 64, dtype=torch.bfloat16)": ("ArgumentError", "cpu"),
    "tensor(64)": ("ArgumentError", "weight has 1 dimensions"),
    "tensor(0, 64)": ("ArgumentError", "N = 0"),
    "tensor(2**31, 8)": ("ArgumentError", "N = 2147483648"),
    "tensor(16, 64, stride=(1, 16))": ("ArgumentError", "weight.contiguous()"),
    "tensor(16, 64, dtype=torch.float32)": ("VariantMissing", "float32"),
    "tensor(16, 64, device='cuda:2')": ("ArgumentError", "[0, 1]"),
    "tensor(16, 64, negated=True)": ("ArgumentError", "weight.resolve_neg()"),
    "grad(16, 64)": ("ArgumentError", "weight requires grad"),
    "fake(16, 64)": ("ArgumentError", "weight has no memory"),
    "tensor(16, 64), tensor(15)": ("ArgumentError", "bias has 15 elements"),
    "tensor(16, 64), tensor(16, dtype=torch.float16)": ("ArgumentError", "bias is torch.float16"),
    "tensor(16, 64), tensor(16, device='cuda:1')": ("ArgumentError", "bias is on cuda:1"),
    "tensor(16, 64), tensor(16, stride=(2,))": ("ArgumentError", "bias.contiguous()"),
    "tensor(16, 64), upcoming=[]": ("ArgumentError", "upcoming is a list"),
    "tensor(16, 64), upcoming=tensor(16)": ("ArgumentError", "upcoming has 1 dimensions"),
    "tensor(16, 64), upcoming=tensor(8, 16, device='cuda:1')": ("ArgumentError", "upcoming is on"),
    "tensor(16, 64), upcoming=torch.zeros(8, 16)": ("ArgumentError", "upcoming is", "cpu"),
    "tensor(16, 64), upcoming=tensor(8, 16, dtype=torch.float16)": (
        *("ArgumentError", "upcoming is torch.float16"),
    ),
}


def test_what_cannot_be_bound_is_refused(recorder, artifacts):
    cases = {f"k.gemv.bind({arguments})": expected for arguments, expected in BINDINGS.items()}
    recorder.refused(artifacts, cases, MAKERS + OPEN, env=HOPPER)


BOUND_CALLS = {
    "tensor(1, 72)": ("ArgumentError", "one K"),
    "tensor(9, 64)": ("ArgumentError", "9 rows"),
    "tensor(1, 64, dtype=torch.float16)": ("ArgumentError", "float16"),
    "tensor(1, 64, device='cuda:1')": ("ArgumentError", "cuda:1"),
    "grad(1, 64)": ("ArgumentError", "x requires grad"),
    "tensor(1, 64), tensor(1, 17)": ("ArgumentError", "(1, 17)"),
    "tensor(1, 64), tensor(1, 16, address=0x20000)": ("ArgumentError", "out overlaps weight"),
}


def test_bad_calls_of_a_bound_weight_are_refused(recorder, artifacts):
    bound = "bound = k.gemv.bind(tensor(16, 64, address=0x20000))\n"
    cases = {f"bound({arguments})": expected for arguments, expected in BOUND_CALLS.items()}
    outcome = recorder.refused(artifacts, cases, MAKERS + OPEN + bound, env=HOPPER)
    assert not outcome.named("cuLaunchKernel", "cuLaunchKernelEx")


USING = """
table = k.table("gemv").all()
variant = next(key for key in table if key[:3] == (0, "bf16", 2))
variant = dict(table[variant].binary.variant)
none = dict(blocks_per_sm=0, ahead_kb=0, skip_blocks_per_sm=0)
call = k.gemv.using(variant, none)
call(tensor(2, 64), tensor(16, 64))  # what has gone well once is no licence for the next
"""
USING_CALLS = {
    "call(tensor(3, 64), tensor(16, 64))": ("ArgumentError", "3 rows"),
    "call(tensor(9, 64), tensor(16, 64))": ("ArgumentError", "9 rows"),
    "call(tensor(2, 64, dtype=torch.float16), tensor(16, 64, dtype=torch.float16))": (
        *("ArgumentError", "float16"),
    ),
    "call(tensor(2, 64, address=0x1002), tensor(16, 64))": ("ArgumentError", "not aligned"),
    "call(tensor(2, 64), tensor(16, 64, address=0x1008))": ("ArgumentError", "not aligned"),
    "call(tensor(2, 60), tensor(16, 60))": ("ArgumentError", "not aligned"),
    "call(tensor(2, 64), tensor(16, 72))": ("ArgumentError", "one K"),
    "k.gemv.using({**variant, 'warps': 3}, none)(tensor(1, 64), tensor(16, 64))": (
        *("VariantMissing", "'warps': 3", "--all"),
    ),
    "k.gemv.using({'dtype': 'bf16', 'm': 1}, none)(tensor(1, 64), tensor(16, 64))": (
        *("VariantMissing", "--all"),
    ),
    "k.gemv.using(variant, {})(tensor(1, 64), tensor(16, 64))": (
        *("ArgumentError", "launch values []", "blocks_per_sm, ahead_kb, skip_blocks_per_sm"),
    ),
    "k.gemv.using(variant, {**none, 'more': 1})(tensor(1, 64), tensor(16, 64))": (
        *("ArgumentError", "launch values"),
    ),
}


def test_one_very_variant_refuses_what_it_cannot_do(recorder, artifacts):
    outcome = recorder.refused(artifacts, USING_CALLS, OPEN + USING, env=HOPPER)
    assert len(outcome.named("cuLaunchKernel")) == 1
