"""A kernel of one number, as the text of two modules: its device code, and what declares it."""

from __future__ import annotations

DEVICE = """
import cutlass
from cutlass import Float32, Int32, cute

@cute.kernel
def {name}(out: cute.Pointer, n: Int32, *, m: cutlass.Constexpr):
    (out + n).store(Float32(m))
"""
# `device`: module and function.
SPEC = """
from sonata_aot.kernels import Declaration, KernelSpec, Parameter, product

SPECS = [
    KernelSpec(
        Declaration(
            name="{name}",
            parameters=(Parameter("out", "pointer", element="f32", align=4), Parameter("n", "i32")),
            choices=("m",),
            selectors=("m",),
            block=("64", "1", "1"),
            grid=("1", "1", "1"),
        ),
        product(m=[1]),
        "{device}",
    )
]
"""
