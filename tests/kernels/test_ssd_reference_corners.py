"""The SSD reference's corners: dt, D with z, states of many sequences, layouts, refusals."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from ssd_cases import indices, operands, options, run, tokens
from ssd_reference import scan, step_sizes

INF = float("inf")
NAN = float("nan")


def close(found: Tensor, wanted: Tensor) -> None:
    torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-12)


def sizes(*dt: float, bias: float | None = None, **how: Any) -> list[float]:
    """What becomes of these dt of one head."""
    added = None if bias is None else torch.tensor([bias], dtype=torch.float64)
    values = torch.tensor(dt, dtype=torch.float64).reshape(1, -1, 1)
    return step_sizes(values, added, **{"softplus": False, "limit": (0.0, INF)} | how)[
        0, :, 0
    ].tolist()


def softplus(value: float) -> float:
    return math.log1p(math.exp(value))


def test_negative_dt_counts_as_0_by_default() -> None:
    assert sizes(-1.0, -0.0, 2.0) == [0.0, 0.0, 2.0]
    assert sizes(-1.0, limit=(-INF, INF)) == [-1.0]


def test_the_bias_comes_before_softplus_and_the_limits_last() -> None:
    wanted = [softplus(-1.5), 0.5]
    assert sizes(-2.0, 3.0, bias=0.5, softplus=True, limit=(0.01, 0.5)) == pytest.approx(wanted)
    assert sizes(-2.0, 3.0, bias=0.5, limit=(0.25, 3.25)) == [0.25, 3.25]


def test_softplus_ends_at_20() -> None:
    above = math.nextafter(20, 21)
    found = sizes(-800.0, -30.0, 0.0, 20.0, above, 800.0, softplus=True)
    assert found[:2] == [0.0, pytest.approx(math.exp(-30), rel=1e-12)]
    assert found[2:4] == pytest.approx([math.log(2), softplus(20)], rel=1e-15)
    assert found[3] > 20
    assert found[4:] == [above, 800.0]
    # The sum with the bias decides, not dt.
    assert sizes(15.0, bias=6.0, softplus=True) == [21.0]


@pytest.mark.parametrize("per_channel", [False, True])
def test_z_gates_d_too(per_channel: bool) -> None:
    arguments = operands(headdim=3)
    z = options(arguments)["z"]
    D = torch.linspace(-1, 2, 12, dtype=torch.float64).reshape(4, 3)  # noqa: N806
    D = D if per_channel else D[:, 0]  # noqa: N806
    plain, final = run(**arguments)
    out, gated_final = run(**arguments, D=D, z=z)
    each = D if per_channel else D[:, None].expand(4, 3)
    close(out, (plain + arguments["x"] * each) * z * torch.sigmoid(z))
    assert torch.equal(gated_final, final)


def varlen(*bounds: int, **arguments: Any) -> Tensor:
    cu_seqlens = torch.tensor(bounds, dtype=torch.int32)
    return scan(**arguments, cu_seqlens=cu_seqlens, return_varlen_states=True)[1]


def test_varlen_states_are_those_of_each_sequence_alone() -> None:
    arguments = operands(batch=1, seqlen=11)
    initial = options(arguments)["initial_states"]
    states = varlen(0, 4, 5, 11, **arguments, initial_states=initial, seq_idx=indices(4, 1, 6))
    close(states[:1], run(**tokens(arguments, 0, 4), initial_states=initial)[1])
    close(states[1:2], run(**tokens(arguments, 4, 5))[1])
    close(states[2:], run(**tokens(arguments, 5, 11))[1])


def test_one_sequence_needs_no_index() -> None:
    arguments = operands(batch=1)
    arguments |= {"initial_states": options(arguments)["initial_states"]}
    close(varlen(0, 11, **arguments), run(**arguments)[1])
    close(varlen(0, 6, **arguments), run(**tokens(arguments, 0, 6))[1])


def test_empty_sequences_have_zero_states_but_for_the_first() -> None:
    arguments = operands(batch=1)
    initial = options(arguments)["initial_states"]
    arguments |= {"initial_states": initial}
    states = varlen(0, 0, 0, 11, 11, **arguments, seq_idx=indices(11) + 2)
    assert torch.equal(states[0], initial[0])
    assert not states[[1, 3]].any()
    assert torch.equal(states[2:3], run(**operands(batch=1))[1])
    states = varlen(0, 11, 11, **arguments, seq_idx=indices(11))
    assert not states[1].any()


def test_padding_after_the_last_sequence() -> None:
    arguments = operands(batch=1)
    index = indices(3, 4, 4)
    index[0, 7:] = -1
    states = varlen(0, 3, 7, **arguments, seq_idx=index)
    close(states[1:], run(**tokens(arguments, 3, 7))[1])


def test_no_sequences() -> None:
    assert varlen(0, **operands(batch=1)).shape == (0, 4, 3, 5)


@pytest.mark.parametrize(
    ("bounds", "index"),
    [
        ((0, 4, 11), None),
        ((4, 11), None),
        ((0, 4, 11), indices(11)),
        ((0, 4, 11), indices(5, 6)),
        ((0, 11), indices(4, 7)),
        ((0, 11), indices(11) - 1),
    ],
)
def test_sequences_must_agree(bounds: tuple[int, ...], index: Tensor | None) -> None:
    with pytest.raises(ValueError, match="depends on chunk_size"):
        varlen(*bounds, **operands(batch=1), seq_idx=index)


@pytest.mark.parametrize("bounds", [(), (0, 5, 4), (-1, 11), (0, 12)])
def test_bounds_must_ascend_within_the_tokens(bounds: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="must ascend"):
        varlen(*bounds, **operands(batch=1))


def test_varlen_states_need_bounds_and_one_row() -> None:
    with pytest.raises(ValueError, match="cu_seqlens"):
        scan(**operands(batch=1), return_varlen_states=True)
    with pytest.raises(ValueError, match="batch of 1"):
        varlen(0, 11, **operands(batch=2))


def test_results_come_as_asked_for() -> None:
    arguments = operands(batch=1)
    cu_seqlens = torch.tensor([0, 11])
    out = scan(**arguments)
    assert isinstance(out, Tensor)
    final = run(**arguments)[1]
    # Without return_varlen_states nobody looks at cu_seqlens.
    assert isinstance(scan(**arguments, cu_seqlens=torch.tensor([5, 3])), Tensor)
    states = scan(**arguments, cu_seqlens=cu_seqlens, return_varlen_states=True)
    everything = scan(
        **arguments, cu_seqlens=cu_seqlens, return_final_states=True, return_varlen_states=True
    )
    assert [t.shape for t in states] == [out.shape, final.shape]
    assert [t.shape for t in everything] == [out.shape, final.shape, final.shape]
    assert torch.equal(everything[1], final)


@pytest.mark.parametrize("batch", [0, 2])
def test_no_tokens_leave_the_initial_states(batch: int) -> None:
    arguments = operands(batch=batch, seqlen=0)
    initial = options(arguments)["initial_states"]
    index = torch.zeros(batch, 0, dtype=torch.int32)
    out, final = run(**arguments, initial_states=initial, seq_idx=index)
    assert out.shape == (batch, 0, 4, 3)
    assert torch.equal(final, initial)
    assert final.data_ptr() != initial.data_ptr() or not batch
    assert not run(**arguments)[1].any()


def test_slices_of_one_projection() -> None:
    wide = operands(batch=2, seqlen=7, headdim=3, dstate=5)
    flat = torch.full((2, 9, 60), NAN, dtype=torch.float64)
    views, start = dict(wide), 1
    for name in ("x", "dt", "B", "C"):
        shape = wide[name].shape
        width = wide[name][0, 0].numel()
        views[name] = flat[:, 1:8, start : start + width].unflatten(2, shape[2:])
        views[name].copy_(wide[name])
        start += width + 1
    reversed_heads = {"A": wide["A"].flip(0).as_strided((4,), (1,)).flip(0)}
    for found, wanted in zip(run(**views | reversed_heads), run(**wide), strict=True):
        assert torch.equal(found, wanted)


def test_narrow_inputs_are_taken_as_they_are_and_left_alone() -> None:
    arguments = operands(batch=1)
    arguments |= options(arguments)
    narrow = {name: tensor.bfloat16() for name, tensor in arguments.items()}
    narrow["A"], narrow["initial_states"] = arguments["A"].float(), narrow["initial_states"].half()
    before = {name: tensor.clone() for name, tensor in narrow.items()}
    found = run(**narrow)
    wanted = run(**{name: tensor.double() for name, tensor in narrow.items()})
    for one, other in zip(found, wanted, strict=True):
        assert one.dtype == torch.float64
        assert torch.equal(one, other)
    assert all(torch.equal(tensor, before[name]) for name, tensor in narrow.items())


def test_a_nan_stays_in_its_sequence() -> None:
    arguments = operands(batch=1)
    arguments["dt"][0, 5, 0] = NAN
    out, final = run(**arguments, seq_idx=indices(4, 4, 3))
    poisoned = out.isnan().all(3)[0]
    assert poisoned[:, 0].tolist() == [False] * 5 + [True] * 3 + [False] * 3
    assert not poisoned[:, 1:].any()
    assert final.isfinite().all()


def test_growing_states_are_refused() -> None:
    arguments = operands()
    for changed in ({"A": -arguments["A"]}, {"dt": -arguments["dt"], "dt_limit": (-1.0, 1.0)}):
        with pytest.raises(ValueError, match="depends on chunk_size"):
            scan(**arguments | changed)


@pytest.mark.parametrize("name", ["dt", "A", "B", "C", "D", "z", "dt_bias", "initial_states"])
def test_shapes_that_would_broadcast_are_refused(name: str) -> None:
    arguments = operands()
    arguments |= options(arguments)
    arguments[name] = arguments[name][:1]
    with pytest.raises(ValueError, match=f"^{name} is "):
        scan(**arguments)


def test_more_shapes_that_are_refused() -> None:
    with pytest.raises(ValueError, match=r"^seq_idx is "):
        scan(**operands(batch=2), seq_idx=indices(11))
    with pytest.raises(ValueError, match=r"^D is "):
        scan(**operands(), D=torch.ones(4, 1))
    odd = operands(groups=2)
    odd |= {name: torch.cat([odd[name], odd[name][:, :, :1]], 2) for name in "BC"}
    with pytest.raises(ValueError, match="4 heads are no multiple of 3 groups"):
        scan(**odd)
