"""Whether a task's device function is one that can be compiled ahead of time; run by workers.

What is launched is a `@cute.kernel` by itself, and the loader fills its parameter block by the
declaration alone. So what a `@cute.jit` launcher would do has no place, and a parameter must be of
a type whose bytes are known.
"""

from __future__ import annotations

import importlib
import inspect
from typing import Any

# By kind of a declared parameter, the annotation of the function's.
_ANNOTATIONS = {"pointer": "Pointer", "i32": "Int32", "i64": "Int64", "f32": "Float32"}
_SEE = "see docs/own-kernels.md, What is supported"


def check_task(task: dict[str, Any]) -> None:
    """Import the task's module and compare its function with the declaration.

    Raises:
        TypeError: it is something else than a `@cute.kernel` with the declared parameters and
            choices; says what is wrong, and what to do.
        ValueError: the compiler cannot name its file.
    """
    where, name = f"{task['module']}:{task['function']}", task["function"]
    module = importlib.import_module(task["module"])
    if not _is_utf8(module.__file__ or ""):
        raise ValueError(
            f"{where} is in a folder whose name is no UTF-8, which the compiler cannot take: "
            "rename the folder"
        )
    function = getattr(module, name, None)
    if function is None:
        raise TypeError(f"{where} does not exist: correct the spec's `device`")
    kind = getattr(function, "_decorator_kind", None)
    if kind == "jit":
        raise TypeError(
            f"{where} is a @cute.jit launcher: name the @cute.kernel that it launches, declare its "
            "grid, block and shared memory as expressions, and further kernels by specs of their "
            f"own; {_SEE}"
        )
    if kind != "kernel":
        raise TypeError(f"{where} is no @cute.kernel: {_SEE}")
    found = inspect.signature(function).parameters
    annotations = {key: _annotation(item.annotation) for key, item in found.items()}
    if any(isinstance(item.annotation, str) for item in found.values()):
        raise TypeError(
            f"{where} has annotations that are text: remove `from __future__ import annotations`, "
            "with which the compiler cannot read them"
        )
    constants = [key for key, text in annotations.items() if text == "Constexpr"]
    positional = [key for key in found if key not in constants]
    _check_parameters(where, task, positional, annotations)
    _check_choices(where, task, found, constants)


def _is_utf8(path: str) -> bool:
    try:
        path.encode()
    except UnicodeEncodeError:
        return False
    return True


def _check_parameters(
    where: str, task: dict[str, Any], positional: list[str], annotations: dict[str, str]
) -> None:
    declared = [parameter["name"] for parameter in task["parameters"]]
    for name in positional:
        if annotations[name] not in ("", *_ANNOTATIONS.values()):
            raise TypeError(
                f"{where}: parameter {name!r} is a {annotations[name]}; a kernel takes "
                "cute.Pointer, Int32, Int64 and Float32, and makes a tensor of a pointer itself by "
                f"cute.make_tensor; {_SEE}"
            )
    if positional != declared:
        raise TypeError(
            f"{where} has the parameters {', '.join(positional)}; declared are "
            f"{', '.join(declared)}: they must be the same, in the same order"
        )
    for parameter in task["parameters"]:
        wanted, has = _ANNOTATIONS[parameter["kind"]], annotations[parameter["name"]]
        if has not in ("", wanted):
            raise TypeError(
                f"{where}: parameter {parameter['name']!r} is a {has}, and declared as a "
                f"{parameter['kind']}, which is a {wanted}"
            )


def _check_choices(where: str, task: dict[str, Any], found: Any, constants: list[str]) -> None:
    choices = task["constants"]
    for name in constants:
        if name not in choices and found[name].default is inspect.Parameter.empty:
            raise TypeError(f"{where}: Constexpr {name!r} is none of the declared choices")
    missing = [name for name in choices if name not in found and name not in task["elements"]]
    if missing:
        raise TypeError(
            f"{where} has no Constexpr parameter {missing[0]!r}, which the declaration has as a "
            "choice"
        )


def _annotation(annotation: Any) -> str:
    """The name of a type; empty where there is none."""
    if annotation is inspect.Parameter.empty:
        return ""
    origin = getattr(annotation, "__origin__", annotation)  # Constexpr[int]
    return getattr(origin, "__name__", None) or str(annotation)
