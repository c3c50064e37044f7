"""Weights that change: a call after the change has the new weight's result, bound or not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from gemv_cases import Verdicts, in_order, random, settled, torch
from sonata_aot.aot.measure import timing
from sonata_aot.loader import Kernels

BF16 = torch.bfloat16
SHAPES = ((512, 1024), (8512, 2048))


def by_kernel(weight: Any, new: Any) -> None:
    torch.mul(new, 1, out=weight)


def by_copy(weight: Any, new: Any) -> None:
    weight.copy_(new)


def by_view(weight: Any, new: Any) -> None:
    weight[: weight.shape[0] // 2].copy_(new[: weight.shape[0] // 2])
    weight.view(-1)[weight.numel() // 2 :].copy_(new.view(-1)[weight.numel() // 2 :])


def by_arithmetic(weight: Any, new: Any) -> None:
    weight.mul_(0).add_(new)


def by_step(weight: Any, new: Any) -> None:
    torch._foreach_mul_([weight], 0)
    torch._foreach_add_([weight], [new])


WRITES = {
    "kernel": by_kernel,
    "copy": by_copy,
    "view": by_view,
    "arithmetic": by_arithmetic,
    "step": by_step,
}
Write = Callable[[Any, Any], None]


@pytest.mark.parametrize("mode", ["eager", "graph"])
@pytest.mark.parametrize("write", [by_kernel, by_copy])
@pytest.mark.parametrize(("n", "k"), SHAPES)
def test_a_plain_call_reads_what_was_just_written(
    kernels: Kernels, n: int, k: int, write: Write, mode: str
):
    weights = [random(n, k, dtype=BF16) for _ in range(2)]
    weight, x = torch.zeros_like(weights[0]), random(2, k, dtype=BF16)
    expected = [kernels.gemv(x, each) for each in weights]
    outs = torch.full((200, 2, n), float("nan"), device="cuda", dtype=BF16)

    def work() -> None:
        for i, out in enumerate(outs):
            write(weight, weights[i % 2])
            kernels.gemv(x, weight, out=out)

    run = work if mode == "eager" else timing.capture([work]).replay
    outs.fill_(float("nan"))
    run()
    verdicts = Verdicts()
    for i, out in enumerate(outs):
        verdicts.same(f"call {i}", out, expected[i % 2])
    verdicts.check()


@pytest.mark.parametrize("how", WRITES)
@pytest.mark.parametrize(("n", "k"), SHAPES)
def test_a_bound_call_reads_what_was_just_written(kernels: Kernels, n: int, k: int, how: str):
    weights, x = [random(n, k, dtype=BF16) for _ in range(2)], random(2, k, dtype=BF16)
    ordered = in_order(kernels, x, weights[0])
    expected = [ordered(x, weight) for weight in weights]
    weight, verdicts = weights[1].clone(), Verdicts()
    for i in range(200):
        bound = kernels.gemv.bind(weight)
        before = bound(x)
        assert bound.constant
        WRITES[how](weight, weights[i % 2])
        after = bound(x)
        assert not bound.constant
        verdicts.same(f"before write {i}", before, expected[(i + 1) % 2])
        verdicts.same(f"after write {i}", after, expected[i % 2])
        verdicts.same(f"again after write {i}", bound(x), expected[i % 2])
    verdicts.check()


def test_a_bound_call_follows_load_state_dict(kernels: Kernels):
    n, k = 2048, 2048
    linear = torch.nn.Linear(k, n, device="cuda", dtype=BF16).requires_grad_(False)
    states = [{"weight": random(n, k, dtype=BF16), "bias": random(n, dtype=BF16)} for _ in range(2)]
    x, verdicts = random(3, k, dtype=BF16), Verdicts()
    ordered = in_order(kernels, x, linear.weight)
    expected = [ordered(x, state["weight"], state["bias"]) for state in states]
    for i in range(50):
        bound = kernels.gemv.bind(linear.weight, linear.bias)
        bound(x)
        linear.load_state_dict(states[i % 2])
        verdicts.same(f"load {i}", bound(x), expected[i % 2])
        assert not bound.constant
    verdicts.check()


def test_a_bound_weight_that_moved_is_read_where_it_is(kernels: Kernels):
    weight, other = random(512, 1024, dtype=BF16), random(512, 1024, dtype=BF16)
    x = random(1, 1024, dtype=BF16)
    ordered, bound = in_order(kernels, x, weight), settled(kernels.gemv.bind(weight), x)
    assert torch.equal(bound(x), ordered(x, weight))
    weight.data = other
    assert torch.equal(bound(x), ordered(x, other))
    assert not bound.constant


def test_a_bias_may_change(kernels: Kernels):
    weight, x = random(512, 1024, dtype=BF16), random(2, 1024, dtype=BF16)
    biases = random(200, 512, dtype=BF16)
    bias, ordered = torch.empty_like(biases[0]), in_order(kernels, x, weight)
    bound, verdicts = kernels.gemv.bind(weight, bias), Verdicts()
    for i, each in enumerate(biases):
        torch.mul(each, 1, out=bias)
        verdicts.same(f"bias {i}", bound(x), ordered(x, weight, each))
    verdicts.check()
    assert bound.constant


def test_an_inference_tensor_is_never_constant(kernels: Kernels):
    with torch.inference_mode():
        weight, x = random(512, 1024, dtype=BF16), random(2, 1024, dtype=BF16)
        bound = kernels.gemv.bind(weight)
        assert not bound.constant
        for _ in range(20):
            weight.normal_()
            assert torch.equal(bound(x), in_order(kernels, x, weight)(x, weight))


def test_bits_stay_when_constancy_ends(kernels: Kernels):
    verdicts = Verdicts()
    for n, k in ((2048, 4096), (8512, 2048), (256, 2048)):
        for m in (1, 2, 4, 8):
            weight, x = random(n, k, dtype=BF16), random(m, k, dtype=BF16)
            bound = settled(kernels.gemv.bind(weight), x)
            before = bound(x)
            weight.mul_(1)
            after = bound(x)
            assert not bound.constant
            verdicts.same(f"M={m} N={n} K={k}", after, before)
    verdicts.check()


@pytest.mark.parametrize("where", ["next", "one element", "odd", "end of memory", "itself"])
def test_what_comes_next_changes_no_bits(kernels: Kernels, where: str):
    """A hint that is too long or lies at the end of the memory harms nothing either."""
    verdicts = Verdicts()
    for n, k in ((2048, 4096), (256, 2048), (5, 8), (4096, 4096)):
        weight, x = random(n, k, dtype=BF16), random(2, k, dtype=BF16)
        large = random(5 * 2**20, 2, dtype=BF16)  # 20 MiB, all of what torch takes for it
        upcoming = {
            "next": large,
            "one element": large[1:2, 1:],
            "odd": large.view(-1)[3:-3].view(2, -1),
            "end of memory": large[-100:],
            "itself": weight,
        }[where]
        expected = in_order(kernels, x, weight)(x, weight)
        bound = settled(kernels.gemv.bind(weight, upcoming=upcoming), x)
        for _ in range(5):
            verdicts.same(f"N={n} K={k}", bound(x), expected)
    verdicts.check()
