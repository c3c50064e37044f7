from __future__ import annotations

import importlib.metadata
from pathlib import Path

import pytest

import sonata_aot.artifacts
from sonata_aot.artifacts.places import Place, cache_root, default_artifacts, search


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in ("SONATA_AOT_DIR", "SONATA_AOT_CACHE_DIR", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    return tmp_path


def test_the_default_is_the_users_cache(home: Path) -> None:
    assert cache_root() == home / ".cache" / "sonata-aot"
    assert default_artifacts() == home / ".cache" / "sonata-aot" / "artifacts"


def test_the_platforms_variable_moves_the_cache(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(home / "xdg"))
    assert cache_root() == home / "xdg" / "sonata-aot"


def test_the_cache_variable_moves_the_default_artifacts_too(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("SONATA_AOT_CACHE_DIR", "/elsewhere")
    assert cache_root() == Path("/elsewhere")
    assert default_artifacts() == Path("/elsewhere/artifacts")


def test_the_artifact_variable_beats_the_cache_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SONATA_AOT_CACHE_DIR", "/elsewhere")
    monkeypatch.setenv("SONATA_AOT_DIR", "/named")
    assert default_artifacts() == Path("/named")
    assert cache_root() == Path("/elsewhere")


def test_nothing_is_created_by_asking(home: Path) -> None:
    assert len([*search(None)]) == 2
    default_artifacts()
    assert list(home.iterdir()) == []


def test_search_order_is_the_wheel_and_then_the_cache(home: Path) -> None:
    bundled = Path(sonata_aot.artifacts.__file__).resolve().parent / "bundled"
    assert tuple(search(None)) == (
        Place(bundled, "the installed wheel", named=False),
        Place(home / ".cache" / "sonata-aot" / "artifacts", "the user cache", named=False),
    )


def test_a_place_that_somebody_named_is_the_only_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SONATA_AOT_DIR", "/named")
    assert tuple(search(None)) == (Place(Path("/named"), "SONATA_AOT_DIR", named=True),)
    assert tuple(search(Path("/given"))) == (Place(Path("/given"), "the path given", named=True),)


@pytest.fixture
def data_wheels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Two installed wheels of artifacts, and one whose package is gone."""
    site = tmp_path / "site"
    for name, package in (("b-set", "b_set"), ("a-set", "a_set"), ("c-set", None)):
        info = site / f"{name.replace('-', '_')}-1.dist-info"
        info.mkdir(parents=True)
        (info / "METADATA").write_text(f"Name: {name}\nVersion: 1\n")
        (info / "entry_points.txt").write_text(
            f"[sonata_aot.artifacts]\n{name} = {package or 'gone'}\n"
        )
        if package:
            (site / package).mkdir()
            (site / package / "__init__.py").write_text("raise RuntimeError('imported')\n")
    monkeypatch.syspath_prepend(site)
    return site


def test_wheels_of_artifacts_alone_come_after_the_tools_own(data_wheels: Path) -> None:
    found = [(place.path, place.origin, place.named) for place in search(None)]
    assert found[1:-1] == [
        (data_wheels / "a_set" / "artifacts", "the installed a-set", False),
        (data_wheels / "b_set" / "artifacts", "the installed b-set", False),
    ]


def test_they_are_not_looked_for_where_the_first_place_will_do(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(importlib.metadata, "entry_points", None)
    assert next(iter(search(None))).origin == "the installed wheel"
    with pytest.raises(TypeError):
        list(search(None))
