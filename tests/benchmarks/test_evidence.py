"""The tie between GPU results and sources: it must hold for fresh results and break for stale."""

from __future__ import annotations

import itertools
import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from sonata_aot.aot.inspect import select
from sonata_aot.artifacts import first_match, open_artifacts

ROOT = Path(__file__).resolve().parents[2]

# Runs the check with the device code of `gemv_any` taken from another module.
CHANGED = """
import dataclasses, sys
from sonata_aot.aot import plan
from benchmarks import evidence
spec = plan.builtin()["gemv_any"]
ends = (spec.variants[0], spec.variants[-1])
spec = dataclasses.replace(spec, variants=ends, device="other_gemv:gemv_any")
plan.builtin = lambda: {"gemv_any": spec}
sys.argv = ["evidence", "--results", sys.argv[1]]
evidence.main()
"""


@pytest.fixture(scope="module")
def environment(
    tmp_path_factory: pytest.TempPathFactory,
    clean_environ: Callable[..., dict[str, str]],
    warm_cache: Path,
) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("evidence")
    shutil.copytree(warm_cache, folder / "cache")
    return clean_environ(SONATA_AOT_CACHE_DIR=str(folder / "cache"), PYTHONPATH=str(folder))


def run(*arguments: str | Path, environment: dict[str, str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *arguments], cwd=ROOT, env=environment, capture_output=True, text=True
    )


def check(results: Path, environment: dict[str, str], *more: str):
    return run(
        "-m", "benchmarks.evidence", "--results", results, *more, environment=environment
    )  # fmt: skip


def write_results(folder: Path, built: Path, launcher: str, *kernels: str) -> Path:
    """A results file as a GPU run of today's sources would leave it.

    It has a record for the first and the last variant of each kernel, for each arch and form.
    """
    records = []
    for name, arch in itertools.product(kernels, ("sm86", "sm90")):
        first, *_, last = select(open_artifacts(built).manifest.binaries, kernel=name, arch=arch)
        records += [
            {
                "case": f"variant={binary.variant_name}",
                "via": f"{arch}-{form}",
                "binaries": [payload.sha256],
                "launcher": launcher,
            }
            for binary in (first, last)
            for form, payload in (("cubin", binary.cubin), ("ptx", binary.ptx))
        ]
    file = folder / "results" / "some-gpu" / "gemv.json"
    file.parent.mkdir(parents=True)
    file.write_text(json.dumps({"records": records}))
    return folder / "results"


@pytest.fixture(scope="module")
def launcher(environment: dict[str, str]) -> str:
    """The digest of the launcher's sources."""
    script = "from benchmarks.results import launcher_digest as d; print(d())"
    return run("-c", script, environment=environment).stdout.strip()


@pytest.fixture
def results(built: Path, launcher: str, tmp_path: Path) -> Path:
    return write_results(tmp_path, built, launcher, "gemv", "gemv_any")


def edit(results: Path, **changes: Any) -> None:
    file = results / "some-gpu" / "gemv.json"
    content = json.loads(file.read_text())
    content["records"][0] |= changes
    file.write_text(json.dumps(content))


def test_results_of_todays_sources_are_fresh(results: Path, environment: dict[str, str]):
    done = check(results, environment)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "16 of 16 records are fresh" in done.stdout


def test_a_changed_kernel_makes_every_result_stale(
    built: Path, launcher: str, environment: dict[str, str], tmp_path: Path
):
    results = write_results(tmp_path, built, launcher, "gemv_any")
    source = (ROOT / "kernels" / "gemv" / "general.py").read_text()
    source = source.replace("from ..", "from sonata_aot.kernels.")
    source = source.replace("from .", "from sonata_aot.kernels.gemv.")
    other = Path(environment["PYTHONPATH"]) / "other_gemv.py"

    other.write_text(source)
    same = run("-c", CHANGED, results, environment=environment)
    assert same.returncode == 0, same.stdout + same.stderr  # moved, but the same machine code
    assert "8 of 8 records are fresh" in same.stdout

    assert source.count("sums.fill(0.0)") == 1
    other.write_text(source.replace("sums.fill(0.0)", "sums.fill(1.0)"))
    changed = run("-c", CHANGED, results, environment=environment)
    assert changed.returncode == 1, changed.stdout + changed.stderr
    assert changed.stdout.count("stale: ") == 8
    assert "0 of 8 records are fresh" in changed.stdout


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"binaries": ["0" * 64]}, "other bytes"),
        ({"binaries": []}, "names no binary"),
        ({"launcher": "0" * 64}, "launcher's sources"),
        ({"via": "sm86-cubin", "binaries": ["f" * 64]}, "other bytes"),
    ],
)
def test_one_stale_record_fails_and_is_named(
    results: Path, environment: dict[str, str], changes: dict[str, Any], reason: str
):
    edit(results, case="M=9", **changes)
    done = check(results, environment)
    assert done.returncode == 1
    assert "stale: some-gpu/gemv.json M=9" in done.stdout
    assert reason in done.stdout
    assert "15 of 16" in done.stdout
    assert check(results, environment, "--report").returncode == 0


def test_a_scan_against_two_opponents(
    built: Path, launcher: str, environment: dict[str, str], tmp_path: Path
):
    results = write_results(tmp_path, built, launcher, "ssd_prepare", "ssd_scan")
    file = results / "some-gpu" / "gemv.json"
    ran: dict[str, set[str]] = {}
    for record in json.loads(file.read_text())["records"]:
        ran.setdefault(record["via"], set()).update(record["binaries"])
    case = {"case": "b=2 l=64 h=64 p=64 n=128 g=1 dtype=bf16", "launcher": launcher}
    records = [
        {**case, "via": via, "opponent": opponent, "binaries": sorted(found)}
        for via, found in ran.items()
        for opponent in ("triton", "triton-fused-estimate")
    ]
    file.rename(file.with_name("ssd.json")).write_text(json.dumps({"records": records}))
    done = check(results, environment)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "8 of 8 records are fresh" in done.stdout
    for record in records[:2]:
        record["binaries"][-1] = "0" * 64
    (results / "some-gpu" / "ssd.json").write_text(json.dumps({"records": records}))
    done = check(results, environment)
    assert done.returncode == 1
    assert done.stdout.count(f"stale: some-gpu/ssd.json {case['case']} ({records[0]['via']})") == 1
    assert "6 of 8 records are fresh" in done.stdout


PICKED = [
    # Case, mode, and the shapes that it names.
    ("M=2 N=8512 K=2048 dtype=bf16", "bound", [(8512, 2048)]),
    ("M=3 N=4096 K=4096 dtype=f16 bias=1", "bound", [(4096, 4096)]),
    ("M=8 N=16384 K=2048 dtype=bf16", "plain", [(16384, 2048)]),
    ("M=2 N=2048 K=2048 dtype=bf16 mode=checked", None, [(2048, 2048)]),
    ("M=2 chain=34x(8512x2048,2048x4096) dtype=bf16", None, [(8512, 2048), (2048, 4096)]),
]


@pytest.mark.parametrize("via", ["sm86-ptx", "sm90-cubin"])
@pytest.mark.parametrize(("case", "mode", "shapes"), PICKED, ids=lambda value: str(value))
def test_a_record_of_what_the_rules_no_longer_pick_is_stale(
    built: Path,
    monkeypatch: pytest.MonkeyPatch,
    case: str,
    mode: str | None,
    shapes: list[tuple[int, int]],
    via: str,
):
    monkeypatch.syspath_prepend(ROOT)
    from benchmarks import evidence

    manifest = open_artifacts(built).manifest
    arch, form = via.split("-")
    m, dtype = {"2": 2, "3": 4, "8": 8}[case[2]], "f16" if "=f16" in case else "bf16"
    constant = int(arch == "sm90" and mode != "plain" and "mode=checked" not in case)
    ran: list[str] = []
    for n, k in shapes:
        rule = first_match(
            manifest.rules_for("gemv", arch), {"m": m, "constant": constant}, {"n": n, "k": k}
        )
        assert rule is not None
        variant = ",".join(f"{name}={v}" for name, v in {**rule.variant, "dtype": dtype}.items())
        (binary,) = select(manifest.binaries, kernel="gemv", arch=arch, variant=variant)
        ran.append(binary.payload("ptx" if form == "ptx" else "cubin").sha256)
    record = {"case": case, "via": via, "binaries": sorted(set(ran)), "launcher": "l"}
    record |= {} if mode is None else {"mode": mode}
    binaries = evidence.binaries_of(manifest)
    assert list(evidence.stale(record, binaries, "l", manifest)) == []
    (other, *_) = sorted(binaries[via] - set(ran))  # built, but not what the rules pick
    for now in ([other], [*ran[1:], other]):
        problems = list(evidence.stale({**record, "binaries": now}, binaries, "l", manifest))
        assert problems == ["the rules pick another binary now"]
    assert list(evidence.stale({**record, "case": "tool=memcheck"}, binaries, "l", manifest)) == []


def test_a_record_of_a_size_that_is_built_on_request_counts(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.syspath_prepend(ROOT)
    from benchmarks import evidence
    from sonata_aot.artifacts.declaration import variant_name
    from sonata_aot.kernels import builtin

    spec = builtin()["ssd_scan"]
    wanted = next(v for v in spec.variants if v not in (spec.shipped or ()))
    assert evidence.with_named(spec, {f"ssd_prepare {variant_name(wanted)}"}) == spec
    found = evidence.with_named(spec, {f"ssd_scan {variant_name(wanted)}"})
    assert found.shipped == (*(spec.shipped or ()), wanted)


def test_no_results_at_all_are_no_evidence(environment: dict[str, str], tmp_path: Path):
    assert check(tmp_path, environment).returncode == 1
    assert check(tmp_path, environment, "--report").returncode == 0
