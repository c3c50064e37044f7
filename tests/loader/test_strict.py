"""`load(strict=True)`: machine code only, and all of it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from sonata_aot.artifacts.errors import VariantMissing
from sonata_aot.loader import strict

HOPPER = {"SONATA_TEST_CUDA_CC": "9.0"}
LOAD = "k = loader.load(ARTIFACTS, devices=[0], strict=True)\n"


def test_a_default_build_passes_and_nothing_is_loaded_later(recorder, artifacts, manifest):
    outcome = recorder.loader(
        artifacts,
        LOAD
        + "before = len(open(os.environ['SONATA_TEST_CUDA_LOG']).read().split('LibraryLoad')) - 1\n"
        "for rows in (1, 2, 8): k.gemv(tensor(rows, 64), tensor(16, 64))\n"
        "k.gemv(tensor(1, 63), tensor(16, 63))\n"
        "say(before)",
        env=HOPPER,
    )
    assert outcome.value == len(outcome.named("cuLibraryLoadData"))
    wanted = {b["cubin"]["sha256"] for b in manifest["binaries"] if b["arch"] == "sm90"}
    assert {call["sha256"] for call in outcome.named("cuLibraryLoadData")} == wanted


def test_ptx_is_refused(recorder, artifacts):
    words = ("ArgumentError", "strict and allow_ptx", "machine code only")
    call = "loader.load(ARTIFACTS, devices=[0], strict=True, allow_ptx=True)"
    outcome = recorder.refused(artifacts, {call: words}, env=HOPPER)
    assert outcome.named("cuLibraryLoadData") == []


def test_a_set_without_a_kernel_is_refused(recorder, make_set, gemv):
    call = "loader.load(ARTIFACTS, devices=[0], strict=True)"
    words = ("VariantMissing", "strict: no kernel 'gemv_any' for sm90", "--kernel")
    recorder.refused(make_set(gemv), {call: words}, env=HOPPER)


NEEDED = ("gemv", "gemv_any", "ssd_prepare", "ssd_scan")
CHOICES: Any = {0: SimpleNamespace(arch="sm90"), 1: SimpleNamespace(arch="sm86")}


def tables(*without: tuple[str, int]) -> Any:
    """A binary of each kernel that is needed on devices 0 and 1, but for these."""
    found = {
        name: {(device, "bf16"): object() for device in CHOICES if (name, device) not in without}
        for name in NEEDED
    }
    return {
        name: SimpleNamespace(all=lambda binaries=binaries: binaries)
        for name, binaries in found.items()
    }


@pytest.mark.parametrize("name", NEEDED)
def test_every_kernel_is_needed_on_every_device(name):
    strict.require_kernels(tables(), CHOICES)
    with pytest.raises(VariantMissing, match=f"no kernel '{name}' for sm86"):
        strict.require_kernels(tables((name, 1)), CHOICES)
    lacking = tables()
    del lacking[name]
    with pytest.raises(VariantMissing, match=f"no kernel '{name}' for sm90"):
        strict.require_kernels(lacking, CHOICES)
