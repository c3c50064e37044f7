"""What the driver takes for a set's machine code by itself: the yardstick of `load()`.

    python -m benchmarks.bare_driver DIRECTORY ARCH

Its calls for one binary after another, by one thread, with the bytes read before: what any loader
must wait for, unless it asks from several threads. Prints milliseconds as JSON; `first_call` runs
it in fresh processes among its own, since the hosts of GPUs differ, and from one hour to the next.
"""

from __future__ import annotations

import ctypes
import json
import sys
import time
from collections.abc import Iterable
from pathlib import Path

from sonata_aot.artifacts import open_artifacts


def load_ms(images: Iterable[tuple[bytes, str]]) -> float:
    """Milliseconds to load images, each with its entry, into the current context.

    Raises:
        RuntimeError: a call failed.
    """
    driver = ctypes.CDLL("libcuda.so.1")
    library, kernel, function = ctypes.c_void_p(), ctypes.c_void_p(), ctypes.c_void_p()
    given = [(image, entry.encode()) for image, entry in images]
    nothing = None, None, 0, None, None, 0  # options
    began = time.perf_counter()
    for image, entry in given:
        code = (
            driver.cuLibraryLoadData(ctypes.byref(library), image, *nothing)
            or driver.cuLibraryGetKernel(ctypes.byref(kernel), library, entry)
            or driver.cuKernelGetFunction(ctypes.byref(function), kernel)
            or driver.cuFuncLoad(function)
        )
        if code:
            raise RuntimeError(f"CUDA error {code} for {entry.decode()}")
    return 1e3 * (time.perf_counter() - began)


def main() -> None:
    """Measure one architecture."""
    import torch

    directory, arch = sys.argv[1:]
    artifacts = open_artifacts(Path(directory))
    chosen = [binary for binary in artifacts.manifest.binaries if binary.arch == arch]
    images = [(artifacts.read(binary.cubin), binary.entry) for binary in chosen]
    torch.zeros(1, device="cuda")
    torch.cuda.synchronize()
    print(json.dumps({"binaries": len(images), "driver_ms": load_ms(images)}))


if __name__ == "__main__":
    main()
