"""What the loader asks of torch, in one place."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, NamedTuple

from ..artifacts.errors import ArgumentError, DriverUnavailable, MissingDependency

if TYPE_CHECKING:
    import torch


def refuse_free_threading() -> None:
    """Refuse a free-threaded Python, also while its GIL is on.

    Raises:
        MissingDependency: this is one.
    """
    if "t" in getattr(sys, "abiflags", ""):
        raise MissingDependency(
            "the loader needs a Python with the GIL: it has not been tested on a free-threaded one",
            remedy="use the usual build of Python; native calls release its GIL where they wait",
        )


def require_torch() -> Any:
    """The torch module.

    Raises:
        MissingDependency: it is not installed.
    """
    try:
        return importlib.import_module("torch")
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        raise MissingDependency(
            "the loader needs torch, which is not installed",
            remedy="install it with `pip install 'sonata-aot[torch]'`",
        ) from None


_raw_stream: Callable[[int], int] | None = None


def current_stream(device: int) -> int:
    """Handle of torch's current stream on a device; 0 is the default stream."""
    global _raw_stream
    if _raw_stream is None:
        import torch

        # The public call makes a Stream object, 4 us; the handle alone takes 0.1 us.
        _raw_stream = torch._C._cuda_getCurrentRawStream
    return _raw_stream(device)


class Ranges(NamedTuple):
    """What marks ranges for a profiler."""

    push: Callable[[str], object]
    pop: Callable[[], object]

    def named(self, name: str) -> tuple[Callable[[str], object], Callable[[], object], str]:
        """Those of one name, as native calls take them."""
        return self.push, self.pop, f"sonata_aot.{name}"


def nvtx_ranges() -> Ranges:
    """NVTX ranges, of torch.

    Raises:
        MissingDependency: this torch was built without NVTX.
    """
    nvtx = require_torch().cuda.nvtx
    try:
        nvtx.range_push("sonata_aot.load")
        nvtx.range_pop()
    except RuntimeError:
        raise MissingDependency(
            "nvtx: this torch was built without NVTX",
            remedy="install a CUDA build of torch, or load without nvtx=True",
        ) from None
    return Ranges(nvtx.range_push, nvtx.range_pop)


def device_indices(devices: Iterable[int | str | torch.device] | None) -> tuple[int, ...]:
    """Device numbers, each once, in the order given; torch's current device if None.

    Raises:
        ArgumentError: something that is not a CUDA device.
        DriverUnavailable: None was given and torch has no CUDA device.
    """
    torch = require_torch()
    if devices is None:
        if not torch.cuda.is_available():
            raise DriverUnavailable(
                f"torch {torch.__version__} has no CUDA device",
                remedy="install a CUDA build of torch, and check the driver with "
                "`sonata-aot doctor`",
            )
        return (_current_device(torch),)
    try:
        listed: list[Any] = list(devices) if _is_list(devices) else [devices]  # pyright: ignore
    except TypeError:  # a tensor without dimensions, say, which has `__iter__` all the same
        listed = [devices]
    indices: list[int] = []
    for item in listed:
        index = _index(torch, item)
        if index not in indices:
            indices.append(index)
    if not indices:
        raise ArgumentError("devices is empty", remedy="name at least one, or leave it out")
    return tuple(indices)


def _is_list(devices: object) -> bool:
    # A single device is what people write first; `torch.device` and text are not lists of devices.
    return isinstance(devices, Iterable) and not isinstance(devices, str | bytes | bytearray)


def _index(torch: Any, item: object) -> int:
    if isinstance(item, int) and not isinstance(item, bool) and item >= 0:
        return item
    try:
        device = torch.device(item)
    except (RuntimeError, TypeError):
        device = None
    # Torch keeps a number in 8 bits: its `cuda:256` is `cuda:0`.
    wraps = isinstance(item, str) and str(device) != item
    if device is None or device.type != "cuda" or (device.index or 0) < 0 or wraps:
        raise ArgumentError(
            f"devices: {item!r} is not a CUDA device", remedy="pass numbers or 'cuda:N'"
        )
    return _current_device(torch) if device.index is None else device.index


def _current_device(torch: Any) -> int:
    try:
        return torch.cuda.current_device()
    except (AssertionError, RuntimeError) as error:  # a CPU build; a forked child; a broken driver
        reason = str(error).strip().splitlines()[0]
        raise DriverUnavailable(
            f"torch cannot use CUDA here: {reason}",
            remedy="install a CUDA build of torch, and start workers with the spawn method",
        ) from None
