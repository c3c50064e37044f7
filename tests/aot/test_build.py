"""Real builds of throw-away kernels, good and bad, by real workers."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from sonata_aot.aot import build
from sonata_aot.aot.budget import over_budget
from sonata_aot.aot.build import measure
from sonata_aot.aot.cache import Cache, Entry
from sonata_aot.aot.plan import Job
from sonata_aot.aot.worker import environment_for_worker
from sonata_aot.artifacts import Arch, Budget, open_artifacts
from sonata_aot.artifacts.cubin import Cubin, read_cubin
from sonata_aot.artifacts.errors import BuildError, SonataError
from sonata_aot.artifacts.verify import Passed, verify
from sonata_aot.kernels import builtin

if TYPE_CHECKING:
    from tests.aot.conftest import Toys

DEVICE = """
@cute.kernel
def raises(out: cute.Pointer, n: Int32, *, m: cutlass.Constexpr):
    helper(out)

def helper(out):
    raise ValueError(MESSAGE)  # HERE: raises

MESSAGE = "no such layout\\nand more"

@cute.kernel
def undefined(out: cute.Pointer, n: Int32, *, m: cutlass.Constexpr):
    out.store(Float32(nowhere))  # HERE: undefined

@cute.kernel
def fewer(out: cute.Pointer, *, m: cutlass.Constexpr):
    out.store(Float32(m))

@cute.kernel
def more(out: cute.Pointer, n: Int32, extra: Int32, *, m: cutlass.Constexpr):
    out.store(Float32(m))

@cute.kernel
def wordy(out: cute.Pointer, n: Int32, *, m: cutlass.Constexpr):
    raise ValueError("word " * 10000)

@cute.kernel
def wider(out: cute.Pointer, n: Int64, *, m: cutlass.Constexpr):
    (out + n).store(Float32(m))

@cute.kernel
def local(out: cute.Pointer, n: Int32, *, m: cutlass.Constexpr):
    values = cute.make_rmem_tensor((64,), Float32)
    for i in cutlass.range(64, unroll=1):
        values[i] = Float32(i * n)
    out.store(values[n])

@cute.kernel
def allowed_local(out: cute.Pointer, n: Int32, *, m: cutlass.Constexpr):
    values = cute.make_rmem_tensor((64,), Float32)
    for i in cutlass.range(64, unroll=1):
        values[i] = Float32(i * n)
    out.store(values[n])

@cute.kernel
def costly(out: cute.Pointer, n: Int32, *, m: cutlass.Constexpr):
    (out + n).store(Float32(m))

@cute.kernel
def shared(out: cute.Pointer, n: Int32, *, m: cutlass.Constexpr):
    values = cute.arch.alloc_smem(Float32, 256)
    (values + n).store(Float32(m))
    cute.arch.sync_threads()
    out.store((values + n + 1).load())

def no_kernel(out, n, *, m):
    pass
"""
SPECS = """
    spec("good"), spec("raises"), spec("undefined"), spec("fewer"), spec("more"), spec("wider"),
    spec("local"), spec("allowed_local", budget=Budget(spills=9999, stack_bytes=9999)),
    spec("costly", budget=Budget(registers=1)), spec("wordy"), spec("shared"),
    spec("no_kernel"), spec("absent"), spec("exits", "{package}.exits"),
    spec("killed", "{package}.killed"), spec("observes", "{package}.observes"),
"""
# Leaves a note of what a kernel's module finds around it.
OBSERVES = """
import json, os, sys
from .device import cutlass, cute, Int32, Float32
print("noise on standard output")
note = {"environ": dict(os.environ), "torch": "torch" in sys.modules, "cwd": os.listdir()}
note["stdin"] = sys.stdin.read()
with open(os.environ["NOTE"], "w") as file:
    json.dump(note, file)

@cute.kernel
def observes(out: cute.Pointer, n: Int32, *, m: cutlass.Constexpr):
    (out + n).store(Float32(m))
"""
GOOD = {"good", "allowed_local", "shared", "observes"}


@dataclasses.dataclass
class Outcome:
    toys: Toys
    result: subprocess.CompletedProcess[str]
    note: dict[str, Any]

    def failure(self, kernel: str) -> str:
        """The one line about a kernel."""
        lines = [line.removeprefix("sonata-aot: ") for line in self.result.stderr.splitlines()]
        (line,) = (line for line in lines if line.startswith(f"{kernel}[m=1] sm86: "))
        return line

    def log(self, kernel: str) -> str:
        """The whole output that the line points to."""
        found = re.search(r"\(whole output: (.*?\.txt)\)", self.failure(kernel))
        assert found, self.failure(kernel)
        return Path(found[1]).read_text()


@pytest.fixture(scope="module")
def outcome(make_toys: Callable[[], Toys]) -> Outcome:
    """A build of all these kernels at once, where torch cannot be imported."""
    toys = make_toys()
    toys.write(
        SPECS.replace("{package}", toys.package),
        DEVICE,
        exits="import os\nos._exit(7)\n",
        killed="import os, signal\nos.kill(os.getpid(), signal.SIGKILL)\n",
        observes=OBSERVES,
    )
    (toys.root / "torch.py").write_text("raise ImportError('no torch here')\n")
    note = toys.root / "note.json"
    toys.environ = {
        "NOTE": str(note),
        "CUDA_VISIBLE_DEVICES": "0",
        "CUTE_DSL_LINEINFO": "1",
        "CUTE_DSL_CACHE_DIR": str(toys.root),
    }
    result = toys.build("--jobs=2", "--timeout=100")
    return Outcome(toys, result, json.loads(note.read_text()))


class TestManyKernels:
    def test_exits_1_without_a_table_or_traceback(self, outcome: Outcome) -> None:
        assert (outcome.result.returncode, outcome.result.stdout) == (1, "")
        assert "Traceback" not in outcome.result.stderr
        assert not list((outcome.toys.cache / "artifacts").iterdir())

    def test_the_good_ones_are_in_the_cache(self, outcome: Outcome) -> None:
        cache = Cache(outcome.toys.cache)
        found = [cache.find(folder.name) for folder in (cache.root / "compiled").iterdir()]
        assert {entry.binary.kernel for entry in found if entry} == GOOD
        assert outcome.toys.scratch == []

    def test_progress_counts_what_was_done(self, outcome: Outcome) -> None:
        steps = re.findall(
            r"^\[(\d+)/16\] compiled in \d+\.\d s: (\w+)\[m=1\] sm86$", outcome.result.stderr, re.M
        )
        assert [int(number) for number, _ in steps] == [1, 2, 3, 4]
        assert {name for _, name in steps} == GOOD

    @pytest.mark.parametrize("kernel", ["raises", "undefined"])
    def test_a_python_error_shows_its_line(self, outcome: Outcome, kernel: str) -> None:
        lines = outcome.toys.device.read_text().splitlines()
        number = next(n for n, line in enumerate(lines, 1) if line.endswith(f"HERE: {kernel}"))
        assert f"{outcome.toys.device}:{number}" in outcome.failure(kernel)
        printed = outcome.result.stderr.splitlines()
        at = next(n for n, line in enumerate(printed) if outcome.failure(kernel) in line)
        assert printed[at + 1] == f"    {lines[number - 1].strip()}"
        assert "Traceback" in outcome.log(kernel)

    def test_an_error_is_short_and_its_log_is_not(self, outcome: Outcome) -> None:
        failed = [line for line in outcome.result.stderr.splitlines() if "] failed: " in line]
        assert len(failed) == 16 - len(GOOD)
        assert len(outcome.result.stderr.splitlines()) <= len(GOOD) + 3 * len(failed)
        assert all(len(line) < 500 for line in outcome.result.stderr.splitlines())
        assert len(outcome.log("undefined").splitlines()) > 10
        assert "word word..." in outcome.failure("wordy")
        assert outcome.log("wordy").count("word ") >= 10000

    def test_only_the_first_line_of_an_error_is_shown(self, outcome: Outcome) -> None:
        assert "no such layout" in outcome.failure("raises")
        assert "and more" not in outcome.result.stderr
        assert "and more" in outcome.log("raises")

    @pytest.mark.parametrize(("kernel", "has"), [("fewer", "out;"), ("more", "out, n, extra;")])
    def test_another_number_of_parameters(self, outcome: Outcome, kernel: str, has: str) -> None:
        assert f"has the parameters {has} declared are out, n" in outcome.failure(kernel)

    def test_a_parameter_of_another_size(self, outcome: Outcome) -> None:
        message = outcome.failure("wider")
        assert "parameter 'n' is a Int64, and declared as a i32" in message

    @pytest.mark.parametrize(
        ("kernel", "reason"), [("no_kernel", "is no @cute.kernel"), ("absent", "does not exist")]
    )
    def test_a_device_that_is_no_kernel(self, outcome: Outcome, kernel: str, reason: str) -> None:
        assert f"device:{kernel} {reason}" in outcome.failure(kernel)

    def test_local_memory_breaks_the_budget(self, outcome: Outcome) -> None:
        assert re.search(r"spills is [1-9]\d*, over the budget of 0", outcome.failure("local"))
        assert re.search(r"stack_bytes is \d{3}, over the budget of 0", outcome.failure("local"))

    def test_registers_break_the_budget(self, outcome: Outcome) -> None:
        message = outcome.failure("costly")
        assert re.search(r"registers is \d+, over the budget of 1$", message.partition(";")[0])

    @pytest.mark.parametrize(
        ("kernel", "reason"), [("exits", "exit status 7"), ("killed", "signal 9")]
    )
    def test_a_worker_that_dies(self, outcome: Outcome, kernel: str, reason: str) -> None:
        assert f"the compile worker died ({reason})" in outcome.failure(kernel)

    def test_workers_see_no_setting_no_gpu_and_no_torch(self, outcome: Outcome) -> None:
        environ = outcome.note["environ"]
        assert environ["CUDA_VISIBLE_DEVICES"] == ""
        assert "CUTE_DSL_LINEINFO" not in environ
        assert environ.get("CUTE_DSL_CACHE_DIR") != str(outcome.toys.root)
        assert outcome.note["torch"] is False
        assert outcome.note["stdin"] == ""  # neither a task of another nor a wait for one
        assert [name for name in outcome.note["cwd"] if not name.endswith((".cubin", ".ptx"))] == []

    def test_the_next_build_compiles_only_what_is_new(self, outcome: Outcome) -> None:
        chosen = [f"--kernel={name}" for name in sorted(GOOD)]
        result = outcome.toys.build(*chosen, "--json")
        assert result.returncode == 0, result.stderr
        assert json.loads(result.stdout)["compiled"] == []
        directory = outcome.toys.cache / "artifacts"
        assert all(isinstance(item, Passed) for item in verify(directory))
        binaries = {b.kernel: b for b in open_artifacts(directory).manifest.binaries}
        assert binaries["allowed_local"].spills > 0
        assert binaries["allowed_local"].stack_bytes >= 256
        assert (binaries["good"].spills, binaries["good"].static_shared_bytes) == (0, 0)
        assert binaries["shared"].static_shared_bytes == 1024


class TestMeasure:
    """What a good compile of gemv for sm86 is held against, one lie at a time."""

    @pytest.fixture
    def job(self, warm_cache: Path) -> Job:
        spec = builtin()["gemv"]
        return Job(spec, spec.variants[0], Arch(8, 6))

    @pytest.fixture
    def entry(self, job: Job, warm_cache: Path) -> Entry:
        entry = Cache(warm_cache).find(job.key)
        assert entry is not None
        return entry

    @pytest.fixture
    def check(self, entry: Entry, tmp_path: Path) -> Callable[..., Entry]:
        def check(job: Job, cubin: bytes | None = None, ptx: bytes | None = None) -> Entry:
            files = tmp_path / "a.cubin", tmp_path / "a.ptx"
            files[0].write_bytes(entry.cubin if cubin is None else cubin)
            files[1].write_bytes(entry.ptx if ptx is None else ptx)
            return measure(job, *files)

        return check

    def altered(self, job: Job, **changes: Any) -> Job:
        declaration = dataclasses.replace(job.spec.declaration, **changes)
        return Job(dataclasses.replace(job.spec, declaration=declaration), job.variant, job.arch)

    def test_the_truth(self, check: Callable[..., Entry], job: Job, entry: Entry) -> None:
        assert check(job) == entry

    def test_another_arch(self, check: Callable[..., Entry], job: Job) -> None:
        with pytest.raises(BuildError, match="machine code is for sm86, not sm89"):
            check(dataclasses.replace(job, arch=Arch(8, 9)))

    def test_another_block(self, check: Callable[..., Entry], job: Job) -> None:
        with pytest.raises(BuildError, match=r"block .* is not the declared \(32, 2, 1\)"):
            check(self.altered(job, block=("32", "2", "1")))

    def test_another_variant(self, check: Callable[..., Entry], job: Job) -> None:
        other = job.spec.variants[-1]
        assert other != job.variant
        with pytest.raises(BuildError):
            check(dataclasses.replace(job, variant=other))

    @pytest.mark.parametrize("order", ["one fewer", "rotated"])
    def test_other_parameters(self, check: Callable[..., Entry], job: Job, order: str) -> None:
        first, *others = job.spec.declaration.parameters
        parameters = (*others, first) if order == "rotated" else tuple(others)
        with pytest.raises(BuildError, match="parameter table"):
            check(self.altered(job, parameters=parameters, grid=("1", "1", "1")))

    def test_too_much_shared_memory(self, check: Callable[..., Entry], job: Job) -> None:
        with pytest.raises(BuildError, match="101377 bytes of shared memory do not fit sm86"):
            check(self.altered(job, shared_bytes=str(99 * 1024 + 1)))

    def test_a_smaller_budget(self, check: Callable[..., Entry], job: Job) -> None:
        with pytest.raises(BuildError, match=r"registers is .* over the budget of 20"):
            check(self.altered(job, budget=Budget(registers=20)))

    @pytest.mark.parametrize(
        "replaced", [(b".version", b".vershon"), (b"sm_86", b"sm_90"), (b".entry", b".antry")]
    )
    def test_other_ptx(
        self, check: Callable[..., Entry], job: Job, entry: Entry, replaced: tuple[bytes, bytes]
    ) -> None:
        with pytest.raises(BuildError, match="PTX"):
            check(job, ptx=entry.ptx.replace(*replaced))

    @pytest.mark.parametrize("count", [0, 2])
    def test_another_number_of_entries(
        self, check: Callable[..., Entry], job: Job, monkeypatch: pytest.MonkeyPatch, count: int
    ) -> None:
        def read(data: bytes) -> Cubin:
            code = read_cubin(data)
            return dataclasses.replace(code, kernels=code.kernels * count)

        monkeypatch.setattr(build, "read_cubin", read)
        with pytest.raises(BuildError, match=f"^{count} entries"):
            check(job)

    @pytest.mark.parametrize("cubin", [b"", b"\x7fELF", b"x" * 10_000])
    def test_no_cubin_at_all(self, check: Callable[..., Entry], job: Job, cubin: bytes) -> None:
        with pytest.raises(SonataError):
            check(job, cubin=cubin)


@pytest.mark.parametrize("name", ["registers", "spills", "stack_bytes"])
def test_a_budget_is_the_most_that_is_allowed(built: Path, name: str) -> None:
    binary = dataclasses.replace(
        open_artifacts(built).manifest.binaries[0], registers=10, spills=10, stack_bytes=10
    )
    enough = Budget(registers=10, spills=10, stack_bytes=10)
    assert over_budget(binary, enough) == []
    assert over_budget(binary, dataclasses.replace(enough, **{name: 9})) == [
        f"{name} is 10, over the budget of 9"
    ]


@pytest.mark.parametrize(
    ("requested", "variable", "tasks", "expected"),
    [
        (3, "", 9, 3),
        (3, "5", 9, 3),
        (None, "5", 9, 5),
        (None, "5", 2, 2),
        (8, "", 3, 3),
        (None, "", 99, len(os.sched_getaffinity(0))),
    ],
)
def test_how_many_workers(
    monkeypatch: pytest.MonkeyPatch,
    requested: int | None,
    variable: str,
    tasks: int,
    expected: int,
) -> None:
    monkeypatch.setenv("MAX_JOBS", variable)
    assert build._worker_count(requested, tasks) == expected


def test_the_environment_of_a_worker() -> None:
    given = {
        "PATH": "/bin",
        "CUTE_DSL_LINEINFO": "1",
        "CUTE_DSL_ARCH": "sm_90",
        "CUDA_HOME": "/x",
        "CUDA_VISIBLE_DEVICES": "3",
        "CUTE_DSL_NO_CACHE": "0",
        "CUTE_DSL_CACHE_DIR": "/mine",
    }
    before = dict(given)
    clean = environment_for_worker(given, "/scratch")
    assert given == before
    assert clean == {
        "PATH": "/bin",
        "CUDA_HOME": "/x",
        "CUDA_VISIBLE_DEVICES": "",
        "CUTE_DSL_NO_CACHE": "1",
        "CUTE_DSL_CACHE_DIR": "/scratch",
        "CUTE_DSL_DUMP_DIR": ".",
    }
