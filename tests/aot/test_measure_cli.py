"""The measuring commands: what they refuse before they measure, and what they write."""

from __future__ import annotations

import json
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from measure_fakes import binary, variant
from sonata_aot.aot.measure import gemv as bench_gemv
from sonata_aot.aot.measure import gpu, render, tune
from sonata_aot.aot.measure.ceiling import Read, Way
from sonata_aot.aot.measure.gemv import Plan, Result
from sonata_aot.aot.measure.shapes import DEFAULT_SHAPES, Shape
from sonata_aot.aot.measure.table import Measurement
from sonata_aot.artifacts.errors import MissingDependency, VariantMissing

if TYPE_CHECKING:
    from tests.aot.conftest import Invoke

MACHINE = gpu.Machine("Paper 1", 132, 4900.0, 13000, "2.11")
COMMANDS = [["bench", "gemv"], ["bench", "ssd"], ["tune", "gemv", "--arch", "sm90"]]
READ = Read(Way(8, 4, 528, True), 8_000_000, 2.0)
PLAIN = [binary(variant(rows=rows), registers=64, arch="sm86") for rows in (4, 8)]


def record(**changes: Any) -> dict[str, Any]:
    return {
        "case": "M=1 N=2048 K=4096 dtype=bf16",
        "opponent": "cublas",
        "via": "sm90-cubin",
        "mode": "bound",
        "ours_us": 4.5,
        "opponent_us": 8.5,
        "read_us": 4.4,
        "error": 1e-3,
        "opponent_error": 1e-3,
        "bytes": 2**24,
        "binaries": ["0" * 64],
        "ceiling_gbps": 4000.0,
    } | changes


@pytest.fixture
def on_paper(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """A machine with a GPU of paper; what was asked for is noted."""
    asked: dict[str, Any] = {}

    def run(directory: Path, archs: Any, plan: Plan, progress: Callable[[str], None]) -> Result:
        asked.update(directory=directory, archs=archs, plan=plan)
        progress("measuring")
        return Result([record()], READ, READ)

    monkeypatch.setattr(gpu, "machine", lambda: MACHINE)
    monkeypatch.setattr(bench_gemv, "run", run)
    return asked


@pytest.mark.parametrize("arguments", COMMANDS, ids="-".join)
def test_without_a_gpu_it_says_so(invoke: Invoke, arguments: list[str]) -> None:
    import torch

    if torch.cuda.is_available():
        pytest.skip("there is one")
    result = invoke(*arguments)
    assert result.exit_code == 1
    assert "no CUDA device" in result.stderr
    assert result.stdout == ""


@pytest.mark.parametrize("arguments", COMMANDS, ids="-".join)
def test_without_torch_it_says_how_to_install_it(
    invoke: Invoke, monkeypatch: pytest.MonkeyPatch, arguments: list[str]
) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    result = invoke(*arguments)
    assert result.exit_code == 1
    assert "pip install 'sonata-aot[" in result.stderr


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        (["bench", "gemv", "--shape", "2048"], "2048x4096"),
        (["bench", "gemv", "--arch", "sm11"], "sm11"),
        (["bench", "gemv", "--m", "9"], "9"),
        (["bench", "gemv", "--picture", "roof.gif"], ".png .svg .pdf"),
        (["tune", "gemv"], "--arch"),
        (["tune", "gemv", "--arch", "sm90", "--shape", "x"], "shape"),
        (["tune", "gemv", "--arch", "sm90", "--model", "h100"], "a10g"),
        (["tune", "gemv", "--arch", "sm90", "--tolerance", "-1"], "-1"),
        (["tune", "gemv", "--arch", "sm90", "--tolerance", "nan"], "nan"),
    ],
)
def test_usage_errors_come_before_anything_is_measured(
    invoke: Invoke, arguments: list[str], word: str
) -> None:
    result = invoke(*arguments)
    assert result.exit_code == 2
    assert word in result.stderr


def test_a_picture_needs_matplotlib(
    invoke: Invoke, on_paper: dict[str, Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    result = invoke("bench", "gemv", "--picture", tmp_path / "roof.png")
    assert result.exit_code == 1
    assert "pip install 'sonata-aot[bench]'" in result.stderr
    assert on_paper == {}


def test_a_file_that_cannot_be_written_is_said_first(
    invoke: Invoke, on_paper: dict[str, Any], tmp_path: Path
) -> None:
    result = invoke("bench", "gemv", "--json", tmp_path / "absent" / "gemv.json")
    assert result.exit_code == 1
    assert "cannot write" in result.stderr
    assert on_paper == {}


def test_bench_prints_a_table_and_writes_json(
    invoke: Invoke, on_paper: dict[str, Any], built: Path, tmp_path: Path
) -> None:
    result = invoke("bench", "gemv", built, "--json", tmp_path / "gemv.json")
    assert result.exit_code == 0, result.stderr
    assert "1.89x" in result.stdout
    assert "measuring" in result.stderr
    plan = on_paper["plan"]
    assert (plan.shapes, plan.batches) == (DEFAULT_SHAPES, (1, 2, 4, 8))
    assert (plan.dtypes, plan.bound, plan.bias) == (("bf16",), True, False)
    assert (on_paper["directory"], on_paper["archs"]) == (built, ())
    written = json.loads((tmp_path / "gemv.json").read_text())
    assert written["records"] == [record()]
    assert written["machine"] == MACHINE.data()
    assert written["ceiling"]["gbps"] == 4000.0
    assert {"date", "commit", "dirty", "large_buffer"} <= set(written)


def test_bench_measures_what_it_is_told_to(
    invoke: Invoke, on_paper: dict[str, Any], built: Path
) -> None:
    options = [
        "--arch",
        "8.6",
        "--arch",
        "sm90",
        "--shape",
        "64x8",
        "--m",
        "3",
        "--m",
        "5",
        "--dtype",
        "f16",
        "--plain",
        "--bias",
    ]
    assert invoke("bench", "gemv", built, *options).exit_code == 0
    assert on_paper["archs"] == ("sm86", "sm90")
    plan = on_paper["plan"]
    assert (plan.shapes, plan.batches) == ([Shape(64, 8)], (3, 5))
    assert (plan.dtypes, plan.bound, plan.bias) == (("f16",), False, True)


def test_a_directory_without_the_read_kernel(built: Path) -> None:
    with pytest.raises(VariantMissing, match=r"no kernel 'read' for sm86") as raised:
        gpu.require_kernels(built, "sm86", ("gemv", "read"))
    assert "sonata-aot build --arch sm86 --arch sm90 " in raised.value.remedy
    assert "--kernel gemv" in raised.value.remedy
    assert "--kernel read" in raised.value.remedy
    gpu.require_kernels(built, "sm86", ("gemv",))


def measurement(n: int, rows: int, us: float) -> Measurement:
    it = next(b for b in PLAIN if b.variant["rows"] == rows)
    launch = {"blocks_per_sm": 0, "ahead_kb": 0, "skip_blocks_per_sm": 0}
    return Measurement(n, 64, 1, 0, dict(it.variant), launch, us, True, "0" * 64)


HEAD = {"machine": MACHINE.data(), "date": "2030-01-01", "tool": "0.1.0", "via": "sm86-ptx"}


@pytest.fixture
def tuned(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    asked: dict[str, Any] = {}

    def measure(
        directory: Path, arch: str, shapes: Any, target: Any, raw: tune.Raw, progress: Any
    ) -> None:
        asked.update(directory=directory, arch=arch, shapes=shapes, target=target)
        raw.head = dict(HEAD)
        raw.measurements.append(measurement(512, 4, 1.0))
        if asked.get("fails"):
            raise KeyboardInterrupt
        raw.measurements.append(measurement(512, 8, 1.5))

    monkeypatch.setattr(gpu, "machine", lambda: MACHINE)
    monkeypatch.setattr(tune, "measure", measure)
    monkeypatch.setattr(tune, "tuned_binaries", lambda directory, arch: PLAIN)
    return asked


def test_tune_prints_a_table(invoke: Invoke, tuned: dict[str, Any], tmp_path: Path) -> None:
    result = invoke("tune", "gemv", tmp_path, "--arch", "8.6", "--shape", "64x8")
    assert result.exit_code == 0, result.stderr
    (rule,) = tomllib.loads(result.stdout)["gemv"]["rules"]
    assert rule["variant"]["rows"] == 4
    assert (tuned["directory"], tuned["arch"], tuned["target"]) == (tmp_path, "sm86", None)
    assert tuned["shapes"] == [Shape(64, 8)]


def test_tune_writes_what_it_measured_and_the_table(
    invoke: Invoke, tuned: dict[str, Any], tmp_path: Path
) -> None:
    raw, out = tmp_path / "raw.json", tmp_path / "sm86.toml"
    result = invoke(
        *("tune", "gemv", tmp_path, "--arch", "sm86", "--model", "a10g"),
        *("--json", raw, "--out", out, "--tolerance", "60"),
    )
    assert (result.exit_code, result.stdout) == (0, "")
    assert tuned["shapes"] == DEFAULT_SHAPES
    table = tomllib.loads(out.read_text())["gemv"]
    assert "within 60%" in table["origin"]
    assert "A10G" in table["origin"]
    again = tmp_path / "again.toml"
    asked = dict(tuned)
    tuned.clear()
    result = invoke(
        *("tune", "gemv", tmp_path, "--arch", "sm86", "--measured", raw, "--out", again),
        *("--model", "a10g", "--tolerance", "60"),
    )
    assert result.exit_code == 0, result.stderr
    assert tuned == {}
    assert asked["target"] == "a10g"
    assert again.read_text() == out.read_text()


def test_tune_makes_a_table_of_a_file_without_any_artifacts(invoke: Invoke, tmp_path: Path) -> None:
    """And what is kept is chosen, where it is as fast within the noise."""
    raw = tune.Raw(dict(HEAD), [measurement(512, 4, 1.0), measurement(512, 8, 1.004)])
    raw.measurements[0].variant["warps"] = 16
    path = tmp_path / "raw.json"
    path.write_text(raw.text())
    options = ("tune", "gemv", tmp_path / "absent", "--arch", "sm86", "--measured", path)
    for kept, rows in (((), 4), (("--keep", "rows=4", "--keep", "m=1,rows=8"), 8)):
        result = invoke(*options, "--tolerance", "0", *kept)
        assert result.exit_code == 0, result.stderr
        table = tomllib.loads(result.stdout)["gemv"]
        (rule,) = table["rules"]
        assert rule["variant"]["rows"] == rows
        assert ("Kept in any case: rows=4 and m=1,rows=8." in table["origin"]) == bool(kept)
    use = "n=512,k=64,m=1,constant=0,rows=8"
    result = invoke(*options, "--tolerance", "0", "--use", use)
    table = tomllib.loads(result.stdout)["gemv"]
    assert table["rules"][0]["variant"]["rows"] == 8
    assert f"Used where another may be faster alone: {use}." in table["origin"]
    result = invoke(*options, "--keep", "rows=5")
    assert result.exit_code == 1
    assert "--keep rows=5" in result.stderr


def test_what_was_measured_is_kept_when_interrupted(
    invoke: Invoke, tuned: dict[str, Any], tmp_path: Path
) -> None:
    tuned["fails"] = True
    raw, out = tmp_path / "raw.json", tmp_path / "sm86.toml"
    result = invoke("tune", "gemv", tmp_path, "--arch", "sm86", "--json", raw, "--out", out)
    assert result.exit_code == 1
    assert tune.Raw.read(raw).measurements == [measurement(512, 4, 1.0)]
    assert not out.exists()


def test_a_file_of_another_architecture(invoke: Invoke, tmp_path: Path) -> None:
    path = tmp_path / "raw.json"
    path.write_text(tune.Raw(dict(HEAD), [measurement(512, 4, 1.0)]).text())
    result = invoke("tune", "gemv", "--arch", "sm90", "--measured", path)
    assert (result.exit_code, result.stdout) == (1, "")
    assert "binaries for sm86, not for sm90; pass --arch sm86" in result.stderr


@pytest.mark.parametrize("option", [("--json", "new.json"), ("--shape", "64x8")])
def test_what_goes_not_with_measured(
    invoke: Invoke, tmp_path: Path, option: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    result = invoke("tune", "gemv", "--arch", "sm86", "--measured", "raw.json", *option)
    assert result.exit_code == 2
    assert "--measured goes with" in result.stderr
    assert not list(tmp_path.iterdir())


def test_a_table_does_not_replace_what_it_is_made_of(invoke: Invoke, tmp_path: Path) -> None:
    path = tmp_path / "raw.json"
    path.write_text(tune.Raw(dict(HEAD), [measurement(512, 4, 1.0)]).text())
    before = path.read_text()
    options = ("--measured", path, "--out", tmp_path / "." / "raw.json")
    result = invoke("tune", "gemv", "--arch", "sm86", *options)
    assert result.exit_code == 2
    assert "one file for two things" in result.stderr
    assert path.read_text() == before


@pytest.mark.parametrize("broken", ["matplotlib", "matplotlib.figure", "numpy"])
def test_a_matplotlib_that_does_not_work(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, broken: str
) -> None:
    def fail(name: str) -> None:
        raise ModuleNotFoundError(f"No module named {broken!r}", name=broken)

    monkeypatch.setattr(render.importlib, "import_module", fail)
    with pytest.raises(MissingDependency, match="a picture needs matplotlib, which ") as raised:
        render.check_picture(tmp_path / "roof.png")
    assert ("not installed" in raised.value.what) == (broken == "matplotlib")
    assert "pip install" in raised.value.remedy


def test_a_picture_of_every_format(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    data = {
        "machine": MACHINE.data(),
        "date": "2030-01-01",
        "ceiling": READ.data(),
        "records": [
            record(case=f"M={m} N={n} K=2048 dtype=bf16", bytes=4096 * n)
            for m in (1, 2, 8)
            for n in (256, 4096)
        ],
    }
    for suffix in render.PICTURES:
        path = tmp_path / f"roof{suffix}"
        render.draw(data, path)
        assert path.stat().st_size > 5000
    text = (tmp_path / "roof.svg").read_text()
    assert "Skinny GEMV" in text
