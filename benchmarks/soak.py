"""The slow runs at their full counts, and what came of them: `benchmarks/results/soak.json`.

    python -m benchmarks.soak            run, and write the result
    python -m benchmarks.soak --check    fail if the result is of other sources, or smaller
    python -m benchmarks.soak --report   only say so

`make test` runs the same tests with smaller counts. The result names a digest of the sources that
they exercise, and of the tests.
"""

from __future__ import annotations

import argparse
import collections
import hashlib
import json
import os
import platform
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from sonata_aot.aot.provenance import git_state

from .results import RESULTS, ROOT

RESULT = RESULTS / "soak.json"
TESTS = ("tests/artifacts/test_mutations.py", "tests/aot/test_soak.py")
HELPERS = (
    "tests/artifacts/artifact_mutator.py",
    "tests/artifacts/artifact_sets.py",
    "tests/aot/canned.py",
)
# What a build and a prune run through. Neither what reads a command line, nor the commands that it
# merely names: `tests/benchmarks/test_soak_result.py` holds this against what is really imported.
BUILD = (
    *("budget", "build", "cache", "cache_cli", "leases", "plan", "pool", "progress"),
    *("provenance", "prune", "sources", "toolchain", "worker"),
)
# The format, but for what no soak comes to: which binary a device gets, and the tool's version.
NOT_FORMAT = ("__init__", "_version", "choose")
# What must have been done at least, by the names under which the tests record it.
BARS = {"mutants": 20_000, "kills": 200, "builders": 8}
COUNTS = {"MUTATIONS": "20000", "KILLS": "200", "RACES": "5"}


def sources() -> list[Path]:
    """Every file whose change makes a result stale."""
    form = [path for path in (ROOT / "artifacts").glob("*.py") if path.stem not in NOT_FORMAT]
    build = [ROOT / "aot" / f"{name}.py" for name in BUILD]
    return sorted([*form, *build, *(ROOT / name for name in (*TESTS, *HELPERS))])


def sources_digest() -> str:
    """SHA-256 over the names and bytes of `sources`."""
    lines = [
        f"{hashlib.sha256(path.read_bytes()).hexdigest()}  {path.relative_to(ROOT).as_posix()}\n"
        for path in sources()
    ]
    return hashlib.sha256("".join(lines).encode()).hexdigest()


def read_report(report: Path) -> dict[str, Any]:
    """Of a JUnit report the tests by outcome, their seconds, and the sums of what they recorded."""
    cases = ElementTree.parse(report).getroot().iter("testcase")
    tests: collections.Counter[str] = collections.Counter()
    done: collections.Counter[str] = collections.Counter()
    seconds = 0.0
    for case in cases:
        outcomes = {"failure": "failed", "error": "failed", "skipped": "skipped"}
        found = [outcomes[child.tag] for child in case if child.tag in outcomes]
        tests[found[0] if found else "passed"] += 1
        seconds += float(case.get("time", "0"))
        for item in case.iter("property"):
            done[item.attrib["name"]] += int(item.attrib["value"])
    return {
        "tests": dict(sorted(tests.items())),
        "seconds": round(seconds),
        "done": dict(sorted(done.items())),
    }


def problems(result: dict[str, Any]) -> Iterator[str]:
    """Why a result does not count; nothing if it does."""
    if result["sources"] != sources_digest():
        yield "the sources have changed"
    if set(result["tests"]) != {"passed"}:
        yield f"not all tests passed: {result['tests']}"
    for name, least in BARS.items():
        if result["done"].get(name, 0) < least:
            yield f"{result['done'].get(name, 0)} {name}, not {least}"


def run(jobs: str) -> dict[str, Any]:
    """Run the tests at their full counts."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        before = sources_digest()
        command = [sys.executable, "-m", "pytest", "-n", jobs, "--dist", "worksteal"]
        subprocess.run(
            [*command, "-o", "junit_family=xunit1", f"--junitxml={report}", *TESTS],
            cwd=ROOT,
            env={**os.environ, **COUNTS},
            check=False,
        )
        result = read_report(report)
    if sources_digest() != before:
        sys.exit("soak: the sources changed while they were tested; run it again")
    commit, dirty = git_state(sources())
    return {
        "date": datetime.now(UTC).date().isoformat(),
        "commit": commit,
        "dirty": dirty,
        "python": platform.python_version(),
        "sources": before,
        **result,
    }


def main() -> None:
    """Run and write, or judge what was written."""
    parser = argparse.ArgumentParser(description=__doc__, prog="python -m benchmarks.soak")
    parser.add_argument("--check", action="store_true", help="judge the result; run nothing")
    parser.add_argument("--report", action="store_true", help="as --check, but exit 0")
    parser.add_argument("--result", type=Path, default=RESULT, help="the file")
    parser.add_argument("--jobs", default="auto", help="processes of pytest")
    options = parser.parse_args()
    if not (options.check or options.report):
        result = run(options.jobs)
        options.result.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    elif options.result.exists():
        result = json.loads(options.result.read_text(encoding="utf-8"))
    else:
        print(f"soak: no result in {options.result}")
        sys.exit(0 if options.report else 1)
    found = list(problems(result))
    for problem in found:
        print(f"soak: {problem}")
    if not found:
        print(f"soak: fresh: {', '.join(f'{n} {name}' for name, n in result['done'].items())}")
    sys.exit(1 if found and not options.report else 0)


if __name__ == "__main__":
    main()
