"""The Mamba2 mixers that `patch` knows, and how each gets our scan."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.nn import Module

from ..artifacts.record import record
from .patch_globals import NotRebuilt, innermost, with_globals
from .patch_module import original_class
from .patch_scan import ScanRunner
from .patch_split import split_scan

# Versions that tests ran with; others may call the scan in another way. All that start so.
TESTED = {"transformers": ("5.17.", "5.24."), "mamba_ssm": ("2.3.2",)}


@record
class Family:
    """A class of mixers: where it is, and the names of its sizes and of the functions it calls."""

    module: str
    name: str
    scan: str
    heads: str
    headdim: str
    groups: str
    dstate: str
    # The fused function that inference calls too.
    split: str | None = None

    @property
    def package(self) -> str:
        """What is installed to have it."""
        return self.module.partition(".")[0]

    def sizes(self, mixer: Module) -> tuple[int, int, int, int]:
        """Heads, headdim, groups and dstate of a mixer."""
        heads, headdim, groups, dstate = (
            int(getattr(mixer, name))
            for name in (self.heads, self.headdim, self.groups, self.dstate)
        )
        return heads, headdim, groups, dstate

    def like(self, mixer: Any) -> Tensor | None:
        """A weight of the dtype and device that the scan's x has; None if there is none."""
        for layer in (mixer.in_proj, mixer.conv1d):
            weight = getattr(layer, "weight", None)
            # A projection whose weights are quantised may have none, or integers.
            if isinstance(weight, Tensor) and weight.is_floating_point():
                return weight
        return None

    def why_left_alone(self, mixer: Module) -> str | None:
        """Why a mixer of this class cannot be patched; None if it can."""
        found = getattr(sys.modules.get(self.package), "__version__", "of no known version")
        tested = TESTED[self.package]
        if not found.startswith(tested):
            versions = ", ".join(version.rstrip(".") for version in tested)
            return f"{self.package} {found} was not tested; tested: {versions}"
        own = original_class(mixer)
        if own.forward is not self._class().forward:
            return f"{own.__name__} has a forward of its own"
        if "forward" in mixer.__dict__:
            return "its forward was replaced already, by hooks of another library perhaps"
        return None

    def forward(self, runner: ScanRunner) -> Callable[..., Any]:
        """The class's forward, with the scan of `runner`.

        Raises:
            NotRebuilt: that cannot be made.
        """
        function = self._class().forward
        below = innermost(function)
        names = getattr(below, "__globals__", {})
        used = below.__code__.co_names  # pyright: ignore[reportFunctionMemberAccess]
        replaced: dict[str, Any] = {}
        for name in filter(None, (self.scan, self.split)):
            if name not in names or name not in used:
                raise NotRebuilt(f"{self.name}.forward does not call {name}")
        replaced[self.scan] = _scan(runner, names[self.scan])
        if self.split is not None:
            convolution = names.get("causal_conv1d_fn")
            replaced[self.split] = split_scan(runner, names[self.split], convolution)
        return with_globals(function, replaced)

    def _class(self) -> Any:
        return getattr(sys.modules[self.module], self.name)


def _scan(runner: ScanRunner, original: Callable[..., Any]) -> Callable[..., Any]:
    def mamba_chunk_scan_combined(*arguments: Any, **named: Any) -> Any:
        return runner.scan(original, *arguments, **named)

    return mamba_chunk_scan_combined


def _hugging_face(model: str, name: str) -> Family:
    return Family(
        f"transformers.models.{model}.modeling_{model}",
        name,
        scan="mamba2_chunk_scan",
        heads="num_heads",
        headdim="head_dim",
        groups="n_groups",
        dstate="ssm_state_size",
    )


FAMILIES = (
    Family(
        "mamba_ssm.modules.mamba2",
        "Mamba2",
        scan="mamba_chunk_scan_combined",
        heads="nheads",
        headdim="headdim",
        groups="ngroups",
        dstate="d_state",
        split="mamba_split_conv1d_scan_combined",
    ),
    _hugging_face("mamba2", "Mamba2Mixer"),
    _hugging_face("bamba", "BambaMixer"),
    _hugging_face("zamba2", "Zamba2MambaMixer"),
    _hugging_face("falcon_h1", "FalconH1Mixer"),
    _hugging_face("nemotron_h", "NemotronHMamba2Mixer"),
    _hugging_face("granitemoehybrid", "GraniteMoeHybridMambaLayer"),
)
_BY_CLASS = {(family.module, family.name): family for family in FAMILIES}


def family_of(module: Module) -> Family | None:
    """The family that a module's class is of, or derived from."""
    for each in original_class(module).__mro__:
        family = _BY_CLASS.get((each.__module__, each.__qualname__))
        if family is not None:
            return family
    return None


def looks_like_mixer(module: Module) -> bool:
    """Whether a module of no known class has what a Mamba2 mixer has."""
    try:
        return all(hasattr(module, name) for name in ("A_log", "dt_bias", "D", "conv1d"))
    except Exception:  # a `__getattr__` of its own may raise anything
        return False
