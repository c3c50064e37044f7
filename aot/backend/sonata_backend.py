"""The build backend: scikit-build-core's, which also compiles kernels where an arch is asked for.

    pip wheel . -C arch=sm86
    python -m build --wheel -C arch=sm86 -C arch=sm90 -C platform=manylinux_2_28_x86_64

Settings: `arch`, which may be repeated, and, as `sonata-aot wheel` has them, `kernel`, `all`,
`select`, `platform` and `signing-key`. Any others are scikit-build-core's. Without `arch` nothing
but the launcher is built, and the compiler of kernels is not needed.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from scikit_build_core import build as launcher

__all__ = [
    "build_editable",
    "build_sdist",
    "build_wheel",
    "get_requires_for_build_editable",
    "get_requires_for_build_sdist",
    "get_requires_for_build_wheel",
    "prepare_metadata_for_build_editable",
    "prepare_metadata_for_build_wheel",
]

_ROOT = Path(__file__).resolve().parents[2]
_ROOMS = ("aot", "artifacts", "kernels", "loader")
# The start of 1980, the first second that a zip file can hold: the same wherever a build runs.
_EPOCH = "315532800"
_OURS = ("arch", "kernel", "all", "select", "platform", "signing-key")
_YES, _NO = ("1", "true", "yes", "on"), ("", "0", "false", "no", "off")

Settings = dict[str, Any] | None


def get_requires_for_build_sdist(config_settings: Settings = None) -> list[str]:
    """What scikit-build-core needs: a front end that makes both gives both the same settings."""
    return launcher.get_requires_for_build_sdist(_split(config_settings)[1])


def build_sdist(sdist_directory: str, config_settings: Settings = None) -> str:
    """The source distribution; `arch` changes nothing in it."""
    with _epoch():
        return launcher.build_sdist(sdist_directory, _split(config_settings)[1])


def get_requires_for_build_editable(config_settings: Settings = None) -> list[str]:
    """What scikit-build-core needs."""
    return launcher.get_requires_for_build_editable(_of_editable(config_settings))


def prepare_metadata_for_build_editable(
    metadata_directory: str, config_settings: Settings = None
) -> str:
    """The metadata of an editable install."""
    rest = _of_editable(config_settings)
    return launcher.prepare_metadata_for_build_editable(metadata_directory, rest)


def build_editable(
    wheel_directory: str, config_settings: Settings = None, metadata_directory: str | None = None
) -> str:
    """An editable install, which has no artifacts: it would not notice when kernels change."""
    rest = _of_editable(config_settings)
    return launcher.build_editable(wheel_directory, rest, metadata_directory)


def get_requires_for_build_wheel(config_settings: Settings = None) -> list[str]:
    """What scikit-build-core needs; with `arch` also what compiles kernels."""
    options, rest = _split(config_settings)
    found = launcher.get_requires_for_build_wheel(rest)
    if not options:
        return found
    project = tomllib.loads((_ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = project["optional-dependencies"]
    audit = [need for need in extras["release"] if need.startswith("auditwheel")]
    return [
        *found,
        *project["dependencies"],
        *extras["build"],
        *(audit if "--platform" in options else ()),
    ]


def prepare_metadata_for_build_wheel(
    metadata_directory: str, config_settings: Settings = None
) -> str:
    """The metadata of the wheel, but for the lists of files and of materials."""
    options, rest = _split(config_settings)
    name = launcher.prepare_metadata_for_build_wheel(metadata_directory, rest)
    if options:
        metadata = Path(metadata_directory) / name / "METADATA"
        head, gap, body = metadata.read_text(encoding="utf-8").partition("\n\n")
        head += "\nLicense-File: NOTICE.artifacts"
        metadata.write_text(head + gap + body, encoding="utf-8")
    return name


def build_wheel(
    wheel_directory: str, config_settings: Settings = None, metadata_directory: str | None = None
) -> str:
    """A wheel of the launcher and the rooms; with `arch` also of kernels compiled for it."""
    options, rest = _split(config_settings)
    if not options:
        with _epoch():
            return launcher.build_wheel(wheel_directory, rest, metadata_directory)
    with _epoch(), tempfile.TemporaryDirectory(prefix="sonata-aot-") as folder:
        tool = Path(folder) / "tool"
        # A wrong architecture or kernel is told at once, not after the launcher was compiled.
        nowhere = ["--out", str(Path(folder) / "nothing")]
        _tool(["plan", "--json", *nowhere, *_selecting(options)], tool)
        base = Path(folder) / launcher.build_wheel(folder, rest, None)
        made = Path(folder) / "made"
        command = ["wheel", "--base", str(base), "--out", str(made), "--json", *options]
        path = Path(json.loads(_tool(command, tool))["wheel"])
        # Not renamed: a front end's folder may be on another file system.
        shutil.copyfile(path, Path(wheel_directory) / path.name)
    return path.name


@contextlib.contextmanager
def _epoch() -> Iterator[None]:
    """A time for all files; an empty variable counts as unset, as everywhere in this product."""
    before = os.environ.get("SOURCE_DATE_EPOCH")
    os.environ["SOURCE_DATE_EPOCH"] = before or _EPOCH
    try:
        yield
    finally:
        if before is None:
            del os.environ["SOURCE_DATE_EPOCH"]
        else:
            os.environ["SOURCE_DATE_EPOCH"] = before


def _of_editable(settings: Settings) -> dict[str, Any]:
    """What is scikit-build-core's of an editable install's settings."""
    options, rest = _split(settings)
    if options:
        raise SystemExit(
            "-C arch is for wheels; of an editable install `sonata-aot build` makes the artifacts"
        )
    return rest


def _split(settings: Settings) -> tuple[list[str], dict[str, Any]]:
    """The options of `sonata-aot wheel`, none where no arch is asked for; and what is left."""
    rest = dict(settings or {})
    ours = {name: _values(rest.pop(name)) for name in _OURS if name in rest}
    archs = [arch for value in ours.pop("arch", []) for arch in re.split(r"[\s,;]+", value) if arch]
    if not archs:
        if ours:
            raise SystemExit(f"-C {next(iter(ours))} needs -C arch: say what to build for")
        return [], rest
    options = [f"--arch={arch}" for arch in archs]
    for word in (value.lower() for value in ours.pop("all", [])):
        if word not in _YES + _NO:
            raise SystemExit(f"-C all={word}: set it to 1 or 0")
        options += ["--all"] if word in _YES else []
    for name, values in ours.items():
        options += [part for value in values for part in (f"--{name}", value)]
    return options, rest


def _selecting(options: list[str]) -> list[str]:
    """Those of the options that say which kernels to build."""
    others = {"--platform", "--signing-key"}
    pairs = zip(["", *options], options, strict=False)
    return [option for before, option in pairs if not {before, option} & others]


def _values(value: Any) -> list[str]:
    return [str(item) for item in value] if isinstance(value, list) else [str(value)]


def _tool(command: list[str], folder: Path) -> str:
    """Output of the command line of this very source tree, which is not installed."""
    package = folder / "path" / "sonata_aot"
    if not package.exists():
        package.mkdir(parents=True)
        for room in _ROOMS:
            (package / room).symlink_to(_ROOT / room)
    # In front of all else, but not instead of it: the environment of an isolated build is there.
    path = os.pathsep.join(filter(None, [str(package.parent), os.environ.get("PYTHONPATH")]))
    environ = {**os.environ, "PYTHONPATH": path}
    where = "import sonata_aot.aot; print(sonata_aot.aot.__path__[0])"
    found = _run([sys.executable, "-c", where], environ, folder)
    if Path(found.strip()).resolve() != _ROOT / "aot":
        raise SystemExit(
            f"another sonata-aot is installed here for development, {found.strip()}; "
            "build with isolation, or in another environment"
        )
    return _run([sys.executable, "-m", "sonata_aot.aot", *command], environ, Path.cwd())


def _run(command: list[str], environ: dict[str, str], folder: Path) -> str:
    # What it prints on standard error is for whoever runs the build.
    done = subprocess.run(
        command, env=environ, cwd=folder, stdout=subprocess.PIPE, text=True, check=False
    )
    if done.returncode != 0:
        raise SystemExit(done.returncode)
    return done.stdout
