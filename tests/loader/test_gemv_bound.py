"""A bound weight: what may start early, and what a write to the weight changes."""

from __future__ import annotations

import textwrap

import pytest

from gemv_launches import Call, expected, launches

OPEN = """
k = loader.load(ARTIFACTS, devices=[0])
def operand(rows=1, size=4096, address=1 << 40):
    return tensor(rows, size, address=address)
def output(rows=1, n=600):
    return tensor(rows, n, address=1 << 36)
def zeros(n=600, size=4096, address=1 << 50, **options):
    return OnDevice(torch.zeros(n, size, dtype=torch.bfloat16), address=address, **options)
"""
OPERANDS = (1 << 40, 1 << 50, 0, 1 << 36)


def run(recorder, artifacts, script, arch="sm90"):
    env = {"SONATA_TEST_CUDA_CC": f"{arch[2]}.{arch[3]}"}
    return recorder.loader(artifacts, OPEN + textwrap.dedent(script), env=env)


def bound(rows=1, n=600, k=4096, **options):
    return Call(rows, n, k, bound=True, **{"pointers": OPERANDS, **options})


def test_a_bound_weight_is_read_before_the_kernel_ahead_has_ended(recorder, artifacts, manifest):
    outcome = run(
        recorder,
        artifacts,
        """
        bound = settled(k.gemv.bind(zeros()))
        for rows in range(1, 9):
            out = output(rows)
            assert bound(operand(rows), out) is out
        assert bound.constant
        y = bound(operand(2))
        say([list(y.shape), str(y.dtype), str(y.device)])
        """,
    )
    *found, allocated = launches(outcome)
    assert found == [expected(manifest, bound(rows)) for rows in range(1, 9)]
    assert {(each["programmatic"], each["params"]["constant"]) for each in found} == {(True, 1)}
    assert allocated["programmatic"]
    assert outcome.value == [[2, 600], "torch.bfloat16", "cuda:0"]


def test_the_first_launch_on_each_stream_is_in_order(recorder, artifacts, manifest):
    """The stream may still be writing the weight, from before it was bound."""
    outcome = run(
        recorder,
        artifacts,
        """
        bound = k.gemv.bind(zeros(), upcoming=zeros(address=1 << 51))
        for stream in (7, 7, 8, 8, 7):
            runtime.current_stream = lambda device: stream
            bound(operand(), output())
        # In a graph, what precedes was captured too.
        os.environ["SONATA_TEST_CUDA_CAPTURING"] = "9"
        for stream in (9, 9):
            bound(operand(), output())
        os.environ["SONATA_TEST_CUDA_CAPTURING"] = ""
        for _ in range(2):
            bound(operand(), output())
        say(bound.constant)
        """,
    )
    found = launches(outcome)
    early = [False, True, False, True, True, True, True, False, True]
    assert [each["programmatic"] for each in found] == early
    assert [each["params"]["constant"] for each in found] == [int(each) for each in early]
    upcoming = (1 << 51, 600 * 4096 * 2)
    assert [each["params"] for each in found] == [
        expected(manifest, bound(constant=each, upcoming=upcoming))["params"] for each in early
    ]
    assert outcome.value is True


def test_a_graph_captured_before_any_launch_is_in_order(recorder, artifacts):
    outcome = run(
        recorder,
        artifacts,
        "os.environ['SONATA_TEST_CUDA_CAPTURING'] = str(STREAM)\n"
        "bound = k.gemv.bind(zeros())\n"
        "for _ in range(3): bound(operand(), output())\n"
        "say(0)",
    )
    assert [each["programmatic"] for each in launches(outcome)] == 3 * [False]


def test_a_bias_comes_from_the_binding(recorder, artifacts, manifest):
    outcome = run(
        recorder,
        artifacts,
        "bias = tensor(600, address=0x5002)\n"
        "bound = settled(k.gemv.bind(zeros(), bias))\n"
        "bound(operand(), output())\n"
        "swap(bias, tensor(600, address=0x7002))\n"  # it may change, and move
        "bound(operand(), output())\n"
        "say(bound.constant)",
    )
    assert launches(outcome) == [
        expected(manifest, bound(pointers=(1 << 40, 1 << 50, bias, 1 << 36)))
        for bias in (0x5002, 0x7002)
    ]
    assert outcome.value is True


def test_before_sm90_a_bound_call_is_a_plain_one(recorder, artifacts, manifest):
    outcome = run(
        recorder,
        artifacts,
        "weight = zeros()\n"
        "bound = settled(k.gemv.bind(weight, upcoming=zeros()))\n"
        "bound(operand(), output()); k.gemv(operand(), weight, out=output())\n"
        "weight.add_(1)\n"
        "bound(operand(), output()); say(bound.constant)",
        "sm86",
    )
    assert launches(outcome) == 3 * [
        expected(manifest, Call(1, 600, 4096, arch="sm86", pointers=OPERANDS))
    ]
    assert outcome.value is False


def test_rows_that_are_not_aligned_take_the_general_kernel(recorder, artifacts, manifest):
    outcome = run(
        recorder,
        artifacts,
        "bound = settled(k.gemv.bind(zeros(), upcoming=zeros()))\n"
        "bound(operand(address=(1 << 40) + 2), output()); say(bound.constant)",
    )
    pointers = ((1 << 40) + 2, *OPERANDS[1:])
    assert launches(outcome) == [expected(manifest, bound(layout="wide", pointers=pointers))]


WRITES = {
    "copy_": "with torch.no_grad(): weight.copy_(torch.ones(600, 4096))",
    "add_": "weight.add_(1)",
    "an operation that gives its result there": "torch.add(torch.ones(600, 4096), 1, out=weight)",
    "an optimizer": "with torch.no_grad(): weight.addcmul_(torch.ones(1), torch.ones(1), value=2)",
    "a view": "weight.narrow(0, 1, 3).zero_()",
    "a view of a view": "weight.view(-1).narrow(0, 5, 5).fill_(1)",
    "a view made before": "before.zero_()",
    "a detached tensor": "weight.detach().zero_()",
    "a transposed view": "weight.t().zero_()",
    "inference mode": "with torch.inference_mode(): weight.add_(1)",
    "load_state_dict": "module.load_state_dict({'weight': torch.ones(600, 4096)})",
    "a gemv": "k.gemv(operand(address=1 << 41), zeros(4096, 4096, 1 << 42),"
    " out=weight.narrow(0, 0, 1))",
    "a bound gemv": "k.gemv.bind(zeros(4096, 4096, 1 << 42))(operand(address=1 << 41),"
    " weight.narrow(0, 0, 1))",
    "the version alone": "torch.autograd.graph.increment_version(weight)",
}


@pytest.mark.parametrize("arch", ["sm90"])
def test_a_write_ends_it_for_good(recorder, artifacts, manifest, arch):
    """The very next launch is in order: the same binary, grid and block, and nothing early."""
    script = "torch.set_grad_enabled(False)\nimport torch.nn as nn\n"
    for write in WRITES.values():
        script += (
            "weight = zeros(); before = weight.narrow(0, 2, 2)\n"
            "module = nn.Linear(1, 1, bias=False, device='meta')\n"
            "module.weight = nn.Parameter(weight, requires_grad=False); weight = module.weight\n"
            "bound = settled(k.gemv.bind(weight, upcoming=zeros(address=1 << 51)))\n"
            "bound(operand(), output())\n"
            f"{write}\n"
            "for _ in range(3): bound(operand(), output())\n"
            "say([bound.constant, k.gemv.bind(weight).constant])\n"
        )
    outcome = run(recorder, artifacts, script)
    # Without the calls that are writes themselves.
    found = [each for each in launches(outcome) if each["params"]["weight"] == 1 << 50]
    assert len(found) == 4 * len(WRITES)
    upcoming = (1 << 51, 600 * 4096 * 2)
    first = expected(manifest, bound(upcoming=upcoming))
    after = expected(manifest, bound(constant=False, upcoming=upcoming))
    assert first["programmatic"]
    assert not after["programmatic"]
    assert {name for name in after["params"] if after["params"][name] != first["params"][name]} >= {
        "constant",
        "upcoming",
    }
    for place, name in enumerate(WRITES):
        assert found[4 * place : 4 * place + 4] == [first, after, after, after], name
    assert outcome.stdout.splitlines() == ["[false, true]"] * len(WRITES)


def test_what_is_no_write_leaves_it_constant(recorder, artifacts):
    outcome = run(
        recorder,
        artifacts,
        "weight = zeros()\n"
        "bound = settled(k.gemv.bind(weight))\n"
        "weight.view(-1); weight.detach(); weight.t(); weight + 1; weight.clone().zero_()\n"
        "k.gemv(operand(), weight, out=output())\n"
        "bound(operand(), output()); say(bound.constant)",
    )
    assert outcome.value is True


def test_an_end_is_logged_once(recorder, artifacts):
    outcome = run(
        recorder,
        artifacts,
        """
        import logging
        logging.basicConfig(level="INFO", format="app: %(message)s")
        weight = zeros(); bound = k.gemv.bind(weight); weight.zero_()
        for _ in range(3): bound(operand(), output())
        """,
    )
    (line,) = outcome.stderr.splitlines()
    assert line.startswith("app: the bound weight of shape (600, 4096) was written to")


def test_other_memory_ends_it_and_is_what_is_read(recorder, artifacts, manifest):
    outcome = run(
        recorder,
        artifacts,
        """
        weight = zeros()
        bound = settled(k.gemv.bind(weight, tensor(600, address=0x5000)))
        bound(operand(), output())
        swap(weight, zeros(address=1 << 52))
        bound(operand(), output())
        swap(weight, zeros(700, 4096, address=1 << 50))
        say(failure(lambda: bound(operand(), output(1, 700))))
        swap(weight, tensor(600, 2048, address=1 << 50))
        say(failure(lambda: bound(operand(), output())))
        bound(operand(1, 2048), output())
        swap(weight, tensor(600, 2048, address=0))
        say(failure(lambda: bound(operand(1, 2048), output())))
        say(bound.constant)
        """,
    )
    found = launches(outcome)
    pointers = (1 << 40, 1 << 50, 0x5000, 1 << 36)
    moved = (1 << 40, 1 << 52, 0x5000, 1 << 36)
    assert found == [
        expected(manifest, bound(pointers=pointers)),
        expected(manifest, bound(pointers=moved, constant=False)),
        expected(manifest, bound(k=2048, pointers=pointers, constant=False)),
    ]
    longer, narrower, gone, constant = outcome.stdout.splitlines()
    assert "bias has 600 elements, weight 700 rows" in longer
    assert "one K" in narrower
    assert "weight has no memory" in gone
    assert constant == "false"


def test_an_inference_tensor_is_never_constant(recorder, artifacts, manifest):
    """Torch does not count its changes."""
    outcome = run(
        recorder,
        artifacts,
        """
        with torch.inference_mode():
            weight = zeros()
        assert weight.is_inference()
        bound = settled(k.gemv.bind(weight, upcoming=zeros(address=1 << 51)))
        say(bound.constant)
        bound(operand(), output())
        """,
    )
    assert launches(outcome) == [expected(manifest, bound(constant=False))]
    assert outcome.value is False


# What is read next (address, shape, stride), and what of it may be asked for.
UPCOMING = {
    "a weight": ("1 << 51", (600, 4096), 4096, (1 << 51, 600 * 4096 * 2)),
    "a large one": ("1 << 51", (60000, 4096), 4096, (1 << 51, 60000 * 4096 * 2)),
    "rows with padding": ("1 << 51", (600, 4096), 5000, (1 << 51, (599 * 5000 + 4096) * 2)),
    "one row of it": ("1 << 51", (1, 64), 64, (1 << 51, 128)),
    "too little": ("1 << 51", (1, 7), 7, (1 << 51, 14)),
    "between two vectors": ("(1 << 51) + 2", (600, 4096), 4096, ((1 << 51) + 16, 4915200 - 14)),
    "nothing": ("1 << 51", (0, 64), 64, (1 << 51, 0)),
    "no memory any more": ("0", (600, 4096), 4096, (0, 0)),
}


def test_what_is_read_next_is_asked_for(recorder, artifacts, manifest):
    """16-byte aligned and within the tensor, at most 7.5 MiB, each block the same share.

    A launch whose own weight is larger than 24 MiB asks for nothing.
    """
    sizes = [(1, 600, 4096), (1, 6000, 4096), (2, 100, 2048), (8, 600, 2048), (1, 16, 64)]
    sizes += [(1, 1024, 12288), (1, 1024, 12296)]
    script = "def fill(value): return value\n"
    for address, shape, stride, _ in UPCOMING.values():
        script += (
            f"upcoming = tensor(*{shape}, stride=({stride}, 1), address={address})\n"
            f"for rows, n, size in {sizes}:\n"
            "    weight = tensor(n, size, address=1 << 50)\n"
            "    kept = tensor(*upcoming.shape, stride=upcoming.stride(), address=1 << 45)\n"
            "    bound = settled(k.gemv.bind(weight, upcoming=kept))\n"
            "    swap(kept, upcoming)\n"
            "    bound(operand(rows, size), output(rows, n))\n"
        )
    outcome = run(recorder, artifacts, script + "say(0)")
    found = iter(launches(outcome))
    shares, asking = set(), set()
    for name, (_, _, _, upcoming) in UPCOMING.items():
        for rows, n, k in sizes:
            launch = next(found)
            start = launch["params"]["upcoming"]
            share = launch["params"]["upcoming_bytes"]
            assert (start % 16, share % 16) == (0, 0)
            total = launch["grid"][0] * share
            assert total <= 15 * 2**19
            assert total == 0 or n * k * 2 <= 24 * 2**20
            assert total == 0 or upcoming[0] <= start <= start + total <= sum(upcoming)
            wanted = expected(manifest, bound(rows, n, k, upcoming=upcoming))
            if share == 0 == wanted["params"]["upcoming_bytes"]:
                launch["params"]["upcoming"] = wanted["params"]["upcoming"]  # of no consequence
            assert launch == wanted, (name, rows, n, k)
            shares.add((name, share > 0))
            asking |= {(rows, n, k)} if share else set()
    without = {"too little", "nothing", "no memory any more"}
    assert {name for name, some in shares if some} == set(UPCOMING) - without
    assert (1, 1024, 12288) in asking
    assert (1, 1024, 12296) not in asking
