"""The commands that measure on the GPU at hand: parse, call, print."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import click

from ..artifacts.places import default_artifacts
from . import result_files
from .options import DIRECTORY, FILE

# Only what `--help` needs is imported above: what measures imports torch.

_directory = click.argument("directory", type=DIRECTORY, required=False)
_shape = click.option(
    "--shape",
    "shapes",
    multiple=True,
    metavar="NxK",
    help="Measure this shape of the weight instead of the default ones; repeatable.",
)


_archs = click.option(
    "--arch",
    "archs",
    multiple=True,
    metavar="ARCH",
    help="Measure this architecture's binaries, through their PTX if need be; repeatable. "
    "Default: what suits the GPU best.",
)
_json = click.option("--json", "json_file", type=FILE, help="Write the results to this file.")


class _Percent(click.FloatRange):
    """A number within bounds, which NaN passes otherwise."""

    def convert(self, value: Any, param: Any, ctx: Any) -> float:
        """The number."""
        found = super().convert(value, param, ctx)
        if math.isnan(found):
            self.fail(f"{value} is not a number", param, ctx)
        return found


@click.group()
def bench() -> None:
    """Measure kernels against their opponents on the GPU at hand."""


@bench.command("gemv")
@_directory
@_archs
@_shape
@click.option(
    "--m",
    "batches",
    multiple=True,
    type=click.IntRange(1, 8),
    metavar="N",
    help="Rows of x; repeatable. Default: 1, 2, 4 and 8.",
)
@click.option(
    "--dtype",
    "dtypes",
    multiple=True,
    type=click.Choice(("bf16", "f16")),
    help="Repeatable. Default: bf16.",
)
@click.option("--bias", is_flag=True, help="Add a bias.")
@click.option("--plain", is_flag=True, help="Do not declare the weights constant.")
@_json
@click.option("--picture", type=FILE, help="Draw the results into this file: .png, .svg or .pdf.")
def bench_gemv(
    directory: Path | None,
    archs: tuple[str, ...],
    shapes: tuple[str, ...],
    batches: tuple[int, ...],
    dtypes: tuple[str, ...],
    bias: bool,
    plain: bool,
    json_file: Path | None,
    picture: Path | None,
) -> None:
    """Time the skinny GEMV against cuBLAS and against kernels that only read.

    DIRECTORY, by default SONATA_AOT_DIR or the user's cache, must hold the kernels gemv and read.
    Times are those of CUDA graphs whose weights rotate through 800 MB. A figure above the read
    ceiling, which is measured too, is an error.
    """
    from ..artifacts.arch import Arch
    from .measure import gpu, render
    from .measure.shapes import DEFAULT_BATCHES, DEFAULT_SHAPES, Shape

    sizes = [Shape.parse(text) for text in shapes] or DEFAULT_SHAPES
    archs = tuple(Arch.parse(arch).name for arch in archs)
    if picture is not None:
        render.check_picture(picture)
    machine = gpu.machine()
    from .measure import gemv

    result_files.require_writable(json_file, picture)
    plan = gemv.Plan(
        shapes=sizes,
        batches=batches or DEFAULT_BATCHES,
        dtypes=dtypes or ("bf16",),
        bound=not plain,
        bias=bias,
    )
    directory = directory or default_artifacts()
    result = gemv.run(directory, archs, plan, _note)
    data = result.data(machine, directory)
    click.echo(render.table(data))
    if json_file is not None:
        _write(json_file, json.dumps(data, indent=1) + "\n")
    if picture is not None:
        render.draw(data, picture)


@bench.command("ssd")
@_directory
@_archs
@click.option(
    "--part",
    "chosen",
    multiple=True,
    type=click.Choice(("bars", "reported", "extras")),
    help="Shapes to measure: those that must be won, those that are reported too, or those with z, "
    "initial states, seq_idx and strides; repeatable. Default: all.",
)
@click.option(
    "--shape",
    "shapes",
    multiple=True,
    metavar="SHAPE",
    help="Measure this shape too, or alone where no --part is named; repeatable: 2x2048, or "
    "2x2048,heads=24,z=1.",
)
@click.option("--alone", is_flag=True, help="Leave mamba_ssm out, also if it is installed.")
@click.option(
    "--first-call", is_flag=True, help="Time the first call in fresh processes, and nothing else."
)
@_json
@click.option("--picture", type=FILE, help="Draw the results into this file: .png, .svg or .pdf.")
def bench_ssd(
    directory: Path | None,
    archs: tuple[str, ...],
    chosen: tuple[str, ...],
    shapes: tuple[str, ...],
    alone: bool,
    first_call: bool,
    json_file: Path | None,
    picture: Path | None,
) -> None:
    """Time the scan of Mamba2 against mamba_ssm's Triton kernels.

    DIRECTORY, by default SONATA_AOT_DIR or the user's cache, must hold the kernels of the scan and
    read. Graph, eager and host times of both, their errors against float64, and the least time that
    memory needs. Without mamba_ssm only our own are measured.
    """
    from ..artifacts.arch import Arch
    from .measure import gpu, render, ssd_render
    from .measure.ssd_shapes import PARTS, Shape

    named = [Shape.parse(text) for text in shapes]
    sizes = [shape for part in chosen or (() if named else PARTS) for shape in PARTS[part]]
    archs = tuple(Arch.parse(arch).name for arch in archs)
    if first_call and (chosen or shapes or picture):
        raise click.UsageError("--first-call goes with none of --part, --shape and --picture")
    if picture is not None:
        render.check_picture(picture)
    machine = gpu.machine()
    from .measure import ssd, ssd_first_call

    result_files.require_writable(json_file, picture)
    directory = directory or default_artifacts()
    if first_call:
        records = ssd_first_call.run(directory, archs, _note, alone=alone)
        data = ssd_first_call.data(records, machine, directory)
        click.echo(ssd_render.first_call_table(data))
    else:
        result = ssd.run(directory, archs, [*sizes, *named], _note, alone=alone)
        data = result.data(machine, directory)
        click.echo(ssd_render.table(data))
    if json_file is not None:
        _write(json_file, json.dumps(data, indent=1) + "\n")
    if picture is not None:
        ssd_render.draw(data, picture)


@click.group()
def tune() -> None:
    """Make the tables that say which variant of a kernel a call gets."""


@tune.command("gemv")
@_directory
@click.option("--arch", required=True, metavar="ARCH", help="Whose variants to measure.")
@_shape
@click.option(
    "--tolerance",
    type=_Percent(0, 100),
    default=1.0,
    show_default=True,
    metavar="PERCENT",
    help="How much slower than a shape's fastest its variant may be, so that fewer are needed.",
)
@click.option(
    "--keep",
    "kept",
    multiple=True,
    metavar="CHOICE=VALUE,...",
    help="Have variants with these values among those to choose from, for a reason that times of "
    "single shapes do not show; repeatable.",
)
@click.option(
    "--use",
    "used",
    multiple=True,
    metavar="n=N,k=K,m=M,constant=0|1,CHOICE=VALUE,...",
    help="Give this shape the fastest measured variant and launch with these values, for such a "
    "reason; repeatable.",
)
@click.option(
    "--model",
    "target",
    type=click.Choice(("a10g",)),
    help="Score the times for this GPU, where another one is at hand.",
)
@click.option("--out", type=FILE, help="Write the table to this file, not to the output.")
@click.option(
    "--json", "json_file", type=FILE, help="Write every measurement to this file, come what may."
)
@click.option(
    "--measured",
    type=FILE,
    help="Make the table of such a file, and measure nothing.",
)
def tune_gemv(
    directory: Path | None,
    arch: str,
    shapes: tuple[str, ...],
    tolerance: float,
    kept: tuple[str, ...],
    used: tuple[str, ...],
    target: str | None,
    out: Path | None,
    json_file: Path | None,
    measured: Path | None,
) -> None:
    """Measure every variant of the skinny GEMV, and write the table of the fastest.

    DIRECTORY, by default SONATA_AOT_DIR or the user's cache, must hold all declared variants:
    `sonata-aot build --all --arch ... --kernel gemv`. With --measured only a
    --model needs it.
    """
    from ..artifacts.arch import Arch
    from .measure import gpu
    from .measure.shapes import DEFAULT_SHAPES, Shape

    if measured is not None and (shapes or json_file):
        raise click.UsageError("--measured goes with neither --shape nor --json")
    arch = Arch.parse(arch).name
    sizes = [Shape.parse(text) for text in shapes] or DEFAULT_SHAPES
    directory = directory or default_artifacts()
    if measured is None:
        gpu.machine()  # what is missing is said before anything that needs torch is imported
    from .measure import tune as run

    result_files.require_writable(json_file, out, known=measured)
    if measured is not None:
        raw = run.Raw.read(measured)
        raw.require_arch(arch, measured)
    else:
        raw = run.Raw()
        try:
            run.measure(directory, arch, sizes, target, raw, _note)
        finally:
            if json_file is not None and raw.measurements:
                _write(json_file, raw.text())
    # Only a model asks what the binaries are like.
    binaries = run.tuned_binaries(directory, arch) if target else ()
    text = run.make(raw, binaries, target, tolerance / 100, kept, used)
    if out is None:
        click.echo(text, nl=False)
    else:
        _write(out, text)
        _note(f"written to {out}")


def _note(line: str) -> None:
    click.echo(line, err=True)


def _write(path: Path, text: str) -> None:
    result_files.write(path, text.encode("utf-8"))
