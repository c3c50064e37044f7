"""Streams, graphs, threads and refused arguments of the GEMV on a real device."""

from __future__ import annotations

import threading

import pytest

from gemv_cases import launch, settled, torch
from sonata_aot.artifacts.errors import ArgumentError, SonataError, VariantMissing
from sonata_aot.loader import Kernels

N, K = 512, 1024


@pytest.fixture
def operands():
    x = torch.randn(2, K, device="cuda", dtype=torch.bfloat16)
    weight = torch.randn(N, K, device="cuda", dtype=torch.bfloat16)
    return x, weight


def close(y, x, weight) -> bool:
    expected = x.double() @ weight.double().T
    return bool((y.double() - expected).norm() <= 2**-8 * expected.norm())


def test_runs_on_the_current_stream_after_what_precedes_it(kernels: Kernels, operands):
    fresh, weight = operands
    x = torch.zeros_like(fresh)
    side = torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(side):
        torch.cuda._sleep(50_000_000)  # about 30 ms: any other stream would read the zeros
        x.copy_(fresh)
        y = kernels.gemv(x, weight)
    side.synchronize()
    assert close(y, fresh, weight)


def test_does_not_synchronise(kernels: Kernels, operands):
    x, weight = operands
    out = kernels.gemv(x, weight)
    torch.cuda.synchronize()
    torch.cuda._sleep(200_000_000)
    done = torch.cuda.Event()
    kernels.gemv(x, weight, out=out)
    done.record()
    assert not done.query()
    torch.cuda.synchronize()


def test_graph_captured_on_another_stream_follows_changed_inputs(kernels: Kernels, operands):
    x, weight = operands
    out = torch.empty(2, N, device="cuda", dtype=torch.bfloat16)
    kernels.gemv(x, weight, out=out)  # warm on the default stream; captured on the graph's own
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kernels.gemv(x, weight, out=out)
    seen = []
    for _ in range(3):
        x.normal_()
        out.fill_(float("nan"))
        graph.replay()
        torch.cuda.synchronize()
        assert close(out, x, weight)
        seen.append(out.clone())
    assert not torch.equal(seen[0], seen[1])


def test_allocates_from_the_graphs_pool_under_capture(kernels: Kernels, operands):
    x, weight = operands
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = kernels.gemv(x, weight)
    x.normal_()
    graph.replay()
    torch.cuda.synchronize()
    assert close(y, x, weight)


def test_116_launches_in_one_capture(kernels: Kernels, operands):
    x, weight = operands
    outs = [torch.full((2, N), float("nan"), device="cuda", dtype=x.dtype) for _ in range(116)]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for out in outs:
            kernels.gemv(x, weight, out=out)
    graph.replay()
    torch.cuda.synchronize()
    assert all(close(out, x, weight) for out in outs)


def test_a_thread_that_never_touched_cuda_can_launch(kernels: Kernels, operands):
    x, weight = operands
    results: list[object] = []

    def work() -> None:
        try:
            results.append(kernels.gemv(x, weight))
        except BaseException as error:
            results.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    torch.cuda.synchronize()
    assert isinstance(results[0], torch.Tensor), results
    assert close(results[0], x, weight)


def test_many_threads_launch_on_streams_of_their_own(kernels: Kernels):
    failed: list[object] = []

    def work(seed: int) -> None:
        try:
            with torch.cuda.stream(torch.cuda.Stream()):
                for i in range(30):
                    # Sizes that no thread has had yet, or that all ask for at once.
                    n, k = 64 + i, 8 * (1 + (seed * i) % 64) + (i % 3 == 2)
                    x = torch.randn(1 + i % 8, k, device="cuda", dtype=torch.bfloat16)
                    weight = torch.randn(n, k, device="cuda", dtype=torch.bfloat16)
                    y = kernels.gemv(x, weight)
                    bound = settled(kernels.gemv.bind(weight), x)(x)
                    assert close(y, x, weight)
                    assert close(bound, x, weight)
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failed


def test_bound_calls_in_a_graph_follow_changed_inputs(kernels: Kernels, operands):
    x, weight = operands
    bias = torch.randn(N, device="cuda", dtype=torch.bfloat16)
    bound = kernels.gemv.bind(weight, bias)
    out = bound(x)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        bound(x, out)
    for _ in range(3):
        x.normal_()
        bias.normal_()
        out.fill_(float("nan"))
        graph.replay()
        expected = x.double() @ weight.double().T + bias.double()
        assert (out.double() - expected).norm() <= 2**-8 * expected.norm()


def test_nothing_is_left_behind_by_a_call(kernels: Kernels, operands):
    x, weight = operands
    out, bound = kernels.gemv(x, weight), kernels.gemv.bind(weight)
    bound(x, out)
    before = torch.cuda.memory_allocated()
    for _ in range(10):
        kernels.gemv(x, weight, out=out)
        bound(x, out)
        kernels.gemv(x, weight)
    assert torch.cuda.memory_allocated() == before


def refused(x, weight):
    """Calls that must be refused: name, arguments, a word of the message."""
    cpu = torch.zeros(1, K, dtype=torch.bfloat16)
    bias = torch.zeros(N, device="cuda", dtype=torch.bfloat16)
    return {
        "not a tensor": ((x, [1.0]), "list"),
        "cpu x": ((cpu, weight), "cpu"),
        "cpu weight": ((x, weight.cpu()), "cpu"),
        "float32": ((x.float(), weight.float()), "float32"),
        "complex": ((x.to(torch.complex64), weight.to(torch.complex64)), "complex"),
        "mixed dtypes": ((x, weight.half()), "float16"),
        "one dimension": ((x[0], weight), "dimension"),
        "three dimensions": ((x[None], weight), "dimension"),
        "other K": ((x[:, :512], weight), "shape"),
        "no K": ((x[:, :0], weight[:, :0]), "K = 0"),
        "no N": ((x, weight[:0]), "N = 0"),
        "transposed x": ((x.T.contiguous().T, weight), "contiguous"),
        "transposed weight": ((x, weight.T.contiguous().T), "contiguous"),
        "every other column": ((x[:, ::2], weight[:, ::2]), "contiguous"),
        "no rows": ((x[:0], weight), "linear"),
        "too many rows": ((x.repeat(20, 1), weight), "linear"),
        "nine rows": ((x[:1].expand(9, K), weight), "linear"),
        "requires grad": ((x.clone().requires_grad_(), weight), "grad"),
        "weight requires grad": ((x, weight.clone().requires_grad_()), "grad"),
        "sparse": ((x.to_sparse(), weight), "sparse"),
        "negated": ((torch._neg_view(x), weight), "negated"),
        "bias of another length": ((x, weight, bias[:-1]), "bias"),
        "bias of another dtype": ((x, weight, bias.float()), "bias"),
        "bias on the cpu": ((x, weight, bias.cpu()), "bias"),
        "bias of two dimensions": ((x, weight, bias[None]), "bias"),
        "bias not contiguous": ((x, weight, bias.repeat(2)[::2]), "bias"),
    }


CASES = (
    "not a tensor", "cpu x", "cpu weight", "float32", "complex", "mixed dtypes", "one dimension",
    "three dimensions", "other K", "no K", "no N", "transposed x", "transposed weight",
    "every other column", "no rows", "too many rows", "nine rows", "requires grad",
    "weight requires grad", "sparse", "negated", "bias of another length", "bias of another dtype",
    "bias on the cpu", "bias of two dimensions", "bias not contiguous",
)  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_bad_arguments_are_refused_and_harm_nothing(kernels: Kernels, operands, case: str):
    x, weight = operands
    arguments, word = refused(x, weight)[case]
    with pytest.raises((ArgumentError, VariantMissing), match=r".*; .+") as raised:
        kernels.gemv(*arguments)
    assert word in str(raised.value)
    assert close(kernels.gemv(x, weight), x, weight)


def outs(x, weight, bias):
    flat = torch.empty(4 * N, device="cuda", dtype=torch.bfloat16)
    return {
        "shape": torch.empty(2, N + 1, device="cuda", dtype=torch.bfloat16),
        "dtype": torch.empty(2, N, device="cuda", dtype=torch.float16),
        "device": torch.empty(2, N, dtype=torch.bfloat16),
        "columns apart": torch.empty(2, 2 * N, device="cuda", dtype=torch.bfloat16)[:, ::2],
        "rows overlap": flat.as_strided((2, N), (1, 1)),
        "expanded": torch.empty(1, N, device="cuda", dtype=torch.bfloat16).expand(2, N),
        "is x": x[:, :N],
        "in weight": weight[:2, :N],
        "in bias": bias[N:].view(2, N),
        "not a tensor": 3,
    }


OUTS = (
    "shape", "dtype", "device", "columns apart", "rows overlap", "expanded", "is x", "in weight",
    "in bias", "not a tensor",
)  # fmt: skip


@pytest.mark.parametrize("case", OUTS)
def test_bad_outputs_are_refused(kernels: Kernels, operands, case: str):
    x, weight = operands
    memory = torch.randn(3 * N, device="cuda", dtype=torch.bfloat16)
    bias = memory[N // 2 : N // 2 + N]
    kept = x.clone(), weight.clone(), memory.clone()
    with pytest.raises(ArgumentError, match="out"):
        kernels.gemv(x, weight, bias, out=outs(x, weight, memory)[case])
    with pytest.raises(ArgumentError, match="out"):
        kernels.gemv.bind(weight, bias)(x, outs(x, weight, memory)[case])
    torch.cuda.synchronize()
    for tensor, before in zip((x, weight, memory), kept, strict=True):
        assert torch.equal(tensor, before)


def test_bad_weights_are_refused_when_they_are_bound(kernels: Kernels, operands):
    _, weight = operands
    bias = torch.zeros(N, device="cuda", dtype=torch.bfloat16)
    for arguments in (
        (weight.cpu(),),
        (weight.float(),),
        (weight[0],),
        (weight.T.contiguous().T,),
        (weight[:0],),
        (weight, bias[:-1]),
        (weight, bias.half()),
    ):
        with pytest.raises((ArgumentError, VariantMissing), match=r".*; .+"):
            kernels.gemv.bind(*arguments)
    for upcoming in (weight.cpu(), weight.float(), weight[0]):
        with pytest.raises(ArgumentError, match="upcoming"):
            kernels.gemv.bind(weight, upcoming=upcoming)


def test_a_variant_that_was_not_built_is_said_to_be_missing(kernels: Kernels, operands):
    x, weight = operands
    variant = {**kernels.gemv.binary(x, weight).variant, "rows": 6}
    with pytest.raises(VariantMissing, match="--all"):
        kernels.gemv.using(variant, launch())(x, weight)


def test_the_driver_refuses_bad_images_by_name():
    from sonata_aot.loader import _native

    # The driver may look at the bytes only when a kernel is asked for.
    images = {"bad image": b"\x7fELF" + bytes(100), "bad text": b".version 8.8\n.target sm_86\n?\n"}
    for label, image in images.items():
        with pytest.raises(SonataError, match="CUDA_ERROR_") as raised:
            _native.load(image, label, 0, ptx=label == "bad text").kernel("none")
        assert label in str(raised.value)
