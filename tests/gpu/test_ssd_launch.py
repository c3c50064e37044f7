"""Streams, graphs, threads and memory of the scan on a real device."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from sonata_aot.artifacts.errors import ArgumentError
from sonata_aot.loader import Kernels
from ssd_problems import NAN, check, errors, problem, segments, sequences, torch, tuple_of


def good(returned: Any, arguments: dict[str, Any]) -> bool:
    return max(errors(returned, arguments)) <= 4e-3


def test_a_captured_graph_follows_changed_inputs(kernels: Kernels):
    """Whole, in segments, and with copies; planned inside the capture."""
    plain = problem(2, 300, D=True, z=True, initial_states=torch.float32)
    odd = {**plain, "x": plain["x"].transpose(1, 3).contiguous().transpose(1, 3)}
    for arguments, count in ((plain, 1), (plain, 4), (odd, 1)):
        with segments(kernels, count):
            # PTX is compiled at first use, which a capture would not survive; all else is new.
            kernels.mamba_chunk_scan_combined(**arguments)
            kernels.mamba_chunk_scan_combined._plans.clear()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                returned = tuple_of(kernels.mamba_chunk_scan_combined(**arguments))
            seen = []
            for _ in range(3):
                for name in ("x", "B", "C", "z", "dt"):
                    arguments[name].normal_()
                for result in returned:
                    result.fill_(NAN)
                graph.replay()
                torch.cuda.synchronize()
                assert good(returned, arguments)
                seen.append(returned[0].clone())
            assert not torch.equal(seen[0], seen[1])


def test_sequences_in_a_graph_may_get_other_bounds(kernels: Kernels):
    arguments = problem(1, 200, return_varlen_states=True) | sequences(50, 100, 50)
    kernels.mamba_chunk_scan_combined(**arguments)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        returned = kernels.mamba_chunk_scan_combined(**arguments)
    for lengths in ((50, 100, 50), (1, 2, 197), (64, 64, 72)):
        for name, tensor in sequences(*lengths).items():
            arguments[name].copy_(tensor)
        graph.replay()
        torch.cuda.synchronize()
        assert good(returned, arguments)


def test_many_scans_in_one_capture(kernels: Kernels):
    many = [problem(1, 64 + i, 3, D=True) for i in range(40)]
    kernels.mamba_chunk_scan_combined(**many[0])
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        returned = [kernels.mamba_chunk_scan_combined(**arguments) for arguments in many]
    graph.replay()
    torch.cuda.synchronize()
    assert all(good(*each) for each in zip(returned, many, strict=True))


def test_runs_on_the_current_stream_after_what_precedes_it(kernels: Kernels):
    arguments = problem(2, 200, D=True)
    fresh = torch.randn_like(arguments["x"])
    arguments["x"].zero_()
    side = torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(side):
        torch.cuda._sleep(50_000_000)  # about 30 ms: any other stream would read the zeros
        arguments["x"].copy_(fresh)
        returned = kernels.mamba_chunk_scan_combined(**arguments)
    side.synchronize()
    assert good(returned, arguments)


def test_does_not_synchronise(kernels: Kernels):
    arguments = problem(2, 200)
    kernels.mamba_chunk_scan_combined(**arguments)
    torch.cuda.synchronize()
    torch.cuda._sleep(200_000_000)
    done = torch.cuda.Event()
    kernels.mamba_chunk_scan_combined(**arguments)
    done.record()
    assert not done.query()
    torch.cuda.synchronize()


def test_two_streams_at_once(kernels: Kernels):
    """Workspaces of calls that overlap in time are not shared."""
    streams = [torch.cuda.Stream() for _ in range(2)]
    with segments(kernels, 4):
        many = [problem(1, 2000, 4, D=True, initial_states=torch.float32) for _ in range(8)]
        torch.cuda.synchronize()
        returned = []
        for _ in range(5):
            returned.clear()
            for i, arguments in enumerate(many):
                with torch.cuda.stream(streams[i % 2]):
                    returned.append(kernels.mamba_chunk_scan_combined(**arguments))
        torch.cuda.synchronize()
        assert all(good(*each) for each in zip(returned, many, strict=True))


def test_threads_on_streams_of_their_own(kernels: Kernels):
    failed: list[object] = []

    def work(seed: int) -> None:
        try:
            with torch.cuda.stream(torch.cuda.Stream()):
                for i in range(10):
                    arguments = problem(1 + i % 2, 1 + (37 * seed + 50 * i) % 300, 4, D=True)
                    returned = kernels.mamba_chunk_scan_combined(**arguments)
                    assert good(returned, arguments)
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failed


def test_equal_inputs_give_equal_bits(kernels: Kernels):
    arguments = problem(2, 1000, D=True, z=True, initial_states=torch.float32)
    for count in (1, 5):
        with segments(kernels, count):
            first = tuple_of(kernels.mamba_chunk_scan_combined(**arguments))
            for _ in range(10):
                again = tuple_of(kernels.mamba_chunk_scan_combined(**arguments))
                assert all(torch.equal(a, b) for a, b in zip(again, first, strict=True))


def test_nothing_is_left_behind_by_a_call(kernels: Kernels):
    arguments = problem(2, 300, D=True)
    kernels.mamba_chunk_scan_combined(**arguments)
    before = torch.cuda.memory_allocated()
    for _ in range(10):
        kernels.mamba_chunk_scan_combined(**arguments)
    assert torch.cuda.memory_allocated() == before


def test_inputs_are_left_alone(kernels: Kernels):
    arguments = problem(2, 300, D=True, z=True, initial_states=torch.bfloat16)
    tensors = {name: value for name, value in arguments.items() if isinstance(value, torch.Tensor)}
    before = {name: value.clone() for name, value in tensors.items()}
    with segments(kernels, 3):
        check(kernels, arguments)
    assert all(torch.equal(value, before[name]) for name, value in tensors.items())


def test_a_refused_call_harms_nothing(kernels: Kernels):
    arguments = problem(2, 100)
    for change in ({"D": torch.zeros(3)}, {"chunk_size": 0}, {"A": arguments["A"].cpu()}):
        with pytest.raises(ArgumentError, match=r".*; .+"):
            kernels.mamba_chunk_scan_combined(**{**arguments, **change})
    check(kernels, arguments)
