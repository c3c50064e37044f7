"""`benchmarks.mixed_load` on a CPU: a wrong result, a leak and a failing thread are each found."""

from __future__ import annotations

import contextlib
import itertools
import threading
from collections.abc import Callable, Iterator, Sequence
from mmap import mmap
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from measure_fakes import FakeScan, Gpu, binary, variant
from sonata_aot.aot.measure import ssd_shapes
from sonata_aot.aot.measure.gpu import Loaded
from sonata_aot.aot.measure.operands import WrongResult
from sonata_aot.aot.measure.ssd_chunked import scan_in_chunks

ROOT = Path(__file__).resolve().parents[2]
SECONDS = 1.0
Damage = Callable[[Tensor], object]


class Gemv:
    """`kernels.gemv`, exact but for rounding and for what `damage` does to each result."""

    def __init__(self) -> None:
        self.damage: Damage = lambda out: None
        # Whether a bound call writes the output that it is given.
        self.writes: Callable[[], bool] = lambda: True

    def _run(self, x: Tensor, weight: Tensor, out: Tensor | None) -> Tensor:
        made = (x.float() @ weight.float().T).to(x.dtype)
        self.damage(made)
        return made if out is None else out.copy_(made)

    def __call__(self, x: Tensor, weight: Tensor, out: Tensor | None = None) -> Tensor:
        return self._run(x, weight, out)

    def bind(
        self, weight: Tensor, *, out: Tensor | None = None, upcoming: Tensor | None = None
    ) -> Callable[..., Tensor]:
        bound = out

        def call(x: Tensor, out: Tensor | None = None) -> Tensor:
            if out is not None and not self.writes():
                return out
            return self._run(x, weight, bound if out is None else out)

        return call

    def binary(self, x: Tensor, weight: Tensor, *, constant: bool) -> Any:
        return binary(variant(m=x.shape[0], pdl=int(constant)))


class Scan(FakeScan):
    """The same of the scan, which computes once for each x."""

    def __init__(self) -> None:
        run = [binary({"headdim": 8}, "ssd_scan")]
        super().__init__(Gpu(lambda launched: 1.0), "scan", run)
        self._known: dict[int, tuple[Tensor, ...]] = {}

    def __call__(self, **arguments: Any) -> Any:
        address = arguments["x"].data_ptr()
        if address not in self._known:
            self._known[address] = scan_in_chunks(**arguments)  # pyright: ignore
        out, states = self._known[address]
        results = out.to(arguments["x"].dtype), states.float()
        self.damage(*results)
        return results


class Kernels:
    def __init__(self) -> None:
        self.gemv = Gemv()
        self.mamba_chunk_scan_combined = Scan()


class Replayed:
    """A graph of calls."""

    def __init__(self, calls: Sequence[Callable[[], object]]) -> None:
        self._calls = calls
        self.threads: set[int] = set()

    def replay(self) -> None:
        self.threads.add(threading.get_ident())
        for call in self._calls:
            call()


class Paper:
    """A GPU whose streams are numbers and whose memory is what a test says."""

    def __init__(self, memory: type[Any]) -> None:
        self._memory = memory
        self.current = threading.local()
        self.seen: dict[int, int] = {}  # streams by thread
        self.graphs: list[Replayed] = []
        self.rss = self.allocated = self.used = 0

    @contextlib.contextmanager
    def on(self, stream: int) -> Iterator[None]:
        self.seen[threading.get_ident()] = self.current.stream = stream
        yield
        del self.current.stream

    def wait(self) -> None:
        assert self.current.stream in (0, 1)

    def wait_for_all(self) -> None:
        pass

    def host(self, like: Tensor) -> Tensor:
        return torch.empty_like(like)

    def capture(self, calls: Sequence[Callable[[], object]]) -> Replayed:
        self.graphs.append(Replayed(calls))
        return self.graphs[-1]

    def memory(self) -> Any:
        return self._memory(self.rss, self.allocated, 0, 2**30 - self.used)


@pytest.fixture
def mixed(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The benchmark, of small sizes."""
    monkeypatch.syspath_prepend(ROOT)
    from benchmarks import mixed_cases, mixed_load

    small = {
        "PLAIN": ((1, 16, 8), (2, 24, 16)),
        "BOUND": ((2, 24, 16),),
        "STEP": ((24, 16), (16, 8)),
        "SCANS": (
            ssd_shapes.Shape(1, 3, heads=2, headdim=8, dstate=16, initial=True),
            ssd_shapes.Shape(1, 9, heads=2, headdim=8, dstate=16, z=True, seq_idx=True),
        ),
    }
    for name, value in small.items():
        monkeypatch.setattr(mixed_cases, name, value)
    return mixed_load


@pytest.fixture
def kernels() -> Kernels:
    return Kernels()


@pytest.fixture
def device(mixed: ModuleType) -> Paper:
    return Paper(mixed.Memory)


@pytest.fixture
def measure(mixed: ModuleType, kernels: Kernels, device: Paper) -> Callable[..., dict[str, Any]]:
    loaded = Loaded(kernels, "sm90", "cubin", 0)  # pyright: ignore[reportArgumentType]
    return lambda seconds=SECONDS: mixed.measure(loaded, device, seconds, 7, "cpu")


def test_a_run_in_which_all_is_well(measure, device: Paper, mixed: ModuleType):
    record = measure()
    assert record["case"] == "op=mixed threads=8 streams=2 seconds=1"
    assert (record["via"], record["opponent"], record["seed"]) == ("sm90-cubin", None, 7)
    turns = record["calls"]["plain"] // 2
    assert turns >= mixed.THREADS
    assert record["calls"] == {
        "plain": 2 * turns, "bound": turns, "shared": turns, "graph": 3 * turns, "scan": 2 * turns,
    }  # fmt: skip
    total = sum(record["calls"].values())
    assert record["ours_us"] == pytest.approx(1e6 * record["samples"][-1]["seconds"] / total, 1e-2)
    assert 0 < record["error"] < 4e-3
    assert len(record["binaries"]) == len(set(record["binaries"])) == 4
    samples = record["samples"]
    assert samples[0]["seconds"] >= SECONDS / 10
    assert samples[-1]["seconds"] >= SECONDS
    assert samples[-1]["calls"] == total > samples[0]["calls"]
    streams = [stream for ident, stream in device.seen.items() if ident != threading.get_ident()]
    assert sorted(streams) == [0] * 4 + [1] * 4
    assert [len(graph.threads) for graph in device.graphs] == [1] * 8


def after(count: int, act: Damage) -> Damage:
    """Acts at one of the calls, long after references and what is held at the start."""
    numbers = itertools.count()
    return lambda out: act(out) if next(numbers) == count else None


def one_bit(out: Tensor) -> None:
    out.view(torch.int16).view(-1)[-1] ^= 1


@pytest.mark.parametrize(
    ("kind", "words"),
    [("gemv", "other bits than alone"), ("scan", "scan b=1 l=")],
)
def test_one_wrong_bit_in_one_call(mixed: ModuleType, measure, kernels: Kernels, kind, words):
    def damaged(out: Tensor, states: Tensor) -> None:
        strike(states)

    strike = after(2000, one_bit)
    if kind == "gemv":
        kernels.gemv.damage = strike
    else:
        strike = after(400, one_bit)
        kernels.mamba_chunk_scan_combined.damage = damaged
    with pytest.raises(mixed.LoadFailure, match=words) as raised:
        measure(30)
    assert isinstance(raised.value.__cause__, WrongResult)


def test_a_result_that_is_not_written(mixed: ModuleType, measure, kernels: Kernels):
    """What lies there is no longer what the same call left before."""
    numbers = itertools.count()
    kernels.gemv.writes = lambda: next(numbers) < 100
    with pytest.raises(mixed.LoadFailure, match="shared M=2 N=24 K=16: other bits"):
        measure(30)


def test_an_exception_in_a_thread_ends_all(mixed: ModuleType, measure, kernels: Kernels):
    def broken(out: Tensor) -> None:
        raise ZeroDivisionError("made for this test")

    kernels.gemv.damage = after(2000, broken)
    before = threading.active_count()
    with pytest.raises(mixed.LoadFailure, match=r"thread [0-7]: made for this test") as raised:
        measure(30)
    assert isinstance(raised.value.__cause__, ZeroDivisionError)
    assert threading.active_count() == before


def test_a_wrong_reference_is_found_before_the_run(measure, kernels: Kernels, device: Paper):
    kernels.gemv.damage = lambda out: out.mul_(1.01)
    with pytest.raises(WrongResult, match=r"plain M=1 N=16 K=8: relative error 0\.0"):
        measure()
    kernels.gemv.damage = lambda out: out.fill_(float("nan"))
    with pytest.raises(WrongResult, match="relative error nan"):
        measure()
    assert not device.graphs


def test_what_the_gpu_does_not_get_back(mixed: ModuleType, measure, kernels, device: Paper):
    def keep(out: Tensor) -> None:
        device.allocated += out.nbytes

    kernels.gemv.damage = keep
    with pytest.raises(mixed.LoadFailure, match=r"torch holds \+\d+ bytes more"):
        measure()
    device.allocated = 0
    kernels.gemv.damage = lambda out: setattr(device, "used", device.used + 2**20)
    with pytest.raises(mixed.LoadFailure, match="the GPU's grew by"):
        measure()


def test_what_the_host_does_not_get_back(mixed: ModuleType, measure, kernels, device: Paper):
    """Truly resident memory."""
    kept: list[mmap] = []

    def keep(out: Tensor) -> None:
        if len(kept) < 1000:
            # Pages of its own: the heap may have some left of what ran before.
            kept.append(mmap(-1, 2**16))
            kept[-1].write(b"x" * 2**16)

    device.memory = lambda: mixed.Memory(mixed.resident(), 0, 0, 0)
    kernels.gemv.damage = keep
    with pytest.raises(mixed.LoadFailure, match="the host's grew"):
        measure()


def samples(mixed: ModuleType, *rss: float, seconds: float = 600) -> list[Any]:
    step = seconds / len(rss)
    return [
        mixed.Sample(step * (i + 1), i, mixed.Memory(round(size * 2**20), 5, 5, 2**30))
        for i, size in enumerate(rss)
    ]


def test_when_the_hosts_memory_is_flat(mixed: ModuleType):
    """Growth of less than 16 MiB, at most 1 MiB a minute over the second half."""
    mixed.require_flat(samples(mixed, *[100] * 50, *[115] * 50))
    mixed.require_flat(samples(mixed, *[100 + i * 0.09 for i in range(100)]))  # 0.9 a minute
    with pytest.raises(mixed.LoadFailure, match=r"grows by 1\.10 MiB a minute"):
        mixed.require_flat(samples(mixed, *[100 + i * 0.11 for i in range(100)]))
    with pytest.raises(mixed.LoadFailure, match=r"the host's grew by 17\.0 MiB"):
        mixed.require_flat(samples(mixed, *[100] * 9, *[117] * 90))
    # A short run may end with a few pages more.
    mixed.require_flat(samples(mixed, *[100] * 15, *[100.3] * 10, seconds=45))
    with pytest.raises(mixed.LoadFailure, match="MiB a minute"):
        mixed.require_flat(samples(mixed, *[100 + i * 0.2 for i in range(25)], seconds=45))
    with pytest.raises(mixed.LoadFailure, match="3 samples are too few"):
        mixed.require_flat(samples(mixed, 1, 1, 1))
