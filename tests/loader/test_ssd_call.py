"""`kernels.mamba_chunk_scan_combined` down to the driver calls: every parameter of every launch."""

from __future__ import annotations

import pytest

from recording_libcuda import FIRST_CONTEXT
from ssd_launches import PLACES, in_workspace, launches, names, steps

STREAM = 0x7F00_1234_5678
INFINITY = float("inf")


def test_every_parameter_of_the_plainest_call(call, ssd_artifacts):
    outcome = call("y = call(); say([results(y), made])")
    returned, made = outcome.value
    prepare, scan = launches(outcome, ssd_artifacts)
    ((shape, dtype, out),) = returned
    assert (shape, dtype) == ([2, 128, 4, 64], "bfloat16")
    assert [each[1] for each in made] == ["bfloat16", "uint8"]
    # Two tiles of 64 tokens; 10 of 16 blocks of C Bᵀ each.
    cb, decay = 2 * 2 * 1 * 10 * 1024, 2 * 4 * 128 * 12
    assert made[1][0] == [cb + decay]
    start = made[1][2]
    assert (prepare["kernel"], prepare["grid"]) == ("ssd_prepare", [4, 2, 1])
    assert prepare["variant"] == {"dtype": "bf16", "dstate": 128, "tile": 64, "pdl": 1}
    of_b = {
        **steps("b", "batch token group", (128 * 128, 128, 0)),
        **steps("c", "batch token group", (128 * 128, 128, 0)),
    }
    of_x = (128 * 256, 256, 64)
    assert prepare["params"] == {
        "dt": PLACES["dt"],
        "dt_bias": 0,
        "rates": PLACES["A"],
        "b": PLACES["B"],
        "c": PLACES["C"],
        "seq_idx": 0,
        "x": PLACES["x"],
        "cb": start,
        "decay": start + cb,
        "starts": 0,
        "batch": 2,
        "seqlen": 128,
        "tiles": 2,
        "heads": 4,
        "groups": 1,
        "channels": 64,
        "dt_kind": 1,
        "bias_kind": 0,
        "rates_kind": 0,
        "softplus": 0,
        "low": 0.0,
        "high": INFINITY,
        **steps("dt", "batch token head", (512, 4, 1)),
        **of_b,
        **steps("seq", "batch token", (0, 0)),
        **steps("x", "batch token head", of_x),
    }
    assert (scan["kernel"], scan["grid"]) == ("ssd_scan", [2, 4, 1])
    assert scan["variant"]["packed"] == 0
    assert scan["params"] == {
        "x": PLACES["x"],
        "b": PLACES["B"],
        "c": PLACES["C"],
        "d": 0,
        "z": 0,
        "out": out,
        "cb": start,
        "decay": start + cb,
        "starts": 0,
        "initial": 0,
        "final": 0,
        "totals": 0,
        "cu_seqlens": 0,
        "end_states": 0,
        "batch": 2,
        "seqlen": 128,
        "tiles": 2,
        "segments": 1,
        "segment_tiles": 2,
        "heads": 4,
        "groups": 1,
        "group_heads": 4,
        "d_kind": 0,
        "initial_kind": 0,
        "sequences": 0,
        **steps("x", "batch token head", of_x),
        **of_b,
        **steps("z", "batch token head", (0, 0, 0)),
        **steps("out", "batch token head", of_x),
        **steps("d", "head channel", (0, 0)),
        **steps("initial", "batch segment head", (0, 0, 0)),
        **steps("final", "batch segment head", (0, 0, 64 * 128)),
    }
    for launch in (prepare, scan):
        assert (launch["stream"], launch["context"]) == (STREAM, FIRST_CONTEXT)
    # What waits by itself may start early, but for the first launch of a call.
    assert [launch["programmatic"] for launch in (prepare, scan)] == [False, True]


def test_optional_tensors_and_options(call, ssd_artifacts):
    outcome = call(
        "y = call('D z dt_bias initial_states seq_idx', dt_softplus=True, dt_limit=(0.5, 2),"
        " return_final_states=True)\n"
        "say([results(y), made])"
    )
    ((_, _, out), (shape, dtype, final)), made = outcome.value
    assert (shape, dtype) == ([2, 4, 64, 128], "float32")
    assert len(made) == 3
    prepare, scan = (launch["params"] for launch in launches(outcome, ssd_artifacts))
    assert prepare["dt_bias"] == PLACES["dt_bias"]
    assert prepare["seq_idx"] == PLACES["seq_idx"]
    assert (prepare["seq_batch"], prepare["seq_token"]) == (128, 1)
    assert (prepare["softplus"], prepare["low"], prepare["high"]) == (1, 0.5, 2.0)
    assert scan["starts"] == prepare["starts"]
    assert in_workspace(scan["starts"], made)
    wanted = {
        "d": PLACES["D"],
        "z": PLACES["z"],
        "initial": PLACES["initial_states"],
        "final": final,
        "out": out,
        **steps("z", "batch token head", (128 * 256, 256, 64)),
        **steps("d", "head channel", (1, 0)),
        **steps("initial", "batch segment head", (4 * 64 * 128, 0, 64 * 128)),
        **steps("final", "batch segment head", (4 * 64 * 128, -1, 64 * 128)),
    }
    assert {name: scan[name] for name in wanted} == wanted


def test_dtypes_are_told_by_numbers(call, ssd_artifacts):
    codes = {"float32": 0, "bfloat16": 1, "float16": 2}
    outcome = call(
        "for dtype in (torch.float32, torch.bfloat16, torch.float16):\n"
        "    o = operands(only='D dt_bias initial_states', dtype=torch.float16)\n"
        "    for name in ('dt', 'A', 'D', 'dt_bias', 'initial_states'):\n"
        "        o[name] = at(name, *o[name].shape, dtype=dtype)\n"
        "    k.mamba_chunk_scan_combined(**o, chunk_size=1)\n"
        "say(0)"
    )
    found = launches(outcome, ssd_artifacts)
    for (prepare, scan), code in zip(
        zip(found[::2], found[1::2], strict=True), codes.values(), strict=True
    ):
        assert prepare["variant"]["dtype"] == scan["variant"]["dtype"] == "f16"
        kinds = {name: prepare["params"][name] for name in ("dt_kind", "bias_kind", "rates_kind")}
        assert set(kinds.values()) == {code}
        assert (scan["params"]["d_kind"], scan["params"]["initial_kind"]) == (code, code)


def test_views_of_one_projection_are_read_where_they_lie(call, ssd_artifacts):
    outcome = call(
        "def part(start, *shape):\n"
        "    inner = {4: (shape[-1], 1), 3: (1,)}[len(shape)]\n"
        "    stride = (128 * 776, 776, *inner)\n"
        "    return tensor(*shape, address=(1 << 40) + 2 * start, stride=stride)\n"
        "call(z=part(0, 2, 128, 4, 64), x=part(256, 2, 128, 4, 64), B=part(512, 2, 128, 1, 128),"
        " C=part(640, 2, 128, 1, 128), dt=part(768, 2, 128, 4))\n"
        "say(made)"
    )
    prepare, scan = (launch["params"] for launch in launches(outcome, ssd_artifacts))
    base, batch = 1 << 40, 128 * 776
    assert (scan["z"], scan["x"]) == (base, base + 512)
    assert (scan["b"], scan["c"], prepare["dt"]) == (base + 1024, base + 1280, base + 1536)
    wanted = {
        **steps("x", "batch token head", (batch, 776, 64)),
        **steps("z", "batch token head", (batch, 776, 64)),
        **steps("b", "batch token group", (batch, 776, 0)),
    }
    assert {name: scan[name] for name in wanted} == wanted
    assert [prepare[f"dt_{d}"] for d in ("batch", "token", "head")] == [batch, 776, 1]


def test_groups_and_slices_of_a_head(call, ssd_artifacts):
    outcome = call(
        "call(sizes=dict(h=6, g=3, p=128, n=16)); say(0)",
    )
    prepare, scan = launches(outcome, ssd_artifacts)
    assert (scan["params"]["groups"], scan["params"]["group_heads"]) == (3, 2)
    assert [scan["params"][f"b_{d}"] for d in ("batch", "token", "group")] == [128 * 48, 48, 16]
    slices = 128 // scan["variant"]["width"]
    assert slices > 1
    assert scan["grid"] == [2, slices * 6, 1]
    assert prepare["variant"] == {"dtype": "bf16", "dstate": 16, "tile": 64, "pdl": 1}


# What is changed, and the copies that it takes: name, strides of the source.
COPIED = {
    "x a half vector off": (
        "x=tensor(2, 128, 4, 64, address=PLACES['x'] + 8)",
        {"x": (32768, 256, 64, 1)},
    ),
    "x with odd rows": (
        "x=at('x', 2, 128, 4, 64, stride=(40000, 265, 66, 1))",
        {"x": (40000, 265, 66, 1)},
    ),
    "channels apart": (
        "x=at('x', 2, 128, 4, 64, stride=(32768, 256, 1, 4))",
        {"x": (32768, 256, 1, 4)},
    ),
    "B and C expanded and odd": (
        "B=at('B', 2, 128, 1, 128, stride=(0, 129, 128, 1)),"
        " C=at('C', 2, 128, 1, 128, stride=(0, 0, 1, 0))",
        {"B": (0, 129, 0, 1), "C": (0, 0, 0, 0)},
    ),
    "z of three strides": (
        "z=at('z', 2, 128, 4, 64, stride=(4, 1024, 256, 8))",
        {"z": (4, 1024, 256, 8)},
    ),
}


@pytest.mark.parametrize("case", COPIED)
def test_rows_that_are_not_aligned_are_copied_first(call, ssd_artifacts, case):
    changes, copied = COPIED[case]
    outcome = call(f"y = call({changes}); say([made, results(y)])")
    made, ((_, _, out),) = outcome.value
    found = launches(outcome, ssd_artifacts)
    assert names(found) == ["ssd_copy"] * len(copied) + ["ssd_prepare", "ssd_scan"]
    assert len(made) == 2  # out, and all else in one workspace
    prepare, scan = found[-2]["params"], found[-1]["params"]
    assert scan["out"] == out
    shapes = {"x": (4, 64), "z": (4, 64), "B": (1, 128), "C": (1, 128)}
    for launch, (name, strides) in zip(found, copied.items(), strict=False):
        copy, (rows, columns) = launch["params"], shapes[name]
        assert copy["source"] == PLACES[name] + (8 if case == "x a half vector off" else 0)
        assert [copy[f"source_{d}"] for d in ("batch", "token", "row", "column")] == [*strides]
        assert [copy[d] for d in ("batch", "seqlen", "rows", "columns")] == [2, 128, rows, columns]
        assert launch["grid"] == [2 * 16, 1, 1]
        assert in_workspace(copy["target"], made)
        row, dimension = rows * columns, "head" if name in "xz" else "group"
        found_steps = [scan[f"{name.lower()}_{d}"] for d in ("batch", "token", dimension)]
        assert scan[name.lower()] == copy["target"]
        assert found_steps == [128 * row, row, columns if rows > 1 else 0] or (
            rows == 1 and found_steps == [128 * row, row, columns]
        )
        if name in "BC":
            assert prepare[name.lower()] == copy["target"]
    # Regions do not overlap: each ends before the next one starts.
    starts = sorted(
        {prepare["cb"], prepare["decay"], *(launch["params"]["target"] for launch in found[:-2])}
    )
    assert len(starts) == 2 + len(copied)


def test_a_stride_without_meaning_copies_nothing(call, ssd_artifacts):
    outcome = call(
        "call(sizes=dict(b=1, l=1), x=at('x', 1, 1, 4, 64, stride=(3, 5, 64, 1)),"
        " B=at('B', 1, 1, 1, 128, stride=(1, 1, 1, 1)))\nsay(0)"
    )
    found = launches(outcome, ssd_artifacts)
    assert names(found) == ["ssd_prepare", "ssd_scan"]
    assert [found[1]["params"][f"x_{d}"] for d in ("batch", "token", "head")] == [0, 0, 64]


def test_small_tensors_that_lie_apart_become_dense(call, ssd_artifacts):
    """A, dt_bias and initial states are copied by torch; D and dt are read with any strides."""
    outcome = call(
        "f = torch.float32\n"
        "call('D', A=at('A', 4, stride=(3,), dtype=f), dt_bias=at('dt_bias', 4, stride=(0,),"
        " dtype=f), D=at('D', 4, 64, stride=(1, 9), dtype=f),"
        " dt=at('dt', 2, 128, 4, stride=(1, 2, 300)),"
        " initial_states=at('initial_states', 2, 4, 64, 128, stride=(7, 8192, 1, 64)))\n"
        "say(0)"
    )
    prepare, scan = (launch["params"] for launch in launches(outcome, ssd_artifacts))
    assert prepare["rates"] not in (0, PLACES["A"])
    assert prepare["dt_bias"] not in (0, PLACES["dt_bias"])
    assert scan["initial"] not in (0, PLACES["initial_states"])
    assert scan["initial_kind"] == 1
    assert (scan["initial_batch"], scan["initial_head"]) == (4 * 64 * 128, 64 * 128)
    assert (scan["d"], scan["d_head"], scan["d_channel"]) == (PLACES["D"], 1, 9)
    assert [prepare[f"dt_{d}"] for d in ("batch", "token", "head")] == [1, 2, 300]


def test_states_at_the_ends_of_sequences(call, ssd_artifacts):
    outcome = call(
        "y = call('seq_idx cu_seqlens', dict(b=1), return_varlen_states=True)\n"
        "z = call('seq_idx cu_seqlens', dict(b=1), return_varlen_states=True,"
        " return_final_states=True)\n"
        "call('seq_idx cu_seqlens', dict(b=1)); call('cu_seqlens', dict(b=1))\n"
        "say([results(y), results(z)])"
    )
    first, second = outcome.value
    assert [each[:2] for each in first[1:]] == [[[2, 4, 64, 128], "bfloat16"]]
    assert [each[:2] for each in second[1:]] == [
        [[1, 4, 64, 128], "float32"],
        [[2, 4, 64, 128], "bfloat16"],
    ]
    found = launches(outcome, ssd_artifacts)
    for scan, returned in ((found[1], first), (found[3], second)):
        assert scan["variant"]["packed"] == 1
        wanted = {"cu_seqlens": PLACES["cu_seqlens"], "sequences": 2, "end_states": returned[-1][2]}
        assert {name: scan["params"][name] for name in wanted} == wanted
    assert found[3]["params"]["final"] == second[1][2]
    # Bounds alone ask for nothing, and an index for another binary.
    assert [each["variant"]["packed"] for each in found[5::2]] == [1, 0]
    assert (found[5]["params"]["cu_seqlens"], found[5]["params"]["sequences"]) == (0, 0)
