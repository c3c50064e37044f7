"""Instructions of `ptx_machine` that a warp executes together: shuffles, votes, matrices.

Products of matrices are exact and their sums those of float32, in whatever order numpy adds; a GPU
adds in another one, and cuts off where this rounds.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ptx_arithmetic import builds, known, types_of
from ptx_lanes import Array, Run, Step, reader, spread, writer
from ptx_memory import WARP, MemoryFault
from ptx_numbers import from_bf16
from ptx_parse import SINK, Pair, Statement, UnknownPtx, Vector

_LANES = np.arange(WARP, dtype=np.int64)
_FULL = 0xFFFF_FFFF


def whole_warps(run: Run) -> Array:
    """The warps, which must be here in full."""
    rows = run.active.rows
    if rows is None:
        lanes = run.active.lanes
        here = np.bincount(lanes // WARP, minlength=len(run.exists) // WARP)[lanes // WARP]
        raise MemoryFault("not all threads of the warp are here", int(np.argmax(here < WARP)))
    return rows


def _table(run: Run, values: Array, dtype: Any) -> tuple[Array, Array, Array]:
    """Values by warp and lane, who is here, and where the active lanes lie in it."""
    lanes = run.active.lanes
    every = spread(np.asarray(values, dtype), len(lanes))
    if run.active.rows is not None:
        places = np.arange(len(lanes))
        return every.reshape(-1, WARP), np.ones((len(lanes) // WARP, WARP), np.bool_), places
    rows, index = np.unique(lanes // WARP, return_inverse=True)
    places = index * WARP + lanes % WARP
    table = np.zeros((len(rows), WARP), dtype)
    here = np.zeros((len(rows), WARP), np.bool_)
    table.reshape(-1)[places] = every
    here.reshape(-1)[places] = True
    return table, here, places


def _check_mask(run: Run, mask: Array, here: Array, places: Array) -> None:
    """All threads that a mask names must be here, and each must name itself."""
    bits = (here.astype(np.uint32) << np.arange(WARP, dtype=np.uint32)).sum(axis=1)
    named = np.broadcast_to(np.asarray(mask).astype(np.int64), places.shape)
    own = named >> (places % WARP) & 1
    missing = (named & ~bits.astype(np.int64)[places // WARP]) != 0
    if missing.any() or not own.all():
        lane = int(np.argmax(missing | (own == 0)))
        raise MemoryFault(
            f"the mask {int(named[lane]):#x} names other threads than are here, "
            f"{int(bits[places[lane] // WARP]):#x}",
            lane,
        )


def check_mask(run: Run, mask: Array) -> None:
    """The threads that a mask names must be here, and all that are here must be among them."""
    _, here, places = _table(run, np.uint32(0), np.uint32)
    _check_mask(run, mask, here, places)


@builds("shfl")
def _shfl(statement: Statement) -> Step:
    flags = known(statement, "sync", "up", "down", "bfly", "idx")
    how = (flags - {"sync"}).pop()
    target, source, by, clamp, mask = statement.operands
    first, second = (target.first, target.second) if isinstance(target, Pair) else (target, SINK)
    write, write_second = writer(first, "b32"), writer(second, "pred")
    read, read_by, read_clamp = reader(source, "b32"), reader(by, "u32"), reader(clamp, "u32")
    read_mask = reader(mask, "u32")

    def step(run: Run) -> None:
        mask = read_mask(run)
        table, here, places = _table(run, read(run), np.uint32)
        if run.active.rows is None or np.ndim(mask) or mask != _FULL:
            _check_mask(run, mask, here, places)
        lane = places % WARP
        b, c = np.asarray(read_by(run), np.int64) & 31, np.asarray(read_clamp(run), np.int64)
        bound, segment = c & 31, c >> 8 & 31
        most, least = lane & segment | bound & ~segment, lane & segment
        if how == "up":
            wanted = lane - b
            inside = wanted >= most
        elif how == "idx":
            wanted = least | b & ~segment
            inside = wanted <= most
        else:
            wanted = lane + b if how == "down" else lane ^ b
            inside = wanted <= most
        chosen = places - lane + np.where(inside, wanted, lane)
        if not here.reshape(-1)[chosen].all():
            missing = int(np.argmin(here.reshape(-1)[chosen]))
            raise MemoryFault("a shuffle from a thread that is not here", missing)
        write(run, table.reshape(-1)[chosen])
        write_second(run, inside)

    return step


@builds("vote", "match", "redux", "activemask", "elect")
def _vote(statement: Statement) -> Step:
    flags = known(
        statement, "sync", "all", "any", "uni", "ballot", "add", "min", "max", "and", "or", "xor"
    )
    base = statement.parts[0]
    flags = flags - {"sync"}
    kind = types_of(statement)[-1] if types_of(statement) else "b32"
    target, *sources = statement.operands
    first, second = (target.first, target.second) if isinstance(target, Pair) else (target, SINK)
    if base == "activemask":
        write_mask = writer(first, "b32")

        def active(run: Run) -> None:
            _, here, places = _table(run, np.uint32(0), np.uint32)
            write_mask(run, _bits(here)[places // WARP])

        return active
    read_mask = reader(sources[-1], "u32")
    how = flags.pop() if flags else ""
    read = {
        "vote": lambda: reader(sources[0], "pred"),
        "elect": lambda: lambda run: np.uint32(0),
        "match": lambda: reader(sources[0], kind),
        "redux": lambda: reader(sources[0], kind),
    }[base]()
    result = "pred" if base == "vote" and how != "ballot" else "b32" if base != "redux" else kind
    write, write_second = writer(first, result), writer(second, "pred")

    def step(run: Run) -> None:
        values = np.asarray(read(run))
        table, here, places = _table(run, values, values.dtype)
        _check_mask(run, read_mask(run), here, places)
        rows = places // WARP
        named = np.broadcast_to(np.asarray(read_mask(run), np.int64), rows.shape)
        member = (named[:, None] >> _LANES & 1) != 0
        theirs = table[rows]
        if base == "elect":
            chosen = member.argmax(axis=1)
            write(run, chosen.astype(np.uint32))
            write_second(run, places % WARP == chosen)
        elif base == "match":
            same = (theirs == table.reshape(-1)[places][:, None]) & member
            if how == "any":
                write(run, _bits(same))
            else:
                all_ = (same == member).all(axis=1)
                write(run, np.where(all_, _bits(member), np.uint32(0)))
                write_second(run, all_)
        elif base == "redux":
            write(run, _reduced(theirs, member, how))
        elif how == "ballot":
            write(run, _bits(theirs & member))
        else:
            all_, any_ = (theirs | ~member).all(axis=1), (theirs & member).any(axis=1)
            write(run, {"all": all_, "any": any_, "uni": all_ | ~any_}[how])

    return step


def _bits(flags: Array) -> Array:
    return (flags.astype(np.uint32) << _LANES.astype(np.uint32)).sum(axis=1, dtype=np.uint32)


def _reduced(values: Array, member: Array, how: str) -> Array:
    dtype = values.dtype
    info = np.iinfo(dtype)
    start = {"min": info.max, "max": info.min, "and": -1 if info.min else info.max}.get(how, 0)
    reduce_ = {
        "add": np.add,
        "min": np.minimum,
        "max": np.maximum,
        "and": np.bitwise_and,
        "or": np.bitwise_or,
        "xor": np.bitwise_xor,
    }[how]
    return reduce_.reduce(np.where(member, values, dtype.type(start)), axis=1, dtype=dtype)


@builds("ldmatrix", "stmatrix")
def _matrices(statement: Statement) -> Step:
    shared = ("shared", "shared::cta")
    flags = known(statement, "sync", "aligned", "m8n8", "x1", "x2", "x4", "trans", *shared)
    if types_of(statement) != ["b16"]:
        raise UnknownPtx(statement.text)
    count = 4 if "x4" in flags else 2 if "x2" in flags else 1
    trans = "trans" in flags
    load = statement.parts[0] == "ldmatrix"
    registers, address = statement.operands if load else statement.operands[::-1]
    items = registers.items if isinstance(registers, Vector) else (registers,)
    if len(items) != count:
        raise UnknownPtx(statement.text)
    read_address = reader(address.base, "u32")
    offset = np.uint32(address.offset & _FULL)

    def places(run: Run) -> tuple[Array, Array, int]:
        """Addresses of the rows and the lanes that give them, by warp."""
        warps = len(whole_warps(run))
        addresses = spread(read_address(run) + offset, run.active.size)
        used = slice(0, 8 * count)
        return (
            addresses.reshape(-1, WARP)[:, used].reshape(-1),
            run.active.lanes.reshape(-1, WARP)[:, used].reshape(-1),
            warps,
        )

    if load:
        writes = [writer(item, "b32") for item in items]

        def step(run: Run) -> None:
            addresses, lanes, warps = places(run)
            rows = run.shared.load(addresses, lanes, 4, 4).reshape(warps, count, 8, 4)
            if trans:
                cells = np.ascontiguousarray(rows).view(np.uint16).reshape(warps, count, 8, 8)
                rows = np.ascontiguousarray(cells.swapaxes(2, 3)).view(np.uint32)
            for place, write in enumerate(writes):
                write(run, rows[:, place].reshape(-1))

        return step
    reads = [reader(item, "b32") for item in items]

    def store(run: Run) -> None:
        addresses, lanes, warps = places(run)
        rows = np.empty((warps, count, 8, 4), np.uint32)
        for place, read in enumerate(reads):
            rows[:, place] = spread(read(run), run.active.size).reshape(warps, 8, 4)
        if trans:
            cells = rows.view(np.uint16).reshape(warps, count, 8, 8)
            rows = np.ascontiguousarray(cells.swapaxes(2, 3)).view(np.uint32)
        run.shared.store(addresses, lanes, rows.reshape(-1, 4))

    return store


@builds("movmatrix")
def _movmatrix(statement: Statement) -> Step:
    known(statement, "sync", "aligned", "m8n8", "trans")
    target, source = statement.operands
    read, write = reader(source, "b32"), writer(target, "b32")

    def step(run: Run) -> None:
        warps = len(whole_warps(run))
        words = np.ascontiguousarray(spread(read(run), run.active.size))
        cells = words.view(np.uint16).reshape(warps, 8, 8)
        write(run, np.ascontiguousarray(cells.swapaxes(1, 2)).view(np.uint32).reshape(-1))

    return step


@builds("mma")
def _mma(statement: Statement) -> Step:
    shapes = ("m16n8k16", "m16n8k8")
    flags = known(statement, "sync", "aligned", "row", "col", *shapes)
    result, a_type, b_type, c_type = types_of(statement)
    if a_type != b_type or result != c_type or result not in ("f32", "f16"):
        raise UnknownPtx(statement.text)
    if a_type not in ("f16", "bf16") or statement.parts[-6:-4] != ["row", "col"]:
        raise UnknownPtx(statement.text)
    halves = 2 if "m16n8k16" in flags else 1
    target, a, b, c = (operand.items for operand in statement.operands)
    width = 4 if result == "f32" else 2
    if (len(target), len(a), len(b), len(c)) != (width, 2 * halves, halves, width):
        raise UnknownPtx(statement.text)
    reads_a, reads_b = ([reader(item, "b32") for item in items] for items in (a, b))
    number = "f32" if result == "f32" else "f16x2"
    reads_c = [reader(item, number) for item in c]
    writes = [writer(item, number) for item in target]
    brain = a_type == "bf16"

    def step(run: Run) -> None:
        warps = len(whole_warps(run))
        # Rows g and g + 8, and runs of 8 of K: lane 4 * g + t has elements 2t and 2t + 1 of each.
        left = np.empty((warps, 2, 8, halves, 4), np.uint32)
        for place, read in enumerate(reads_a):
            left[:, place % 2, :, place // 2] = _fragment(run, read, warps)
        right = np.empty((warps, 8, halves, 4), np.uint32)
        for place, read in enumerate(reads_b):
            right[:, :, place] = _fragment(run, read, warps)
        rows, columns = _real(left, brain), _real(right, brain)
        size = 8 * halves
        product = np.matmul(
            rows.reshape(warps, 16, size), columns.reshape(warps, 8, size).swapaxes(1, 2)
        ).reshape(warps, 2, 8, 4, 2)
        # All of C is read before any of D is written: they may share registers.
        if width == 4:
            parts = [product[:, i // 2, :, :, i % 2].reshape(-1) for i in range(4)]
            sums = [part + read(run) for part, read in zip(parts, reads_c, strict=True)]
        else:
            parts = [product[:, i].reshape(-1, 2) for i in range(2)]
            sums = [
                (part + read(run).astype(np.float32)).astype(np.float16)
                for part, read in zip(parts, reads_c, strict=True)
            ]
        for write, total in zip(writes, sums, strict=True):
            write(run, total)

    return step


def _fragment(run: Run, read: Any, warps: int) -> Array:
    return spread(read(run), run.active.size).reshape(warps, 8, 4)


def _real(words: Array, brain: bool) -> Array:
    """float32 of pairs of short floats."""
    if brain:
        return from_bf16(words.view(np.uint16))
    return words.view(np.float16).astype(np.float32)
