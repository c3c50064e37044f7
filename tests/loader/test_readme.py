"""The README's Python, run: complete, and against the recording driver."""

from __future__ import annotations

from pathlib import Path

import pytest

from documents import PAGES as ALL_PAGES
from documents import ROOT, blocks, name
from ssd_launches import launches

FIRST, DECODE, MODEL = blocks(ROOT / "README.md", "python")
PAGES = [page for page in ALL_PAGES if blocks(page, "python")]
# A GPU for a torch without one: what is made on it has memory of the CPU.
PRETEND = """
plain_randn = torch.randn
def randn(*shape, device, dtype=torch.float32):
    assert device == "cuda"
    return OnDevice(plain_randn(*shape, dtype=dtype), "cuda:0")
torch.randn = randn
# Torch would wait for the device.
OnDevice.__float__ = lambda tensor: float(tensor.memory)
OnDevice.__bool__ = lambda tensor: bool(tensor.memory)
torch.cuda.is_available = lambda: True
torch.cuda.current_device = lambda: 0
os.environ["SONATA_AOT_DIR"] = ARTIFACTS
"""
HOPPER = {"SONATA_TEST_CUDA_CC": "9.0"}
# A model with what the example calls; patching changes what it is made of.
SOME_MODEL = """
class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(64, 64, bias=False, dtype=torch.bfloat16)

    def generate(self, ids):
        return self.layer(ids)

model, ids = Model(), torch.zeros(1, 64, dtype=torch.bfloat16)
"""


def test_the_first_run_is_the_example() -> None:
    text = (ROOT / "examples" / "first_run.py").read_text()
    assert text.partition('"""\n\n')[2] == FIRST


def test_the_first_run_and_decoding_launch_what_they_say(recorder, artifacts) -> None:
    script = f"{PRETEND}{FIRST}{DECODE}\nsay([list(y.shape), str(y.device)])"
    outcome = recorder.loader(artifacts, script, env=HOPPER)
    gemv, scan, _ = outcome.stdout.splitlines()
    assert gemv.startswith("gemv (2, 8512) relative error ")
    assert scan.startswith("scan (2, 512, 64, 64) states (2, 64, 64, 128) finite ")
    assert outcome.value == [[2, 8512], "cuda:0"]
    kernels = [launch["kernel"] for launch in launches(outcome, artifacts)]
    # The last two bound and with an output; `linear` leaves such stand-ins for tensors to torch.
    assert kernels == ["gemv", "ssd_prepare", "ssd_scan", "gemv", "gemv"]
    assert {call["result"] for call in outcome.calls} == {0}


def test_a_model_is_patched_and_put_back(recorder, artifacts) -> None:
    script = (
        f"{PRETEND}{SOME_MODEL}{MODEL}\nsay([type(model) is Model, type(model.layer).__name__])"
    )
    outcome = recorder.loader(artifacts, script, env=HOPPER)
    assert outcome.value == [True, "Linear"]


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_every_example_in_python_is_python(page: Path) -> None:
    for text in blocks(page, "python"):
        compile(text, name(page), "exec")
