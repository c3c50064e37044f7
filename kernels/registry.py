"""Finds the kernels of this package: every subfolder with a `spec.py` that has `SPECS`."""

from __future__ import annotations

import functools
import importlib
import pkgutil

from .spec import KernelSpec


@functools.cache
def builtin() -> dict[str, KernelSpec]:
    """Every kernel of this package by name, sorted."""
    package = __name__.rpartition(".")[0]
    folders = [
        module.name
        for module in pkgutil.iter_modules(importlib.import_module(package).__path__)
        if module.ispkg
    ]
    modules = [importlib.import_module(f"{package}.{folder}.spec") for folder in folders]
    specs = [spec for module in modules for spec in module.SPECS]
    return {spec.name: spec for spec in sorted(specs, key=lambda spec: spec.name)}
