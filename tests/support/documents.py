"""The documents of this repository: their blocks, headings, links and commands."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/*.md")])
WORKFLOWS = sorted(ROOT.glob(".github/workflows/*.yml"))
_BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.M | re.S)
_LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
# Of the pages; a block is no text.
_HEADING = re.compile(r"^#{1,6} (.+)$", re.M)
_ASSIGNMENT = re.compile(r"[A-Za-z_]\w*=")
# What a workflow puts in by itself; a number is a name too.
_EXPRESSION = re.compile(r"\$\{\{.*?\}\}")


@dataclass(frozen=True)
class Command:
    """A command that a page has the reader, or a machine, type."""

    origin: str
    words: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.origin}: {' '.join(self.words)}"


def name(path: Path) -> str:
    """A file's name from the root."""
    return str(path.relative_to(ROOT))


def blocks(path: Path, *languages: str) -> list[str]:
    """Fenced blocks of a page in one of these languages."""
    return [text for kind, text in _BLOCK.findall(path.read_text()) if kind in languages]


def links(path: Path) -> list[str]:
    """Where a page leads, but for other sites."""
    targets = _LINK.findall(re.sub(r"`[^`\n]*`", "``", _BLOCK.sub("", path.read_text())))
    return [target for target in targets if not target.startswith(("http:", "https:"))]


def anchors(path: Path) -> set[str]:
    """The names under which headings can be linked to."""
    titles = _HEADING.findall(_BLOCK.sub("", path.read_text()))
    return {
        re.sub(r"[^\w\- ]", "", title.replace("`", "").lower()).replace(" ", "-")
        for title in titles
    }


def commands(text: str, origin: str) -> Iterator[Command]:
    """The simple commands of a shell script, with neither comments nor assignments."""
    joined = _EXPRESSION.sub("1", text).replace("\\\n", " ")
    for line in joined.splitlines():
        lexer = shlex.shlex(line.removeprefix("$ "), posix=True, punctuation_chars="&|;<>")
        lexer.whitespace_split = True
        words: list[str] = []
        for word in [*lexer, ";"]:
            if word in ("&&", "||", ";", "|"):
                if words:
                    yield Command(origin, tuple(words))
                words = []
            elif words or not _ASSIGNMENT.match(word):
                words.append(word)


def scripts(value: Any) -> Iterator[str]:
    """The scripts of a workflow, or of GitLab's jobs, wherever they stand."""
    if isinstance(value, dict):
        for key, item in value.items():
            if key == "run" and isinstance(item, str):
                yield item
            elif key == "script":
                yield "\n".join(item)
            else:
                yield from scripts(item)
    elif isinstance(value, list):
        for item in value:
            yield from scripts(item)


def mentioned(path: Path) -> Iterator[Command]:
    """Commands of the tool in running text, which may have stand-ins for values."""
    for text in re.findall(r"`(sonata-aot [^`\n]+)`", _BLOCK.sub("", path.read_text())):
        yield Command(name(path), tuple(text.split()))


def all_commands() -> Iterator[Command]:
    """Every command in every page, workflow and image."""
    for page in PAGES:
        for text in blocks(page, "sh", "console"):
            lines = text.replace("\\\n", " ").splitlines()
            typed = [line for line in lines if line.startswith("$ ")] or lines
            yield from commands("\n".join(typed), name(page))
        for text in blocks(page, "yaml"):
            for script in scripts(yaml.safe_load(text)):
                yield from commands(script, name(page))
    for workflow in WORKFLOWS:
        for script in scripts(yaml.safe_load(workflow.read_text())):
            yield from commands(script, name(workflow))
    image = (ROOT / "Dockerfile").read_text()
    for script in re.findall(r"^RUN ((?:.*\\\n)*.*)$", image, re.M):
        yield from commands(re.sub(r"--mount=\S+", "", script), "Dockerfile")
    for words in re.findall(r"^CMD (\[.*\])$", image, re.M):
        yield Command("Dockerfile", tuple(yaml.safe_load(words)))
