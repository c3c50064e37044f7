from __future__ import annotations

import itertools

import pytest

from sonata_aot.artifacts.arch import (
    KNOWN,
    Arch,
    cubin_min_cuda,
    normalise,
    parse_arch_list,
    ptx_min_cuda,
)
from sonata_aot.artifacts.errors import UsageError


@pytest.mark.parametrize("text", ["sm86", "sm_86", "8.6", "86", "SM86", "Sm_86", " sm86 ", "sm8.6"])
def test_every_spelling_is_the_same_arch(text: str) -> None:
    arch = Arch.parse(text)
    assert arch == Arch(8, 6)
    assert (arch.name, str(arch), arch.compiler_name, arch.number) == ("sm86", "sm86", "sm_86", 86)


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("9.0a", "sm90a"),
        ("sm_90a", "sm90a"),
        ("90A", "sm90a"),
        ("10.0", "sm100"),
        ("100f", "sm100f"),
        ("sm_121f", "sm121f"),
        ("12.1a", "sm121a"),
    ],
)
def test_suffixes_and_three_digits(text: str, name: str) -> None:
    assert Arch.parse(text).name == name


@pytest.mark.parametrize("arch", KNOWN, ids=str)
def test_printed_forms_are_read_back(arch: Arch) -> None:
    assert Arch.parse(arch.name) == Arch.parse(arch.compiler_name) == arch
    assert Arch.parse(f"{arch.major}.{arch.minor}{arch.suffix}") == arch


@pytest.mark.parametrize(
    "text",
    [
        *("", "sm", "sm_", "8", "sm75", "sm86a", "sm90f", "sm99", "8.60", "sm__86", "sm-86"),
        *("86+PTX", "compute_86", "Hopper", "Ampere", "native", "all", "sm86 sm90", "sm86\0"),
        *("8,6", "-86"),
    ],
)
def test_what_names_no_arch_is_refused_with_the_choices(text: str) -> None:
    with pytest.raises(UsageError) as caught:
        Arch.parse(text)
    assert repr(text) in caught.value.what
    assert "sm86" in caught.value.remedy
    assert "sm90a" in caught.value.remedy
    assert caught.value.exit_code == 2


@pytest.mark.parametrize("text", ["sm086", "086", "08.6", "sm８６", "٨.٦"])
def test_one_arch_has_no_second_stored_name(text: str) -> None:
    # A leading zero or another script's digits would make a name that equals no other.
    with pytest.raises(UsageError):
        Arch.parse(text)


@pytest.mark.parametrize(
    ("arch", "device", "runs"),
    [
        ("sm86", (8, 6), True),
        ("sm86", (8, 9), True),
        ("sm86", (8, 0), False),
        ("sm86", (9, 0), False),
        ("sm80", (8, 6), True),
        ("sm80", (8, 9), True),
        ("sm89", (8, 6), False),
        ("sm90", (8, 9), False),
        ("sm90", (10, 0), False),
        # Tegra never mixes.
        ("sm87", (8, 7), True),
        ("sm87", (8, 9), False),
        ("sm86", (8, 7), False),
        ("sm80", (8, 7), False),
        # `a`: this exact GPU.
        ("sm90a", (9, 0), True),
        ("sm100a", (10, 0), True),
        ("sm100a", (10, 3), False),
        ("sm120a", (12, 1), False),
        # `f`: its family.
        ("sm100f", (10, 0), True),
        ("sm100f", (10, 3), True),
        ("sm103f", (10, 0), False),
        ("sm100f", (12, 0), False),
        ("sm120f", (12, 1), True),
        ("sm120", (12, 1), True),
        ("sm100", (12, 0), False),
    ],
)
def test_where_machine_code_runs(arch: str, device: tuple[int, int], runs: bool) -> None:
    assert Arch.parse(arch).cubin_runs_on(device) is runs


@pytest.mark.parametrize(
    ("arch", "device", "runs"),
    [
        ("sm86", (8, 6), True),
        ("sm86", (8, 0), False),
        ("sm86", (9, 0), True),
        ("sm86", (12, 1), True),
        ("sm86", (8, 7), True),
        ("sm90", (8, 9), False),
        ("sm90a", (9, 0), True),
        ("sm90a", (10, 0), False),
        ("sm100f", (10, 3), True),
        ("sm100f", (12, 0), False),
        ("sm103f", (10, 0), False),
    ],
)
def test_where_the_driver_can_compile_ptx(arch: str, device: tuple[int, int], runs: bool) -> None:
    assert Arch.parse(arch).ptx_runs_on(device) is runs


def test_machine_code_never_leaves_its_major_version() -> None:
    devices = {(arch.major, arch.minor) for arch in KNOWN}
    for arch, device in itertools.product(KNOWN, devices):
        if arch.cubin_runs_on(device):
            assert device[0] == arch.major
            assert device[1] >= arch.minor


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("8.6", ["sm86"]),
        ("8.6;9.0", ["sm86", "sm90"]),
        ("8.6,9.0", ["sm86", "sm90"]),
        ("8.6 9.0", ["sm86", "sm90"]),
        ("9.0a;8.0  8.6+PTX, 8.6", ["sm80", "sm86", "sm90a"]),
        ("8.6+ptx", ["sm86"]),
        (" ; 8.9 ;", ["sm89"]),
        ("", []),
        (" ;, ", []),
    ],
)
def test_torch_arch_list(text: str, names: list[str]) -> None:
    assert [arch.name for arch in parse_arch_list(text)] == names


@pytest.mark.parametrize("text", ["Hopper", "8.6;Ampere", "8.6+PTX+PTX", "7.5;8.6", "8.6+", "all"])
def test_torch_arch_list_refuses_what_cannot_be_built(text: str) -> None:
    with pytest.raises(UsageError):
        parse_arch_list(text)


def test_normalised_archs_are_sorted_by_number_and_stand_once() -> None:
    archs = [Arch.parse(text) for text in ("sm120", "sm90a", "sm90", "sm86", "sm90", "sm100")]
    assert [a.name for a in normalise(archs)] == ["sm86", "sm90", "sm90a", "sm100", "sm120"]


@pytest.mark.parametrize(
    ("arch", "major", "least"),
    [
        ("sm80", 12, (12, 0)),
        ("sm86", 12, (12, 0)),
        ("sm86", 11, (11, 1)),
        ("sm90", 13, (13, 0)),
        ("sm100", 12, (12, 8)),
        ("sm103a", 12, (12, 9)),
        ("sm120", 13, (13, 0)),
    ],
)
def test_least_driver_for_machine_code(arch: str, major: int, least: tuple[int, int]) -> None:
    assert cubin_min_cuda(Arch.parse(arch), major) == least


@pytest.mark.parametrize("arch", KNOWN, ids=str)
def test_every_known_arch_has_a_least_driver(arch: Arch) -> None:
    assert cubin_min_cuda(arch, 12) >= (12, 0)


@pytest.mark.parametrize(
    ("isa", "least"),
    [
        ((7, 0), (11, 0)),
        ((8, 8), (12, 9)),
        ((8, 6), (12, 7)),
        ((9, 0), (13, 0)),
        ((7, 5), (11, 8)),  # between two of the table: the later
        ((9, 9), (13, 4)),  # newer than the table: its last
    ],
)
def test_least_driver_for_ptx(isa: tuple[int, int], least: tuple[int, int]) -> None:
    assert ptx_min_cuda(isa) == least
