"""`python -m sonata_aot.loader.probe`: the server's view of this machine, as JSON.

With a directory, an architecture or nothing, and `ptx` or nothing: how long `load` takes.
A process of its own, so that a broken driver cannot take its caller along.
"""

from __future__ import annotations

import importlib.metadata
import json
import sys
from typing import Any

from ..artifacts.errors import SonataError


def probe() -> dict[str, Any]:
    """Installed torch, the driver's state, and the devices that this process sees."""
    from . import _native

    state = _native.driver_state()
    devices: list[_native.Device] = []
    if state["available"]:
        try:
            devices = _native.devices()
        except SonataError as error:
            state = {**state, "available": False, "reason": str(error)}
    try:
        torch = importlib.metadata.version("torch")
    except importlib.metadata.PackageNotFoundError:
        torch = None
    return {"torch": torch, "driver": state, "devices": devices}


def time_load(directory: str, arch: str | None, allow_ptx: bool) -> dict[str, Any]:
    """Milliseconds that `load` takes on the first device, its context up; or why it fails."""
    from . import load
    from .runtime import require_torch

    try:
        torch = require_torch()
        if torch.cuda.is_available():
            torch.empty(1, device="cuda:0")
        from . import fallback, ssd, ssd_stages  # noqa: F401 - no part of the time, as in a server

        kernels = load(directory, arch, allow_ptx, devices=[0])
    except (SonataError, RuntimeError) as error:
        return {"ms": None, "problem": str(error)}
    return {"ms": round(kernels.load_ms, 1), "problem": None}


if __name__ == "__main__":
    if len(sys.argv) > 1:
        directory, arch, ptx = sys.argv[1:]
        print(json.dumps(time_load(directory, arch or None, ptx == "ptx")))
    else:
        print(json.dumps(probe()))
