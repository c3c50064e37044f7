"""The on-disk format of compiled kernels: architectures, manifest, store, verification, errors.

Needs only the standard library and platformdirs. Every other room imports this one.
"""

from ._version import __version__
from .arch import Arch
from .choose import Choice, choose
from .declaration import Budget, Declaration, Parameter
from .errors import SonataError
from .manifest import Binary, Manifest, Payload
from .rules import Rule, first_match
from .store import ArtifactSet, open_artifacts, publish
from .verify import verify

__all__ = [
    "Arch",
    "ArtifactSet",
    "Binary",
    "Budget",
    "Choice",
    "Declaration",
    "Manifest",
    "Parameter",
    "Payload",
    "Rule",
    "SonataError",
    "__version__",
    "choose",
    "first_match",
    "open_artifacts",
    "publish",
    "verify",
]
