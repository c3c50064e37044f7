"""What this machine has, and which artifacts a loader here would choose and why."""

from __future__ import annotations

import importlib.metadata
import json
import platform
import subprocess
import sys
from pathlib import Path
from typing import Any

from ..artifacts import __version__
from ..artifacts.arch import cuda_version, dotted
from ..artifacts.choose import choose
from ..artifacts.errors import ArtifactsNotFound, SonataError
from ..artifacts.manifest import Manifest
from ..artifacts.places import Place, search
from ..artifacts.store import open_artifacts
from .toolchain import compiler_versions

_UNUSABLE: dict[str, Any] = {"usable": False, "choices": []}
_PROBE = "sonata_aot.loader.probe"


def examine(path: Path | None, *, arch: str | None, allow_ptx: bool) -> dict[str, Any]:
    """Everything `sonata-aot doctor` reports, as JSON data; never raises for what it finds."""
    server = _probe()
    places = [_place(place, server, arch=arch, allow_ptx=allow_ptx) for place in search(path)]
    for place in places:
        # What the loader would take; others it does not read whole.
        if place["choices"] and all(choice["arch"] for choice in place["choices"]):
            place["load"] = _time_load(place["path"], arch, allow_ptx)
            break
    return {
        "tool": __version__,
        "python": platform.python_version(),
        "platform": f"{sys.platform}-{platform.machine()}",
        "compiler": _compiler(),
        **server,
        "places": places,
    }


def _compiler() -> dict[str, Any]:
    try:
        return {"packages": compiler_versions(), "problem": None}
    except SonataError as error:
        return {"packages": {}, "problem": str(error)}


def _probe() -> dict[str, Any]:
    """The loader's view, from a process of its own: so that a broken driver ends only that."""
    found, problem = _ask_loader()
    return found or {
        "torch": _version("torch"),
        "driver": {"available": False, "reason": problem, "version": None, "library": None},
        "devices": [],
    }


def _time_load(directory: str, arch: str | None, allow_ptx: bool) -> dict[str, Any]:
    """Milliseconds that `load` takes on the first device, or why it fails."""
    found, problem = _ask_loader(directory, arch or "", "ptx" if allow_ptx else "")
    return found or {"ms": None, "problem": problem}


def _ask_loader(*arguments: str) -> tuple[dict[str, Any] | None, str | None]:
    """What the probe answers, or why it does not."""
    try:
        result = subprocess.run(
            [sys.executable, "-m", _PROBE, *arguments],
            capture_output=True,
            text=True,
            check=False,
            timeout=60,
        )
        if result.returncode == 0:
            return json.loads(result.stdout.splitlines()[-1]), None
        said = result.stderr.strip().splitlines()[-1:]
        return None, f"the loader's probe ended with status {result.returncode}: {' '.join(said)}"
    except (OSError, ValueError, IndexError, subprocess.TimeoutExpired) as error:
        return None, f"the loader's probe failed: {error}"


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _place(
    place: Place, server: dict[str, Any], *, arch: str | None, allow_ptx: bool
) -> dict[str, Any]:
    report: dict[str, Any] = {"path": str(place.path), "origin": place.origin}
    try:
        manifest = open_artifacts(place.path).manifest
    except SonataError as error:
        # Where nobody said that something would be, nothing is not wrong.
        absent = isinstance(error, ArtifactsNotFound) and not place.named
        return {**report, **_UNUSABLE, "absent": absent, "problem": str(error)}
    return {
        **report,
        "usable": True,
        "absent": False,
        "problem": None,
        "archs": sorted({binary.arch for binary in manifest.binaries}),
        "binaries": len(manifest.binaries),
        "choices": [
            _choice(manifest, device, server["driver"]["version"] or 0, arch, allow_ptx)
            for device in server["devices"]
        ],
    }


def _choice(
    manifest: Manifest, device: dict[str, Any], driver: int, arch: str | None, allow_ptx: bool
) -> dict[str, Any]:
    capability = (device["major"], device["minor"])
    try:
        chosen = choose(
            manifest,
            capability,
            driver_cuda=cuda_version(driver),
            arch=arch,
            allow_ptx=allow_ptx,
        )
    except SonataError as error:
        return {"device": device["index"], "arch": None, "form": None, "reason": str(error)}
    return {
        "device": device["index"],
        "arch": chosen.arch,
        "form": chosen.form,
        "reason": chosen.reason,
        "rejected": [
            {"arch": item.arch, "form": item.form, "reason": item.reason}
            for item in chosen.rejected
        ],
    }


def render(report: dict[str, Any]) -> str:
    """The report for a person."""
    compiler = report["compiler"]
    packages = ", ".join(f"{name} {v}" for name, v in compiler["packages"].items())
    driver = report["driver"]
    version = driver["version"] or 0
    lines = [
        f"sonata-aot  {report['tool']} on Python {report['python']}, {report['platform']}",
        f"compiler    {packages or compiler['problem']}",
        f"torch       {report['torch'] or 'not installed: the loader needs it'}",
        "driver      "
        + (
            f"CUDA {dotted(cuda_version(version))} ({driver['library']})"
            if driver["available"]
            else f"none: {driver['reason']}"
        ),
    ]
    for device in report["devices"]:
        lines.append(
            f"device {device['index']}    {device['name']}, compute capability "
            f"{device['major']}.{device['minor']}, {device['multiprocessors']} multiprocessors"
        )
    for place in report["places"]:
        if place["absent"]:
            lines.append(f"artifacts   none in {place['origin']} ({place['path']})")
            continue
        lines.append(f"artifacts   {place['path']} ({place['origin']})")
        if not place["usable"]:
            lines.append(f"            unusable: {place['problem']}")
            continue
        lines.append(f"            {place['binaries']} binaries for {', '.join(place['archs'])}")
        for choice in place["choices"]:
            if choice["arch"] is None:
                lines.append(f"            device {choice['device']}: {choice['reason']}")
                continue
            lines.append(
                f"            device {choice['device']}: {choice['arch']} {choice['form']}, "
                f"{choice['reason']}"
            )
            lines += [
                f"              not {item['arch']} {item['form']}: {item['reason']}"
                for item in choice["rejected"]
            ]
        if "load" in place:
            took, problem = place["load"]["ms"], place["load"]["problem"]
            lines.append(
                "            "
                + (f"load() on device 0: {took} ms" if problem is None else f"load(): {problem}")
            )
    if all(place["absent"] for place in report["places"]):
        lines.append("            build them with `sonata-aot build --arch ARCH`")
    return "\n".join(lines)
