"""The commands that look after the compile cache: parse, call, print."""

from __future__ import annotations

import time

import click

from .options import SIZE, json_option, quiet_option, show_size, trust_option

# Only what `--help` needs is imported above.


@click.group()
def cache() -> None:
    """Show the compile cache, and keep it small.

    It lies in SONATA_AOT_CACHE_DIR, or in the user's cache directory. Every version of the tool can
    use the same one. Nothing here touches artifact directories, but for what a killed build left in
    the default one.
    """


@cache.command()
@json_option
def path(as_json: bool) -> None:
    """Print where the cache is."""
    from ..artifacts.places import cache_root
    from . import report

    if as_json:
        report.print_json({"directory": str(cache_root())})
    else:
        click.echo(str(cache_root()))


@cache.command("list")
@trust_option
@json_option
def list_(as_json: bool) -> None:
    """Show each entry, what was used last standing last.

    An entry that this version cannot read, damaged or another version's, has no kernel.
    """
    from . import report
    from .cache import Cache
    from .prune import contents

    store = Cache()
    found = []
    for item in contents(store):
        if not item.is_log:
            entry = store.find(item.key)
            found.append((item, entry and entry.binary))
    if as_json:
        entries = [
            {
                "key": item.key,
                "kernel": binary and binary.kernel,
                "variant": binary and binary.variant,
                "arch": binary and binary.arch,
                "bytes": item.bytes,
                "used": _time(item.used),
            }
            for item, binary in found
        ]
        report.print_json({"directory": str(store.root), "entries": entries})
        return
    rows = [
        (
            item.key[:12],
            binary.kernel if binary else "",
            binary.variant_name if binary else "",
            binary.arch if binary else "",
            item.bytes,
            _time(item.used),
        )
        for item, binary in found
    ]
    click.echo(report.table(("key", "kernel", "variant", "arch", "bytes", "used (UTC)"), rows))


@cache.command()
@trust_option
@json_option
def size(as_json: bool) -> None:
    """Print how much there is."""
    from . import report
    from .cache import Cache
    from .prune import contents

    store = Cache()
    items = contents(store)
    logs = [item for item in items if item.is_log]
    total = sum(item.bytes for item in items)
    if as_json:
        report.print_json(
            {
                "directory": str(store.root),
                "entries": len(items) - len(logs),
                "logs": len(logs),
                "bytes": total,
            }
        )
        return
    entries = report.plural(len(items) - len(logs), "entry", "entries")
    kept = report.plural(len(logs), "log", "logs")
    click.echo(f"{store.root}: {entries} and {kept}, {show_size(total)}")


@cache.command()
@click.option(
    "--max-size",
    type=SIZE,
    metavar="SIZE",
    help="Most that may stay, such as 500M or 2GiB (powers of 1024). Without it, all entries stay.",
)
@trust_option
@quiet_option
@json_option
def prune(max_size: int | None, quiet: bool, as_json: bool) -> None:
    """Remove what killed builds left and, with --max-size, what was used longest ago.

    What a running build uses stays, even if the cache is then larger.
    """
    _prune(max_size, quiet, as_json)


@cache.command()
@trust_option
@quiet_option
@json_option
def clear(quiet: bool, as_json: bool) -> None:
    """Remove every entry and log that no running build uses."""
    _prune(0, quiet, as_json)


def _prune(most: int | None, quiet: bool, as_json: bool) -> None:
    from . import report
    from .cache import Cache
    from .prune import prune as run

    store = Cache()
    done = run(store, most)
    if as_json:
        report.print_json({"directory": str(store.root), **vars(done)})
    elif not quiet:
        click.echo(f"removed {_items(done.removed)}, {show_size(done.removed_bytes)}")
        click.echo(f"{store.root}: {_items(done.left)} left, {show_size(done.left_bytes)}")
        if done.in_use:
            click.echo(f"of these {show_size(done.in_use)} in use by running builds")


def _items(count: int) -> str:
    from . import report

    return report.plural(count, "entry or log", "entries and logs")


def _time(stamp: int) -> str:
    """Second of a stamp in ns, in UTC."""
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(stamp // 10**9))
