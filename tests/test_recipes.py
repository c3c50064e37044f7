"""The recipes for CI: they have the form that GitHub and GitLab want, and what they run works."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from documents import ROOT, WORKFLOWS, all_commands, blocks, commands, scripts

PAGE = ROOT / "docs" / "ci.md"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
RECIPES = blocks(PAGE, "yaml")
GITLAB = [text for text in RECIPES if text.startswith("# .gitlab-ci.yml\n")]
GITHUB = [text for text in RECIPES if text not in GITLAB]
# Versions that the recipes were written for.
ACTIONS = {
    "actions/cache": "v4",
    "actions/checkout": "v4",
    "actions/download-artifact": "v4",
    "actions/setup-python": "v5",
    "actions/upload-artifact": "v4",
}


def check(kind: str, *files: Path) -> subprocess.CompletedProcess[str]:
    """Hold files against the form that the linter brings along; it opens no connection."""
    transform = ["--data-transform", "gitlab-ci"] if kind == "gitlab-ci" else []
    return subprocess.run(
        [sys.executable, "-m", "check_jsonschema", "--builtin-schema", f"vendor.{kind}", *transform]
        + [str(file) for file in files],
        capture_output=True,
        text=True,
        check=False,
    )


def written(folder: Path, texts: list[str]) -> list[Path]:
    files = []
    for number, text in enumerate(texts):
        file = folder / f"recipe{number}.yml"
        file.write_text(text)
        files.append(file)
    return files


def test_workflows_have_githubs_form(tmp_path: Path) -> None:
    template = ROOT / "aot" / "template" / "workflows" / "ci.yml.in"
    files = [*WORKFLOWS, *written(tmp_path, [*GITHUB, template.read_text()])]
    assert len(files) == 5
    done = check("github-workflows", *files)
    assert done.returncode == 0, done.stdout
    broken = tmp_path / "broken.yml"
    broken.write_text(WORKFLOWS[0].read_text().replace("runs-on:", "run-on:"))
    done = check("github-workflows", broken)
    assert done.returncode == 1
    assert "broken.yml" in done.stdout


def test_the_gitlab_job_has_gitlabs_form(tmp_path: Path) -> None:
    files = written(tmp_path, GITLAB)
    assert len(files) == 1
    done = check("gitlab-ci", *files)
    assert done.returncode == 0, done.stdout
    files[0].write_text(GITLAB[0].replace("  script:", "  scripts:"))
    assert check("gitlab-ci", *files).returncode == 1


def test_the_page_shows_the_workflow_of_this_repository() -> None:
    assert (ROOT / ".github" / "workflows" / "wheel.yml").read_text() in GITHUB


def jobs() -> list[dict[str, Any]]:
    texts = [*GITHUB, *(path.read_text() for path in WORKFLOWS)]
    return [job for text in texts for job in yaml.safe_load(text)["jobs"].values()]


def test_every_step_is_pinned_and_every_job_starts_with_the_sources() -> None:
    for job in jobs():
        used = [step["uses"] for step in job["steps"] if "uses" in step]
        assert used[0].startswith("actions/checkout@")
        for action in used:
            name, _, version = action.partition("@")
            assert ACTIONS[name] == version


def test_jobs_wait_only_for_jobs_that_are_there() -> None:
    for text in [*GITHUB, *(path.read_text() for path in WORKFLOWS)]:
        named = yaml.safe_load(text)["jobs"]
        for job in named.values():
            needs = job.get("needs", [])
            assert ({needs} if isinstance(needs, str) else set(needs)) <= set(named)


def test_no_python_that_wheels_are_tested_in_is_missing_in_ci() -> None:
    """Their tests skip where one is not installed; make takes what `python3` is."""
    (job,) = yaml.safe_load((ROOT / ".github" / "workflows" / "ci.yml").read_text())[
        "jobs"
    ].values()
    (setup,) = (step for step in job["steps"] if "setup-python" in step.get("uses", ""))
    assert setup["with"]["python-version"].split() == ["3.13", "3.12", "3.11"]
    tests = (ROOT / "tests" / "packaging" / "test_installed.py").read_text()
    assert '@pytest.fixture(params=["3.11", "3.12", "3.13"])' in tests


def test_workflows_may_only_read() -> None:
    for path in WORKFLOWS:
        assert yaml.safe_load(path.read_text())["permissions"] == {"contents": "read"}


def uploaded(content: dict[str, Any]) -> list[str]:
    """What jobs keep: GitHub's by an action, GitLab's by a list of paths."""
    found: list[str] = []
    for job in content.get("jobs", content).values():
        steps = [step for step in job.get("steps", []) if "upload" in step.get("uses", "")]
        paths = [step["with"]["path"] for step in steps] or job.get("artifacts", {}).get("paths")
        assert paths, "a job keeps nothing"
        found += paths
    return found


@pytest.mark.parametrize("text", [*GITHUB[:1], *GITLAB])
def test_what_is_promised_is_done_in_this_order(text: str) -> None:
    """Build, budgets, bytes, wheel, and a server with nothing else; what is made is kept."""
    content = yaml.safe_load(text)
    words = [c.words for script in scripts(content) for c in commands(script, "ci.md")]
    tools = [" ".join(w[1:3]) for w in words if w[0] == "sonata-aot"]
    assert [tool.split()[0] for tool in tools] == ["build", "inspect", "verify", "wheel", "cache"]
    assert (tools[1], tools[2]) == ("inspect --check", "verify --sources")
    servers = [w[1] for w in words if w[0].endswith("/bin/sonata-aot")]
    assert servers == ["verify", "doctor"]
    assert set(uploaded(content)) == {"dist/"}  # where `wheel` puts it


def test_a_runner_can_do_what_needs_no_installation(
    warm_cache: Path, tmp_path: Path, clean_environ: Callable[..., dict[str, str]]
) -> None:
    """The commands of the tool in the GitHub recipe up to the wheel, with a full cache."""
    script = "\n".join(scripts(yaml.safe_load(GITHUB[0])))
    lines = [line for line in script.splitlines() if line.startswith("sonata-aot ")]
    lines = [line for line in lines if line.split()[1] in ("build", "verify")]
    assert len(lines) == 2
    cache = tmp_path / "cache"
    shutil.copytree(warm_cache, cache)
    bin_folder = Path(sys.executable).parent
    done = subprocess.run(
        ["bash", "-e", "-c", "\n".join(lines)],
        cwd=tmp_path,
        env=clean_environ(
            PATH=f"{bin_folder}{os.pathsep}{os.environ['PATH']}", SONATA_AOT_CACHE_DIR=str(cache)
        ),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "everything was cached" in done.stdout
    assert "ok    sources" in done.stdout


def test_gitlabs_cache_loses_what_was_pruned(tmp_path: Path) -> None:
    """The shell of the recipe, with a home of its own, where `prune` removes the older entry."""
    (job,) = (job for job in yaml.safe_load(GITLAB[0]).values())
    assert job["cache"]["paths"] == [".sonata-aot"]
    shell = ("umask", "mkdir", "cp", "rm")
    lines = [
        line if line.split()[0] in shell else "rm -r ~/.cache/sonata-aot/compiled/old"
        for line in job["script"]
        if line.split()[0] in shell or "cache prune" in line
    ]
    home, project = tmp_path / "home", tmp_path / "project"
    kept = project / ".sonata-aot"
    for folder in (home, kept / "compiled" / "old", kept / "compiled" / "new"):
        folder.mkdir(parents=True)
        folder.chmod(0o777)
    environ = {"HOME": str(home), "PATH": os.environ["PATH"]}
    subprocess.run(["bash", "-e", "-c", "\n".join(lines)], cwd=project, env=environ, check=True)
    cache = home / ".cache" / "sonata-aot"
    for place in (kept, cache):
        assert [path.name for path in (place / "compiled").iterdir()] == ["new"]
    assert not any(path.stat().st_mode & 0o022 for path in (cache, *cache.rglob("*")))


def test_the_image_has_what_it_says_and_no_more() -> None:
    image = (ROOT / "Dockerfile").read_text()
    assert re.findall(r"^FROM (.*)$", image, re.M) == ["python:3.12-slim"]
    code = "\n".join(line for line in image.splitlines() if not line.startswith("#"))
    for absent in ("apt-get", "gcc", "g++", "nvcc", "cutlass", "[build]", "tvm"):
        assert absent not in code
    # What docs/ci.md says of it: checked while it is made, the wheel from dist/ and nowhere else.
    typed = [command.words for command in all_commands() if command.origin == "Dockerfile"]
    assert ("sonata-aot", "verify") in typed
    installs = [words[2:] for words in typed if words[:2] == ("pip", "install")]
    (ours,) = (words for words in installs if words[-1] == "sonata-aot")
    assert {"--no-index", "--find-links", "/dist"} <= set(ours)
    needs = {need for words in installs for need in words if ">=" in need}
    assert needs == set(PROJECT["project"]["dependencies"])
    # Only dist/ gets into the build; the user is not root.
    assert (ROOT / ".dockerignore").read_text().split() == ["*", "!dist"]
    assert code.index("USER server") < code.index("CMD")
