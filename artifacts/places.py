"""Where artifacts and the compile cache live."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

from . import environment
from .errors import StoreError
from .record import record

# Artifacts that a wheel carries lie beside this module's package.
_BUNDLED = Path(__file__).resolve().parent / "bundled"
# A wheel with artifacts alone names its import package under this group of entry points, and holds
# them in this folder of it.
ENTRY_POINTS = "sonata_aot.artifacts"
DATA_FOLDER = "artifacts"


@record
class Place:
    """A directory that may hold artifacts.

    `named` is true where somebody chose it: a fault there is an error, not a reason to look on.
    """

    path: Path
    origin: str
    named: bool


def artifacts_to_read() -> Path:
    """What a command reads that was not told: SONATA_AOT_DIR, or what an installed wheel has.

    As a loader, so that a server's `verify` checks what it loads; without either, where builds
    publish.
    """
    for place in search(None):
        if place.named or place.path.is_dir():
            return place.path
    return default_artifacts()


def cache_root() -> Path:
    """SONATA_AOT_CACHE_DIR, or the platform's cache directory of this user.

    Raises:
        StoreError: the user has no home directory.
    """
    chosen = environment.SONATA_AOT_CACHE_DIR.get()
    if chosen is not None:
        return chosen
    import platformdirs  # not for whoever names a place: 2 ms

    try:
        return Path(platformdirs.user_cache_dir("sonata-aot", appauthor=False))
    except RuntimeError:  # neither HOME nor an entry in the user database
        raise StoreError(
            "this user has no home directory, so there is no place for a cache",
            remedy="set SONATA_AOT_CACHE_DIR, or name a directory (--out, SONATA_AOT_DIR)",
        ) from None


def default_artifacts() -> Path:
    """Where `sonata-aot build` publishes unless told otherwise: SONATA_AOT_DIR, or the cache."""
    return environment.SONATA_AOT_DIR.get() or cache_root() / "artifacts"


def search(path: Path | None) -> Iterator[Place]:
    """Where to look for artifacts, in order; each place is looked up when it is asked for.

    A directory that somebody named, by argument or by SONATA_AOT_DIR, ends the list: a server that
    was told what to run must not run something else because of a typing error.
    """
    if path is not None:
        yield Place(path, "the path given", named=True)
        return
    chosen = environment.SONATA_AOT_DIR.get()
    if chosen is not None:
        yield Place(chosen, "SONATA_AOT_DIR", named=True)
        return
    yield Place(_BUNDLED, "the installed wheel", named=False)
    yield from _data_wheels()
    with contextlib.suppress(StoreError):  # no home directory: no user cache to look in
        yield Place(cache_root() / "artifacts", "the user cache", named=False)


def _data_wheels() -> Iterator[Place]:
    """The artifacts of wheels that hold nothing else, sorted by the names of the distributions."""
    import importlib.metadata  # not where the first place will do: milliseconds
    import importlib.util

    found = importlib.metadata.entry_points(group=ENTRY_POINTS)
    for entry in sorted(found, key=lambda entry: (entry.dist.name if entry.dist else "", entry)):
        with contextlib.suppress(ImportError, ValueError):  # a package that is half removed
            spec = importlib.util.find_spec(entry.value)  # imports nothing: no dots in the name
            for folder in (spec and spec.submodule_search_locations) or ():
                name = entry.dist.name if entry.dist else entry.value
                yield Place(Path(folder) / DATA_FOLDER, f"the installed {name}", named=False)
