"""Where artifacts and the compile cache live."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from pathlib import Path

from . import environment
from .errors import StoreError

# Artifacts that a wheel carries lie beside this module's package.
_BUNDLED = Path(__file__).resolve().parent / "bundled"


@dataclass(frozen=True)
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


def search(path: Path | None) -> tuple[Place, ...]:
    """Where to look for artifacts, in order.

    A directory that somebody named, by argument or by SONATA_AOT_DIR, ends the list: a server that
    was told what to run must not run something else because of a typing error.
    """
    if path is not None:
        return (Place(path, "the path given", named=True),)
    chosen = environment.SONATA_AOT_DIR.get()
    if chosen is not None:
        return (Place(chosen, "SONATA_AOT_DIR", named=True),)
    places = [Place(_BUNDLED, "the installed wheel", named=False)]
    with contextlib.suppress(StoreError):  # no home directory: no user cache to look in
        places.append(Place(cache_root() / "artifacts", "the user cache", named=False))
    return tuple(places)
