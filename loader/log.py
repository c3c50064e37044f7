"""The loader's logger."""

from __future__ import annotations

import logging

from ..artifacts.environment import SONATA_AOT_LOG_LEVEL

logger = logging.getLogger("sonata_aot")


def configure() -> None:
    """Apply SONATA_AOT_LOG_LEVEL.

    A library leaves levels and handlers to the application; but whoever sets the variable wants to
    see something, so where the application has no handler, messages then go to standard error.

    Raises:
        ArgumentError: the variable is not a level.
    """
    level = SONATA_AOT_LOG_LEVEL.get()
    if level is None:
        return
    logger.setLevel(level.upper())
    if not logger.hasHandlers():
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("%(name)s %(levelname)s: %(message)s"))
        logger.addHandler(handler)
