"""`examples.decode_graph` without a GPU: what it is told, what it times, and what it reports."""

from __future__ import annotations

import contextlib
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from sonata_aot.artifacts.errors import SonataError

ROOT = Path(__file__).resolve().parents[2]
# Seconds of the clock that each thing takes.
CAPTURE, START, STEP = 0.1, 0.01, 0.001


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "examples.decode_graph", *arguments],
        cwd=ROOT,
        env={"PATH": "/usr/bin:/bin", "CUDA_VISIBLE_DEVICES": "", "COLUMNS": "100"},
        capture_output=True,
        text=True,
        check=False,
    )


class Clock:
    """Time that passes only where a `Decoder` works."""

    def __init__(self) -> None:
        self.now = 0.0

    def perf_counter(self) -> float:
        return self.now


class Decoder:
    """Answers at the pace of a clock, with logits of its own for each request and step."""

    def __init__(self, clock: Clock, *, frozen: bool = False, flipped: Sequence[int] = ()) -> None:
        self.clock, self.frozen, self.flipped = clock, frozen, flipped
        self.did: list[str] = []
        self.count = 0
        self.logits = torch.zeros(1)

    def warm_up(self) -> None:
        self.did.append("warm up")

    def capture(self) -> None:
        self.did.append("capture")
        self.clock.now += CAPTURE

    def start(self, first: Any) -> None:
        self.did.append(f"start {int(first)}")
        self.clock.now += START

    def step(self) -> list[int]:
        self.clock.now += STEP
        self.logits = torch.tensor([0.0 if self.frozen else float(self.count)])
        self.count += 1
        return [int(self.count - 1 in self.flipped)]


@pytest.fixture
def example(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(ROOT)
    from examples import decode_graph

    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    return decode_graph


def serve(example: ModuleType, *, capture_each: bool, **options: Any) -> tuple[Any, Decoder]:
    """Three requests of four steps each."""
    clock = Clock()
    decoder = Decoder(clock, **options)
    requests = [torch.tensor(number) for number in range(3)]
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(example, "time", SimpleNamespace(perf_counter=clock.perf_counter))
        return example.serve(decoder, requests, 4, capture_each=capture_each), decoder


def test_numbers_of_which_nothing_can_be_reported_are_refused() -> None:
    """The first step and later ones need two."""
    for option, wrong in (("steps", "1"), ("requests", "0"), ("batch", "0"), ("mamba-layers", "x")):
        done = run(f"--{option}", wrong)
        assert done.returncode == 2, option
        assert f"argument --{option}: " in done.stderr
    done = run("--help")
    assert done.returncode == 0
    for option in ("directory", "--requests", "--steps", "--batch", "--attention-layers"):
        assert option in done.stdout


def test_a_first_token_has_its_capture_only_where_each_request_captures(
    example: ModuleType,
) -> None:
    each, first = serve(example, capture_each=True)
    once, second = serve(example, capture_each=False)
    assert first.did == [f"{what}" for i in range(3) for what in ("capture", f"start {i}")]
    assert second.did == ["capture", "start 0", "start 1", "start 2"]
    assert each.first == pytest.approx([1e3 * (CAPTURE + START + STEP)] * 3)
    assert once.first == pytest.approx([1e3 * (START + STEP)] * 3)
    assert each.captures == pytest.approx([1e3 * CAPTURE] * 3)
    assert once.captures == pytest.approx([1e3 * CAPTURE])
    for found in (each, once):
        assert found.steps == pytest.approx([1e3 * STEP] * 9)
        assert len(found.outputs) == len(found.tokens) == 12


def test_the_table(example: ModuleType) -> None:
    each, _ = serve(example, capture_each=True)
    once, _ = serve(example, capture_each=False, flipped=(3, 7))
    unpatched, _ = serve(example, capture_each=False, flipped=(3, 7, 8, 9, 10))
    title, *rows, captures, flips = example.table(each, once, unpatched)
    for heading in ("first token", "later steps", "distinct outputs"):
        assert heading in title
    assert [row.split("  ")[0] for row in rows] == [
        "captured for each request",
        "captured once",
        "captured once, unpatched",
    ]
    for row, first in zip(rows, ("111.00 ms", "11.00 ms", "11.00 ms"), strict=True):
        assert f" {first}" in row
        assert " 1.000 ms" in row
        assert "12 of 12" in row
    assert captures.count("100.00 ms") == 2
    assert "2 of 12 steps between the two ways" in flips
    assert "3 of 12 steps unpatched" in flips
    assert not example.repeats_itself(once)


@pytest.mark.parametrize("frozen", [False, True])
def test_the_example_as_a_whole(
    example: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    frozen: bool,
) -> None:
    """Unpatched first, then both ways within the patch; its report comes before the table."""
    clock, patched = Clock(), []
    decoder = Decoder(clock, frozen=frozen)

    @contextlib.contextmanager
    def patch(stack: object, kernels: object) -> Iterator[str]:
        assert kernels is None  # the process's own
        patched.append(decoder.did[:])
        yield "what was patched"

    randint = torch.randint
    fakes = {"load": lambda *given, **named: None, "patch": patch}
    monkeypatch.setattr(example, "loader", SimpleNamespace(**fakes, SonataError=Exception))
    monkeypatch.setattr(example, "make", lambda *given, **named: SimpleNamespace(reset=list))
    monkeypatch.setattr(example, "Decoder", lambda stack, batch: decoder)
    monkeypatch.setattr(example, "time", SimpleNamespace(perf_counter=clock.perf_counter))
    monkeypatch.setattr(torch, "randint", lambda high, size, device: randint(high, size))
    monkeypatch.setattr(
        "sys.argv", ["decode_graph", "--requests", "2", "--steps", "3", "--batch", "1"]
    )
    if frozen:
        with pytest.raises(SystemExit, match="repeat themselves"):
            example.main()
    else:
        example.main()
    ((*before,),) = patched
    assert [what.split()[0] for what in before] == ["warm", "capture", "start", "start"]
    after = [what.split()[0] for what in decoder.did[len(before) :]]
    assert after == ["warm", *("capture", "start") * 2, "capture", "start", "start"]
    printed = capsys.readouterr().out
    assert printed.startswith("what was patched\n\n")
    assert "0 of 6 steps between the two ways" in printed


def test_a_graph_that_repeats_itself_is_noticed(example: ModuleType) -> None:
    found, _ = serve(example, capture_each=False, frozen=True)
    assert len(found.outputs) == 1
    assert example.repeats_itself(found)


def way(example: ModuleType, scale: float, outputs: int, tokens: Sequence[int]) -> Any:
    """A run whose median, mean and largest of each time differ, and from those of other runs."""
    return example.Run(
        first=[scale, 2 * scale, 9 * scale],
        steps=[0.1 * scale, 0.2 * scale, 0.9 * scale],
        captures=[10 * scale, 20 * scale, 90 * scale],
        tokens=[[token] for token in tokens],
        outputs=set(map(float, range(outputs))),
    )


def test_what_is_recorded(
    example: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from benchmarks import decode_graph as bench

    each, once, unpatched = (
        way(example, scale, outputs, tokens)
        for scale, outputs, tokens in (
            (1.0, 5, (0, 0, 0, 0, 0, 0)),
            (2.0, 6, (0, 1, 0, 0, 1, 0)),
            (4.0, 4, (1, 0, 1, 1, 0, 0)),
        )
    )
    runs, asked = {"runs": (each, once, unpatched)}, []

    def compare(*given: Any) -> tuple[Any, ...]:
        asked.append(given)
        return "what was patched", *runs["runs"]

    randint = torch.randint
    monkeypatch.setattr(torch, "randint", lambda high, size, device: randint(high, size))
    monkeypatch.setattr(example, "compare", compare)
    monkeypatch.setattr(bench, "binaries", lambda loaded, stack: ["0" * 64])
    loaded: Any = SimpleNamespace(kernels="these", via="sm90-cubin")
    found = bench.measure(loaded, "a stack")  # type: ignore[arg-type]
    assert capsys.readouterr().out == "what was patched\n"
    ((stack, requests, steps, kernels),) = asked
    assert (stack, len(requests), steps, kernels) == ("a stack", 6, 64, "these")
    assert requests[0].shape == (2,)
    times = {name: value for name, value in found.items() if name.endswith("_us")}
    assert times == {
        "ours_us": 4_000.0,
        "opponent_us": 8_000.0,
        "captured_each_us": 2_000.0,
        "capture_us": 20_000.0,
        "step_us": 400.0,
        "opponent_step_us": 800.0,
    }
    assert (found["outputs"], found["flips"], found["opponent_flips"]) == (6, 2, 5)
    assert (found["via"], found["binaries"]) == ("sm90-cubin", ["0" * 64])
    assert found["case"].endswith(" batch=2 dtype=bf16 requests=6 steps=64")
    frozen = way(example, 1.0, 1, range(6))
    for place in range(3):
        runs["runs"] = (*(each, once, unpatched)[:place], frozen, *(once,) * (2 - place))
        with pytest.raises(SonataError, match="1 outputs of 6 steps"):
            bench.measure(loaded, "a stack")  # type: ignore[arg-type]


def test_what_is_compared(example: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """Unpatched and then patched by the given kernels, each from a stack that is as new."""
    did: list[Any] = []

    class Stack:
        def reset(self) -> None:
            did.append("reset")

    class Worker:
        def __init__(self, stack: object, batch: int) -> None:
            did.append(("decoder", batch))

        def warm_up(self) -> None:
            did.append("warm up")

    @contextlib.contextmanager
    def patch(stack: object, kernels: object) -> Iterator[str]:
        did.append(("patched by", kernels))
        yield "what was patched"
        did.append("undone")

    def serve(decoder: object, requests: object, steps: int, *, capture_each: bool) -> str:
        did.append("serve")
        return f"{steps} steps, {capture_each}, {did.count('serve')}"

    monkeypatch.setattr(example, "Decoder", Worker)
    monkeypatch.setattr(example, "serve", serve)
    monkeypatch.setattr(example, "loader", SimpleNamespace(patch=patch))
    found = example.compare(Stack(), [torch.zeros(3)], 5, "these")
    assert found == (
        "what was patched",
        "5 steps, True, 2",
        "5 steps, False, 3",
        "5 steps, False, 1",
    )
    fresh = ["reset", "warm up", "serve"]
    patched = [("patched by", "these"), *fresh, "serve", "undone"]
    assert did == [("decoder", 3), *fresh, *patched]


def test_the_command(
    example: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    from benchmarks import decode_graph as bench

    record = {
        "via": "sm90-cubin",
        "case": "op=some",
        "outputs": 9,
        "flips": 1,
        "opponent_flips": 7,
        "captured_each_us": 20_000.0,
        "ours_us": 3_000.0,
        "opponent_us": 4_000.0,
        "capture_us": 17_000.0,
        "step_us": 1_900.0,
        "opponent_step_us": 2_200.0,
    }
    made, written = [], []
    monkeypatch.setattr(bench.gpu, "load", lambda *given: [SimpleNamespace()])
    monkeypatch.setattr(bench, "make", lambda *given: made.append(given))
    monkeypatch.setattr(bench, "measure", lambda loaded, stack: record)
    monkeypatch.setattr(bench.results, "write", lambda *given: written.append(given))
    target = tmp_path / "out.json"
    monkeypatch.setattr("sys.argv", ["decode_graph", str(tmp_path), "--json", str(target)])
    bench.main()
    assert made == [(2, 64)]
    assert written == [(target, [record], tmp_path)]
    line = capsys.readouterr().out
    for part in (
        "first token 20.00 ms captured for each, 3.00 ms captured once, 4.00 ms unpatched",
        "a capture 17.00 ms; later steps 1900 us, 2200 us unpatched",
        "9 outputs, 1 flips, 7 unpatched",
    ):
        assert part in line
