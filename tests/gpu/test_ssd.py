"""The scan on a GPU against float64: every option, layout and length, NaN around all it reads."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from sonata_aot.aot.measure import mamba_opponent
from sonata_aot.aot.measure.ssd_chunked import scan_in_chunks
from sonata_aot.artifacts.errors import SonataError
from sonata_aot.loader import Kernels, direct
from ssd_problems import (
    BOUNDS,
    DTYPES,
    NAN,
    check,
    error,
    errors,
    pairs,
    problem,
    segments,
    sequences,
    torch,
    tuple_of,
)

LENGTHS = (1, 2, 15, 16, 17, 63, 64, 65, 127, 128, 129, 300)
OPTIONS: dict[str, dict[str, Any]] = {
    "nothing": {"dt_bias": None},
    "D": {"D": True},
    "D of channels": {"D": "channels"},
    "z": {"z": True, "D": True},
    "no softplus": {"dt_bias": None, "dt_softplus": False},
    "limits": {"dt_limit": (0.01, 0.1)},
    "fp32 states": {"initial_states": torch.float32},
    "bf16 states": {"initial_states": torch.bfloat16},
    "f16 states": {"initial_states": torch.float16},
    "all": {"D": "channels", "z": True, "initial_states": torch.float32, "dt_limit": (0.0, 0.2)},
}


@pytest.fixture(autouse=True)
def _poisoned(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a call allocates is NaN before its kernels run."""

    def poisoned(make: Callable[..., Any]) -> Callable[..., Any]:
        def new(*args: Any, **kwargs: Any) -> Any:
            made = make(*args, **kwargs)
            made.view(torch.uint8).fill_(0xFF) if made.numel() else None
            return made

        return new

    monkeypatch.setattr(torch.Tensor, "new_empty", poisoned(torch.Tensor.new_empty))
    if direct.empty is not None:
        monkeypatch.setattr(direct, "empty", poisoned(direct.empty))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("option", OPTIONS)
def test_every_option_at_every_length(kernels: Kernels, option: str, dtype: str):
    for seqlen in LENGTHS:
        arguments = problem(seqlen=seqlen, dtype=DTYPES[dtype], **OPTIONS[option])
        check(kernels, arguments, seqlen)


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_pair_of_headdim_and_dstate_that_was_built(kernels: Kernels, dtype: str):
    # The driver compiles each of them where they come as PTX: fewer do for the other dtype.
    for headdim, dstate in pairs(kernels, dtype)[:: 1 if dtype == "bf16" else 4]:
        sizes = {"heads": 6, "groups": 3, "headdim": headdim, "dstate": dstate}
        for seqlen in (1, 31, 33, 65, 200):
            arguments = problem(
                seqlen=seqlen,
                dtype=DTYPES[dtype],
                D="channels",
                z=True,
                initial_states=torch.float32,
                **sizes,
            )
            check(kernels, arguments, (headdim, dstate, seqlen))
            if seqlen > 33:
                with segments(kernels, 3):
                    check(kernels, arguments, (headdim, dstate, seqlen, "cut"))
        row = problem(1, 200, dtype=DTYPES[dtype], return_varlen_states=True, **sizes)
        check(kernels, {**row, **sequences(3, 61, 1, 135)}, (headdim, dstate, "varlen"))


@pytest.mark.parametrize(("heads", "groups"), [(1, 1), (3, 1), (6, 2), (24, 1), (65, 5), (80, 80)])
def test_heads_and_groups(kernels: Kernels, heads: int, groups: int):
    for batch in (1, 3):
        check(kernels, problem(batch, 130, heads, groups=groups, D=True), (batch, heads))


def test_small_dtypes_of_the_rest(kernels: Kernels):
    for kind in (torch.float32, torch.bfloat16, torch.float16):
        arguments = problem(seqlen=100, D="channels", dtype=torch.float16)
        for name in ("dt", "A", "D", "dt_bias"):
            arguments[name] = arguments[name].to(kind)
        check(kernels, arguments, kind)


def projection(batch: int, seqlen: int, shift: int = 0, heads: int = 4) -> dict[str, Any]:
    """Arguments that are slices of one tensor, `shift` elements past where rows are aligned."""
    widths = {"z": heads * 64, "x": heads * 64, "B": 128, "C": 128, "dt": heads}
    width = shift + sum(widths.values()) + 20
    rows = torch.full((batch, seqlen + 2, width), NAN, device="cuda", dtype=torch.bfloat16)
    rows = rows[:, :seqlen]
    parts, start = {}, shift
    for name, size in widths.items():
        parts[name] = rows[..., start : start + size].normal_()
        start += size
    for name in "zx":
        parts[name] = parts[name].unflatten(-1, (heads, 64))
    for name in "BC":
        parts[name] = parts[name].unflatten(-1, (1, 128))
    rest = problem(1, 1, heads, D=True)
    return {**{name: rest[name] for name in ("A", "D", "dt_bias", "chunk_size", "dt_softplus")},
            **parts, "return_final_states": True}  # fmt: skip


@pytest.mark.parametrize("shift", [0, 1, 4, 5])
def test_slices_of_one_projection(kernels: Kernels, shift: int):
    for seqlen in (1, 64, 129):
        check(kernels, projection(2, seqlen, shift), (shift, seqlen))


def test_any_strides(kernels: Kernels):
    plain = problem(seqlen=70, z=True, D="channels", initial_states=torch.float32)
    wanted = tuple_of(kernels.mamba_chunk_scan_combined(**plain))
    turned = dict(plain)
    for name in ("x", "z", "B", "C", "initial_states"):
        turned[name] = plain[name].transpose(1, 3).contiguous().transpose(1, 3)
    turned["dt"] = plain["dt"].permute(2, 0, 1).contiguous().permute(1, 2, 0)
    turned["D"] = plain["D"].T.contiguous().T
    for name in ("A", "dt_bias"):
        turned[name] = plain[name].repeat_interleave(3)[::3]
    for found, expected in zip(
        tuple_of(kernels.mamba_chunk_scan_combined(**turned)), wanted, strict=True
    ):
        assert torch.equal(found, expected)
    spread = dict(plain)
    spread["B"], spread["dt"] = plain["B"][:, :1].expand(-1, 70, -1, -1), plain["dt"][..., :1]
    spread["dt"] = spread["dt"].expand(-1, -1, 4)
    spread["A"] = plain["A"][:1].expand(4)
    check(kernels, spread, "expanded")


@pytest.mark.parametrize("lengths", [(300,), (1, 63, 64, 65, 107), (64, 64, 128), (5, 0, 0, 195)])
@pytest.mark.parametrize(("cut", "ratio"), [(1, 1), (3, 1), (2, 2)])
def test_sequences_in_one_row(kernels: Kernels, lengths: tuple[int, ...], cut: int, ratio: int):
    for initial in (None, torch.float32):
        arguments = problem(
            1, sum(lengths), D=True, initial_states=initial, return_varlen_states=True
        )
        arguments |= sequences(*lengths)
        with segments(kernels, cut, ratio):
            check(kernels, arguments, (lengths, initial))
            check(kernels, {**arguments, "return_final_states": False}, lengths)


def test_a_nan_does_not_outlive_its_sequence(kernels: Kernels):
    """In states; in out it may reach the tile in which the sequence ends."""
    arguments = problem(1, 300, return_varlen_states=True) | sequences(90, 210)
    arguments["x"][:, 20] = NAN
    out, final, ends = kernels.mamba_chunk_scan_combined(**arguments)
    tail = {k: v[:, 90:] if k in ("x", "dt", "B", "C") else v for k, v in arguments.items()}
    for name in ("seq_idx", "cu_seqlens", "return_varlen_states"):
        del tail[name]
    wanted, last = kernels.mamba_chunk_scan_combined(**tail)
    assert error(out[:, 128:], wanted[:, 38:]) <= 2 * BOUNDS[torch.bfloat16][0]
    assert error(final, last) <= 2 * BOUNDS[torch.bfloat16][1]
    assert error(ends[1], last[0]) <= 2 * BOUNDS[torch.bfloat16][1]
    assert ends[0].isnan().any()


def test_indices_of_rows_and_padding(kernels: Kernels):
    index = torch.zeros(3, 200, dtype=torch.int32, device="cuda")
    index[0, 60:70], index[0, 70:], index[1, 150:], index[2] = -1, 2, -1, 7
    arguments = problem(3, 200, seq_idx=index, initial_states=torch.float32)
    out, final = kernels.mamba_chunk_scan_combined(**arguments)
    wanted, last = tuple_of(scan_in_chunks(**arguments))
    kept = index >= 0
    assert error(out[kept], wanted[kept]) <= BOUNDS[torch.bfloat16][0]
    assert error(final, last) <= BOUNDS[torch.bfloat16][1]
    assert not final[1].any()


def test_without_tokens_batch_or_heads(kernels: Kernels):
    for initial in (None, torch.bfloat16, torch.float32):
        check(kernels, problem(seqlen=0, initial_states=initial), initial)
    row = problem(1, 0, initial_states=torch.float32, return_varlen_states=True)
    bounds = torch.zeros(3, dtype=torch.int32, device="cuda")
    check(kernels, {**row, "cu_seqlens": bounds})
    for sizes in ((0, 100), (2, 100, 0)):
        out, final = kernels.mamba_chunk_scan_combined(**problem(*sizes))
        assert out.numel() == final.numel() == 0


@pytest.mark.parametrize(("count", "ratio"), [(2, 1), (2, 3), (3, 2), (7, 1), (1000, 1)])
def test_segments(kernels: Kernels, count: int, ratio: int):
    for initial in (None, torch.float16):
        arguments = problem(2, 1500, D=True, z=True, initial_states=initial)
        with segments(kernels, count, ratio):
            check(kernels, arguments, (count, initial))


HARD = {
    "A near 0": {"A": -1e-6, "dt": (1e-4, 1.0)},
    "A very negative": {"A": -1e3, "dt": (1e-4, 20.0)},
    "long steps": {"A": -1.0, "dt": (1.0, 20.0)},
    "short steps": {"A": -16.0, "dt": (1e-4, 1e-3)},
    "all of them": {"A": None, "dt": (1e-4, 20.0)},
}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", HARD)
def test_hard_inputs(kernels: Kernels, case: str, dtype: str):
    hard = HARD[case]
    for cut in (1, 4):
        arguments = problem(2, 500, 8, dtype=DTYPES[dtype], dt_bias=None, dt_softplus=False)
        low, high = hard["dt"]
        spread = torch.rand(2, 500, 8, device="cuda")
        arguments["dt"] = low * (high / low) ** spread
        levels = -torch.logspace(-6, 3, 8, device="cuda")
        arguments["A"] = levels if hard["A"] is None else torch.full_like(levels, hard["A"])
        # Sums of large steps would leave float16.
        arguments["x"].mul_(0.05)
        # A sum of the steps of 64 tokens in fp32 is off by that much, and exp of it by its factor.
        steps = (arguments["dt"] * arguments["A"]).abs().max().item()
        with segments(kernels, cut):
            check(kernels, arguments, case, slack=1.2, more=2**-24 * 64 * steps)


def test_a_state_in_float32_outlives_thousands_of_tokens(kernels: Kernels):
    arguments = problem(1, 20_000, 2, dt_bias=None, dt_softplus=False)
    arguments["A"] = torch.tensor([-1e-5, -0.5], device="cuda")
    arguments["dt"] = torch.full_like(arguments["dt"], 0.05)
    check(kernels, arguments)


def test_600_000_tokens(kernels: Kernels):
    """Offsets of more than 32 bits: heads of 64 in rows of 8 192 elements."""
    tokens, width = 600_000, 8192
    rows = torch.empty(tokens, width, device="cuda", dtype=torch.bfloat16)
    part = rows[:, -400:]
    part.normal_()
    arguments = problem(1, 1, 2, D=True)
    arguments |= {
        "x": part[:, :128].view(1, tokens, 2, 64),
        "B": part[:, 128:256].view(1, tokens, 1, 128),
        "C": part[:, 256:384].view(1, tokens, 1, 128),
        "dt": torch.randn(1, tokens, 2, device="cuda"),
        "A": torch.tensor([-4.0, -16.0], device="cuda"),
        "dt_bias": torch.full((2,), -2.0, device="cuda"),
    }
    assert tokens * width > 2**32
    out, final = kernels.mamba_chunk_scan_combined(**arguments)
    # Whatever lies further back than this is forgotten, at these rates and steps.
    for start in (0, 400_000, tokens - 4096):
        sliced = {k: v[:, start : start + 4096] if k in ("x", "B", "C", "dt") else v
                  for k, v in arguments.items()}  # fmt: skip
        wanted, last = kernels.mamba_chunk_scan_combined(**sliced)
        off = errors((wanted, last), sliced)
        assert max(off) <= BOUNDS[torch.bfloat16][0]
        near = slice(0 if start == 0 else 2048, 4096)
        assert error(out[:, start : start + 4096][:, near], wanted[:, near]) <= 1e-3
    assert error(final, last) <= 1e-4


@pytest.mark.parametrize("batch", [1, 2])
def test_as_exact_as_triton(kernels: Kernels, batch: int):
    try:
        scan = mamba_opponent.load().scan
    except SonataError as missing:
        pytest.skip(str(missing))
    for seqlen in (64, 300, 2048):
        arguments = problem(batch, seqlen, 64, D=True, chunk_size=256)
        ours = errors(kernels.mamba_chunk_scan_combined(**arguments), arguments)
        theirs = errors(scan(**arguments), arguments)
        print(batch, seqlen, ours, theirs)
        for mine, its in zip(ours, theirs, strict=True):
            assert mine <= 1.02 * its
