"""Inputs and outputs of the scans that are measured, and how far an output is off."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from .operands import WrongResult
from .ssd_chunked import scan_in_chunks
from .ssd_shapes import Shape
from .timing import Call

Arguments = dict[str, Any]
# Far beyond what rounding to bf16 explains.
WORST_ERROR = 2e-2
# Tokens times heads that the float64 form takes at once.
_AT_ONCE = 2**18
_OPTIONAL = ("z", "initial_states", "seq_idx")


def make(shape: Shape, device: str) -> Arguments:
    """Random arguments of a scan by name, as Mamba2's layers have them."""
    batch, seqlen, heads = shape.batch, shape.seqlen, shape.heads
    inner, width = heads * shape.headdim, shape.groups * shape.dstate

    def normal(*size: int) -> Tensor:
        return torch.randn(*size, device=device).to(torch.bfloat16)

    def uniform(low: float, high: float) -> Tensor:
        return torch.empty(heads, device=device).uniform_(low, high)

    if shape.strides:
        # Of the layer's projection, z and dt; of the convolution's result, x, B and C.
        projected = normal(batch, seqlen, 2 * inner + 2 * width + heads)
        z, dt = projected[..., :inner], projected[..., -heads:]
        x, b, c = normal(batch, seqlen, inner + 2 * width).split([inner, width, width], -1)
    else:
        x, z = normal(batch, seqlen, inner), normal(batch, seqlen, inner) if shape.z else None
        b, c, dt = (normal(batch, seqlen, size) for size in (width, width, heads))
    made: Arguments = {
        "x": x.unflatten(-1, (heads, shape.headdim)),
        "dt": dt,
        "A": -uniform(1.0, 16.0),
        "B": b.unflatten(-1, (shape.groups, shape.dstate)),
        "C": c.unflatten(-1, (shape.groups, shape.dstate)),
        "chunk_size": shape.chunk_size,
        "D": torch.randn(heads, device=device),
        # Softplus makes steps of 0.001 to 0.1 of it.
        "dt_bias": uniform(-6.9, -2.3),
        "dt_softplus": True,
        "return_final_states": True,
    }
    if shape.z and z is not None:
        made["z"] = z.unflatten(-1, (heads, shape.headdim))
    if shape.initial:
        states = (batch, heads, shape.headdim, shape.dstate)
        made["initial_states"] = torch.randn(*states, device=device) / 4
    if shape.seq_idx:
        tokens = torch.arange(seqlen, device=device).expand(batch, seqlen)
        made["seq_idx"] = (tokens >= seqlen // 3).int()
    return made


def plain(arguments: Arguments) -> Arguments:
    """The same without extras, every tensor contiguous."""
    return {
        name: value.contiguous() if isinstance(value, Tensor) else value
        for name, value in arguments.items()
        if name not in _OPTIONAL
    }


class Pass:
    """A call for each set of arguments, each with results of its own, which stay."""

    def __init__(self, scan: Callable[..., Any], sets: Sequence[Arguments]) -> None:
        """Nothing is called yet."""
        self._scan = scan
        self._sets = sets
        self.results: list[tuple[Tensor, ...]] = [() for _ in sets]

    def calls(self) -> list[Call]:
        """The calls in order; the results of the last time are those that count."""
        return [lambda i=i: self._call(i) for i in range(len(self._sets))]

    def _call(self, i: int) -> None:
        self.results[i] = self._scan(**self._sets[i])

    def poison(self) -> None:
        """Forget what was written: only what comes from now on counts."""
        for result in self.results:
            for tensor in result:
                tensor.fill_(float("nan"))

    def errors(self, wanted: Sequence[Tensor], case: str) -> list[float]:
        """Relative L2 errors of the first results against float64.

        Raises:
            WrongResult: one is far off, or any result of the pass is not finite.
        """
        finite = all(bool(t.isfinite().all()) for result in self.results for t in result)
        found = [relative(*pair) for pair in zip(self.results[0], wanted, strict=True)]
        if not finite or not max(found) <= WORST_ERROR:
            off = f"relative error {max(found):.3g}" if finite else "not finite"
            raise WrongResult(
                f"{case}: a replay left something wrong: {off}",
                remedy="the kernel or the measurement is wrong: please report it with this message",
            )
        return found


def relative(found: Tensor, wanted: Tensor) -> float:
    """Relative L2 error."""
    return float((found.double() - wanted).norm() / wanted.norm())


def wanted(arguments: Mapping[str, Any]) -> tuple[Tensor, Tensor]:
    """Out and final states in float64, evaluated by parts, so that little memory is needed."""
    batch, seqlen, heads, _ = arguments["x"].shape
    groups = arguments["B"].shape[2]
    ratio = heads // groups
    most = max(1, min(ratio, _AT_ONCE // max(seqlen, 1)))
    parts = [
        (g, slice(h, min(h + most, (g + 1) * ratio)))
        for g in range(groups)
        for h in range(g * ratio, (g + 1) * ratio, most)
    ]
    outs, states = [], []
    for i in range(batch):
        found = [scan_in_chunks(**_part(arguments, slice(i, i + 1), *part)) for part in parts]
        outs.append(torch.cat([out for out, _ in found], 2))
        states.append(torch.cat([state for _, state in found], 1))
    return torch.cat(outs), torch.cat(states)


def _part(arguments: Mapping[str, Any], rows: slice, group: int, heads: slice) -> Arguments:
    """Arguments of some heads, all of one group, of some rows of the batch."""
    places: dict[str, tuple[slice, ...]] = {
        **dict.fromkeys(("x", "dt", "z"), (rows, slice(None), heads)),
        **dict.fromkeys(("B", "C"), (rows, slice(None), slice(group, group + 1))),
        **dict.fromkeys(("A", "D", "dt_bias"), (heads,)),
        "initial_states": (rows, heads),
        "seq_idx": (rows,),
    }
    return {name: v[places[name]] if name in places else v for name, v in arguments.items()}
