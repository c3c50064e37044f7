"""What the documents say is so: commands parse, links lead somewhere, quoted errors exist."""

from __future__ import annotations

import ast
import json
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path

import click
import pytest

from documents import PAGES, ROOT, Command, all_commands, anchors, links, mentioned, name
from sonata_aot.aot.cli import main
from sonata_aot.artifacts import environment

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
COMMANDS = list(dict.fromkeys(all_commands()))
TOOL = [command for command in COMMANDS if Path(command.words[0]).name == "sonata-aot"]
SOURCES = [
    path
    for room in ("artifacts", "kernels", "aot", "loader")
    for path in (ROOT / room).rglob("*.py")
]


def resolve(words: tuple[str, ...]) -> tuple[click.Command, list[str]]:
    """The command that is called, and its arguments."""
    command: click.Command = main
    rest = list(words)
    while isinstance(command, click.Group) and rest and not rest[0].startswith("-"):
        *others, first = rest.pop(0).split("|")
        assert {*others, first} <= set(command.commands), f"no command {first!r}"
        command = command.commands[first]
    return command, rest


def until_redirected(words: tuple[str, ...]) -> tuple[str, ...]:
    return words[: words.index(">")] if ">" in words else words


@pytest.fixture
def workplace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with what the examples name."""
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "list.json").write_text("{}")
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("command", TOOL, ids=str)
def test_commands_parse(command: Command, workplace: Path) -> None:
    called, arguments = resolve(until_redirected(command.words[1:]))
    called.make_context(called.name, arguments)


def test_there_are_commands_of_every_page_with_some() -> None:
    origins = {command.origin for command in TOOL}
    assert origins >= {"README.md", "docs/ci.md", "docs/cli.md", "docs/wheels.md", "Dockerfile"}
    assert ".github/workflows/wheel.yml" in origins


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_commands_in_running_text_exist_and_have_these_options(page: Path) -> None:
    for command in mentioned(page):
        called, arguments = resolve(command.words[1:])
        known = {option for parameter in called.params for option in parameter.opts}
        known |= {o for parameter in called.params for o in parameter.secondary_opts}
        known |= {"--help", "--version"}
        asked = {word.partition("=")[0] for word in arguments if word.startswith("-")}
        assert asked <= known, str(command)


@pytest.mark.parametrize("command", [c for c in COMMANDS if c not in TOOL], ids=str)
def test_other_commands_name_what_there_is(command: Command) -> None:
    """Targets of make, extras of the package, modules and scripts."""
    program, *arguments = command.words
    if program == "make":
        phony = re.search(r"^\.PHONY: (.*)$", (ROOT / "Makefile").read_text(), re.M)
        assert phony is not None
        targets = {argument for argument in arguments if "=" not in argument}
        assert targets <= set(phony[1].split())
    elif Path(program).name == "pip" and "README" in command.origin and "--editable" in arguments:
        assert arguments[-1] == ".[test]"  # of a project that `sonata-aot new` has made
    elif Path(program).name == "pip":
        for extras in re.findall(r"\.\[(.*)\]", " ".join(arguments)):
            assert set(extras.split(",")) <= set(PROJECT["project"]["optional-dependencies"])
    elif arguments[:2] == ["-m", "build"]:
        release = PROJECT["project"]["optional-dependencies"]["release"]
        assert [need for need in release if re.match(r"build\W", need)]
    elif "-m" in arguments and arguments[1] != "venv":
        assert (ROOT / arguments[1].replace(".", "/")).with_suffix(".py").exists()
    elif program.startswith("."):
        assert program == "." or (ROOT / program).exists()


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_links_lead_somewhere(page: Path) -> None:
    for target in links(page):
        place, _, anchor = target.partition("#")
        there = (page.parent / place).resolve() if place else page
        assert there.exists(), target
        if anchor:
            assert anchor in anchors(there), target


def test_a_page_that_nobody_leads_to_is_lost() -> None:
    led_to = {
        (page.parent / link.partition("#")[0]).resolve() for page in PAGES for link in links(page)
    }
    lost = {page for page in PAGES if page.parent == ROOT / "docs"} - led_to
    assert lost == set()


def texts(path: Path) -> Iterator[str]:
    """The texts in a source file, with … for what is filled in."""
    if path.suffix == ".py":
        for node in ast.walk(ast.parse(path.read_bytes())):
            if isinstance(node, ast.JoinedStr):
                parts = [v.value if isinstance(v, ast.Constant) else "…" for v in node.values]
                yield "".join(map(str, parts))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                yield node.value
    else:
        source = path.read_text()
        yield from re.findall(r"CUDA_ERROR_[A-Z_]+", source)
        # Literals side by side are one; what is added between them is filled in.
        literal = r'"(?:[^"\\]|\\.)*"'
        for run in re.findall(rf"{literal}(?:\s*(?:\+[^\";]*\+)?\s*{literal})*", source):
            joined = re.sub(r'"\s*\+[^";]*\+\s*"', "…", run)
            yield re.sub(r'"\s*"', "", joined).strip('"')


@pytest.fixture(scope="module")
def all_texts() -> set[str]:
    paths = [*SOURCES, *(ROOT / "loader" / "native").glob("*.cpp")]
    return {text for path in paths for text in texts(path)}


TROUBLE = ROOT / "docs" / "troubleshooting.md"
QUOTED = re.findall(r"^### `(.*)`$", TROUBLE.read_text(), re.M)


@pytest.mark.parametrize("quoted", QUOTED)
def test_errors_that_are_explained_exist(quoted: str, all_texts: set[str]) -> None:
    """Each piece between what is filled in stands, in this order, in one text of the sources."""
    pieces = [piece for piece in quoted.split("…") if piece.strip(" :,()")]
    assert pieces
    pattern = re.compile(".*".join(map(re.escape, pieces)), re.S)
    assert any(pattern.search(text) for text in all_texts)


def test_the_reasons_in_brackets_exist_too(all_texts: set[str]) -> None:
    page = " ".join(TROUBLE.read_text().split())
    for reason in (
        "does not run on …",
        "PTX is not allowed",
        "needs a driver of CUDA …, this one is …",
    ):
        assert f"`{reason}`" in page
        assert reason in all_texts


def test_the_readme_has_every_environment_variable() -> None:
    rows = re.findall(r"^\| `([A-Z_]+)` \|", (ROOT / "README.md").read_text(), re.M)
    assert set(rows) == {variable.name for variable in environment.ALL}
    assert len(rows) == len(set(rows))


def test_compatibility_names_what_the_project_asks_for() -> None:
    page = (ROOT / "docs" / "compatibility.md").read_text()
    extras = PROJECT["project"]["optional-dependencies"]
    assert f'`requires-python = "{PROJECT["project"]["requires-python"]}"`' in page
    assert f"`{extras['torch'][0]}`" in page
    assert f"`{extras['build'][0]}`" in page


def test_drivers_are_those_that_manifests_name(built: Path) -> None:
    """What README and docs/compatibility.md say of sm86 and sm90."""
    binaries = json.loads((built / "manifest.json").read_text())["binaries"]
    least = {(form, binary[form]["min_cuda"]) for binary in binaries for form in ("cubin", "ptx")}
    assert least == {("cubin", "12.0"), ("ptx", "12.9")}
    for page in ("README.md", "docs/compatibility.md"):
        text = (ROOT / page).read_text()
        assert "CUDA 12.0" in text
        assert "12.9" in text
