"""What `patch` did: for each module its kernel, or why it was left alone."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from types import TracebackType

from .log import logger


class Counts:
    """What the calls of one patched module add up to; see `Entry`."""

    def __init__(self) -> None:
        """They start at zero."""
        self.calls = 0
        self.original_calls: Counter[str] = Counter()
        self.compared = 0
        self.largest_error = 0.0


class Entry:
    """One module of a patched model.

    Attributes:
        module: Its name in the model, as `named_modules` has it.
        shape: Its sizes, such as `2048 -> 4096` of a Linear or `64 x 64 state 128` of a mixer.
        kernel: `gemv` or `mamba_chunk_scan_combined`; None if it was left alone.
        reason: Why it was left alone.
        calls: Calls that a kernel answered, as far as Python saw them: replays of CUDA graphs and
            compiled programs are not counted.
        original_calls: Calls that the original code answered, by the reason.
        compared: Calls of compare mode that ran both ways.
        largest_error: The largest relative error among those, norm of the difference over norm of
            the original's result.
    """

    def __init__(
        self,
        module: str,
        shape: str,
        kernel: str | None = None,
        reason: str | None = None,
        counts: Counts | None = None,
    ) -> None:
        """`counts` are those of the module's entry in another model."""
        self.module = module
        self.shape = shape
        self.kernel = kernel
        self.reason = reason
        self.counts = Counts() if counts is None else counts

    @property
    def calls(self) -> int:
        """Calls that a kernel answered."""
        return self.counts.calls

    @property
    def original_calls(self) -> Counter[str]:
        """Calls that the original code answered, by the reason."""
        return self.counts.original_calls

    @property
    def compared(self) -> int:
        """Calls that ran both ways."""
        return self.counts.compared

    @property
    def largest_error(self) -> float:
        """The largest relative error among those."""
        return self.counts.largest_error

    def renamed(self, module: str) -> Entry:
        """This entry in a model where the module has another name."""
        if module == self.module:
            return self
        return Entry(module, self.shape, self.kernel, self.reason, self.counts)

    def warn_once(self, reason: str) -> None:
        """Log that the original code is about to answer a call, if no call had this reason yet."""
        if reason not in self.original_calls:
            logger.warning("%s: a call runs the module's original code: %s", self.module, reason)

    def __repr__(self) -> str:
        return f"Entry({self.module!r}, {self.shape!r}, {self.kernel or self.reason!r})"


class Report:
    """What `patch` did; prints as a table, and undoes it.

    As a context manager it undoes the patch at the end of the block.
    """

    def __init__(self, entries: list[Entry], notes: list[str], undo: Callable[[], None]) -> None:
        """`undo` restores every patched module of `entries`; `notes` are of the whole model."""
        self.entries = tuple(entries)
        self.notes = tuple(notes)
        self._undo = undo

    @property
    def patched(self) -> tuple[Entry, ...]:
        """The entries with a kernel."""
        return tuple(entry for entry in self.entries if entry.kernel is not None)

    @property
    def left_alone(self) -> tuple[Entry, ...]:
        """The entries without one."""
        return tuple(entry for entry in self.entries if entry.kernel is None)

    def undo(self) -> None:
        """Make every module of this report run its original code; again does nothing.

        Also those that an earlier `patch` of the same model had patched.
        """
        self._undo()

    def __enter__(self) -> Report:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.undo()

    def __iter__(self) -> Iterator[Entry]:
        return iter(self.entries)

    def __len__(self) -> int:
        return len(self.entries)

    def __str__(self) -> str:
        """Modules of one kind, shape and fate share a line; numbers in their names become *."""
        lines = [("modules", "shape", "kernel", "calls", "left to the original code")]
        for entries in _alike(self.entries):
            first = entries[0]
            names = {_starred(entry.module) for entry in entries}
            name = f"{len(entries)} x {names.pop()}" if len(entries) > 1 else first.module
            left: Counter[str] = Counter()
            for entry in entries:
                left.update(entry.original_calls)
            why = first.reason or "; ".join(f"{count}: {text}" for text, count in left.items())
            calls = str(sum(entry.calls for entry in entries)) if first.kernel else ""
            lines.append((name, first.shape, first.kernel or "-", calls, why))
        widths = [max(len(line[column]) for line in lines) for column in range(4)]
        text = [
            "  ".join(
                (*(cell.ljust(width) for cell, width in zip(line, widths, strict=False)), why)
            )
            for *line, why in lines
        ]
        compared = sum(entry.compared for entry in self.entries)
        if compared:
            worst = max(self.entries, key=lambda entry: entry.largest_error)
            text.append(
                f"compared {compared} calls: largest relative error {worst.largest_error:.2e}, "
                f"in {worst.module}"
            )
        text += self.notes
        count = len(self.patched)
        text.append(f"{count} of {len(self.entries)} modules patched")
        return "\n".join(line.rstrip() for line in text)


def _alike(entries: tuple[Entry, ...]) -> list[list[Entry]]:
    groups: dict[tuple[object, ...], list[Entry]] = {}
    for entry in entries:
        key = (_starred(entry.module), entry.shape, entry.kernel, entry.reason)
        groups.setdefault(key, []).append(entry)
    return list(groups.values())


def _starred(name: str) -> str:
    return ".".join("*" if part.isdigit() else part for part in name.split("."))
