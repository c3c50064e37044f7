"""The git state of the kernels' source tree."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterable
from pathlib import Path


def git_state(files: Iterable[Path]) -> tuple[str | None, bool | None]:
    """Commit that is checked out and whether any of the files' folders differ from it.

    (None, None) where the files are not tracked by git: a package installed inside somebody's
    checkout must not take that project's commit for its own.
    """
    paths = sorted(files)
    if not paths:
        return None, None
    top = _git(paths[0].parent, "rev-parse", "--show-toplevel")
    if top is None:
        return None, None
    root = Path(top)
    folders = sorted({str(path.parent.resolve()) for path in paths})
    tracked = _git(root, "ls-files", "--error-unmatch", "--", *(str(p.resolve()) for p in paths))
    commit = _git(root, "rev-parse", "--verify", "HEAD")
    if tracked is None or commit is None:
        return None, None
    changes = _git(root, "status", "--porcelain", "--", *folders)
    return commit, bool(changes)


def _git(directory: Path, *arguments: str) -> str | None:
    """Output of a git command; None where there is no git, no repository or no such thing."""
    try:
        result = subprocess.run(
            ["git", "--no-optional-locks", "-C", str(directory), *arguments],
            # Inside a git hook these name the hook's repository, whatever the directory.
            env={k: v for k, v in os.environ.items() if not k.startswith("GIT_")},
            capture_output=True,
            text=True,
            errors="surrogateescape",
            check=False,
            timeout=30,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return result.stdout.strip() if result.returncode == 0 else None
