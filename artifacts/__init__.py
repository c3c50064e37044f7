"""The on-disk format of compiled kernels: architectures, manifest, store, verification, errors.

Needs only the standard library and platformdirs. Every other room imports this one, so what it
offers is imported where it is first asked for: `--help` needs little of it. `choose` and `verify`
are in the modules of these names.
"""

import importlib
from typing import TYPE_CHECKING, Any

from ._version import __version__

if TYPE_CHECKING:
    from .arch import Arch
    from .choose import Choice
    from .declaration import Budget, Declaration, Parameter
    from .errors import SonataError
    from .manifest import Binary, Manifest, Payload
    from .rules import Rule, first_match
    from .store import ArtifactSet, open_artifacts, publish

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
    "first_match",
    "open_artifacts",
    "publish",
]

_MODULES = {
    "Arch": "arch",
    "ArtifactSet": "store",
    "Binary": "manifest",
    "Budget": "declaration",
    "Choice": "choose",
    "Declaration": "declaration",
    "Manifest": "manifest",
    "Parameter": "declaration",
    "Payload": "manifest",
    "Rule": "rules",
    "SonataError": "errors",
    "first_match": "rules",
    "open_artifacts": "store",
    "publish": "store",
}


def __getattr__(name: str) -> Any:
    """What is offered under a name, from its module."""
    module = _MODULES.get(name)
    if module is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(importlib.import_module(f".{module}", __name__), name)
    return value
