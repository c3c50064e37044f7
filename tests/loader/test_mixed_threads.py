"""Decode and prefill from 8 threads on 2 streams for a second: what `benchmarks.mixed_load` does.

Against the driver's stand-in, which computes nothing: where launches go, how many they are, and
that memory stays flat. `benchmarks.mixed_load` has results and GPU memory.
"""

from __future__ import annotations

from collections import Counter

from gemv_launches import issued

LOAD = """
import itertools, random, threading, time

THREADS, HANDLES = 8, (101, 102)
own = threading.local()
runtime.current_stream = lambda device: own.stream
weights = made(100, 64), made(64, 104)
shared = k.gemv.bind(weights[0])

def operands(heads=4):
    shapes = {"x": (1, 70, heads, 64), "dt": (1, 70, heads), "A": (heads,), "B": (1, 70, 1, 128)}
    shapes["C"] = shapes["B"]
    kept = {name: made(*shape) for name, shape in shapes.items()}
    return {name: OnDevice(memory, "cuda:1") for name, memory in kept.items()}

class Worker:
    def __init__(self, number):
        self.stream = HANDLES[number % 2]
        self.random = random.Random(number)
        self.x, self.outs = made(2, 64), [made(2, 100) for _ in range(3)]
        self.scanned = operands()
        self.bound = k.gemv.bind(weights[0], out=self.outs[1])
        self.calls = {
            "plain": lambda: k.gemv(self.x, weights[0], out=self.outs[0]),
            "bound": lambda: self.bound(self.x),
            "shared": lambda: shared(self.x, self.outs[2]),
            "scan": lambda: k.mamba_chunk_scan_combined(**self.scanned, chunk_size=64),
        }
        self.counts = dict.fromkeys(self.calls, 0)
        self.failed = None

    def turn(self):
        for name in self.random.sample(list(self.calls), len(self.calls)):
            self.calls[name]()
            self.counts[name] += 1

    def work(self, end):
        own.stream = self.stream
        try:
            barrier.wait()
            while time.monotonic() < end:
                self.turn()
        except BaseException as error:
            self.failed = repr(error)

def run(seconds):
    end = time.monotonic() + seconds
    threads = [threading.Thread(target=each.work, args=(end,)) for each in workers]
    for thread in threads: thread.start()
    for thread in threads: thread.join()

def resident():
    import gc
    gc.collect()
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")

barrier = threading.Barrier(THREADS)
workers = [Worker(number) for number in range(THREADS)]
run(0.3)
before = resident()
run(1.0)
say({
    "grown": resident() - before,
    "failed": [each.failed for each in workers if each.failed],
    "counts": [each.counts for each in workers],
    "streams": [each.stream for each in workers],
    # Where launches find the x of a GEMV, and the outputs.
    "x": [each.x.data_ptr() for each in workers],
    "outs": [[out.data_ptr() for out in each.outs] for each in workers],
    "scanned": [each.scanned["x"].data_ptr() for each in workers],
})
"""


def words(launch) -> list[int]:
    """The parameter block, as addresses."""
    block = bytes.fromhex(launch["params"])
    return [int.from_bytes(block[at : at + 8], "little") for at in range(0, len(block) - 7, 8)]


def test_each_thread_launches_on_its_stream_and_memory_is_flat(plain_call):
    outcome = plain_call(LOAD)
    found = outcome.value
    assert found["failed"] == []
    assert found["grown"] < 4 * 2**20
    threads = range(8)
    owners = {address: n for n in threads for address in (*found["outs"][n], found["scanned"][n])}
    gemvs: Counter[tuple[int, int]] = Counter()
    scans: Counter[tuple[int, str]] = Counter()
    for launch in issued(outcome):
        values = words(launch)
        if launch["entry"].startswith("gemv"):
            number, place = owners[values[3]], found["outs"][owners[values[3]]].index(values[3])
            assert values[0] == found["x"][number]
            gemvs[number, place] += 1
        else:
            (number,) = {owners[value] for value in values if value in owners}
            scans[number, launch["entry"]] += 1
        assert launch["stream"] == found["streams"][number]
        assert launch["context"] == 4096 + 1
    for number in threads:
        counts = found["counts"][number]
        assert min(counts.values()) > 10
        names = ("plain", "bound", "shared")
        assert [gemvs[number, place] for place in range(3)] == [counts[name] for name in names]
        # What prepares the scan, and the scan.
        assert [n for (of, _), n in scans.items() if of == number] == [counts["scan"]] * 2
