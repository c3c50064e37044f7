"""A patched `nn.Linear` with the loader's own kernels: what reaches the driver."""

from __future__ import annotations

import json

from gemv_launches import launches

HOPPER = {"SONATA_TEST_CUDA_CC": "9.0"}
# `OnDevice` counts as a tensor without a meaning of its own.
OPEN = """
import sonata_aot.loader.fallback as room
is_plain = room.is_plain
room.is_plain = lambda tensor: type(tensor) is OnDevice or is_plain(tensor)
k = loader.load(ARTIFACTS, devices=[0])
first = torch.nn.Linear(64, 48)
second = torch.nn.Linear(48, 64, bias=False)
first._parameters.update(weight=tensor(48, 64, address=0x100000), bias=tensor(48, address=0x5000))
second._parameters.update(weight=tensor(64, 48, address=0x200000))
model = torch.nn.Sequential(first, second)
report = loader.patch(model)
"""


def test_the_weights_of_now_are_launched(recorder, artifacts):
    outcome = recorder.loader(
        artifacts,
        OPEN
        + """
x = tensor(2, 1, 64)
for _ in range(3):
    y = model(x)
say(list(y.shape))
first._parameters.update(weight=tensor(48, 64, address=0x300000))
model(x)
swap(first.weight, tensor(48, 64, address=0x400000))
model(x)
swap(first.bias, tensor(48, address=0x7000))
model(x)
say([entry.calls for entry in report])
report.undo()
say(type(first) is torch.nn.Linear)
""",
        env=HOPPER,
    )
    shape, calls, restored = map(json.loads, outcome.stdout.splitlines())
    assert (shape, calls, restored) == ([2, 1, 64], [6, 6], True)
    found = [launch["params"] for launch in launches(outcome)]
    of_first = [(params["weight"], params["bias"]) for params in found[::2]]
    assert of_first == [
        *[(0x100000, 0x5000)] * 3,
        (0x300000, 0x5000),
        (0x400000, 0x5000),
        (0x400000, 0x7000),
    ]
    assert {params["weight"] for params in found[1::2]} == {0x200000}
    # Nothing starts before what precedes it has ended: that may be writing a weight.
    assert not outcome.named("cuLaunchKernelEx")
