"""Each stage of the SSD scan against mamba_ssm's, in one run.

    python -m benchmarks.ssd_stages artifacts

Times are of CUDA graphs over rotated inputs, in microseconds; mamba_ssm's are those after its
autotuning. The stages need a device that the artifacts have code for, or PTX.
"""

from __future__ import annotations

import argparse
import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from sonata_aot import loader
from sonata_aot.aot.measure import mamba_opponent, timing
from sonata_aot.aot.measure.ssd_shapes import Shape
from sonata_aot.artifacts.errors import SonataError

SHAPES = (Shape(2, 256), Shape(2, 2048), Shape(1, 32768), Shape(1, 32768, heads=24))
MODULES = {
    "chunk_cumsum": "ssd_chunk_state",
    "chunk_state": "ssd_chunk_state",
    "state_passing": "ssd_state_passing",
    "bmm_chunk": "ssd_bmm",
    "chunk_scan": "ssd_chunk_scan",
}
Call = Callable[[], object]


def stage_of_mamba(stage: str) -> Callable[..., Any]:
    module = importlib.import_module(f"mamba_ssm.ops.triton.{MODULES[stage]}")
    return getattr(module, f"_{stage}_fwd")


def calls(ssd: Any, shape: Shape) -> dict[str, tuple[Call, Call]]:
    """One call of each stage, ours and mamba_ssm's, on inputs of their own."""

    def random(*size: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        return torch.randn(*size, device="cuda").to(dtype)

    theirs = {stage: stage_of_mamba(stage) for stage in MODULES}
    batch, seqlen, chunk = shape.batch, shape.seqlen, shape.chunk_size
    x = random(batch, seqlen, shape.heads, shape.headdim)
    b, c = (random(batch, seqlen, shape.groups, shape.dstate) for _ in range(2))
    dt, bias = random(batch, seqlen, shape.heads), random(shape.heads) - 2
    rates, d = -random(shape.heads).float().exp(), random(shape.heads)
    decay, steps = ssd.chunk_cumsum(dt, rates, chunk, bias, True)
    added = ssd.chunk_state(b, x, steps, decay)
    flat, ends = added.flatten(3), decay[..., -1]
    states, _ = ssd.state_passing(added, ends, out_dtype=x.dtype)
    products = ssd.bmm_chunk(c, b, chunk, None, True, torch.float32)
    scan = (products, x, steps, decay, c, states, d)
    return {
        "chunk_cumsum": (
            lambda: ssd.chunk_cumsum(dt, rates, chunk, bias, True),
            lambda: theirs["chunk_cumsum"](dt, rates, chunk, bias, True),
        ),
        "chunk_state": (
            lambda: ssd.chunk_state(b, x, steps, decay),
            lambda: theirs["chunk_state"](b, x, steps, decay),
        ),
        "state_passing": (
            lambda: ssd.state_passing(added, ends, out_dtype=x.dtype),
            lambda: theirs["state_passing"](flat, ends, out_dtype=x.dtype),
        ),
        "bmm_chunk": (
            lambda: ssd.bmm_chunk(c, b, chunk, None, True, torch.float32),
            lambda: theirs["bmm_chunk"](c, b, chunk, output_dtype=torch.float32),
        ),
        "chunk_scan": (lambda: ssd.chunk_scan(*scan), lambda: theirs["chunk_scan"](*scan)),
    }


def measure(ssd: Any, shape: Shape) -> dict[str, list[float]]:
    """Microseconds of each stage, ours and mamba_ssm's, and of both in all."""
    inputs = 2 * shape.batch * shape.seqlen * shape.heads * shape.headdim
    sets = [calls(ssd, shape) for _ in range(min(8, timing.copies(inputs, 200_000_000)))]
    found = {
        stage: timing.replayed([[one[stage][i] for one in sets] for i in (0, 1)], timing.FULL)
        for stage in MODULES
    }
    found["all"] = [sum(times) for times in zip(*found.values(), strict=True)]
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("artifacts", type=Path)
    parser.add_argument("--arch")
    arguments = parser.parse_args()
    try:
        ssd = loader.load(arguments.artifacts, arguments.arch, allow_ptx=True).ssd
        mamba_opponent.load()
        with torch.inference_mode():
            for shape in SHAPES:
                print(shape)
                for stage, (ours, theirs) in measure(ssd, shape).items():
                    print(f"  {stage:14}{ours:9.1f}{theirs:9.1f}{theirs / ours:7.2f}x", flush=True)
    except SonataError as error:
        raise SystemExit(str(error)) from None


if __name__ == "__main__":
    main()
