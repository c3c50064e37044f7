"""The build backend's settings."""

from __future__ import annotations

import errno
import importlib.util
import json
import os
import subprocess
import tomllib
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement

from packaging_runs import ROOT, Environment

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
PINS = PROJECT["project"]["optional-dependencies"]["build"]
FILE = ROOT / "aot" / "backend" / "sonata_backend.py"


@pytest.fixture
def backend(monkeypatch: pytest.MonkeyPatch) -> Any:
    spec = importlib.util.spec_from_file_location("sonata_backend", FILE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.chdir(ROOT)  # as a front end does
    return module


@pytest.mark.parametrize(
    ("settings", "options", "rest"),
    [
        (None, [], {}),
        ({}, [], {}),
        ({"build-dir": "b"}, [], {"build-dir": "b"}),
        ({"arch": ""}, [], {}),
        ({"arch": "sm86", "build-dir": "b"}, ["--arch=sm86"], {"build-dir": "b"}),
        ({"arch": ["sm86", "9.0"]}, ["--arch=sm86", "--arch=9.0"], {}),
        ({"arch": "8.6;9.0, sm89"}, ["--arch=8.6", "--arch=9.0", "--arch=sm89"], {}),
        ({"arch": "sm86", "all": "1"}, ["--arch=sm86", "--all"], {}),
        ({"arch": "sm86", "all": "false"}, ["--arch=sm86"], {}),
        (
            {"arch": "sm86", "kernel": ["a", "b"], "platform": "p"},
            ["--arch=sm86", "--kernel", "a", "--kernel", "b", "--platform", "p"],
            {},
        ),
    ],
)
def test_settings(backend: Any, settings: Any, options: list[str], rest: Any) -> None:
    assert backend._split(settings) == (options, rest)


@pytest.mark.parametrize(
    ("settings", "says"),
    [({"kernel": "gemv"}, "needs -C arch"), ({"arch": "sm86", "all": "maybe"}, "set it to 1 or 0")],
)
def test_settings_that_are_wrong(backend: Any, settings: Any, says: str) -> None:
    with pytest.raises(SystemExit, match=says):
        backend._split(settings)


def test_the_compiler_of_kernels_is_required_only_for_an_arch(backend: Any) -> None:
    plain = backend.get_requires_for_build_wheel()
    assert not [need for need in plain if "nvidia" in need or "click" in need]
    assert set(PINS) <= set(backend.get_requires_for_build_wheel({"arch": "sm86"}))
    assert not [x for x in backend.get_requires_for_build_wheel({"arch": "sm86"}) if "audit" in x]
    with_platform = backend.get_requires_for_build_wheel({"arch": "sm86", "platform": "p"})
    assert [need for need in with_platform if need.startswith("auditwheel>=")]


def test_an_sdist_may_be_given_the_settings_of_its_wheel(backend: Any, tmp_path: Path) -> None:
    name = backend.build_sdist(str(tmp_path), {"arch": "sm86"})
    assert (tmp_path / name).exists()
    assert backend.get_requires_for_build_sdist({"arch": "sm86"}) == []


@pytest.mark.parametrize(("text", "used"), [(None, "315532800"), ("", "315532800"), ("7", "7")])
def test_the_time_that_is_used(
    backend: Any, monkeypatch: pytest.MonkeyPatch, text: str | None, used: str
) -> None:
    seen: list[str] = []

    def note(*arguments: object) -> str:
        seen.append(os.environ["SOURCE_DATE_EPOCH"])
        return "name"

    for name in ("build_sdist", "build_wheel"):
        monkeypatch.setattr(backend.launcher, name, note)
    if text is None:
        monkeypatch.delenv("SOURCE_DATE_EPOCH", raising=False)
    else:
        monkeypatch.setenv("SOURCE_DATE_EPOCH", text)
    backend.build_sdist("folder")
    backend.build_wheel("folder")
    assert seen == [used, used]
    assert os.environ.get("SOURCE_DATE_EPOCH") == text  # whoever called goes on as before


def test_an_editable_install_has_no_arch(backend: Any, tmp_path: Path) -> None:
    for hook in (
        backend.get_requires_for_build_editable,
        lambda settings: backend.prepare_metadata_for_build_editable(str(tmp_path), settings),
        lambda settings: backend.build_editable(str(tmp_path), settings),
    ):
        with pytest.raises(SystemExit, match="`sonata-aot build` makes the artifacts"):
            hook({"arch": "sm86"})
    assert backend.get_requires_for_build_editable({"arch": ""}) == (
        backend.launcher.get_requires_for_build_editable({})
    )


class TestSteps:
    """What a wheel with kernels is made in, and where; the parts themselves are stood in for."""

    @pytest.fixture
    def steps(self, backend: Any, monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
        steps: list[list[str]] = []

        def tool(command: list[str], folder: Path) -> str:
            steps.append(command)
            if command[0] == "plan":
                return ""
            out = Path(command[command.index("--out") + 1])
            out.mkdir()
            (out / "a.whl").write_bytes(b"wheel")
            return json.dumps({"wheel": str(out / "a.whl")})

        def build(folder: str, *rest: object) -> str:
            steps.append(["launcher"])
            return "base.whl"

        monkeypatch.setattr(backend, "_tool", tool)
        monkeypatch.setattr(backend.launcher, "build_wheel", build)
        return steps

    def test_the_selection_is_looked_at_before_the_launcher_is_compiled(
        self, backend: Any, steps: list[list[str]], tmp_path: Path
    ) -> None:
        settings = {"arch": "sm86", "platform": "p", "kernel": "gemv", "signing-key": "k"}
        assert backend.build_wheel(str(tmp_path), settings) == "a.whl"
        assert [step[0] for step in steps] == ["plan", "launcher", "wheel"]
        assert steps[0][4:] == ["--arch=sm86", "--kernel", "gemv"]
        assert {"--platform", "p", "--signing-key", "k"} <= set(steps[2])

    def test_it_may_go_to_another_file_system(
        self,
        backend: Any,
        steps: list[list[str]],
        tmp_path: Path,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        def refuse(*places: object) -> None:
            raise OSError(errno.EXDEV, os.strerror(errno.EXDEV))

        for name in ("rename", "replace", "link"):
            monkeypatch.setattr(os, name, refuse)
        backend.build_wheel(str(tmp_path), {"arch": "sm86"})
        assert (tmp_path / "a.whl").read_bytes() == b"wheel"


def test_its_settings_are_options_of_the_command(backend: Any) -> None:
    from sonata_aot.aot.wheel_cli import wheel

    known = {name for item in wheel.params for name in item.opts}
    assert {f"--{name}" for name in backend._OURS} <= known


def test_the_epoch_is_that_of_the_tool(backend: Any) -> None:
    from sonata_aot.artifacts import environment

    assert int(backend._EPOCH) == environment.SOURCE_DATE_EPOCH.default


def test_what_builds_the_launcher_is_there_for_tests_and_make_wheels() -> None:
    extras = PROJECT["project"]["optional-dependencies"]
    assert set(PROJECT["build-system"]["requires"]) <= set(extras["launcher"])
    assert "launcher" in Requirement(extras["test"][0]).extras


def test_it_does_not_take_another_trees_tool(builder: Environment, tmp_path: Path) -> None:
    # A finder such as that of an editable install comes before all folders.
    hook = "import sys, types\nsys.modules['sonata_aot'] = found = types.ModuleType('sonata_aot')\n"
    other = tmp_path / "other" / "aot"
    other.mkdir(parents=True)
    (other / "__init__.py").write_text("")
    hook += f"found.__path__ = [{str(other.parent)!r}]\n"
    (tmp_path / "sitecustomize.py").write_text(hook)
    script = (
        "import pathlib, sys; sys.path.insert(0, sys.argv[1]); import sonata_backend as b; "
        "b._tool(['--version'], pathlib.Path(sys.argv[2]))"
    )
    done = subprocess.run(
        [builder.python, "-c", script, FILE.parent, tmp_path],
        env={"PYTHONPATH": str(tmp_path), "PATH": "/usr/bin:/bin"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode != 0
    assert "another sonata-aot is installed here for development" in done.stderr


def test_the_prepared_metadata_are_those_of_the_wheel(
    backend: Any, wheel_311: Path, tmp_path: Path
) -> None:
    from sonata_aot.aot.wheel_file import read_wheel

    folder = backend.prepare_metadata_for_build_wheel(str(tmp_path), {"arch": "sm86"})
    wheel = read_wheel(wheel_311)
    for name in ("METADATA", "WHEEL", "entry_points.txt"):
        assert (tmp_path / folder / name).read_bytes() == wheel.files[f"{wheel.dist_info}/{name}"]
    assert json.loads(wheel.files[f"{wheel.dist_info}/sboms/launcher.cdx.json"])
