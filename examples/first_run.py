"""The GEMV and the scan of Mamba2, from nothing to checked results; README.md shows this file.

sonata-aot build --arch sm90
python -m examples.first_run
"""

import torch

from sonata_aot import loader

kernels = loader.load()  # finds the artifacts, checks every byte, hands them to the driver


def random(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.randn(shape, device="cuda").to(dtype)


# y = x Wᵀ for 1 to 8 rows of x: a projection of a decode step.
x, weight = random(2, 2048), random(8512, 2048)
y = kernels.gemv(x, weight)
exact = x.double() @ weight.double().T
print("gemv", tuple(y.shape), "relative error", float((y - exact).norm() / exact.norm()))

# The scan of a prefill, with the arguments of mamba_ssm's function of the name.
batch, tokens, heads, headdim, groups, dstate = 2, 512, 64, 64, 1, 128
out, states = kernels.mamba_chunk_scan_combined(
    random(batch, tokens, heads, headdim),  # x
    random(batch, tokens, heads),  # dt, the step sizes
    -random(heads, dtype=torch.float32).exp(),  # A, the decay rates
    random(batch, tokens, groups, dstate),  # B
    random(batch, tokens, groups, dstate),  # C
    chunk_size=256,
    D=random(heads, dtype=torch.float32),
    dt_bias=random(heads, dtype=torch.float32),
    dt_softplus=True,
    return_final_states=True,
)
print("scan", tuple(out.shape), "states", tuple(states.shape), "finite", bool(out.isfinite().all()))
