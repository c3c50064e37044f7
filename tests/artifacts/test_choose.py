from __future__ import annotations

import dataclasses

import pytest
from artifact_sets import Made, for_archs

from sonata_aot.artifacts import Arch, Choice
from sonata_aot.artifacts.choose import Rejected, build_command, choose, could_run
from sonata_aot.artifacts.errors import UsageError, VariantMissing

NEW = (13, 0)


def test_the_highest_machine_code_that_runs_is_chosen(made: Made) -> None:
    manifest = for_archs(made, "sm80", "sm86", "sm90")
    assert choose(manifest, (8, 9), driver_cuda=NEW) == Choice(
        "sm86",
        "cubin",
        "highest cubin here that runs on compute capability 8.9",
        (Rejected("sm90", "cubin", "does not run on 8.9"),),
    )


@pytest.mark.parametrize(
    ("archs", "device", "chosen"),
    [
        (["sm86"], (8, 6), "sm86"),
        (["sm86"], (8, 9), "sm86"),
        (["sm80", "sm86", "sm87", "sm89"], (8, 6), "sm86"),
        (["sm80", "sm86", "sm87", "sm89"], (8, 7), "sm87"),
        (["sm90", "sm90a"], (9, 0), "sm90a"),
        (["sm100", "sm100a", "sm100f"], (10, 3), "sm100f"),
        (["sm100", "sm100a"], (10, 3), "sm100"),
    ],
)
def test_machine_code_for_a_device(
    made: Made, archs: list[str], device: tuple[int, int], chosen: str
) -> None:
    choice = choose(for_archs(made, *archs), device, driver_cuda=NEW)
    assert (choice.arch, choice.form) == (chosen, "cubin")


def test_ptx_is_used_only_where_it_is_allowed(made: Made) -> None:
    manifest = for_archs(made, "sm86")
    with pytest.raises(VariantMissing) as caught:
        choose(manifest, (9, 0), driver_cuda=NEW)
    assert "compute capability 9.0" in caught.value.what
    assert "sm86 cubin: does not run on 9.0" in caught.value.what
    assert "sm86 ptx: PTX is not allowed" in caught.value.what
    assert "sonata-aot build --arch sm86 --arch sm90" in caught.value.remedy
    assert "allow_ptx=True" in caught.value.remedy
    choice = choose(manifest, (9, 0), driver_cuda=NEW, allow_ptx=True)
    assert (choice.arch, choice.form) == ("sm86", "ptx")
    assert choice.rejected == (Rejected("sm86", "cubin", "does not run on 9.0"),)
    assert choice.reason == "highest ptx here that runs on compute capability 9.0"


def test_machine_code_is_preferred_to_ptx(made: Made) -> None:
    manifest = for_archs(made, "sm80", "sm89")
    choice = choose(manifest, (8, 6), driver_cuda=NEW, allow_ptx=True)
    assert (choice.arch, choice.form) == ("sm80", "cubin")


def test_the_highest_ptx_is_chosen(made: Made) -> None:
    manifest = for_archs(made, "sm80", "sm86", "sm90a", "sm100")
    choice = choose(manifest, (9, 0), driver_cuda=NEW, allow_ptx=True, arch=None)
    assert (choice.arch, choice.form) == ("sm90a", "cubin")
    choice = choose(for_archs(made, "sm80", "sm86"), (12, 1), driver_cuda=NEW, allow_ptx=True)
    assert (choice.arch, choice.form) == ("sm86", "ptx")


def test_ptx_for_one_gpu_serves_no_other(made: Made) -> None:
    with pytest.raises(VariantMissing, match=r"sm90a ptx: does not run on 10\.0"):
        choose(for_archs(made, "sm90a"), (10, 0), driver_cuda=NEW, allow_ptx=True)


def test_a_driver_too_old_for_the_machine_code(made: Made) -> None:
    assert choose(made.manifest, (8, 6), driver_cuda=(12, 0)).form == "cubin"
    with pytest.raises(VariantMissing) as caught:
        choose(made.manifest, (8, 6), driver_cuda=(11, 8), allow_ptx=True)
    for form, needed in (("cubin", "12.0"), ("ptx", "12.9")):
        reason = f"sm86 {form}: needs a driver of CUDA {needed}, this one is 11.8"
        assert reason in caught.value.what
    assert "allow_ptx" not in caught.value.remedy


def test_a_driver_too_old_for_the_ptx_alone(made: Made) -> None:
    assert choose(made.manifest, (9, 0), driver_cuda=(12, 9), allow_ptx=True).form == "ptx"
    with pytest.raises(VariantMissing, match=r"CUDA 12\.9, this one is 12\.8"):
        choose(made.manifest, (9, 0), driver_cuda=(12, 8), allow_ptx=True)


def test_driver_versions_are_compared_as_numbers(made: Made) -> None:
    cubin = dataclasses.replace(made.manifest.binaries[0].cubin, min_cuda="12.9")
    manifest = for_archs(made, "sm86", cubin=cubin)
    assert choose(manifest, (8, 6), driver_cuda=(12, 10)).form == "cubin"


def test_the_most_demanding_binary_decides(made: Made) -> None:
    cubin = dataclasses.replace(made.manifest.binaries[1].cubin, min_cuda="13.1")
    manifest = made.changed(1, cubin=cubin).manifest
    with pytest.raises(VariantMissing, match=r"needs a driver of CUDA 13\.1"):
        choose(manifest, (8, 6), driver_cuda=NEW)


def test_a_lower_arch_serves_a_driver_too_old_for_the_higher(made: Made) -> None:
    manifest = for_archs(made, "sm100", "sm103")
    newer = dataclasses.replace(manifest.binaries[1].cubin, min_cuda="13.1")
    binaries = (manifest.binaries[0], dataclasses.replace(manifest.binaries[1], cubin=newer))
    manifest = dataclasses.replace(manifest, binaries=binaries)
    choice = choose(manifest, (10, 3), driver_cuda=NEW)
    assert choice.arch == "sm100"
    assert [r.reason for r in choice.rejected] == ["needs a driver of CUDA 13.1, this one is 13.0"]


@pytest.mark.parametrize("spelling", ["sm80", "8.0", "sm_80"])
def test_arch_restricts_the_choice(made: Made, spelling: str) -> None:
    manifest = for_archs(made, "sm80", "sm86")
    choice = choose(manifest, (8, 6), driver_cuda=NEW, arch=spelling)
    assert choice.arch == "sm80"
    assert choice.rejected == (Rejected("sm86", "cubin", "not the requested sm80"),)


def test_arch_is_no_leave_to_run_what_does_not_run(made: Made) -> None:
    manifest = for_archs(made, "sm86", "sm89")
    with pytest.raises(VariantMissing) as caught:
        choose(manifest, (8, 6), driver_cuda=NEW, arch="sm89", allow_ptx=True)
    assert "sm89 cubin: does not run on 8.6" in caught.value.what
    assert "sm86 cubin: not the requested sm89" in caught.value.what
    assert "--arch sm89" in caught.value.remedy


def test_an_unknown_arch_is_a_usage_error(made: Made) -> None:
    with pytest.raises(UsageError, match="Hopper"):
        choose(made.manifest, (8, 6), driver_cuda=NEW, arch="Hopper")


def test_an_empty_set_says_so(made: Made) -> None:
    with pytest.raises(VariantMissing, match="it is empty"):
        choose(made.only().manifest, (8, 6), driver_cuda=NEW)


def test_an_architecture_that_nothing_was_built_for(made: Made) -> None:
    manifest = dataclasses.replace(made.manifest, rules=(), binaries=())
    with pytest.raises(VariantMissing, match="sm86 cubin: nothing was built for it") as caught:
        choose(manifest, (8, 6), driver_cuda=NEW)
    # PTX that is not there would not help.
    assert caught.value.remedy == build_command([Arch(8, 6)], (8, 6))


@pytest.mark.parametrize("arch", ["sm80", "sm86", "sm89", "sm90", "sm90a", "sm100", "sm100f"])
@pytest.mark.parametrize("device", [(8, 0), (8, 6), (8, 9), (9, 0), (10, 0), (10, 3)])
@pytest.mark.parametrize("wanted", [None, "sm86", "sm90a"])
@pytest.mark.parametrize("allow_ptx", [False, True])
def test_what_could_run_is_what_is_chosen_where_there_is_nothing_else(
    made: Made, arch: str, device: tuple[int, int], wanted: str | None, allow_ptx: bool
) -> None:
    def chosen() -> bool:
        try:
            choose(for_archs(made, arch), device, driver_cuda=NEW, arch=wanted, allow_ptx=allow_ptx)
        except VariantMissing:
            return False
        return True

    assert could_run(arch, device, wanted=wanted, allow_ptx=allow_ptx) == chosen()


@pytest.mark.parametrize(
    ("present", "device", "command"),
    [
        ([], (8, 6), "sonata-aot build --arch sm86`"),
        (["sm90"], (8, 6), "sonata-aot build --arch sm86 --arch sm90`"),
        (["sm100", "sm86", "sm90a"], (9, 0), "--arch sm86 --arch sm90 --arch sm90a --arch sm100`"),
        (["sm86"], (8, 6), "sonata-aot build --arch sm86`"),
    ],
)
def test_a_remedy_builds_for_the_device_and_loses_nothing(
    present: list[str], device: tuple[int, int], command: str
) -> None:
    assert command in build_command([Arch.parse(name) for name in present], device)


@pytest.mark.parametrize("device", [(7, 5), (6, 0), (11, 9)])
def test_no_build_helps_a_device_that_cannot_be_built_for(
    made: Made, device: tuple[int, int]
) -> None:
    assert "sonata-aot build" not in build_command([Arch(8, 6)], device)
    with pytest.raises(VariantMissing) as caught:
        choose(made.manifest, device, driver_cuda=NEW)
    assert "--arch" not in caught.value.remedy
