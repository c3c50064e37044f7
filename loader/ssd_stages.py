# ruff: noqa: N803, N806 - A, B, C and D are the names of the calls that these mirror.
"""`kernels.ssd`: the stages of the SSD scan, each a call of its own, and the scan made of them.

The calls and what they return are those of mamba_ssm 2.3.2.post1's Triton kernels, forward only.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any, NoReturn

import torch
from torch import Tensor

from ..artifacts.declaration import Declaration
from ..artifacts.errors import ArgumentError, ManifestError, VariantMissing
from . import runtime
from .library import Table

Shape = tuple[int, ...]

# The dtypes of x, B, C and z, as declarations name them, and the codes of those that a launch says.
_DTYPES = {torch.bfloat16: "bf16", torch.float16: "f16"}
_KINDS = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
_TILE = 64
# Sizes are 32-bit in kernels, and tiles reach past the end.
_LARGEST = 2**30
# Blocks of `chunk_scan` a multiprocessor, before a block takes more than one tile.
_BLOCKS = 8


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
        self._tables = {name: tables[name] for name in _KNOWN if name in tables}
        self._multiprocessors = dict(multiprocessors)
        for table in self._tables.values():
            _require_known(table.declaration)

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
        check = _Check("chunk_cumsum", self._multiprocessors)
        check.chunk_size(chunk_size)
        batch, seqlen, heads = check.tensor("dt", dt, "(batch, seqlen, heads)", _KINDS)
        check.tensor("A", A, "(heads,)", _KINDS, (heads,))
        if dt_bias is not None:
            check.tensor("dt_bias", dt_bias, "(heads,)", _KINDS, (heads,))
        low, high = check.limits(dt_limit)
        chunks = _ceildiv(seqlen, chunk_size)
        shape = (batch, heads, chunks, chunk_size)
        decay, steps = (dt.new_empty(shape, dtype=torch.float32) for _ in range(2))
        if decay.numel():
            self._launch(
                check,
                "ssd_chunk_cumsum",
                (),
                dt=dt.data_ptr(),
                dt_bias=_address(dt_bias),
                rates=A.data_ptr(),
                steps=steps.data_ptr(),
                decay=decay.data_ptr(),
                **_sizes(batch, seqlen, chunks, chunk_size),
                heads=heads,
                dt_kind=_KINDS[dt.dtype],
                bias_kind=_kind(dt_bias),
                rates_kind=_KINDS[A.dtype],
                softplus=int(bool(dt_softplus)),
                low=low,
                high=high,
                **_strides("dt", dt, "batch", "token", "head"),
                **_strides("bias", dt_bias, "head"),
                **_strides("rates", A, "head"),
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
        check = _Check("bmm_chunk", self._multiprocessors)
        check.chunk_size(chunk_size)
        meaning = "(batch, seqlen, groups, dstate)"
        batch, seqlen, groups, dstate = check.tensor("a", a, meaning, _DTYPES)
        check.tensor("b", b, meaning, _DTYPES, a.shape)
        check.same_dtype("b", b, "a", a)
        check.sequences(seq_idx, batch, seqlen)
        output_dtype = a.dtype if output_dtype is None else output_dtype
        if output_dtype not in (torch.float32, a.dtype):
            check.fail(f"output_dtype is {output_dtype}", f"pass torch.float32 or {a.dtype}")
        chunks = _ceildiv(seqlen, chunk_size)
        row = chunk_size + chunk_size % 2
        out = a.new_empty((batch, chunks, groups, chunk_size, row), dtype=output_dtype)
        if out.numel():
            a, b = _aligned(a), _aligned(b)
            self._launch(
                check,
                "ssd_bmm_chunk",
                (_DTYPES[a.dtype], dstate),
                c=a.data_ptr(),
                b=b.data_ptr(),
                seq_idx=_address(seq_idx),
                out=out.data_ptr(),
                **_sizes(batch, seqlen, chunks, chunk_size),
                groups=groups,
                causal=int(bool(causal)),
                out_kind=_KINDS[output_dtype],
                **_strides("c", a, "batch", "token", "group"),
                **_strides("b", b, "batch", "token", "group"),
                **_strides("seq", seq_idx, "batch", "token"),
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
        check = _Check("chunk_state", self._multiprocessors)
        meaning = "(batch, seqlen, heads, headdim)"
        batch, seqlen, heads, headdim = check.tensor("x", x, meaning, _DTYPES)
        groups, dstate = check.grouped("B", B, x)
        chunks, chunk_size = check.chunked("dt", dt, batch, heads, seqlen)
        check.chunked("dA_cumsum", dA_cumsum, batch, heads, seqlen, dt.shape)
        check.sequences(seq_idx, batch, seqlen)
        shape = (batch, chunks, heads, headdim, dstate)
        states = x.new_empty(shape, dtype=torch.float32)
        if states.numel():
            x, B = _aligned(x), _aligned(B)
            dt, dA_cumsum = _with_rows(dt), _with_rows(dA_cumsum)
            self._launch(
                check,
                "ssd_chunk_state",
                (_DTYPES[x.dtype], headdim, dstate),
                x=x.data_ptr(),
                b=B.data_ptr(),
                steps=dt.data_ptr(),
                decay=dA_cumsum.data_ptr(),
                seq_idx=_address(seq_idx),
                states=states.data_ptr(),
                **_sizes(batch, seqlen, chunks, chunk_size),
                heads=heads,
                group_heads=heads // groups,
                **_strides("x", x, "batch", "token", "head"),
                **_strides("b", B, "batch", "token", "group"),
                **_strides("steps", dt, "batch", "head", "chunk"),
                **_strides("decay", dA_cumsum, "batch", "head", "chunk"),
                **_strides("seq", seq_idx, "batch", "token"),
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
        check = _Check("state_passing", self._multiprocessors)
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
        if initial_states is not None:
            check.tensor("initial_states", initial_states, str(shape), _KINDS, shape)
        seqlen = 0
        if seq_idx is not None:
            if chunk_size is None:
                check.fail("seq_idx without chunk_size", "pass both")
            check.chunk_size(chunk_size)
            _, seqlen = check.tensor(
                "seq_idx", seq_idx, "(batch, seqlen)", (torch.int32,), (batch, None)
            )
            if _ceildiv(seqlen, chunk_size) != chunks:
                check.fail(
                    f"seq_idx has {seqlen} tokens, {chunks} chunks of {chunk_size} do not",
                    "pass the chunk_size of the other stages",
                )
        out_dtype = torch.float32 if out_dtype is None else out_dtype
        if out_dtype not in _KINDS:
            check.fail(f"out_dtype is {out_dtype}", f"pass one of {_names(_KINDS)}")
        out = states.new_empty(states.shape, dtype=out_dtype)
        final = states.new_empty(shape)
        if final.numel():
            states = _aligned(states.flatten(3))
            if initial_states is not None:
                initial_states = _aligned(initial_states.flatten(2))
            self._launch(
                check,
                "ssd_state_passing",
                (),
                states=states.data_ptr(),
                decay=dA_chunk_cumsum.data_ptr(),
                initial=_address(initial_states),
                seq_idx=_address(seq_idx),
                out=out.data_ptr(),
                final=final.data_ptr(),
                **_sizes(batch, seqlen, chunks, chunk_size or 0),
                heads=heads,
                dim=dim,
                initial_kind=_kind(initial_states),
                out_kind=_KINDS[out_dtype],
                **_strides("states", states, "batch", "chunk", "head"),
                **_strides("decay", dA_chunk_cumsum, "batch", "head", "chunk"),
                **_strides("initial", initial_states, "batch", "head"),
                **_strides("seq", seq_idx, "batch", "token"),
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
        check = _Check("chunk_scan", self._multiprocessors)
        meaning = "(batch, seqlen, heads, headdim)"
        batch, seqlen, heads, headdim = check.tensor("x", x, meaning, _DTYPES)
        groups, dstate = check.grouped("C", C, x)
        chunks, chunk_size = check.chunked("dt", dt, batch, heads, seqlen)
        check.chunked("dA_cumsum", dA_cumsum, batch, heads, seqlen, dt.shape)
        products = (batch, chunks, groups, chunk_size, chunk_size)
        check.tensor("cb", cb, str(products), _KINDS, products)
        before = (batch, chunks, heads, headdim, dstate)
        check.tensor("states", states, str(before), (torch.float32, x.dtype), before)
        if D is not None:
            wanted = (heads,) if isinstance(D, Tensor) and D.dim() == 1 else (heads, headdim)
            check.tensor("D", D, "(heads,) or (heads, headdim)", _KINDS, wanted)
        if z is not None:
            check.tensor("z", z, meaning, (x.dtype,), x.shape)
        check.sequences(seq_idx, batch, seqlen)
        out = x.new_empty(x.shape)
        if out.numel():
            x, C = _aligned(x), _aligned(C)
            z = None if z is None else _aligned(z)
            dt, dA_cumsum = _with_rows(dt), _with_rows(dA_cumsum)
            cb, states = _with_pairs(cb), _with_heads(states)
            wide = None if D is None else D.reshape(heads, -1).expand(heads, headdim)
            self._launch(
                check,
                "ssd_chunk_scan",
                (_DTYPES[x.dtype], headdim, dstate),
                cb=cb.data_ptr(),
                x=x.data_ptr(),
                steps=dt.data_ptr(),
                decay=dA_cumsum.data_ptr(),
                c=C.data_ptr(),
                states=states.data_ptr(),
                d=_address(wide),
                z=_address(z),
                seq_idx=_address(seq_idx),
                out=out.data_ptr(),
                **_sizes(batch, seqlen, chunks, chunk_size),
                block_tiles=self._block_tiles(x, chunks, chunk_size),
                heads=heads,
                group_heads=heads // groups,
                states_kind=_KINDS[states.dtype],
                d_kind=_kind(D),
                **_strides("cb", cb, "batch", "chunk", "group", "row"),
                **_strides("x", x, "batch", "token", "head"),
                **_strides("steps", dt, "batch", "head", "chunk"),
                **_strides("decay", dA_cumsum, "batch", "head", "chunk"),
                **_strides("c", C, "batch", "token", "group"),
                **_strides("states", states, "batch", "chunk", "head"),
                **_strides("d", wide, "head", "channel"),
                **_strides("z", z, "batch", "token", "head"),
                **_strides("seq", seq_idx, "batch", "token"),
            )
        return out

    def combined(
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
        dt_limit: tuple[float, float] = (0.0, math.inf),
        return_final_states: bool = False,
        return_varlen_states: bool = False,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """The scan, made of the stages: see docs/ssd.md for its arguments and corners.

        `chunk_size` decides the speed and no part of the result. An index of seq_idx that comes
        back after another one is a new sequence. `cu_seqlens` has no part in the result.

        Returns:
            out, as x; with return_final_states also the states after the last token,
            (batch, heads, headdim, dstate) float32.

        Raises:
            ArgumentError: an argument breaks one of the conditions, is on another device than the
                others or one that `load` was not given, or requires grad; or varlen states are
                asked for.
            VariantMissing: no binary for these sizes and this dtype.
            DriverError: the driver refused a launch, or an earlier one had failed.
        """
        check = _Check("combined", self._multiprocessors)
        if return_varlen_states:
            check.fail(
                "the stages make no varlen states", "call mamba_chunk_scan_combined of the kernels"
            )
        batch, seqlen, *_ = check.tensor("x", x, "(batch, seqlen, heads, headdim)", _DTYPES)
        if seq_idx is not None:
            check.sequences(seq_idx, batch, seqlen)
            seq_idx = _runs(seq_idx)
        decay, steps = self.chunk_cumsum(dt, A, chunk_size, dt_bias, dt_softplus, dt_limit)
        added = self.chunk_state(B, x, steps, decay, seq_idx)
        # Rounded here or where they are used comes to the same.
        states, final = self.state_passing(
            added, decay[..., -1], initial_states, seq_idx, chunk_size, out_dtype=x.dtype
        )
        products = self.bmm_chunk(C, B, chunk_size, seq_idx, True, torch.float32)
        out = self.chunk_scan(products, x, steps, decay, C, states, D, z, seq_idx)
        return (out, final) if return_final_states else out

    def _block_tiles(self, x: Tensor, chunks: int, chunk_size: int) -> int:
        """Tiles of a chunk for one block: all, unless that leaves too few blocks."""
        tiles = _ceildiv(chunk_size, _TILE)
        heads = x.shape[0] * x.shape[2] * chunks
        most = heads * tiles // (_BLOCKS * self._multiprocessors[x.get_device()])
        return max(1, min(tiles, most))

    def _launch(
        self, check: _Check, kernel: str, selectors: tuple[str | int, ...], **arguments: int | float
    ) -> None:
        if kernel not in self._tables:
            raise VariantMissing(
                f"{check.stage}: no kernel {kernel!r} in the artifacts",
                remedy=f"build again without --kernel, or with --kernel {kernel} among others",
            )
        table, device = self._tables[kernel], check.device
        loaded = table.get(device, *selectors)
        if loaded is None:
            there = sorted(key[1:] for key in table.all() if key[0] == device)
            names = table.declaration.selectors
            raise VariantMissing(
                f"{check.stage}: no kernel for {_pairs(names, selectors)}; there are "
                + "; ".join(_pairs(names, key) for key in there),
                remedy="pass such sizes, or build with --all",
            )
        sizes = {name: int(arguments[name]) for _, name in table.declaration.integers}
        values = [arguments[p.name] for p in table.declaration.parameters]
        loaded.enqueue(runtime.current_stream(device), loaded.grid(sizes), values)


class _Check:
    """What a call asks of its tensors; all have to be on one device."""

    def __init__(self, stage: str, devices: Iterable[int]) -> None:
        self.stage = stage
        self.device = -1
        self._devices = sorted(devices)
        self._first: tuple[str, Tensor] | None = None

    def fail(self, what: str, remedy: str) -> NoReturn:
        raise ArgumentError(f"{self.stage}: {what}", remedy=remedy)

    def tensor(
        self,
        name: str,
        tensor: Tensor,
        meaning: str,
        dtypes: Iterable[torch.dtype],
        shape: tuple[int | None, ...] | None = None,
    ) -> Shape:
        """The shape of a tensor, which is `shape` but where that has None."""
        if not isinstance(tensor, Tensor):
            self.fail(f"{name} is a {type(tensor).__name__}", "pass a torch.Tensor")
        found = tuple(tensor.shape)
        expected = (
            meaning.count(",") + (not meaning.endswith(",)")) if shape is None else len(shape)
        )
        fits = shape is None or all(w in (None, f) for f, w in zip(found, shape, strict=False))
        if len(found) != expected or not fits:
            wanted = meaning if shape is None else f"{meaning}, here {tuple(shape)}"
            self.fail(f"{name} has shape {found}", f"pass {wanted}")
        if max(found, default=0) > _LARGEST:
            self.fail(f"{name} has shape {found}", "pass sizes of at most 2**30")
        if tensor.dtype not in dtypes:
            self.fail(f"{name} is {tensor.dtype}", f"pass {_names(dtypes)}")
        self._check_memory(name, tensor)
        return found

    def _check_memory(self, name: str, tensor: Tensor) -> None:
        if tensor.layout is not torch.strided:
            self.fail(f"{name} is {tensor.layout}", f"pass {name}.to_dense()")
        device = tensor.get_device()
        if self._first is None:
            if device not in self._devices:
                self.fail(
                    f"{name} is on {tensor.device}, and kernels were loaded on {self._devices}",
                    "move it to such a device, or load kernels on its own",
                )
            self._first, self.device = (name, tensor), device
        elif device != self.device:
            first, other = self._first
            self.fail(f"{name} is on {tensor.device}, {first} on {other.device}", "move one")
        if tensor.data_ptr() == 0 and tensor.numel():
            self.fail(f"{name} has no memory: a fake tensor, or freed storage", "pass a real one")
        if tensor.is_neg():
            self.fail(f"{name} is a negated view", f"pass {name}.resolve_neg()")
        if tensor.data_ptr() % tensor.element_size():
            self.fail(f"{name} starts between two elements", "pass an aligned tensor")
        if tensor.requires_grad and torch.is_grad_enabled():
            self.fail(
                f"{name} requires grad, and there is no backward",
                "call it under torch.inference_mode() or torch.no_grad()",
            )

    def same_dtype(self, name: str, tensor: Tensor, other_name: str, other: Tensor) -> None:
        if tensor.dtype is not other.dtype:
            self.fail(f"{name} is {tensor.dtype}, {other_name} {other.dtype}", "convert one")

    def grouped(self, name: str, tensor: Tensor, x: Tensor) -> tuple[int, int]:
        """Groups and dstate of B or C, which fit x."""
        batch, seqlen, heads, _ = x.shape
        meaning = "(batch, seqlen, groups, dstate)"
        wanted = (batch, seqlen, None, None)
        _, _, groups, dstate = self.tensor(name, tensor, meaning, _DTYPES, wanted)
        if groups == 0 or heads % groups:
            self.fail(
                f"{name} has {groups} groups, x {heads} heads", "pass groups that divide the heads"
            )
        self.same_dtype(name, tensor, "x", x)
        return groups, dstate

    def chunked(
        self,
        name: str,
        tensor: Tensor,
        batch: int,
        heads: int,
        seqlen: int,
        shape: Shape | None = None,
    ) -> tuple[int, int]:
        """Number and size of the chunks of a result of `chunk_cumsum`."""
        meaning = "(batch, heads, chunks, chunk_size)"
        wanted = (batch, heads, None, None) if shape is None else shape
        found = self.tensor(name, tensor, meaning, (torch.float32,), wanted)
        chunks, chunk_size = found[2:]
        if chunk_size < 1 or _ceildiv(seqlen, chunk_size) != chunks:
            self.fail(
                f"{name} has {chunks} chunks of {chunk_size}, x {seqlen} tokens",
                "pass what chunk_cumsum made of as many tokens",
            )
        return chunks, chunk_size

    def sequences(self, seq_idx: Tensor | None, batch: int, seqlen: int) -> None:
        if seq_idx is not None:
            self.tensor("seq_idx", seq_idx, "(batch, seqlen)", (torch.int32,), (batch, seqlen))

    def chunk_size(self, chunk_size: int) -> None:
        if not isinstance(chunk_size, int) or isinstance(chunk_size, bool):
            self.fail(f"chunk_size is {chunk_size!r}", "pass an int")
        if not 1 <= chunk_size <= _LARGEST:
            self.fail(f"chunk_size is {chunk_size}", "pass 1 to 2**30")

    def limits(self, limit: tuple[float, float]) -> tuple[float, float]:
        try:
            low, high = (float(value) for value in limit)
        except (TypeError, ValueError):
            self.fail(f"dt_limit is {limit!r}", "pass two numbers")
        return _single(low), _single(high)


def _single(value: float) -> float:
    """What fp32 can hold: what is too large counts as infinite."""
    return value if abs(value) <= torch.finfo(torch.float32).max else math.copysign(math.inf, value)


def _runs(seq_idx: Tensor) -> Tensor:
    """Another index for each sequence, negative for padding; 0 goes on from before the first."""
    before = torch.nn.functional.pad(seq_idx[:, :-1], (1, 0))
    runs = (seq_idx != before).cumsum(1, dtype=torch.int32)
    return torch.where(seq_idx < 0, -1 - runs, runs)


def _aligned(tensor: Tensor) -> Tensor:
    """The tensor, or a copy if its rows are not contiguous or do not start 16-byte aligned."""
    size = tensor.element_size()
    *outer, last = zip(tensor.shape, tensor.stride(), strict=True)
    fits = last[0] == 1 or last[1] == 1
    fits = fits and all(length == 1 or stride * size % 16 == 0 for length, stride in outer)
    if fits and tensor.data_ptr() % 16 == 0:
        return tensor
    return tensor.clone(memory_format=torch.contiguous_format)


def _with_rows(tensor: Tensor) -> Tensor:
    """The tensor, or a copy if its rows are not contiguous."""
    return tensor if tensor.stride(-1) == 1 or tensor.shape[-1] == 1 else tensor.contiguous()


def _with_pairs(cb: Tensor) -> Tensor:
    """The products in fp32, with contiguous rows that start 8-byte aligned."""
    size = cb.shape[-1]
    even = all(
        length == 1 or stride % 2 == 0
        for length, stride in zip(cb.shape[:-1], cb.stride()[:-1], strict=True)
    )
    contiguous = size == 1 or cb.stride(-1) == 1
    if cb.dtype is torch.float32 and even and contiguous and cb.data_ptr() % 8 == 0:
        return cb
    made = cb.new_empty((*cb.shape[:-1], size + size % 2), dtype=torch.float32)[..., :size]
    return made.copy_(cb)


def _with_heads(states: Tensor) -> Tensor:
    """The states, or a copy if a head's are not contiguous or not aligned."""
    if states.stride()[-2:] == (states.shape[-1], 1):
        return _aligned(states)
    return states.contiguous()


def _sizes(batch: int, seqlen: int, chunks: int, chunk_size: int) -> dict[str, int]:
    return {"batch": batch, "seqlen": seqlen, "chunks": chunks, "chunk_size": chunk_size}


def _strides(name: str, tensor: Tensor | None, *dimensions: str) -> dict[str, int]:
    """Strides of the leading dimensions, by the names of their parameters."""
    strides = (0,) * len(dimensions) if tensor is None else tensor.stride()
    return {f"{name}_{d}": strides[i] for i, d in enumerate(dimensions)}


def _address(tensor: Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()


def _kind(tensor: Tensor | None) -> int:
    return 0 if tensor is None else _KINDS[tensor.dtype]


def _ceildiv(number: int, divisor: int) -> int:
    return -(-number // divisor)


def _names(dtypes: Iterable[torch.dtype]) -> str:
    return " or ".join(str(dtype) for dtype in dtypes)


def _pairs(names: Iterable[str], values: Iterable[Any]) -> str:
    return ", ".join(f"{name} {value}" for name, value in zip(names, values, strict=True))


_SIZES = "batch seqlen chunks chunk_size"
_STEPS = "steps_batch steps_head steps_chunk decay_batch decay_head decay_chunk"
# What a launch passes, in order, and what it selects a binary by.
_KNOWN = {
    "ssd_chunk_cumsum": (
        f"dt dt_bias rates steps decay {_SIZES} heads dt_kind bias_kind rates_kind softplus low "
        "high dt_batch dt_token dt_head bias_head rates_head",
        "",
    ),
    "ssd_bmm_chunk": (
        f"c b seq_idx out {_SIZES} groups causal out_kind c_batch c_token c_group b_batch b_token "
        "b_group seq_batch seq_token out_row",
        "dtype dstate",
    ),
    "ssd_chunk_state": (
        f"x b steps decay seq_idx states {_SIZES} heads group_heads x_batch x_token x_head b_batch "
        f"b_token b_group {_STEPS} seq_batch seq_token",
        "dtype headdim dstate",
    ),
    "ssd_state_passing": (
        f"states decay initial seq_idx out final {_SIZES} heads dim initial_kind out_kind "
        "states_batch states_chunk states_head decay_batch decay_head decay_chunk initial_batch "
        "initial_head seq_batch seq_token",
        "",
    ),
    "ssd_chunk_scan": (
        f"cb x steps decay c states d z seq_idx out {_SIZES} block_tiles heads group_heads "
        "states_kind d_kind cb_batch cb_chunk cb_group cb_row x_batch x_token x_head "
        f"{_STEPS} c_batch c_token c_group states_batch states_chunk states_head d_head d_channel "
        "z_batch z_token z_head seq_batch seq_token",
        "dtype headdim dstate",
    ),
}


def _require_known(declaration: Declaration) -> None:
    names = " ".join(parameter.name for parameter in declaration.parameters)
    if (names, " ".join(declaration.selectors)) != _KNOWN[declaration.name]:
        raise ManifestError(
            f"the artifacts' {declaration.name} has other parameters than this loader passes",
            remedy="rebuild the artifacts with this version of sonata-aot",
        )
