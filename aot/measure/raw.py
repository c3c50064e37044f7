"""The file of all that `tune` has measured."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ...artifacts.errors import ArgumentError, SonataError
from ...artifacts.schema import decode
from ...kernels.registry import builtin
from .table import LAUNCH, MAX_SIZE, Measurement

KERNEL = "gemv"
# The table holds for every dtype, and is measured in this one.
DTYPE = "bf16"


@dataclass(frozen=True)
class _Machine:
    gpu: str
    multiprocessors: int
    driver_cuda: int
    torch: str


@dataclass(frozen=True)
class _Head:
    machine: _Machine
    date: str
    tool: str
    via: str


@dataclass
class Raw:
    """A file of measurements; `head` says what they were made with."""

    head: dict[str, Any] = field(default_factory=dict)
    measurements: list[Measurement] = field(default_factory=list)

    def text(self) -> str:
        """The file: JSON, with a measurement on each line."""
        lines = ",\n".join(json.dumps(vars(item)) for item in self.measurements)
        return f'{{"head": {json.dumps(self.head)},\n"measurements": [\n{lines}\n]}}\n'

    @classmethod
    def read(cls, path: Path) -> Raw:
        """A file that was written before.

        Raises:
            ArgumentError: it cannot be read, or is something else.
        """
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
            head, measurements = content["head"], content["measurements"]
            decode(_Head, head, "head")
            found = list(decode(tuple[Measurement, ...], measurements, "measurements"))
            _require_possible(found)
        except SonataError as error:
            reason = error.what
        except RecursionError:
            reason = "nested too deep"
        except KeyError as error:
            reason = f"missing key {error}"
        except (OSError, ValueError, TypeError) as error:
            reason = str(error)
        else:
            return cls(head, found)
        raise ArgumentError(
            f"{path}: no file of measurements: {reason}",
            remedy="name one that `sonata-aot tune gemv --json` wrote",
        )

    def require_arch(self, arch: str, path: Path) -> None:
        """Require that an architecture's binaries were measured.

        Raises:
            ArgumentError: those of another were.
        """
        measured, _, _ = self.head["via"].partition("-")
        if measured != arch:
            raise ArgumentError(
                f"{path}: measured were binaries for {measured}, not for {arch}",
                remedy=f"pass --arch {measured}, or the measurements of {arch}",
            )


def _require_possible(measurements: Iterable[Measurement]) -> None:
    choices = builtin()[KERNEL].declaration.choices
    for number, item in enumerate(measurements):
        sizes = all(1 <= size <= MAX_SIZE for size in item.shape) and item.constant in (0, 1)
        if not (sizes and 0 < item.us < math.inf):
            raise ValueError(f"measurements[{number}] has sizes or a time that cannot be")
        if tuple(item.variant) != choices or tuple(item.launch) != LAUNCH:
            raise ValueError(f"measurements[{number}] is of another kernel than {KERNEL}")
