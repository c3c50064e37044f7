"""The commands as a whole: their reference, shell completion, and what all of them have."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import click
import pytest

from sonata_aot.aot import reference
from sonata_aot.aot.cli import main as root
from sonata_aot.artifacts import environment

if TYPE_CHECKING:
    from tests.aot.conftest import Cli, Invoke

DOCUMENT = Path(__file__).parents[2] / "docs" / "cli.md"


def commands(
    group: click.Group = root, way: tuple[str, ...] = ()
) -> Iterator[tuple[str, click.Command]]:
    for name, command in group.commands.items():
        if isinstance(command, click.Group):
            yield from commands(command, (*way, name))
        else:
            yield " ".join((*way, name)), command


def options(command: click.Command) -> set[str]:
    return {text for item in command.params for text in (*item.opts, *item.secondary_opts)}


def test_the_document_is_that_of_these_commands() -> None:
    assert reference.main(["--check", str(DOCUMENT)]) == 0


def test_a_document_that_is_not_is_found_and_mended(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = DOCUMENT.read_text()
    copy = tmp_path / "cli.md"
    for spoiled in (text.replace("--shard", "--shards"), text.replace("Needs no GPU", "")):
        copy.write_text(spoiled)
        assert reference.main(["--check", str(copy)]) == 1
        assert "make docs" in capsys.readouterr().err
    copy.write_text("mine\n" + reference.BEGIN + "old\n" + reference.END + "mine too\n")
    assert reference.main([str(copy)]) == 0
    assert reference.main(["--check", str(copy)]) == 0
    assert copy.read_text().startswith("mine\n")
    assert copy.read_text().endswith("mine too\n")


def test_nothing_is_left_out() -> None:
    text = reference.render()
    for name, command in commands():
        section = text.partition(f" sonata-aot {name}\n")[2].partition("\n## ")[0]
        for option in options(command):
            assert option in section or not option.startswith("-"), (name, option)
    for variable in environment.ALL:
        assert f"| `{variable.name}` | {variable.doc}" in text


def test_everything_that_reports_does_so_in_json() -> None:
    for name, command in commands():
        if name != "completion":
            assert "--json" in options(command), name


def test_every_option_and_command_says_what_it_is_for() -> None:
    for name, command in commands():
        assert command.help, name
        for item in command.params:
            if isinstance(item, click.Option):
                assert item.help, (name, item.name)
                assert item.help.endswith((".", ")")), (name, item.name)


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_the_code_for_a_shell(invoke: Invoke, shell: str) -> None:
    result = invoke("completion", shell)
    assert result.exit_code == 0
    assert f"_SONATA_AOT_COMPLETE={shell}_complete" in result.stdout
    if shell == "bash":
        subprocess.run(["bash", "-n"], input=result.stdout, text=True, check=True)


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("ca", ["cache"]),
        ("cache pr", ["prune"]),
        ("build --fail", ["--fail-fast"]),
        ("build --arch sm10", ["sm100", "sm100a", "sm100f", "sm103", "sm103a", "sm103f"]),
        ("build --kernel gemv", ["gemv", "gemv_any"]),
        ("completion z", ["zsh"]),
    ],
)
def test_what_is_completed(cli: Cli, words: str, expected: list[str]) -> None:
    text = f"sonata-aot {words}"
    result = cli(
        _SONATA_AOT_COMPLETE="bash_complete",
        COMP_WORDS=text,
        COMP_CWORD=str(len(text.split()) - 1),
    )
    assert [line.partition(",")[2] for line in result.stdout.splitlines()] == expected


class TestVerbosity:
    @pytest.fixture(autouse=True)
    def cached(self, warm_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("SONATA_AOT_CACHE_DIR", str(warm_cache))

    def test_quiet_prints_nothing(self, cli: Cli, tmp_path: Path, built: Path) -> None:
        chosen = ("--arch=sm86", "--kernel=gemv_any", "--out", tmp_path / "out")
        result = cli("build", *chosen, "--quiet")
        assert (result.returncode, result.stdout, result.stderr) == (0, "", "")
        result = cli("verify", "-q", tmp_path / "out")
        assert (result.returncode, result.stdout, result.stderr) == (0, "", "")

    def test_quiet_prints_what_is_wrong(self, invoke: Invoke, copied: Path) -> None:
        next((copied / "objects").iterdir()).unlink()
        result = invoke("verify", "-q", copied)
        assert result.exit_code == 1
        assert len(result.stdout.splitlines()) == 2
        assert result.stdout.startswith("FAIL  ")
        assert invoke("build", "--arch=sm86", "--kernel=no", "-q").stderr.count("\n") == 1

    def test_verbose_says_where(self, invoke: Invoke, warm_cache: Path, tmp_path: Path) -> None:
        chosen = ("build", "--arch=sm86", "--kernel=gemv_any", "--out", tmp_path / "out")
        result = invoke(*chosen, "-v", "--json")
        planned = f"sonata-aot: 16 binaries planned, 16 of them here; cache {warm_cache}\n"
        assert planned in result.stderr
        assert "sonata-aot: " not in invoke(*chosen).stderr
        assert invoke(*chosen, "-v", "-q").exit_code == 2
