"""The GPU at hand, and the kernels of an artifact directory on it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, cast

from ... import loader
from ...artifacts import open_artifacts
from ...artifacts.errors import VariantMissing
from ...artifacts.manifest import Binary, Form
from ...loader import runtime

if TYPE_CHECKING:
    from torch import Tensor


class Launchable(Protocol):
    """A loaded binary."""

    def launch(self, stream: int, *arguments: int | float, programmatic: bool = False) -> None:
        """Launch it with its declaration's parameters."""
        ...


class Table(Protocol):
    """The loaded binaries of one kernel."""

    def all(self) -> Mapping[tuple[object, ...], Launchable]:
        """Every binary by (device, *selectors)."""
        ...


class Gemv(Protocol):
    """What is measured of `kernels.gemv`."""

    def __call__(
        self, x: Tensor, weight: Tensor, bias: Tensor | None = None, out: Tensor | None = None
    ) -> object:
        """Launch, with the weights changing at any time."""
        ...

    def bind(
        self, weight: Tensor, bias: Tensor | None = None, *, upcoming: Tensor | None = None
    ) -> Callable[..., object]:
        """A call with a constant weight: `bound(x, out=...)`."""
        ...

    def using(
        self, variant: Mapping[str, int | str], launch: Mapping[str, int], *, constant: bool = False
    ) -> Callable[..., object]:
        """A call that runs that very variant: `call(x, weight, out=...)`."""
        ...

    def binary(self, x: Tensor, weight: Tensor, *, constant: bool = False) -> Binary:
        """What a call would run."""
        ...


class Scan(Protocol):
    """What is measured of `kernels.mamba_chunk_scan_combined`."""

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        """Launch; returns out, or a tuple that starts with it."""
        ...

    def binaries(self, *arguments: Any, **named: Any) -> Sequence[Binary]:
        """What a call would run."""
        ...


class Kernels(Protocol):
    """What is measured of `loader.Kernels`."""

    @property
    def gemv(self) -> Gemv:
        """The skinny GEMV."""
        ...

    @property
    def mamba_chunk_scan_combined(self) -> Scan:
        """The scan of Mamba2."""
        ...

    def table(self, kernel: str) -> Table:
        """The loaded binaries of a kernel."""
        ...

    def info(self) -> dict[str, Any]:
        """What was loaded."""
        ...


@dataclass(frozen=True)
class Machine:
    """The GPU and the software that something is measured with."""

    gpu: str
    multiprocessors: int
    peak_gbps: float  # by clock and width of the memory; infinite where torch does not tell
    driver_cuda: int
    torch: str

    def data(self) -> dict[str, Any]:
        """As results files have it."""
        return {
            "gpu": self.gpu,
            "multiprocessors": self.multiprocessors,
            "driver_cuda": self.driver_cuda,
            "torch": self.torch,
        }


def machine() -> Machine:
    """The current device.

    Raises:
        MissingDependency: torch is not installed.
        DriverUnavailable: no GPU, or torch cannot use it.
    """
    torch = runtime.require_torch()
    (index,) = runtime.device_indices(None)
    from ...loader import _native

    properties = torch.cuda.get_device_properties(index)
    # Two transfers a clock (kHz), over a bus of so many bits.
    clock = getattr(properties, "memory_clock_rate", 0)
    width = getattr(properties, "memory_bus_width", 0)
    return Machine(
        gpu=properties.name,
        multiprocessors=properties.multi_processor_count,
        peak_gbps=2e-6 * clock * width / 8 or float("inf"),
        driver_cuda=_native.driver_state()["version"] or 0,
        torch=torch.__version__,
    )


@dataclass(frozen=True)
class Loaded:
    """One architecture of an artifact directory, loaded on a device."""

    kernels: Kernels
    arch: str
    form: Form
    device: int

    @property
    def via(self) -> str:
        """As results name it: `sm86-ptx`."""
        return f"{self.arch}-{self.form}"


def load(directory: Path, archs: Sequence[str], needed: Sequence[str]) -> list[Loaded]:
    """Load each architecture; without any, the best for this GPU, through PTX if need be.

    Raises:
        SonataError: as `loader.load` does.
        VariantMissing: a kernel that is needed is not there.
    """
    (device,) = runtime.device_indices(None)
    found = []
    for arch in archs or (None,):
        kernels = loader.load(directory, arch=arch, allow_ptx=True)
        chosen = kernels.info()["devices"][device]
        require_kernels(directory, chosen["arch"], needed)
        found.append(Loaded(cast("Kernels", kernels), chosen["arch"], chosen["form"], device))
    return found


def require_kernels(directory: Path, arch: str, needed: Sequence[str]) -> None:
    """Require binaries of each kernel for one architecture.

    Raises:
        VariantMissing: the first that has none, with the build that adds it.
    """
    manifest = open_artifacts(directory).manifest
    present = {binary.kernel for binary in manifest.binaries if binary.arch == arch}
    for kernel in needed:
        if kernel not in present:
            names = sorted({*needed, *(d.name for d in manifest.kernels)})
            raise VariantMissing(
                f"no kernel {kernel!r} for {arch} in {directory}",
                remedy=f"build it: `{build_command(directory, manifest.selection.archs, names)}`",
            )


def build_command(directory: Path, archs: Sequence[str], kernels: Sequence[str], *more: str) -> str:
    """A build that a remedy names."""
    options = [*more, *(f"--arch {a}" for a in archs), *(f"--kernel {name}" for name in kernels)]
    return " ".join(["sonata-aot build", *options, f"--out {directory}"])


def stream(device: int) -> int:
    """Handle of the current stream."""
    return runtime.current_stream(device)
