"""The projections of a decode step of a Mamba2-like stack: bound, captured, checked, timed.

    sonata-aot build --arch sm90
    python -m examples.decode_gemv

In each layer in_proj reads the state, and out_proj the first outputs of in_proj. Weights are bound
once, as in a server that has loaded its model, and each names the one that comes after it. The
step is a CUDA graph, beside the same step with `torch.nn.functional.linear`.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from torch.nn.functional import linear

from sonata_aot import loader
from sonata_aot.aot.measure import timing

# N x K.
IN_PROJ, OUT_PROJ = (8512, 2048), (2048, 4096)
# From x to y.
Projection = Callable[[torch.Tensor], torch.Tensor]


def step(projections: list[Projection], x: torch.Tensor) -> torch.Tensor:
    """The state after all layers."""
    for in_proj, out_proj in zip(projections[::2], projections[1::2], strict=True):
        x = out_proj(in_proj(x)[:, : OUT_PROJ[1]])
    return x


def bind(kernels: loader.Kernels, weights: list[torch.Tensor]) -> list[Projection]:
    """Each weight declared constant, with what the step reads after it."""
    then = [*weights[1:], weights[0]]
    return [
        kernels.gemv.bind(weight, upcoming=upcoming)
        for weight, upcoming in zip(weights, then, strict=True)
    ]


def through_torch(weights: list[torch.Tensor]) -> list[Projection]:
    """The same with F.linear."""
    return [lambda x, weight=weight: linear(x, weight) for weight in weights]


def in_float64(weights: list[torch.Tensor]) -> list[Projection]:
    """The same with no rounding to speak of."""
    return [lambda x, weight=weight: linear(x.double(), weight.double()) for weight in weights]


def relative_error(y: torch.Tensor, reference: torch.Tensor) -> float:
    """||y - reference|| / ||reference||."""
    return float((y.double() - reference).norm() / reference.norm())


def each_alone(projections: list[Projection], x: torch.Tensor) -> torch.Tensor:
    """All of them on one x; the first one's result."""
    return [projection(x) for projection in projections][0]  # noqa: RUF015 - all are to run


def main() -> None:
    """Print a table; exit 1 if anything is less exact than F.linear."""
    parser = argparse.ArgumentParser(description=__doc__, prog="python -m examples.decode_gemv")
    parser.add_argument("directory", type=Path, nargs="?", default=None, help="artifacts")
    parser.add_argument("--layers", type=int, default=34)
    parser.add_argument("--batch", type=int, default=2, help="rows of x: sequences, 1 to 8")
    options = parser.parse_args()

    try:
        kernels = loader.load(options.directory, allow_ptx=True)
    except loader.SonataError as error:
        raise SystemExit(f"decode_gemv: {error}") from None
    weights = [
        torch.randn(n, k, device="cuda", dtype=torch.bfloat16) * k**-0.5
        for _ in range(options.layers)
        for n, k in (IN_PROJ, OUT_PROJ)
    ]
    print(f"{kernels}, batch {options.batch}, bf16; errors against float64")
    print(f"{'':24}{'ours':>10}{'F.linear':>10}{'ratio':>8}{'error, ours / F.linear':>26}")
    wrong = []
    # What is run, over which weights, and how much may chance make of the errors' ratio: those of a
    # whole step are sums over its layers.
    for name, run, used, tolerance in (
        ("in_proj", each_alone, weights[::2], 1.05),
        ("out_proj", each_alone, weights[1::2], 1.05),
        ("step", step, weights, 1.5),
    ):
        x = torch.randn(options.batch, used[0].shape[1], device="cuda", dtype=torch.bfloat16)
        ours, theirs = partial(run, bind(kernels, used), x), partial(run, through_torch(used), x)
        times = timing.replay_us([timing.capture([work]) for work in (ours, theirs)], 1)
        reference = run(in_float64(used if run is step else used[:1]), x)
        errors = relative_error(ours(), reference), relative_error(theirs(), reference)
        label = f"{name}, {len(used)} launches"
        print(
            f"{label:24}{times[0]:7.1f} us{times[1]:7.1f} us{times[1] / times[0]:7.2f}x"
            f"{errors[0]:14.2e} / {errors[1]:.2e}"
        )
        if not errors[0] <= tolerance * errors[1]:  # NaN is wrong, too
            wrong.append(name)
    if wrong:
        raise SystemExit(f"less exact than F.linear: {', '.join(wrong)}")


if __name__ == "__main__":
    main()
