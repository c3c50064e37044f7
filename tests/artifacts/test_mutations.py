"""Thousands of damaged sets: none is taken for the real one, and none breaks the reader.

MUTATIONS is how many are tried (400 unless told otherwise) and MUTATION_SEED where they start, so
that a long run can go on where another ended.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
from artifact_mutator import Mutant, mutate
from artifact_sets import Made, assert_holds, write_files

from sonata_aot.artifacts import open_artifacts
from sonata_aot.artifacts.errors import IntegrityError, ManifestError, SonataError
from sonata_aot.artifacts.verify import Failed, Passed, verify

COUNT = int(os.environ.get("MUTATIONS", "400"))
FIRST = int(os.environ.get("MUTATION_SEED", "0"))
CHUNKS = max(8, COUNT // 200)


def refused(directory: Path, mutant: Mutant, made: Made) -> str:
    """Who refused the set; empty if nobody did. Nothing but a `SonataError` may come out."""
    outcomes = verify(directory)
    passed = all(isinstance(outcome, Passed) for outcome in outcomes)
    try:
        artifacts = open_artifacts(directory)
    except (ManifestError, IntegrityError):
        assert isinstance(outcomes[0], Failed)
        assert len(outcomes) == 1
        return "open"
    assert mutant.sealed, "a manifest with other bytes was opened"
    refusals = 0
    for _, payload in artifacts.manifest.payloads():
        try:
            data = artifacts.read(payload)
        except IntegrityError:
            refusals += 1
        else:
            assert data in made.objects.values(), "bytes came back that are not the real ones"
    assert not (refusals and passed)
    return "read" if refusals else "" if passed else "verify"


@pytest.mark.parametrize("chunk", range(CHUNKS))
def test_every_mutant_is_refused(
    both: Made, tmp_path: Path, chunk: int, record_property: Callable[[str, object], None]
) -> None:
    made = both.only(0, 1, 2)
    for seed in range(FIRST + chunk, FIRST + COUNT, CHUNKS):
        mutant = mutate(seed, made)
        directory = write_files(tmp_path / "set", mutant.manifest, mutant.objects)
        try:
            by = refused(directory, mutant, made)
        except (Exception, SonataError) as error:
            raise AssertionError(f"seed {seed}, {mutant.done}") from error
        assert by, f"seed {seed} was accepted: {mutant.done}"
    record_property("mutants", len(range(FIRST + chunk, FIRST + COUNT, CHUNKS)))


def test_the_original_is_accepted(both: Made, tmp_path: Path) -> None:
    made = both.only(0, 1, 2)
    assert_holds(made.write(tmp_path / "set"), made)
    original = Mutant("nothing", made.manifest.to_bytes(), made.objects, sealed=True)
    assert refused(tmp_path / "set", original, made) == ""


def test_mutants_are_refused_at_every_stage(both: Made, tmp_path: Path) -> None:
    made = both.only(0, 1, 2)
    stages: set[str] = set()
    for seed in range(100):
        mutant = mutate(seed, made)
        directory = write_files(tmp_path / "set", mutant.manifest, mutant.objects)
        stages.add(refused(directory, mutant, made))
    assert stages == {"open", "read", "verify"}


def test_a_seed_makes_the_same_mutant_again(both: Made) -> None:
    assert [mutate(seed, both) for seed in range(50)] == [mutate(seed, both) for seed in range(50)]
