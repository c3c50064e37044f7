"""Kernels and their declarations: a folder each, `spec.py` without and `device.py` with the DSL."""

from .registry import builtin
from .spec import Budget, Declaration, KernelSpec, Parameter, Variant, product

__all__ = ["Budget", "Declaration", "KernelSpec", "Parameter", "Variant", "builtin", "product"]
