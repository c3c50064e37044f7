"""The native call on a real device: it launches where torch is, and what it was given."""

from __future__ import annotations

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
