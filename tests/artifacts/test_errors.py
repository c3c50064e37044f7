from __future__ import annotations

import inspect
import pickle

import pytest

from sonata_aot.artifacts import errors
from sonata_aot.artifacts.errors import (
    ArgumentError,
    ArtifactError,
    DriverError,
    IntegrityError,
    ManifestError,
    SonataError,
    UntrustedPath,
    UsageError,
)

ALL = [
    value
    for value in vars(errors).values()
    if inspect.isclass(value) and issubclass(value, Exception)
]


@pytest.mark.parametrize("kind", ALL)
def test_every_error_is_a_sonata_error_with_a_remedy(kind: type[SonataError]) -> None:
    error = kind("x is wrong", remedy="correct x")
    assert isinstance(error, SonataError)
    assert (error.what, error.remedy) == ("x is wrong", "correct x")
    assert str(error) == "x is wrong; correct x"
    assert kind.__doc__


@pytest.mark.parametrize("kind", ALL)
def test_every_error_survives_the_way_home_from_a_worker(kind: type[SonataError]) -> None:
    error = kind("x is wrong", remedy="correct x")
    error.__dict__["code"] = 700
    again = pickle.loads(pickle.dumps(error))
    assert type(again) is kind
    assert (str(again), again.what, again.remedy) == (str(error), error.what, error.remedy)
    assert vars(again)["code"] == 700


def test_a_remedy_is_required() -> None:
    with pytest.raises(TypeError):
        SonataError("x is wrong")  # pyright: ignore[reportCallIssue]


@pytest.mark.parametrize("kind", ALL)
def test_only_usage_errors_exit_with_two(kind: type[SonataError]) -> None:
    assert kind.exit_code == (2 if kind is UsageError else 1)


def test_kinds_that_callers_catch_together() -> None:
    assert issubclass(ArgumentError, ValueError)
    for kind in (ManifestError, IntegrityError, UntrustedPath):
        assert issubclass(kind, ArtifactError)
    error = DriverError("cuInit failed", remedy="install a driver")
    assert (error.code, error.name, error.text) == (0, "", "")
