"""`linear`: where the GEMV runs, and where torch's own does."""

from __future__ import annotations

import dataclasses
import json
import textwrap

from gemv_launches import Call, expected, launches

HOPPER = {"SONATA_TEST_CUDA_CC": "9.0", "SONATA_TEST_CUDA_DEVICES": "2"}
# `OnDevice` counts as a tensor without a meaning of its own, and F.linear only says it was called.
OPEN = """
import sonata_aot.loader.fallback as room
k = loader.load(ARTIFACTS, devices=[0])
is_plain = room.is_plain
room.is_plain = lambda tensor: type(tensor) is OnDevice or is_plain(tensor)
F_linear = torch.nn.functional.linear
calls = []
def fallback(x, weight, bias=None):
    calls.append(1)
    return "F.linear"
torch.nn.functional.linear = fallback
weight = tensor(48, 64, address=0x100000)
def path(x, weight=weight, bias=None):
    y = k.linear(x, weight, bias)
    return y if y == "F.linear" else list(y.shape)
"""


def run(recorder, artifacts, script):
    return recorder.loader(artifacts, OPEN + textwrap.dedent(script), env=HOPPER)


SHAPES = {
    "64": ([48], 1),
    "1, 64": ([1, 48], 1),
    "3, 64": ([3, 48], 3),
    "8, 64": ([8, 48], 8),
    "1, 1, 64": ([1, 1, 48], 1),
    "2, 4, 64": ([2, 4, 48], 8),
    "2, 1, 3, 64": ([2, 1, 3, 48], 6),
}


def test_leading_dimensions_are_rows(recorder, artifacts, manifest):
    script = "bias = tensor(48, address=0x5002)\n"
    for shape in SHAPES:
        script += f"say(path(tensor({shape}))); say(path(tensor({shape}), bias=bias))\n"
    outcome = run(recorder, artifacts, script)
    found = iter(launches(outcome))
    shapes = iter(map(json.loads, outcome.stdout.splitlines()))
    for shape, rows in SHAPES.values():
        for bias in (0, 0x5002):
            launch = next(found)
            assert next(shapes) == shape
            pointers = (0x1000, 0x100000, bias, launch["params"]["out"])
            assert launch == expected(manifest, Call(rows, 48, 64, pointers=pointers))
    assert next(found, None) is None


def test_rows_that_do_not_lie_so_are_copied(recorder, artifacts):
    outcome = run(
        recorder,
        artifacts,
        "for shape, stride in (((2, 64), (1, 2)), ((2, 2, 64), (64, 300, 1)), ((64,), (2,))):\n"
        "    say(path(tensor(*shape, stride=stride)))\n"
        "say(path(tensor(2, 64, stride=(80, 1))))\n"
        "say(path(tensor(2, 64, stride=(0, 1))))",
    )
    assert [json.loads(line) for line in outcome.stdout.splitlines()] == [
        *([2, 48], [2, 2, 48], [48], [2, 48], [2, 48])
    ]
    *copied, padded, one = launches(outcome)
    for launch in copied:
        assert launch["params"]["x"] != 0x1000
        assert launch["params"]["x_stride"] == 64
    assert (padded["params"]["x"], padded["params"]["x_stride"]) == (0x1000, 80)
    assert (one["params"]["x"], one["params"]["x_stride"]) == (0x1000, 0)


FALLBACKS = [
    "path(tensor(9, 64))",
    "path(tensor(3, 3, 64))",
    "path(tensor(0, 64))",
    "path(tensor(2, 0, 64))",
    "path(tensor(1, 64, dtype=torch.float32), tensor(48, 64, dtype=torch.float32))",
    "path(torch.zeros(1, 64), torch.zeros(48, 64))",
    "path(torch.zeros(1, 64, device='meta'), torch.zeros(48, 64, device='meta'))",
    "path(torch.zeros(1, 64, dtype=torch.bfloat16), weight)",
    "path(tensor(1, 64), torch.zeros(48, 64, dtype=torch.bfloat16))",
    "path(tensor(1, 64), bias=torch.zeros(48, dtype=torch.bfloat16))",
    "path(tensor(1, 64, device='cuda:1'), tensor(48, 64, device='cuda:1'))",
    "path(tensor(1, 64), tensor(48, 64, device='cuda:1'))",
    "path(tensor(1, 64), tensor(48, 64, dtype=torch.float16))",
    "path(tensor(1, 64), bias=tensor(48, dtype=torch.float16))",
    "path(tensor(1, 64), tensor(48, 64, stride=(1, 48)))",
    "path(tensor(1, 64), tensor(48, 64, stride=(64, 0)))",
    "path(tensor(1, 64), bias=tensor(48, stride=(0,)))",
    "path(tensor(1, 64), bias=tensor(47))",
    "path(tensor(1, 64), bias=tensor(1, 48))",
    "path(tensor(1, 64), tensor(64))",
    "path(tensor(1, 64), tensor(2, 48, 64))",
    "path(tensor(1, 64), tensor(0, 64))",
    "path(tensor(1, 64), tensor(48, 72))",
    "path(tensor(1, 0), tensor(48, 0))",
    "path(tensor())",
    "path(tensor(1, 8), tensor(2**31, 8))",
    "path(tensor(1, 2**31), tensor(2, 2**31))",
    "path(tensor(1, 64, address=0))",
    "path(tensor(1, 64, address=0x1001))",
    "path(tensor(1, 64), tensor(48, 64, address=0))",
    "path(tensor(1, 64), bias=tensor(48, address=0x1001))",
    "path(tensor(1, 64, negated=True))",
    "path(tensor(1, 64), tensor(48, 64, negated=True))",
    "path(tensor(1, 64), bias=tensor(48, negated=True))",
    "path(tensor(1, 64).requires_grad_())",
    "path(tensor(1, 64), tensor(48, 64).requires_grad_())",
    "path(tensor(1, 64), bias=tensor(48).requires_grad_())",
    "path(Other(torch.zeros(1, 64, dtype=torch.bfloat16)))",
    "path(tensor(1, 64), Other(torch.zeros(48, 64, dtype=torch.bfloat16)))",
    "path([1.0])",
    "path(tensor(1, 64), None)",
    "path(tensor(1, 64), bias=1.0)",
    "path(torch.zeros(2, 64).to_sparse())",
    "within(autocast())",
    "within(Mode())",
    "within(torch.autograd.forward_ad.dual_level())",
]


def test_elsewhere_torch_does_it(recorder, artifacts):
    script = """
    import contextlib, warnings
    from torch.utils._python_dispatch import TorchDispatchMode
    warnings.filterwarnings("ignore")
    class Other(OnDevice): pass
    class Mode(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            return function(*args, **(kwargs or {}))
    @contextlib.contextmanager
    def autocast():
        torch.set_autocast_enabled("cuda", True)  # torch.autocast wants a GPU
        try:
            yield
        finally:
            torch.set_autocast_enabled("cuda", False)
    x = tensor(1, 64)
    def within(context):
        with context:
            return path(x)
    """
    lines = [f"say([path(x), {each}])" for each in FALLBACKS]
    outcome = run(recorder, artifacts, textwrap.dedent(script) + "\n".join(lines))
    answers = dict(zip(FALLBACKS, map(json.loads, outcome.stdout.splitlines()), strict=True))
    assert answers == {each: [[1, 48], "F.linear"] for each in FALLBACKS}
    assert len(launches(outcome)) == len(FALLBACKS)


def test_gradients_that_are_off_are_no_reason(recorder, artifacts):
    outcome = run(
        recorder,
        artifacts,
        "x, w = tensor(1, 64).requires_grad_(), tensor(48, 64, address=0x9000).requires_grad_()\n"
        "with torch.no_grad(): say(path(x, w))\n"
        "with torch.inference_mode(): say(path(x, w))",
    )
    assert len(launches(outcome)) == 2


def test_errors_of_shapes_are_torchs(recorder, artifacts):
    outcome = run(
        recorder,
        artifacts,
        """
        torch.nn.functional.linear = F_linear
        cpu = torch.zeros(48, 64)
        for arguments in ((torch.zeros(1, 72), cpu), ([1.0], cpu), (torch.zeros(1, 64), cpu, cpu)):
            own, torchs = failure(k.linear, *arguments), failure(F_linear, *arguments)
            assert torchs is not None
            say(own == torchs)
        """,
    )
    assert outcome.stdout == "true\n" * 3


def test_what_is_compiled_or_traced_holds_the_operation(recorder, artifacts):
    outcome = run(
        recorder,
        artifacts,
        """
        import warnings
        warnings.filterwarnings("ignore")
        torch.nn.functional.linear = F_linear
        seen = []
        def backend(graph, inputs):
            seen.extend(str(node.target) for node in graph.graph.nodes)
            return graph.forward
        x, w = torch.zeros(1, 64), torch.zeros(48, 64)
        say(list(torch.compile(k.linear, backend=backend, fullgraph=True)(x, w).shape))
        say([name for name in seen if "linear" in name])
        say("aten::linear" in str(torch.jit.trace(k.linear, (x, w)).graph))
        say(list(torch.vmap(k.linear, (0, None))(torch.zeros(3, 64), w).shape))
        """,
    )
    shape, names, traced, mapped = map(json.loads, outcome.stdout.splitlines())
    assert shape == [1, 48]
    assert len(names) == 1
    assert traced is True
    assert mapped == [3, 48]


def test_the_process_uses_what_it_loaded_first(recorder, artifacts, make_set, gemv):
    outcome = recorder.loader(
        artifacts,
        """
        from sonata_aot.loader import default
        x, weight = torch.zeros(1, 64), torch.zeros(48, 64)
        say(failure(lambda: loader.linear(x, weight)))
        first = loader.load(ARTIFACTS, devices=[0])
        loader.load(ARTIFACTS, devices=[1])
        assert default._default is first
        first.linear = lambda *arguments: list(map(id, arguments)) == [id(x), id(weight), id(None)]
        say(loader.linear(x, weight))
        """,
        env=HOPPER,
    )
    nothing, used = map(json.loads, outcome.stdout.splitlines())
    assert (nothing["type"], nothing["sonata"]) == ("SonataError", True)
    assert "load()" in nothing["message"]
    assert used is True


def test_a_set_without_the_gemv_leaves_all_to_torch(recorder, make_set, gemv):
    directory = make_set(dataclasses.replace(gemv, name="axpy"))
    outcome = recorder.loader(
        directory,
        "k = loader.load(ARTIFACTS, devices=[0])\n"
        "say(list(k.linear(torch.zeros(1, 64), torch.zeros(48, 64)).shape))",
        env=HOPPER,
    )
    assert outcome.value == [1, 48]
