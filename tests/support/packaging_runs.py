"""Making wheels, and environments with them, in processes as a person would start them."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import Distribution, PackageNotFoundError, distribution
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).resolve().parents[2]
# Where this environment's packages lie.
PACKAGES = Path(sysconfig.get_path("purelib"))
SCRIPTS = Path(sysconfig.get_path("scripts"))
PIP = (sys.executable, "-m", "pip")
# What builds the launcher, all of it without code for one Python.
BUILDERS = ("scikit-build-core", "nanobind", "packaging", "pathspec")
# What may lie in a checkout and belongs in no source distribution.
STRAY = ("release_key", ".sonata-aot/compiled", "results.json", "loader/__pycache__/x.pyc")

Once = Callable[[str, Callable[[Path], None]], Path]


def run(*command: str | Path, **options: Any) -> str:
    """Output of a command; where it fails, what it said is in the error."""
    words = [str(word) for word in command]
    done = subprocess.run(words, capture_output=True, text=True, check=False, **options)
    assert done.returncode == 0, f"{words}\n{done.stdout}{done.stderr}"
    return done.stdout


def find_python(version: str) -> Path:
    """The interpreter of a version: this one, on PATH, or pyenv's.

    Skips where it is not installed.
    """
    if f"{sys.version_info.major}.{sys.version_info.minor}" == version:
        return Path(sys.executable).resolve()
    found = [shutil.which(f"python{version}")]
    root = Path(os.environ.get("PYENV_ROOT", "~/.pyenv")).expanduser()
    found += sorted(map(str, root.glob(f"versions/{version}.*/bin/python{version}")))
    for path in filter(None, found):
        # pyenv has a stand-in on PATH for versions that are not in use.
        done = subprocess.run([path, "-c", ""], capture_output=True, check=False)
        if done.returncode == 0:
            return Path(path)
    pytest.skip(f"Python {version} is not installed here")


@dataclass(frozen=True)
class Environment:
    """A virtual environment."""

    folder: Path

    @property
    def python(self) -> Path:
        return self.folder / "bin" / "python"

    @property
    def packages(self) -> Path:
        (found,) = self.folder.glob("lib/python3*/site-packages")
        return found

    @property
    def artifacts(self) -> Path:
        """Where a wheel's artifacts lie."""
        return self.packages / "sonata_aot" / "artifacts" / "bundled"

    def environ(self, **changes: str) -> dict[str, str]:
        """Nothing of the developer's, and no compiler on PATH."""
        kept = {"HOME": str(self.folder), "PATH": str(self.folder / "bin"), "LANG": "C.UTF-8"}
        return {**kept, "PYTHONDONTWRITEBYTECODE": "1", **changes}

    def run(self, program: str, *arguments: str | Path, **environ: str) -> str:
        """Output of one of its programs."""
        path = self.folder / "bin" / program
        cwd = self.folder  # not the repository, whose folders would be found
        return run(path, *arguments, env=self.environ(**environ), cwd=cwd)

    def add_path(self, *folders: Path) -> None:
        """Put folders after its own packages; what is installed in them for development is not."""
        text = "".join(f"{folder}\n" for folder in folders)
        (self.packages / "added.pth").write_text(text)


def compiler_path() -> tuple[Path, ...]:
    """What makes the compiler of kernels importable: this environment and a folder in it."""
    return PACKAGES, PACKAGES / "nvidia_cutlass_dsl" / "dsl_packages"


def copy_tree(target: Path) -> Path:
    """A copy of the repository's files as they are now, without git."""
    listed = run("git", "-C", ROOT, "ls-files", "-z", "--cached", "--others", "--exclude-standard")
    for name in filter(None, listed.split("\0")):
        if (ROOT / name).exists():
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, target / name, follow_symlinks=False)
    return target


def make_environment(folder: Path, version: str, *, pip: bool) -> Environment:
    """A new virtual environment of that Python."""
    run(find_python(version), "-m", "venv", *([] if pip else ["--without-pip"]), folder)
    return Environment(folder)


def pip_wheel(
    environment: Environment, tree: Path, out: Path, *settings: str, cache: Path | None = None
) -> Path:
    """What `pip wheel` makes of a tree with what is installed, offline."""
    environ = {**os.environ, "PATH": os.pathsep.join([str(SCRIPTS), os.environ["PATH"]])}
    environ = {k: v for k, v in environ.items() if not k.startswith(("SONATA_", "PYTHONPATH"))}
    if cache:
        environ["SONATA_AOT_CACHE_DIR"] = str(cache)
    options = ["--no-index", "--no-deps", "--no-build-isolation", "--wheel-dir", out]
    given = [part for setting in settings for part in ("-C", setting)]
    run(*PIP, "--python", environment.python, "wheel", *options, *given, tree, env=environ, cwd=out)
    (path,) = out.glob("*.whl")
    return path


def link(found: Distribution, target: Path) -> None:
    tops = {Path(str(file)).parts[0] for file in found.files or ()}
    for top in tops - {"..", "__pycache__"}:
        (target / top).symlink_to(Path(str(found.locate_file(top))))


def link_all(name: str, target: Path) -> None:
    """Link a distribution and what it requires, as far as that is installed."""
    todo, seen = [name], set[str]()
    while todo:
        name = todo.pop()
        try:
            found = distribution(name)
        except PackageNotFoundError:  # for another platform
            continue
        if found.name in seen:
            continue
        seen.add(found.name)
        link(found, target)
        needs = map(Requirement, found.requires or ())
        todo += [need.name for need in needs if not need.marker or need.marker.evaluate()]


@dataclass(frozen=True)
class Install:
    """`install("3.12", *wheels)`: a clean environment with wheels, installed by pip.

    One for each Python, `purpose` and wheels in a test run; tests must not change it.
    """

    once: Once
    requirements: Path

    def __call__(
        self,
        version: str,
        *wheels: Path,
        purpose: str = "clean",
        path: tuple[Path, ...] = (),
        own_pip: bool = False,
    ) -> Environment:
        """`path`: folders to add to its packages afterwards.

        With `own_pip` by the pip that comes with that Python, which takes long to set up; else by
        this environment's, run by that Python.
        """

        def make(folder: Path) -> None:
            environment = make_environment(folder, version, pip=own_pip)
            pip = environment.folder / "bin" / "pip"
            command = [pip] if own_pip else [*PIP, "--python", environment.python]
            offline = ["--no-index", "--find-links", self.requirements]
            run(*command, "install", *offline, *wheels, env=environment.environ(), cwd=folder)
            environment.add_path(*path)

        return Environment(self.once(f"{purpose}-{version}", make))
