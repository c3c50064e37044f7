"""What a scan launches: binaries, segments, workspace, and the values of all parameters.

docs/ssd.md says what the launches are, and when a sequence is cut into segments.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

import torch

from ..artifacts.errors import VariantMissing
from ..artifacts.manifest import Binary
from ..artifacts.record import record
from .direct import Allocation
from .library import Loaded, Table
from .ssd_launches import Address, Launches, Value, Workspace, dense_steps, strides
from .ssd_occupancy import Cut, Gpu, Room, choose_cut
from .ssd_tensors import INPUTS, Call, Layout

if TYPE_CHECKING:
    from ._native import Sequence

# Operands of the launches: the inputs, then what is allocated.
OUT, FINAL, VARLEN, WORKSPACE = range(len(INPUTS), len(INPUTS) + 4)
OPERANDS = len(INPUTS) + 4
# The kernels of one scan; `ssd_copy` and `ssd_pass` are not needed by every call.
COPY, PREPARE, PASS, SCAN = "ssd_copy", "ssd_prepare", "ssd_pass", "ssd_scan"
KERNELS = (COPY, PREPARE, PASS, SCAN)
# What can be built of them.
HEADDIMS, DSTATES = (32, 64, 80, 96, 128), (16, 32, 64, 128, 256)


def _any(sizes: tuple[int, ...]) -> str:
    return f"{', '.join(map(str, sizes[:-1]))} or {sizes[-1]}"


@record
class Plan:
    """What a call does, given addresses of its inputs and of what it allocates.

    `out`, `final`, `varlen` and `workspace` are allocated where they are not None. `dense` are
    places in `INPUTS` of tensors that torch copies first, since kernels read them as contiguous
    ones. Without tokens no kernel writes the varlen states: `sets_ends` says that they remain to be
    set.
    """

    device: int
    out: Allocation
    final: Allocation | None
    varlen: Allocation | None
    workspace: Allocation | None
    dense: tuple[int, ...]
    sets_ends: bool
    sequence: Sequence
    # What the launches run, in order.
    binaries: tuple[Binary, ...]


class Planner:
    """Makes plans for calls."""

    def __init__(self, tables: Mapping[str, Table], gpu: Callable[[int], Gpu]) -> None:
        """`tables` by kernel; `gpu` says what a device is."""
        self._tables = tables
        self.gpu = gpu
        # Tests and measurements may put others in the place of these.
        self.cut: Callable[[int, int, Room], Cut] = choose_cut
        # Warps of the scan that share tokens, by preference.
        self.outputs = (1, 2)

    def plan(self, call: Call) -> Plan:
        """The plan of a call.

        Raises:
            VariantMissing: no binaries for these sizes.
            ManifestError, ArgumentError, DriverError: as for `Launches.sequence`.
        """
        return _Planning(self, call).plan()

    def scan(self, call: Call, packed: bool, outputs: tuple[int, ...]) -> Loaded:
        """The scan of a call, with the first of these `outputs` that there is.

        Raises:
            VariantMissing: there is none.
        """
        wanted = {"headdim": call.headdim, "dstate": call.dstate, "packed": int(packed)}
        for count in outputs:
            found = self._find(SCAN, call, {**wanted, "outputs": count})
            if found is not None:
                return found
        raise self._missing(SCAN, call, {**wanted, "outputs": outputs[0]})

    def pick(self, kernel: str, call: Call, **wanted: int | str) -> Loaded:
        """The binary of a kernel for a call's dtype and device that has these choices.

        Raises:
            VariantMissing: there is none.
        """
        found = self._find(kernel, call, wanted)
        if found is None:
            raise self._missing(kernel, call, wanted)
        return found

    def _find(self, kernel: str, call: Call, wanted: Mapping[str, int | str]) -> Loaded | None:
        """One that has these choices; of two, that with programmatic launch."""
        table = self._tables.get(kernel)
        found = None
        for (device, *_), loaded in table.all().items() if table is not None else ():
            variant = loaded.binary.variant
            same = device == call.device and variant.get("dtype", call.dtype) == call.dtype
            if same and wanted.items() <= variant.items() and (found is None or variant.get("pdl")):
                found = loaded
        return found

    def _missing(self, kernel: str, call: Call, wanted: Mapping[str, int | str]) -> VariantMissing:
        table = self._tables.get(SCAN)
        pairs = sorted(
            {
                (int(loaded.binary.variant["headdim"]), int(loaded.binary.variant["dstate"]))
                for (device, *_), loaded in (table.all().items() if table is not None else ())
                if device == call.device and loaded.binary.variant["dtype"] == call.dtype
            }
        )
        sizes = {"headdim": call.headdim, "dstate": call.dstate, **wanted}
        asked = " ".join(f"{name}={value}" for name, value in sizes.items())
        present = ", ".join(f"{headdim}x{dstate}" for headdim, dstate in pairs) or "none"
        remedy = (
            "build all sizes with `sonata-aot build --all --kernel "
            + " --kernel ".join(KERNELS)
            + "`, with the architectures and kernels that are wanted besides"
        )
        if call.headdim not in HEADDIMS or call.dstate not in DSTATES:
            remedy = f"there are kernels for headdim {_any(HEADDIMS)} and dstate {_any(DSTATES)}"
        return VariantMissing(
            f"mamba_chunk_scan_combined: no binary of {kernel} for {call.dtype} {asked}; headdim x "
            f"dstate that are there: {present}",
            remedy=remedy,
        )


class _Planning:
    """One plan in the making."""

    def __init__(self, planner: Planner, call: Call) -> None:
        self._planner = planner
        self._call = call
        self._workspace = Workspace(WORKSPACE)
        self._launches = Launches()
        # Where kernels find the inputs, and in what steps: the caller's own until they are copied.
        self._places: dict[str, Value] = {}
        self._steps: dict[str, tuple[int, ...]] = {}
        self._dense: list[int] = []
        for number, name in enumerate(INPUTS):
            layout = call.layouts.get(name)
            has_memory = layout is not None and layout.remainder >= 0
            self._places[name] = Address(number) if has_memory else 0
            self._steps[name] = layout.steps if layout is not None else ()

    def plan(self) -> Plan:
        call, options = self._call, self._call.options
        state = (call.heads, call.headdim, call.dstate)
        if call.batch and call.heads:
            self._add_launches()
        dtype, size = call.layouts["x"].dtype, self._workspace.size
        varlen = Allocation.of((call.sequences, *state), dtype)
        return Plan(
            device=call.device,
            out=Allocation.of((call.batch, call.seqlen, call.heads, call.headdim), dtype),
            final=Allocation.of((call.batch, *state), torch.float32)
            if options.final_states
            else None,
            varlen=varlen if options.varlen_states else None,
            workspace=Allocation.of((size,), torch.uint8) if size else None,
            dense=tuple(self._dense),
            sets_ends=options.varlen_states and call.seqlen == 0,
            sequence=self._launches.sequence(OPERANDS),
            binaries=tuple(loaded.binary for loaded, *_ in self._launches.items),
        )

    def _add_launches(self) -> None:
        call, options = self._call, self._call.options
        # Also where nothing is to do: what a call needs does not depend on how long it is.
        wants_ends = options.varlen_states and call.sequences > 0
        has_index = "seq_idx" in call.layouts
        scan = self._planner.scan(call, wants_ends or has_index, self._planner.outputs)
        variant = scan.binary.variant
        tile = int(variant["tile"])
        prepare = self._planner.pick(PREPARE, call, dstate=call.dstate, tile=tile)
        if call.seqlen == 0 and not options.final_states:
            return
        tiles = -(-call.seqlen // tile)
        self._add_copies()
        prepared = self._add_prepare(prepare, tile, tiles)
        values = self._scan_values(prepared, tiles)
        if tiles > 1:
            states_only = self._planner.scan(call, has_index, (0,))
            cut = self._cut(scan, states_only, tiles)
            if cut.segments > 1:
                values = self._add_segments(states_only, values, cut)
        size = call.headdim * call.dstate
        if options.final_states:
            values |= {"final": Address(FINAL), "final_segment": -1}
            values |= {"final_batch": call.heads * size, "final_head": size}
        if wants_ends:
            values |= {"cu_seqlens": self._places["cu_seqlens"], "end_states": Address(VARLEN)}
            values |= {"sequences": call.sequences}
        self._launches.add(scan, values)

    def _add_copies(self) -> None:
        """Have inputs copied that the kernels do not read as they are."""
        for name in ("x", "z", "B", "C"):
            layout = self._call.layouts.get(name)
            if layout is not None and self._call.seqlen and not layout.has_rows:
                self._add_copy(name, layout)
        for name in ("A", "dt_bias", "initial_states", "cu_seqlens"):
            layout = self._call.layouts.get(name)
            if layout is None:
                continue
            if name != "initial_states":
                fits = layout.inner_dense(0)
            else:
                vector = 16 // layout.dtype.itemsize
                fits = layout.remainder <= 0 and layout.inner_dense(2)
                fits = fits and not any(step % vector for step in layout.steps[:2])
            if not fits:
                self._dense.append(INPUTS.index(name))
                self._steps[name] = dense_steps(layout.shape)

    def _add_copy(self, name: str, layout: Layout) -> None:
        batch, seqlen, rows, columns = layout.shape
        target = self._workspace.take(2 * batch * seqlen * rows * columns)
        values: dict[str, Value] = {"source": self._places[name], "target": target}
        values |= {"batch": batch, "seqlen": seqlen, "rows": rows, "columns": columns}
        values |= strides("source", ("batch", "token", "row", "column"), layout.steps)
        self._launches.add(self._planner.pick(COPY, self._call), values)
        self._places[name] = target
        self._steps[name] = dense_steps(layout.shape)

    def _add_prepare(self, prepare: Loaded, tile: int, tiles: int) -> dict[str, Value]:
        """Enter what makes `cb`, `decay` and `starts`, and return where they are."""
        call, options = self._call, self._call.options
        if call.seqlen == 0:
            return {"cb": 0, "decay": 0, "starts": 0}
        blocks = tile // 16
        triangle = blocks * (blocks + 1) // 2
        made: dict[str, Value] = {
            "cb": self._workspace.take(call.batch * tiles * call.groups * triangle * 1024),
            "decay": self._workspace.take(call.batch * call.heads * tiles * tile * 12),
            "starts": 0,
        }
        if "seq_idx" in call.layouts:
            made["starts"] = self._workspace.take(call.batch * tiles * tile * 4)
        values: dict[str, Value] = {
            **made,
            "dt": self._places["dt"],
            "dt_bias": self._places["dt_bias"],
            "rates": self._places["A"],
            "b": self._places["B"],
            "c": self._places["C"],
            "seq_idx": self._places["seq_idx"],
            "x": self._places["x"],
            "batch": call.batch,
            "seqlen": call.seqlen,
            "tiles": tiles,
            "heads": call.heads,
            "groups": call.groups,
            "channels": call.headdim,
            "dt_kind": self._kind("dt"),
            "bias_kind": self._kind("dt_bias"),
            "rates_kind": self._kind("A"),
            "softplus": int(bool(options.softplus)),
            "low": float(options.limit[0]),
            "high": float(options.limit[1]),
        }
        values |= strides("dt", ("batch", "token", "head"), self._steps["dt"])
        values |= strides("b", ("batch", "token", "group"), self._steps["B"])
        values |= strides("c", ("batch", "token", "group"), self._steps["C"])
        values |= strides("seq", ("batch", "token"), self._steps["seq_idx"])
        values |= strides("x", ("batch", "token", "head"), self._steps["x"])
        self._launches.add(prepare, values)
        return made

    def _scan_values(self, prepared: dict[str, Value], tiles: int) -> dict[str, Value]:
        """What a scan in one segment takes, without states to return."""
        call = self._call
        size = call.headdim * call.dstate
        values: dict[str, Value] = {
            **prepared,
            "x": self._places["x"],
            "b": self._places["B"],
            "c": self._places["C"],
            "d": self._places["D"],
            "z": self._places["z"],
            "out": Address(OUT) if call.seqlen else 0,
            "initial": self._places["initial_states"],
            "final": 0,
            "totals": 0,
            "batch": call.batch,
            "seqlen": call.seqlen,
            "tiles": tiles,
            "segments": 1,
            "segment_tiles": tiles,
            "heads": call.heads,
            "groups": call.groups,
            "group_heads": call.heads // call.groups,
            "d_kind": self._kind("D"),
            "initial_kind": self._kind("initial_states"),
        }
        values |= strides("x", ("batch", "token", "head"), self._steps["x"])
        values |= strides("b", ("batch", "token", "group"), self._steps["B"])
        values |= strides("c", ("batch", "token", "group"), self._steps["C"])
        values |= strides("z", ("batch", "token", "head"), self._steps["z"])
        row = call.heads * call.headdim
        values |= strides("out", ("batch", "token", "head"), (call.seqlen * row, row, call.headdim))
        values |= strides("d", ("head", "channel"), self._steps["D"])
        initial = self._steps["initial_states"]
        values |= strides("initial", ("batch", "head"), initial)
        values["initial_segment"] = 0
        values |= {"final_batch": 0, "final_segment": 0, "final_head": size}
        values |= {"cu_seqlens": 0, "end_states": 0, "sequences": 0}
        return values

    def _cut(self, scan: Loaded, states_only: Loaded, tiles: int) -> Cut:
        call, gpu = self._call, self._planner.gpu(self._call.device)
        room = Room(
            gpu.multiprocessors, gpu.resident(scan.binary), gpu.resident(states_only.binary)
        )
        slices = call.headdim // int(scan.binary.variant["width"])
        return self._planner.cut(call.batch * call.heads * slices, tiles, room)

    def _add_segments(
        self, states_only: Loaded, values: dict[str, Value], cut: Cut
    ) -> dict[str, Value]:
        """Enter what finds the state before each segment; returns what the scan then takes."""
        call = self._call
        size = call.headdim * call.dstate
        row = call.heads * size
        own = self._workspace.take(4 * call.batch * cut.parts * row)
        totals = self._workspace.take(4 * call.batch * cut.parts * call.heads)
        states = self._workspace.take(4 * call.batch * cut.segments * row)
        alone: dict[str, Value] = {"segments": cut.parts, "segment_tiles": cut.part_tiles}
        alone |= {"d": 0, "z": 0, "out": 0, "initial": 0, "initial_kind": 0}
        alone |= {"initial_batch": 0, "initial_head": 0, "final": own, "totals": totals}
        alone |= {"final_batch": cut.parts * row, "final_segment": row, "final_head": size}
        self._launches.add(states_only, {**values, **alone})
        self._launches.add(
            self._planner.pick(PASS, call),
            {
                "own": own,
                "totals": totals,
                "initial": values["initial"],
                "states": states,
                "batch": call.batch,
                "parts": cut.parts,
                "ratio": cut.ratio,
                "heads": call.heads,
                "size": size,
                "initial_kind": values["initial_kind"],
                "initial_batch": values["initial_batch"],
                "initial_head": values["initial_head"],
            },
        )
        before: dict[str, Value] = {"segments": cut.segments, "segment_tiles": cut.segment_tiles}
        before |= {"initial": states, "initial_kind": 0, "initial_batch": cut.segments * row}
        before |= {"initial_segment": row, "initial_head": size}
        return {**values, **before}

    def _kind(self, name: str) -> int:
        layout = self._call.layouts.get(name)
        return 0 if layout is None else layout.kind
