"""The command line: parse, call, print. What is done lives in the modules beside this one."""

from __future__ import annotations

import codecs
import contextlib
import io
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import click

from ..artifacts import __version__, environment
from ..artifacts.errors import SonataError
from .cache_cli import cache
from .completion_cli import completion
from .diff_cli import diff
from .measure_cli import bench, tune
from .merge_cli import merge
from .new_cli import new
from .options import (
    DIRECTORY,
    FILE,
    SHARD,
    arch_option,
    directory_argument,
    from_option,
    json_option,
    kernel_option,
    out_option,
    progress_options,
    quiet_option,
    selection_options,
    trust_option,
)
from .plan_cli import plan, show_plan
from .progress import Progress
from .shapes_cli import shapes
from .wheel_cli import wheel

if TYPE_CHECKING:
    from .plan import Selection

# Only what `--help` needs is imported above; each command brings its own.


class _Group(click.Group):
    """Prints a `SonataError` as one message, without a traceback."""

    def main(self, *args: Any, **kwargs: Any) -> Any:
        for stream in (sys.stdout, sys.stderr):
            if isinstance(stream, io.TextIOWrapper):
                # A path may hold bytes that are no text: they are shown as they are.
                exact = codecs.lookup(stream.encoding).name == "utf-8"
                stream.reconfigure(errors="surrogateescape" if exact else "backslashreplace")
        try:
            return super().main(*args, **kwargs)
        except OSError as error:
            # Everything else is explained where it happens: this is the output itself.
            with contextlib.suppress(OSError):
                click.echo(f"sonata-aot: cannot write the output: {error.strerror}", err=True)
            os._exit(1)  # an orderly exit would flush, and so fail, again

    def invoke(self, ctx: click.Context) -> Any:
        if environment.NO_COLOR.get():
            ctx.color = False
        try:
            return super().invoke(ctx)
        except SonataError as error:
            fail(error)


def fail(error: SonataError) -> NoReturn:
    """Print an error and exit with its code."""
    click.echo(f"sonata-aot: {error}", err=True)
    sys.exit(error.exit_code)


@click.group(cls=_Group, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="sonata-aot")
def main() -> None:
    """Compile CuTe DSL kernels ahead of time, and look after what was compiled."""


main.add_command(bench)
main.add_command(cache)
main.add_command(completion)
main.add_command(diff)
main.add_command(merge)
main.add_command(new)
main.add_command(plan)
main.add_command(shapes)
main.add_command(tune)
main.add_command(wheel)


@main.command()
@selection_options
@out_option
@click.option(
    "--shard",
    type=SHARD,
    metavar="I/N",
    help="Build only part I of N, the first being 1, into --out, for `sonata-aot merge`.",
)
@click.option(
    "--jobs",
    type=click.IntRange(1),
    metavar="N",
    help="Most workers at once. Default: MAX_JOBS, or the cores.",
)
@click.option(
    "--timeout",
    type=click.IntRange(1, 86400),
    default=300,
    show_default=True,
    metavar="SECONDS",
    help="Longest that one kernel may compile.",
)
@click.option(
    "--keep-going/--fail-fast",
    default=True,
    show_default=True,
    help="Where a kernel fails, compile the others all the same, or stop.",
)
@click.option(
    "--dry-run",
    is_flag=True,
    help="Compile and write nothing: only show what would be done, as `sonata-aot plan` does.",
)
@trust_option
@progress_options
@json_option
def build(
    selection: Selection,
    out: Path | None,
    shard: tuple[int, int] | None,
    jobs: int | None,
    timeout: int,
    keep_going: bool,
    dry_run: bool,
    quiet: bool,
    progress: Progress,
    as_json: bool,
) -> None:
    """Compile kernels into an artifact directory.

    Needs no GPU, no CUDA toolkit and no torch. What is cached is not compiled again. Afterwards the
    directory holds exactly what was asked for. If a kernel fails, nothing is published; what did
    compile stays in the cache.
    """
    from . import report
    from .build import build as run

    if shard and out is None:
        raise click.UsageError("--shard needs --out: a part is not published where loaders look")
    if dry_run:
        show_plan(selection, shard, out, quiet=quiet, as_json=as_json)
        return
    result = run(
        selection.specs,
        selection.archs,
        everything=selection.everything,
        only=selection.only,
        shard=shard,
        out=out,
        workers=jobs,
        timeout=timeout,
        keep_going=keep_going,
        progress=progress,
    )
    progress.close()
    binaries = result.manifest.binaries
    if as_json:
        report.print_json(
            {
                "directory": str(result.directory),
                "compiled": sorted(result.compiled),
                "cached": sorted({b.key for b in binaries} - result.compiled),
                "written": result.written,
                "removed": list(result.removed),
                "left_out": report.left_out_data(result.left_out),
                "shard": "{}/{}".format(*shard) if shard else None,
                "manifest": report.manifest_data(result.manifest),
            }
        )
        return
    if quiet:
        return
    click.echo(report.binary_table(binaries))
    cached = len(binaries) - len(result.compiled)
    done = "everything was cached"
    if result.compiled:
        done = f"{len(result.compiled)} compiled, {cached} cached"
    click.echo(f"\n{report.plural(len(binaries), 'binary', 'binaries')}: {done}")
    for line in report.left_out_lines(result.left_out):
        click.echo(line)
    if result.removed:
        # The directory holds the selection alone: say what that cost.
        click.echo(f"removed, since not asked for: {', '.join(result.removed)}")
    click.echo(f"{'published in' if result.written else 'unchanged in'} {result.directory}")


@main.command("list")
@directory_argument
@trust_option
@json_option
def list_(directory: Path, as_json: bool) -> None:
    """Show what an artifact directory holds.

    DIRECTORY defaults to SONATA_AOT_DIR, an installed wheel's artifacts, or the user's cache.
    """
    from ..artifacts.store import open_artifacts
    from . import report

    manifest = open_artifacts(directory).manifest
    if as_json:
        report.print_json({"directory": str(directory), **report.manifest_data(manifest)})
        return
    click.echo(report.binary_table(manifest.binaries))
    commit = manifest.source.commit
    origin = (
        f"commit {commit[:12]}{' (changed)' if manifest.source.dirty else ''}"
        if commit
        else ("no commit")
    )
    compiler = manifest.compiler.get("nvidia-cutlass-dsl", "unknown")
    click.echo(
        f"\n{directory}: sonata-aot {manifest.tool}, nvidia-cutlass-dsl {compiler}, {origin}, "
        f"digest {manifest.digest[:12]}"
    )


@main.command()
@directory_argument
@click.option(
    "--sources",
    is_flag=True,
    help="Also check where it came from: that the kernels installed here, by source digest, "
    "declaration and cache key, are those that it was built from.",
)
@from_option
@click.option(
    "--signature",
    type=FILE,
    help="Also check this signature of the manifest, such as manifest.json.sig beside it.",
)
@click.option("--allowed-signers", type=FILE, help="Whose signatures count, as in ssh-keygen(1).")
@trust_option
@quiet_option
@json_option
def verify(
    directory: Path,
    sources: bool,
    modules: tuple[str, ...],
    signature: Path | None,
    allowed_signers: Path | None,
    quiet: bool,
    as_json: bool,
) -> None:
    """Check every byte of an artifact directory; exit 1 if anything is wrong.

    Needs no GPU and no compiler. DIRECTORY defaults to SONATA_AOT_DIR, an installed wheel's
    artifacts, or the user's cache.
    """
    from ..artifacts.verify import Failed, Passed, Unexpected
    from ..artifacts.verify import verify as run
    from . import report

    if modules and not sources:
        raise click.UsageError("--from says where --sources looks: give that too")
    if bool(signature) != bool(allowed_signers):
        raise click.UsageError("--signature and --allowed-signers need each other")
    outcomes = run(directory)
    if sources:
        from .origin import check_origin

        outcomes += check_origin(directory, modules)
    if signature and allowed_signers:
        from ..artifacts.signature import check_signature

        outcomes.append(check_signature(directory, signature, allowed_signers))
    bad = [outcome for outcome in outcomes if not isinstance(outcome, Passed)]
    if as_json:
        report.print_json(
            {
                "directory": str(directory),
                "ok": not bad,
                "outcomes": [
                    {"outcome": type(item).__name__.lower(), **vars(item)} for item in outcomes
                ],
            }
        )
    else:
        for outcome in outcomes:
            match outcome:
                case Passed(subject=subject):
                    if not quiet:
                        click.echo(f"ok    {subject}")
                case Failed(subject=subject, problem=problem, remedy=remedy):
                    click.echo(f"FAIL  {subject}: {problem}; {remedy}")
                case Unexpected(subject=subject):
                    click.echo(f"FAIL  {subject}: not named by the manifest; remove it or rebuild")
        if bad or not quiet:
            click.echo(f"{directory}: {len(outcomes) - len(bad)} ok, {len(bad)} wrong")
    sys.exit(1 if bad else 0)


@main.command()
@directory_argument
@arch_option("Only what was built for this architecture.", multiple=False)
@kernel_option("Only this kernel.", multiple=False)
@click.option(
    "--variant",
    metavar="TEXT",
    help="Only variants with these choices, such as m=2,side=a; shown in full.",
)
@click.option("--check", is_flag=True, help="Hold each binary against its budget; exit 1 if over.")
@trust_option
@progress_options
@json_option
def inspect(
    directory: Path,
    arch: str | None,
    kernel: str | None,
    variant: str | None,
    check: bool,
    quiet: bool,
    progress: Progress,
    as_json: bool,
) -> None:
    """Show what decides a kernel's speed, read off its machine code.

    Occupancy, loads and how much they have in flight, the instruction mix, and which resource of a
    stated GPU bounds it. Needs no GPU. DIRECTORY defaults to SONATA_AOT_DIR, an installed wheel's
    artifacts, or the user's cache.
    """
    from ..artifacts.store import open_artifacts
    from . import inspect_report, report
    from .budget import breaches
    from .inspect import inspect as run
    from .inspect import select

    artifacts = open_artifacts(directory)
    chosen = select(artifacts.manifest.binaries, arch=arch, kernel=kernel, variant=variant)
    figures = run(artifacts, chosen, progress)
    progress.close()
    budgets = {item.name: item.budget for item in artifacts.manifest.kernels}
    found = [
        (binary, item, breaches(item, budgets[binary.kernel], binary.variant))
        for binary, item in zip(chosen, figures, strict=True)
    ]
    bad = sum(bool(broken) for *_, broken in found)
    if as_json:
        binaries = inspect_report.data(found)
        report.print_json({"directory": str(directory), "ok": not bad, "binaries": binaries})
    elif check:
        shown = [item for item in found if item[2] or not quiet]
        if shown:
            click.echo("\n".join(inspect_report.verdict(*item) for item in shown))
        if bad or not quiet:
            click.echo(f"{directory}: {len(found) - bad} within budget, {bad} not")
    elif variant or len(found) == 1:
        click.echo("\n\n".join(inspect_report.block(*item) for item in found))
    else:
        click.echo(inspect_report.tables(found))
        click.echo("\nIn full, of some: --variant, as in `--variant m=2`")
    sys.exit(1 if check and bad else 0)


@main.command()
@click.argument("directory", type=DIRECTORY, required=False)
@arch_option("As the loader's arch=: only this architecture.", multiple=False)
@click.option("--allow-ptx", is_flag=True, help="As the loader's allow_ptx=True.")
@trust_option
@json_option
def doctor(directory: Path | None, arch: str | None, allow_ptx: bool, as_json: bool) -> None:
    """Show what this machine has, and which artifacts a loader would choose and why.

    Looks where the loader looks, or only in DIRECTORY.
    """
    from ..artifacts.arch import Arch
    from . import report
    from .doctor import examine, render

    found = examine(directory, arch=arch and Arch.parse(arch).name, allow_ptx=allow_ptx)
    if as_json:
        report.print_json(found)
    else:
        click.echo(render(found))
