"""Which artifacts a command reads that is not told: those that a loader would take."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from sonata_aot.artifacts import places

if TYPE_CHECKING:
    from tests.aot.conftest import Invoke


@pytest.fixture
def wheels(built: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The place of a wheel's artifacts, with some in it; the user's cache has none."""
    monkeypatch.delenv("SONATA_AOT_DIR", raising=False)
    monkeypatch.setenv("SONATA_AOT_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(places, "_BUNDLED", tmp_path / "bundled")
    shutil.copytree(built, tmp_path / "bundled")
    return tmp_path / "bundled"


def test_an_installed_wheels_are_read(invoke: Invoke, wheels: Path) -> None:
    result = invoke("list", "--json")
    assert result.exit_code == 0
    assert json.loads(result.stdout)["directory"] == str(wheels)


def test_a_directory_that_is_named_comes_first(
    wheels: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SONATA_AOT_DIR", str(tmp_path / "named"))
    assert places.artifacts_to_read() == tmp_path / "named"


def test_without_a_wheel_it_is_where_builds_publish(wheels: Path, tmp_path: Path) -> None:
    shutil.rmtree(wheels)
    assert places.artifacts_to_read() == tmp_path / "cache" / "artifacts"
