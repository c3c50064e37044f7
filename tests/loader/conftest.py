"""The loader against the recording driver, in subprocesses."""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import json
import textwrap
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

import recording_libcuda
import ssd_launches
from plain_kernels import PlainKernels
from recording_libcuda import Outcome, Recorder
from sonata_aot.artifacts import Binary, Declaration, Payload, open_artifacts, publish
from sonata_aot.artifacts.manifest import binary_order

PRELUDE = """
import json, os, sys
import torch
from sonata_aot import loader
from sonata_aot.loader import runtime
from on_device import OnDevice, STREAM, failure, say, settled, swap, tensor
"""
# Plain tensors, of the CPU, for the driver's stand-in: who checks them is told that they are on a
# device. `slow` has an entry for each call that went to Python.
PLAIN = """
from sonata_aot.loader import bound, direct, gemv, tensors
from gemv_launches import launches
runtime.current_stream = lambda device: STREAMS[-1]
STREAMS = [7]
slow = []

def there(tensor):
    plain = type(tensor) in (torch.Tensor, torch.nn.Parameter)
    return OnDevice(tensor, "cuda:1", negated=tensor.is_neg()) if plain else tensor

def seen(function):
    return lambda *given, **named: function(
        *map(there, given), **{name: there(value) for name, value in named.items()}
    )

for name in ("check_dense", "check_out", "check_like", "end"):
    setattr(tensors, name, seen(getattr(tensors, name)))
for name in ("check", "check_weight"):
    setattr(gemv.Gemv, name, seen(getattr(gemv.Gemv, name)))
plain_run = gemv.run

def run(plan, operands, x, weight, bias, out, *more):
    slow.append(1)
    made = out if out is not None else torch.empty(operands.rows, weight.shape[0], dtype=x.dtype)
    plain_run(plan, operands, *map(there, (x, weight, bias, made)), *more)
    return made

gemv.run = bound.run = run
k = loader.load(ARTIFACTS, devices=[0, 1])
made = lambda *shape: torch.zeros(shape, dtype=torch.bfloat16)
x, weight, out = made(2, 64), made(100, 64), made(2, 100)
"""
# Where the scripts find `on_device`.
SUPPORT = Path(recording_libcuda.__file__).parents[1]


def publish_set(
    source: Path, target: Path, *declarations: Declaration, padding: bytes = b""
) -> Path:
    """Publishes a small set: two of gemv's binaries an architecture for each of the declarations.

    Their names have four letters, as `gemv` has, so that the machine code can be renamed. With
    `padding`, appended to each file, the set has other bytes than the source. There are no rules.
    """
    original = open_artifacts(source)
    binaries: list[Binary] = []
    objects: dict[str, bytes] = {}

    def renamed(payload: Payload, name: str) -> Payload:
        data = original.read(payload).replace(b"gemv_dtype", f"{name}_dtype".encode()) + padding
        sha256 = hashlib.sha256(data).hexdigest()
        payload = dataclasses.replace(payload, sha256=sha256, size=len(data))
        objects[payload.file_name] = data
        return payload

    first: dict[tuple[object, ...], Binary] = {}
    for binary in original.manifest.binaries:
        if (binary.kernel, binary.variant.get("dtype")) == ("gemv", "bf16"):
            first.setdefault((binary.arch, binary.variant["m"]), binary)
    declarations = tuple(sorted(declarations, key=lambda declaration: declaration.name))
    names = tuple(declaration.name for declaration in declarations)
    for name in names:
        binaries += [
            dataclasses.replace(
                binary,
                kernel=name,
                entry=binary.entry.replace("gemv", name, 1),
                cubin=renamed(binary.cubin, name),
                ptx=renamed(binary.ptx, name),
            )
            for (_, m), binary in first.items()
            if m in (1, 2)
        ]
    manifest = dataclasses.replace(
        original.manifest,
        kernels=declarations,
        rules=(),
        selection=dataclasses.replace(original.manifest.selection, kernels=names),
        binaries=tuple(sorted(binaries, key=binary_order)),
    )
    publish(target, manifest, objects)
    return target


@pytest.fixture(scope="session")
def gemv(artifacts: Path) -> Declaration:
    """The declaration of gemv as it was built."""
    declaration = open_artifacts(artifacts).manifest.declaration("gemv")
    assert declaration is not None
    return declaration


@pytest.fixture
def make_set(artifacts: Path, tmp_path: Path) -> Callable[..., Path]:
    """`make_set(*declarations, padding=b"")` publishes a set and returns where."""
    numbers = itertools.count()

    def make(*declarations: Declaration, padding: bytes = b"") -> Path:
        target = tmp_path / f"set{next(numbers)}"
        return publish_set(artifacts, target, *declarations, padding=padding)

    return make


@pytest.fixture(scope="session")
def artifacts(built: Path) -> Path:
    """A set for sm86 and sm90."""
    return built


@pytest.fixture(scope="session")
def ssd_artifacts(build_cases: Callable[..., Path]) -> Path:
    """A set for sm90 with what tests of the scan launch."""
    return build_cases("ssd-loader", ssd_launches.cases())


@pytest.fixture(scope="session")
def manifest(artifacts: Path) -> dict[str, Any]:
    return json.loads((artifacts / "manifest.json").read_text())


@pytest.fixture(scope="session")
def digests(manifest: dict[str, Any]) -> set[str]:
    """SHA-256 of the machine code for sm90."""
    return {b["cubin"]["sha256"] for b in manifest["binaries"] if b["arch"] == "sm90"}


Cases = Mapping[str, Sequence[str]]


class LoaderRecorder(Recorder):
    """Runs scripts that use the loader; `ARTIFACTS` is the set's directory."""

    def loader(self, artifacts: Path, script: str, **options: Any) -> Outcome:
        prelude = f"{PRELUDE}\nARTIFACTS = {str(artifacts)!r}\n"
        options["env"] = {
            "SONATA_AOT_CACHE_DIR": str(self.folder / "no cache"),
            "PYTHONPATH": str(SUPPORT),
            **options.get("env", {}),
        }
        return self.run(prelude + textwrap.dedent(script), **options)

    def refused(self, artifacts: Path, cases: Cases, prelude: str = "", **options: Any) -> Outcome:
        """Checks, in one process (each imports torch), that every call of `cases` is refused.

        `cases` maps an expression to the name of the error's class and words of its message.
        """
        lines = [f"say(failure(lambda: {expression}))" for expression in cases]
        outcome = self.loader(artifacts, "\n".join([prelude, *lines]), **options)
        answers = map(json.loads, outcome.stdout.splitlines())
        for (expression, (kind, *words)), error in zip(cases.items(), answers, strict=True):
            assert error is not None, f"accepted: {expression}"
            assert (error["type"], error["sonata"]) == (kind, True), (expression, error)
            for text in (*words, "; "):  # what happened; what to do
                assert text in error["message"], (expression, error["message"])
        return outcome


@pytest.fixture
def recorder(recording_library: Path, tmp_path: Path) -> LoaderRecorder:
    return LoaderRecorder(recording_library, tmp_path)


@pytest.fixture
def call(recorder: LoaderRecorder, ssd_artifacts: Path) -> Callable[..., Outcome]:
    """Runs a script after `ssd_launches.SETUP`, on two devices of sm90."""

    def run(script: str) -> Outcome:
        return recorder.loader(
            ssd_artifacts, ssd_launches.SETUP + script, env=ssd_launches.ENVIRONMENT
        )

    return run


@pytest.fixture
def plain_call(recorder: LoaderRecorder, artifacts: Path) -> Callable[..., Outcome]:
    """Runs a script after `PLAIN`, on two devices of sm90."""
    env = {"SONATA_TEST_CUDA_CC": "9.0", "SONATA_TEST_CUDA_DEVICES": "2"}
    return lambda script: recorder.loader(artifacts, PLAIN + script, env=env)


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> PlainKernels:
    """Kernels that patched models take for the process's, on CPU tensors."""
    from sonata_aot.loader import default, fallback

    found = PlainKernels()
    monkeypatch.setattr(default, "_default", found)
    monkeypatch.setattr(fallback, "device_of", lambda tensor: 0 if tensor.is_cpu else None)
    return found
