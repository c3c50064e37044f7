"""Tables of what the host does: launches, first calls, and the decode step that they make up."""

from __future__ import annotations

from typing import Any

from sonata_aot.aot.measure.render import parts, ratio

Results = dict[str, Any]
# The words for what records of `benchmarks.launch` have in `mode` and `opponent`.
_MODES = {"bound": "bound, with its output", "checked": "`kernels.gemv(x, w, out=y)`"}
_OPPONENTS = {"cuLaunchKernel": "the same kernel from a loop in C", "F.linear": "`F.linear`"}


def launch_table(results: Results) -> list[str]:
    """Host time of a launch, and of capturing many, beside the opponents'."""
    machine = results["machine"]
    lines = [
        f"Host time of a GEMV on one {machine['gpu']}, torch {machine['torch']}:",
        "",
        "| call | code | ours | beside | its time | ours over it |",
        "|---|---|---|---|---|---|",
    ]
    for record in results["records"]:
        mode, opponent = parts(record)["mode"], record["opponent"]
        call = _MODES.get(mode) or f"capture of {mode.removeprefix('capture')} checked calls"
        lines.append(
            f"| {call} | {record['via']} | {record['ours_us']:.1f} us "
            f"| {_OPPONENTS.get(opponent, f'`{opponent}`')} | {record['opponent_us']:.1f} us "
            f"| {record['ours_us'] / record['opponent_us']:.2f} |"
        )
    return lines


def first_call_table(results: Results) -> list[str]:
    """Milliseconds from nothing loaded to the first result, and what of it is the driver's."""
    heads = [
        *("code", "driver's cache", "import", "load", "first GEMV", "first scan"),
        "load and both",
    ]
    rows = []
    for record in results["records"]:
        cache = parts(record).get("cache", "not needed")
        times = [record[f"{name}_ms"] for name in ("import", "load", "first_gemv", "first_scan")]
        times.append(record["ours_us"] / 1e3)
        rows.append([record["via"], cache, *(f"{time:.1f} ms" for time in times)])
    alone = [record.get("driver_ms") for record in results["records"]]
    if any(alone):
        heads.append("the driver's calls for machine code alone")
        for row, time in zip(rows, alone, strict=True):
            row.append("" if time is None else f"{time:.1f} ms")
    return [
        f"`load()`, the first GEMV and the first scan on one {results['machine']['gpu']}:",
        "",
        f"| {' | '.join(heads)} |",
        "|---" * len(heads) + "|",
        *(f"| {' | '.join(row)} |" for row in rows),
    ]


def decode_table(results: Results) -> list[str]:
    """A decode step patched and not, beside reading its weights, and the errors of both."""
    cases = ", ".join(dict.fromkeys(record["case"] for record in results["records"]))
    lines = [
        f"A decode step ({cases}) in a CUDA graph on one {results['machine']['gpu']}, torch "
        f"{results['machine']['torch']}; errors against fp32:",
        "",
        "| code | patched | unpatched | ratio | over the read ceiling | error | unpatched |",
        "|---|---|---|---|---|---|---|",
    ]
    for record in results["records"]:
        lines.append(
            f"| {record['via']} | {record['ours_us']:.0f} us | {record['opponent_us']:.0f} us "
            f"| {ratio(record):.2f}x | {record['over_ceiling']:.2f}x "
            f"| {record['error']:.1e} | {record['opponent_error']:.1e} |"
        )
    return lines


def requests_table(results: Results) -> list[str]:
    """Time to a request's first token, with its own decode graph and with one for all requests."""
    record = results["records"][0]
    case = parts(record)
    steps = int(case["requests"]) * int(case["steps"])
    lines = [
        f"{case['requests']} requests of {case['steps']} tokens one after another, by such a stack "
        f"on one {results['machine']['gpu']}; medians:",
        "",
        "| code | first token, captured for each request | captured once | the same unpatched "
        "| a capture | later steps | unpatched | steps with other tokens than unpatched |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for record in results["records"]:
        lines.append(
            f"| {record['via']} | {record['captured_each_us'] / 1e3:.1f} ms "
            f"| {record['ours_us'] / 1e3:.2f} ms | {record['opponent_us'] / 1e3:.2f} ms "
            f"| {record['capture_us'] / 1e3:.1f} ms | {record['step_us'] / 1e3:.2f} ms "
            f"| {record['opponent_step_us'] / 1e3:.2f} ms "
            f"| {record['opponent_flips']} of {steps} |"
        )
    return lines
