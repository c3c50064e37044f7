"""Plans of the scan: segments, nothing to do, what is kept, and how launches fail."""

from __future__ import annotations

import pytest

from recording_libcuda import FIRST_CONTEXT
from ssd_launches import PLACES, in_workspace, launches, names, steps

STREAM = 0x7F00_1234_5678


def test_a_long_sequence_with_few_heads_is_cut(call, ssd_artifacts):
    outcome = call(
        "y = call('initial_states D z', dict(b=1, l=64 * 100), return_final_states=True)\n"
        "say([made, results(y)])"
    )
    made, ((_, _, out), (_, _, final)) = outcome.value
    assert len(made) == 3
    found = launches(outcome, ssd_artifacts)
    assert names(found) == ["ssd_prepare", "ssd_scan", "ssd_pass", "ssd_scan"]
    states, handed, scan = (launch["params"] for launch in found[1:])
    segments, tiles = scan["segments"], scan["segment_tiles"]
    parts, ratio = handed["parts"], handed["ratio"]
    assert segments > 1
    assert (segments - 1) * tiles < 100 <= segments * tiles
    # All segments but the last, in parts.
    assert parts == (segments - 1) * ratio
    assert (states["segments"], states["segment_tiles"] * ratio) == (parts, tiles)
    assert found[1]["grid"] == [parts, 4, 1]
    assert found[3]["grid"] == [segments, 4, 1]
    size = 64 * 128
    assert (states["out"], states["initial"], states["d"], states["z"]) == (0, 0, 0, 0)
    wanted = steps("final", "batch segment head", (parts * 4 * size, 4 * size, size))
    assert {name: states[name] for name in wanted} == wanted
    places = [states["final"], states["totals"], handed["states"]]
    sizes = [parts * 4 * size * 4, parts * 4 * 4, segments * 4 * size * 4]
    for place, taken in zip(places, sizes, strict=True):
        assert in_workspace(place, made)
        assert in_workspace(place + (taken - 1) // 256 * 256, made)
    assert places[0] + sizes[0] <= places[1]
    assert places[1] + sizes[1] <= places[2]
    assert handed == {
        "own": states["final"],
        "totals": states["totals"],
        "initial": PLACES["initial_states"],
        "states": scan["initial"],
        "batch": 1,
        "parts": parts,
        "ratio": ratio,
        "heads": 4,
        "size": size,
        "initial_kind": 0,
        "initial_batch": 0,
        "initial_head": size,
    }
    assert found[2]["grid"] == [8, 4, 1]
    assert scan["initial_kind"] == 0
    wanted = steps("initial", "batch segment head", (segments * 4 * size, 4 * size, size))
    assert {name: scan[name] for name in wanted} == wanted
    assert (scan["out"], scan["final"], scan["final_segment"]) == (out, final, -1)
    assert (scan["d"], scan["z"], scan["totals"]) == (PLACES["D"], PLACES["z"], 0)
    assert [launch["variant"].get("outputs") for launch in found] == [None, 0, None, 1]


def test_nothing_to_do_launches_nothing(call, ssd_artifacts):
    outcome = call(
        "say([[t.shape for t in call(sizes=dict(b=0), return_final_states=True)],\n"
        "     [t.shape for t in call(sizes=dict(h=0), return_final_states=True)],\n"
        "     list(call(sizes=dict(l=0)).shape)])"
    )
    assert outcome.value == [
        [[0, 128, 4, 64], [0, 4, 64, 128]],
        [[2, 128, 0, 64], [2, 0, 64, 128]],
        [2, 0, 4, 64],
    ]
    assert launches(outcome, ssd_artifacts) == []


def test_without_tokens_states_are_the_initial_ones(call, ssd_artifacts):
    outcome = call(
        "y = call('initial_states', dict(l=0), return_final_states=True)\nsay([results(y), made])"
    )
    ((shape, *_), (_, _, final)), made = outcome.value
    assert shape == [2, 0, 4, 64]
    assert len(made) == 2
    (scan,) = launches(outcome, ssd_artifacts)
    wanted = {"initial": PLACES["initial_states"], "final": final, "tiles": 0, "seqlen": 0}
    assert {name: scan["params"][name] for name in wanted} == wanted
    # It is the first of its call: what the stream did before it is not known.
    assert not scan["programmatic"]


def test_without_tokens_only_the_first_sequence_has_a_state(call, ssd_artifacts):
    outcome = call(
        "o = operands(b=1, l=0, only='initial_states cu_seqlens')\n"
        "o['initial_states'].memory.fill_(3)\n"
        "y, ends = k.mamba_chunk_scan_combined(**o, chunk_size=4, return_varlen_states=True)\n"
        "say([ends.memory[0].unique().tolist(), ends.memory[1].unique().tolist()])"
    )
    assert outcome.value == [[3.0], [0.0]]
    assert launches(outcome, ssd_artifacts) == []


def test_the_tensors_device_decides_context_and_stream(call, ssd_artifacts):
    outcome = call("y = call(sizes=dict(device='cuda:1')); say(str(y.device))")
    assert outcome.value == "cuda:1"
    for launch in launches(outcome, ssd_artifacts):
        assert (launch["stream"], launch["context"]) == (STREAM + 1, FIRST_CONTEXT + 1)


def test_a_second_call_like_the_first_is_planned_no_more(call, ssd_artifacts):
    outcome = call(
        "from sonata_aot.loader import ssd\n"
        "kept = [call('D')]; checked = []\n"
        "plain = ssd.check\n"
        "ssd.check = lambda *a: checked.append(1) or plain(*a)\n"
        "kept += [call('D'), call('D', D=at('D', 4, address=0x50, dtype=torch.float32)), call()]\n"
        "say([len(checked), made])"
    )
    assert outcome.value[0] == 1
    found = [each["params"] for each in launches(outcome, ssd_artifacts)]
    assert [scan["d"] for scan in found[1::2]] == [PLACES["D"], PLACES["D"], 0x50, 0]
    assert len({scan["out"] for scan in found[1::2]}) == 4


def test_chunk_sizes_share_a_plan(call):
    """They are no part of the result; whatever counts as an integer will do."""
    outcome = call(
        "class Size:\n"
        "    def __index__(self): return 8\n"
        "for size in (1, 64, 256, Size()): call(chunk_size=size)\n"
        "say(len(k.mamba_chunk_scan_combined._plans))"
    )
    assert outcome.value == 1


def test_plans_are_not_kept_without_end(call):
    outcome = call(
        "from sonata_aot.loader import ssd\n"
        "ssd._MOST_PLANS = 3\n"
        "for l in range(1, 9): call(sizes=dict(l=l))\n"
        "say(len(k.mamba_chunk_scan_combined._plans))"
    )
    assert outcome.value <= 3


def test_limits_that_fp32_cannot_hold_are_infinite(call, ssd_artifacts):
    outcome = call("call(dt_limit=(-1e300, 1e39)); call(dt_limit=(-(10**400), 10**400))")
    prepares = [each["params"] for each in launches(outcome, ssd_artifacts)][::2]
    infinity = float("inf")
    assert [(each["low"], each["high"]) for each in prepares] == [(-infinity, infinity)] * 2


def test_one_native_call_and_no_wait(call, ssd_artifacts):
    outcome = call(
        "call('D'); counted = []\n"
        "plan, = k.mamba_chunk_scan_combined._plans.values()\n"
        "class Counting:\n"
        "    def launch(self, *a): counted.append(1); plain.launch(*a)\n"
        "plain = plan.sequence\n"
        "object.__setattr__(plan, 'sequence', Counting())\n"
        "call('D'); say(len(counted))"
    )
    assert outcome.value == 1
    names = set(outcome.names[outcome.names.index("cuLaunchKernel") :])
    assert names <= {
        "cuLaunchKernel",
        "cuLaunchKernelEx",
        "cuCtxGetCurrent",
        "cuCtxPushCurrent_v2",
        "cuCtxPopCurrent_v2",
    }


@pytest.mark.parametrize("which", [0, 1])
def test_a_failed_launch_names_its_kernel(call, ssd_artifacts, which):
    # The copy needs more than the driver takes, or the plain first launch does.
    kernel = ("ssd_copy", "ssd_prepare")[which]
    changes = "x=tensor(2, 128, 4, 64, address=PLACES['x'] + 8)" if which == 0 else ""
    outcome = call(
        f"os.environ['SONATA_TEST_CUDA_FAIL'] = 'cuLaunchKernel=700'\n"
        f"say(failure(lambda: call({changes})))"
    )
    error = outcome.value
    assert error["type"] == "DriverError"
    for words in (f"{kernel}[", "grid", "stream", "CUDA_ERROR_ILLEGAL_ADDRESS"):
        assert words in error["message"]


def test_grad_is_fine_where_it_is_off(call, ssd_artifacts):
    outcome = call(
        "o = operands()\n"
        "memory = torch.zeros(4, requires_grad=True)\n"
        "o['A'] = OnDevice(memory, address=PLACES['A'])\n"
        "for off in (torch.inference_mode, torch.no_grad):\n"
        "    with off(): k.mamba_chunk_scan_combined(**o, chunk_size=256)\n"
        "say(failure(lambda: k.mamba_chunk_scan_combined(**o, chunk_size=256)))"
    )
    assert "A requires grad" in outcome.value["message"]
    assert len(launches(outcome, ssd_artifacts)) == 4


def test_what_a_call_would_launch_is_told_without_launching(call, ssd_artifacts):
    asked = (
        "arguments = operands(b=1, l=64 * 100, only='D z')\n"
        "told = k.mamba_chunk_scan_combined.binaries(**arguments, chunk_size=256)\n"
        "say([[b.kernel, b.variant] for b in told])\n"
    )
    assert not launches(told := call(asked), ssd_artifacts)
    called = call(asked + "k.mamba_chunk_scan_combined(**arguments, chunk_size=256)")
    found = launches(called, ssd_artifacts)
    assert told.value == [[launch["kernel"], launch["variant"]] for launch in found]
    assert len(found) == 4


def test_what_a_call_would_launch_is_asked_with_the_calls_arguments(call):
    outcome = call(
        "try:\n"
        "    k.mamba_chunk_scan_combined.binaries(**operands(), chunk_size=0)\n"
        "except loader.SonataError as error:\n"
        "    say(str(error))"
    )
    assert "chunk_size" in outcome.value
