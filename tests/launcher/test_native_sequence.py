"""Sequences: launches that are prepared once and issued by one call."""

from __future__ import annotations

import json
import struct

import pytest

from recording_libcuda import FIRST_CONTEXT, Recorder

# Two kernels of one library, with parameter blocks that two addresses go into.
SETUP = """
library = native.load(IMAGE, "gemv", 0)
first, second = library.kernel("first_kernel"), library.kernel("second_kernel", 70000)
BLOCK = bytes(range(32))
one = (first, (3, 5, 7), (32, 4, 2), BLOCK, ((8, 0, 0), (24, 1, 256)), False)
two = (second, (9, 1, 1), (64, 1, 1), BLOCK[:16], ((0, 1, 2**40),), True)
"""


def test_each_launch_gets_its_block_with_the_addresses_in_it(recorder: Recorder) -> None:
    outcome = recorder.native(
        SETUP + "native.Sequence([one, two], 2).launch(0x7F00DEADBEE8, (0x1000, 2**63))"
    )
    (plain,) = outcome.named("cuLaunchKernel")
    (early,) = outcome.named("cuLaunchKernelEx")
    assert (plain["entry"], early["entry"]) == ("first_kernel", "second_kernel")
    assert (plain["grid"], plain["block"], plain["shared"]) == ([3, 5, 7], [32, 4, 2], 0)
    assert (early["grid"], early["block"], early["shared"]) == ([9, 1, 1], [64, 1, 1], 70000)
    block = bytes(range(32))
    expected = block[:8] + struct.pack("<Q", 0x1000) + block[16:24] + struct.pack("<Q", 2**63 + 256)
    assert bytes.fromhex(plain["params"]) == expected
    assert bytes.fromhex(early["params"]) == struct.pack("<Q", 2**63 + 2**40) + block[8:16]
    assert early["attributes"] == [[6, 1]]
    for launch in (plain, early):
        assert (launch["stream"], launch["context"]) == (0x7F00DEADBEE8, FIRST_CONTEXT)


def test_the_context_is_changed_once_for_all(recorder: Recorder) -> None:
    outcome = recorder.native(
        SETUP
        + "sequence = native.Sequence([one, two, one], 2)\n"
        + "sequence.launch(0, (1, 2))\nassert current_context() == 0"
    )
    names = outcome.names[outcome.names.index("cuLaunchKernel") - 2 :]
    assert names[:6] == [
        "cuCtxGetCurrent",
        "cuCtxPushCurrent_v2",
        "cuLaunchKernel",
        "cuLaunchKernelEx",
        "cuLaunchKernel",
        "cuCtxPopCurrent_v2",
    ]


def test_nothing_is_changed_by_a_launch(recorder: Recorder) -> None:
    outcome = recorder.native(
        SETUP
        + """
sequence = native.Sequence([one], 2)
def work(address):
    for _ in range(50): sequence.launch(address, (address, address))
threads = [threading.Thread(target=work, args=(n << 20,)) for n in range(1, 5)]
for thread in threads: thread.start()
for thread in threads: thread.join()
"""
    )
    found = outcome.named("cuLaunchKernel")
    assert len(found) == 200
    for launch in found:
        addresses = struct.unpack_from("<8xQ8xQ", bytes.fromhex(launch["params"]))
        assert addresses == (launch["stream"], launch["stream"] + 256)


def test_a_failure_names_the_kernel_and_ends_the_sequence(recorder: Recorder) -> None:
    outcome = recorder.native(
        SETUP
        + """
sequence = native.Sequence([one, two, one], 2)
inject("cuLaunchKernelEx=700")
error = failure(sequence.launch, 5, (1, 2))
assert current_context() == 0
say(error)
"""
    )
    error = outcome.value
    assert error["type"] == "DriverError"
    for words in (
        "cuLaunchKernelEx failed with CUDA_ERROR_ILLEGAL_ADDRESS",
        "'second_kernel'",
        "grid (9, 1, 1)",
        "stream 0x5",
        "70000 bytes",
        "16 bytes of parameters",
    ):
        assert words in error["what"]
    assert len(outcome.named("cuLaunchKernel")) == 1


def test_no_launches_call_no_driver(recorder: Recorder) -> None:
    outcome = recorder.native("s = native.Sequence([], 2); s.launch(0, (1, 2)); say(repr(s))")
    assert outcome.value == "<Sequence of nothing>"
    assert outcome.calls == []


REFUSED = {
    "[one], 1": "operand 1 of 'first_kernel'",
    "[(first, (1, 1, 1), (1, 1, 1), bytes(12), ((8, 0, 0),), False)], 1": "an address at byte 8",
    "[(first, (1, 1, 1), (1, 1, 1), bytes(12), ((4, 0, 0),), False)], 1": "an address at byte 4",
    "[(first, (1, 1, 1), (1, 1, 1), bytes(5000), (), False)], 1": "5000 bytes",
    "[(first, (1, 1, 1), (1, 1, 1), bytes(4096), (), False)] * 5, 1": "20480 bytes",
    "[(first, (0, 1, 1), (1, 1, 1), b'', (), False)], 1": "grid.x",
    "[(first, (1, 1, 1), (1, 1, 99), b'', (), False)], 1": "block.z",
    "[one], 65": "65 operands",
    "[one, (first_kernel(device=1), *one[1:])], 2": "another device",
}


def test_what_does_not_fit_is_refused(recorder: Recorder) -> None:
    script = "".join(f"say(failure(lambda: native.Sequence({each})))\n" for each in REFUSED)
    outcome = recorder.native(SETUP + script, env={"SONATA_TEST_CUDA_DEVICES": "2"})
    for line, (arguments, words) in zip(outcome.stdout.splitlines(), REFUSED.items(), strict=True):
        error = json.loads(line)
        assert error is not None, arguments
        assert (error["type"], words in error["what"]) == ("ArgumentError", True), error


@pytest.mark.parametrize(
    "wrong",
    [
        "native.Sequence([3], 1)",
        "native.Sequence([(first,)], 1)",
        "native.Sequence([(3, *one[1:])], 2)",
        "native.Sequence([(*one[:3], 'text', *one[4:])], 2)",
        "native.Sequence([(*one[:4], ((1, 2),), False)], 2)",
        "native.Sequence([(*one[:4], ((-8, 0, 0),), False)], 2)",
        "native.Sequence((one,), 2)",
        "native.Sequence([one], 2).launch(0, (1,))",
        "native.Sequence([one], 2).launch(0, [1, 2])",
        "native.Sequence([one], 2).launch(0, (1, 'two'))",
        "native.Sequence([one], 2).launch('0', (1, 2))",
        "native.Sequence()",
        "native.Sequence.__new__(native.Sequence).launch(0, ())",
    ],
)
def test_wrong_types(recorder: Recorder, wrong: str) -> None:
    outcome = recorder.native(SETUP + f"say(failure(lambda: {wrong}))")
    assert outcome.value["type"] == "TypeError"
    assert not outcome.named("cuLaunchKernel", "cuLaunchKernelEx")


def test_addresses_out_of_range_are_refused(recorder: Recorder) -> None:
    outcome = recorder.native(
        SETUP + "say(failure(lambda: native.Sequence([one], 2).launch(0, (1, 2**64))))"
    )
    assert outcome.value["type"] == "OverflowError"
