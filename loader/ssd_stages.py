# ruff: noqa: N803 - A, B, C and D are the names of the calls that these mirror.
"""`kernels.ssd`: the stages of the SSD scan, each a call of its own, and the scan made of them.

The calls and what they return are those of mamba_ssm 2.3.2.post1's Triton kernels, forward only.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from .library import Table
from .ssd_combined import combined
from .stage_checks import DTYPES, KINDS, Check, ceildiv, names
from .stage_launch import (
    Binaries,
    aligned,
    block_tiles,
    kind,
    sizes,
    with_heads,
    with_pairs,
    with_rows,
)


class Stages:
    """The five stages and `combined`; every call launches on torch's current stream.

    `seq_idx` is what a stage compares for equality: an index that comes back within a chunk is the
    same sequence to a stage, but a new one to `combined`.
    """

    def __init__(self, tables: Mapping[str, Table], multiprocessors: Mapping[int, int]) -> None:
        """`tables` of what was loaded by kernel, `multiprocessors` by device.

        Raises:
            ManifestError: the artifacts' kernels are not those that this loader knows.
        """
        self._binaries = Binaries(tables)
        self.multiprocessors = dict(multiprocessors)

    def chunk_cumsum(
        self,
        dt: Tensor,
        A: Tensor,
        chunk_size: int,
        dt_bias: Tensor | None = None,
        dt_softplus: bool = False,
        dt_limit: tuple[float, float] = (0.0, math.inf),
    ) -> tuple[Tensor, Tensor]:
        """Step sizes, and their decays summed up within each chunk.

        Args:
            dt: (batch, seqlen, heads), float32, bfloat16 or float16.
            A: (heads,), any of these.
            chunk_size: At least 1.
            dt_bias: (heads,), any of these, added first.
            dt_softplus: Whether softplus follows, where the sum is at most 20.
            dt_limit: Limits that are applied last.

        Returns:
            Sums of dt A, and dt, both (batch, heads, chunks, chunk_size) float32. Tokens past the
            end have a dt of 0.

        Raises:
            ArgumentError, VariantMissing, DriverError: as for every call; see `combined`.
        """
        check = Check("chunk_cumsum", self.multiprocessors)
        check.chunk_size(chunk_size)
        batch, seqlen, heads = check.tensor("dt", dt, "(batch, seqlen, heads)", KINDS)
        check.tensor("A", A, "(heads,)", KINDS, (heads,))
        check.optional("dt_bias", dt_bias, "(heads,)", KINDS, (heads,))
        low, high = check.limits(dt_limit)
        chunks = ceildiv(seqlen, chunk_size)
        shape = (batch, heads, chunks, chunk_size)
        decay, steps = (dt.new_empty(shape, dtype=torch.float32) for _ in range(2))
        if decay.numel():
            self._binaries.launch(
                check,
                "ssd_chunk_cumsum",
                (),
                {"dt": dt, "dt_bias": dt_bias, "rates": A, "steps": steps, "decay": decay},
                **sizes(batch, seqlen, chunks, chunk_size),
                heads=heads,
                dt_kind=kind(dt),
                bias_kind=kind(dt_bias),
                rates_kind=kind(A),
                softplus=int(bool(dt_softplus)),
                low=low,
                high=high,
            )
        return decay, steps

    def bmm_chunk(
        self,
        a: Tensor,
        b: Tensor,
        chunk_size: int,
        seq_idx: Tensor | None = None,
        causal: bool = False,
        output_dtype: torch.dtype | None = None,
    ) -> Tensor:
        """Products of the rows of a and b, C and B of the scan, within each chunk.

        Args:
            a: (batch, seqlen, groups, dstate), bfloat16 or float16.
            b: As a.
            chunk_size: At least 1.
            seq_idx: (batch, seqlen) int32; products of tokens with different indices are 0.
            causal: Whether only products (i, j) with j at most i are wanted; the others are
                unspecified then.
            output_dtype: float32 or the dtype of a, which is what None means.

        Returns:
            (batch, chunks, groups, chunk_size, chunk_size); 0 for tokens past the end. Rows of an
            odd chunk size have one element between them.

        Raises:
            ArgumentError, VariantMissing, DriverError: as for every call; see `combined`.
        """
        check = Check("bmm_chunk", self.multiprocessors)
        check.chunk_size(chunk_size)
        meaning = "(batch, seqlen, groups, dstate)"
        batch, seqlen, groups, dstate = check.tensor("a", a, meaning, DTYPES)
        check.tensor("b", b, meaning, DTYPES, a.shape)
        check.same_dtype("b", b, "a", a)
        check.sequences(seq_idx, batch, seqlen)
        output_dtype = a.dtype if output_dtype is None else output_dtype
        if output_dtype not in (torch.float32, a.dtype):
            check.fail(f"output_dtype is {output_dtype}", f"pass torch.float32 or {a.dtype}")
        chunks = ceildiv(seqlen, chunk_size)
        row = chunk_size + chunk_size % 2
        out = a.new_empty((batch, chunks, groups, chunk_size, row), dtype=output_dtype)
        if out.numel():
            self._binaries.launch(
                check,
                "ssd_bmm_chunk",
                (DTYPES[a.dtype], dstate),
                {"c": aligned(a), "b": aligned(b), "seq_idx": seq_idx, "out": out},
                **sizes(batch, seqlen, chunks, chunk_size),
                groups=groups,
                causal=int(bool(causal)),
                out_kind=kind(out),
                out_row=row,
            )
        return out[..., :chunk_size]

    def chunk_state(
        self,
        B: Tensor,
        x: Tensor,
        dt: Tensor,
        dA_cumsum: Tensor,
        seq_idx: Tensor | None = None,
    ) -> Tensor:
        """What each chunk adds to the state.

        Args:
            B: (batch, seqlen, groups, dstate), bfloat16 or float16.
            x: (batch, seqlen, heads, headdim), as B.
            dt: (batch, heads, chunks, chunk_size) float32, of `chunk_cumsum`.
            dA_cumsum: As dt.
            seq_idx: (batch, seqlen) int32; only tokens with the chunk's last index count, and none
                if it is negative.

        Returns:
            (batch, chunks, heads, headdim, dstate) float32.

        Raises:
            ArgumentError, VariantMissing, DriverError: as for every call; see `combined`.
        """
        check = Check("chunk_state", self.multiprocessors)
        meaning = "(batch, seqlen, heads, headdim)"
        batch, seqlen, heads, headdim = check.tensor("x", x, meaning, DTYPES)
        groups, dstate = check.grouped("B", B, x)
        chunks, chunk_size = check.chunked("dt", dt, batch, heads, seqlen)
        check.chunked("dA_cumsum", dA_cumsum, batch, heads, seqlen, dt.shape)
        check.sequences(seq_idx, batch, seqlen)
        shape = (batch, chunks, heads, headdim, dstate)
        states = x.new_empty(shape, dtype=torch.float32)
        if states.numel():
            self._binaries.launch(
                check,
                "ssd_chunk_state",
                (DTYPES[x.dtype], headdim, dstate),
                {
                    "x": aligned(x),
                    "b": aligned(B),
                    "steps": with_rows(dt),
                    "decay": with_rows(dA_cumsum),
                    "seq_idx": seq_idx,
                    "states": states,
                },
                **sizes(batch, seqlen, chunks, chunk_size),
                heads=heads,
                group_heads=heads // groups,
            )
        return states

    def state_passing(
        self,
        states: Tensor,
        dA_chunk_cumsum: Tensor,
        initial_states: Tensor | None = None,
        seq_idx: Tensor | None = None,
        chunk_size: int | None = None,
        out_dtype: torch.dtype | None = None,
    ) -> tuple[Tensor, Tensor]:
        """States before each chunk, and after the last one.

        Args:
            states: (batch, chunks, heads, headdim, dstate) float32, of `chunk_state`; or with the
                last two dimensions as one, a multiple of 4.
            dA_chunk_cumsum: (batch, heads, chunks) float32: dA_cumsum[..., -1].
            initial_states: (batch, heads, ...) before the first chunk; float32, bfloat16 or
                float16; None for zeros.
            seq_idx: (batch, seqlen) int32; nothing of a state passes through a chunk that ends with
                another index than the one before it did; before the first the index counts as 0.
            chunk_size: Needed with seq_idx.
            out_dtype: Of the states before each chunk: float32, bfloat16 or float16; None for
                float32. What is passed on is float32 in any case.

        Returns:
            States before each chunk, of the shape of states, and those after the last,
            (batch, heads, ...) float32.

        Raises:
            ArgumentError, VariantMissing, DriverError: as for every call; see `combined`.
        """
        check = Check("state_passing", self.multiprocessors)
        meaning = "(batch, chunks, heads, headdim, dstate)"
        if isinstance(states, Tensor) and states.dim() == 4:
            meaning = "(batch, chunks, heads, dim)"
        batch, chunks, heads, *rest = check.tensor("states", states, meaning, (torch.float32,))
        dim = math.prod(rest)
        if dim % 4:
            check.fail(f"states have {dim} numbers a head", "pass a multiple of 4")
        check.tensor(
            "dA_chunk_cumsum",
            dA_chunk_cumsum,
            "(batch, heads, chunks)",
            (torch.float32,),
            (batch, heads, chunks),
        )
        shape = (batch, heads, *rest)
        check.optional("initial_states", initial_states, str(shape), KINDS, shape)
        seqlen = 0
        if seq_idx is not None:
            if chunk_size is None:
                check.fail("seq_idx without chunk_size", "pass both")
            check.chunk_size(chunk_size)
            _, seqlen = check.tensor(
                "seq_idx", seq_idx, "(batch, seqlen)", (torch.int32,), (batch, None)
            )
            if ceildiv(seqlen, chunk_size) != chunks:
                check.fail(
                    f"seq_idx has {seqlen} tokens, {chunks} chunks of {chunk_size} do not",
                    "pass the chunk_size of the other stages",
                )
        out_dtype = torch.float32 if out_dtype is None else out_dtype
        if out_dtype not in KINDS:
            check.fail(f"out_dtype is {out_dtype}", f"pass one of {names(KINDS)}")
        out = states.new_empty(states.shape, dtype=out_dtype)
        final = states.new_empty(shape)
        if final.numel():
            self._binaries.launch(
                check,
                "ssd_state_passing",
                (),
                {
                    "states": aligned(states.flatten(3)),
                    "decay": dA_chunk_cumsum,
                    "initial": None
                    if initial_states is None
                    else aligned(initial_states.flatten(2)),
                    "seq_idx": seq_idx,
                    "out": out,
                    "final": final,
                },
                **sizes(batch, seqlen, chunks, chunk_size or 0),
                heads=heads,
                dim=dim,
                initial_kind=kind(initial_states),
                out_kind=kind(out),
            )
        return out, final

    def chunk_scan(
        self,
        cb: Tensor,
        x: Tensor,
        dt: Tensor,
        dA_cumsum: Tensor,
        C: Tensor,
        states: Tensor,
        D: Tensor | None = None,
        z: Tensor | None = None,
        seq_idx: Tensor | None = None,
    ) -> Tensor:
        """The output, from the states before each chunk and from the chunks' own tokens.

        Args:
            cb: (batch, chunks, groups, chunk_size, chunk_size), of `bmm_chunk`; best in float32,
                to which other dtypes are converted.
            x: (batch, seqlen, heads, headdim), bfloat16 or float16.
            dt: (batch, heads, chunks, chunk_size) float32, of `chunk_cumsum`.
            dA_cumsum: As dt.
            C: (batch, seqlen, groups, dstate), as x.
            states: (batch, chunks, heads, headdim, dstate), of `state_passing`; float32 or the
                dtype of x, to which they are rounded where they are used.
            D: (heads,) or (heads, headdim), float32, bfloat16 or float16.
            z: As x; gates with silu.
            seq_idx: (batch, seqlen) int32; tokens whose index differs from the last one of the
                chunk before take nothing from the state.

        Returns:
            (batch, seqlen, heads, headdim), as x.

        Raises:
            ArgumentError, VariantMissing, DriverError: as for every call; see `combined`.
        """
        check = Check("chunk_scan", self.multiprocessors)
        meaning = "(batch, seqlen, heads, headdim)"
        batch, seqlen, heads, headdim = check.tensor("x", x, meaning, DTYPES)
        groups, dstate = check.grouped("C", C, x)
        chunks, chunk_size = check.chunked("dt", dt, batch, heads, seqlen)
        check.chunked("dA_cumsum", dA_cumsum, batch, heads, seqlen, dt.shape)
        products = (batch, chunks, groups, chunk_size, chunk_size)
        check.tensor("cb", cb, str(products), KINDS, products)
        before = (batch, chunks, heads, headdim, dstate)
        check.tensor("states", states, str(before), (torch.float32, x.dtype), before)
        check.outputs(x, D, z)
        check.sequences(seq_idx, batch, seqlen)
        out = x.new_empty(x.shape)
        if out.numel():
            processors = self.multiprocessors[check.device]
            self._binaries.launch(
                check,
                "ssd_chunk_scan",
                (DTYPES[x.dtype], headdim, dstate),
                {
                    "cb": with_pairs(cb),
                    "x": aligned(x),
                    "steps": with_rows(dt),
                    "decay": with_rows(dA_cumsum),
                    "c": aligned(C),
                    "states": with_heads(states),
                    "d": None if D is None else D.reshape(heads, -1).expand(heads, headdim),
                    "z": None if z is None else aligned(z),
                    "seq_idx": seq_idx,
                    "out": out,
                },
                **sizes(batch, seqlen, chunks, chunk_size),
                block_tiles=block_tiles(batch * heads * chunks, chunk_size, processors),
                heads=heads,
                group_heads=heads // groups,
                states_kind=kind(states),
                d_kind=kind(D),
            )
        return out

    combined = combined
