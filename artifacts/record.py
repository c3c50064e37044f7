"""`@record`: what `@dataclass(frozen=True)` is, but quick to define.

`dataclass` writes the source of half a dozen methods for each class and compiles it, a millisecond
or so. A server's process defines two dozen such classes before its first launch. Here all classes
share methods; to make an object takes no longer than where each field is set in a frozen one.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import MISSING, FrozenInstanceError, dataclass, field, fields
from operator import attrgetter
from typing import Any, NoReturn, TypeVar, dataclass_transform

T = TypeVar("T")


@dataclass_transform(frozen_default=True, field_specifiers=(field,))
def record(kind: type[T]) -> type[T]:
    """Make a class with annotated fields a frozen dataclass.

    Methods that the class has itself stay. `dataclasses.fields` and `replace` know it; there is no
    order, no `__slots__`, and no field that is not an argument.
    """
    made: Any = dataclass(init=False, repr=False, eq=False)(kind)
    names = tuple(made.__dataclass_fields__)
    values_of = attrgetter(*names)

    def equals(self: Any, other: Any) -> Any:
        if other.__class__ is not self.__class__:
            return NotImplemented
        return values_of(self) == values_of(other)

    def hashed(self: Any) -> int:
        return hash(values_of(self))

    methods: dict[str, Callable[..., Any]] = {
        "__init__": _initialiser(made, names),
        "__repr__": _shown,
        "__eq__": equals,
        "__hash__": hashed,
        "__setattr__": _refuse_to_set,
        "__delattr__": _refuse_to_delete,
    }
    for name, method in methods.items():
        # A class that has `__eq__` has a `__hash__` of None.
        if kind.__dict__.get(name) is None:
            setattr(made, name, method)
    return made


def _initialiser(kind: Any, names: tuple[str, ...]) -> Callable[..., None]:
    count = len(names)
    check: Callable[[Any], None] | None = getattr(kind, "__post_init__", None)

    def initialise(self: Any, /, *values: Any, **named: Any) -> None:
        # Not by `setattr`, which refuses.
        if named or len(values) != count:
            self.__dict__.update(_completed(kind, values, named))
        else:
            self.__dict__.update(zip(names, values, strict=True))
        if check is not None:
            check(self)

    return initialise


def _completed(kind: Any, values: tuple[Any, ...], named: dict[str, Any]) -> dict[str, Any]:
    """All fields' values in their order, defaults among them.

    Raises:
        TypeError: an argument is missing, unknown or given twice.
    """
    known = fields(kind)
    if len(values) > len(known):
        raise TypeError(f"{kind.__name__} takes {len(known)} arguments, not {len(values)}")
    given = dict(zip((item.name for item in known), values, strict=False))
    for name in named:
        if name in given or name not in kind.__dataclass_fields__:
            problem = "twice" if name in given else "that it does not have"
            raise TypeError(f"{kind.__name__} got {name!r} {problem}")
    given |= named
    result = {}
    for item in known:
        if item.name in given:
            result[item.name] = given[item.name]
        elif item.default is not MISSING:
            result[item.name] = item.default
        elif item.default_factory is not MISSING:
            result[item.name] = item.default_factory()
        else:
            raise TypeError(f"{kind.__name__} needs {item.name!r}")
    return result


def _shown(self: Any) -> str:
    values = ", ".join(f"{item.name}={getattr(self, item.name)!r}" for item in fields(self))
    return f"{type(self).__qualname__}({values})"


def _refuse_to_set(self: object, name: str, value: object) -> NoReturn:
    raise FrozenInstanceError(f"cannot assign to field {name!r}")


def _refuse_to_delete(self: object, name: str) -> NoReturn:
    raise FrozenInstanceError(f"cannot delete field {name!r}")
