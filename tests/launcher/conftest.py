"""Fixtures of the launcher's tests: subprocesses that run against the recording driver."""

from __future__ import annotations

from pathlib import Path

import pytest

from recording_libcuda import Recorder


@pytest.fixture
def recorder(recording_library: Path, tmp_path: Path) -> Recorder:
    return Recorder(recording_library, tmp_path)
