"""Production: loads verified kernels and launches them on torch's streams, with no compiler.

Importing this needs neither torch nor a driver; `load` needs both.
"""

import importlib
import sys

from ..artifacts import __version__
from ..artifacts.errors import SonataError
from .default import linear, set_default
from .kernels import Kernels
from .load import load
from .patch import patch

if sys.modules.get("torch") is not None:
    # What `load` and a first launch need of torch is imported with this package, not by them; what
    # `patch` and the stages of the scan need besides, by those.
    for _room in (".fallback", ".launcher", ".operators", ".ssd"):
        importlib.import_module(_room, __name__)

__all__ = ["Kernels", "SonataError", "__version__", "linear", "load", "patch", "set_default"]
