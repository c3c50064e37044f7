"""How a task becomes one call of the compiler. Only workers import this: it loads the DSL.

The bytes of this file are part of every cache key. It has no `from __future__ import annotations`:
the DSL reads the annotations of `_host` themselves.
"""

# The DSL ships no types, and its `.pth` file hides it from type checkers.
# pyright: reportMissingImports=false

import importlib
import inspect
import os
from typing import Any

import cutlass
from cutlass import cute
from cutlass.cute.runtime import make_ptr

_OPTIONS = "--keep-ptx --keep-cubin"

_DTYPES = {
    "bf16": cutlass.BFloat16,
    "f16": cutlass.Float16,
    "f32": cutlass.Float32,
    "i32": cutlass.Int32,
    "i64": cutlass.Int64,
    "u8": cutlass.Uint8,
}
_SCALARS = {"i32": cutlass.Int32, "i64": cutlass.Int64, "f32": cutlass.Float32}


@cute.jit
def _host(
    kernel: cutlass.Constexpr,
    arguments,
    constants: cutlass.Constexpr,
    block: cutlass.Constexpr,
    shared_bytes: cutlass.Constexpr,
    limits: cutlass.Constexpr,
):
    # The grid here is never used: the loader computes its own from the declaration.
    kernel(*arguments, **constants).launch(
        grid=[1, 1, 1], block=list(block), smem=shared_bytes, **limits
    )


def compile_task(task: dict[str, Any]) -> dict[str, Any]:
    """Compile one variant; the machine code and PTX go to files in the working directory.

    `task`: module, function, arch (sm_86), prefix (start of the entry symbol), parameters (kind,
    dtype, align), constants (the variant), elements (the choices that are dtypes), block,
    shared_bytes, resident (blocks a multiprocessor, or 0), stem (of the files).
    """
    kernel = getattr(importlib.import_module(task["module"]), task["function"])
    # Readable in a profiler, and a swapped binary shows.
    kernel.set_name_prefix(task["prefix"], remove_cutlass_symbol=True, keep_mangled_name=False)
    # A kernel sees a choice that is a dtype through its pointers and need not name it.
    named = inspect.signature(kernel).parameters
    constants = {
        name: value
        for name, value in task["constants"].items()
        if name in named or name not in task["elements"]
    }
    limits = {}
    if task["resident"]:
        # Without a carveout the compiler would ask the driver how much shared memory there is.
        limits = {"min_blocks_per_mp": task["resident"], "preferred_smem_carveout": 0}
    compiled = cute.compile(
        _host,
        kernel,
        tuple(_argument(parameter) for parameter in task["parameters"]),
        constants,
        tuple(task["block"]),
        task["shared_bytes"],
        limits,
        options=f"--gpu-arch {task['arch']} {_OPTIONS}",
    )
    cubin, ptx = compiled.artifacts.CUBIN, compiled.artifacts.PTX
    # Where the compiler has nothing for an arch it hands over text instead of machine code.
    if not isinstance(cubin, bytes) or not cubin.startswith(b"\x7fELF"):
        raise ValueError(f"the compiler made no machine code for {task['arch']}")
    # The compiler reads both back from files that it has written, and does not look at the result.
    if not ptx.rstrip().endswith("}"):
        raise OSError("the compiler's PTX is cut short: is the disk full?")
    files = {"cubin": f"{task['stem']}.cubin", "ptx": f"{task['stem']}.ptx"}
    for kind, content in (("cubin", cubin), ("ptx", ptx.encode("ascii"))):
        with open(files[kind], "wb") as file:
            file.write(content)
    return {name: os.path.abspath(path) for name, path in files.items()}


def _argument(parameter: dict[str, Any]) -> Any:
    if parameter["kind"] != "pointer":
        return _SCALARS[parameter["kind"]](0)
    dtype, space = _DTYPES[parameter["dtype"]], cute.AddressSpace.gmem
    return make_ptr(dtype, 0, space, assumed_align=parameter["align"])
