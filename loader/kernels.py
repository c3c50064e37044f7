"""What `load` returns."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from ..artifacts.choose import Choice
from ..artifacts.errors import VariantMissing
from ..artifacts.store import ArtifactSet
from .library import Table
from .stage_known import known_tables

if TYPE_CHECKING:
    from torch import Tensor

    from .gemv import Gemv
    from .launcher import Launcher
    from .runtime import Ranges
    from .ssd import ChunkScan
    from .ssd_stages import Stages


class Kernels:
    """Kernels of one artifact directory, loaded on one or more devices."""

    def __init__(
        self,
        artifacts: ArtifactSet,
        choices: Mapping[int, Choice],
        tables: Mapping[str, Table],
        multiprocessors: Mapping[int, int],
        ranges: Ranges | None = None,
        untrusted: tuple[str, ...] = (),
    ) -> None:
        """`choices` and `multiprocessors` are by device, `tables` of what was loaded by kernel.

        `ranges` mark calls for a profiler.
        """
        # Milliseconds that `load` took.
        self.load_ms = 0.0
        self._artifacts = artifacts
        self._choices = dict(choices)
        self._tables = dict(tables)
        self._untrusted = untrusted
        # These need torch, which `load` asks for and this package's import does not.
        from . import operators  # noqa: F401 - defines torch.ops.sonata_aot
        from .fallback import choose_linear
        from .gemv import Gemv
        from .gemv_plan import Planner
        from .launcher import Launcher
        from .ssd import ChunkScan, RangedChunkScan

        self._choose_linear = choose_linear
        self._devices = frozenset(choices)
        self._gemv: Gemv | None = None
        if "gemv" in tables or "gemv_any" in tables:
            planner = Planner(tables.get("gemv"), tables.get("gemv_any"), multiprocessors)
            self._gemv = Gemv(planner, ranges)
        self._chunk_scan: ChunkScan | None = None
        if "ssd_scan" in tables and "ssd_prepare" in tables:
            if ranges is None:
                self._chunk_scan = ChunkScan(self._tables, self._devices)
            else:
                self._chunk_scan = RangedChunkScan(self._tables, self._devices, ranges)
        self._stages = known_tables(tables)
        self._multiprocessors = dict(multiprocessors)
        self._make_launcher = Launcher
        self._launchers: dict[str, Launcher] = {}

    def __getitem__(self, kernel: str) -> Launcher:
        """A kernel by its name, to be called with its declared parameters.

        Raises:
            VariantMissing: the artifacts were built without it.
        """
        launcher = self._launchers.get(kernel)
        if launcher is None:
            launcher = self._make_launcher(self.table(kernel), self._devices)
            self._launchers[kernel] = launcher
        return launcher

    def __contains__(self, kernel: object) -> bool:
        """Whether the artifacts have a kernel of this name."""
        return kernel in self._tables

    def __iter__(self) -> Iterator[str]:
        """Names of the kernels."""
        return iter(self._tables)

    @property
    def devices(self) -> frozenset[int]:
        """The devices that kernels were loaded on."""
        return self._devices

    # Looked up once: then it is an attribute, which costs a call less than a property.
    @functools.cached_property
    def gemv(self) -> Gemv:
        """The skinny GEMV: `kernels.gemv(x, weight, bias=None, out=None)`, and `.bind(weight)`.

        Raises:
            VariantMissing: the artifacts were built without it.
        """
        if self._gemv is None:
            raise VariantMissing(
                f"no kernel 'gemv' in {self._artifacts.directory}",
                remedy="build again without --kernel, or with --kernel gemv among others",
            )
        return self._gemv

    @functools.cached_property
    def mamba_chunk_scan_combined(self) -> ChunkScan:
        """The scan of Mamba2, with the arguments of mamba_ssm's function of the name.

        Raises:
            VariantMissing: the artifacts were built without it.
        """
        if self._chunk_scan is None:
            raise VariantMissing(
                f"no kernels 'ssd_prepare' and 'ssd_scan' in {self._artifacts.directory}",
                remedy="build again without --kernel, or with both among others",
            )
        return self._chunk_scan

    @functools.cached_property
    def ssd(self) -> Stages:
        """The stages of the SSD scan, such as `kernels.ssd.chunk_cumsum`, and `combined`."""
        # Not for whoever calls none: milliseconds.
        from .ssd_stages import Stages

        return Stages(self._stages, self._multiprocessors)

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """X @ weight.T + bias, by the GEMV where it applies and F.linear elsewhere.

        The GEMV takes up to 8 rows of x in all, in bfloat16 or float16, on a device that kernels
        were loaded on, where no gradient is asked for, autocast is off and nothing is compiled.

        Args:
            x: (..., K).
            weight: (N, K).
            bias: (N,).

        Returns:
            (..., N).

        Raises:
            VariantMissing: the artifacts lack a binary that the GEMV would need.
            DriverError: the driver refused the launch, or an earlier one had failed.
        """
        return self._choose_linear(self._gemv, self._devices, x, weight, bias)

    def table(self, kernel: str) -> Table:
        """What was loaded of a kernel, for launching it oneself.

        Raises:
            VariantMissing: the artifacts were built without it.
        """
        if kernel not in self._tables:
            raise VariantMissing(
                f"no kernel {kernel!r} in {self._artifacts.directory}, which has "
                f"{', '.join(self._tables)}",
                remedy=f"build with --kernel {kernel} among others, and --from its module if it is "
                "your own",
            )
        return self._tables[kernel]

    def info(self) -> dict[str, Any]:
        """What was loaded, from where, and how long it took.

        Directory, digest and selection of the manifest, milliseconds that `load` took, and per
        device what was chosen, why, and each binary.

        `untrusted` says, a sentence each, what `allow_untrusted` allowed.
        """
        manifest = self._artifacts.manifest
        return {
            "directory": str(self._artifacts.directory),
            "digest": manifest.digest,
            "tool": manifest.tool,
            "selection": {
                "archs": list(manifest.selection.archs),
                "kernels": list(manifest.selection.kernels),
            },
            "load_ms": self.load_ms,
            "untrusted": list(self._untrusted),
            "devices": {
                device: {
                    "arch": choice.arch,
                    "form": choice.form,
                    "reason": choice.reason,
                    "rejected": [vars(item) for item in choice.rejected],
                    "binaries": [
                        {
                            "kernel": binary.kernel,
                            "variant": binary.variant_name,
                            "sha256": binary.payload(choice.form).sha256,
                        }
                        for binary in manifest.binaries
                        if binary.arch == choice.arch
                    ],
                }
                for device, choice in self._choices.items()
            },
        }

    def __repr__(self) -> str:
        chosen = ", ".join(f"{d}: {c.arch} {c.form}" for d, c in self._choices.items())
        return f"Kernels({str(self._artifacts.directory)!r}, {{{chosen}}})"
