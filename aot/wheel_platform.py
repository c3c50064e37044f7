"""Which platforms a wheel runs on, as auditwheel finds by its libraries and symbol versions."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from ..artifacts.errors import BuildError, MissingDependency, UsageError
from .wheel_file import Wheel

_TAG = re.compile(r"manylinux_(\d{1,3})_(\d{1,3})_(\w{1,32})", re.ASCII)


def require_platform(wheel: Wheel, platform: str) -> None:
    """Refuse a tag that auditwheel's policy does not grant the wheel.

    Raises:
        UsageError: it is no manylinux tag.
        MissingDependency: auditwheel is not installed.
        BuildError: the wheel needs a newer glibc, or a library that not every system has.
    """
    wanted = _TAG.fullmatch(platform)
    if wanted is None:
        raise UsageError(
            f"{platform!r} is no manylinux platform",
            remedy="name one such as manylinux_2_28_x86_64",
        )
    report = _audit(wheel)
    found = _TAG.fullmatch(report["overall_tag"])
    if (
        found is None
        or (int(found[1]), int(found[2])) > (int(wanted[1]), int(wanted[2]))
        or found[3] != wanted[3]
    ):
        raise BuildError(
            f"{wheel.file_name} is {report['overall_tag']} and not {platform}: it needs "
            f"{_needs(report)}",
            remedy="build the launcher for an older glibc: `make wheels` shows how",
        )


def _audit(wheel: Wheel) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="sonata-aot-") as folder:
        path = Path(folder) / wheel.file_name
        path.write_bytes(wheel.to_bytes())
        command = [sys.executable, "-m", "auditwheel", "show", "--json", str(path)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    if "No module named auditwheel" in done.stderr:
        raise MissingDependency(
            "auditwheel is not installed, which tells what platforms a wheel is for",
            remedy="install it with `pip install 'sonata-aot[release]'`",
        )
    try:
        return json.loads(done.stdout)
    except ValueError:
        said = done.stderr.strip().splitlines()[-1:]
        raise BuildError(
            f"auditwheel failed on {wheel.file_name}: {' '.join(said)}",
            remedy="run `auditwheel show` on the wheel by hand",
        ) from None


def _needs(report: dict[str, Any]) -> str:
    versions = [f"{library} {max(found, key=_number)}" for library, found in _symbols(report)]
    return (
        ", ".join([*versions, *sorted(report.get("external_libs", {}))]) or "what it does not say"
    )


def _symbols(report: dict[str, Any]) -> list[tuple[str, list[str]]]:
    return sorted((name, found) for name, found in report["versioned_symbols"].items() if found)


def _number(version: str) -> list[int]:
    return [int(part) for part in re.findall(r"\d+", version)]
