"""A GPU of paper: kernels that compute on the CPU, and a timer that makes times up."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from sonata_aot.aot.measure.gpu import Loaded
from sonata_aot.aot.measure.ssd_chunked import scan_in_chunks
from sonata_aot.aot.measure.timing import Effort, Pass
from sonata_aot.artifacts.manifest import Binary, Payload

# The products are tiny, and other tests share the cores.
torch.set_num_threads(1)

# What a launch was: its kernel and all that tells it from others.
Launched = tuple[Any, ...]


def binary(variant: Mapping[str, int | str], kernel: str = "gemv", **changes: Any) -> Binary:
    digest = hashlib.sha256(f"{kernel} {variant}".encode()).hexdigest()
    parts: dict[str, Any] = {
        "kernel": kernel,
        "variant": dict(variant),
        "arch": "sm90",
        "entry": f"{kernel}_0",
        "block": (32 * int(variant.get("warps", 8)), 1, 1),
        "shared_bytes": 0,
        "static_shared_bytes": 0,
        "registers": 64,
        "stack_bytes": 0,
        "spills": 0,
        "cubin": Payload(digest, 1000, "12.0", None),
        "ptx": Payload("f" * 64, 1000, "12.9", "8.8"),
        "key": digest,
    }
    return Binary(**parts | changes)


def variant(**changes: int | str) -> dict[str, int | str]:
    return {
        "dtype": "bf16",
        "m": 1,
        "side": "a",
        "rows": 4,
        "warps": 8,
        "unroll": 2,
        "persistent": 0,
        "pdl": 0,
    } | changes


class Gpu:
    """Notes every launch; `cost` says how many microseconds one takes."""

    def __init__(self, cost: Callable[[Launched], float]) -> None:
        self.cost = cost
        self.log: list[Launched] = []
        self.timed: list[tuple[list[Launched], Effort]] = []
        self.replays = True

    def timer(
        self, passes: Sequence[Pass], effort: Effort, before: Callable[[], object] | None = None
    ) -> list[float]:
        firsts, times = [], []
        for calls in passes:
            self.log.clear()
            for call in calls:
                call()
            launched = self.log[0] if self.log else ("cublas",)
            assert len({str(entry) for entry in self.log}) <= 1, "a pass mixes launches"
            firsts.append(launched)
            times.append(self.cost(launched))
        if before is not None:
            before()
        if self.replays:
            for calls in passes:
                for call in calls:
                    call()
        self.timed.append((firsts, effort))
        return times


class FakeGemv:
    """`kernels.gemv`, over torch.mm; what it computes can be made wrong."""

    def __init__(self, gpu: Gpu, chosen: Binary) -> None:
        self.gpu = gpu
        self.chosen = chosen
        self.damage: Callable[[Launched, torch.Tensor], object] = lambda launched, out: None

    def _run(self, launched: Launched, x: Any, weight: Any, out: Any, bias: Any = None) -> Any:
        self.gpu.log.append(launched)
        if bias is None:
            torch.mm(x, weight.T, out=out)
        else:
            torch.addmm(bias, x, weight.T, out=out)
        self.damage(launched, out)
        return out

    def __call__(self, x: Any, weight: Any, bias: Any = None, out: Any = None) -> Any:
        return self._run(("gemv", "plain"), x, weight, out, bias)

    def bind(self, weight: Any, bias: Any = None, *, upcoming: Any = None) -> Callable[..., Any]:
        return lambda x, *, out: self._run(("gemv", "bound"), x, weight, out, bias)

    def using(
        self, variant: Mapping[str, int | str], launch: Mapping[str, int], *, constant: bool = False
    ) -> Callable[..., Any]:
        launched = ("gemv", dict(variant), dict(launch), constant)
        return lambda x, weight, *, out: self._run(launched, x, weight, out)

    def binary(self, x: Any, weight: Any, *, constant: bool = False) -> Binary:
        return self.chosen


class FakeRead:
    """A variant of `read`; never touches memory."""

    def __init__(self, gpu: Gpu, warps: int, unroll: int, pdl: int) -> None:
        self.gpu = gpu
        self.variant = (warps, unroll, pdl)
        self.addresses: list[int] = []

    def launch(self, stream: int, *arguments: int | float, programmatic: bool = False) -> None:
        buffer, sink, vectors, blocks = (int(argument) for argument in arguments)
        assert (stream, sink) == (7, 64)
        self.addresses.append(buffer)
        self.gpu.log.append(("read", *self.variant, vectors, blocks, programmatic))


class FakeTable:
    def __init__(self, binaries: dict[tuple[object, ...], Any]) -> None:
        self.binaries = binaries

    def all(self) -> Mapping[tuple[object, ...], Any]:
        return self.binaries


class FakeScan:
    """A scan, exact but for rounding and for what `damage` does to its results."""

    def __init__(self, gpu: Gpu, name: str, runs: Sequence[Binary] = ()) -> None:
        self.gpu = gpu
        self.name = name
        self.runs = runs
        self.damage: Callable[[torch.Tensor, torch.Tensor], object] = lambda out, states: None

    def __call__(self, **arguments: Any) -> Any:
        given = [name for name in ("z", "initial_states", "seq_idx") if name in arguments]
        dense = all(arguments[name].is_contiguous() for name in ("x", "dt", "B", "C"))
        self.gpu.log.append((self.name, *given, "dense" if dense else "strided"))
        out, states = scan_in_chunks(**arguments)
        results = out.to(arguments["x"].dtype), states.float()
        self.damage(*results)
        return results

    def binaries(self, **arguments: Any) -> Sequence[Binary]:
        return self.runs


class FakeKernels:
    def __init__(self, gemv: FakeGemv | None = None, scan: FakeScan | None = None) -> None:
        self._gemv = gemv
        self._scan = scan

    @property
    def mamba_chunk_scan_combined(self) -> FakeScan:
        assert self._scan is not None
        return self._scan

    @property
    def gemv(self) -> FakeGemv:
        assert self._gemv is not None
        return self._gemv

    def table(self, kernel: str) -> FakeTable:
        return FakeTable({})

    def info(self) -> dict[str, Any]:
        return {}


def loaded(gemv: FakeGemv, arch: str = "sm90") -> Loaded:
    return Loaded(FakeKernels(gemv), arch, "cubin", 0)


def loaded_scan(scan: FakeScan, arch: str = "sm90") -> Loaded:
    return Loaded(FakeKernels(scan=scan), arch, "cubin" if arch == "sm90" else "ptx", 0)


def reads(gpu: Gpu) -> dict[tuple[object, ...], Any]:
    return {
        (warps, unroll, pdl): FakeRead(gpu, warps, unroll, pdl)
        for warps in (8, 16)
        for unroll in (4, 8)
        for pdl in (0, 1)
    }
