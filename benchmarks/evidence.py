"""Are the recorded GPU results those of today's sources?

Every record names the SHA-256 of each binary that it ran and of the launcher's sources. Builds are
reproducible, so this compiles today's sources and compares. Of a GEMV whose case says its shape, it
also asks whether today's rules still pick the binaries that ran; how they are launched, records do
not say. `python -m benchmarks.evidence` fails on a stale record; with `--report` it only says so,
as not every machine has a GPU to measure again.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import re
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from sonata_aot.aot import plan
from sonata_aot.aot.build import build
from sonata_aot.artifacts import SonataError, first_match
from sonata_aot.artifacts.declaration import variant_name
from sonata_aot.artifacts.manifest import Manifest
from sonata_aot.kernels.spec import KernelSpec
from sonata_aot.loader.gemv_plan import BATCHES

from .results import RESULTS, launcher_digest

# Modes of calls that declare no weight constant; `bench gemv` and `benchmarks.launch` have them.
IN_ORDER = ("plain", "checked", "capture116")


def current(vias: set[str], launches: set[str]) -> Manifest:
    """What is built by default from today's sources for records of `via`s such as `sm86-ptx`.

    And what records name among their `launches` besides: sizes that are built on request.
    """
    archs = plan.choose_archs(sorted({via.split("-")[0] for via in vias}))
    specs = [with_named(spec, launches) for spec in plan.choose_kernels(())]
    with tempfile.TemporaryDirectory() as folder:
        return build(specs, archs, out=Path(folder) / "artifacts").manifest


def with_named(spec: KernelSpec, launches: set[str]) -> KernelSpec:
    """The same, whose default build has the variants named `kernel variant`, too."""
    if not spec.shipped:
        return spec
    named = [v for v in spec.variants if f"{spec.name} {variant_name(v)}" in launches]
    more = [variant for variant in named if variant not in spec.shipped]
    return dataclasses.replace(spec, shipped=(*spec.shipped, *more))


def binaries_of(manifest: Manifest) -> dict[str, set[str]]:
    """SHA-256 of every binary by `via`."""
    digests: dict[str, set[str]] = {}
    for binary in manifest.binaries:
        for form, payload in (("cubin", binary.cubin), ("ptx", binary.ptx)):
            digests.setdefault(f"{binary.arch}-{form}", set()).add(payload.sha256)
    return digests


def picked(record: dict[str, Any], manifest: Manifest) -> set[str] | None:
    """SHA-256 of what the rules pick for a record's shapes; None if its case is no such GEMV.

    A chain's case names several shapes. Weights are constant but in the modes of `IN_ORDER`.
    """
    case = dict(part.partition("=")[::2] for part in record["case"].split())
    arch, _, form = record["via"].partition("-")
    if not case.keys() >= {"M", "dtype"}:
        return None
    m = next((m for m in BATCHES if m >= int(case["M"])), 0)
    shapes = re.findall(r"(\d+)x(\d+)", case.get("chain", f"{case.get('N')}x{case.get('K')}"))
    promised = (0,) if case.get("mode", record.get("mode")) in IN_ORDER else (1, 0)
    found = set()
    for n, k in shapes:
        sizes, rules = {"n": int(n), "k": int(k)}, manifest.rules_for("gemv", arch)
        fitting = (first_match(rules, {"m": m, "constant": c}, sizes) for c in promised)
        rule = next(filter(None, fitting), None)
        wanted = {"dtype": case["dtype"], **rule.variant} if rule else None
        for binary in manifest.binaries:
            if (binary.kernel, binary.arch, binary.variant) == ("gemv", arch, wanted):
                found.add((binary.cubin if form == "cubin" else binary.ptx).sha256)
    return found if shapes else None


def stale(
    record: dict[str, Any], binaries: dict[str, set[str]], launcher: str, manifest: Manifest
) -> Iterator[str]:
    """Why a record no longer counts; nothing if it does."""
    if not record["binaries"]:
        yield "it names no binary"
    if not set(record["binaries"]) <= binaries.get(record["via"], set()):
        yield "the kernel compiles to other bytes now, or is not built by default"
    if record["launcher"] != launcher:
        yield "the launcher's sources have changed"
    if picked(record, manifest) not in (None, set(record["binaries"])):
        yield "the rules pick another binary now"


def main() -> None:
    """Check every results file."""
    parser = argparse.ArgumentParser(description=__doc__, prog="python -m benchmarks.evidence")
    parser.add_argument("--report", action="store_true", help="exit 0 even if a result is stale")
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder of results")
    options = parser.parse_args()
    files = sorted(options.results.glob("*/*.json"))
    contents = {path: json.loads(path.read_text(encoding="utf-8")) for path in files}
    records = [record for content in contents.values() for record in content["records"]]
    if not records:
        print(f"evidence: no results in {options.results}")
        sys.exit(0 if options.report else 1)
    launches = {launch for record in records for launch in record.get("launches", ())}
    try:
        manifest = current({record["via"] for record in records}, launches)
    except SonataError as error:
        sys.exit(f"evidence: {error}")
    binaries, launcher, count = binaries_of(manifest), launcher_digest(), 0
    lines: list[str] = []
    for path, content in contents.items():
        for record in content["records"]:
            problems = list(stale(record, binaries, launcher, manifest))
            if problems:
                count += 1
                name = f"{path.parent.name}/{path.name} {record['case']} ({record['via']})"
                lines.append(f"stale: {name}: {problems[0]}")
    # A case may have records against several opponents.
    for line in dict.fromkeys(lines):
        print(line)
    print(f"evidence: {len(records) - count} of {len(records)} records are fresh")
    sys.exit(1 if count and not options.report else 0)


if __name__ == "__main__":
    main()
