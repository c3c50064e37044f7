"""Small parts: tables, progress, the reading of disassembly."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import struct
import sys
import termios

import click
import pytest

from sonata_aot.aot.progress import Progress
from sonata_aot.aot.report import plural, table
from sonata_aot.aot.sass import Instruction, parse, spills

DISASSEMBLY = """
\t.headerflags\t@"EF_CUDA_TEXMODE_UNIFIED EF_CUDA_64BIT_ADDRESS EF_CUDA_SM86"
.text.kernel_0:
        /*0000*/                   IMAD.MOV.U32 R1, RZ, RZ, c[0x0][0x28] ;
        /*0010*/              @!P0 LDG.E.128 R4, [R2.64+0x800] ;
        /*0020*/               @P1 STL.64 [R1+0x8], R4 ;
        /*0030*/             @!UP2 UIADD3 UR4, UR4, 0x1, URZ ;
        /*0040*/                   LDL R9, [R1] ;
        /*0050*/                   LDLOOK R9, [R1] ;
.L_x_0:
        /*12340*/                  BRA `(.L_x_0);
        /*12350*/                  EXIT ;
// LDL in a comment
"""


def test_instructions_of_a_disassembly() -> None:
    assert parse(DISASSEMBLY) == (
        Instruction(0x0, None, "IMAD.MOV.U32", "R1, RZ, RZ, c[0x0][0x28]"),
        Instruction(0x10, "!P0", "LDG.E.128", "R4, [R2.64+0x800]"),
        Instruction(0x20, "P1", "STL.64", "[R1+0x8], R4"),
        Instruction(0x30, "!UP2", "UIADD3", "UR4, UR4, 0x1, URZ"),
        Instruction(0x40, None, "LDL", "R9, [R1]"),
        Instruction(0x50, None, "LDLOOK", "R9, [R1]"),
        Instruction(0x12340, None, "BRA", "`(.L_x_0)"),
        Instruction(0x12350, None, "EXIT", ""),
    )


def test_spills_are_loads_and_stores_of_local_memory() -> None:
    assert spills(parse(DISASSEMBLY)) == 2
    assert spills(()) == 0


def test_a_table_puts_numbers_to_the_right() -> None:
    shown = table(["name", "count"], [("a", 5), ("longer", 12345)])
    assert click.unstyle(shown).splitlines() == ["name    count", "a           5", "longer  12345"]


def test_a_table_without_rows() -> None:
    assert click.unstyle(table(["name", "count"], [])) == "name  count"


def test_plural() -> None:
    assert [plural(count, "binary", "binaries") for count in (0, 1, 2)] == [
        "0 binaries",
        "1 binary",
        "2 binaries",
    ]


def screen(written: str, columns: int) -> list[str]:
    """The lines that a terminal of this width shows after all that was written to it."""
    lines, column = [""], 0
    for part in re.findall(r"\x1b\[2?K|\x1b|.", written, re.S):
        assert part != "\x1b", f"an escape that this terminal does not know in {written!r}"
        if part == "\r":
            column = 0
        elif part == "\n":
            lines.append("")
        elif part.startswith("\x1b"):
            lines[-1] = lines[-1][:column] if part == "\x1b[K" else ""
        else:
            if column == columns:  # it wraps
                lines.append("")
                column = 0
            lines[-1] = lines[-1][:column].ljust(column) + part + lines[-1][column + 1 :]
            column += 1
    return [line.rstrip() for line in lines]


class TestProgress:
    def test_a_line_a_step(self, capsys: pytest.CaptureFixture[str]) -> None:
        shown = Progress(quiet=False)
        shown(1, 2, "one")
        shown(2, 2, "two")
        shown.close()
        assert capsys.readouterr() == ("", "[1/2] one\n[2/2] two\n")

    def test_quiet(self, capsys: pytest.CaptureFixture[str]) -> None:
        shown = Progress(quiet=True)
        shown(1, 1, "one")
        shown.close()
        assert capsys.readouterr() == ("", "")


class Terminal:
    """A terminal that is standard error while this is entered, whatever standard output is."""

    def __enter__(self) -> Terminal:
        self._leader, follower = pty.openpty()
        os.set_blocking(self._leader, False)
        self._stderr, sys.stderr = sys.stderr, open(follower, "w", encoding="utf-8")
        return self

    def __exit__(self, *_: object) -> None:
        sys.stderr.close()
        os.close(self._leader)
        sys.stderr = self._stderr

    def width(self, columns: int) -> None:
        size = struct.pack("HHHH", 24, columns, 0, 0)
        fcntl.ioctl(sys.stderr.fileno(), termios.TIOCSWINSZ, size)

    def written(self) -> str:
        """What it got since this was asked."""
        sys.stderr.flush()
        return os.read(self._leader, 65536).decode()


class TestBar:
    STEPS = ("compiled in 1.4 s: " + "x" * 190, "cached: short", "waiting for another build")

    @pytest.mark.parametrize("colour", [True, False])
    @pytest.mark.parametrize("columns", [20, 32, 40, 80, 200])
    def test_never_wraps_and_leaves_nothing_of_a_longer_line(
        self, monkeypatch: pytest.MonkeyPatch, columns: int, colour: bool
    ) -> None:
        monkeypatch.setenv("COLUMNS", "500")  # the terminal knows better
        with Terminal() as terminal, click.Context(click.Command("build"), color=colour):
            terminal.width(columns)
            shown, everything = Progress(quiet=False), ""
            for number, step in enumerate(self.STEPS, start=9):  # the counter grows, too
                shown(number, 11, step)
                written = terminal.written()
                everything += written
                (line,) = screen(everything, columns)
                assert [line] == screen(written, columns)
                assert len(line) < columns
                if columns >= 40:
                    filled = 24 * number // 11
                    whole = f"[{'#' * filled}{'-' * (24 - filled)}] {number}/11 {step}"
                    assert line == whole[: columns - 1].rstrip()
            shown.close()
            shown.close()
            assert screen(everything + terminal.written(), columns)[1:] == [""]

    def test_a_terminal_of_unknown_width(self) -> None:
        with Terminal() as terminal:
            terminal.width(0)
            shown = Progress(quiet=False)
            shown(1, 2, "one")
            shown.close()
            assert "[############------------] 1/2 " in terminal.written()

    def test_another_width_counts_from_the_next_step_on(self) -> None:
        with Terminal() as terminal:
            terminal.width(40)
            shown = Progress(quiet=False)
            shown(1, 2, "x" * 100)
            assert len(screen(terminal.written(), 40)[-1]) == 39
            terminal.width(60)
            shown(2, 2, "y" * 100)
            assert len(screen(terminal.written(), 60)[-1]) == 59


def test_progress_without_standard_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", None)  # as in a process that was started with it closed
    shown = Progress(quiet=False)
    shown(1, 1, "one")
    shown.close()
