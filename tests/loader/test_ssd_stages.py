"""What `kernels.ssd` refuses: with a CPU as the device that kernels were loaded on."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from sonata_aot.artifacts import Declaration
from sonata_aot.artifacts.errors import ArgumentError, ManifestError, VariantMissing
from sonata_aot.kernels import builtin
from sonata_aot.loader import runtime
from sonata_aot.loader.ssd_stages import Stages

CPU = -1
BATCH, SEQLEN, HEADS, GROUPS, HEADDIM, DSTATE, CHUNK, CHUNKS = 2, 20, 4, 2, 32, 16, 8, 3
STAGES = ("chunk_cumsum", "bmm_chunk", "chunk_state", "state_passing", "chunk_scan")


class Loaded:
    """Takes launches, and keeps what they pass by name."""

    def __init__(self, declaration: Declaration) -> None:
        self.declaration = declaration
        self.launched: list[dict[str, Any]] = []

    def grid(self, sizes: Mapping[str, int]) -> tuple[int, int, int]:
        variant = {"headdim": HEADDIM, "dstate": DSTATE, "width": HEADDIM, "columns": DSTATE}
        return self.declaration.grid_shape(variant, sizes)

    def enqueue(self, stream: int, grid: Any, arguments: Any) -> None:
        names = [parameter.name for parameter in self.declaration.parameters]
        self.declaration.pack(*arguments)
        self.launched.append(dict(zip(names, arguments, strict=True)) | {"grid": grid})


class Table:
    """One kernel's table, with binaries for the sizes above."""

    def __init__(self, declaration: Declaration) -> None:
        self.declaration = declaration
        sizes = {"dtype": "bf16", "headdim": HEADDIM, "dstate": DSTATE}
        self.key = (CPU, *[sizes[name] for name in declaration.selectors])
        self.loaded = Loaded(declaration)

    def get(self, *key: Any) -> Loaded | None:
        return self.loaded if key == self.key else None

    def all(self) -> Mapping[Any, Loaded]:
        return {self.key: self.loaded}


Tables = dict[str, Any]


@pytest.fixture
def tables(monkeypatch: pytest.MonkeyPatch) -> Tables:
    monkeypatch.setattr(runtime, "current_stream", lambda device: 0)
    names = [f"ssd_{stage}" for stage in STAGES]
    return {name: Table(builtin()[name].declaration) for name in names}


@pytest.fixture
def stages(tables: Tables) -> Stages:
    return Stages(tables, {CPU: 4})


def rows(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.zeros(shape, dtype=dtype)


def floats(*shape: int) -> torch.Tensor:
    return rows(*shape, dtype=torch.float32)


X = (BATCH, SEQLEN, HEADS, HEADDIM)
B = (BATCH, SEQLEN, GROUPS, DSTATE)
STEPS = (BATCH, HEADS, CHUNKS, CHUNK)
STATES = (BATCH, CHUNKS, HEADS, HEADDIM, DSTATE)
CB = (BATCH, CHUNKS, GROUPS, CHUNK, CHUNK)


def arguments(stage: str) -> dict[str, Any]:
    """Those of a call that is right."""
    return {
        "chunk_cumsum": lambda: {
            "dt": rows(BATCH, SEQLEN, HEADS),
            "A": floats(HEADS),
            "chunk_size": CHUNK,
            "dt_bias": floats(HEADS),
        },
        "bmm_chunk": lambda: {"a": rows(*B), "b": rows(*B), "chunk_size": CHUNK},
        "chunk_state": lambda: {
            "B": rows(*B),
            "x": rows(*X),
            "dt": floats(*STEPS),
            "dA_cumsum": floats(*STEPS),
        },
        "state_passing": lambda: {
            "states": floats(*STATES),
            "dA_chunk_cumsum": floats(*STEPS)[..., -1],
            "initial_states": rows(BATCH, HEADS, HEADDIM, DSTATE),
        },
        "chunk_scan": lambda: {
            "cb": floats(*CB),
            "x": rows(*X),
            "dt": floats(*STEPS),
            "dA_cumsum": floats(*STEPS),
            "C": rows(*B),
            "states": floats(*STATES),
            "D": floats(HEADS),
            "z": rows(*X),
        },
        "combined": lambda: {
            "x": rows(*X),
            "dt": rows(BATCH, SEQLEN, HEADS),
            "A": floats(HEADS),
            "B": rows(*B),
            "C": rows(*B),
            "chunk_size": CHUNK,
        },
    }[stage]()


@pytest.mark.parametrize("stage", [*STAGES, "combined"])
def test_a_call_that_is_right(stages: Stages, tables: Tables, stage: str) -> None:
    getattr(stages, stage)(**arguments(stage))
    launched = [name for name, table in tables.items() if table.loaded.launched]
    assert launched == ([f"ssd_{s}" for s in STAGES] if stage == "combined" else [f"ssd_{stage}"])
    if stage == "combined":
        (last,) = tables["ssd_chunk_scan"].loaded.launched
        assert last["states_kind"] == 1
        assert last["group_heads"] == HEADS // GROUPS


SEQUENCES = torch.zeros(BATCH, SEQLEN, dtype=torch.int32)
# (stage, what is other than right, what the error says)
WRONG: list[tuple[str, dict[str, Any], str]] = [
    ("chunk_cumsum", {"dt": floats(BATCH, SEQLEN)}, "dt has shape (2, 20); pass (batch, seqlen"),
    ("chunk_cumsum", {"dt": [1.0]}, "dt is a list; pass a torch.Tensor"),
    ("chunk_cumsum", {"A": floats(3)}, "A has shape (3,); pass (heads,), here (4,)"),
    ("chunk_cumsum", {"A": rows(4, dtype=torch.float64)}, "A is torch.float64; pass torch.float32"),
    ("chunk_cumsum", {"dt_bias": floats(4, 1)}, "dt_bias has shape (4, 1)"),
    ("chunk_cumsum", {"chunk_size": 0}, "chunk_size is 0; pass 1 to 2**30"),
    ("chunk_cumsum", {"chunk_size": 8.0}, "chunk_size is 8.0; pass an int"),
    ("chunk_cumsum", {"dt_limit": 3}, "dt_limit is 3; pass two numbers"),
    ("bmm_chunk", {"a": floats(*B)}, "a is torch.float32; pass torch.bfloat16 or torch.float16"),
    ("bmm_chunk", {"b": rows(*B).half()}, "b is torch.float16, a torch.bfloat16; convert one"),
    ("bmm_chunk", {"b": rows(2, 20, 2, 32)}, "b has shape (2, 20, 2, 32)"),
    ("bmm_chunk", {"output_dtype": torch.float64}, "output_dtype is torch.float64"),
    ("bmm_chunk", {"seq_idx": SEQUENCES.long()}, "seq_idx is torch.int64; pass torch.int32"),
    ("bmm_chunk", {"seq_idx": SEQUENCES[:, 1:]}, "seq_idx has shape (2, 19)"),
    ("chunk_state", {"B": rows(2, 20, 3, 16)}, "B has 3 groups, x 4 heads"),
    ("chunk_state", {"B": rows(2, 20, 0, 16)}, "B has 0 groups, x 4 heads"),
    ("chunk_state", {"dt": floats(2, 4, 2, 8)}, "dt has 2 chunks of 8, x 20 tokens"),
    ("chunk_state", {"dt": rows(*STEPS)}, "dt is torch.bfloat16; pass torch.float32"),
    ("chunk_state", {"dA_cumsum": floats(2, 4, 5, 4)}, "dA_cumsum has shape (2, 4, 5, 4)"),
    ("state_passing", {"states": rows(*STATES)}, "states is torch.bfloat16; pass torch.float32"),
    ("state_passing", {"states": floats(2, 3, 4, 2)}, "states have 2 numbers a head"),
    ("state_passing", {"seq_idx": SEQUENCES}, "seq_idx without chunk_size; pass both"),
    ("state_passing", {"seq_idx": SEQUENCES, "chunk_size": 5}, "seq_idx has 20 tokens, 3 chunks"),
    ("state_passing", {"out_dtype": torch.int32}, "out_dtype is torch.int32"),
    ("chunk_scan", {"cb": floats(2, 3, 4, 8, 8)}, "cb has shape (2, 3, 4, 8, 8)"),
    ("chunk_scan", {"states": rows(*STATES).half()}, "states is torch.float16"),
    ("chunk_scan", {"D": floats(4, 1)}, "D has shape (4, 1); pass (heads,) or (heads, headdim)"),
    ("chunk_scan", {"z": rows(*X).half()}, "z is torch.float16; pass torch.bfloat16"),
    ("chunk_cumsum", {"dt_limit": (1.0, 0.5)}, "dt_limit is (1.0, 0.5); pass two numbers, the low"),
    ("chunk_cumsum", {"dt_limit": (torch.nan, 1.0)}, "dt_limit is (nan, 1.0)"),
    ("chunk_cumsum", {"dt_limit": (torch.zeros(1), 1.0)}, "dt_limit is (tensor([0.]), 1.0)"),
    ("combined", {"return_varlen_states": True}, "the stages make no varlen states"),
    # As many chunks as x has, and fewer tokens.
    ("combined", {"dt": rows(BATCH, SEQLEN - 1, HEADS)}, "dt has shape (2, 19, 4); pass (batch, s"),
    ("combined", {"dt": rows(BATCH, SEQLEN, HEADS + 1)}, "dt has shape (2, 20, 5)"),
    ("combined", {"A": floats(3)}, "A has shape (3,); pass (heads,), here (4,)"),
    ("combined", {"B": rows(2, 20, 3, 16)}, "B has 3 groups, x 4 heads"),
    ("combined", {"C": rows(*B).half()}, "C is torch.float16; pass torch.bfloat16"),
    ("combined", {"C": rows(2, 20, 2, 32)}, "C has shape (2, 20, 2, 32)"),
    ("combined", {"chunk_size": 0}, "chunk_size is 0; pass 1 to 2**30"),
    ("combined", {"D": floats(4, 1)}, "D has shape (4, 1); pass (heads,) or (heads, headdim)"),
    ("combined", {"z": rows(*X[:3], 1)}, "z has shape (2, 20, 4, 1)"),
    ("combined", {"dt_bias": floats(3)}, "dt_bias has shape (3,)"),
    ("combined", {"dt_limit": (1.0, 0.5)}, "dt_limit is (1.0, 0.5)"),
    ("combined", {"initial_states": rows(2, 4, 16, 32)}, "initial_states has shape (2, 4, 16, 32)"),
    ("combined", {"seq_idx": SEQUENCES[:, 1:]}, "seq_idx has shape (2, 19)"),
]


@pytest.mark.parametrize(("stage", "changes", "message"), WRONG)
def test_refusals_name_the_argument_and_the_remedy(
    stages: Stages, tables: Tables, stage: str, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(ArgumentError, match=rf"^{stage}: {re.escape(message)}"):
        getattr(stages, stage)(**(arguments(stage) | changes))
    assert not tables[f"ssd_{STAGES[0]}" if stage == "combined" else f"ssd_{stage}"].loaded.launched


CHANGES: dict[str, tuple[Callable[[torch.Tensor], torch.Tensor], str]] = {
    "sparse": (lambda x: x.to_sparse(), "x is torch.sparse_coo"),
    "without memory": (lambda x: x.to("meta"), "x has no memory"),
    "negated": (torch._neg_view, "x is a negated view"),  # pyright: ignore
    "requires grad": (lambda x: x.requires_grad_(), "x requires grad"),
}


@pytest.mark.parametrize(("change", "message"), CHANGES.values(), ids=list(CHANGES))
def test_memory_that_a_kernel_cannot_read(
    stages: Stages, change: Callable[[torch.Tensor], torch.Tensor], message: str
) -> None:
    given = arguments("chunk_state")
    with pytest.raises(ArgumentError, match=re.escape(message)):
        stages.chunk_state(**given | {"x": change(given["x"])})


@pytest.mark.parametrize("transform", [torch.func.vmap, torch.func.grad])
def test_tensors_of_a_transform_are_refused(stages: Stages, transform: Any) -> None:
    given = arguments("chunk_cumsum")
    dt = torch.stack([given.pop("dt")])
    with pytest.raises(ArgumentError, match=r"^chunk_cumsum: dt cannot be read: "):
        transform(lambda part: stages.chunk_cumsum(part, **given))(
            dt if transform is torch.func.vmap else dt[0]
        )


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("layout", [torch.strided, torch.jagged])
def test_nested_tensors_are_refused(stages: Stages, layout: torch.layout) -> None:
    nested = torch.nested.nested_tensor([rows(3, HEADS), rows(5, HEADS)], layout=layout)
    with pytest.raises(ArgumentError, match=r"^chunk_cumsum: dt is nested; pass a dense tensor"):
        stages.chunk_cumsum(nested, floats(HEADS), CHUNK)


@pytest.mark.filterwarnings("ignore:Accessing the data pointer of FakeTensor")
def test_results_that_are_fake_are_not_written_to(stages: Stages, tables: Tables) -> None:
    """A mode of torch makes such of real arguments: the kernel would write to address 0."""
    given = arguments("chunk_cumsum")
    with (
        FakeTensorMode(allow_non_fake_inputs=True),
        pytest.raises(ArgumentError, match=r"^chunk_cumsum: steps has no memory: a fake tensor"),
    ):
        stages.chunk_cumsum(**given)
    assert not tables["ssd_chunk_cumsum"].loaded.launched


def test_a_gradient_that_nobody_asks_for_is_no_matter(stages: Stages) -> None:
    given = arguments("chunk_state")
    with torch.no_grad():
        stages.chunk_state(**given | {"x": given["x"].requires_grad_()})


def test_another_device(tables: Tables) -> None:
    with pytest.raises(ArgumentError, match=r"x is on cpu, and kernels were loaded on \[0, 1\]"):
        Stages(tables, {1: 8, 0: 8}).chunk_state(**arguments("chunk_state"))


def test_a_size_that_was_not_built_lists_those_that_were(stages: Stages) -> None:
    given = arguments("chunk_state") | {"x": rows(BATCH, SEQLEN, HEADS, 48)}
    expected = "dtype bf16, headdim 48, dstate 16; there are dtype bf16, headdim 32, dstate 16"
    with pytest.raises(VariantMissing, match=expected):
        stages.chunk_state(**given)


def test_a_kernel_that_was_not_built(tables: Tables) -> None:
    del tables["ssd_bmm_chunk"]
    with pytest.raises(VariantMissing, match="no kernel 'ssd_bmm_chunk' in the artifacts"):
        Stages(tables, {CPU: 4}).bmm_chunk(**arguments("bmm_chunk"))


@pytest.mark.parametrize("stage", STAGES)
def test_another_kernel_of_the_same_name(tables: Tables, stage: str) -> None:
    name = f"ssd_{stage}"
    other = "ssd_chunk_scan" if stage == "bmm_chunk" else "ssd_bmm_chunk"
    tables[name].declaration = dataclasses.replace(builtin()[other].declaration, name=name)
    with pytest.raises(ManifestError, match=f"the artifacts' {name} has other parameters"):
        Stages(tables, {CPU: 4})


def test_infinite_and_too_large_limits_count_as_infinite(stages: Stages, tables: Tables) -> None:
    stages.chunk_cumsum(**arguments("chunk_cumsum"), dt_limit=(-1e300, 1e300))
    (launched,) = tables["ssd_chunk_cumsum"].loaded.launched
    assert (launched["low"], launched["high"]) == (-torch.inf, torch.inf)
    stages.chunk_cumsum(**arguments("chunk_cumsum"), dt_limit=(-(10**400), 10**400))
    *_, launched = tables["ssd_chunk_cumsum"].loaded.launched
    assert (launched["low"], launched["high"]) == (-torch.inf, torch.inf)


@pytest.mark.parametrize(
    ("multiprocessors", "chunk_size", "tiles"),
    [(1, 600, 10), (10, 600, 3), (1000, 600, 1), (1, 8, 1)],
)
def test_blocks_take_more_tiles_where_there_are_many(
    tables: Tables, multiprocessors: int, chunk_size: int, tiles: int
) -> None:
    """Two batches of twelve heads."""
    shape = (2, 600, 12, HEADDIM)
    group = rows(2, 600, 1, DSTATE)
    Stages(tables, {CPU: multiprocessors}).combined(
        rows(*shape), rows(*shape[:3]), floats(12), group, group, chunk_size
    )
    (launched,) = tables["ssd_chunk_scan"].loaded.launched
    assert launched["block_tiles"] == tiles
