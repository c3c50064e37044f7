"""The command that lists the shapes of a model and what each gets."""

from __future__ import annotations

import sys
from pathlib import Path

import click

from .options import FILE, arch_option, json_option


@click.command()
@click.argument("config", type=FILE, metavar="MODEL_CONFIG")
@arch_option(
    "Architecture to look at; repeat for several. Without it, TORCH_CUDA_ARCH_LIST.", multiple=True
)
@click.option(
    "--m",
    "rows",
    multiple=True,
    type=click.IntRange(1, 8),
    metavar="M",
    help="Rows of x in decoding, 1 to 8; repeatable. Default: 1, 2, 4 and 8.",
)
@click.option(
    "--dtype", type=click.Choice(["bf16", "f16"]), help="Default: the file's own, or bf16."
)
@json_option
def shapes(
    config: Path, archs: tuple[str, ...], rows: tuple[int, ...], dtype: str | None, as_json: bool
) -> None:
    """List the GEMV and scan shapes of a model, and the variant that each gets.

    MODEL_CONFIG is a Hugging Face config.json of Mamba2, Bamba, Zamba2, Nemotron-H, Falcon-H1 or
    GraniteMoeHybrid, or the configuration of a mamba_ssm or Zonos model. Experts are left out:
    their weights are no linear layers. Exit 1 if a shape has no variant. The JSON, in a file, is
    what `sonata-aot build --select` takes.
    """
    from ..artifacts.declaration import variant_name
    from ..artifacts.schema import encode
    from . import report
    from .needed import needed
    from .plan import choose_archs
    from .shapes import read_config

    chosen = choose_archs(archs)
    found = read_config(config, dtype=dtype, rows=tuple(sorted(set(rows))) or (1, 2, 4, 8))
    uses = needed(found, chosen).uses
    missing = [use for use in uses if use.variant is None]
    if as_json:
        report.print_json(
            {
                "shapes": encode(found),
                "uses": [
                    {
                        "call": use.call,
                        "arch": use.arch.name,
                        "kernel": use.kernel,
                        "variant": use.variant,
                        "default": use.default,
                    }
                    for use in uses
                ],
            }
        )
        sys.exit(1 if missing else 0)
    click.echo(f"{found.model}, {found.dtype}")
    gemv = [(shape.name, shape.n, shape.k) for shape in found.gemv]
    click.echo("\n" + report.table(("gemv", "n", "k"), gemv))
    scans = [(scan.headdim, scan.dstate, scan.heads, scan.groups) for scan in found.scans]
    click.echo("\n" + report.table(("headdim", "dstate", "heads", "groups"), scans) + "\n")
    lines = [
        (
            use.call,
            use.arch.name,
            use.kernel,
            "none" if use.variant is None else variant_name(use.variant),
            "" if use.default or use.variant is None else "only with --all or --select",
        )
        for use in uses
    ]
    click.echo(report.table(("call", "arch", "kernel", "variant", "built"), lines))
    for use in missing:
        click.echo(f"no variant is declared for {use.call} on {use.arch}")
    sys.exit(1 if missing else 0)
