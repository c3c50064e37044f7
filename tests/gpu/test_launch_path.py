"""The native call on a real device: it launches where torch is, and what it was given."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest

from gemv_cases import torch
from sonata_aot.loader import Kernels, direct, runtime

N, K = 512, 1024


@pytest.fixture
def operands():
    x = torch.randn(2, K, device="cuda", dtype=torch.bfloat16)
    weight = torch.randn(N, K, device="cuda", dtype=torch.bfloat16)
    return x, weight, torch.empty(2, N, device="cuda", dtype=torch.bfloat16)


def close(y, x, weight) -> bool:
    expected = x.double() @ weight.double().T
    return bool((y.double() - expected).norm() <= 2**-8 * expected.norm())


def calls(kernels: Kernels, x, weight, out):
    """Ways to launch the same, each past its first calls, which Python checks."""
    bound = kernels.gemv.bind(weight, out=out)
    found = [lambda: kernels.gemv(x, weight, out=out), lambda: bound(x)]
    for call in found:
        for _ in range(3):
            call()
    return found


def test_the_stream_is_torchs(kernels: Kernels):
    asked = direct.make_torch()
    device = torch.cuda.current_device()
    streams = [torch.cuda.default_stream(), torch.cuda.Stream(), torch.cuda.Stream(priority=-1)]
    for stream in (*streams, *streams):
        with torch.cuda.stream(stream):
            found = asked.current_stream(device), runtime.current_stream(device)
            assert found == (stream.cuda_stream, stream.cuda_stream)
    for enabled in (True, False):
        with torch.set_grad_enabled(enabled):
            assert asked.is_grad_enabled() is enabled


def test_known_calls_follow_what_precedes_them_on_a_side_stream(kernels: Kernels, operands):
    fresh, weight, out = operands
    x = torch.zeros_like(fresh)
    for call in calls(kernels, x, weight, out):
        x.zero_()
        out.fill_(float("nan"))
        side = torch.cuda.Stream()
        torch.cuda.synchronize()
        with torch.cuda.stream(side):
            torch.cuda._sleep(50_000_000)
            x.copy_(fresh)
            call()
        side.synchronize()
        assert close(out, fresh, weight)


def test_known_calls_are_captured_and_follow_changed_inputs(kernels: Kernels, operands):
    x, weight, out = operands
    for call in calls(kernels, x, weight, out):
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for _ in range(116):
                call()
        seen = []
        for _ in range(2):
            x.normal_()
            out.fill_(float("nan"))
            graph.replay()
            torch.cuda.synchronize()
            assert close(out, x, weight)
            seen.append(out.clone())
        assert not torch.equal(*seen)


def test_graphs_of_one_pool_captured_on_a_thread_follow_changed_inputs(kernels: Kernels, operands):
    """As a server does it: warm up on a stream, capture on a worker, and replay as requests come.

    Outputs are allocated in the pool that both graphs share, which are replayed in the order of
    their captures. The second one's first call with its number of rows is within its capture.
    """
    x, weight, _ = operands
    row = torch.randn(1, K, device="cuda", dtype=torch.bfloat16)
    bound = kernels.gemv.bind(weight)
    warm = torch.cuda.Stream()
    warm.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(warm):
        for _ in range(3):
            kernels.gemv(x, weight)
            bound(x)
    torch.cuda.synchronize()

    def work():
        pool, found = torch.cuda.graph_pool_handle(), []
        for given in (x, row):
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
                made = [kernels.gemv(given, weight), bound(given)]
            found.append((graph, given, made))
        return found

    with ThreadPoolExecutor(1) as thread:
        captured = thread.submit(work).result()
    seen = []
    for _ in range(2):
        for graph, given, made in captured:
            given.normal_()
            for y in made:
                y.fill_(float("nan"))
            graph.replay()
            torch.cuda.synchronize()
            for y in made:
                assert close(y, given, weight)
                seen.append(y.clone())
    # Each replay gave other results than the one before it.
    for one, other in zip(seen[:4], seen[4:], strict=True):
        assert not torch.equal(one, other)


def test_an_output_is_allocated_and_is_another_each_time(kernels: Kernels, operands):
    x, weight, _ = operands
    bound = kernels.gemv.bind(weight)
    for call in (lambda: kernels.gemv(x, weight), lambda: bound(x)):
        found = [call() for _ in range(4)]
        torch.cuda.synchronize()
        assert len({y.data_ptr() for y in found}) == 4
        assert all(close(y, x, weight) for y in found)


def test_a_write_by_torch_ends_a_bound_weight_natively(kernels: Kernels, operands):
    x, weight, out = operands
    bound = kernels.gemv.bind(weight, out=out)
    for _ in range(3):
        bound(x)
    weight.mul_(2)
    bound(x)
    torch.cuda.synchronize()
    assert close(out, x, weight)
    assert not bound.constant
