"""The commit and dirty flag that a manifest records."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from sonata_aot.aot.provenance import git_state


def git(root: Path, *arguments: str) -> str:
    identity = ["-c", "user.name=Test", "-c", "user.email=test@example.com"]
    result = subprocess.run(
        ["git", "-C", root, *identity, *arguments], capture_output=True, text=True, check=True
    )
    return result.stdout.strip()


def repository(root: Path, *names: str) -> list[Path]:
    """A repository with these files committed."""
    git(root.parent, "init", "--quiet", str(root))
    files = [root / name for name in names]
    for file in files:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("content\n")
    git(root, "add", ".")
    git(root, "commit", "--quiet", "--message", "first")
    return files


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "a repository ü"


@pytest.fixture
def files(root: Path) -> list[Path]:
    return repository(root, "kernels/a/device.py", "kernels/b/device.py", "elsewhere/other.py")


def test_no_files() -> None:
    assert git_state([]) == (None, None)


def test_outside_git(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    (tmp_path / "device.py").write_text("")
    assert git_state([tmp_path / "device.py"]) == (None, None)


def test_without_git(files: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nonexistent")
    assert git_state(files[:2]) == (None, None)


def test_clean(root: Path, files: list[Path]) -> None:
    assert git_state(files[:2]) == (git(root, "rev-parse", "HEAD"), False)


def test_a_later_commit(root: Path, files: list[Path]) -> None:
    first, _ = git_state(files[:2])
    files[0].write_text("changed\n")
    git(root, "commit", "--all", "--quiet", "--message", "second")
    commit, dirty = git_state(files[:2])
    assert commit == git(root, "rev-parse", "HEAD") != first
    assert dirty is False


@pytest.mark.parametrize("staged", [False, True])
def test_a_changed_file(root: Path, files: list[Path], staged: bool) -> None:
    files[1].write_text("changed\n")
    if staged:
        git(root, "add", ".")
    assert git_state(files[:2]) == (git(root, "rev-parse", "HEAD"), True)


def test_a_new_file_beside_them(root: Path, files: list[Path]) -> None:
    files[1].with_name("new.py").write_text("")
    assert git_state(files[:2]) == (git(root, "rev-parse", "HEAD"), True)


def test_changes_elsewhere_do_not_count(root: Path, files: list[Path]) -> None:
    files[2].write_text("changed\n")
    (root / "notes.txt").write_text("")
    assert git_state(files[:2]) == (git(root, "rev-parse", "HEAD"), False)


def test_installed_inside_somebody_elses_checkout(root: Path, files: list[Path]) -> None:
    installed = root / ".venv" / "site-packages" / "device.py"
    installed.parent.mkdir(parents=True)
    installed.write_text("")
    assert git_state([installed]) == (None, None)
    assert git_state([files[0], installed]) == (None, None)
    (root / ".gitignore").write_text(".venv\n")
    assert git_state([installed]) == (None, None)


def test_files_of_two_repositories(tmp_path: Path, files: list[Path]) -> None:
    (other,) = repository(tmp_path / "other", "device.py")
    assert git_state([files[0], other]) == (None, None)


def test_a_repository_without_a_commit(tmp_path: Path) -> None:
    git(tmp_path, "init", "--quiet", "empty")
    file = tmp_path / "empty" / "device.py"
    file.write_text("")
    git(tmp_path / "empty", "add", ".")
    assert git_state([file]) == (None, None)


def test_through_a_symbolic_link(tmp_path: Path, root: Path, files: list[Path]) -> None:
    link = tmp_path / "link"
    link.symlink_to(root / "kernels")
    linked = [link / "a" / "device.py", link / "b" / "device.py"]
    assert git_state(linked) == (git(root, "rev-parse", "HEAD"), False)


def test_a_git_hook_of_another_repository_changes_nothing(
    tmp_path: Path, root: Path, files: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    # Git runs hooks with GIT_DIR set, and a hook may well call `make build`.
    expected = (git(root, "rev-parse", "HEAD"), False)
    repository(tmp_path / "other", "device.py")
    monkeypatch.setenv("GIT_DIR", str(tmp_path / "other" / ".git"))
    assert git_state(files[:2]) == expected


def test_nothing_in_the_repository_is_touched(root: Path, files: list[Path]) -> None:
    index = root / ".git" / "index"
    before = index.read_bytes()
    os.utime(files[0], (10**9, 10**9))  # now the index holds another time for it
    git_state(files[:2])
    assert index.read_bytes() == before
    git(root, "status")  # which git would put right, given leave
    assert index.read_bytes() != before
