"""`loader.patch`: a model whose decode projections and prefill scans run on our kernels."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch.nn import Module

    from .kernels import Kernels
    from .patch_report import Report


def patch(model: Module, kernels: Kernels | None = None, *, compare: float = 0.0) -> Report:
    """Have a model's projections and scans run on kernels where they apply.

    Calls of `nn.Linear` with 1 to 8 rows in all, such as (M, K) and (M, 1, K), go to the GEMV;
    larger ones stay torch's. The chunked scan of Mamba2 mixers of mamba_ssm and transformers, whose
    classes and versions docs/patching.md names, goes to `Kernels.mamba_chunk_scan_combined`. What
    does not fit, and every call that asks for a gradient, runs the original code. Other models of
    the same classes are not affected.

    A model that is patched already stays so; with other kernels or another share to compare it is
    patched anew. Copies and pickles of a patched model are of the original one. Weights may be
    replaced, moved and written to at any time.

    Args:
        model: Any module. It is changed in place.
        kernels: Those to run; the process's default if None. Programs of torch.compile and
            torch.export use them only if they are that default.
        compare: Share of calls, from 0 to 1, that run both ways, for the relative error between
            them, in the log and in the report. Waits for the device; not done inside a CUDA graph.

    Returns:
        What was patched, and what was not and why. With `with`, the patch ends with the block.

    Raises:
        ArgumentError: an argument is of the wrong type, or `compare` is no share.
        SonataError: `kernels` is None and nothing was loaded, unless SONATA_AOT_DISABLE is set.
    """
    # Needs torch, which this package's import does not.
    from .patching import patch_model

    return patch_model(model, kernels, compare)
