"""Parts of a GPU: launches are planned for the multiprocessors of the device at hand.

A process sees such a part under a UUID in CUDA_VISIBLE_DEVICES, as device 0, with a multiple of 2
multiprocessors.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import pytest

import ssd_launches
from gemv_launches import Call, expected, launches
from sonata_aot.artifacts import open_artifacts
from sonata_aot.loader.ssd_occupancy import Cut, Gpu, Room, choose_cut

PART = "MIG-6f9e2a8c-1d0b-5c47-9a53-3e0c7b1f4d28"
SHARED_OPTIN = 232448
OPEN = """
k = loader.load(ARTIFACTS, devices=DEVICES)
def operands(rows, n, k_size, device):
    x = tensor(rows, k_size, address=1 << 40, device=device)
    return x, tensor(n, k_size, address=1 << 50, device=device)
def output(rows, n, device):
    return tensor(rows, n, address=1 << 36, device=device)
"""
OPERANDS = (1 << 40, 1 << 50, 0, 1 << 36)
# Rows, N and K of which the rules for sm90 want blocks by the multiprocessor, or some of the weight
# ahead by it.
SIZES = [
    (rows, n, k)
    for rows in (1, 2, 8)
    for n, k in ((600, 4096), (1408, 8192), (2048, 4096), (8512, 2048), (60000, 2048))
]


def environment(*processors: int) -> dict[str, str]:
    """Devices of sm90, each with so many multiprocessors."""
    return {
        "SONATA_TEST_CUDA_CC": "9.0",
        "SONATA_TEST_CUDA_DEVICES": str(len(processors)),
        "SONATA_TEST_CUDA_MULTIPROCESSORS": ",".join(map(str, processors)),
        "CUDA_VISIBLE_DEVICES": PART,
    }


def wanted(manifest: Mapping[str, Any], processors: int, device: int) -> list[dict[str, Any]]:
    return [
        expected(
            manifest,
            Call(rows, n, k, bound=bound, pointers=OPERANDS, device=device, processors=processors),
        )
        for rows, n, k in SIZES
        for bound in (False, True)
    ]


def test_a_part_is_a_device_like_others(recorder, artifacts):
    outcome = recorder.loader(
        artifacts,
        """
        from sonata_aot.loader import _native
        k = loader.load(ARTIFACTS, devices="cuda:0", strict=True)
        say([[one["index"], one["multiprocessors"]] for one in _native.devices()])
        say([sorted(k.devices), sorted(k.ssd.multiprocessors.items())])
        say(failure(lambda: loader.load(ARTIFACTS, devices=[1])))
        """,
        env=environment(14),
    )
    found, loaded, beyond = map(json.loads, outcome.stdout.splitlines())
    assert found == [[0, 14]]
    assert loaded == [[0], [[0, 14]]]
    for words in ("no device 1", "sees 1", "CUDA_VISIBLE_DEVICES"):
        assert words in beyond["message"]


@pytest.mark.parametrize("processors", [(14,), (16,), (132, 16), (16, 132)])
def test_the_gemv_is_planned_for_the_multiprocessors_of_its_device(
    recorder, artifacts, manifest, processors
):
    """The same sizes on each, one after the other: a plan is of one device."""
    outcome = recorder.loader(
        artifacts,
        f"DEVICES = {list(range(len(processors)))}\n{OPEN}"
        f"for number in DEVICES:\n"
        f"    device = f'cuda:{{number}}'\n"
        f"    for rows, n, size in {SIZES}:\n"
        "        for bound in (False, True):\n"
        "            x, weight = operands(rows, n, size, device)\n"
        "            call = lambda x, out: k.gemv(x, weight, out=out)\n"
        "            if bound: call = settled(k.gemv.bind(weight))\n"
        "            call(x, output(rows, n, device))\n"
        "say(0)",
        env=environment(*processors),
    )
    each = [wanted(manifest, count, device) for device, count in enumerate(processors)]
    assert launches(outcome) == [launch for device in each for launch in device]
    # What a whole GPU would be given is something else, in the grid and in what is ahead.
    for device, found in enumerate(each):
        if processors[device] == 132:
            continue
        whole = wanted(manifest, 132, device)
        pairs = list(zip(found, whole, strict=True))
        assert any(one["grid"] != other["grid"] for one, other in pairs)
        assert any(
            one["params"]["ahead_rows"] != other["params"]["ahead_rows"]
            or one["params"].get("ahead_skip") != other["params"].get("ahead_skip")
            for one, other in pairs
        )


def cut(manifest: Any, found: list[dict[str, Any]], processors: int, tiles: int) -> Cut:
    """How a sequence of so many tiles, with 4 heads, is cut on a device."""
    gpu = Gpu(processors, SHARED_OPTIN)
    scans = {
        binary.variant["outputs"]: binary
        for binary in manifest.binaries
        if binary.kernel == "ssd_scan"
        and binary.variant == {**found[-1]["variant"], "outputs": binary.variant["outputs"]}
    }
    scan = scans[found[-1]["variant"]["outputs"]]
    room = Room(processors, gpu.resident(scan), gpu.resident(scans[0]))
    return choose_cut(4 * (64 // int(scan.variant["width"])), tiles, room)


def test_a_scan_is_cut_for_the_multiprocessors_of_its_device(recorder, ssd_artifacts):
    counts, tiles = (132, 16, 14, 4), 100
    outcome = recorder.loader(
        ssd_artifacts,
        ssd_launches.SETUP.replace("devices=[0, 1]", "devices=[0, 1, 2, 3]")
        + "for number in range(4):\n"
        f"    call(sizes=dict(b=1, l=64 * {tiles}, device=f'cuda:{{number}}'))\n"
        "say(0)",
        env=environment(*counts),
    )
    found = ssd_launches.launches(outcome, ssd_artifacts)
    manifest = open_artifacts(ssd_artifacts).manifest
    segments = []
    for device, processors in enumerate(counts):
        own = [launch for launch in found if launch["context"] == 4096 + device]
        made = cut(manifest, own, processors, tiles)
        scan = own[-1]["params"]
        assert (scan["segments"], scan["segment_tiles"]) == (made.segments, made.segment_tiles)
        assert own[-1]["grid"][0] == made.segments
        assert len(own) == (2 if made.segments == 1 else 4)
        segments.append(made.segments)
    assert segments[0] > segments[1] >= segments[2] > segments[3] == 1


def test_devices_that_another_thread_is_entering_are_asked_for_again(recorder, ssd_artifacts):
    """Whoever comes while only the first is entered must not miss the second."""
    outcome = recorder.loader(
        ssd_artifacts,
        "from sonata_aot.loader import ssd\n"
        "k = loader.load(ARTIFACTS, devices=[0, 1])\n"
        "scan, plain, seen = k.mamba_chunk_scan_combined, ssd.Gpu, []\n"
        "def meanwhile(*given):\n"
        "    if len(scan._gpus) == 1 and not seen:\n"
        "        seen.append(None)\n"
        "        seen.append(scan._gpu(1).multiprocessors)\n"
        "    return plain(*given)\n"
        "ssd.Gpu = meanwhile\n"
        "say([scan._gpu(0).multiprocessors, seen])",
        env=environment(132, 16),
    )
    assert outcome.value == [132, [None, 16]]
