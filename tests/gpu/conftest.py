"""GPU tests run from built artifacts, each architecture that the GPU can run, PTX included.

The artifacts are those of SONATA_AOT_DIR or of the user's cache (`sonata-aot build --arch sm86
--arch sm90`, with `--all` for every declared variant): a machine with a GPU need not have the
compiler. What tests of variants cover is what was built.
"""

from __future__ import annotations

import pytest

from sonata_aot import loader
from sonata_aot.artifacts import Arch


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    reason = _why_not()
    for item in items:
        if item.path.parent.name != "gpu":
            continue
        item.add_marker(pytest.mark.gpu)
        if reason:
            item.add_marker(pytest.mark.skip(reason=reason))


def _why_not() -> str | None:
    try:
        import torch
    except ModuleNotFoundError:
        return "torch is not installed"
    return None if torch.cuda.is_available() else f"torch {torch.__version__} has no CUDA device"


@pytest.fixture(autouse=True)
def _fresh_data() -> None:
    """Other random data every time; the output of a failed test has the seed."""
    import torch

    print(f"torch.manual_seed({torch.seed()})")


@pytest.fixture(scope="session", params=["sm86", "sm90"])
def kernels(request: pytest.FixtureRequest) -> loader.Kernels:
    capability = torch_capability()
    if not Arch.parse(request.param).ptx_runs_on(capability):
        pytest.skip(f"{request.param} does not run on compute capability {capability}")
    return loader.load(arch=request.param, allow_ptx=True)


@pytest.fixture
def programmatic(kernels: loader.Kernels) -> loader.Kernels:
    """Kernels of an architecture that has programmatic dependent launch."""
    if not any(loaded.binary.variant["pdl"] for loaded in kernels.table("gemv").all().values()):
        pytest.skip("this architecture has no programmatic dependent launch")
    return kernels


def torch_capability() -> tuple[int, int]:
    import torch

    return torch.cuda.get_device_capability()
