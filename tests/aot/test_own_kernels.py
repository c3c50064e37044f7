"""Kernels of other packages: how they are found, and what is refused of them and why."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import small_spec

from sonata_aot.aot.build import _task
from sonata_aot.aot.plan import Job, choose_kernels, jobs, known_kernels, left_out
from sonata_aot.aot.sass import disassembly, parse, spills
from sonata_aot.artifacts import Arch, Binary, Declaration, Parameter, open_artifacts
from sonata_aot.artifacts.errors import BuildError, SonataError, UsageError
from sonata_aot.artifacts.verify import check_ptx
from sonata_aot.kernels import KernelSpec, builtin, product

if TYPE_CHECKING:
    from tests.aot.conftest import Cli, Invoke, Toys

    Package = Callable[[dict[str, str]], Path]

SPEC = small_spec.SPEC.replace("{device}", "{name}_device:good")
OWN = SPEC.format(name="own")


def names(*modules: str) -> list[str]:
    return list(known_kernels(modules))


class TestFinding:
    def test_a_module_that_is_named(self, package: Package) -> None:
        package({"own_a.py": SPEC.format(name="own_a"), "own_b.py": SPEC.format(name="own_b")})
        assert names("own_b", "own_a", "own_a") == ["own_a", "own_b"]
        assert names("own_a", "sonata_aot.kernels") == sorted([*builtin(), "own_a"])
        assert [spec.name for spec in choose_kernels(["own_b"], ["own_a", "own_b"])] == ["own_b"]
        assert "own_a" not in names()
        with pytest.raises(UsageError, match=r"'gemv'.*own_a"):
            choose_kernels(["gemv"], ["own_a"])

    def test_in_the_current_directory(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        (tmp_path / "own_here.py").write_text(SPEC.format(name="own_here"))
        monkeypatch.setattr(sys, "path", [*sys.path])
        with pytest.raises(UsageError, match="no module 'own_here'"):
            names("own_here")
        monkeypatch.chdir(tmp_path)
        assert names("own_here") == ["own_here"]
        assert sys.path[-1] == str(tmp_path)

    @pytest.mark.parametrize(
        ("text", "error", "words"),
        [
            ("", BuildError, ["has no SPECS"]),
            ("SPECS = 'own'", BuildError, ["has no SPECS"]),
            ("SPECS = {}", BuildError, ["has no SPECS"]),
            ("SPECS = [1]", BuildError, ["has a int in SPECS"]),
            ("import own_missing", BuildError, ["own_missing", "own.py:1"]),
            ("\n1 / 0", BuildError, ["ZeroDivisionError", "own.py:2"]),
            ("def", BuildError, ["SyntaxError"]),
            (SPEC.format(name="gemv"), BuildError, ["'gemv' is a kernel of sonata-aot itself"]),
            (SPEC.format(name="Own"), SonataError, ["Own"]),
            (SPEC.replace('"1", "1"),\n        ', '"k", "1"),\n        ').format(name="own"), *(
                SonataError,
                ["'k'", "own"],
            )),
            ("\nimport sys\nsys.exit()", BuildError, ["SystemExit (", "own.py:3"]),
            ("def specs():\n    yield 1 / 0\nSPECS = specs()", BuildError, ["own.py:2"]),
            ("a = 1\nb = (", BuildError, ["SyntaxError: '(' was never closed", "own.py:2)"]),
            ("raise ValueError('x' * 9999)", BuildError, ["ValueError: x", "own.py:1"]),
            (OWN.replace("m=[1]", "m=[1.5]"), BuildError, ["expected str or int, found 1.5"]),
            (OWN.replace("m=[1]", "m=[-1]"), BuildError, ["variant.m", "correct the declaration"]),
            (OWN.replace('"own_device:good"', "None"), BuildError, ["own: own: device is None"]),
            (OWN.replace("_device:good", "_device"), BuildError, ["device is 'own_device'"]),
            (OWN.replace("own_device", ".device"), BuildError, ["device is '.device:good'"]),
            (OWN.replace("_device:good", "_device:a.b"), BuildError, ["'own_device:a.b'"]),
            (OWN.replace('("64", "1", "1")', "(64, 1, 1)"), BuildError, ["TypeError", "own.py:6"]),
        ],
    )  # fmt: skip
    def test_a_module_that_is_none(
        self, package: Package, text: str, error: type[SonataError], words: list[str]
    ) -> None:
        package({"own.py": text})
        sys.modules.pop("own", None)
        with pytest.raises(error) as caught:
            names("own")
        for word in words:
            assert word in str(caught.value)
        assert len(str(caught.value)) < 600

    @pytest.mark.parametrize("name", ["", ".", ".own", "own/kernels.py"])
    def test_what_is_no_name_of_a_module(self, name: str) -> None:
        with pytest.raises(UsageError, match="is no name of a module"):
            names(name)

    def test_what_a_module_prints_is_no_result(self, cli: Cli, tmp_path: Path) -> None:
        (tmp_path / "own_loud.py").write_text("print('loud')\n" + SPEC.format(name="own_loud"))
        (tmp_path / "own_loud_device.py").write_text("")
        result = cli("plan", "--arch=sm86", "--from=own_loud", "--json", cwd=tmp_path)
        assert (result.returncode, result.stderr) == (0, "loud\n")
        assert [item["kernel"] for item in json.loads(result.stdout)["binaries"]] == ["own_loud"]

    def test_two_of_one_name(self, package: Package) -> None:
        package({"own_c.py": SPEC.format(name="own"), "own_d.py": SPEC.format(name="own")})
        with pytest.raises(BuildError, match="two kernels have the name 'own'"):
            names("own_c", "own_d")

    @pytest.mark.parametrize(
        "text", [SPEC.format(name="own_e"), "1 / 0", "import sys\nsys.exit(3)", SPEC]
    )
    def test_an_installed_package(self, package: Package, text: str) -> None:
        root = package({"own_e.py": text})
        sys.modules.pop("own_e", None)
        metadata = root / "own_e-1.dist-info"
        metadata.mkdir()
        (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: own-e\nVersion: 1\n")
        (metadata / "entry_points.txt").write_text("[sonata_aot.kernels]\nmine = own_e\n")
        if '"own_e"' in text:
            assert names() == sorted([*builtin(), "own_e"])
            return
        with pytest.raises(BuildError, match=r"package own-e: .*--from sonata_aot\.kernels"):
            names()
        assert names("sonata_aot.kernels") == sorted(builtin())

    def test_a_missing_module_is_a_usage_error(self, cli: Cli) -> None:
        result = cli("build", "--arch=sm86", "--from", "no.such.module")
        assert (result.returncode, result.stdout) == (2, "")
        assert "'no.such.module'" in result.stderr


SHARED = Declaration(
    name="own",
    parameters=(Parameter("out", "pointer", element="f32", align=4), Parameter("n", "i32")),
    choices=("kb", "warps"),
    selectors=("kb",),
    block=("32 * warps", "1", "1"),
    grid=("n", "1", "1"),
    shared_bytes="1024 * kb",
)


LOCAL = """
@cute.kernel
def local(out: cute.Pointer, n: Int32, *, m: cutlass.Constexpr):
    values = cute.make_rmem_tensor((64,), Float32)
    for i in cutlass.range(64, unroll=1):
        values[i] = Float32(i * n)
    out.store(values[n])
"""


class TestWhatIsLeftOut:
    archs = tuple(Arch.parse(n) for n in ("sm80", "sm86", "sm87", "sm89", "sm90", "sm100", "sm120"))

    def test_what_does_not_fit_an_architecture(self) -> None:
        spec = KernelSpec(SHARED, product(kb=[99, 100, 163, 227, 228], warps=[2]), "own:own")
        fits = {"sm80": 163, "sm86": 99, "sm87": 163, "sm89": 99, "sm90": 227, "sm100": 227}
        fits["sm120"] = 99
        built = [(job.arch.name, job.variant["kb"]) for job in jobs([spec], self.archs)]
        assert built == [
            (arch, kb) for arch in fits for kb in (99, 100, 163, 227, 228) if kb <= fits[arch]
        ]
        reasons = {
            (job.arch.name, job.variant["kb"]): reason
            for job, reason in left_out([spec], self.archs)
        }
        assert len(reasons) + len(built) == 5 * len(self.archs)
        assert reasons["sm86", 100] == ("102400 bytes of shared memory, of 101376 that a block has")

    def test_a_build_for_every_architecture_says_so(self, toys: Toys) -> None:
        toys.write('spec("good", shared_bytes="1024 * 200 * (m - 1)", grid=("m", "1", "1"))')
        specs = toys.root / toys.package / "specs.py"
        specs.write_text(specs.read_text().replace("m=[1]", "m=[1, 2]"))
        every = [f"--arch={arch}" for arch in self.archs]
        result = toys.build(*every)
        assert result.returncode == 0, result.stderr
        built = open_artifacts(toys.cache / "artifacts").manifest.binaries
        large = ("sm90", "sm100")
        assert [(b.arch, b.variant["m"]) for b in built] == [
            (arch.name, m) for arch in self.archs for m in (1, 2) if m == 1 or arch.name in large
        ]
        left = [line for line in result.stdout.splitlines() if line.startswith("left out of ")]
        assert left == [
            f"left out of {arch}: 1 of good (204800 bytes of shared memory, of "
            f"{arch.dynamic_shared_bytes} that a block has)"
            for arch in self.archs
            if arch.name not in large
        ]
        printed = json.loads(toys.build(*every, "--json").stdout)
        assert [
            (item["kernel"], item["variant"], item["arch"]) for item in printed["left_out"]
        ] == [("good", {"m": 2}, arch.name) for arch in self.archs if arch.name not in large]
        only = toys.build("--dry-run", *every).stdout
        assert [line for line in only.splitlines() if line.startswith("left out of ")] == left

    def test_spills_are_counted_on_every_architecture(self, toys: Toys) -> None:
        """As the disassembler shows them, which a build does without."""
        toys.write('spec("local", budget=Budget(spills=99, stack_bytes=4096))', LOCAL)
        names = [*(arch.name for arch in self.archs), "sm90a", "sm100f"]
        result = toys.build(*[f"--arch={name}" for name in names])
        assert result.returncode == 0, result.stderr
        artifacts = open_artifacts(toys.cache / "artifacts")
        assert sorted(binary.arch for binary in artifacts.manifest.binaries) == sorted(names)
        for binary in artifacts.manifest.binaries:
            shown = spills(parse(disassembly(artifacts.path(binary.cubin))))
            assert binary.spills == shown > 0, binary.arch

    def test_variants_that_no_call_could_tell_apart(self, package: Package) -> None:
        text = SPEC.replace('("m",),\n            selectors', '("m", "k"),\n            selectors')
        text = text.replace("product(m=[1])", "product(m=[1], k=[2, 4])")
        package({"own_h.py": text.format(name="own_h")})
        with pytest.raises(BuildError, match="own_h: m=1,k=4 and m=1,k=2 differ in no selector"):
            names("own_h")
        # Those of different architectures are none.
        apart = text.replace("grid=", 'min_sm="82 + 4 * (k - 2)", grid=')
        apart = apart.replace('device:good",', 'device:good", max_sm="86 + 10 * (k - 2)",')
        package({"own_i.py": apart.format(name="own_i")})
        (spec,) = known_kernels(["own_i"]).values()
        assert [(job.arch.name, job.variant["k"]) for job in jobs([spec], self.archs)] == [
            *(("sm86", 2), ("sm90", 4), ("sm100", 4)),
        ]


# By function: its source, and words of the refusal.
FUNCTIONS = {
    "launcher": (
        "@cute.jit\ndef launcher(out: cute.Pointer, n: Int32): pass",
        *("is a @cute.jit launcher", "@cute.kernel that it launches"),
    ),
    "plain": ("def plain(out, n): pass", "is no @cute.kernel"),
    "absent": ("", "own_device:absent does not exist"),
    "tensor": (
        "@cute.kernel\ndef tensor(out: cute.Tensor, n: Int32, *, m: cutlass.Constexpr): pass",
        *("parameter 'out' is a Tensor", "cute.Pointer", "cute.make_tensor"),
    ),
    "atom": (
        "@cute.kernel\ndef atom(out: cute.CopyAtom, n: Int32, *, m: cutlass.Constexpr): pass",
        "parameter 'out' is a CopyAtom",
    ),
    "wide": (
        "@cute.kernel\ndef wide(out: cute.Pointer, n: Int64, *, m: cutlass.Constexpr): pass",
        "parameter 'n' is a Int64, and declared as a i32",
    ),
    "swapped": (
        "@cute.kernel\ndef swapped(n: Int32, out: cute.Pointer, *, m: cutlass.Constexpr): pass",
        "has the parameters n, out; declared are out, n",
    ),
    "without": ("@cute.kernel\ndef without(out: cute.Pointer, n: Int32): pass", "'m'", "choice"),
    "unknown": (
        "@cute.kernel\ndef unknown(out: cute.Pointer, n: Int32, *, m: cutlass.Constexpr, "
        "k: cutlass.Constexpr[int]): pass",
        "Constexpr 'k' is none of the declared choices",
    ),
    "text": (
        "@cute.kernel\ndef text(out: 'cute.Pointer', n: Int32, *, m: cutlass.Constexpr): pass",
        "annotations that are text",
    ),
    "right": (
        "@cute.kernel\ndef right(out: cute.Pointer, n, *, m: cutlass.Constexpr, "
        "more: cutlass.Constexpr = 3): pass",
    ),
}


def test_what_cannot_be_compiled_ahead_of_time_is_refused(package: Package) -> None:
    """In one process: it loads the compiler."""
    imports = "import cutlass\nfrom cutlass import Int32, Int64, cute\n"
    source = imports + "\n".join(source for source, *_ in FUNCTIONS.values())
    folder = package({"own_device.py": source})
    declaration = Declaration(
        name="own",
        parameters=(Parameter("out", "pointer", element="f32", align=4), Parameter("n", "i32")),
        choices=("m",),
        selectors=("m",),
        block=("64", "1", "1"),
        grid=("1", "1", "1"),
    )
    tasks = {}
    for name in FUNCTIONS:
        spec = KernelSpec(declaration, product(m=[1]), f"own_device:{name}")
        tasks[name] = _task(Job(spec, spec.variants[0], Arch.parse("sm86")))
    # Ours pass, of every kernel.
    ours = [Job(spec, spec.variants[0], Arch.parse("sm90")) for spec in builtin().values()]
    tasks |= {job.spec.name: _task(job) for job in ours}
    program = (
        "import json, sys\n"
        "from sonata_aot.aot.device_check import check_task\n"
        "answers = {}\n"
        "for name, task in json.load(sys.stdin).items():\n"
        "    try:\n"
        "        answers[name] = check_task(task)\n"
        "    except TypeError as error:\n"
        "        answers[name] = str(error)\n"
        "print(json.dumps(answers))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        input=json.dumps(tasks),
        cwd=folder,
        capture_output=True,
        text=True,
        check=True,
    )
    answers = json.loads(done.stdout)
    for name, (_, *words) in FUNCTIONS.items():
        for word in words:
            assert word in (answers[name] or ""), (name, answers[name])
    accepted = [name for name, answer in answers.items() if answer is None]
    assert accepted == ["right", *builtin()]


def test_the_message_of_a_build(toys: Toys) -> None:
    launcher = FUNCTIONS["launcher"][0]
    toys.write('spec("launcher"), spec("good")', launcher)
    result = toys.build()
    assert result.returncode == 1
    assert f"launcher[m=1] sm86: {toys.package}.device:launcher is a @cute.jit" in result.stderr
    assert "Traceback" not in result.stderr


@pytest.mark.parametrize(
    "line",
    [
        "\tbarrier.cluster.arrive.aligned;",
        "\tmapa.shared::cluster.u32 %r1, %r2, %r3;",
        "\tmov.u32 %r1, %cluster_ctarank;",
        ".reqnctapercluster 2, 1, 1",
        "\tcp.async.bulk.shared::cluster.global.multicast::cluster [%r1], [%rd1], 16, [%r2], %rs1;",
    ],
)
def test_code_for_clusters_is_refused(line: str, built: Path) -> None:
    artifacts = open_artifacts(built)
    binary: Binary = artifacts.manifest.binaries[0]
    ptx = artifacts.read(binary.ptx)
    assert check_ptx(binary, ptx) == []
    (problem,) = check_ptx(binary, ptx.replace(b"\tret;", line.encode() + b"\n\tret;", 1))
    assert "clusters of blocks" in problem


def test_the_kernels_of_a_module_are_completed(cli: Cli, tmp_path: Path) -> None:
    (tmp_path / "own_f.py").write_text(SPEC.format(name="own_f"))
    words = "sonata-aot build --from own_f --kernel own"
    result = cli(
        _SONATA_AOT_COMPLETE="bash_complete",
        COMP_WORDS=words,
        COMP_CWORD=str(len(words.split()) - 1),
        cwd=tmp_path,
    )
    assert "own_f" in result.stdout


def test_json_of_the_errors_is_one_line(invoke: Invoke, package: Package) -> None:
    package({"own_g.py": "SPECS = [1]"})
    result = invoke("build", "--arch=sm86", "--from=own_g", "--json")
    assert (result.exit_code, result.stdout) == (1, "")
    assert len(result.stderr.splitlines()) == 1
