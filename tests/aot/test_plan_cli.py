"""`sonata-aot plan` and `build --dry-run`: what would be done, and why."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from sonata_aot.aot import plan
from sonata_aot.aot.cache import INPUTS, RECORD, Cache
from sonata_aot.aot.explain import explain
from sonata_aot.artifacts import open_artifacts

if TYPE_CHECKING:
    from tests.aot.conftest import Invoke, Toys

TWO = 'spec("good"), spec("other")'
OTHER = """
from .helper import VALUE

@cute.kernel
def other(out: cute.Pointer, n: Int32, *, m: cutlass.Constexpr):
    out.store(Float32(m + VALUE))
"""


def dry(toys: Toys, *arguments: str) -> dict[str, Any]:
    result = toys.build("--dry-run", "--json", *arguments)
    assert (result.returncode, result.stderr) == (0, "")
    return json.loads(result.stdout)


def states(toys: Toys, *arguments: str) -> dict[str, tuple[str, list[str]]]:
    binaries = dry(toys, *arguments)["binaries"]
    return {f"{b['kernel']} {b['arch']}": (b["state"], b["why"]) for b in binaries}


def test_what_a_build_would_do_and_why(toys: Toys) -> None:
    package = toys.package
    toys.write(TWO, OTHER, helper="VALUE = 1\n")
    assert states(toys) == {"good sm86": ("new", []), "other sm86": ("new", [])}
    assert not toys.cache.exists()

    assert toys.build().returncode == 0
    before = sorted(path for path in toys.cache.rglob("*"))
    planned = dry(toys)
    assert {b["state"] for b in planned["binaries"]} == {"cached"}
    assert (planned["added"], planned["removed"]) == ([], [])

    toys.write(TWO, OTHER, helper="VALUE = 2\n")
    helper = f"source {package}.helper"
    assert states(toys) == {"good sm86": ("changed", [helper]), "other sm86": ("changed", [helper])}
    text = toys.build("--dry-run").stdout
    assert helper in text
    assert "2 binaries: 0 cached, 0 new, 2 changed" in text

    # One of the two, declared otherwise; nothing else has changed.
    toys.write('spec("good", grid=("n", "1", "1")), spec("other")', OTHER, helper="VALUE = 1\n")
    assert states(toys) == {
        "good sm86": ("changed", ["declaration: grid"]),
        "other sm86": ("cached", []),
    }

    toys.write(TWO, OTHER + "\nfrom . import more\n", helper="VALUE = 1\n", more="")
    wanted = ["source {0}.device", "source {0}.more (new)"]
    assert states(toys)["other sm86"] == ("changed", [text.format(package) for text in wanted])

    toys.write('spec("good")', OTHER, helper="VALUE = 1\n")
    planned = dry(toys, "--arch=sm90")
    assert {(b["arch"], b["state"]) for b in planned["binaries"]} == {
        ("sm86", "cached"),
        ("sm90", "new"),
    }
    assert planned["added"] == ["good[m=1] sm90"]
    assert planned["removed"] == ["other[m=1] sm86"]
    shown = toys.build("--dry-run", "--arch=sm90").stdout
    assert f"would remove in {toys.cache / 'artifacts'}: other[m=1] sm86" in shown

    # An entry of a version that did not say what it was made from.
    for path in toys.cache.glob(f"compiled/*/{INPUTS}"):
        path.unlink()
    toys.write(TWO, OTHER, helper="VALUE = 3\n")
    state, why = states(toys)["good sm86"]
    assert (state, len(why)) == ("changed", 1)
    assert why[0].startswith("unknown")
    assert [path for path in before if not path.exists() and path.name != INPUTS] == []


def test_the_inputs_that_are_no_source(
    invoke: Invoke, own_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def why() -> set[str]:
        result = invoke("plan", "--arch=sm86", "--kernel=ssd_pass", "--json")
        (binary,) = json.loads(result.stdout)["binaries"]
        return set(binary["why"])

    # The record of the shared cache may be of a version without it.
    for folder in (own_cache / "compiled").iterdir():
        (folder / INPUTS).unlink(missing_ok=True)
    assert why() == set()
    result = invoke("plan", "--arch=sm86", "--kernel=ssd_pass", "--json")
    key = json.loads(result.stdout)["binaries"][0]["key"]
    (spec,) = plan.choose_kernels(["ssd_pass"])
    (job,) = plan.jobs([spec], plan.choose_archs(["sm86"]))
    assert job.key == key
    inputs = own_cache / "compiled" / key / INPUTS
    inputs.write_text(json.dumps(job.record()))
    versions = plan.compiler_versions()
    monkeypatch.setattr(plan, "_recipe", lambda: "0")
    monkeypatch.setattr(
        plan, "compiler_versions", lambda: {**versions, "nvidia-cutlass-dsl": "9.9"}
    )
    assert why() == {
        "how the compiler is called",
        f"nvidia-cutlass-dsl {versions['nvidia-cutlass-dsl']} -> 9.9",
    }


@pytest.mark.parametrize("last", range(4))
def test_what_was_used_last_is_compared(tmp_path: Path, last: int) -> None:
    """Of several that the cache has of a variant, whatever the order of their folders."""
    cache = Cache(tmp_path)
    (spec,) = plan.choose_kernels(["ssd_pass"])
    (job,) = plan.jobs([spec], plan.choose_archs(["sm86"]))
    binary = {"kernel": "ssd_pass", "variant": job.variant, "arch": "sm86"}
    for number in range(4):
        folder = cache.compiled / (str(number) * 64)
        folder.mkdir(parents=True, mode=0o700)
        (folder / RECORD).write_text(json.dumps({"binary": binary}))
        inputs = job.record() | {"recipe": ""} if number == last else {}
        (folder / INPUTS).write_text(json.dumps(inputs))
        used = 100 if number == last else number
        os.utime(folder, (used, used))
    (planned,) = explain([job], cache)
    assert (planned.state, planned.why) == ("changed", ("how the compiler is called",))


def test_sources_that_came_and_went(tmp_path: Path) -> None:
    cache = Cache(tmp_path)
    (spec,) = plan.choose_kernels(["ssd_pass"])
    (job,) = plan.jobs([spec], plan.choose_archs(["sm86"]))
    folder = cache.compiled / ("0" * 64)
    folder.mkdir(parents=True, mode=0o700)
    binary = {"kernel": "ssd_pass", "variant": job.variant, "arch": "sm86"}
    (folder / RECORD).write_text(json.dumps({"binary": binary}))
    record = job.record()
    (first, _), *others = record["sources"].items()
    sources = {**dict(others), "mine.helper": "0" * 64}
    (folder / INPUTS).write_text(json.dumps(record | {"sources": sources}))
    (planned,) = explain([job], cache)
    assert set(planned.why) == {f"source {first} (new)", "source mine.helper (gone)"}


def test_a_shard_adds_and_removes_nothing_of_a_set(
    invoke: Invoke, warm_cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SONATA_AOT_CACHE_DIR", str(warm_cache))
    chosen = ("--arch=sm86", "--kernel=gemv_any", "--out", tmp_path / "out")
    planned = json.loads(invoke("build", "--dry-run", "--shard=1/3", *chosen, "--json").stdout)
    assert (len(planned["binaries"]), planned["added"], planned["removed"]) == (6, [], [])
    assert len(json.loads(invoke("plan", *chosen, "--json").stdout)["added"]) == 16


def test_a_cache_that_others_can_write_is_not_believed(invoke: Invoke, own_cache: Path) -> None:
    (own_cache / "compiled").chmod(0o777)
    result = invoke("plan", "--arch=sm86", "--kernel=gemv_any")
    assert (result.exit_code, result.stdout) == (1, "")
    assert "is writable by everybody" in result.stderr


def test_plan_is_what_a_dry_run_says(
    invoke: Invoke, warm_cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SONATA_AOT_CACHE_DIR", str(warm_cache))
    chosen = ("--arch=sm86", "--kernel=gemv_any", "--out", tmp_path / "out")
    for more in ((), ("--json",), ("--quiet",)):
        planned = invoke("plan", *chosen, *more)
        assert planned.exit_code == 0, planned.stderr
        assert planned.stdout == invoke("build", "--dry-run", *chosen, *more).stdout
    assert not (tmp_path / "out").exists()
    assert "16 binaries: 16 cached, 0 new, 0 changed" in invoke("plan", *chosen).stdout
    assert "and 8 more" in invoke("plan", *chosen).stdout
    assert invoke("build", *chosen).exit_code == 0
    assert len(open_artifacts(tmp_path / "out").manifest.binaries) == 16
    shard = json.loads(invoke("build", "--dry-run", "--shard=1/2", *chosen, "--json").stdout)
    assert len(shard["binaries"]) == 8
    assert invoke("plan", "--arch=sm99").exit_code == 2
