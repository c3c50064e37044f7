"""Every environment variable that sonata-aot reads, each declared once, typed and documented."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, Generic, TypeVar

from .errors import ArgumentError
from .record import record

T = TypeVar("T")


@record
class Variable(Generic[T]):
    """One variable: `read` turns its text into a value or raises `ValueError`."""

    name: str
    read: Callable[[str], T]
    default: T
    expects: str
    doc: str

    def get(self) -> T:
        """The value now; the default where the variable is unset or empty.

        Raises:
            ArgumentError: the text is not of the kind that the variable expects.
        """
        text = os.environ.get(self.name, "")
        if not text:
            return self.default
        try:
            return self.read(text)
        except (ValueError, RuntimeError):  # RuntimeError: `~user` of a user who does not exist
            raise ArgumentError(
                f"environment variable {self.name}={text!r}", remedy=f"set it to {self.expects}"
            ) from None


def _natural(text: str) -> int:
    value = int(text)
    if value < 1:
        raise ValueError(text)
    return value


def _epoch(text: str) -> int:
    value = int(text)
    if not 0 <= value < 2**32:
        raise ValueError(text)
    return value


def _level(text: str) -> str:
    word = text.strip().lower()
    if word not in ("debug", "info", "warning", "error"):
        raise ValueError(text)
    return word


def _switch(text: str) -> bool:
    word = text.strip().lower()
    if word not in ("0", "1", "false", "true", "no", "yes", "off", "on"):
        raise ValueError(text)
    return word in ("1", "true", "yes", "on")


def _path(text: str) -> Path:
    return Path(text).expanduser()


SONATA_AOT_DIR: Variable[Path | None] = Variable(
    "SONATA_AOT_DIR", _path, None, "a directory", "Artifact directory to build into and load from."
)
SONATA_AOT_CACHE_DIR: Variable[Path | None] = Variable(
    "SONATA_AOT_CACHE_DIR",
    _path,
    None,
    "a directory",
    "Root of the compile cache and of the default artifact directory.",
)
SONATA_AOT_LOG_LEVEL: Variable[str | None] = Variable(
    "SONATA_AOT_LOG_LEVEL",
    _level,
    None,
    "debug, info, warning or error",
    "Least severe message that the loader logs; unset: the application decides.",
)
SONATA_AOT_DISABLE: Variable[bool] = Variable(
    "SONATA_AOT_DISABLE",
    _switch,
    False,
    "1 or 0",
    "With 1, models that loader.patch has changed run their original code.",
)
MAX_JOBS: Variable[int | None] = Variable(
    "MAX_JOBS", _natural, None, "an integer of 1 or more", "Most compile workers at once."
)
TORCH_CUDA_ARCH_LIST: Variable[str] = Variable(
    "TORCH_CUDA_ARCH_LIST",
    str,
    "",
    "architectures such as `8.6;9.0`",
    "Architectures to build for where --arch is absent.",
)
# The first second that a zip file can hold.
SOURCE_DATE_EPOCH: Variable[int] = Variable(
    "SOURCE_DATE_EPOCH",
    _epoch,
    315532800,
    "seconds since 1970",
    "Time that every file in a wheel bears; unset: the start of 1980.",
)
# The convention of no-color.org: any non-empty value counts.
NO_COLOR: Variable[bool] = Variable("NO_COLOR", bool, False, "any text", "Print without colours.")

ALL: tuple[Variable[Any], ...] = (
    SONATA_AOT_DIR,
    SONATA_AOT_CACHE_DIR,
    SONATA_AOT_LOG_LEVEL,
    SONATA_AOT_DISABLE,
    MAX_JOBS,
    TORCH_CUDA_ARCH_LIST,
    SOURCE_DATE_EPOCH,
    NO_COLOR,
)
