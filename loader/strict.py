"""`load(strict=True)`: nothing is compiled or loaded after it, or it fails."""

from __future__ import annotations

from collections.abc import Mapping

from ..artifacts.choose import Choice
from ..artifacts.errors import ArgumentError, VariantMissing
from .library import Table

# What the operations of this package run on.
_NEEDED = ("gemv", "gemv_any", "ssd_prepare", "ssd_scan")


def refuse_ptx(allow_ptx: bool) -> None:
    """Refuse a call that allows the driver to compile.

    Raises:
        ArgumentError: it does.
    """
    if allow_ptx:
        raise ArgumentError(
            "strict and allow_ptx: the driver would compile PTX",
            remedy="leave one of them out; strict takes machine code only",
        )


def require_kernels(tables: Mapping[str, Table], choices: Mapping[int, Choice]) -> None:
    """Require the kernels of every operation on every device.

    Each rule has its binary, or the manifest would not have parsed; and every binary of a device's
    architecture has been loaded by then, as all of them are machine code. `choices` are by device.

    Raises:
        VariantMissing: a kernel is not there.
    """
    for device, choice in choices.items():
        for name in _NEEDED:
            if name not in tables or not any(key[0] == device for key in tables[name].all()):
                raise VariantMissing(
                    f"strict: no kernel {name!r} for {choice.arch}",
                    remedy="build again without --kernel and --select",
                )
