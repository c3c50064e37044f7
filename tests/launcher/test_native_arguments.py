"""Bad arguments are refused before the driver sees them, by name, value and remedy."""

from __future__ import annotations

from typing import Any

import pytest

from recording_libcuda import Recorder

ONE = "(1, 1, 1)"


def launch_failure(recorder: Recorder, arguments: str) -> dict[str, Any]:
    outcome = recorder.native(f"say(failure(first_kernel().launch, {arguments}))")
    assert outcome.named("cuLaunchKernel") == []
    assert outcome.value is not None, "the launch was accepted"
    return outcome.value


@pytest.mark.parametrize(
    ("grid", "block", "expected"),
    [
        ("(0, 1, 1)", ONE, ["grid.x", "is 0", "empty grid"]),
        ("(1, 0, 1)", ONE, ["grid.y", "is 0", "empty grid"]),
        ("(1, 1, 0)", ONE, ["grid.z", "is 0", "empty grid"]),
        ("(-1, 1, 1)", ONE, ["grid.x", "is -1", "at least 1"]),
        ("(2**31, 1, 1)", ONE, ["grid.x", "2147483648", "1 to 2147483647", "several launches"]),
        ("(2**32 + 1, 1, 1)", ONE, ["grid.x", "4294967297", "1 to 2147483647"]),
        ("(1, 65536, 1)", ONE, ["grid.y", "65536", "1 to 65535", "grid.x"]),
        ("(1, 1, 65536)", ONE, ["grid.z", "65536", "1 to 65535", "grid.x"]),
        ("(1, 10**30, 1)", ONE, ["grid.y", "above 2**63"]),
        ("(1, 1, -10**30)", ONE, ["grid.z", "below -2**63", "at least 1"]),
        (ONE, "(0, 1, 1)", ["block.x", "is 0", "at least 1"]),
        (ONE, "(1, -5, 1)", ["block.y", "is -5", "at least 1"]),
        (ONE, "(1025, 1, 1)", ["block.x", "1025", "1 to 1024", "smaller block"]),
        (ONE, "(1, 2**40, 1)", ["block.y", str(2**40), "1 to 1024"]),
        (ONE, "(1, 1, 65)", ["block.z", "65", "1 to 64"]),
        (ONE, "(1024, 2, 1)", ["block", "(1024, 2, 1)", "2048 threads", "smaller block"]),
        (ONE, "(1024, 1024, 64)", ["block", "67108864 threads"]),
        ("(1, 1)", ONE, ["grid", "2 extents", "three"]),
        (ONE, "(1, 1, 1, 1)", ["block", "4 extents", "three"]),
    ],
)
def test_grids_and_blocks(recorder: Recorder, grid: str, block: str, expected: list[str]) -> None:
    error = launch_failure(recorder, f"{grid}, {block}, 0, b''")
    assert error["type"] == "ArgumentError"
    assert "ValueError" in error["kinds"]
    for text in ["'first_kernel'", "'gemv'", *expected]:
        assert text in error["message"]
    assert error["remedy"]


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (f"{ONE}, {ONE}, -1, b''", ["stream", "'first_kernel'", "64-bit"]),
        (f"{ONE}, {ONE}, 2**64, b''", ["stream", "'first_kernel'", "64-bit"]),
        (f"{ONE}, {ONE}, 0, bytes(4097)", ["params", "'first_kernel'", "4097", "4096"]),
    ],
)
def test_streams_and_parameters(recorder: Recorder, arguments: str, expected: list[str]) -> None:
    error = launch_failure(recorder, arguments)
    assert error["type"] == "ArgumentError"
    for text in expected:
        assert text in error["message"]


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (f"[1, 1, 1], {ONE}, 0, b''", "grid must be a tuple of three ints, not 'list'"),
        (f"{ONE}, 128, 0, b''", "block must be a tuple of three ints, not 'int'"),
        (f"(1, 1.0, 1), {ONE}, 0, b''", "grid.y must be an int, not 'float'"),
        (f"{ONE}, (1, 1, None), 0, b''", "block.z must be an int, not 'NoneType'"),
        (f"{ONE}, {ONE}, 1.5, b''", "stream must be an int handle"),
        (f"{ONE}, {ONE}, 'default', b''", "stream must be an int handle"),
        (f"{ONE}, {ONE}, None, b''", "launch"),
        (f"{ONE}, {ONE}, 0, 'text'", "launch"),
        (f"{ONE}, {ONE}, 0, bytearray(8)", "launch"),
        (f"{ONE}, {ONE}, 0", "launch"),
    ],
)
def test_wrong_types(recorder: Recorder, arguments: str, expected: str) -> None:
    error = launch_failure(recorder, arguments)
    assert error["type"] == "TypeError"
    assert expected in error["message"]


@pytest.mark.parametrize(
    ("arguments", "kind", "expected"),
    [
        ("b'', 'gemv', 0", "ArgumentError", ["image", "'gemv'", "empty"]),
        ("IMAGE, 'gemv', 2", "ArgumentError", ["device", "'gemv'", "is 2", "2 devices"]),
        ("IMAGE, 'gemv', -1", "ArgumentError", ["device", "is -1", "CUDA_VISIBLE_DEVICES"]),
        ("IMAGE, 'gemv', 2**40", "TypeError", ["load"]),
        ("'text', 'gemv', 0", "TypeError", ["load"]),
        ("bytearray(IMAGE), 'gemv', 0", "TypeError", ["load"]),
        ("IMAGE, None, 0", "TypeError", ["load"]),
        ("IMAGE, 'gemv', 0, True", "TypeError", ["load"]),  # ptx is for keywords only
    ],
)
def test_loads(recorder: Recorder, arguments: str, kind: str, expected: list[str]) -> None:
    outcome = recorder.native(
        f"say(failure(native.load, {arguments}))", env={"SONATA_TEST_CUDA_DEVICES": "2"}
    )
    assert outcome.named("cuLibraryLoadData", "cuDevicePrimaryCtxRetain") == []
    assert outcome.value["type"] == kind
    for text in expected:
        assert text in outcome.value["message"]


@pytest.mark.parametrize(
    ("arguments", "kind", "expected"),
    [
        ("'', 0", "ArgumentError", ["entry", "'gemv'", "empty"]),
        ("'first_kernel\\0x', 0", "ArgumentError", ["entry", "'gemv'", "NUL"]),
        ("'first_kernel', -1", "ArgumentError", ["shared_bytes", "'first_kernel'", "-1"]),
        ("'first_kernel', 2**31", "ArgumentError", ["shared_bytes", "2147483648"]),
        ("'first_kernel', 10**30", "ArgumentError", ["shared_bytes", "above 2**63"]),
        ("'first_kernel', 1.5", "TypeError", ["shared_bytes must be an int, not 'float'"]),
        ("7, 0", "TypeError", ["kernel"]),
    ],
)
def test_entries(recorder: Recorder, arguments: str, kind: str, expected: list[str]) -> None:
    outcome = recorder.native(
        f"say(failure(native.load(IMAGE, 'gemv', 0).kernel, {arguments}))",
    )
    assert outcome.named("cuLibraryGetKernel") == []
    assert outcome.value["type"] == kind
    for text in expected:
        assert text in outcome.value["message"]


def test_objects_that_nobody_loaded(recorder: Recorder) -> None:
    outcome = recorder.native(
        f"""
        import copy, pickle, warnings
        warnings.simplefilter("ignore")
        kernel = first_kernel()
        empty = native.Kernel.__new__(native.Kernel)
        say([failure(action)["type"] for action in (
            native.Kernel,
            native.Library,
            lambda: empty.launch({ONE}, {ONE}, 0, b""),
            empty.attributes,
            lambda: native.Library.__new__(native.Library).kernel("first_kernel"),
            lambda: copy.copy(kernel),
            lambda: pickle.dumps(kernel),
            lambda: type("Mine", (native.Kernel,), {{}}),
        )])
        """
    )
    assert outcome.value == ["TypeError"] * 8
