"""Production: loads verified kernels and launches them on torch's streams, with no compiler.

Importing this needs neither torch nor a driver; `load` needs both.
"""

from ..artifacts import __version__
from ..artifacts.errors import SonataError
from .default import linear
from .kernels import Kernels
from .load import load

__all__ = ["Kernels", "SonataError", "__version__", "linear", "load"]
