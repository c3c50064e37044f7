"""The one-pass scan's kernels, each launched by hand in `ptx_machine`, and what they should give.

Operands lie among NaN, as slices of wider rows do, and results start as NaN.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from kernel_runs import Kernel
from ptx_machine import Buffer, Memory
from sonata_aot.artifacts import ArtifactSet
from sonata_aot.artifacts.declaration import Variant
from sonata_aot.kernels import builtin
from ssd_reference import scan

NAN = float("nan")
KINDS = {"f32": torch.float32, "bf16": torch.bfloat16, "f16": torch.float16}
PER_TOKEN = ("x", "dt", "B", "C", "z")
# Elements before and after a row, which keep it aligned, and tokens after the last.
MARGIN, AFTER = 8, 5
Result = dict[str, Tensor]


def variant(name: str, **choices: Any) -> Variant:
    """The one variant of a kernel that has these of its choices."""
    (found,) = (
        v
        for v in builtin()[name].variants
        if v.items() >= {c: value for c, value in choices.items() if c in v}.items()
    )
    return dict(found)


@dataclass
class Problem:
    """Arguments of the scan, by the names of mamba_ssm, and how it is cut."""

    arguments: dict[str, Any]
    segments: int = 1
    ratio: int = 1
    apart: int = 0
    """Elements from a token to the next in memory, where not as close as they can be."""

    @classmethod
    def random(
        cls,
        *,
        batch: int = 1,
        seqlen: int = 70,
        heads: int = 1,
        groups: int = 1,
        headdim: int = 64,
        dstate: int = 128,
        dtype: str = "bf16",
        z: bool = False,
        D: str = "",  # noqa: N803 - the name of the call
        initial: str = "",
        kind: str = "f32",
        sequences: tuple[int, ...] = (),
        ends: bool = False,
        segments: int = 1,
        ratio: int = 1,
        apart: int = 0,
    ) -> Problem:
        """Random ones; `kind` is the dtype of dt, A, D and the bias, `initial` that of states.

        `D` is "head", "channel" or nothing, `sequences` are lengths, and `ends` asks for states.
        """
        generator = torch.Generator().manual_seed(seqlen + 1000 * heads + headdim + dstate)

        def normal(*shape: int, of: str = dtype) -> Tensor:
            return torch.randn(*shape, generator=generator).to(KINDS[of])

        made: dict[str, Any] = {
            "x": normal(batch, seqlen, heads, headdim),
            "dt": normal(batch, seqlen, heads, of=kind),
            # Slow enough for what goes from tile to tile to count.
            "A": -(normal(heads, of=kind).abs() + 0.1) / 8,
            "B": normal(batch, seqlen, groups, dstate),
            "C": normal(batch, seqlen, groups, dstate),
            "dt_bias": normal(heads, of=kind) / 2 - 2,
            "dt_softplus": True,
            "return_final_states": True,
        }
        if z:
            made["z"] = normal(batch, seqlen, heads, headdim)
        if D:
            made["D"] = normal(*((heads, headdim) if D == "channel" else (heads,)), of=kind)
        if initial:
            made["initial_states"] = normal(batch, heads, headdim, dstate, of=initial)
        if sequences:
            counts = torch.tensor(sequences)
            index = torch.arange(len(sequences), dtype=torch.int32)
            made["seq_idx"] = index.repeat_interleave(counts)[None].repeat(batch, 1)
        if ends:
            made["cu_seqlens"] = torch.tensor([0, *sequences]).cumsum(0).int()
            made["return_varlen_states"] = True
        return cls(made, segments, ratio, apart)

    @property
    def dtype(self) -> str:
        return "bf16" if self.arguments["x"].dtype is torch.bfloat16 else "f16"

    @property
    def packed(self) -> int:
        return int("seq_idx" in self.arguments or "cu_seqlens" in self.arguments)

    def wanted(self) -> Result:
        """The reference's answer."""
        found = scan(**self.arguments)
        names = ("out", "final", "ends")[: len(found)]
        return dict(zip(names, found, strict=True))


def kind_of(tensor: Tensor) -> int:
    """A dtype, as kernels take it."""
    return list(KINDS.values()).index(tensor.dtype)


@dataclass
class Launcher:
    """Runs problems with a set's kernels for one architecture.

    `edit` changes the PTX of kernels by their name.
    """

    artifacts: ArtifactSet
    arch: str = "sm86"
    edit: Mapping[str, Callable[[str], str]] = field(default_factory=dict)
    kept: dict[Any, Kernel] = field(default_factory=dict)

    def kernel(self, name: str, **choices: Any) -> Kernel:
        chosen = variant(name, **choices, pdl=int(self.arch == "sm90"))
        key = (name, *chosen.values())
        if key not in self.kept:
            case = (self.arch, name, chosen)
            self.kept[key] = Kernel(self.artifacts, case, self.edit.get(name, str))
        return self.kept[key]

    def run(self, problem: Problem, **options: Any) -> Result:
        """What the kernels give; `options` of `Machine.run`."""
        return _Run(self, problem, options).results()


class _Run:
    """One problem: its operands in memory, and the launches in their order."""

    def __init__(self, launcher: Launcher, problem: Problem, options: Mapping[str, Any]) -> None:
        self._launcher, self._problem, self._options = launcher, problem, options
        given = problem.arguments
        self._given: dict[str, Tensor] = {n: v for n, v in given.items() if isinstance(v, Tensor)}
        self._batch, self._seqlen, self._heads, self._headdim = given["x"].shape
        self._groups, self._dstate = given["B"].shape[2:]
        sizes = {"dtype": problem.dtype, "headdim": self._headdim, "dstate": self._dstate}
        self._sizes: dict[str, Any] = {**sizes, "packed": problem.packed}
        self._scan = launcher.kernel("ssd_scan", **self._sizes, outputs=1)
        self._tile = self._scan.choice("tile")
        self._tiles = -(-self._seqlen // self._tile)
        self._memory = Memory()
        self._places: dict[str, Any] = {}
        self._strides: dict[str, tuple[int, ...]] = {}
        for name, tensor in self._given.items():
            self._place(name, tensor)

    def _place(self, name: str, tensor: Tensor) -> None:
        """Put a tensor into memory: among NaN what has tokens, the rest as it is."""
        if name in PER_TOKEN and self._problem.apart:
            self._place_apart(name, tensor)
            return
        offset = 0
        if name in PER_TOKEN:
            batch, tokens, *inner = tensor.shape
            width = math.prod(inner)
            rows = torch.full((batch, tokens + AFTER, width + 2 * MARGIN), NAN, dtype=tensor.dtype)
            view = rows[:, :tokens, MARGIN : MARGIN + width].unflatten(-1, inner)
            tensor = view.copy_(tensor)
            offset = MARGIN * tensor.element_size()
        array = torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage()).numpy()
        self._places[name] = self._memory.buffer(array, name).address + offset
        self._strides[name] = tensor.stride()

    def _place_apart(self, name: str, tensor: Tensor, *, writable: bool = False) -> None:
        """Put each token's row into a buffer of its own."""
        batch, tokens = tensor.shape[:2]
        step, size = self._problem.apart, tensor.element_size()
        first = 0
        for number, row in enumerate(tensor.view(torch.uint8).view(batch * tokens, -1)):
            address = first + number * step * size if first else None
            found = self._memory.buffer(
                row.numpy(), f"{name} {number}", writable=writable, address=address
            )
            first = first or found.address
        self._places[name] = first
        self._strides[name] = (tokens * step, step, *tensor.stride()[2:])

    def _make(self, name: str, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        """A result, of NaN so far."""
        made = torch.empty(shape, dtype=dtype)
        array = torch.empty(0, dtype=torch.uint8).set_(made.untyped_storage()).numpy()
        array[:] = 0xFF
        if made.numel():
            self._places[name] = self._memory.buffer(array, name, writable=True)
        return made

    def _at(self, name: str) -> Buffer | int:
        return self._places.get(name, 0)

    def _kind(self, name: str) -> int:
        return kind_of(self._given[name]) if name in self._given else 0

    def _steps(self, name: str, parameter: str, *dimensions: str) -> dict[str, int]:
        strides = self._strides.get(name, (0,) * len(dimensions))
        found = dict.fromkeys((f"{parameter}_{d}" for d in dimensions), 0)
        return found | {f"{parameter}_{d}": s for d, s in zip(dimensions, strides, strict=False)}

    def results(self) -> Result:
        self._prepare()
        problem, x = self._problem, self._given["x"]
        made = {"out": torch.full(x.shape, NAN, dtype=x.dtype)}
        if problem.apart:
            self._place_apart("out", made["out"], writable=True)
        else:
            made["out"] = self._make("out", *x.shape, dtype=x.dtype)
            self._strides["out"] = made["out"].stride()
        made["final"] = self._make("final", self._batch, *self._state)
        if "cu_seqlens" in self._given:
            count = len(self._given["cu_seqlens"]) - 1
            made["ends"] = self._make("end_states", count, *self._state, dtype=x.dtype)
        values = self._values()
        if problem.segments > 1:
            values |= self._segments(values)
        self._scan.run(self._memory, values, **self._options)
        return made

    @property
    def _state(self) -> tuple[int, int, int]:
        return self._heads, self._headdim, self._dstate

    def _prepare(self) -> None:
        row_blocks = self._tile // 16
        triangle = row_blocks * (row_blocks + 1) // 2
        self._make("cb", self._batch, self._tiles, self._groups, triangle, 2, 32, 4)
        self._make("decay", self._batch, self._heads, self._tiles, 3 * self._tile)
        if "seq_idx" in self._given:
            self._make("starts", self._batch, self._tiles, self._tile, dtype=torch.int32)
        arguments = self._problem.arguments
        low, high = arguments.get("dt_limit", (0.0, math.inf))
        values: dict[str, Any] = {
            "rates": self._at("A"),
            "b": self._at("B"),
            "c": self._at("C"),
            **{n: self._at(n) for n in ("dt", "dt_bias", "seq_idx", "x", "cb", "decay", "starts")},
            **self._common(),
            "channels": self._headdim,
            **{f"{n}_kind": self._kind(n) for n in ("dt",)},
            "bias_kind": self._kind("dt_bias"),
            "rates_kind": self._kind("A"),
            "softplus": int(arguments["dt_softplus"]),
            "low": float(low),
            "high": float(high),
            **self._steps("dt", "dt", "batch", "token", "head"),
            **self._steps("B", "b", "batch", "token", "group"),
            **self._steps("C", "c", "batch", "token", "group"),
            **self._steps("seq_idx", "seq", "batch", "token"),
            **self._steps("x", "x", "batch", "token", "head"),
        }
        kernel = self._launcher.kernel("ssd_prepare", **self._sizes, tile=self._tile)
        kernel.run(self._memory, values, **self._options)

    def _common(self) -> dict[str, int]:
        names = ("batch", "seqlen", "tiles", "heads", "groups")
        return {name: getattr(self, f"_{name}") for name in names}

    def _values(self) -> dict[str, Any]:
        """Arguments of a scan in one segment."""
        heads, headdim, dstate = self._state
        d_steps = self._strides.get("D", (0,))
        size = headdim * dstate
        return {
            "x": self._at("x"),
            "b": self._at("B"),
            "c": self._at("C"),
            "d": self._at("D"),
            **{n: self._at(n) for n in ("z", "out", "cb", "decay", "starts", "final")},
            **{n: self._at(n) for n in ("cu_seqlens", "end_states")},
            "initial": self._at("initial_states"),
            "totals": 0,
            **self._common(),
            "segments": 1,
            "segment_tiles": self._tiles,
            "group_heads": heads // self._groups,
            "d_kind": self._kind("D"),
            "initial_kind": self._kind("initial_states"),
            "sequences": len(self._given.get("cu_seqlens", (0,))) - 1,
            **self._steps("x", "x", "batch", "token", "head"),
            **self._steps("B", "b", "batch", "token", "group"),
            **self._steps("C", "c", "batch", "token", "group"),
            **self._steps("z", "z", "batch", "token", "head"),
            **self._steps("out", "out", "batch", "token", "head"),
            "d_head": d_steps[0],
            "d_channel": d_steps[1] if len(d_steps) > 1 else 0,
            "initial_batch": heads * size,
            "initial_segment": 0,
            "initial_head": size,
            "final_batch": heads * size,
            "final_segment": -1,
            "final_head": size,
        }

    def _segments(self, values: dict[str, Any]) -> dict[str, Any]:
        """Find the states before each segment; what the scan then takes."""
        heads, headdim, dstate = self._state
        ratio, size = self._problem.ratio, headdim * dstate
        part_tiles = -(-self._tiles // (self._problem.segments * ratio))
        segment_tiles = part_tiles * ratio
        segments = -(-self._tiles // segment_tiles)
        parts = (segments - 1) * ratio
        self._make("own", self._batch, parts, *self._state)
        self._make("totals", self._batch, parts, heads)
        self._make("states", self._batch, segments, *self._state)
        alone = {
            **values,
            **dict.fromkeys(("d", "z", "out", "initial", "initial_kind"), 0),
            **dict.fromkeys(("cu_seqlens", "end_states", "sequences"), 0),
            "final": self._at("own"),
            "totals": self._at("totals"),
            "segments": parts,
            "segment_tiles": part_tiles,
            "final_batch": parts * heads * size,
            "final_segment": heads * size,
        }
        first = self._launcher.kernel("ssd_scan", **self._sizes, outputs=0)
        first.run(self._memory, alone, **self._options)
        passing: dict[str, Any] = {
            **{n: self._at(n) for n in ("own", "totals", "states")},
            **{n: values[n] for n in ("initial", "batch", "heads", "initial_kind")},
            "parts": parts,
            "ratio": ratio,
            "size": size,
            "initial_batch": heads * size,
            "initial_head": size,
        }
        self._launcher.kernel("ssd_pass").run(self._memory, passing, **self._options)
        return {
            "initial": self._at("states"),
            "initial_kind": 0,
            "segments": segments,
            "segment_tiles": segment_tiles,
            "initial_batch": segments * heads * size,
            "initial_segment": heads * size,
        }
