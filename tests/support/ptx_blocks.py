"""Blocks of a grid under way in `ptx_machine`: which threads are where, and who runs next."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

import ptx_conversions  # noqa: F401  # for BUILDERS
import ptx_transfers
import ptx_warps
from ptx_arithmetic import BUILDERS
from ptx_barriers import BarrierCode, Barriers
from ptx_lanes import Active, Array, Run, Step, holds, shared_address, spread
from ptx_memory import WARP, Memory, MemoryFault, SharedMemory
from ptx_parse import Program, Register, Special, Statement, Symbol, UnknownPtx, flat

Shape = Sequence[int]
Trace = Callable[["View"], None]
SPECIAL = {f"%{name}.{axis}" for name in ("tid", "ctaid", "ntid", "nctaid") for axis in "xyz"}
SPECIAL |= {f"%lanemask_{name}" for name in ("eq", "lt", "le", "ge", "gt")}
SPECIAL |= {"%laneid", "%warpid", "%nwarpid", "%smid", "%dynamic_smem_size", "%total_smem_size"}
_CONTROL = ("bra", "ret", "exit", "bar", "barrier", "trap")


class Fault(AssertionError):
    """A kernel does what it must not."""


@dataclass
class Group:
    """Lanes that are at one instruction."""

    pc: int
    active: Active


class Code:
    """A program made executable."""

    def __init__(self, program: Program) -> None:
        self.program = program
        statements = program.statements
        controls = [s.parts[0] in _CONTROL for s in statements]
        self.steps = [
            _nothing if control else _guarded(statement)
            for statement, control in zip(statements, controls, strict=True)
        ]
        # Where the straight line that an instruction lies in ends.
        self.ends = list(range(len(statements)))
        for pc in reversed(range(len(statements))):
            if not controls[pc]:
                self.ends[pc] = self.ends[pc + 1]
        self.guards = [None if s.guard is None else holds(s.guard) for s in statements]
        self.barriers = {
            pc: BarrierCode(s)
            for pc, s in enumerate(statements)
            if s.parts[0] in ("bar", "barrier")
        }
        self._check_names()
        self.unit = ptx_transfers.least_shared_access(statements)

    def _check_names(self) -> None:
        """Complain of a symbol or special register that is not known."""
        program = self.program
        known = {"_", *(p.name for p in program.parameters), *(s.name for s in program.shared)}
        for statement in program.statements:
            if statement.parts[0] == "bra":
                continue
            for operand in flat(statement.operands):
                if (isinstance(operand, Symbol) and operand.name not in known) or (
                    isinstance(operand, Special) and operand.name not in SPECIAL
                ):
                    raise UnknownPtx(f"{operand.name} in {statement.text}")


def _nothing(run: Run) -> None:
    raise AssertionError("a jump or a barrier is no step")


def _guarded(statement: Statement) -> Step:
    base = statement.parts[0]
    if base not in BUILDERS:
        raise UnknownPtx(statement.text)
    try:
        step = BUILDERS[base](statement)
    except (UnknownPtx, KeyError, ValueError, IndexError, AttributeError) as error:
        raise UnknownPtx(f"{statement.text}: {error}") from error
    if statement.guard is None:
        return step
    guard = holds(statement.guard)

    def guarded(run: Run) -> None:
        hold = guard(run)
        if hold.all():
            step(run)
            return
        if not hold.any():
            return
        before = run.active
        places = np.flatnonzero(hold)
        run.enter(Active(before.lanes[places]))
        try:
            step(run)
        except MemoryFault as fault:
            # Among those that were here before.
            raise MemoryFault(str(fault), int(places[fault.lane])) from None
        finally:
            run.enter(before)

    return guarded


class Batch:
    """Some blocks of a grid, run together."""

    def __init__(
        self,
        code: Code,
        memory: Memory,
        grid: Shape,
        block: Shape,
        blocks: Array,
        parameters: dict[str, bytes],
        shared_bytes: int,
    ) -> None:
        self.code = code
        self.memory = memory
        self.program = code.program
        self.parameters = parameters
        self.grid, self.block, self.blocks = grid, block, blocks
        self.threads = block[0] * block[1] * block[2]
        self.warps = -(-self.threads // WARP)
        self.shared_bytes = shared_bytes
        self.groups: list[Group] = []
        self.barriers: Barriers
        self.run_: Run

    def prepare(self, *, races: bool, strict: bool) -> None:
        count, warps = len(self.blocks), self.warps
        lanes = np.arange(warps * count * WARP)
        rows = lanes // WARP
        self.thread_of = rows // count * WARP + lanes % WARP
        self.block_of = rows % count
        exists = self.thread_of < self.threads
        symbols, size = self._layout()
        shared = SharedMemory(size, warps, count, unit=self.code.unit, races=races, strict=strict)
        self.run_ = Run(
            self.memory,
            shared,
            self._specials(size),
            symbols,
            self.parameters,
            exists,
            self.blocks[self.block_of] * self.threads + self.thread_of,
        )
        for register in self.program.registers:
            register.allocate(len(lanes))
        self.live = exists.copy()
        self.barriers = Barriers(shared.clocks, self._left)
        self.groups = [Group(0, Active(np.flatnonzero(exists)))]

    def _layout(self) -> tuple[dict[str, int], int]:
        """Addresses of shared symbols, and the size of all."""
        symbols, end = {}, 0
        for shared in sorted(self.program.shared, key=lambda s: s.size is None):
            end = -(-end // shared.align) * shared.align
            if shared.size is None:
                end = -(-end // 16) * 16
            symbols[shared.name] = shared_address(end)
            end += shared.size or 0
        return symbols, end + self.shared_bytes

    def _specials(self, shared: int) -> dict[str, Array]:
        values: dict[str, Array] = {"%laneid": self.thread_of % WARP, "%smid": np.int64(0)}
        values["%warpid"] = self.thread_of // WARP
        values["%nwarpid"] = np.int64(self.warps)
        thread, index = self.thread_of, self.blocks[self.block_of]
        for axis, extent, blocks in zip("xyz", self.block, self.grid, strict=True):
            values[f"%tid.{axis}"] = thread % extent
            values[f"%ctaid.{axis}"] = index % blocks
            values[f"%ntid.{axis}"] = np.int64(extent)
            values[f"%nctaid.{axis}"] = np.int64(blocks)
            thread, index = thread // extent, index // blocks
        lane = (self.thread_of % WARP).astype(np.uint64)
        one = np.uint64(1)
        values["%lanemask_eq"] = one << lane
        values["%lanemask_lt"] = (one << lane) - one
        values["%lanemask_le"] = (one << lane + one) - one
        values["%lanemask_ge"] = np.uint64(0xFFFF_FFFF) - values["%lanemask_lt"]
        values["%lanemask_gt"] = np.uint64(0xFFFF_FFFF) - values["%lanemask_le"]
        values["%dynamic_smem_size"] = np.int64(self.shared_bytes)
        values["%total_smem_size"] = np.int64(shared)
        return values

    def run(self, limit: int, trace: Trace | None) -> int:
        """Run to the end, and say how many steps it took."""
        run, ends = self.run_, self.code.ends
        steps = self.code.steps
        if trace is not None:
            steps = [self._traced(step, trace) for step in steps]
        done = 0
        while self.groups:
            group, bound = self._next()
            run.enter(group.active)
            pc = group.pc
            while True:
                stop = min(ends[pc], bound)
                done += stop - pc + 1
                try:
                    for run.pc in range(pc, stop):
                        steps[run.pc](run)
                    run.pc = pc = stop
                    if pc == bound:
                        group.pc = pc
                        self.groups.append(group)
                        break
                    after = self._control(group)
                except MemoryFault as fault:
                    lane = int(run.active.lanes[fault.lane])
                    raise self._fault(str(fault), run.pc, lane) from None
                except ArithmeticError as error:
                    raise self._fault(str(error), run.pc, None) from None
                if done > limit:
                    raise self._fault(f"more than {limit} steps", run.pc, None)
                if after is None:
                    break
                pc = after
                if self.groups:
                    group.pc = pc
                    self.groups.append(group)
                    break
        if stuck := self.barriers.deadlock(self.program.statements, self.blocks):
            raise Fault(f"a deadlock: {'; '.join(stuck)}")
        return done

    def _traced(self, step: Step, trace: Trace) -> Step:
        def traced(run: Run) -> None:
            trace(View(self))
            step(run)

        return traced

    def _next(self) -> tuple[Group, int]:
        """The group that is furthest behind, joined with others there, and where the next is."""
        groups = self.groups
        if len(groups) == 1:
            return groups.pop(), len(self.code.ends) + 1
        pc = min(group.pc for group in groups)
        here = [group for group in groups if group.pc == pc]
        self.groups = [group for group in groups if group.pc != pc]
        bound = min((group.pc for group in self.groups), default=len(self.code.ends) + 1)
        if len(here) == 1:
            return here[0], bound
        lanes = np.sort(np.concatenate([group.active.lanes for group in here]))
        return Group(pc, Active(lanes)), bound

    def _control(self, group: Group) -> int | None:
        """Where the group goes on, or None if that is in `groups` or nowhere."""
        run, pc = self.run_, self.run_.pc
        statement = self.program.statements[pc]
        base = statement.parts[0]
        if pc in self.code.barriers:
            return self._barrier(group, self.code.barriers[pc])
        hold = self.code.guards[pc]
        taken = None if hold is None else hold(run)
        if base == "trap" and (taken is None or taken.any()):
            raise MemoryFault("a trap", 0 if taken is None else int(np.argmax(taken)))
        if taken is not None and not taken.any():
            return pc + 1
        if taken is None or taken.all():
            if base == "bra":
                return statement.target
            self._exit(group.active.lanes)
            return None
        lanes = group.active.lanes
        self.groups.append(Group(pc + 1, Active(lanes[~taken])))
        if base == "bra":
            self.groups.append(Group(statement.target, Active(lanes[taken])))
        else:
            self._exit(lanes[taken])
        return None

    def _exit(self, lanes: Array) -> None:
        self.live[lanes] = False
        self._go_on(self.barriers.threads_ended())

    def _go_on(self, free: list[tuple[int, Array]]) -> None:
        """Let warps go on, together where they are at one place."""
        for pc in {pc for pc, _ in free}:
            rows = np.sort(np.concatenate([rows for at, rows in free if at == pc]))
            lanes = (rows[:, None] * WARP + np.arange(WARP)).reshape(-1)
            self.groups.append(Group(pc, Active(lanes[self.live[lanes]])))

    def _left(self, block: int) -> int:
        """Threads of a block, counted by warps, that have not ended."""
        live = self.live.reshape(self.warps, len(self.blocks), WARP)
        return WARP * int(live[:, block].any(axis=1).sum())

    def _barrier(self, group: Group, code: BarrierCode) -> int | None:
        run, pc = self.run_, self.run_.pc
        hold = self.code.guards[pc]
        if hold is not None and not (taken := hold(run)).all():
            lanes = group.active.lanes
            self.groups.append(Group(pc + 1, Active(lanes[~taken])))
            if not taken.any():
                return None
            group.active = Active(lanes[taken])
            run.enter(group.active)
        active = group.active
        if code.warp:
            ptx_warps.check_mask(run, code.number(run))
            return pc + 1
        rows = self._warps_here(active)
        first = np.searchsorted(active.lanes // WARP, rows)
        numbers, counts = (
            None if read is None else spread(read(run), active.size)[first]
            for read in (code.number, code.count)
        )
        try:
            free = self.barriers.arrive(rows, numbers, counts, None if code.arrive else pc + 1)
        except MemoryFault as fault:
            raise MemoryFault(str(fault), int(first[fault.lane])) from None
        if code.arrive:
            self._go_on(free)
            return pc + 1
        if len(free) == 1 and free[0][1] is rows:
            return pc + 1
        self._go_on(free)
        return None

    def _warps_here(self, active: Active) -> Array:
        """The warps, of which all threads that are left must be here."""
        if active.rows is not None:
            return active.rows
        rows, here = np.unique(active.lanes // WARP, return_counts=True)
        left = self.live.reshape(-1, WARP)[rows].sum(axis=1)
        if (here != left).any():
            row = rows[np.argmax(here != left)]
            lane = int(np.argmax(active.lanes // WARP == row))
            raise MemoryFault("not all threads of the warp are at this barrier", lane)
        return rows

    def _fault(self, problem: str, pc: int, lane: int | None) -> Fault:
        where = f"in `{self.program.statements[pc].text}` (instruction {pc})"
        if lane is None:
            return Fault(f"{problem}, {where}")
        return Fault(f"{problem}, {where}, {self._name(lane)}")

    def _name(self, lane: int) -> str:
        thread = int(self.thread_of[lane])
        block = int(self.blocks[self.block_of[lane]])
        x, y = self.grid[0], self.grid[1]
        place = (block % x, block // x % y, block // x // y)
        return f"block {place}, thread {thread}"


@dataclass
class View:
    """What a trace is shown before an instruction: an array has a row for each block."""

    batch: Batch

    @property
    def pc(self) -> int:
        return self.batch.run_.pc

    @property
    def text(self) -> str:
        return self.batch.program.statements[self.pc].text

    @property
    def active(self) -> Array:
        """Which threads execute it."""
        here = np.zeros(len(self.batch.live), np.bool_)
        here[self.batch.run_.at] = True
        return self._table(here)

    def register(self, register: Register | str, dtype: Any = np.uint32) -> Array:
        """A register's values, by object or by name in the outermost scope."""
        if isinstance(register, str):
            register = self.batch.program.scopes[0].made[register]
        return self._table(register.views[0].view(dtype))

    def _table(self, lanes: Array) -> Array:
        batch = self.batch
        rows = lanes.reshape(batch.warps, len(batch.blocks), WARP).swapaxes(0, 1)
        return rows.reshape(len(batch.blocks), -1)[:, : batch.threads]
