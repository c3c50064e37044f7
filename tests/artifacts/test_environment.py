from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from sonata_aot.artifacts import environment
from sonata_aot.artifacts.environment import ALL, Variable
from sonata_aot.artifacts.errors import ArgumentError


@pytest.mark.parametrize("variable", ALL, ids=lambda variable: variable.name)
@pytest.mark.parametrize("empty", [True, False])
def test_unset_and_empty_are_the_default(
    monkeypatch: pytest.MonkeyPatch, variable: Variable[Any], empty: bool
) -> None:
    monkeypatch.setenv(variable.name, "") if empty else monkeypatch.delenv(variable.name, False)
    assert variable.get() == variable.default


def test_each_variable_is_declared_once_and_documented() -> None:
    names = [variable.name for variable in ALL]
    assert len(set(names)) == len(names)
    declared = {name for name, value in vars(environment).items() if isinstance(value, Variable)}
    assert declared == set(names)
    for variable in ALL:
        assert getattr(environment, variable.name) is variable
        assert variable.doc.endswith(".")
        assert variable.expects


@pytest.mark.parametrize(
    ("name", "text", "value"),
    [
        ("SONATA_AOT_DIR", "/a/b", Path("/a/b")),
        ("SONATA_AOT_DIR", "relative", Path("relative")),
        ("SONATA_AOT_DIR", "~/x", Path("/home/me/x")),
        ("SONATA_AOT_CACHE_DIR", "/a b", Path("/a b")),
        ("SONATA_AOT_LOG_LEVEL", "Debug", "debug"),
        ("SONATA_AOT_LOG_LEVEL", " error ", "error"),
        ("SONATA_AOT_DISABLE", "1", True),
        ("SONATA_AOT_DISABLE", "On", True),
        ("SONATA_AOT_DISABLE", "0", False),
        ("MAX_JOBS", "1", 1),
        ("MAX_JOBS", " 16 ", 16),
        ("TORCH_CUDA_ARCH_LIST", "8.6;9.0+PTX", "8.6;9.0+PTX"),
        ("NO_COLOR", "0", True),
        ("NO_COLOR", " ", True),
    ],
)
def test_a_value_is_read_as_its_type(
    monkeypatch: pytest.MonkeyPatch, name: str, text: str, value: object
) -> None:
    monkeypatch.setenv("HOME", "/home/me")
    monkeypatch.setenv(name, text)
    found = getattr(environment, name).get()
    assert found == value
    assert type(found) is type(value)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("MAX_JOBS", "0"),
        ("MAX_JOBS", "-2"),
        ("MAX_JOBS", "many"),
        ("MAX_JOBS", "2.5"),
        ("MAX_JOBS", "9" * 5000),
        ("SONATA_AOT_LOG_LEVEL", "loud"),
        ("SONATA_AOT_LOG_LEVEL", "10"),
        ("SONATA_AOT_DISABLE", "2"),
        ("SONATA_AOT_DIR", "~no-such-user-here/x"),
    ],
)
def test_a_wrong_value_is_an_error_that_names_it(
    monkeypatch: pytest.MonkeyPatch, name: str, text: str
) -> None:
    monkeypatch.setenv(name, text)
    with pytest.raises(ArgumentError) as caught:
        getattr(environment, name).get()
    assert f"environment variable {name}={text!r}" == caught.value.what
    assert caught.value.remedy == f"set it to {getattr(environment, name).expects}"


def test_the_environment_is_read_when_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MAX_JOBS", "3")
    assert environment.MAX_JOBS.get() == 3
    monkeypatch.setenv("MAX_JOBS", "4")
    assert environment.MAX_JOBS.get() == 4
