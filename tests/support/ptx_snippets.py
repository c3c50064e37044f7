"""Small kernels around a few lines of PTX, for tests of `ptx_machine`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from ptx_machine import Machine, Memory

Array = Any

_REGISTERS = """
.reg .pred %p<16>;
.reg .b16 %h<16>;
.reg .b32 %r<64>;
.reg .f32 %f<32>;
.reg .b64 %rd<32>;
.reg .f64 %fd<8>;
"""


def kernel(body: str, buffers: Sequence[str], shared: str = "") -> str:
    """PTX that has the address of each buffer in a register `%name`, and the thread in `%r0`."""
    parameters = ", ".join(f".param .u64 param_{name}" for name in buffers)
    loads = "".join(
        f".reg .b64 %{name}; ld.param.u64 %{name}, [param_{name}];\n" for name in buffers
    )
    return (
        f".version 8.6\n.target sm_90\n.address_size 64\n{shared}\n"
        f".visible .entry snippet({parameters})\n{{\n{_REGISTERS}{loads}"
        f"mov.u32 %r0, %tid.x;\n{body}\nret;\n}}\n"
    )


def run(
    body: str,
    *,
    out: Array,
    inputs: dict[str, Array] | None = None,
    threads: int = 32,
    blocks: int = 1,
    shared: str = ".extern .shared .align 16 .b8 pool[];",
    shared_bytes: int = 0,
    **options: Any,
) -> Array:
    """What a kernel leaves in `out`."""
    inputs = inputs or {}
    machine = Machine(kernel(body, [*inputs, "out"], shared))
    memory = Memory(exclusive=options.pop("exclusive", True))
    arguments = [memory.buffer(array, name) for name, array in inputs.items()]
    arguments.append(memory.buffer(out, "out", writable=True))
    machine.run(
        memory,
        grid=(blocks,),
        block=(threads,),
        arguments=arguments,
        shared_bytes=shared_bytes,
        **options,
    )
    return out


def each(code: str, *inputs: Array, result: Any) -> Array:
    """`code` by a thread for each element: inputs are `%a`, `%b`, `%c`, and the result `%d`.

    Predicates are inputs of numpy's bool, or a result of it.
    """
    count = len(inputs[0])
    names = "abc"[: len(inputs)]
    lines = []
    for name, array in zip(names, inputs, strict=True):
        bits = 8 * array.itemsize
        read = f"mad.wide.u32 %rd0, %r0, {array.itemsize}, %in_{name}; ld.global"
        if array.dtype == np.bool_:
            lines.append(f".reg .pred %{name}; {read}.u8 %h0, [%rd0]; setp.ne.b16 %{name}, %h0, 0;")
        else:
            lines.append(f".reg .b{bits} %{name}; {read}.b{bits} %{name}, [%rd0];")
    size = np.dtype(result).itemsize
    kind = ".pred" if result is np.bool_ else f".b{8 * size}"
    lines.append(f".reg {kind} %d;\n{code}\nmad.wide.u32 %rd0, %r0, {size}, %out;")
    if result is np.bool_:
        lines.append("selp.b16 %h0, 1, 0, %d; st.global.b8 [%rd0], %h0;")
    else:
        lines.append(f"st.global.b{8 * size} [%rd0], %d;")
    out = np.zeros(count, result)
    given = {f"in_{name}": array for name, array in zip(names, inputs, strict=True)}
    return run("\n".join(lines), out=out, inputs=given, threads=count)
