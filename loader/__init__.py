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
    # What needs torch is imported with this package, and not by the first `load`.
    for _room in (".fallback", ".launcher", ".operators", ".patching", ".ssd", ".ssd_stages"):
        importlib.import_module(_room, __name__)

__all__ = ["Kernels", "SonataError", "__version__", "linear", "load", "patch", "set_default"]
