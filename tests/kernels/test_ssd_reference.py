# ruff: noqa: N803, N806 - A, B and C are the names of the call.
"""The SSD reference is itself held against formulas that share nothing with it."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from ssd_cases import indices, operands, options, run, tokens

INF = float("inf")
NAN = float("nan")


def close(found: Tensor, wanted: Tensor, tolerance: float = 1e-12) -> None:
    torch.testing.assert_close(found, wanted, rtol=tolerance, atol=tolerance)


def chunked(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    chunk: int,
    state: Tensor,
    sequence: Tensor,
) -> tuple[Tensor, Tensor]:
    """The same sums in another order: within chunks as matrix products, a state between chunks.

    `sequence` numbers the sequences of each row; `state` belongs to number 0.
    """
    ratio = x.shape[2] // B.shape[2]
    B, C = (t.repeat_interleave(ratio, dim=2) for t in (B, C))
    last = torch.zeros(x.shape[0], 1, dtype=sequence.dtype)
    outs = [x[:, :0]]
    for begin in range(0, x.shape[1], chunk):
        xc, dtc, Bc, Cc, sc = (t[:, begin : begin + chunk] for t in (x, dt, B, C, sequence))
        sums = (dtc * A).cumsum(1)
        # 1 where token j is in the past and in the sequence of token i.
        same = (sc[:, :, None] == sc[:, None, :]).tril().double()
        weights = (sums[:, :, None] - sums[:, None, :]).clamp(max=0).exp() * same[..., None]
        carried = sums.exp() * (sc == last).double()[..., None]
        scores = torch.einsum("bihn,bjhn->bijh", Cc, Bc) * weights
        out = torch.einsum("bijh,bjh,bjhp->bihp", scores, dtc, xc)
        out = out + torch.einsum("bihn,bhpn,bih->bihp", Cc, state, carried)
        outs.append(out)
        state = state * carried[:, -1, :, None, None]
        state = state + torch.einsum("bjh,bjh,bjhp,bjhn->bhpn", weights[:, -1], dtc, xc, Bc)
        last = sc[:, -1:]
    return torch.cat(outs, 1), state


@settings(max_examples=60, deadline=None)
@given(
    batch=st.integers(0, 3),
    seqlen=st.integers(0, 33),
    groups=st.integers(1, 3),
    ratio=st.integers(1, 3),
    headdim=st.integers(1, 5),
    dstate=st.integers(1, 5),
    chunk=st.integers(1, 40),
    seed=st.integers(0, 2**31),
    present=st.sets(st.sampled_from(["D", "z", "dt_bias", "initial_states", "seq_idx"])),
    softplus=st.booleans(),
    limit=st.sampled_from([(0.0, INF), (0.1, 0.9)]),
    changes=st.sampled_from([0.0, 0.1, 0.6]),
)
def test_it_equals_the_chunked_form(
    batch: int,
    seqlen: int,
    groups: int,
    ratio: int,
    headdim: int,
    dstate: int,
    chunk: int,
    seed: int,
    present: set[str],
    softplus: bool,
    limit: tuple[float, float],
    changes: float,
) -> None:
    needed = operands(
        batch=batch,
        seqlen=seqlen,
        groups=groups,
        ratio=ratio,
        headdim=headdim,
        dstate=dstate,
        seed=seed,
    )
    needed["dt"] = needed["dt"] * 4 - 1
    extra = {k: v for k, v in options(needed, seed=seed + 1).items() if k in present}
    sequence = torch.zeros(batch, seqlen, dtype=torch.int32)
    if "seq_idx" in present:
        random = torch.rand(batch, seqlen, generator=torch.Generator().manual_seed(seed))
        sequence = (random < changes).int().cumsum(1)
        extra["seq_idx"] = sequence.int()
    out, final = run(**needed, **extra, dt_softplus=softplus, dt_limit=limit)

    dt = needed["dt"] + extra.get("dt_bias", torch.zeros(()))
    if softplus:
        dt = torch.logaddexp(dt, torch.zeros((), dtype=torch.float64))
    low, high = torch.tensor(limit, dtype=torch.float64)
    dt = torch.minimum(torch.maximum(dt, low), high)
    shape = (batch, groups * ratio, headdim, dstate)
    state = extra.get("initial_states", torch.zeros(shape, dtype=torch.float64))
    x, A, B, C = (needed[name] for name in "xABC")
    wanted, state = chunked(x, dt, A, B, C, chunk, state, sequence)
    if "D" in extra:
        wanted = wanted + extra["D"][:, None] * x
    if "z" in extra:
        wanted = wanted * extra["z"] / (1 + torch.exp(-extra["z"]))
    assert out.dtype == final.dtype == torch.float64
    close(out, wanted, 1e-10)
    close(final, state, 1e-10)


def test_without_decay_states_are_plain_sums() -> None:
    arguments = operands(groups=1, ratio=2) | {"A": torch.zeros(2)}
    x, dt, B, C = (arguments[name] for name in ("x", "dt", "B", "C"))
    products = torch.einsum("blh,blhp,bln->blhpn", dt, x, B[:, :, 0])
    states = products.cumsum(1)
    out, final = run(**arguments)
    close(final, products.sum(1))
    close(out, torch.einsum("blhpn,bln->blhp", states, C[:, :, 0]))


def test_where_dt_is_0_nothing_happens() -> None:
    arguments = operands()
    extra = options(arguments)
    arguments["dt"] = torch.zeros_like(arguments["dt"])
    initial = extra["initial_states"]
    out, final = run(**arguments, D=extra["D"], initial_states=initial)
    assert torch.equal(final, initial)
    C = arguments["C"].repeat_interleave(2, 2)
    wanted = torch.einsum("bhpn,blhn->blhp", initial, C) + arguments["x"] * extra["D"][:, None]
    close(out, wanted)


def test_a_constant_input_makes_a_geometric_series() -> None:
    ones = torch.ones(1, 40, 1, 1)
    out, final = run(x=ones, dt=ones[..., 0] / 2, A=torch.tensor([-0.25]), B=ones, C=3 * ones)
    factor = math.exp(-0.125)
    series = [0.5 * (1 - factor**k) / (1 - factor) for k in range(1, 41)]
    close(out.flatten(), 3 * torch.tensor(series, dtype=torch.float64))
    close(final.flatten(), torch.tensor(series[-1:], dtype=torch.float64))


def test_a_single_step() -> None:
    arguments = operands(batch=1, seqlen=1, groups=1, ratio=1)
    state = options(arguments)["initial_states"]
    x, dt, A, B, C = (arguments[name].flatten() for name in ("x", "dt", "A", "B", "C"))
    wanted = state[0, 0] * math.exp(dt * A) + torch.outer(dt * x, B)
    out, final = run(**arguments, initial_states=state)
    close(final[0, 0], wanted)
    close(out.flatten(), wanted @ C)


def test_hard_numbers_stay_finite() -> None:
    arguments = operands(seqlen=200) | {"A": torch.tensor([0.0, -1e-6, -20.0, -1e4])}
    arguments["dt"] = torch.logspace(-4, math.log10(20), 200).reshape(1, 200, 1).expand(2, 200, 4)
    out, final = run(**arguments)
    assert out.isfinite().all()
    assert final.isfinite().all()
    # With such a decay nothing of the past is left.
    last = torch.einsum("bp,bn->bpn", arguments["x"][:, -1, 3] * 20, arguments["B"][:, -1, 1])
    close(final[:, 3], last, 1e-6)


def test_heads_read_the_group_that_they_belong_to() -> None:
    arguments = operands(groups=2, ratio=3)
    spread = arguments | {name: arguments[name].repeat_interleave(3, 2) for name in "BC"}
    for grouped, alone in zip(run(**arguments), run(**spread), strict=True):
        close(grouped, alone)
    touched = arguments | {"B": arguments["B"] * torch.tensor([1.0, 2.0])[:, None]}
    changed = (run(**touched)[1] != run(**arguments)[1]).flatten(2).any(2).any(0)
    assert changed.tolist() == [False] * 3 + [True] * 3


def test_chunk_size_is_no_part_of_the_result() -> None:
    arguments = operands()
    out, final = run(**arguments)
    for size in (1, 7, 256):
        again = run(**arguments, chunk_size=size)
        assert torch.equal(again[0], out)
        assert torch.equal(again[1], final)


@pytest.mark.parametrize("at", range(12))
def test_a_sequence_can_be_cut_anywhere(at: int) -> None:
    arguments = operands(seqlen=11)
    arguments |= options(arguments)
    out, final = run(**arguments)
    first, state = run(**tokens(arguments, 0, at))
    second, end = run(**tokens(arguments, at, 11) | {"initial_states": state})
    close(torch.cat([first, second], 1), out)
    close(end, final)


@pytest.mark.parametrize("lengths", [(11,), (1, 10), (10, 1), (3, 5, 3), (1,) * 11])
def test_seq_idx_is_running_the_sequences_apart(lengths: tuple[int, ...]) -> None:
    arguments = operands(batch=1, seqlen=11)
    arguments |= options(arguments)
    out, final = run(**arguments, seq_idx=indices(*lengths))
    start, outs, state = 0, [], Tensor()
    for length in lengths:
        if start:
            del arguments["initial_states"]
        found, state = run(**tokens(arguments, start, start + length))
        arguments["initial_states"] = torch.empty(0)
        outs.append(found)
        start += length
    close(torch.cat(outs, 1), out)
    close(final, state)


def test_rows_have_sequences_of_their_own() -> None:
    arguments = operands()
    arguments |= options(arguments) | {"seq_idx": torch.cat([indices(4, 7), indices(9, 2)])}
    shared = {"A", "D", "dt_bias"}
    out, final = run(**arguments)
    for row in range(2):
        alone = {k: v if k in shared else v[row : row + 1] for k, v in arguments.items()}
        close(run(**alone)[0], out[row : row + 1])
        close(run(**alone)[1], final[row : row + 1])


def test_initial_states_belong_to_index_0() -> None:
    arguments = operands(batch=1)
    initial = options(arguments)["initial_states"]
    with_states = run(**arguments, initial_states=initial, seq_idx=indices(11))
    close(with_states[0], run(**arguments, initial_states=initial)[0])
    # Not even a NaN of theirs reaches another index.
    poison = torch.full_like(initial, NAN)
    dropped = run(**arguments, initial_states=poison, seq_idx=indices(11) + 3)
    for found, wanted in zip(dropped, run(**arguments), strict=True):
        assert torch.equal(found, wanted)


def test_an_index_that_comes_back_is_a_new_sequence() -> None:
    arguments = operands(batch=1)
    back = torch.tensor([[0, 0, 0, 1, 1, 0, 0, 0, 0, 0, 0]])
    for found, wanted in zip(
        run(**arguments, seq_idx=back), run(**arguments, seq_idx=indices(3, 2, 6)), strict=True
    ):
        assert torch.equal(found, wanted)


def test_padding_adds_nothing_to_a_state() -> None:
    arguments = operands(batch=2)
    padded = torch.cat([indices(11), indices(4, 7)])
    padded[1, 4:] = -1
    out, final = run(**arguments, seq_idx=padded)
    plain = run(**arguments)
    assert torch.equal(out[0], plain[0][0])
    assert torch.equal(final[0], plain[1][0])
    assert torch.equal(out[1, :4], plain[0][1, :4])
    assert torch.equal(final[1], torch.zeros_like(final[1]))
