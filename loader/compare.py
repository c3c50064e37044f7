"""Compare mode of patched models: a sampled share of calls runs both ways."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .log import logger
from .patch_report import Entry


class Comparison:
    """Decides which calls run both ways, and logs how far the results are apart."""

    def __init__(self, share: float) -> None:
        """`share` of the calls, from 0 to 1, each drawn by itself."""
        self._share = share
        # Of its own, so that a model's random numbers stay what they were.
        self._random = random.Random(0)

    def wanted(self) -> bool:
        """Whether this call runs both ways; never while a graph is captured: that cannot wait."""
        return self._share > 0 and self._random.random() < self._share and not _is_capturing()

    def check(self, entry: Entry, found: Any, original: Callable[[], Any]) -> None:
        """Log the relative error of `found`, one tensor or several; waits for the device.

        Where the original code fails, for want of memory perhaps, that is logged: the call has its
        answer.
        """
        try:
            error = max(map(_relative_error, _tensors(found), _tensors(original())), default=0.0)
        except Exception as problem:
            logger.warning("compare: %s: the original code failed: %s", entry.module, problem)
            return
        counts = entry.counts
        counts.compared += 1
        counts.largest_error = _worse(counts.largest_error, error)
        logger.info("compare: %s by %s: relative error %.2e", entry.module, entry.kernel, error)


def _is_capturing() -> bool:
    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()


def _tensors(results: Any) -> tuple[Tensor, ...]:
    return results if isinstance(results, tuple) else (results,)


def _relative_error(found: Tensor, expected: Tensor) -> float:
    """Norm of the difference over norm of what was expected, in float32."""
    wanted = expected.float()
    difference = (found.float() - wanted).norm().item()
    size = wanted.norm().item()
    return difference / size if size else difference


def _worse(one: float, other: float) -> float:
    # A NaN stays: `max` would drop it or not by its place.
    return one if one != one or other <= one else other
