"""SONATA_AOT_DISABLE: patched models run their original code."""

from __future__ import annotations

from typing import Any, cast

from ..artifacts.environment import SONATA_AOT_DISABLE

DISABLED = f"{SONATA_AOT_DISABLE.name} is set"


def is_disabled() -> bool:
    """Whether patched models shall run their original code now.

    Raises:
        ArgumentError: the variable is neither 1 nor 0.
    """
    return SONATA_AOT_DISABLE.get()


# A compiled program keeps what was so when it was traced. Says so without importing the compiler,
# as `torch.compiler.assume_constant_result` does.
cast(Any, is_disabled)._dynamo_marked_constant = True
