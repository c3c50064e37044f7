"""What `load` returns."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..artifacts.choose import Choice
from ..artifacts.errors import VariantMissing
from ..artifacts.store import ArtifactSet
from .gemv import Gemv
from .library import Table


class Kernels:
    """Kernels of one artifact directory, loaded on one or more devices."""

    def __init__(
        self,
        artifacts: ArtifactSet,
        choices: Mapping[int, Choice],
        tables: Mapping[str, Table],
    ) -> None:
        """`choices` say what each device got; `tables` hold what was loaded, by kernel."""
        self._artifacts = artifacts
        self._choices = dict(choices)
        self._tables = dict(tables)
        self._gemv = Gemv(tables["gemv"]) if "gemv" in tables else None

    @property
    def gemv(self) -> Gemv:
        """The skinny GEMV: `kernels.gemv(x, weight, out=None)`.

        Raises:
            VariantMissing: the artifacts were built without it.
        """
        if self._gemv is None:
            raise VariantMissing(
                f"no kernel 'gemv' in {self._artifacts.directory}",
                remedy="build again without --kernel, or with --kernel gemv among others",
            )
        return self._gemv

    def info(self) -> dict[str, Any]:
        """Directory, manifest digest, and per device what was chosen, why, and each binary."""
        manifest = self._artifacts.manifest
        return {
            "directory": str(self._artifacts.directory),
            "digest": manifest.digest,
            "tool": manifest.tool,
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
