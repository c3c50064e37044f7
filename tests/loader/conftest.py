"""The loader against the recording driver, in subprocesses."""

from __future__ import annotations

import json
import textwrap
from pathlib import Path
from typing import Any

import pytest

from recording_libcuda import Outcome, Recorder

PRELUDE = """
import json, os, sys
import torch
from sonata_aot import loader
from sonata_aot.loader import runtime

def say(value):
    print(json.dumps(value), flush=True)

def failure(call, *args, **kwargs):
    try:
        call(*args, **kwargs)
    except Exception as error:
        return {"type": type(error).__name__, "message": str(error),
                "sonata": isinstance(error, loader.SonataError)}
    return None

class OnDevice(torch.Tensor):
    # A tensor that says it is on a GPU: this torch has no CUDA, and the driver is a stand-in.
    @staticmethod
    def __new__(cls, tensor, device="cuda:0", address=None):
        self = torch.Tensor._make_wrapper_subclass(
            cls, tensor.shape, strides=tensor.stride(), dtype=tensor.dtype,
            device=torch.device(device), requires_grad=tensor.requires_grad)
        self.address = tensor.data_ptr() if address is None else address
        self.memory = tensor
        return self

    def data_ptr(self):
        return self.address

    def new_empty(self, shape):
        return OnDevice(torch.empty(shape, dtype=self.dtype), self.device)

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        raise NotImplementedError(function)

STREAM = 0x7F00_1234_5678
runtime.current_stream = lambda device: STREAM + device

def tensor(*shape, address=0x1000, dtype=torch.bfloat16, device="cuda:0", stride=None):
    stride = stride or (shape[-1], 1)[-len(shape):]
    return OnDevice(torch.empty_strided(shape, stride, dtype=dtype), device, address)
"""


@pytest.fixture(scope="session")
def artifacts(built: Path) -> Path:
    """A set for sm86 and sm90."""
    return built


@pytest.fixture(scope="session")
def manifest(artifacts: Path) -> dict[str, Any]:
    return json.loads((artifacts / "manifest.json").read_text())


class LoaderRecorder(Recorder):
    """Runs scripts that use the loader; `ARTIFACTS` is the set's directory."""

    def loader(self, artifacts: Path, script: str, **options: Any) -> Outcome:
        prelude = f"{PRELUDE}\nARTIFACTS = {str(artifacts)!r}\n"
        options["env"] = {
            "SONATA_AOT_CACHE_DIR": str(self.folder / "no cache"),
            "SONATA_AOT_DIR": "",
            **options.get("env", {}),
        }
        return self.run(prelude + textwrap.dedent(script), **options)


@pytest.fixture
def recorder(recording_library: Path, tmp_path: Path) -> LoaderRecorder:
    return LoaderRecorder(recording_library, tmp_path)
