"""`torch.ops.sonata_aot.*`: what compiled and exported programs call.

Registered with `Library.define` and `impl`: `torch.library.custom_op` takes about a second at its
first call, and imports Triton and the compiler. They run the process's default kernels, those that
it loaded first. Eager code calls `Kernels` itself, which costs less.
"""

# ruff: noqa: N803 - A, B, C and D are the names of the call.

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ..artifacts.errors import ArgumentError
from .default import get_default

NAMESPACE = "sonata_aot"
_UNLIMITED = (0.0, float("inf"))

_SCHEMAS = {
    "gemv": "(Tensor x, Tensor weight, Tensor? bias=None, *, bool batch_invariant=False) -> Tensor",
    # As many results as can be asked for, since a schema has a fixed number of them.
    "mamba_chunk_scan_combined": (
        "(Tensor x, Tensor dt, Tensor A, Tensor B, Tensor C, int chunk_size, Tensor? D=None, "
        "Tensor? z=None, Tensor? dt_bias=None, Tensor? initial_states=None, Tensor? seq_idx=None, "
        "Tensor? cu_seqlens=None, bool dt_softplus=False, float[]? dt_limit=None, "
        "bool return_final_states=False, bool return_varlen_states=False) "
        "-> (Tensor, Tensor, Tensor)"
    ),
}


def gemv(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, *, batch_invariant: bool = False
) -> Tensor:
    """`Kernels.gemv` as an operator that torch.compile and torch.export keep.

    Args:
        x: (M, K) bfloat16 or float16, M from 1 to 8.
        weight: (N, K), the same dtype.
        bias: (N,), the same dtype.
        batch_invariant: As for `Kernels.gemv`.

    Returns:
        (M, N).

    Raises:
        SonataError: nothing was loaded.
        ArgumentError, VariantMissing, DriverError: as for `Kernels.gemv`; when the program runs.
    """
    return torch.ops.sonata_aot.gemv(x, weight, bias, batch_invariant=batch_invariant)


def mamba_chunk_scan_combined(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    chunk_size: int,
    D: Tensor | None = None,
    z: Tensor | None = None,
    dt_bias: Tensor | None = None,
    initial_states: Tensor | None = None,
    seq_idx: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    dt_softplus: bool = False,
    dt_limit: Sequence[float] = _UNLIMITED,
    return_final_states: bool = False,
    return_varlen_states: bool = False,
) -> Tensor | tuple[Tensor, ...]:
    """`Kernels.mamba_chunk_scan_combined` as an operator, with its arguments and results.

    `torch.ops.sonata_aot.mamba_chunk_scan_combined` itself always returns (out, final states,
    varlen states), empty tensors where they were not asked for.

    Raises:
        SonataError: nothing was loaded.
        ArgumentError, VariantMissing, DriverError: as for `Kernels.mamba_chunk_scan_combined`;
            when the program runs.
    """
    out, final, varlen = torch.ops.sonata_aot.mamba_chunk_scan_combined(
        *(x, dt, A, B, C, chunk_size, D, z, dt_bias, initial_states, seq_idx, cu_seqlens),
        *(dt_softplus, list(dt_limit), return_final_states, return_varlen_states),
    )
    if not return_final_states:
        return (out, varlen) if return_varlen_states else out
    return (out, final, varlen) if return_varlen_states else (out, final)


def _run_gemv(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, *, batch_invariant: bool = False
) -> Tensor:
    return get_default("torch.ops.sonata_aot.gemv").gemv(
        x, weight, bias, batch_invariant=batch_invariant
    )


def _run_scan(*arguments: Any, **named: Any) -> tuple[Tensor, Tensor, Tensor]:
    given = _given(arguments, named)
    scan = get_default("torch.ops.sonata_aot.mamba_chunk_scan_combined").mamba_chunk_scan_combined
    results = scan(**given)
    out, *states = results if isinstance(results, tuple) else (results,)
    x = given["x"]
    final = states.pop(0) if given["return_final_states"] else x.new_empty(0, dtype=torch.float32)
    varlen = states.pop(0) if given["return_varlen_states"] else x.new_empty(0)
    return out, final, varlen


def _given(arguments: tuple[Any, ...], named: dict[str, Any]) -> dict[str, Any]:
    """The scan's arguments by name, with its defaults; the operator's limits may be None."""
    bound = _SCAN.bind(*arguments, **named)
    bound.apply_defaults()
    limit = bound.arguments["dt_limit"]
    return {**bound.arguments, "dt_limit": _UNLIMITED if limit is None else tuple(limit)}


_SCAN = inspect.signature(mamba_chunk_scan_combined)


def _fake_gemv(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, *, batch_invariant: bool = False
) -> Tensor:
    torch._check(x.dim() == 2 and weight.dim() == 2, lambda: "gemv: x is (M, K), weight (N, K)")
    torch._check(x.shape[1] == weight.shape[1], lambda: "gemv: x and weight have another K")
    return x.new_empty((x.shape[0], weight.shape[0]))


def _fake_scan(*arguments: Any, **named: Any) -> tuple[Tensor, Tensor, Tensor]:
    given = _given(arguments, named)
    x, wide = given["x"], given["B"]
    torch._check(x.dim() == 4 and wide.dim() == 4, lambda: "x and B have four dimensions")
    batch, _, heads, headdim = x.shape
    states = (heads, headdim, wide.shape[3])
    final = (batch, *states) if given["return_final_states"] else (0,)
    varlen: tuple[Any, ...] = (0,)
    if given["return_varlen_states"]:
        assert given["cu_seqlens"] is not None
        varlen = (given["cu_seqlens"].shape[0] - 1, *states)
    return (
        x.new_empty(x.shape),
        x.new_empty(final, dtype=torch.float32),
        x.new_empty(varlen),
    )


def _forward_only(name: str) -> Callable[..., Any]:
    """The operator without its gradient, which is an error to ask for."""

    def run(*arguments: Any, **named: Any) -> Any:
        if torch.is_grad_enabled() and any(
            isinstance(one, Tensor) and one.requires_grad for one in (*arguments, *named.values())
        ):
            raise ArgumentError(
                f"torch.ops.{NAMESPACE}.{name}: an input requires grad, and it has no backward",
                remedy="call it under torch.inference_mode() or torch.no_grad()",
            )
        with torch._C._AutoDispatchBelowAutograd():
            return getattr(torch.ops.sonata_aot, name).default(*arguments, **named)

    return run


def _register() -> torch.library.Library:
    library = torch.library.Library(NAMESPACE, "DEF")
    for name, run, fake in (
        ("gemv", _run_gemv, _fake_gemv),
        ("mamba_chunk_scan_combined", _run_scan, _fake_scan),
    ):
        library.define(name + _SCHEMAS[name])
        library.impl(name, run, "CUDA")
        library.impl(name, _forward_only(name), "Autograd")
        # What `register_fake` does in the end. That first asks `inspect` for its caller's module,
        # which goes through all modules of the process: a third of the time to import this package.
        library.impl(name, fake, "Meta")
    return library


# Operators are there for as long as this object is.
_library = _register()
