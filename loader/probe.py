"""`python -m sonata_aot.loader.probe`: the server's view of this machine, as JSON.

A process of its own, so that a broken driver cannot take its caller along.
"""

from __future__ import annotations

import importlib.metadata
import json
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


if __name__ == "__main__":
    print(json.dumps(probe()))
