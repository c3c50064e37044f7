"""A module that runs other code than its class says, and what of it is seen elsewhere.

The module's class becomes a subclass of it with another `forward`: hooks, `isinstance` and names
stay, and so does the module's own dictionary but for one entry. Copies and pickles are of the
class that the module had, without that entry: they run the original code.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, cast

from torch.nn import Module

Forward = Callable[..., Any]
STATE = "_sonata_aot_patch"


class Runner:
    """What a patched module runs: `run(original, module, *arguments, **named)`."""

    def run(self, original: Forward, module: Module, *arguments: Any, **named: Any) -> Any:
        """The result of the module's forward."""
        raise NotImplementedError

    def __reduce__(self) -> tuple[type[None], tuple[()]]:
        # Copied or pickled only by whoever copies a module's dictionary himself: the copy runs the
        # original code.
        return type(None), ()


def install(module: Module, runner: Runner) -> None:
    """Make a module run `runner`.

    Raises:
        TypeError: its class does not let itself be derived from.
    """
    kind = type(module)
    # Somebody else may have put a class back that the module had while it was patched, or may have
    # derived one from it: its forward asks for a runner already.
    patched = kind if hasattr(kind, "sonata_aot_original") else _patched(kind)
    object.__setattr__(module, STATE, runner)
    module.__class__ = patched


def remove(module: Module, runner: Runner) -> bool:
    """Make a module that runs `runner` run its original code again; False if it does not.

    Its class stays as it is where something else has changed it since, but without effect.
    """
    if module.__dict__.get(STATE) is not runner:
        return False
    object.__delattr__(module, STATE)
    if "sonata_aot_original" in type(module).__dict__:
        module.__class__ = cast(Any, type(module)).sonata_aot_original
    return True


def installed(module: Module) -> Runner | None:
    """What a module runs instead of its original code."""
    return module.__dict__.get(STATE)


def original_class(module: Module) -> type[Module]:
    """The class that a module has, or had before it was patched."""
    return getattr(type(module), "sonata_aot_original", type(module))


@functools.cache
def _patched(original: type[Module]) -> type[Module]:
    """The subclass that patched modules of a class share."""

    @functools.wraps(original.forward)
    def forward(self: Any, *arguments: Any, **named: Any) -> Any:
        runner = getattr(self, STATE, None)
        # The class's forward of now: others may replace it, too.
        if runner is None:  # a method taken while the module was patched
            return original.forward(self, *arguments, **named)
        return runner.run(original.forward, self, *arguments, **named)

    def reduce(self: Any, protocol: Any) -> Any:
        # By the first protocol's function: that of later ones insists on the object's own class.
        constructor, arguments, state, *rest = super(patched, self).__reduce_ex__(1)
        constructor = original if constructor is patched else constructor
        arguments = tuple(original if item is patched else item for item in arguments)
        if isinstance(state, dict):
            state = {name: value for name, value in state.items() if name != STATE}
        return (constructor, arguments, state, *rest)

    patched = type(
        original.__name__,
        (original,),
        {
            "__module__": original.__module__,
            "__qualname__": original.__qualname__,
            "__doc__": original.__doc__,
            "__reduce_ex__": reduce,
            "forward": forward,
            "sonata_aot_original": original,
            STATE: None,
        },
    )
    return cast("type[Module]", patched)
