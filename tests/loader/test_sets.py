"""Sets with other kernels than gemv, or another gemv than this loader knows."""

from __future__ import annotations

import dataclasses

import pytest

from sonata_aot.artifacts import Parameter

HOPPER = {"SONATA_TEST_CUDA_CC": "9.0"}


@pytest.fixture(scope="session")
def axpy(gemv):
    """A kernel that the loader has no method for."""
    return dataclasses.replace(gemv, name="axpy")


def entries(outcome):
    return {call["entry"][:4] for call in outcome.named("cuLibraryGetKernel")}


@pytest.mark.parametrize("names", [["axpy"], []])
def test_preload_loads_only_what_it_names(recorder, make_set, gemv, axpy, names):
    outcome = recorder.loader(
        make_set(gemv, axpy),
        f"loader.load(ARTIFACTS, devices=[0], arch='sm86', allow_ptx=True, preload={names})",
        env=HOPPER,
    )
    assert entries(outcome) == set(names)
    assert len(outcome.named("cuLibraryLoadData")) == 2 * len(names)


def test_machine_code_of_all_kernels_is_loaded_whatever_is_named(recorder, make_set, gemv, axpy):
    outcome = recorder.loader(
        make_set(gemv, axpy),
        "loader.load(ARTIFACTS, devices=[0], preload=['axpy'])",
        env=HOPPER,
    )
    assert entries(outcome) == {"gemv", "axpy"}


def test_a_set_without_gemv(recorder, make_set, axpy):
    directory = make_set(axpy)
    outcome = recorder.loader(
        directory,
        "k = loader.load(ARTIFACTS, devices=[0])\nsay(failure(lambda: k.gemv))",
        env=HOPPER,
    )
    assert outcome.value["type"] == "VariantMissing"
    assert f"no kernel 'gemv' in {directory}" in outcome.value["message"]
    assert "--kernel" in outcome.value["message"]


def renamed(declaration):
    first, *others = declaration.parameters
    return dataclasses.replace(
        declaration, parameters=(dataclasses.replace(first, name="input"), *others)
    )


def swapped(declaration):
    first, second, *others = declaration.parameters
    return dataclasses.replace(declaration, parameters=(second, first, *others))


def retyped(declaration):
    *others, last = declaration.parameters
    assert last.kind == "i32"
    return dataclasses.replace(declaration, parameters=(*others, Parameter(last.name, "f32")))


def reselected(declaration):
    return dataclasses.replace(declaration, selectors=declaration.selectors[::-1])


def more_selectors(declaration):
    return dataclasses.replace(declaration, selectors=("dtype", "m", "rows"))


def test_a_gemv_that_takes_other_arguments_is_refused(recorder, make_set, gemv):
    changes = (renamed, swapped, retyped, reselected, more_selectors)
    cases = {
        f"loader.load({str(make_set(change(gemv)))!r}, devices=[0])": (
            *("ManifestError", "gemv has other parameters", "rebuild"),
        )
        for change in changes
    }
    assert len(cases) == len(changes)
    recorder.refused(make_set(gemv), cases, "loader.load(ARTIFACTS, devices=[0])", env=HOPPER)


def test_two_binaries_for_one_call_are_refused(recorder, make_set, gemv):
    def one_selector(name):
        return make_set(dataclasses.replace(gemv, name=name, selectors=("dtype",)))

    cases = {
        f"loader.load({str(one_selector(name))!r}, devices=[0])": (
            *("ManifestError", "have the same selectors ('dtype',)"),
            *(f"{name}[dtype=bf16,m={m}" for m in (1, 2)),
        )
        for name in ("gemv", "axpy")
    }
    recorder.refused(make_set(gemv), cases, env=HOPPER)


def test_a_launch_is_programmatic_only_where_that_is_declared_and_asked_for(
    recorder, make_set, gemv
):
    directory = make_set(dataclasses.replace(gemv, programmatic="m - 1"))  # for m = 2 alone
    outcome = recorder.loader(
        directory,
        """
        from sonata_aot.artifacts import open_artifacts
        from sonata_aot.loader.library import Loaded
        artifacts = open_artifacts(__import__("pathlib").Path(ARTIFACTS))
        declaration = artifacts.manifest.declaration("gemv")
        for binary in artifacts.manifest.binaries:
            if binary.arch == "sm90":
                image = artifacts.read(binary.cubin)
                loaded = Loaded(binary, declaration, image, "cubin", 0)
                sizes = (binary.variant["m"], 64, 1, 2, 0)
                for asked in (True, False):
                    loaded.launch(asked, 0x1000, 0x2000, 0, 0x3000, *sizes, 64, 64, 64,
                                  0, 0, 0, 0, 0, programmatic=asked)
        """,
        env=HOPPER,
    )
    launches = outcome.named("cuLaunchKernel", "cuLaunchKernelEx")
    seen = [(call["entry"][:19], call["stream"], call["call"]) for call in launches]
    assert seen == [
        ("gemv_dtype_bf16_m_1", 1, "cuLaunchKernel"),
        ("gemv_dtype_bf16_m_1", 0, "cuLaunchKernel"),
        ("gemv_dtype_bf16_m_2", 1, "cuLaunchKernelEx"),
        ("gemv_dtype_bf16_m_2", 0, "cuLaunchKernel"),
    ]
