"""What is imported when: with the loader, and by `load` and a first launch."""

from __future__ import annotations


def test_what_loading_and_launching_need_is_imported_before_and_nothing_else(recorder, artifacts):
    outcome = recorder.loader(
        artifacts,
        """
        def own():
            return {name for name in sys.modules if name.startswith("sonata_aot.")}

        before = own()
        k = loader.load(ARTIFACTS, devices=[0])
        k.gemv(tensor(1, 64), tensor(16, 64))
        k["gemv_any"], k.mamba_chunk_scan_combined
        say([sorted(before), sorted(own() - before)])
        """,
        env={"SONATA_TEST_CUDA_CC": "8.6"},
    )
    before, added = outcome.value
    assert added == []
    late = ("patching", "patch_families", "compare", "ssd_stages", "stage_launch")
    assert not {f"sonata_aot.loader.{name}" for name in late} & set(before)
