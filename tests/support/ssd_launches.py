"""What a call of the scan gives the driver, and the scripts that make such calls."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sonata_aot.artifacts import open_artifacts
from sonata_aot.kernels import Variant, builtin

if TYPE_CHECKING:
    from recording_libcuda import Outcome

ENVIRONMENT = {"SONATA_TEST_CUDA_CC": "9.0", "SONATA_TEST_CUDA_DEVICES": "3"}
NAMES = (
    "x", "dt", "A", "B", "C", "D", "z", "dt_bias", "initial_states", "seq_idx", "cu_seqlens",
)  # fmt: skip
# Where a call of `SETUP` has them.
PLACES = {name: (i + 1) << 40 for i, name in enumerate(NAMES)}
KERNELS = ("ssd_copy", "ssd_prepare", "ssd_pass", "ssd_scan")
# Headdim and dstate of the binaries that tests of the loader have, by dtype.
PAIRS = {"bf16": ((64, 128), (128, 16)), "f16": ((64, 128),)}

# A call with each operand at an address of its own. `sizes` and `kinds` change shapes and dtypes,
# `changes` arguments by name. `made` lists what it allocated.
SETUP = """
k = loader.load(ARTIFACTS, devices=[0, 1])
from ssd_launches import NAMES, PLACES
made = []
plain_new_empty = OnDevice.new_empty
def new_empty(self, shape, dtype=None):
    result = plain_new_empty(self, shape, dtype)
    made.append([list(shape), str(result.dtype)[6:], result.data_ptr()])
    return result
OnDevice.new_empty = new_empty

def at(name, *shape, **options):
    return tensor(*shape, **{"address": PLACES[name], **options})

def operands(b=2, l=128, h=4, p=64, g=1, n=128, device="cuda:0", dtype=torch.bfloat16, only=""):
    f = torch.float32
    shapes = {
        "x": (b, l, h, p), "dt": (b, l, h), "A": (h,), "B": (b, l, g, n), "C": (b, l, g, n),
        "D": (h,), "z": (b, l, h, p), "dt_bias": (h,), "initial_states": (b, h, p, n),
        "seq_idx": (b, l), "cu_seqlens": (3,),
    }
    kinds = {"A": f, "D": f, "dt_bias": f, "initial_states": f}
    kinds |= {"seq_idx": torch.int32, "cu_seqlens": torch.int32}
    wanted = [*NAMES[:5], *only.split()]
    return {
        name: at(name, *shapes[name], dtype=kinds.get(name, dtype), device=device)
        for name in wanted
    }

def call(only="", sizes=None, **changes):
    made.clear()
    arguments = {**operands(only=only, **(sizes or {})), "chunk_size": 256, **changes}
    return k.mamba_chunk_scan_combined(**arguments)

def results(returned):
    some = returned if isinstance(returned, tuple) else (returned,)
    return [[list(t.shape), str(t.dtype)[6:], t.data_ptr()] for t in some]
"""


def variants(kernel: str) -> list[Variant]:
    """The variants of a kernel that tests of the loader have."""

    def wanted(variant: Variant) -> bool:
        pairs = PAIRS.get(str(variant.get("dtype", "bf16")), ())
        for name, place in (("headdim", 0), ("dstate", 1)):
            pairs = tuple(p for p in pairs if variant.get(name, p[place]) == p[place])
        # All that these tests need runs on sm90, with programmatic launch.
        return bool(pairs) and variant.get("pdl", 1) == 1

    return [variant for variant in builtin()[kernel].variants if wanted(variant)]


def cases(archs: Iterable[str] = ("sm90",)) -> list[tuple[str, str, Variant]]:
    """What `build_cases` builds for tests of the loader."""
    return [
        (a, kernel, variant) for a in archs for kernel in KERNELS for variant in variants(kernel)
    ]


def launches(outcome: Outcome, artifacts: Path) -> list[dict[str, Any]]:
    """What the driver was given, launch by launch; the parameter blocks taken apart."""
    manifest = open_artifacts(artifacts).manifest
    kernels = {binary.entry: binary for binary in manifest.binaries}
    found = []
    for launch in outcome.named("cuLaunchKernel", "cuLaunchKernelEx"):
        binary = kernels[launch["entry"]]
        declaration = manifest.declaration(binary.kernel)
        assert declaration is not None
        assert launch["block"] == list(binary.block)
        assert launch["shared"] == binary.shared_bytes
        values = declaration.block_layout.unpack(bytes.fromhex(launch["params"]))
        names = [parameter.name for parameter in declaration.parameters]
        found.append(
            {
                "kernel": binary.kernel,
                "variant": binary.variant,
                "grid": launch["grid"],
                "stream": launch["stream"],
                "context": launch["context"],
                "programmatic": launch["call"] == "cuLaunchKernelEx",
                "params": dict(zip(names, values, strict=True)),
            }
        )
    return found


def steps(name: str, dimensions: str, values: Iterable[int]) -> dict[str, int]:
    """Stride parameters by name."""
    return {f"{name}_{d}": v for d, v in zip(dimensions.split(), values, strict=True)}


def names(found: list[dict[str, Any]]) -> list[str]:
    """The kernels of launches."""
    return [launch["kernel"] for launch in found]


def in_workspace(address: int, made: list[Any]) -> bool:
    """Whether an address lies in the workspace, the one allocation of bytes, aligned."""
    ((shape, _, start),) = [each for each in made if each[1] == "uint8"]
    return start <= address < start + shape[0] and (address - start) % 256 == 0
