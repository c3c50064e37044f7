"""Mixed prefill and decode from 8 threads on 2 streams: no wrong result, and no leak.

    python -m benchmarks.mixed_load build/default --json benchmarks/results/h200/mixed_load.json

Each thread goes through its cases in random order until the time is up: plain and bound GEMVs,
prefill scans, and replays of a CUDA graph of a decode step that it captured. Every result is copied
to the host, where its SHA-256 must be that of a reference: what the same call left before, alone on
one stream, held against float64. All bytes count and no GPU memory is needed for it, so that what
is allocated is the kernels' own.

From a tenth of the time on, memory is sampled while all threads wait and hold no result.
"""

from __future__ import annotations

import contextlib
import gc
import os
import random
import statistics
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from sonata_aot.aot.measure import gpu, timing
from sonata_aot.artifacts.errors import SonataError

from . import results
from .mixed_cases import KERNELS, Capture, Case, Graph, Weights, Work, binaries, make_work
from .options import make_parser

THREADS, STREAMS = 8, 2
# The share of the time before the first sample, and seconds between samples: at most so many, and
# fewer where that would give less than 25 of them.
WARM_UP, INTERVAL, SAMPLES = 0.1, 5.0, 25
# Without so many nothing can be told.
LEAST_SAMPLES = 4
MIB = 2**20
# By how many bytes more may be used at the last sample than at the first, of the host's memory and
# of the GPU's; and by how many a minute the host's may grow over the second half.
MOST_GROWTH, MOST_A_MINUTE = 16 * MIB, MIB


class LoadFailure(SonataError):
    """A thread failed, or memory is not flat."""


@dataclass(frozen=True)
class Memory:
    """Bytes: resident of this process; allocated and reserved by torch; free by the driver."""

    rss: int
    allocated: int
    reserved: int
    free: int


@dataclass(frozen=True)
class Sample:
    """What memory was after so many seconds."""

    seconds: float
    calls: int
    memory: Memory

    def __str__(self) -> str:
        sizes = ", ".join(f"{k} {v / MIB:.1f}" for k, v in asdict(self.memory).items())
        return f"{self.seconds:6.1f} s, {self.calls} calls, MiB: {sizes}"


class Device(Protocol):
    """What a run needs of the GPU; tests have another."""

    def on(self, stream: int) -> contextlib.AbstractContextManager[object]:
        """Makes one of the streams the current one of this thread."""
        ...

    def wait(self) -> None:
        """Wait for what was enqueued on the current stream."""
        ...

    def wait_for_all(self) -> None:
        """Wait for all streams."""
        ...

    def host(self, like: Tensor) -> Tensor:
        """Memory of the host that a result is copied to without waiting."""
        ...

    @property
    def capture(self) -> Capture:
        """Makes a graph of calls."""
        ...

    def memory(self) -> Memory:
        """What is used now."""
        ...


def resident() -> int:
    """Bytes of this process in memory."""
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


class Cuda:
    """The current GPU.

    All that threads share is allocated before they start and freed after they end; what calls
    allocate is used on one stream only. So the allocator, which gives freed memory to later calls
    on the same stream, needs no word about other streams.
    """

    def __init__(self) -> None:
        """Make the streams."""
        self._streams = [torch.cuda.Stream() for _ in range(STREAMS)]

    def on(self, stream: int) -> contextlib.AbstractContextManager[object]:
        """See `Device`."""
        return torch.cuda.stream(self._streams[stream])

    def wait(self) -> None:
        """See `Device`."""
        torch.cuda.current_stream().synchronize()

    def wait_for_all(self) -> None:
        """See `Device`."""
        torch.cuda.synchronize()

    def host(self, like: Tensor) -> Tensor:
        """See `Device`."""
        return torch.empty(like.shape, dtype=like.dtype, pin_memory=True)

    def capture(self, calls: Sequence[Callable[[], object]]) -> Graph:
        """See `Device`; captured on a stream that no other thread uses."""
        return timing.capture(calls)

    def memory(self) -> Memory:
        """See `Device`."""
        free, _ = torch.cuda.mem_get_info()
        return Memory(resident(), torch.cuda.memory_allocated(), torch.cuda.memory_reserved(), free)


class Load:
    """One run: threads that call, and samples in between."""

    def __init__(
        self,
        works: Sequence[Work],
        device: Device,
        seconds: float,
        seed: int = 0,
        progress: Callable[[Sample], object] = lambda sample: print(sample, flush=True),
    ) -> None:
        """`works` are the threads', whose cases have references."""
        self._works = works
        self._device = device
        self._seconds = seconds
        self._interval = min(INTERVAL, seconds / SAMPLES)
        self._seed = seed
        self._progress = progress
        self._counts: list[Counter[str]] = [Counter() for _ in works]
        self._failures: list[tuple[int, BaseException]] = []
        self._capturing = threading.Lock()
        self._ready = threading.Barrier(len(works))
        self._between = threading.Barrier(len(works), action=self._sample)
        self._began = self._deadline = 0.0
        self._done = False
        self.elapsed = 0.0
        self.samples: list[Sample] = []

    @property
    def counts(self) -> dict[str, int]:
        """Calls by kind."""
        return dict(sorted(sum(self._counts, Counter[str]()).items()))

    def run(self) -> None:
        """Run until the time is up, or a thread fails.

        Raises:
            LoadFailure: a thread failed; what it raised is the cause.
        """
        numbers = range(len(self._works))
        threads = [threading.Thread(target=self._thread, args=(number,)) for number in numbers]
        self._device.wait_for_all()
        try:
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        finally:
            self._stop()
        if self._failures:
            number, error = self._failures[0]
            what = error.what if isinstance(error, SonataError) else str(error)
            raise LoadFailure(
                f"thread {number}: {what or type(error).__name__}",
                remedy="report it with this message and the traceback",
            ) from error

    def _stop(self) -> None:
        self._done, self._deadline = True, 0.0
        self._ready.abort()
        self._between.abort()

    def _thread(self, number: int) -> None:
        try:
            with self._device.on(number % STREAMS):
                self._work(number)
        except threading.BrokenBarrierError:
            pass  # another thread has failed, or all are to stop
        except BaseException as error:
            self._failures.append((number, error))
            self._stop()

    def _work(self, number: int) -> None:
        work = self._works[number]
        # On this thread, but while no other one launches.
        with self._capturing:
            work.step.capture(self._device.capture)
        self._ready.wait()
        # Torch reserves what all threads can hold at once, so that it need never reserve more.
        held = [case.call() for case in work.cases]
        self._device.wait()
        self._ready.wait()
        del held
        self._between.wait()
        order = random.Random(f"{self._seed} {number}")
        while not self._done:
            while time.monotonic() < self._deadline:
                self._turn(work.cases, order, self._counts[number])
            self._between.wait()

    def _turn(self, cases: Sequence[Case], order: random.Random, counts: Counter[str]) -> None:
        """All cases in a random order, and then their results, so that launches queue up."""
        ordered = order.sample(cases, len(cases))
        for case in ordered:
            case.issue()
        self._device.wait()
        for case in ordered:
            case.require()
            counts[case.kind] += 1

    def _sample(self) -> None:
        """Runs in one thread while the others wait, and says until when they go on."""
        self._device.wait_for_all()
        gc.collect()
        if not self._began:
            self._began = time.monotonic()
        self.elapsed = time.monotonic() - self._began
        if self.elapsed >= WARM_UP * self._seconds:
            calls = sum(self.counts.values())
            self.samples.append(Sample(round(self.elapsed, 3), calls, self._device.memory()))
            self._progress(self.samples[-1])
        left = self._seconds - self.elapsed
        # Where the machine is so slow that a turn takes long, a little longer.
        self._done = left <= 0 and len(self.samples) >= LEAST_SAMPLES
        self._deadline = time.monotonic() + (min(self._interval, left) if left > 0 else 0.01)


def require_flat(samples: Sequence[Sample]) -> None:
    """Require that memory is flat over the samples.

    Raises:
        LoadFailure: it is not, or there are too few samples to tell.
    """
    problems = []
    if len(samples) < LEAST_SAMPLES:
        problems.append(f"{len(samples)} samples are too few to tell")
    else:
        first, last = samples[0].memory, samples[-1].memory
        if last.allocated != first.allocated:
            problems.append(f"torch holds {last.allocated - first.allocated:+} bytes more")
        for name, size in (("host", last.rss - first.rss), ("GPU", first.free - last.free)):
            if size > MOST_GROWTH:
                problems.append(f"the {name}'s grew by {size / MIB:.1f} MiB")
        half = samples[len(samples) // 2 :]
        minutes = [sample.seconds / 60 for sample in half]
        slope, _ = statistics.linear_regression(minutes, [sample.memory.rss for sample in half])
        # Over less than a minute a page more or less would be a slope.
        grown = slope * min(1.0, minutes[-1] - minutes[0])
        if grown > MOST_A_MINUTE:
            problems.append(f"the host's grows by {slope / MIB:.2f} MiB a minute")
    if problems:
        raise LoadFailure(
            f"memory is not flat: {'; '.join(problems)}",
            remedy="run it longer on an idle machine, or report it with the samples",
        )


def prepare(loaded: gpu.Loaded, device: Device, where: str) -> tuple[Weights, list[Work], float]:
    """The threads' works with references, and the worst error of these; `where` tensors are.

    Raises:
        WrongResult: a reference is not what float64 says.
    """
    weights = Weights(loaded.kernels.gemv, where)
    works = [make_work(loaded, weights, where) for _ in range(THREADS)]
    device.wait_for_all()
    with device.on(0):
        worst = max(case.refer(device.host) for work in works for case in work.cases)
    return weights, works, worst


def measure(
    loaded: gpu.Loaded, device: Device, seconds: float, seed: int, where: str = "cuda"
) -> dict[str, Any]:
    """The record of one architecture.

    Raises:
        WrongResult: a reference is wrong.
        LoadFailure: a thread found a wrong result or failed, or memory is not flat.
    """
    torch.manual_seed(seed)
    weights, works, worst = prepare(loaded, device, where)
    used = binaries(loaded, weights, where)
    load = Load(works, device, seconds, seed)
    load.run()
    require_flat(load.samples)
    calls = sum(load.counts.values())
    return {
        "case": f"op=mixed threads={THREADS} streams={STREAMS} seconds={seconds:g}",
        "opponent": None,
        "via": loaded.via,
        # Time of the run for each call, of all threads together, checks included.
        "ours_us": round(1e6 * load.elapsed / calls, 3),
        "opponent_us": None,
        "error": worst,
        "opponent_error": None,
        "seed": seed,
        "calls": load.counts,
        "samples": [
            {"seconds": sample.seconds, "calls": sample.calls, **asdict(sample.memory)}
            for sample in load.samples
        ],
        "binaries": used,
    }


def main() -> None:
    """Run it for each architecture named; exit 1 if a result is wrong or memory is not flat."""
    parser = make_parser("mixed_load", __doc__)
    parser.add_argument("--seconds", type=float, default=600.0)
    parser.add_argument("--seed", type=int, default=0, help="of inputs and of the order of calls")
    options = parser.parse_args()
    if not options.seconds > 0:
        parser.error("--seconds: pass more than 0")
    records = []
    try:
        gpu.machine()
        for loaded in gpu.load(options.artifacts, options.archs or ("sm90",), KERNELS):
            records.append(measure(loaded, Cuda(), options.seconds, options.seed))
            record = records[-1]
            first, last = record["samples"][0], record["samples"][-1]
            print(
                f"{record['via']:11} {sum(record['calls'].values())} calls, "
                f"{record['ours_us']:.1f} us each: no wrong result; host memory "
                f"{(last['rss'] - first['rss']) / MIB:+.1f} MiB, the GPU's "
                f"{(first['free'] - last['free']) / MIB:+.1f} MiB, allocated by torch "
                f"{last['allocated'] - first['allocated']:+} bytes; calls {record['calls']}; worst "
                f"error of a reference {record['error']:.1e}"
            )
    except SonataError as error:
        if error.__cause__ is not None:
            traceback.print_exception(error.__cause__)
        raise SystemExit(f"mixed_load: {error}") from None
    if options.json:
        results.write(options.json, records, options.artifacts)


if __name__ == "__main__":
    main()
