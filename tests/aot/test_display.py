"""Small parts: tables, progress, the reading of disassembly."""

from __future__ import annotations

import os
import sys

import click
import pytest

from sonata_aot.aot import progress
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

    @pytest.mark.parametrize("columns", [20, 40, 80])
    def test_a_bar_never_wraps(
        self,
        capsys: pytest.CaptureFixture[str],
        monkeypatch: pytest.MonkeyPatch,
        columns: int,
    ) -> None:
        monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
        size = os.terminal_size((columns, 24))
        monkeypatch.setattr(progress.shutil, "get_terminal_size", lambda: size)
        shown = Progress(quiet=False)
        shown(1, 2, "x" * 200)
        shown(2, 2, "y" * 200)
        shown.close()
        shown.close()
        written = capsys.readouterr().err
        # CliRunner and pytest are no terminals: click drops the escape that clears the line.
        steps = click.unstyle(written).replace("\x1b[2K", "").strip("\r\n").split("\r")
        assert len(steps) == 2
        assert steps[0].startswith("[############------------] 1/2 ")
        assert written.endswith("\n")
        assert written.count("\n") == 1
        if columns >= 40:
            assert max(map(len, steps)) < columns
