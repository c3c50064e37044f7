"""A copy of a function that sees other globals: what one module instance is to call.

Changing a name in the module that defines a class would change every model of that class.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import CellType, FunctionType
from typing import Any


class NotRebuilt(Exception):
    """A function whose copy would not do what it does."""


def with_globals(function: Callable[..., Any], names: Mapping[str, Any]) -> FunctionType:
    """A copy of a function in which these global names mean something else.

    Decorators that keep the function in their closure and name it in `__wrapped__`, as
    `functools.wraps` does, are copied around it. Globals are those of now: what is assigned to
    another name in the function's module later is not seen.

    Raises:
        NotRebuilt: it is no Python function, or a decorator hides it.
    """
    if not isinstance(function, FunctionType):
        raise NotRebuilt(f"{function!r} is no Python function")
    inner = getattr(function, "__wrapped__", None)
    if inner is None:
        copied = {**function.__globals__, **names}
        # By this name torch.compile would guard what the module has, and not what this copy has.
        copied.pop("__name__", None)
        return _copy(function, copied, function.__closure__)
    rebuilt = with_globals(inner, names)
    cells = function.__closure__ or ()
    closure = tuple(CellType(rebuilt) if _holds(cell, inner) else cell for cell in cells)
    if not any(map(_holds, cells, [inner] * len(cells))):
        raise NotRebuilt(f"a decorator of {function.__qualname__} keeps it out of reach")
    copy = _copy(function, function.__globals__, closure)
    copy.__wrapped__ = rebuilt  # pyright: ignore[reportFunctionMemberAccess]
    return copy


def innermost(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function below its decorators."""
    while hasattr(function, "__wrapped__"):
        function = function.__wrapped__  # pyright: ignore[reportFunctionMemberAccess]
    return function


def _holds(cell: CellType, function: Any) -> bool:
    try:
        return cell.cell_contents is function
    except ValueError:  # empty as yet
        return False


def _copy(
    function: FunctionType, names: dict[str, Any], closure: tuple[CellType, ...] | None
) -> FunctionType:
    copy = FunctionType(function.__code__, names, function.__name__, function.__defaults__, closure)
    copy.__kwdefaults__ = function.__kwdefaults__
    copy.__qualname__ = function.__qualname__
    copy.__module__ = function.__module__
    copy.__doc__ = function.__doc__
    copy.__dict__.update(function.__dict__)
    return copy
