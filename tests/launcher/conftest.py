"""Fixtures of the launcher's tests: subprocesses that run against the recording driver."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1]))  # tests/, for recording_libcuda

from recording_libcuda import Recorder, build


@pytest.fixture(scope="session")
def recording_library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(tmp_path_factory.mktemp("recording"))


@pytest.fixture
def recorder(recording_library: Path, tmp_path: Path) -> Recorder:
    return Recorder(recording_library, tmp_path)
