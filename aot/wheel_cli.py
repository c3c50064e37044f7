"""The command that makes wheels: parse, call, print."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from .options import (
    DIRECTORY,
    FILE,
    json_option,
    progress_options,
    selection_options,
    show_size,
    trust_option,
)
from .progress import Progress

if TYPE_CHECKING:
    from .plan import Selection

# Only what `--help` needs is imported above.


@click.command()
@selection_options
@click.option(
    "-o",
    "--out",
    type=DIRECTORY,
    default="dist",
    show_default=True,
    help="Directory for the wheel; SHA256SUMS is kept beside it.",
)
@click.option(
    "--only-artifacts",
    is_flag=True,
    help="Make a wheel of artifacts alone, for any platform, which loads beside sonata-aot.",
)
@click.option(
    "--name", metavar="DIST", help="Its name; by default sonata-aot-kernels-ARCH for our kernels."
)
@click.option("--version", metavar="TEXT", help="Its version; by default the tool's.")
@click.option(
    "--base",
    type=FILE,
    help="Wheel of sonata-aot to put the artifacts into, instead of what is installed.",
)
@click.option(
    "--no-isolation",
    is_flag=True,
    help="Build a checkout's launcher with what is installed here, as pip's "
    "--no-build-isolation does.",
)
@click.option(
    "--platform",
    metavar="TAG",
    help="Tag it for this platform, such as manylinux_2_28_x86_64, if auditwheel finds it fit.",
)
@click.option(
    "--signing-key", type=FILE, help="SSH key to sign the manifest with; the wheel holds that too."
)
@trust_option
@progress_options
@json_option
def wheel(
    selection: Selection,
    out: Path,
    only_artifacts: bool,
    name: str | None,
    version: str | None,
    base: Path | None,
    no_isolation: bool,
    platform: str | None,
    signing_key: Path | None,
    quiet: bool,
    progress: Progress,
    as_json: bool,
) -> None:
    """Build kernels and ship them in a wheel, ready for `pip install`.

    The wheel is sonata-aot itself, launcher, loader and tool, with the artifacts inside. It is
    packed from the installed tool, with no C++ compiler; only where that is an editable install of
    a checkout is the launcher built. The artifacts are verified once more in the finished wheel.
    See docs/wheels.md.
    """
    from . import report
    from .wheel import DataWheel, make

    if (name or version) and not only_artifacts:
        raise click.UsageError("--name and --version need --only-artifacts")
    if only_artifacts and (base or no_isolation or platform):
        raise click.UsageError(
            "--only-artifacts has no launcher: it excludes --base, --no-isolation and --platform"
        )
    written = make(
        selection,
        out=out,
        data=DataWheel(name, version) if only_artifacts else None,
        base=base,
        isolation=not no_isolation,
        platform=platform,
        signing_key=signing_key,
        progress=progress,
    )
    progress.close()
    if as_json:
        report.print_json(
            {
                "wheel": str(written.path),
                "launcher": written.origin,
                "size": written.size,
                "sha256": written.sha256,
                "manifest": report.manifest_data(written.manifest),
            }
        )
        return
    if quiet:
        return
    if written.origin:
        click.echo(f"launcher and loader: {written.origin}")
    count = report.plural(len(written.manifest.binaries), "binary", "binaries")
    archs = ", ".join(written.manifest.selection.archs)
    click.echo(f"artifacts: {count} for {archs}, verified in the wheel")
    click.echo(f"{written.path}: {show_size(written.size)}, sha256 {written.sha256[:12]}")
