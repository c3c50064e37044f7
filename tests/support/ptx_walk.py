"""Walks one thread through a kernel's PTX: its integers, branches and addresses, not its sums.

Loads give zero and whatever computes with floats gives zero, so a walk shows what a thread reads
and writes and how often its loops run, with any sizes and without a GPU. A loop of many turns is
not walked in full: where every register keeps growing by the same amount, half of the turns that
are left are taken in one stride, and so on down to the last few.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

Registers = dict[str, int]
Step = Callable[["Walk"], int | None]

_COMPARE = {name: getattr(operator, name) for name in ("eq", "ne", "lt", "le", "gt", "ge")}
_BINARY = {
    "add": operator.add,
    "sub": operator.sub,
    "mul": operator.mul,
    "and": operator.and_,
    "or": operator.or_,
    "xor": operator.xor,
    "shl": operator.lshift,
    "shr": operator.rshift,
    "min": min,
    "max": max,
    "div": operator.floordiv,
    "rem": operator.mod,
}
# What is walked past; what it writes, if anything, counts as zero.
_IGNORED = ("mma", "shfl", "bar", "griddepcontrol", "ld.shared", "st.shared", ".pragma")
_FLOATS = re.compile(r"\.(f16|f32|bf16)\b")


@dataclass(frozen=True)
class Access:
    """A load, store or prefetch of global memory."""

    kind: str
    address: int
    size: int


@dataclass
class Walk:
    """A thread on its way through `Program`."""

    special: dict[str, int]
    registers: Registers = field(default_factory=dict)
    accesses: list[Access] = field(default_factory=list)

    def value(self, operand: str) -> int:
        """Of a register, a special register or a constant; an address in shared memory is zero."""
        if operand in self.special:
            return self.special[operand]
        if operand in self.registers or operand.startswith("%"):
            return self.registers[operand]
        return 0 if operand.startswith(("0f", "__")) else int(operand, 0)

    def signed(self, operand: str, bits: int) -> int:
        """The same, as a number in two's complement."""
        value = self.value(operand) & (1 << bits) - 1
        return value - (value >> bits - 1 << bits)


class Program:
    """The PTX of one kernel, parsed."""

    def __init__(self, ptx: str) -> None:
        """Parse; an instruction that is not known here is an error."""
        self.steps: list[Step] = []
        self.loops: dict[int, int] = {}
        labels: dict[str, int] = {}
        jumps: list[tuple[int, str]] = []
        body = ptx[ptx.index("\n{") + 2 : ptx.rindex("}")]
        for line in re.sub(r"//[^\n]*", "", body).splitlines():
            text = line.strip()
            if text.endswith(":"):
                labels[text[:-1]] = len(self.steps)
                continue
            # Inline assembly with registers of its own stands in braces.
            text = text[1:-1] if text.startswith("{ .reg") else text
            for statement in filter(None, (part.strip() for part in text.split(";"))):
                if statement.startswith(".reg"):
                    continue
                if match := re.search(r"\bbra(?:\.uni)?\s+(\S+)$", statement):
                    jumps.append((len(self.steps), match[1]))
                    statement = statement[: match.start()] + "bra"
                self.steps.append(_parse(statement))
        self.targets = {at: labels[label] for at, label in jumps}
        # Innermost first.
        back = [(at, to) for at, to in self.targets.items() if to <= at]
        self.loops = dict(sorted(back, key=lambda loop: loop[0] - loop[1]))

    def walk(
        self, arguments: Sequence[int], thread: int, block: int, turns: Sequence[int]
    ) -> list[Access]:
        """What a thread accesses.

        `turns` is how often each loop runs, innermost first, each time that it is entered; another
        number is an AssertionError.
        """
        parameters = {f"param_{i}": value for i, value in enumerate(arguments)}
        state = Walk({"%tid.x": thread, "%ctaid.x": block, **parameters})
        expected = dict(zip(self.loops, turns, strict=True))
        done = dict.fromkeys(self.loops, 1)
        history: dict[int, list[Registers]] = {at: [] for at in self.loops}
        at = 0
        while at < len(self.steps):
            go = self.steps[at](state)
            if go == _END:
                break
            if at in self.loops:
                if not go:
                    assert done[at] == expected[at], f"{done[at]} turns of {expected[at]}"
                    done[at] = 1
                    history[at].clear()
                else:
                    done[at] += 1
                    assert done[at] <= expected[at], f"more than {expected[at]} turns"
                    done[at] += _stride(state, history[at], expected[at] - done[at])
            at = self.targets[at] if go else at + 1
        return state.accesses


_END = 2


def _stride(state: Walk, history: list[Registers], left: int) -> int:
    """Skip half of the turns that are left, if four of them showed how registers grow.

    That is taken over pairs of turns, since some things alternate.
    """
    history.append(dict(state.registers))
    if len(history) < 5 or left < 8:
        return 0
    older, old, new = history[-5::2]
    if not older.keys() == old.keys() == new.keys():
        return 0
    growth = {name: _wrap(name, new[name] - old[name]) for name in new}
    if growth != {name: _wrap(name, old[name] - older[name]) for name in new} or any(
        amount and name.startswith("%p") for name, amount in growth.items()
    ):
        return 0
    pairs = left // 4
    for name, amount in growth.items():
        state.registers[name] = _wrap(name, new[name] + pairs * amount)
    history.clear()
    return 2 * pairs


def _wrap(name: str, value: int) -> int:
    bits = 64 if name.startswith("%rd") else 16 if name.startswith("%rs") else 32
    return value & (1 << bits) - 1


def _operands(text: str) -> list[str]:
    flat = re.sub(r"[{}\[\]]", " ", text)
    return [part.strip() for part in flat.split(",") if part.strip()]


def _parse(statement: str) -> Step:
    predicate, negated = None, False
    if match := re.match(r"@(!?)([%\w]+)\s+", statement):
        negated, predicate = bool(match[1]), match[2]
        statement = statement[match.end() :]
    name, _, rest = statement.partition(" ") if "\t" not in statement else statement.partition("\t")
    step = _instruction(name.strip(), _operands(rest))
    if predicate is None:
        return step

    def guarded(walk: Walk) -> int | None:
        return step(walk) if bool(walk.registers[predicate]) != negated else 0

    return guarded


def _instruction(name: str, operands: list[str]) -> Step:
    parts = name.split(".")
    base, kind = parts[0], parts[-1]
    if base in ("bra", "ret"):
        return lambda walk: 1 if base == "bra" else _END
    if base == "cp":
        return _access("prefetch", operands, 0)
    if name.startswith(("ld.global", "st.global")):
        width = int(re.sub(r"\D", "", kind)) // 8 * (4 if "v4" in parts else 1)
        return _access("load" if base == "ld" else "store", operands, width)
    if name.startswith("ld.param"):
        return _set(operands[0], lambda walk: walk.special[_parameter(operands[1])])
    if name.startswith(_IGNORED) or (_FLOATS.search(name) and base != "setp"):
        count = 4 if base == "mma" else 1
        written = [] if name.startswith(("bar", "grid", "st.", ".pragma")) else operands[:count]
        return lambda walk: walk.registers.update(dict.fromkeys(written, 0))
    return _arithmetic(base, parts, kind, operands)


def _parameter(operand: str) -> str:
    match = re.search(r"param_\d+$", operand)
    assert match, operand
    return match[0]


def _access(kind: str, operands: list[str], size: int) -> Step:
    (place,) = (o for o in operands if o.startswith("%rd"))
    register, _, offset = place.partition("+")
    written = operands[:-1] if kind == "load" else []

    def step(walk: Walk) -> None:
        address = _wrap("%rd", walk.value(register) + int(offset or 0))
        length = size or walk.value(operands[1])
        walk.accesses.append(Access(kind, address, length))
        walk.registers.update(dict.fromkeys(written, 0))

    return step


def _set(target: str, compute: Callable[[Walk], int]) -> Step:
    def step(walk: Walk) -> None:
        walk.registers[target] = _wrap(target, compute(walk))

    return step


def _arithmetic(base: str, parts: list[str], kind: str, operands: list[str]) -> Step:
    target, *sources = operands
    bits = 1 if kind == "pred" else int(re.sub(r"\D", "", kind))

    def read(walk: Walk, operand: str) -> int:
        signed = kind.startswith("s")
        return walk.signed(operand, bits) if signed else walk.value(operand) & (1 << bits) - 1

    if base == "mov" or base == "cvt":
        return _set(target, lambda walk: read(walk, sources[0]))
    if base == "not":
        return _set(target, lambda walk: ~read(walk, sources[0]) & (1 << bits) - 1)
    if base == "neg":
        return _set(target, lambda walk: -read(walk, sources[0]))
    if base == "selp":
        return _set(
            target, lambda walk: read(walk, sources[0 if walk.registers[sources[2]] else 1])
        )
    if base == "mad":
        return _set(
            target,
            lambda walk: read(walk, sources[0]) * read(walk, sources[1]) + walk.value(sources[2]),
        )
    if base == "setp":
        compare = _COMPARE[parts[1]]
        both = {"and": operator.and_, "or": operator.or_}.get(parts[2], lambda left, _: left)

        def decide(walk: Walk) -> int:
            found = compare(read(walk, sources[0]), read(walk, sources[1]))
            return int(both(found, bool(walk.registers[sources[2]]) if sources[2:] else found))

        return _set(target, decide)
    if base in ("shl", "shr"):
        shift = _BINARY[base]
        return _set(target, lambda walk: shift(read(walk, sources[0]), walk.value(sources[1])))
    compute = _BINARY[base]
    return _set(target, lambda walk: compute(read(walk, sources[0]), read(walk, sources[1])))
