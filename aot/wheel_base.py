"""The launcher, loader and tool that a wheel gets its artifacts added to: found, not guessed."""

from __future__ import annotations

import importlib.metadata
import json
import os
import subprocess
import sys
import tempfile
import urllib.parse
import urllib.request
from pathlib import Path

from ..artifacts import environment
from ..artifacts.errors import BuildError, IntegrityError
from .wheel_file import Wheel, make_wheel, read_record, read_wheel, record_digest

DISTRIBUTION = "sonata-aot"
# Where artifacts lie in the wheel that has a launcher too; what is there already is replaced.
BUNDLED = "sonata_aot/artifacts/bundled"
# What an installer adds to the metadata.
_INSTALLERS = {"RECORD", "INSTALLER", "REQUESTED", "direct_url.json", "uv_cache.json"}
_REINSTALL = "reinstall sonata-aot, or give --base a wheel of it"


def find_base(base: Path | None, *, isolation: bool) -> tuple[str, Wheel]:
    """The wheel to add artifacts to, and in words where it is from.

    `base` if given; else a wheel built from the checkout, if this tool is an editable install of
    one; else the installed files, packed again. `isolation` is for the build.

    Raises:
        BuildError: the checkout does not build, or the tool is not installed at all.
        IntegrityError: a file is not what its RECORD says.
    """
    if base is not None:
        wheel = read_wheel(base)
        if wheel.name != DISTRIBUTION:
            raise BuildError(f"{base} is no wheel of {DISTRIBUTION}", remedy="name one that is")
        return str(base), _bare(wheel)
    distribution = _distribution()
    checkout = _checkout(distribution)
    if checkout is not None:
        return f"the checkout {checkout}", _bare(_built(checkout, isolation=isolation))
    return "the installed tool, packed again", _bare(installed_wheel(distribution))


def installed_wheel(distribution: importlib.metadata.Distribution) -> Wheel:
    """A wheel of what an installed distribution consists of; every file as its RECORD says.

    Raises:
        IntegrityError: a file is missing or was changed.
    """
    text = distribution.read_text("RECORD")
    root = Path(str(distribution.locate_file("")))
    files: dict[str, bytes] = {}
    metadata = ""
    for name, digest in read_record(text or "").items():
        folder, _, rest = name.partition("/")
        if folder.endswith(".dist-info"):
            metadata = folder
            if rest in _INSTALLERS:
                continue
        elif folder in ("..", "") or name.endswith(".pyc"):  # scripts, made from entry points
            continue
        try:
            files[name] = (root / name).read_bytes()
        except OSError as error:
            raise IntegrityError(
                f"{root / name} cannot be read: {error.strerror}", remedy=_REINSTALL
            ) from None
        if record_digest(files[name]) != digest:
            raise IntegrityError(f"{root / name} is not as its RECORD says", remedy=_REINSTALL)
    return make_wheel(files, metadata, str(root))


def licence_text() -> bytes:
    """The product's own licence, as it is installed.

    Raises:
        BuildError: the tool is not installed.
    """
    text = _distribution().read_text("licenses/LICENSE")
    if text is None:
        raise BuildError(f"{DISTRIBUTION} is installed without its LICENSE", remedy=_REINSTALL)
    return text.encode()


def _distribution() -> importlib.metadata.Distribution:
    try:
        return importlib.metadata.distribution(DISTRIBUTION)
    except importlib.metadata.PackageNotFoundError:
        raise BuildError(f"{DISTRIBUTION} is not installed here", remedy=_REINSTALL) from None


def _checkout(distribution: importlib.metadata.Distribution) -> Path | None:
    """The folder that an editable install is of."""
    try:
        content = json.loads(distribution.read_text("direct_url.json") or "{}")
        if not content.get("dir_info", {}).get("editable"):
            return None
        path = urllib.request.url2pathname(urllib.parse.urlsplit(content["url"]).path)
    except (ValueError, KeyError, AttributeError):
        return None
    return Path(path)


def _built(checkout: Path, *, isolation: bool) -> Wheel:
    options = [] if isolation else ["--no-build-isolation"]
    with tempfile.TemporaryDirectory(prefix="sonata-aot-") as folder:
        where = ["--wheel-dir", folder, str(checkout)]
        done = subprocess.run(
            [sys.executable, "-m", "pip", "wheel", "--no-deps", *options, *where],
            env={**os.environ, "SOURCE_DATE_EPOCH": str(environment.SOURCE_DATE_EPOCH.get())},
            capture_output=True,
            text=True,
            errors="replace",
            check=False,
        )
        found = [*Path(folder).glob("*.whl")]
        if done.returncode != 0 or len(found) != 1:
            said = "\n".join(f"    {line}" for line in (done.stdout + done.stderr).splitlines())
            raise BuildError(
                f"{checkout} does not build:\n{said}\n",
                remedy="mend what is said above, or give --base a wheel of sonata-aot",
            )
        return read_wheel(found[0])


def _bare(wheel: Wheel) -> Wheel:
    """The wheel without artifacts."""
    wheel.files = {n: d for n, d in wheel.files.items() if not n.startswith(f"{BUNDLED}/")}
    return wheel
