"""What `bench ssd` shows: tables, a picture, and the command around them."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from sonata_aot.aot.measure import gpu, mamba_opponent, ssd, ssd_first_call, ssd_render
from sonata_aot.aot.measure.ssd_shapes import BARS, PARTS, REPORTED, Shape
from sonata_aot.artifacts.errors import SonataError
from ssd_records import MACHINE, READ, data, records

if TYPE_CHECKING:
    from tests.aot.conftest import Invoke


def test_the_ratio_that_counts_is_over_the_better_opponent() -> None:
    # At 64 tokens the fused kernel is slower than the others, at 32768 it is faster.
    slower, faster = (ssd_render.rows(records(shape))[0] for shape in (BARS[0], BARS[8]))
    assert slower.opponents["triton-fused-estimate"] > 100 == slower.best
    assert slower.ratio == pytest.approx(2.5)
    assert faster.best == pytest.approx(100 * 1102.7 / 1237.8)
    assert faster.ratio == pytest.approx(2.5 * 1102.7 / 1237.8)
    assert faster.eager_ratio == pytest.approx(20)


def test_a_row_is_the_same_whichever_record_comes_first() -> None:
    (row,) = ssd_render.rows(records(BARS[0])[::-1])
    assert row.record["opponent_eager_us"] == 900.0
    assert row.ratio == pytest.approx(2.5)


def test_the_table_has_every_case_and_what_the_bars_ask() -> None:
    extra = Shape(2, 2048, z=True)
    found = [
        *records(BARS[0]),
        *records(BARS[8]),
        *records(REPORTED[1]),
        *records(extra, base_us=30.0, extra_bytes=40_000_000, allowed_us=42.0),
        *records(BARS[0], "sm86-ptx", error=2.4e-3),
    ]
    text = ssd_render.table(data(found, {"mamba_ssm": "2.3.2.post1", "triton": "3.6"}))
    lines = text.splitlines()
    assert lines[1].split() == (
        ["2x64", "sm90-cubin", "40.0", "100.0", "161.0", "2.50x", "20.0", "2.00x"]
    )  # fmt: skip
    assert any(line.startswith("1x2048 heads=128 groups=8  sm90-cubin") for line in lines)
    assert "2x64 sm90-cubin 45.0 900.0 20.0x 12.5 890.0" in " ".join(text.split())
    assert "sm90-cubin: 2.23x at least (1x32768), 2.36x in the geometric mean of 2 shapes" in lines
    assert "sm90-cubin: no error is above Triton's" in lines
    assert "sm86-ptx: errors above Triton's: 2x64" in lines
    assert (
        "2x2048 z=1 sm90-cubin: 40.0 us, without 30.0; its bytes take 10.0; within 42.0, which is "
        "both and 5%"
    ) in lines
    assert "mamba_ssm 2.3.2.post1, triton 3.6" in lines


def test_an_extra_that_costs_too_much_is_seen() -> None:
    shape = Shape(2, 2048, strides=True)
    found = records(shape, base_us=30.0, extra_bytes=0, allowed_us=31.5)
    assert "ABOVE 31.5" in ssd_render.table(data(found))


def test_the_table_without_an_opponent_says_so() -> None:
    text = ssd_render.table(data(records(BARS[0], opponents=False)))
    assert "mamba_ssm was not measured" in text
    assert " - " in text
    assert "at least" not in text
    assert "Triton's" not in text.split("us: a call")[0]


@pytest.mark.parametrize("opponents", [True, False])
def test_a_picture_of_every_format(tmp_path: Path, opponents: bool) -> None:
    pytest.importorskip("matplotlib")
    found = [
        record
        for via in ("sm90-cubin", "sm86-ptx")
        for shape in (*BARS, *REPORTED)
        for record in records(shape, via, opponents)
    ]
    for suffix in (".png", ".svg", ".pdf"):
        path = tmp_path / f"scan{suffix}"
        ssd_render.draw(data(found), path)
        assert path.stat().st_size > 5000
    text = (tmp_path / "scan.svg").read_text()
    assert "memory floor at 4000 GB/s" in text
    assert ("Triton (mamba_ssm)" in text) == opponents
    assert ("fused Triton, estimate" in text) == opponents
    # Where no shape is one of the bars, what there is is drawn.
    one = tmp_path / "one.svg"
    ssd_render.draw(data(records(REPORTED[0])), one)
    assert one.stat().st_size > 5000


@pytest.fixture
def on_paper(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """A machine with a GPU of paper; what was asked for is noted."""
    asked: dict[str, Any] = {}

    def run(
        directory: Path, archs: Any, shapes: Any, progress: Callable[[str], None], *, alone: bool
    ) -> ssd.Result:
        asked.update(directory=directory, archs=archs, shapes=list(shapes), alone=alone)
        progress("measuring")
        return ssd.Result(records(BARS[0]), READ, {"triton": "3.6"})

    monkeypatch.setattr(gpu, "machine", lambda: MACHINE)
    monkeypatch.setattr(ssd, "run", run)
    return asked


def test_bench_prints_a_table_and_writes_json_and_a_picture(
    invoke: Invoke, on_paper: dict[str, Any], built: Path, tmp_path: Path
) -> None:
    pytest.importorskip("matplotlib")
    files = ("--json", tmp_path / "ssd.json", "--picture", tmp_path / "ssd.svg")
    result = invoke("bench", "ssd", built, *files)
    assert result.exit_code == 0, result.stderr
    assert "2.50x" in result.stdout
    assert "measuring" in result.stderr
    everything = [shape for part in PARTS.values() for shape in part]
    assert on_paper == {"directory": built, "archs": (), "shapes": everything, "alone": False}
    written = json.loads((tmp_path / "ssd.json").read_text())
    assert written["records"] == records(BARS[0])
    assert (written["opponent"], written["machine"]) == ({"triton": "3.6"}, MACHINE.data())
    assert {"date", "commit", "dirty", "ceiling", "tool"} <= set(written)
    assert "memory floor" in (tmp_path / "ssd.svg").read_text()


@pytest.mark.parametrize(
    ("options", "shapes"),
    [
        (["--part", "reported"], list(REPORTED)),
        (["--shape", "2x64,z=1"], [Shape(2, 64, z=True)]),
        (["--part", "bars", "--shape", "1x8"], [*BARS, Shape(1, 8)]),
    ],
)
def test_bench_measures_what_it_is_told_to(
    invoke: Invoke, on_paper: dict[str, Any], built: Path, options: list[str], shapes: list[Shape]
) -> None:
    more = ["--arch", "sm_90", "--arch", "8.6", "--alone"]
    assert invoke("bench", "ssd", built, *more, *options).exit_code == 0
    assert (on_paper["archs"], on_paper["shapes"]) == (("sm90", "sm86"), shapes)
    assert on_paper["alone"]


@pytest.mark.parametrize(
    ("options", "word"),
    [
        (["--shape", "2048"], "2x2048,heads=24"),
        (["--arch", "sm11"], "sm11"),
        (["--part", "all"], "reported"),
        (["--picture", "ssd.gif"], ".png .svg .pdf"),
        (["--first-call", "--part", "bars"], "--first-call"),
    ],
)
def test_usage_errors_come_before_anything_is_measured(
    invoke: Invoke, on_paper: dict[str, Any], options: list[str], word: str
) -> None:
    result = invoke("bench", "ssd", *options)
    assert (result.exit_code, on_paper) == (2, {})
    assert word in result.stderr


class Processes:
    """Stands for fresh processes; says what each was given."""

    def __init__(self, form: str = "ptx", compilers: Sequence[str] = ()) -> None:
        self.form = form
        self.compilers = list(compilers)
        self.caches: list[str] = []
        self.environments: list[dict[str, str]] = []

    def __call__(
        self, script: str, arguments: Sequence[str], environment: dict[str, str]
    ) -> dict[str, Any]:
        compile(script, "child", "exec")
        self.environments.append(environment)
        errors = [1.9e-3, 1.6e-3]
        if "opponent.scan" in script:
            assert list(arguments) == ["2x256"]
            return {"import_ms": 900.0, "first_scan_ms": 38_000.0, "errors": errors}
        cold = environment["CUDA_CACHE_PATH"] not in self.caches
        self.caches.append(environment["CUDA_CACHE_PATH"])
        return {
            "import_ms": 3.0,
            "load_ms": 20.0,
            "first_scan_ms": 400.0 if cold and self.form == "ptx" else 5.0,
            "errors": errors,
            "form": self.form,
            "binaries": ["a" * 64],
            "compilers": self.compilers,
        }


def test_ptx_is_measured_with_an_empty_cache_and_a_full_one() -> None:
    child = Processes()
    cold, warm = ssd_first_call.measure(Path("artifacts"), "sm86", child)
    assert cold["case"] == f"op=load+scan cache=cold {BARS[2].case}"
    assert warm["case"] == f"op=load+scan cache=warm {BARS[2].case}"
    assert (cold["ours_us"], warm["ours_us"]) == (420_000.0, 25_000.0)
    assert (cold["via"], cold["binaries"], cold["opponent"]) == ("sm86-ptx", ["a" * 64], None)
    assert len(set(child.caches)) == len(child.caches) / 2 == ssd_first_call.REPEATS


def test_machine_code_needs_no_cache() -> None:
    (record,) = ssd_first_call.measure(Path("artifacts"), "sm90", Processes("cubin"))
    assert record["case"] == f"op=load+scan {BARS[2].case}"
    assert (record["via"], record["ours_us"]) == ("sm90-cubin", 25_000.0)


def test_the_opponents_first_call_is_measured_once_with_nothing_cached() -> None:
    child = Processes()
    found = ssd_first_call.measure(Path("artifacts"), "sm86", child)
    child.environments.clear()
    ssd_first_call.against(found, child)
    (environment,) = child.environments
    assert set(environment) == {"TRITON_CACHE_DIR", "CUDA_CACHE_PATH"}
    assert [record["opponent_us"] for record in found] == [38e6, 38e6]
    assert {record["opponent"] for record in found} == {"triton"}
    text = ssd_render.first_call_table(data(found))
    assert "sm86-ptx cold 3.0 20.0 400.0 420.0 38000.0" in " ".join(text.split())


def test_a_compiler_in_a_first_call_is_an_error() -> None:
    child = Processes("cubin", ["triton.language"])
    with pytest.raises(SonataError, match=r"sm90-cubin: a first call imported triton\.language"):
        ssd_first_call.measure(Path("artifacts"), "sm90", child)


def test_a_process_that_fails_is_an_error() -> None:
    with pytest.raises(SonataError, match="measured process failed: ValueError: no luck"):
        ssd_first_call.child("raise ValueError('no luck')", (), {})
    script = "import os, sys; print('noise'); print('[%s, %s]' % (sys.argv[1], os.environ['N']))"
    assert ssd_first_call.child(script, ("1",), {"N": "2"}) == [1, 2]


def test_first_calls_are_asked_for_alone(
    invoke: Invoke, on_paper: dict[str, Any], built: Path, tmp_path: Path, monkeypatch: Any
) -> None:
    class Loaded:
        arch = "sm86"

    def missing() -> None:
        raise SonataError("no einops", remedy="pip install einops")

    child = Processes()
    measure = ssd_first_call.measure
    monkeypatch.setattr(gpu, "load", lambda directory, archs, needed: [Loaded])
    monkeypatch.setattr(
        ssd_first_call, "measure", lambda directory, arch: measure(directory, arch, child)
    )
    monkeypatch.setattr(mamba_opponent, "load", missing)
    file = tmp_path / "ssd_first_call.json"
    result = invoke("bench", "ssd", built, "--first-call", "--json", file)
    assert result.exit_code == 0, result.stderr
    assert "without an opponent: no einops; pip install einops" in result.stderr
    assert "sm86-ptx" in result.stdout
    assert on_paper == {}
    written = json.loads(file.read_text())
    assert [record["opponent"] for record in written["records"]] == [None, None]
    assert {"machine", "date", "commit", "dirty"} <= set(written)
