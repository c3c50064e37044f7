"""Loads, stores, asynchronous copies and atomic operations of `ptx_machine`."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import numpy as np

from ptx_arithmetic import builds, types_of
from ptx_lanes import Array, Read, Run, Step, Write, dtype_of, reader, spread, writer
from ptx_memory import SHARED_WINDOW, MemoryFault, Pending, among
from ptx_parse import BITS, Address, Register, Statement, UnknownPtx, Vector

# Of no account where nothing is cached and memory is in order.
_HINTS = (
    r"nc|ca|cg|cs|cv|lu|wb|wt|volatile|weak|relaxed|acquire|release|sys|gpu|cta|unified"
    r"|L1::\w+|L2::\w+|noftz"
)
_SHARED = ("shared", "shared::cta")


def _hints(statement: Statement, *allowed: str) -> set[str]:
    """The parts that matter."""
    parts = [part for part in statement.parts[1:] if part not in BITS]
    found = {part for part in parts if not re.fullmatch(_HINTS, part)}
    if unknown := found - set(allowed):
        raise UnknownPtx(f"{', '.join(sorted(unknown))} of {statement.text}")
    return found


def _space(flags: set[str]) -> str:
    if flags & set(_SHARED):
        return "shared"
    return next((space for space in ("global", "param") if space in flags), "generic")


def _addresses(address: Address, space: str) -> Read:
    """Of the active lanes, as 64 bits."""
    base = address.base
    wide = space != "shared" or (isinstance(base, Register) and base.bits == 64)
    read = reader(base, "u64" if wide else "u32")
    offset = np.uint64(address.offset & (1 << 64) - 1)
    mask = np.uint64((1 << 64) - 1 if wide else (1 << 32) - 1)

    def find(run: Run) -> Array:
        found = np.asarray(read(run)).astype(np.uint64) + offset & mask
        return spread(found, run.active.size)

    return find


def _in_shared(addresses: Array) -> Array:
    return addresses >= np.uint64(SHARED_WINDOW)


def _load(run: Run, space: str, addresses: Array, width: int, count: int) -> Array:
    if space == "shared":
        return run.shared.load(addresses, run.active.lanes, width, count)
    if space == "global":
        return run.memory.load(addresses, width, count)
    inside = _in_shared(addresses)
    here, there = np.flatnonzero(inside), np.flatnonzero(~inside)
    found = np.empty((len(addresses), count), f"u{width}")
    if len(here):
        with among(here):
            local = addresses[here] - np.uint64(SHARED_WINDOW)
            found[here] = run.shared.load(local, run.active.lanes[here], width, count)
    if len(there):
        with among(there):
            found[there] = run.memory.load(addresses[there], width, count)
    return found


def _store(run: Run, space: str, addresses: Array, values: Array) -> None:
    lanes = run.active.lanes
    if space == "shared":
        run.shared.store(addresses, lanes, values)
    elif space == "global":
        run.memory.store(addresses, values, run.threads[lanes])
    else:
        inside = _in_shared(addresses)
        here, there = np.flatnonzero(inside), np.flatnonzero(~inside)
        if len(here):
            with among(here):
                local = addresses[here] - np.uint64(SHARED_WINDOW)
                run.shared.store(local, lanes[here], values[here])
        if len(there):
            with among(there):
                run.memory.store(addresses[there], values[there], run.threads[lanes[there]])


def _items(operand: Any) -> tuple[Any, ...]:
    return operand.items if isinstance(operand, Vector) else (operand,)


@builds("ld", "ldu")
def _ld(statement: Statement) -> Step:
    spaces = ("global", "param", *_SHARED)
    flags = _hints(statement, "v2", "v4", "v8", *spaces)
    (kind,) = types_of(statement)
    target, address = statement.operands[:2]
    items = _items(target)
    width, count = BITS[kind] // 8, len(items)
    _check_vector(statement, flags, count)
    writes = [writer(item, kind) for item in items]
    space = _space(flags)
    if space == "param":
        return _ld_param(address, writes, kind)
    find, dtype = _addresses(address, space), dtype_of(kind)
    if kind in ("bf16", "bf16x2", "f16x2"):
        raise UnknownPtx(statement.text)

    def step(run: Run) -> None:
        words = _load(run, space, find(run), width, count).view(dtype)
        for place, write in enumerate(writes):
            write(run, words[:, place])

    return step


def _check_vector(statement: Statement, flags: set[str], count: int) -> None:
    named = next((int(flag[1:]) for flag in flags if re.fullmatch(r"v\d", flag)), 1)
    if named != count:
        raise UnknownPtx(statement.text)


def _ld_param(address: Address, writes: list[Write], kind: str) -> Step:
    width, dtype = BITS[kind] // 8, dtype_of(kind)
    name = address.base.name

    def step(run: Run) -> None:
        data = run.parameters[name][address.offset :]
        for place, write in enumerate(writes):
            write(run, np.frombuffer(data[place * width : (place + 1) * width], dtype)[0])

    return step


@builds("st")
def _st(statement: Statement) -> Step:
    flags = _hints(statement, "v2", "v4", "v8", "global", *_SHARED)
    (kind,) = types_of(statement)
    address, source = statement.operands[:2]
    items = _items(source)
    _check_vector(statement, flags, len(items))
    bits = f"b{BITS[kind]}"
    reads = [reader(item, bits) for item in items]
    space, dtype = _space(flags), dtype_of(bits)
    find = _addresses(address, space)

    def step(run: Run) -> None:
        values = np.empty((run.active.size, len(reads)), dtype)
        for place, read in enumerate(reads):
            values[:, place] = read(run)
        _store(run, space, find(run), values)

    return step


# Asynchronous copies


@builds("cp")
def _cp(statement: Statement) -> Step:
    name = statement.name
    if name.startswith("cp.async.bulk.prefetch"):
        return _nothing(statement)
    if name == "cp.async.commit_group":
        return _commit
    if name == "cp.async.wait_all":
        return lambda run: _wait(run, -1)
    if name == "cp.async.wait_group":
        most = statement.operands[0].value
        return lambda run: _wait(run, most)
    _hints(statement, "async", "global", *_SHARED)
    if statement.parts[1:3] not in (["async", "ca"], ["async", "cg"]):
        raise UnknownPtx(statement.text)
    target, source, size, *rest = statement.operands
    width = int(size.value)
    if width not in (4, 8, 16) or (width < 16 and "cg" in statement.parts):
        raise UnknownPtx(statement.text)
    find_target, find_source = _addresses(target, "shared"), _addresses(source, "global")
    read_size = _source_size(rest, width)

    def step(run: Run) -> None:
        lanes = run.active.lanes
        sizes = spread(read_size(run), run.active.size)
        if (sizes > width).any():
            raise MemoryFault(f"a copy of {width} bytes from more", int(np.argmax(sizes > width)))
        data = np.zeros((len(lanes), width), np.uint8)
        addresses = find_source(run)
        for amount in np.unique(sizes):
            which = np.flatnonzero(sizes == amount)
            data[which, :amount] = _bytes(run, addresses[which], int(amount), which, width)
        places = run.shared.begin_copy(find_target(run), lanes, width)
        copies = data.view(np.uint32)
        run.pending.append(Pending(lanes, run.commits[lanes], places, copies, run.threads[lanes]))

    return step


def _source_size(rest: list[Any], width: int) -> Read:
    if not rest:
        return lambda run: np.uint32(width)
    if isinstance(rest[0], Register) and rest[0].bits == 1:
        ignored = reader(rest[0], "pred")
        return lambda run: np.where(ignored(run), np.uint32(0), np.uint32(width))
    if isinstance(rest[0], Register) and rest[0].bits == 64:
        return lambda run: np.uint32(width)  # a cache policy
    return reader(rest[0], "u32")


def _bytes(run: Run, addresses: Array, amount: int, which: Array, width: int) -> Array:
    if not amount:
        return np.zeros((len(addresses), 0), np.uint8)
    if np.any(addresses & np.uint64(width - 1)):
        lane = int(np.flatnonzero(addresses & np.uint64(width - 1))[0])
        raise MemoryFault(f"address {int(addresses[lane]):#x} of {width} bytes", int(which[lane]))
    unit = amount & -amount
    word, count = min(unit, 8), amount // min(unit, 8)
    with among(which):
        if amount == unit:
            found = run.memory.load(addresses, min(word, 4), amount // min(word, 4))
            return np.ascontiguousarray(found).view(np.uint8).reshape(len(addresses), amount)
        parts = [
            run.memory.load(addresses + np.uint64(place * word), word, 1) for place in range(count)
        ]
    joined = np.ascontiguousarray(np.concatenate(parts, axis=1))
    return joined.view(np.uint8).reshape(len(addresses), amount)


def _commit(run: Run) -> None:
    run.commits[run.at] += 1


def _wait(run: Run, most: int) -> None:
    """Finish the active lanes' copies, all but those of the last `most` groups; -1: also open ones.

    A copy's group is the count of groups that its thread had committed.
    """
    if not run.pending:
        return
    here = np.zeros(len(run.exists), np.bool_)
    here[run.at] = True
    last = run.commits - most
    left: list[Pending] = []
    for copies in run.pending:
        done = here[copies.lanes] & (copies.groups < last[copies.lanes])
        if done.all():
            run.shared.end_copy(copies)
        elif done.any():
            run.shared.end_copy(copies.pick(done))
            left.append(copies.pick(~done))
        else:
            left.append(copies)
    run.pending = left


# Atomic operations


@builds("atom", "red")
def _atom(statement: Statement) -> Step:
    operations = ("add", "min", "max", "and", "or", "xor", "exch", "cas", "inc", "dec")
    flags = _hints(statement, "global", *_SHARED, *operations)
    (kind,) = types_of(statement)
    (name,) = flags & set(operations)
    if statement.parts[0] == "red":
        write: Write = lambda run, values: None  # noqa: E731
        address, *sources = statement.operands
    else:
        target, address, *sources = statement.operands
        write = writer(target, kind)
    space, dtype = _space(flags), dtype_of(kind)
    if space == "generic" or kind in ("bf16", "bf16x2", "f16x2", "f16"):
        raise UnknownPtx(statement.text)
    find, reads = _addresses(address, space), [reader(source, kind) for source in sources]
    width, unsigned = BITS[kind] // 8, dtype_of(f"u{BITS[kind]}")
    operation = _OPERATIONS[name]

    def step(run: Run) -> None:
        values = [spread(read(run), run.active.size) for read in reads]

        def change(old: Any, lane: int) -> Any:
            new = operation(old.view(dtype), *[value[lane] for value in values])
            return dtype(new).view(unsigned)

        if space == "shared":
            old = run.shared.update(find(run), run.active.lanes, change, width)
        else:
            old = run.memory.update(find(run), change, width)
        write(run, old.view(dtype))

    return step


_OPERATIONS: dict[str, Callable[..., Any]] = {
    "add": lambda old, value: old + value,
    "min": np.fmin,
    "max": np.fmax,
    "and": lambda old, value: old & value,
    "or": lambda old, value: old | value,
    "xor": lambda old, value: old ^ value,
    "exch": lambda old, value: value,
    "cas": lambda old, compare, value: value if old == compare else old,
    "inc": lambda old, value: 0 if old >= value else old + 1,
    "dec": lambda old, value: value if old == 0 or old > value else old - 1,
}


# What has no effect here


@builds("griddepcontrol", "fence", "membar", "prefetch", "prefetchu", "setmaxnreg", "nanosleep")
def _nothing(statement: Statement) -> Step:
    for operand in statement.operands:
        if isinstance(operand, Register):
            return _read_only([reader(operand, f"b{operand.bits}")])
        if isinstance(operand, Address) and isinstance(operand.base, Register):
            return _read_only([reader(operand.base, f"b{operand.base.bits}")])
    return _read_only([])


@builds("createpolicy")
def _createpolicy(statement: Statement) -> Step:
    write = writer(statement.operands[0], "b64")
    return lambda run: write(run, np.uint64(0))


def _read_only(reads: list[Read]) -> Step:
    def step(run: Run) -> None:
        for read in reads:
            read(run)

    return step


def least_shared_access(statements: list[Statement]) -> int:
    """The fewest bytes that an access of shared memory has."""
    sizes = [16]
    for statement in statements:
        base, flags = statement.parts[0], set(statement.parts)
        if base in ("ld", "st", "atom", "red") and not flags & {"global", "param"}:
            count = len(_items(statement.operands[0 if base == "ld" else -1]))
            sizes.append(min(16, BITS[statement.parts[-1]] // 8 * (count if base != "atom" else 1)))
        elif base == "cp" and flags & set(_SHARED) and "bulk" not in flags:
            sizes.append(int(statement.operands[2].value))
    return min(sizes)
