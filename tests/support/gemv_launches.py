"""What a call of the GEMV must give the driver, worked out from the manifest alone."""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from recording_libcuda import Outcome

# The stand-in's GPU, unless it is told otherwise.
PROCESSORS = 132
STREAM = 0x7F00_1234_5678
# Parameter blocks, padding written out: four pointers, sizes, three strides, and what is ahead.
FAST = "<4Q5i4x3q3i4xQi"
ANY = "<4Q3i4x3q"
WORDS = {
    FAST: "x weight bias out n k x_rows block_rows constant x_stride weight_stride out_stride "
    "ahead_skip ahead_rows ahead_blocks upcoming upcoming_bytes",
    ANY: "x weight bias out n k x_rows x_stride weight_stride out_stride",
}


@dataclass(frozen=True)
class Call:
    """A call; `layout` is `any` or `wide` where rows of weight or of x alone are not aligned.

    `bound` is what the rules see, and `constant` whether the weight still is. `upcoming` is an
    aligned address and a size.
    """

    rows: int
    n: int
    k: int
    dtype: str = "bf16"
    arch: str = "sm90"
    layout: str = "aligned"
    bound: bool = False
    constant: bool = True
    invariant: bool = False
    upcoming: tuple[int, int] = (0, 0)
    pointers: tuple[int, int, int, int] = (0x1000, 0x100000, 0, 0x8000)
    strides: tuple[int, int, int] | None = None
    device: int = 0
    processors: int = PROCESSORS


def rule(manifest: Mapping[str, Any], call: Call) -> Mapping[str, Any]:
    """The rule that the manifest has for a call with aligned rows."""
    m = least_m(call)
    for constant in (1, 0) if call.bound else (0,):
        for each in manifest["rules"]:
            wanted = ("gemv", call.arch, {"m": m, "constant": constant})
            if (each["kernel"], each["arch"], each["when"]) != wanted:
                continue
            (n_low, n_high), (k_low, k_high) = each["sizes"]["n"], each["sizes"]["k"]
            if n_low <= call.n <= n_high and k_low <= call.k <= k_high:
                return each
    raise AssertionError(f"no rule for {call}")


def least_m(call: Call) -> int:
    return 8 if call.invariant else {1: 1, 2: 2, 3: 4, 4: 4, 5: 8, 6: 8, 7: 8, 8: 8}[call.rows]


def binary(manifest: Mapping[str, Any], call: Call) -> Mapping[str, Any]:
    """The binary that a call must run."""
    if call.layout == "aligned":
        kernel, variant = "gemv", rule(manifest, call)["variant"]
    else:
        kernel, variant = "gemv_any", {"m": least_m(call), "wide": int(call.layout == "wide")}
    (found,) = [
        each
        for each in manifest["binaries"]
        if (each["kernel"], each["arch"]) == (kernel, call.arch)
        and each["variant"] == {**each["variant"], "dtype": call.dtype, **variant}
    ]
    return found


def expected(manifest: Mapping[str, Any], call: Call) -> dict[str, Any]:
    """The launch of a call, as `seen` shows one."""
    found = binary(manifest, call)
    rows = found["variant"]["rows"]
    strides = call.strides or (call.k, call.k, call.n)
    values = dict(zip(("x", "weight", "bias", "out"), call.pointers, strict=True))
    values |= {"n": call.n, "k": call.k, "x_rows": call.rows}
    values |= dict(zip(("x_stride", "weight_stride", "out_stride"), strides, strict=True))
    blocks, programmatic = math.ceil(call.n / rows), False
    if call.layout == "aligned":
        used = rule(manifest, call)
        more, blocks = _launch(call, found, used)
        values |= more
        programmatic = bool(more["constant"] and found["variant"]["pdl"])
    return {
        "entry": found["entry"],
        "grid": [blocks, 1, 1],
        "block": [32 * found["variant"]["warps"], 1, 1],
        "shared": found["shared_bytes"],
        "stream": STREAM + call.device,
        "context": 4096 + call.device,
        "programmatic": programmatic,
        "params": values,
    }


def _launch(
    call: Call, found: Mapping[str, Any], used: Mapping[str, Any]
) -> tuple[dict[str, int], int]:
    """The parameters that rules decide, and the blocks."""
    variant, launch = found["variant"], used["launch"]
    persistent = variant["persistent"] == 1 and launch["blocks_per_sm"] > 0
    most = call.processors * launch["blocks_per_sm"]
    block_rows = math.ceil(call.n / most) if persistent else variant["rows"]
    blocks = math.ceil(call.n / block_rows)
    constant = int(call.bound and call.constant and used["when"]["constant"])
    values = {"block_rows": block_rows, "constant": constant}
    skip = ahead_rows = ahead_blocks = upcoming = 0
    asked = min(call.n, launch["ahead_kb"] * 512 // call.k)  # rows that fit, of two bytes each
    if constant and asked:
        if persistent:
            ahead_rows = min(block_rows, 32 * variant["warps"], math.ceil(asked / blocks))
            ahead_blocks = blocks
        else:
            skip = launch["skip_blocks_per_sm"] * call.processors * variant["rows"]
            ahead_rows = min(variant["rows"], 32 * variant["warps"])
            ahead_blocks = min(blocks, math.ceil(asked / variant["rows"]))
    address, size = call.upcoming
    large = 2 * call.n * call.k > 24 * 2**20
    # With so many blocks a share of 7.5 MiB is below 16 bytes.
    if not constant or persistent or large or blocks > 15 * 2**15:
        address = 0
    else:
        share = min(15 * 2**19 // blocks, size // blocks)
        upcoming = min(share - share % 16, 32 * variant["warps"] * 4096)
    values |= {"ahead_skip": skip, "ahead_rows": ahead_rows, "ahead_blocks": ahead_blocks}
    return values | {"upcoming": address, "upcoming_bytes": upcoming}, blocks


# Output of the launches that `on_device.settled` makes.
SETTLED = 1 << 35


def issued(outcome: Outcome) -> list[dict[str, Any]]:
    """Launches as the driver's stand-in writes them down, in order."""
    return outcome.named("cuLaunchKernel", "cuLaunchKernelEx")


def launches(outcome: Outcome) -> list[dict[str, Any]]:
    """What the driver was given, launch by launch, without those of `on_device.settled`."""
    found = [seen(launch) for launch in issued(outcome)]
    return [launch for launch in found if launch["params"]["out"] != SETTLED]


def seen(launch: Mapping[str, Any]) -> dict[str, Any]:
    """What the driver was given, of what matters; the parameter block taken apart."""
    block = bytes.fromhex(launch["params"])
    form = FAST if len(block) == struct.calcsize(FAST) else ANY
    values = dict(zip(WORDS[form].split(), struct.unpack(form, block), strict=True))
    assert launch["call"] == "cuLaunchKernel" or launch["attributes"] == [[6, 1]]
    assert launch["result"] == 0
    same = ("entry", "grid", "block", "shared", "stream", "context")
    return {
        **{name: launch[name] for name in same},
        "programmatic": launch["call"] == "cuLaunchKernelEx",
        "params": values,
    }
