"""What the command line's options and arguments share."""

from __future__ import annotations

import contextlib
import functools
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import click

from ..artifacts.places import artifacts_to_read
from ..artifacts.trust import untrusted_allowed
from .progress import Progress

Command = Callable[..., Any]


class Directory(click.ParamType):
    """A path whose faults our own errors explain; only nothing at all is no directory."""

    name = "directory"

    def convert(self, value: Any, param: Any, ctx: Any) -> Path:
        """The path."""
        if not str(value):
            self.fail("an empty path", param, ctx)
        return Path(value)

    def shell_complete(self, ctx: Any, param: Any, incomplete: str) -> list[Any]:
        """Let the shell complete directories."""
        return click.Path(file_okay=False).shell_complete(ctx, param, incomplete)


DIRECTORY = Directory()


class File(click.ParamType):
    """A file to write or read, of which the same holds."""

    name = "file"
    convert = Directory.convert

    def shell_complete(self, ctx: Any, param: Any, incomplete: str) -> list[Any]:
        """Let the shell complete files."""
        return click.Path().shell_complete(ctx, param, incomplete)


FILE = File()


class ShardNumber(click.ParamType):
    """`2/3`: the second of three parts."""

    name = "shard"

    def convert(self, value: Any, param: Any, ctx: Any) -> tuple[int, int]:
        """Index, from 1 on, and count."""
        from ..artifacts.shard import MAX_SHARDS

        if isinstance(value, tuple):
            return value
        match = re.fullmatch(r"([1-9]\d{0,4})/([1-9]\d{0,4})", str(value), re.ASCII)
        index, count = (int(match[1]), int(match[2])) if match else (1, 0)
        if not index <= count <= MAX_SHARDS:
            self.fail(f"{value!r} is not I/N with 1 <= I <= N <= {MAX_SHARDS}", param, ctx)
        return index, count


SHARD = ShardNumber()


class Size(click.ParamType):
    """A number of bytes, such as `500M`."""

    name = "size"

    def convert(self, value: Any, param: Any, ctx: Any) -> int:
        """The bytes."""
        size = value if isinstance(value, int) else parse_size(str(value))
        if size is None:
            self.fail(f"{value!r} is not a size such as 500M, 1.5GiB or 1000000", param, ctx)
        return size


SIZE = Size()

_UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}
_SIZE = re.compile(r"(\d{1,15}(?:\.\d{1,6})?)\s*([KMGT]?)(?:iB|B)?", re.I | re.ASCII)


def parse_size(text: str) -> int | None:
    """Bytes of `500M` or `1.5GiB`, units being powers of 1024; None if it is no size."""
    match = _SIZE.fullmatch(text.strip())
    return match and int(float(match[1]) * _UNITS[match[2].upper()])


def show_size(count: int) -> str:
    """Bytes for people: `12.3 MiB`."""
    value, unit = float(count), "B"
    for larger in ("KiB", "MiB", "GiB", "TiB"):
        if value < 1024:
            break
        value, unit = value / 1024, larger
    return f"{value:.0f} B" if unit == "B" else f"{value:.1f} {unit}"


def directory_argument(command: Command) -> Command:
    """The artifact directory to read, by default the one that a loader would look at first."""

    @click.argument("directory", type=DIRECTORY, required=False)
    @functools.wraps(command)
    def with_default(directory: Path | None, **rest: Any) -> Any:
        return command(directory=directory or artifacts_to_read(), **rest)

    return with_default


def json_option(command: Command) -> Command:
    """`--json`: the command gets `as_json`."""
    return click.option(
        "--json", "as_json", is_flag=True, help="Print JSON for a program to read."
    )(command)


def quiet_option(command: Command) -> Command:
    """`--quiet`: the command gets `quiet`."""
    return click.option("-q", "--quiet", is_flag=True, help="Print only what is wrong.")(command)


def progress_options(command: Command) -> Command:
    """`--quiet` and `--verbose`: the command gets `quiet`, and `progress`, which is closed for it.

    The command must have `as_json` too, which silences progress.
    """

    @quiet_option
    @click.option(
        "-v", "--verbose", is_flag=True, help="Say on standard error what is done, and where."
    )
    @functools.wraps(command)
    def run(quiet: bool, verbose: bool, as_json: bool, **rest: Any) -> Any:
        if quiet and verbose:
            raise click.UsageError("--quiet and --verbose exclude each other")
        progress = Progress(quiet=quiet or as_json)
        with contextlib.ExitStack() as stack:
            stack.callback(progress.close)
            if verbose:
                stack.enter_context(_logging_shown())
            return command(quiet=quiet, as_json=as_json, progress=progress, **rest)

    return run


@contextlib.contextmanager
def _logging_shown() -> Iterator[None]:
    """Show on standard error what this package logs."""
    import logging  # not for `--help`

    logger, handler = logging.getLogger(__package__), logging.StreamHandler()
    handler.setFormatter(logging.Formatter("sonata-aot: %(message)s"))
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)


def trust_option(command: Command) -> Command:
    """`--allow-untrusted`: nothing is refused for its owner or mode, and what would be is shown."""

    @click.option(
        "--allow-untrusted",
        is_flag=True,
        help="Use directories that another user owns or can write; each is named on standard "
        "error, and in JSON under `untrusted`.",
    )
    @functools.wraps(command)
    def run(allow_untrusted: bool, **rest: Any) -> Any:
        if not allow_untrusted:
            return command(**rest)
        with untrusted_allowed() as faults:
            try:
                return command(**rest)
            finally:
                for fault in faults:
                    click.echo(f"sonata-aot: warning: used all the same: {fault}", err=True)

    return run


def arch_option(text: str, *, multiple: bool) -> Callable[[Command], Command]:
    """`--arch`, whose values a shell can complete."""
    name = "archs" if multiple else "arch"
    return click.option(
        "--arch", name, multiple=multiple, metavar="ARCH", help=text, shell_complete=_archs
    )


def kernel_option(text: str, *, multiple: bool) -> Callable[[Command], Command]:
    """`--kernel`, whose values a shell can complete."""
    name = "kernels" if multiple else "kernel"
    return click.option(
        "--kernel", name, multiple=multiple, metavar="NAME", help=text, shell_complete=_kernels
    )


def from_option(command: Command) -> Command:
    """`--from`: the command gets `modules`."""
    return click.option(
        "--from",
        "modules",
        multiple=True,
        metavar="MODULE",
        help="Take kernels from the SPECS of this module, such as mypkg.kernels, instead of those "
        "of sonata_aot.kernels and of installed packages; repeatable.",
    )(command)


def selection_options(command: Command) -> Command:
    """What a build is to consist of: the command gets `selection`, a `plan.Selection`."""

    @arch_option(
        "Architecture to build for, such as sm86 or 9.0a; repeat for several. "
        "Without it, TORCH_CUDA_ARCH_LIST.",
        multiple=True,
    )
    @from_option
    @kernel_option("Build this kernel instead of the default ones; repeatable.", multiple=True)
    @click.option(
        "--all",
        "everything",
        is_flag=True,
        help="Build every declared variant, not only those that calls get; without --kernel, of "
        "every kernel.",
    )
    @click.option(
        "--select",
        type=FILE,
        help="Build only what a list of shapes needs, as `sonata-aot shapes --json` writes it.",
    )
    @functools.wraps(command)
    def run(
        archs: tuple[str, ...],
        modules: tuple[str, ...],
        kernels: tuple[str, ...],
        everything: bool,
        select: Path | None,
        **rest: Any,
    ) -> Any:
        from . import plan

        if select and (modules or kernels or everything):
            raise click.UsageError("--select excludes --from, --kernel and --all")
        if select:
            selection = plan.select(select, archs)
        else:
            specs = plan.choose_kernels(kernels, modules, everything=everything)
            selection = plan.Selection(specs, plan.choose_archs(archs), everything, None)
        return command(selection=selection, **rest)

    return run


def out_option(command: Command) -> Command:
    """`--out`, the directory to publish into: the command gets `out`, or None."""
    return click.option(
        "--out",
        type=DIRECTORY,
        help="Directory to publish into. Default: SONATA_AOT_DIR, or the user's cache.",
    )(command)


def _archs(ctx: Any, param: Any, incomplete: str) -> list[str]:
    from ..artifacts.arch import KNOWN

    return [arch.name for arch in KNOWN if arch.name.startswith(incomplete)]


def _kernels(ctx: Any, param: Any, incomplete: str) -> list[str]:
    from .plan import known_kernels

    known = known_kernels(ctx.params.get("modules") or ())
    return [name for name in known if name.startswith(incomplete)]
