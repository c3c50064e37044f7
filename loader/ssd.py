"""`kernels.mamba_chunk_scan_combined`: the scan of Mamba2, all launches of a call at once."""

# ruff: noqa: N803 - A, B, C and D are the names of the call.

from __future__ import annotations

import inspect
from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ..artifacts.manifest import Binary
from . import direct, runtime
from .library import Table
from .ssd_occupancy import Gpu
from .ssd_plan import Plan, Planner
from .ssd_tensors import (
    INPUTS,
    UNREADABLE,
    Options,
    check,
    check_chunk_size,
    describe,
    fail,
    switch,
    two_limits,
)

# Plans that are kept: one for each combination of layouts and options.
_MOST_PLANS = 1024
_INFINITY = float("inf")

_grad_is_enabled = torch.is_grad_enabled


class ChunkScan:
    """The forward of mamba_ssm's function of the name; see `__call__`."""

    def __init__(self, tables: Mapping[str, Table], devices: frozenset[int]) -> None:
        """Launch the kernels in `tables`, on devices that they were loaded on."""
        self._devices = devices
        self._gpus: dict[int, Gpu] = {}
        self._planner = Planner(tables, self._gpu)
        self._plans: dict[tuple[object, ...], Plan] = {}
        self._reader = direct.make_reader()

    def __call__(
        self,
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
        dt_limit: tuple[float, float] = (0.0, _INFINITY),
        return_final_states: bool = False,
        return_varlen_states: bool = False,
    ) -> Tensor | tuple[Tensor, ...]:
        """Scan on torch's current stream of the tensors' device.

        The signature is that of mamba_ssm 2.3.2.post1. Forward only. Never synchronises; can be
        captured in a CUDA graph. Per batch and head, over the tokens t, in fp32:

            delta = clamp(softplus(dt + dt_bias), *dt_limit)
            state = exp(delta A) state + delta x Bᵀ
            out   = (state C + D x) silu(z)

        Strides are free. Fastest where the last dimensions of x, z, B and C are contiguous and
        their rows start 16-byte aligned; otherwise they are copied first.

        Args:
            x: (batch, seqlen, heads, headdim), bfloat16 or float16, "the dtype" below.
            dt: (batch, seqlen, heads), bfloat16, float16 or float32, "any" below.
            A: (heads,), any; none positive.
            B: (batch, seqlen, groups, dstate), the dtype; heads are a multiple of groups.
            C: As B.
            chunk_size: How mamba_ssm cuts its work, 1 or more; the result does not depend on it.
            D: (heads,) or (heads, headdim), any.
            z: As x.
            dt_bias: (heads,), any.
            initial_states: (batch, heads, headdim, dstate), any: states before the first token;
                they count where seq_idx starts with 0.
            seq_idx: (batch, seqlen) int32: which sequence a token belongs to. A token of another
                one than the token before starts from a zero state, which no NaN of another sequence
                reaches; out may hold one in the tile of 64 tokens around it. Negative is padding.
            cu_seqlens: (sequences + 1,) int32, for a batch of 1: the bounds of the sequences, which
                seq_idx must keep apart. Their values are not checked. Needed and read only for
                varlen states.
            dt_softplus: Whether softplus is applied, where dt + dt_bias is at most 20.
            dt_limit: Applied always; at (0, inf) a negative step counts as 0.
            return_final_states: Whether to return the states after the last token.
            return_varlen_states: Whether to return the states at the end of each sequence. One that
                starts from initial_states keeps them; mamba_ssm ignores them for a sequence that
                ends in its first chunk. An empty sequence has a zero state, but for the first.

        Returns:
            out, as x; or a tuple of it and what was asked for, in this order: final states (batch,
            heads, headdim, dstate) in float32, varlen states (sequences, heads, headdim, dstate) in
            the dtype.

        Raises:
            ArgumentError: an argument breaks one of these conditions, is on another device than the
                others or one that `load` was not given, or requires grad.
            VariantMissing: no binary for this dtype, headdim and dstate.
            DriverError: the driver refused a launch, or an earlier one had failed.
        """
        if type(chunk_size) is not int or chunk_size < 1:
            check_chunk_size(chunk_size)
        tensors = (x, dt, A, B, C, D, z, dt_bias, initial_states, seq_idx, cu_seqlens)
        reader = self._reader
        gradients = _grad_is_enabled()
        layouts = None if reader is None else reader.describe(tensors, gradients)
        is_plain = layouts is not None
        try:
            low, high = dt_limit
            if layouts is None:
                layouts = (gradients, *map(describe, tensors))
            key = (
                layouts,
                dt_softplus,
                low,
                high,
                return_final_states,
                return_varlen_states,
            )
            plan = self._plans.get(key)
        except UNREADABLE:
            key = plan = None
        if plan is None:
            options = _options(dt_softplus, dt_limit, return_final_states, return_varlen_states)
            plan = self._plan(key, tensors, options)
        if plan.dense:
            tensors = _made_dense(tensors, plan.dense)

        is_direct = is_plain and direct.can_make(plan.device)
        make = direct.empty if is_direct else partial(direct.new_empty, x)
        assert make is not None  # as it is direct
        out = make(*plan.out)
        if not is_direct and not out.data_ptr() and out.numel():  # a mode that makes fake tensors
            fail("out has no memory: a fake tensor", "leave the mode, or use real tensors")
        final = varlen = workspace = None
        if plan.final is not None:
            final = make(*plan.final)
        if plan.varlen is not None:
            varlen = make(*plan.varlen)
            if plan.sets_ends:
                _set_ends(varlen, initial_states)
        if plan.workspace is not None:
            # Held until the launches are enqueued; whoever gets the memory then comes after them.
            workspace = make(*plan.workspace)
        operands = (*tensors, out, final, varlen, workspace)
        stream = runtime.current_stream(plan.device)
        if is_direct and reader is not None:
            plan.sequence.launch_tensors(reader, stream, operands)
        else:
            plan.sequence.launch(
                stream, tuple([0 if one is None else one.data_ptr() for one in operands])
            )
        if final is None:
            return out if varlen is None else (out, varlen)
        return (out, final) if varlen is None else (out, final, varlen)

    def binaries(self, *arguments: Any, **named: Any) -> tuple[Binary, ...]:
        """What a call with these arguments launches, in order; nothing is launched.

        Raises:
            ArgumentError, VariantMissing: as for the call.
        """
        bound = inspect.signature(ChunkScan.__call__).bind(self, *arguments, **named)
        bound.apply_defaults()
        given = bound.arguments
        check_chunk_size(given["chunk_size"])
        switches = ("dt_softplus", "dt_limit", "return_final_states", "return_varlen_states")
        options = _options(*(given[name] for name in switches))
        return self._plan(None, tuple(given[name] for name in INPUTS), options).binaries

    def _plan(
        self,
        key: tuple[object, ...] | None,
        tensors: tuple[Tensor | None, ...],
        options: Options,
    ) -> Plan:
        """Check a call that is new, and plan it.

        Raises:
            ArgumentError, VariantMissing: as for the call.
        """
        plan = self._planner.plan(check(tensors, options, self._devices))
        if key is not None:
            if len(self._plans) >= _MOST_PLANS:
                self._plans.clear()
            self._plans[key] = plan
        return plan

    def _gpu(self, device: int) -> Gpu:
        if device not in self._gpus:  # another thread may be entering them
            from . import _native

            for found in _native.devices():
                gpu = Gpu(found["multiprocessors"], found["shared_per_block_optin"])
                self._gpus[found["index"]] = gpu
        return self._gpus[device]


class RangedChunkScan(ChunkScan):
    """The same, with a range of a profiler around each call."""

    def __init__(
        self, tables: Mapping[str, Table], devices: frozenset[int], ranges: runtime.Ranges
    ) -> None:
        """As for `ChunkScan`."""
        super().__init__(tables, devices)
        self._push, self._pop, self._name = ranges.named("mamba_chunk_scan_combined")

    def __call__(self, *arguments: Any, **named: Any) -> Tensor | tuple[Tensor, ...]:
        """As for `ChunkScan`."""
        self._push(self._name)
        try:
            return super().__call__(*arguments, **named)
        finally:
            self._pop()


def _options(
    dt_softplus: bool,
    dt_limit: tuple[float, float],
    return_final_states: bool,
    return_varlen_states: bool,
) -> Options:
    limits = two_limits(dt_limit)
    if limits is None:
        fail(f"dt_limit is {dt_limit!r}", "pass two floats, the lower limit first")
    return Options(
        switch("dt_softplus", dt_softplus),
        limits,
        switch("return_final_states", return_final_states),
        switch("return_varlen_states", return_varlen_states),
        _grad_is_enabled(),
    )


def _made_dense(
    tensors: tuple[Tensor | None, ...], places: tuple[int, ...]
) -> tuple[Tensor | None, ...]:
    """The tensors, those at `places` in contiguous and aligned memory of their own."""
    made = list(tensors)
    for place in places:
        tensor = made[place]
        assert tensor is not None, INPUTS[place]
        made[place] = tensor.detach().clone(memory_format=torch.contiguous_format)
    return tuple(made)


def _set_ends(varlen: Tensor, initial_states: Tensor | None) -> None:
    """Set the states at the ends of sequences without any token."""
    varlen.zero_()
    if initial_states is not None and varlen.shape[0]:
        varlen[0].copy_(initial_states[0])
