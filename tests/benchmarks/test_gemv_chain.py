"""`benchmarks.gemv_chain`: each GEMV reads the one before, and what is made of the times."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from measure_fakes import FakeGemv, Gpu, binary, loaded, variant
from sonata_aot.aot.measure import gpu, timing
from sonata_aot.artifacts.errors import SonataError

ROOT = Path(__file__).resolve().parents[2]
MACHINE = gpu.Machine("Paper 1", 132, float("inf"), 13000, "2.11")
SMALL = {"LAYERS": 3, "MODEL": 8, "INNER": 16, "PROJECTED": 24}
# Bound, in order, plain, cuBLAS.
TIMES = [400.0, 500.0, 550.0, 700.0]


class Graph:
    """What a capture would replay."""

    def __init__(self, calls: Sequence[Callable[[], object]]) -> None:
        self.calls = list(calls)

    def replay(self) -> None:
        for call in self.calls:
            call()


class Gemv(FakeGemv):
    """Notes which weight is declared to come after which."""

    def __init__(self) -> None:
        super().__init__(Gpu(lambda launched: 1.0), binary(variant()))
        self.pairs: list[tuple[int, int | None]] = []

    def bind(self, weight: Any, bias: Any = None, *, upcoming: Any = None) -> Callable[..., Any]:
        then = None if upcoming is None else upcoming.data_ptr()
        self.pairs.append((weight.data_ptr(), then))
        return super().bind(weight, bias)


@pytest.fixture
def chain(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The benchmark, of small layers on the CPU, with a ceiling of 5000 GB/s."""
    monkeypatch.syspath_prepend(ROOT)
    from benchmarks import gemv_chain

    for name in ("randn", "zeros"):
        plain = getattr(torch, name)

        def made(*shape: int, device: str, _plain: Any = plain, **options: Any) -> torch.Tensor:
            assert device == "cuda"
            return _plain(*shape, **options)

        monkeypatch.setattr(torch, name, made)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(timing, "capture", Graph)
    monkeypatch.setattr(timing, "replay_us", lambda graphs, launches: TIMES)
    monkeypatch.setattr(gemv_chain, "reader", lambda *given: None)
    ceiling = SimpleNamespace(gbps=5000.0)
    monkeypatch.setattr(gemv_chain, "large_read", lambda *given: ceiling)
    for name, value in SMALL.items():
        monkeypatch.setattr(gemv_chain, name, value)
    torch.manual_seed(0)
    return gemv_chain


def test_the_bytes_are_those_of_the_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(ROOT)
    from benchmarks import gemv_chain

    randn = torch.randn
    monkeypatch.setattr(torch, "randn", lambda *shape, device: randn(*shape, device="meta"))
    weights = gemv_chain.Chain().weights()
    assert len(weights) == 68
    assert sum(weight.nbytes for weight in weights) == gemv_chain.BYTES


def test_the_record(chain: ModuleType) -> None:
    """1 755 840 512 bytes at 5000 GB/s are 351.168 us; 400 us are 1.139 times as long."""
    gemv = Gemv()
    record = chain.measure(loaded(gemv), MACHINE)
    assert record["over_ceiling"] == 1.1391
    assert [record[f"{name}_us"] for name in ("ours", "in_order", "plain", "opponent")] == TIMES
    assert (record["bytes"], record["ceiling_gbps"]) == (1_755_840_512, 5000.0)
    # bf16 rounds each result once.
    assert 0 < record["error"] < 4e-3
    assert record["opponent_error"] == record["error"]
    ordered, bound = gemv.pairs[:6], gemv.pairs[6:]
    weights = [weight for weight, _ in ordered]
    assert ordered == [(weight, None) for weight in weights]
    assert bound == list(zip(weights, [*weights[1:], weights[0]], strict=True))


def test_each_gemv_reads_the_result_before_it(chain: ModuleType) -> None:
    made = chain.Chain()
    graph = Graph(
        made.calls([lambda x, out, w=w: torch.mm(x, w.T, out=out) for w in made.weights()])
    )
    x = made.start
    for first, second in zip(made.ins, made.outs, strict=True):
        x = (x @ first.T)[:, : SMALL["INNER"]] @ second.T
    assert torch.equal(made.run(graph), x)
    made.state.mul_(2)
    assert made.error() == pytest.approx(1.0, rel=0.01)


def test_other_bits_and_impossible_times_are_refused(
    chain: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    gemv, runs = Gemv(), iter(range(10**6))
    gemv.damage = lambda launched, out: out.add_(next(runs))
    with pytest.raises(SonataError, match="other bits without programmatic launch"):
        chain.measure(loaded(gemv), MACHINE)
    monkeypatch.setattr(timing, "replay_us", lambda graphs, launches: [351.0, 500.0, 550.0, 700.0])
    with pytest.raises(SonataError, match="bench bug"):
        chain.measure(loaded(Gemv()), MACHINE)
