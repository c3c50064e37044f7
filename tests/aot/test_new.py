"""`sonata-aot new`: a project that passes its own test, and computes what it says."""

from __future__ import annotations

import ast
import errno
import json
import os
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from kernel_runs import Kernel
from ptx_machine import Memory
from sonata_aot.artifacts import open_artifacts

if TYPE_CHECKING:
    from tests.aot.conftest import Cli, Invoke

NAME = "scaled_sum"
FILES = [
    *(".github/workflows/ci.yml", ".gitignore", "README.md", "pyproject.toml"),
    *(f"{NAME}/__init__.py", f"{NAME}/device.py", f"{NAME}/spec.py", "tests/test_kernel.py"),
]


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("new")
    script = Path(sys.executable).with_name("sonata-aot")
    done = subprocess.run(
        [script, "new", NAME, "--json"], cwd=folder, capture_output=True, text=True, check=True
    )
    printed = json.loads(done.stdout)
    assert (printed["directory"], sorted(printed["files"])) == (NAME, sorted(FILES))
    return folder / NAME


def test_what_is_written(project: Path) -> None:
    found = [str(p.relative_to(project)) for p in project.rglob("*") if p.is_file()]
    assert sorted(found) == sorted(FILES)
    texts = {name: (project / name).read_text() for name in FILES}
    assert all("$" not in text for name, text in texts.items() if name != "README.md")
    settings = tomllib.loads(texts["pyproject.toml"])["project"]
    assert settings["name"] == "scaled-sum"
    assert settings["entry-points"] == {"sonata_aot.kernels": {NAME: f"{NAME}.spec"}}
    assert f"build --from {NAME}.spec" in texts[".github/workflows/ci.yml"]
    # As this repository's own code is written.
    for arguments in (("format", "--check"), ("check",)):
        command = [Path(sys.executable).with_name("ruff"), *arguments, "--isolated"]
        subprocess.run([*command, "--line-length=100", "."], cwd=project, check=True)


@pytest.mark.parametrize("existed", [False, True])
def test_a_disk_that_gets_full_leaves_nothing(
    invoke: Invoke, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, existed: bool
) -> None:
    place = tmp_path / "below" / "project"
    if existed:
        place.mkdir(parents=True)
    write = Path.write_text
    count = 0

    def full(path: Path, text: str, **options: str) -> int:
        nonlocal count
        count += 1
        if count == len(FILES):
            write(path, text[:5])
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
        return write(path, text, **options)

    monkeypatch.setattr(Path, "write_text", full)
    result = invoke("new", NAME, "--out", place)
    assert (result.exit_code, result.stderr.count("\n")) == (1, 1)
    assert "No space left on device" in result.stderr
    assert place.exists() == existed
    assert not existed or not list(place.iterdir())
    assert invoke("new", NAME, "--out", place).exit_code == 0


def test_its_own_tests_pass_and_its_kernel_is_right(project: Path, tmp_path: Path) -> None:
    environ = {**os.environ, "SONATA_AOT_CACHE_DIR": str(tmp_path / "cache")}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
    command.append(f"--basetemp={tmp_path / 'base'}")
    done = subprocess.run(
        command, cwd=project, env=environ, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "1 passed, 6 skipped" in done.stdout
    (out,) = (tmp_path / "base").glob("artifacts?")
    artifacts = open_artifacts(out)
    kernel = Kernel(artifacts, ("sm86", NAME, {"dtype": "f16", "threads": 256}))
    for size in (1, 1023, 1025, 4096):
        results(kernel, size)


def results(kernel: Kernel, size: int) -> None:
    random = np.random.default_rng(size)
    x, y = (random.standard_normal(size).astype(np.float16) for _ in range(2))
    memory, bits = Memory(), np.full(size, 0xFFFF, np.uint16)
    out = memory.buffer(bits, "out", writable=True, offset=2)
    given: dict[str, Any] = {
        "x": memory.buffer(x.view(np.uint16), "x", offset=4),
        "y": memory.buffer(y.view(np.uint16), "y", offset=6),
    }
    kernel.run(memory, {**given, "out": out, "size": size, "scale": 0.5})
    exact = x.astype(np.float64) * 0.5 + y.astype(np.float64)
    assert out.written.all()
    off = np.abs(bits.view(np.float16).astype(np.float64) - exact)
    assert (off <= 2**-11 * np.abs(exact) + 2**-25).all()


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("Mine", "lower-case"),
        ("a-b", "lower-case"),
        ("a/b", "lower-case"),
        ("9a", "lower-case"),
        ("ä", "lower-case"),
        ("", "lower-case"),
        ("class", "Python"),
        ("tests", "pytest"),
        ("test_kernel", "pytest"),
        ("artifacts", "own code"),
        ("build", "own code"),
        ("range", "own code"),
        ("gemv", "kernel of sonata-aot"),
        ("json", "installed"),
        ("sys", "installed"),
        ("click", "installed"),
    ],
)
def test_names_that_would_not_do(invoke: Invoke, tmp_path: Path, name: str, words: str) -> None:
    result = invoke("new", name, "--out", tmp_path / "out")
    assert (result.exit_code, result.stdout) == (2, "")
    assert words in result.stderr
    assert not (tmp_path / "out").exists()


def test_no_name_that_its_code_uses_would_do(invoke: Invoke, project: Path, tmp_path: Path) -> None:
    """`from x import x` in a test that has an x of its own would call that."""
    used: set[str] = set()
    for path in project.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_bytes())):
            match node:
                case ast.Name(id=name) | ast.arg(arg=name) | ast.FunctionDef(name=name):
                    used.add(name)
                case ast.alias(name=name):
                    used.add(name.partition(".")[0])
                case _:
                    pass
    used -= {NAME}
    assert {"cute", "x", "kernels", "torch", "float"} & used == {"cute", "x", "kernels", "torch"}
    for name in used:
        out = tmp_path / name
        assert invoke("new", name, "--out", out).exit_code == 2, name
        assert not out.exists()


def test_nothing_is_overwritten(cli: Cli, tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "file").write_text("mine")
    result = cli("new", "mine", cwd=tmp_path)
    assert result.returncode == 1
    assert "mine is not empty" in result.stderr
    assert [path.name for path in (tmp_path / "mine").iterdir()] == ["file"]
    result = cli("new", "mine", "--out", "other", cwd=tmp_path)
    assert result.returncode == 0
    assert result.stdout.splitlines()[-1].startswith("Next: cd other")
    (tmp_path / "plain").write_text("")
    assert cli("new", "mine", "--out", "plain", cwd=tmp_path).returncode == 1
