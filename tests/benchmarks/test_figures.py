"""The README's figures are those of the results files."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from sonata_aot.aot.measure.ssd_shapes import BARS, Shape
from ssd_records import data, records

ROOT = Path(__file__).resolve().parents[2]
BEGIN = "<!-- figures: begin (python -m benchmarks.figures) -->"
END = "<!-- figures: end -->"


@pytest.fixture
def figures(
    tmp_path: Path, clean_environ: Callable[..., dict[str, str]]
) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Runs benchmarks.figures over a copy of the README and the results, in `tmp_path`."""
    shutil.copy(ROOT / "README.md", tmp_path)
    shutil.copytree(ROOT / "benchmarks", tmp_path / "benchmarks")
    shutil.copytree(ROOT / "docs", tmp_path / "docs")

    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "benchmarks.figures", *arguments],
            cwd=tmp_path,
            env=clean_environ(),
            capture_output=True,
            text=True,
            check=False,
        )

    assert run().returncode == 0
    return run


def edit_text(root: Path) -> None:
    readme = root / "README.md"
    before, _, rest = readme.read_text().partition(BEGIN)
    table, _, after = rest.partition(END)
    assert " us |" in table
    faster = table.replace(" us |", "0 us |", 1)
    readme.write_text(f"{before}{BEGIN}{faster}{END}{after}")


def edit_result(root: Path) -> None:
    file = min((root / "benchmarks" / "results").glob("*/gemv.json"))
    content = json.loads(file.read_text())
    content["records"][-1]["ours_us"] *= 2
    file.write_text(json.dumps(content))


def edit_picture(root: Path) -> None:
    picture = min((root / "docs").glob("speedups-*.svg"))
    text = picture.read_text()
    shown = re.search(r">\d\.\d\dx<", text)
    assert shown is not None
    picture.write_text(text.replace(shown[0], ">99.99x<"))


def remove_picture(root: Path) -> None:
    min((root / "docs").glob("speedups-*.svg")).unlink()


def remove_result(root: Path) -> None:
    min((root / "benchmarks" / "results").glob("*/gemv_chain.json")).unlink()


@pytest.mark.parametrize(
    "edit", [edit_text, edit_picture, remove_picture, edit_result, remove_result]
)
def test_another_figure_in_the_readme_than_in_the_results_fails(
    figures: Callable[..., subprocess.CompletedProcess[str]],
    tmp_path: Path,
    edit: Callable[[Path], None],
) -> None:
    readme = tmp_path / "README.md"
    good = readme.read_text()
    assert figures("--check").returncode == 0
    edit(tmp_path)
    edited = readme.read_text()
    failed = figures("--check")
    assert failed.returncode == 1
    assert "run python -m benchmarks.figures" in failed.stderr
    assert "Traceback" not in failed.stderr
    assert readme.read_text() == edited  # checking changes nothing
    assert figures().returncode == 0
    assert figures("--check").returncode == 0
    again = readme.read_text()
    assert (again == good) == (edit not in (edit_result, remove_result))
    assert again.partition(BEGIN)[0] == good.partition(BEGIN)[0]
    assert again.partition(END)[2] == good.partition(END)[2]


def gemv_records(m: int, *times: tuple[str, float, float, float]) -> list[dict[str, object]]:
    """(N x K, ours, cuBLAS's and a read's time): records as `bench gemv` has them."""
    found: list[dict[str, object]] = []
    for shape, ours, cublas, read in times:
        n, k = shape.split("x")
        case = f"M={m} N={n} K={k} dtype=bf16"
        record: dict[str, object] = {
            "case": case,
            "via": "sm90-cubin",
            "bytes": 2 * int(n) * int(k),
        }
        record |= {"ours_us": ours, "opponent_us": cublas, "read_us": read}
        found.append(record)
    return found


def test_what_is_made_of_the_gemvs_results(
    figures: Callable[..., subprocess.CompletedProcess[str]], tmp_path: Path
) -> None:
    """Ratios are cuBLAS's time over ours, shares are the read's; of other calls the worst counts.

    Means leave out what is smaller than 16 MB, shares what is smaller than 64 MB.
    """
    times = {"256x2048": (2.0, 8.0, 1.0), "4096x4096": (8.0, 16.0, 7.0)}
    times["16384x2048"] = (16.0, 18.0, 12.0)
    plain = gemv_records(8, *((shape, *rest) for shape, rest in times.items()))
    other = gemv_records(7, ("256x2048", 2.5, 8.0, 1.0), ("4096x4096", 9.0, 16.0, 7.0))
    folder = min((tmp_path / "benchmarks" / "results").glob("*/gemv.json")).parent
    for name, content in (
        ("gemv", plain),
        ("gemv_rows", plain + other),
        ("gemv_f16", gemv_records(8, ("256x2048", 3.0, 8.0, 1.0), ("4096x4096", 8.0, 1.0, 1.0))),
        ("gemv_bias", gemv_records(8, ("256x2048", 2.0, 8.0, 1.0))),
    ):
        file = folder / f"{name}.json"
        file.write_text(json.dumps({**json.loads(file.read_text()), "records": content}))
    assert figures().returncode == 0
    readme, page = (tmp_path / name for name in ("README.md", "docs/gemv.md"))
    lines = page.read_text().splitlines()
    assert "| 16384 x 2048 | 16.00 us 1.12x |" in lines
    assert "| mean from 16 MB on | 1.50x |" in lines
    mean = "| GEMV, M = 8, mean of weights from 16 MB on | cuBLAS | 1.50x | - |"
    assert mean in readme.read_text().splitlines()
    assert "| 16384 x 2048 | sm90-cubin | 75.0% |" in lines
    assert not any(line.startswith("| 4096 x 4096 | sm90") for line in lines)
    rows = "| M = 3, 5, 6, 7 over M = 4, 8 | sm90-cubin | 2 | 1.250x | M=7 N=256 K=2048 dtype=bf16 "
    assert f"{rows}sm90-cubin |" in lines
    assert "| fp16 | sm90-cubin | 2 | 1.500x | M=8 N=256 K=2048 dtype=bf16 sm90-cubin |" in lines


def file_results(root: Path) -> None:
    """Results of the scan that a GPU run might have left."""
    extra = Shape(2, 2048, z=True)
    costs = {"base_us": 30.0, "extra_bytes": 40_000_000, "allowed_us": 42.0}
    found = [*records(BARS[0]), *records(BARS[8]), *records(extra, **costs)]
    first = {"via": "sm86-ptx", "case": f"op=load+scan cache=cold {BARS[2].case}"}
    first |= {"import_ms": 3.0, "load_ms": 20.0, "first_scan_ms": 400.0}
    first |= {"ours_us": 420_000.0, "opponent_us": 38e6}
    folder = min((root / "benchmarks" / "results").glob("*/gemv.json")).parent
    for name, content in (("ssd", found), ("ssd_first_call", [first])):
        (folder / f"{name}.json").write_text(json.dumps(data(content)))


def test_the_scan_is_shown_once_it_is_measured(
    figures: Callable[..., subprocess.CompletedProcess[str]], tmp_path: Path
) -> None:
    page, picture = tmp_path / "docs" / "ssd.md", tmp_path / "docs" / "speedups-h200.svg"
    for file in (tmp_path / "benchmarks" / "results").glob("*/ssd*.json"):
        file.unlink()
    assert figures().returncode == 0
    assert "SSD scan: no measurement on `h200` is recorded yet." in page.read_text()
    assert "is recorded yet." in page.read_text().partition("SSD scan: no measurement")[2]
    block = (tmp_path / "README.md").read_text().partition(BEGIN)[2].partition(END)[0]
    assert "SSD scan" not in block
    file_results(tmp_path)
    assert figures("--check").returncode == 1
    assert figures().returncode == 0
    assert figures("--check").returncode == 0
    readme, page = (tmp_path / "README.md").read_text(), page.read_text()
    assert "yet." not in page.partition(BEGIN)[2]
    cells = "40.0 us | 100.0 us | 89.1 us | 2.23x | 20.0 us | 45.0 us | 900.0 us"
    assert f"| 1x32768 | {cells} |" in page
    assert "| 2x2048 z=1 | 40.0 us" not in page
    # 89.1 us, and of the other shape the better of 100 us and what is estimated for it.
    assert "| SSD scan, 2 shapes | the better Triton kernel | 2.23x to 2.50x | - |" in readme
    drawn = picture.read_text()
    assert ">1x32768<" in drawn
    assert ">2.23x<" in drawn
    assert "z=1" not in drawn
    assert "| 2x64 | sm90-cubin | 1.90e-03 | 2.30e-03 | 1.60e-03 | 1.65e-03 | 12.5 us |" in page
    assert "| 2x2048 z=1 | sm90-cubin | 40.0 us | 30.0 us | 40.0 MB | 42.0 us | 100.0 us |" in page
    assert "| sm86-ptx | cold | 3.0 ms | 20.0 ms | 400.0 ms | 420.0 ms | 38.0 s |" in page


def test_the_pictures_bars_are_as_long_as_their_figures(
    figures: Callable[..., subprocess.CompletedProcess[str]], tmp_path: Path
) -> None:
    root = ElementTree.parse(tmp_path / "docs" / "speedups-h200.svg").getroot()
    space = "{http://www.w3.org/2000/svg}"
    texts = {(text.get("x"), text.get("y")): text.text for text in root.iter(f"{space}text")}
    unit = next(float(x or 0) for (x, _), text in texts.items() if text == "1x") - 250
    bars = [bar for bar in root.iter(f"{space}rect") if bar.get("height") == "12"]
    bars = [bar for bar in bars if bar.get("width") != "12"]  # the legend
    assert len(bars) == 2 * (4 + 13 + 2)
    for bar in bars:
        width, y = float(bar.get("width") or 0), int(bar.get("y") or 0)
        shown = texts[f"{250 + width + 4:g}", str(y + 10)]
        assert shown is not None
        assert width / unit == pytest.approx(float(shown.removesuffix("x")), abs=0.006)
        assert 250 + width < float(root.get("width") or 0)


def records_of(root: Path, bench: str) -> list[dict[str, Any]]:
    (file,) = (root / "benchmarks" / "results").glob(f"*/{bench}.json")
    return json.loads(file.read_text())["records"]


def test_launches_and_decode_steps_are_those_of_the_results(
    figures: Callable[..., subprocess.CompletedProcess[str]], tmp_path: Path
) -> None:
    launch, patching = (tmp_path / "docs" / name for name in ("launch.md", "patching.md"))
    for record in records_of(tmp_path, "launch"):
        ours, theirs = record["ours_us"], record["opponent_us"]
        times = rf"\| {ours:.1f} us \| [^|]* \| {theirs:.1f} us \| {ours / theirs:.2f} \|"
        assert re.search(times, launch.read_text())
        assert re.search(times, (tmp_path / "README.md").read_text())
    for record in records_of(tmp_path, "decode_step"):
        ours, theirs = record["ours_us"], record["opponent_us"]
        wanted = f"| {ours:.0f} us | {theirs:.0f} us | {theirs / ours:.2f}x | "
        assert f"| {record['via']} {wanted}" in patching.read_text()
    assert "6 requests of 64 tokens" in patching.read_text()
    for record in records_of(tmp_path, "decode_graph"):
        each, once, theirs, capture, step, their_step = (
            record[f"{name}_us"] / 1e3
            for name in (
                *("captured_each", "ours", "opponent"),
                *("capture", "step", "opponent_step"),
            )
        )
        wanted = (
            f"| {each:.1f} ms | {once:.2f} ms | {theirs:.2f} ms | {capture:.1f} ms | {step:.2f} ms "
            f"| {their_step:.2f} ms | {record['opponent_flips']} of 384 |"
        )
        assert f"| {record['via']} {wanted}" in patching.read_text()
