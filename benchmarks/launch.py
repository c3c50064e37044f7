"""Time that a launch takes of the host: ours, a C loop's, F.linear's; and of capturing 116 of them.

    python -m benchmarks.launch build/default --json benchmarks/results/h200/launch.json

Rounds of 200 launches on a drained stream, with grad mode off, of one GEMV (M=2, N=K=2048, bf16):
bound to its output, checked `kernels.gemv(x, w, out=y)`, `F.linear`, and a loop in C that issues
the same kernel with the same arguments, by the same function of the driver. All take turns, and
medians count. The C loop is compiled here, by `cc` or what CC names.
"""

from __future__ import annotations

import ctypes
import os
import statistics
import subprocess
import tempfile
import time
import timeit
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, cast

import torch

from sonata_aot.aot.measure import gpu
from sonata_aot.artifacts import open_artifacts
from sonata_aot.artifacts.errors import SonataError
from sonata_aot.loader import runtime
from sonata_aot.loader.gemv import Gemv
from sonata_aot.loader.gemv_plan import Plan

from . import first_call, results
from .options import exit_in_one_line, parse

M, N, K = 2, 2048, 2048
LAUNCHES, ROUNDS = 200, 25
CAPTURED = 116
SHAPE = f"M={M} N={N} K={K} dtype=bf16"
# Of the host time of a C loop; of F.linear; of capturing torch.mm; and milliseconds to be ready.
BARS = {"bound": 1.25, "checked": 1.7, "F.linear": 0.35, "torch.mm": 0.4, "ready_ms": 30}

# Microseconds a launch, from a call that issues `LAUNCHES` of them.
Timed = Callable[[], float]


class Config(ctypes.Structure):
    """CUlaunchConfig."""

    _fields_ = (
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("shared", ctypes.c_uint),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.c_void_p),
        ("count", ctypes.c_uint),
    )


def compiled(folder: Path) -> ctypes.CDLL:
    """The loop in C.

    Raises:
        SonataError: it does not compile.
    """
    source, library = Path(__file__).with_name("launch_loop.c"), folder / "launch_loop.so"
    compiler = os.environ.get("CC", "cc").split()
    command = [*compiler, "-O2", "-shared", "-fPIC", str(source), "-o", str(library), "-ldl"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except OSError as error:
        raise SonataError(
            f"{compiler[0]}: {error.strerror}", remedy="install a C compiler, or name one in CC"
        ) from None
    if done.returncode:
        raise SonataError(
            f"launch_loop.c does not compile: {done.stderr}", remedy="name another compiler in CC"
        )
    loaded = ctypes.CDLL(str(library))
    loaded.loop.restype = ctypes.c_double
    return loaded


class Operands:
    """Tensors of the measured call."""

    def __init__(self) -> None:
        """Random ones, of the current device."""

        def random(rows: int, columns: int) -> torch.Tensor:
            values = torch.randn(rows, columns, device="cuda") * columns**-0.5
            return values.to(torch.bfloat16)

        self.x, self.weight = random(M, K), random(N, K)
        self.out = self.x.new_empty(M, N)

    def error(self) -> float:
        """Relative L2 error of `out` against float64."""
        expected = self.x.double() @ self.weight.double().T
        return float((self.out.double() - expected).norm() / expected.norm())


def c_loop(library: ctypes.CDLL, image: bytes, plan: Plan, operands: Operands) -> Timed:
    """The loop over what a plan launches.

    Raises:
        SonataError: the driver refused the kernel or a launch.
    """
    binary = plan.loaded.binary
    declaration = plan.loaded.declaration
    x, weight, out = (one.data_ptr() for one in (operands.x, operands.weight, operands.out))
    params = declaration.pack(*plan.arguments((x, weight, 0, out), (N, K, M), (K, K, N)))
    programmatic = plan.constant and declaration.is_programmatic(binary.variant)
    stream = runtime.current_stream(torch.cuda.current_device())
    config = Config(plan.grid, binary.block, binary.shared_bytes, stream)
    function = ctypes.c_void_p()
    entry = binary.entry.encode()
    code = library.load(image, entry, binary.shared_bytes, ctypes.byref(function))
    if code:
        raise SonataError(
            f"{binary.label}: the driver's code {code}", remedy="run sonata-aot doctor"
        )

    def timed() -> float:
        took = library.loop(
            function,
            ctypes.byref(config),
            int(programmatic),
            params,
            ctypes.c_size_t(len(params)),
            LAUNCHES,
        )
        if took < 0:
            raise SonataError(
                f"{binary.label}: the driver's code {-took:.0f}", remedy="run sonata-aot doctor"
            )
        return took / 1e3

    return timed


def repeated(statement: str, names: Mapping[str, object]) -> Timed:
    """The same of a statement of Python, in a loop of its own."""
    timer = timeit.Timer(statement, globals=dict(names))
    return lambda: 1e6 * timer.timeit(LAUNCHES) / LAUNCHES


def medians(ways: Mapping[str, Timed]) -> dict[str, float]:
    """Each on a drained stream, in turns."""
    found: dict[str, list[float]] = {name: [] for name in ways}
    for number in range(ROUNDS + 2):
        for name, timed in ways.items():
            torch.cuda.synchronize()
            took = timed()
            if number >= 2:  # the first ones warm up
                found[name].append(took)
    torch.cuda.synchronize()
    return {name: statistics.median(times) for name, times in found.items()}


def capture_us(call: Callable[[], object]) -> float:
    """Microseconds to capture `CAPTURED` calls, from the beginning of the capture to its end."""
    side = torch.cuda.Stream()
    took = []
    for number in range(ROUNDS + 2):
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.stream(side):
            began = time.perf_counter()
            graph.capture_begin()
            for _ in range(CAPTURED):
                call()
            graph.capture_end()
            if number >= 2:
                took.append(1e6 * (time.perf_counter() - began))
        graph.replay()
    torch.cuda.synchronize()
    return statistics.median(took)


def measure(loaded: gpu.Loaded, artifacts: Path) -> list[dict[str, Any]]:
    """Records of one architecture."""
    operands = Operands()
    gemv = cast("Gemv", loaded.kernels.gemv)
    x, weight, out = operands.x, operands.weight, operands.out
    opened = open_artifacts(artifacts)
    checked = gemv.check(x, weight, None)
    plans = {
        mode: gemv.plan(checked, constant=mode == "bound", batch_invariant=False)
        for mode in ("bound", "checked")
    }
    bound = gemv.bind(weight, out=out)
    ours = {"bound": lambda: bound(x), "checked": lambda: loaded.kernels.gemv(x, weight, out=out)}
    errors = {}
    for mode, call in ours.items():
        for _ in range(3):
            out.fill_(float("nan"))
            call()
        errors[mode] = operands.error()
    names = {
        "bound": bound,
        "gemv": loaded.kernels.gemv,
        "linear": torch.nn.functional.linear,
        "x": x,
        "weight": weight,
        "out": out,
    }
    ways = {
        "bound": repeated("bound(x)", names),
        "checked": repeated("gemv(x, weight, out=out)", names),
        "F.linear": repeated("linear(x, weight)", names),
    }
    with tempfile.TemporaryDirectory() as folder:
        library = compiled(Path(folder))
        for mode, plan in plans.items():
            image = opened.read(plan.loaded.binary.payload(loaded.form))
            ways[f"C {mode}"] = c_loop(library, image, plan, operands)
        took = medians(ways)
    transposed = weight.T
    captures = {
        **{mode: capture_us(call) for mode, call in ours.items()},
        "torch.mm": capture_us(lambda: torch.mm(x, transposed, out=out)),
    }

    def record(mode: str, used: str, opponent: str, ours_us: float, other: float) -> dict[str, Any]:
        return {
            "case": f"op=gemv mode={mode} {SHAPE}",
            "opponent": opponent,
            "via": loaded.via,
            "ours_us": round(ours_us, 3),
            "opponent_us": round(other, 3),
            "error": errors[used],
            "opponent_error": None,
            "binaries": [plans[used].loaded.binary.payload(loaded.form).sha256],
        }

    found = []
    for mode in ours:
        found.append(record(mode, mode, "cuLaunchKernel", took[mode], took[f"C {mode}"]))
        found.append(record(mode, mode, "F.linear", took[mode], took["F.linear"]))
    captured = record(
        f"capture{CAPTURED}", "checked", "torch.mm", captures["checked"], captures["torch.mm"]
    )
    return [*found, {**captured, "bound_us": round(captures["bound"], 3)}]


def main() -> None:
    """Measure each architecture named, and how long it takes to be ready."""
    options = parse("launch", __doc__, ("sm90",))
    with exit_in_one_line("launch"):
        gpu.machine()
        with torch.no_grad():
            loaded = gpu.load(options.artifacts, options.archs, ("gemv",))
            records = [one for each in loaded for one in measure(each, options.artifacts)]
    for one in records:
        mode, opponent = one["case"].split()[1].partition("=")[2], one["opponent"]
        bar = BARS[mode if opponent == "cuLaunchKernel" else opponent]
        ratio = one["ours_us"] / one["opponent_us"]
        print(
            f"{one['via']:11} {mode:11} {one['ours_us']:8.2f} us, {opponent:14} "
            f"{one['opponent_us']:8.2f} us: {ratio:.2f} (at most {bar})"
        )
    for each in loaded:
        for one in first_call.measure(options.artifacts, each.via.split("-")[0]):
            ready = one["ours_us"] / 1e3
            print(
                f"{one['via']:11} load {one['load_ms']:.1f} ms, first gemv "
                f"{one['first_gemv_ms']:.1f} ms, first scan {one['first_scan_ms']:.1f} ms: "
                f"{ready:.1f} ms (at most {BARS['ready_ms']} with the context up)"
            )
    if options.json:
        results.write(options.json, records, options.artifacts)


if __name__ == "__main__":
    main()
