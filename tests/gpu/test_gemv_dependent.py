"""Programmatic dependent launch: what may be read early, and that nothing else is.

A bound weight counts as constant and is read while the kernel before still runs. All else is read
and written in the order of the stream, also where the kernels before are of that kind themselves.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest

from gemv_cases import DTYPES, NAN, Verdicts, in_order, launch, random, torch
from sonata_aot.aot.measure import timing
from sonata_aot.loader import Kernels

BF16 = torch.bfloat16
# N x K of in_proj, and of out_proj, which reads the first outputs of in_proj.
IN, OUT = (8512, 2048), (2048, 4096)
# Cycles, about 50 us: the kernels after it are all in the stream when it ends.
SHORT = 100_000
# K of a GEMV that takes a few hundred microseconds on a part of the multiprocessors.
LONG = 2**18


class Chain:
    """Layers of in_proj and out_proj; each reads what the one before it wrote, in two buffers."""

    def __init__(self, kernels: Kernels, dtype: Any, m: int, layers: int) -> None:
        self.weights = [
            random(n, k, dtype=dtype, scale=k**-0.5) for _ in range(layers) for n, k in (IN, OUT)
        ]
        self.start = random(m, IN[1], dtype=dtype)
        self.x, self.wide = torch.empty_like(self.start), random(m, IN[0], dtype=dtype)
        # Bound ones whose constancy has ended: the same binaries and grids, in stream order.
        self.released = [kernels.gemv.bind(weight) for weight in self.weights]
        for weight in self.weights:
            weight.mul_(1)
        then = [*self.weights[1:], None]
        self.bound = [
            kernels.gemv.bind(weight, upcoming=upcoming)
            for weight, upcoming in zip(self.weights, then, strict=True)
        ]

    def run(self, calls: Any) -> Any:
        """The last layer's output."""
        self.x.copy_(self.start)
        for into, out in zip(calls[::2], calls[1::2], strict=True):
            into(self.x, self.wide)
            out(self.wide[:, : OUT[1]], self.x)
        return self.x

    def renew(self) -> None:
        self.start.normal_()
        self.x.fill_(NAN)
        self.wide.fill_(NAN)


@pytest.mark.parametrize("m", [1, 2, 3, 8])
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_chain_has_the_bits_that_it_has_in_order(programmatic: Kernels, dtype: str, m: int):
    chain, verdicts = Chain(programmatic, DTYPES[dtype], m, layers=5), Verdicts()
    graph = timing.capture([lambda: chain.run(chain.bound)])
    for i in range(20):
        chain.renew()
        expected = chain.run(chain.released).clone()
        verdicts.add("not finite", ~expected.isfinite())
        chain.wide.fill_(NAN)
        verdicts.same(f"eager, {i}", chain.run(chain.bound), expected)
        chain.x.fill_(NAN)
        chain.wide.fill_(NAN)
        graph.replay()
        verdicts.same(f"graph, {i}", chain.x, expected)
    verdicts.check()
    assert all(bound.constant for bound in chain.bound)
    assert not any(bound.constant for bound in chain.released)


def test_a_chain_is_faster_than_in_order(programmatic: Kernels):
    """So the attribute is in effect: without it the same binaries and grids take longer."""
    chain = Chain(programmatic, BF16, 2, layers=34)
    graphs = [
        timing.capture([partial(chain.run, calls)]) for calls in (chain.bound, chain.released)
    ]
    bound, ordered = timing.replay_us(graphs, 68, timing.Effort(rounds=7, replays=10, rotation=0))
    print(f"a projection takes {bound:.2f} us, and {ordered:.2f} us in order")
    assert bound <= 0.95 * ordered


class Early:
    """A slow GEMV that writes a weight, and a GEMV that reads it right after.

    The slow one lets the next kernel start at once, and leaves it multiprocessors to run on.
    """

    def __init__(self, kernels: Kernels) -> None:
        self.x, self.slow_x = random(1, 128, dtype=BF16), random(1, LONG, dtype=BF16)
        self.slow_weight = random(256, LONG, dtype=BF16, scale=LONG**-0.5)
        self.old = random(2, 128, dtype=BF16)
        self.weight = self.old.clone()
        variant = kernels.gemv.binary(self.x, self.weight, constant=True).variant
        assert variant["pdl"]
        self.slow = kernels.gemv.using(variant, launch())
        self.new = self.slow(self.slow_x, self.slow_weight).view(2, 128)

    def then(self, call: Any) -> Any:
        """What `call` gives right after the slow one has begun to write the weight."""
        self.weight.data.copy_(self.old)  # torch does not count what is written through `.data`
        torch.cuda.synchronize()
        torch.cuda._sleep(SHORT)
        self.slow(self.slow_x, self.slow_weight, None, self.weight.data.view(1, 256))
        return call()


def test_a_bound_weight_is_read_before_the_kernel_before_has_ended(programmatic: Kernels):
    """A false declaration shows it: the weight that the kernel before writes is read too early."""
    early = Early(programmatic)
    bound = programmatic.gemv.bind(early.weight)
    read_old, read_new = (
        in_order(programmatic, early.x, weight)(early.x, weight)
        for weight in (early.old, early.new)
    )
    assert not torch.equal(read_old, read_new)
    seen = [early.then(lambda: bound(early.x)) for _ in range(10)]
    assert bound.constant
    assert any(torch.equal(y, read_old) for y in seen)


def test_a_plain_weight_is_read_after_the_kernel_before_has_ended(programmatic: Kernels):
    early, verdicts = Early(programmatic), Verdicts()
    for name, call in (
        ("plain", programmatic.gemv),
        ("the variant that a bound call runs", in_order(programmatic, early.x, early.weight)),
    ):
        expected = call(early.x, early.new)
        for _ in range(20):
            y = early.then(partial(call, early.x, early.weight))
            verdicts.same(name, y, expected)
    verdicts.check()


def test_x_and_bias_are_read_after_the_kernel_before_has_ended(programmatic: Kernels):
    """The slow GEMV writes what the bound one reads besides its weight."""
    early, verdicts = Early(programmatic), Verdicts()
    weight, bias = random(256, 256, dtype=BF16), random(256, dtype=BF16)
    written = early.new.view(1, 256)
    changing = torch.empty_like(written)
    ordered = in_order(programmatic, written, weight)
    of_x = programmatic.gemv.bind(weight, bias)
    of_bias = programmatic.gemv.bind(weight, changing[0])
    expected = ordered(written, weight, bias), ordered(bias[None], weight, written[0])
    for _ in range(20):
        for name, call, right in (
            ("x", lambda: of_x(changing), expected[0]),
            ("bias", lambda: of_bias(bias[None]), expected[1]),
        ):
            changing.fill_(NAN)
            torch.cuda._sleep(SHORT)
            early.slow(early.slow_x, early.slow_weight, None, changing)
            verdicts.same(name, call(), right)
    verdicts.check()


def test_an_output_is_written_after_the_kernel_before_has_ended(programmatic: Kernels):
    """The slow GEMV reads, to its end, the buffer that the bound one writes."""
    early, verdicts = Early(programmatic), Verdicts()
    weight, x = random(LONG, 8, dtype=BF16), random(1, 8, dtype=BF16)
    bound = programmatic.gemv.bind(weight)
    kept = early.slow_x.clone()
    for _ in range(20):
        early.slow_x.copy_(kept)
        torch.cuda._sleep(SHORT)
        y = early.slow(early.slow_x, early.slow_weight)
        bound(x, early.slow_x)
        verdicts.same("the slow one's output", y.view(2, 128), early.new)
    verdicts.check()


@pytest.mark.parametrize("slow", ["torch", "gemv"])
def test_waiting_is_transitive(programmatic: Kernels, slow: str):
    """A writes x; B, bound, does not read it; C, bound, does. C must wait for A, too."""
    early, verdicts = Early(programmatic), Verdicts()
    other, weight = random(1024, 2048, dtype=BF16), random(512, 256, dtype=BF16)
    other_x, buffer = random(2, 2048, dtype=BF16), torch.empty(1, 256, device="cuda", dtype=BF16)
    b, c = programmatic.gemv.bind(other), programmatic.gemv.bind(weight)
    ordered = in_order(programmatic, buffer, weight)
    fresh = early.new.view(1, 256)
    for _ in range(200):
        buffer.fill_(NAN)
        if slow == "torch":
            fresh = random(1, 256, dtype=BF16)
            torch.cuda._sleep(SHORT)
            torch.mul(fresh, 1, out=buffer)
        else:
            torch.cuda._sleep(SHORT)
            early.slow(early.slow_x, early.slow_weight, None, buffer)
        b(other_x)
        y = c(buffer)
        verdicts.same(slow, y, ordered(fresh, weight))
    verdicts.check()


def test_a_torch_kernel_after_a_bound_call_sees_all_of_its_output(programmatic: Kernels):
    verdicts = Verdicts()
    for n, k in (IN, OUT, (64, 8)):
        weight, out = random(n, k, dtype=BF16), torch.empty(2, n, device="cuda", dtype=BF16)
        bound = programmatic.gemv.bind(weight)
        ordered = in_order(programmatic, random(2, k, dtype=BF16), weight)
        for _ in range(100):
            x = random(2, k, dtype=BF16)
            expected = ordered(x, weight)
            out.fill_(NAN)
            bound(x)
            bound(x, out)
            seen = torch.mul(out, 1)
            out.fill_(NAN)
            verdicts.same(f"N={n} K={k}", seen, expected)
    verdicts.check()


@pytest.mark.parametrize("mode", ["eager", "graph"])
def test_a_bound_call_after_work_on_another_stream(programmatic: Kernels, mode: str):
    verdicts = Verdicts()
    weight, x = random(2048, 2048, dtype=BF16), torch.empty(1, 2048, device="cuda", dtype=BF16)
    bound, ordered = programmatic.gemv.bind(weight), in_order(programmatic, x, weight)
    fresh = random(50, 1, 2048, dtype=BF16)
    expected = [ordered(each, weight) for each in fresh]
    side, outs = torch.cuda.Stream(), torch.full((50, 1, 2048), NAN, device="cuda", dtype=BF16)

    def work() -> None:
        here = torch.cuda.current_stream()
        for source, out in zip(fresh, outs, strict=True):
            side.wait_stream(here)
            with torch.cuda.stream(side):
                torch.cuda._sleep(SHORT)
                torch.mul(source, 1, out=x)
            bound(fresh[0])  # so that a programmatic launch precedes the join
            here.wait_stream(side)
            bound(x, out)

    run = work if mode == "eager" else timing.capture([work]).replay
    outs.fill_(NAN)
    x.fill_(NAN)
    run()
    for i, (found, right) in enumerate(zip(outs, expected, strict=True)):
        verdicts.same(f"call {i}", found, right)
    verdicts.check()
