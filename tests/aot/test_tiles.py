"""What a block does for a tile, counted in code that is written out here."""

from __future__ import annotations

import dataclasses

import pytest

from machine_code import sass
from sonata_aot.aot.budget import breaches
from sonata_aot.aot.inspect import Figures, Prediction, predict, read
from sonata_aot.aot.instructions import global_bytes, shared_bytes
from sonata_aot.aot.machine import A10G, Occupancy
from sonata_aot.aot.sass import branches, parse
from sonata_aot.aot.tiles import Counts, Tile, per_tile
from sonata_aot.artifacts import Arch, Budget

SM86, SM90 = Arch.parse("sm86"), Arch.parse("sm90")
HELD = Occupancy(warps=8, blocks=1, most_warps=48, limit="registers")
PRODUCT = "HMMA.16816.F32.BF16 R16, R4, R12, R16"
# One sort of warps multiplies, and some of them twice more; the other copies, if there is a next
# tile, and has a loop within for what is rare.
WALKS = sass(
    "@P0 BRA `(.L_x_9)",
    ".L_x_0:",
    "LDS.128 R4, [R2]",
    PRODUCT,
    "@!P1 BRA `(.L_x_1)",
    PRODUCT,
    PRODUCT,
    ".L_x_1:",
    "STG.E.64 [R2.64], R16",
    "@P2 BRA `(.L_x_0)",
    "EXIT",
    ".L_x_9:",
    "LDSM.16.MT88.4 R4, [R2]",
    "@!P1 BRA `(.L_x_3)",
    "LDGSTS.E.BYPASS.128 [R2], [R4.64]",
    "BRA `(.L_x_4)",
    ".L_x_3:",
    "NOP",
    "NOP",
    ".L_x_4:",
    "@!P3 BRA `(.L_x_6)",
    ".L_x_5:",
    PRODUCT,
    "@P4 BRA `(.L_x_5)",
    ".L_x_6:",
    "SHFL.BFLY PT, R3, R3, 0x1, 0x1f",
    PRODUCT,
    "@P2 BRA `(.L_x_9)",
    "EXIT",
)
WARPS = 4


def counted(text: str = WALKS, dram_bytes: int = 1000) -> Tile:
    found = per_tile(text, WARPS, dram_bytes)
    assert found is not None
    return found


class TestCounting:
    def test_so_many_warps_go_through_each_loop(self) -> None:
        tile = counted()
        assert (tile.loops, tile.dram_bytes) == (2, 1000)
        assert tile.least.matrix_fmas == 4 * 2048 + 4 * 2048

    def test_the_least_and_the_most_of_each(self) -> None:
        tile = counted()
        assert tile.least == Counts(
            instructions=4 * 5 + 4 * 8,
            matrix_fmas=4 * 2 * 2048,
            shared_bytes=4 * 512 + 4 * (512 + 128),
            global_bytes=4 * 256,
        )
        assert tile.most == Counts(
            instructions=4 * 7 + 4 * 8,
            matrix_fmas=4 * 4 * 2048,
            shared_bytes=4 * 512 + 4 * (512 + 512 + 128),
            global_bytes=4 * 256 + 4 * 512,
        )

    def test_a_loop_within_counts_once_where_there_is_no_way_around(self) -> None:
        tile = counted(WALKS.replace("@!P3 BRA `(.L_x_6)", "NOP"))
        assert tile.least.matrix_fmas == 4 * 2048 + 4 * 2 * 2048

    @pytest.mark.parametrize("text", ["@P2 BRA `(.L_x_0)", "BRA `(.L_x_0)", "BRA P2, `(.L_x_0)"])
    def test_however_a_loop_is_closed(self, text: str) -> None:
        assert counted(WALKS.replace("@P2 BRA `(.L_x_0)", text)) == counted()

    @pytest.mark.parametrize("text", ["BRA.U UP1, `(.L_x_1)", "BRA P1, `(.L_x_1)"])
    def test_a_branch_may_have_its_condition_behind(self, text: str) -> None:
        assert counted(WALKS.replace("@!P1 BRA `(.L_x_1)", text)) == counted()

    def test_nothing_is_counted_without_bytes_or_such_products(self) -> None:
        assert per_tile(WALKS, WARPS, 0) is None
        assert per_tile(WALKS.replace("HMMA.16816", "IMMA.16816"), WARPS, 1000) is None
        assert per_tile(sass(PRODUCT, "EXIT"), WARPS, 1000) is None
        assert per_tile(WALKS.replace(PRODUCT, "NOP"), WARPS, 1000) is None

    def test_branches_lead_to_labels_before_and_behind(self) -> None:
        text = sass("BRA `(.L_x_1)", ".L_x_0:", "NOP", ".L_x_1:", "@P0 BRA `(.L_x_0)", "EXIT")
        assert branches(text) == {0: (32,), 32: (16,)}

    @pytest.mark.parametrize("opcode", ["BRX R2", "BRXU UR4"])
    def test_branches_through_a_table_lead_to_each_of_its_labels(self, opcode: str) -> None:
        """As nvdisasm shows them, with code that is not in the order it runs in."""
        table = f'{opcode} -0x20 (*"BRANCH_TARGETS .L_x_1,.L_x_2,.L_x_3"*)'
        text = sass(
            ".L_x_0:",
            *("NOP", table),
            *(".L_x_2:", PRODUCT, ".L_x_4:", "BRA `(.L_x_5)"),
            *(".L_x_1:", "BRA `(.L_x_4)", ".L_x_3:", PRODUCT, PRODUCT, "BRA `(.L_x_4)"),
            *(".L_x_5:", "@P0 BRA `(.L_x_0)", "EXIT"),
        )
        assert branches(text)[16] == (64, 32, 80)
        assert not parse(text)[1].falls_through
        tile = counted(text)
        assert (tile.least.matrix_fmas, tile.most.matrix_fmas) == (0, 4 * 2 * 2048)


def walks_of_three(*, apart: bool = True, barrier: str = "NOP") -> str:
    """Two walks that multiply, once or twice a tile, and one that copies; with a loop behind.

    The first two exclude each other if they are `apart`, else one follows on the other.
    """
    return sass(
        "@P0 BRA `(.L_x_9)",
        "@P5 BRA `(.L_x_2)",
        ".L_x_0:",
        barrier,
        PRODUCT,
        "@P2 BRA `(.L_x_0)",
        "EXIT" if apart else "NOP",
        ".L_x_2:",
        barrier,
        PRODUCT,
        PRODUCT,
        "@P2 BRA `(.L_x_2)",
        "EXIT",
        ".L_x_9:",
        barrier,
        "LDGSTS.E.BYPASS.128 [R2], [R4.64]",
        PRODUCT,
        "@P2 BRA `(.L_x_9)",
        ".L_x_10:",
        PRODUCT,
        "@P2 BRA `(.L_x_10)",
        "EXIT",
    )


class TestSeveralLoops:
    def products(self, text: str) -> tuple[int, int, int]:
        tile = counted(text)
        return tile.loops, tile.least.matrix_fmas // 8192, tile.most.matrix_fmas // 8192

    def test_those_that_exclude_each_other_are_alternatives(self) -> None:
        # The last one follows on the copying one.
        assert self.products(walks_of_three()) == (3, 1 + 1 + 1, 2 + 1 + 1)

    def test_those_that_follow_on_each_other_are_not(self) -> None:
        assert self.products(walks_of_three(apart=False)) == (4, 1 + 2 + 1 + 1, 1 + 2 + 1 + 1)

    def test_one_that_copies_is_no_alternative_of_one_that_does_not(self) -> None:
        text = walks_of_three(barrier="BAR.SYNC.DEFER_BLOCKING 0x1, 0x80")
        text = text.replace("LDGSTS.E.BYPASS.128 [R2], [R4.64]", "NOP")
        # Of the third there is nothing left that would tell it from the others, but what follows.
        assert self.products(text.replace("@P2 BRA `(.L_x_10)", "NOP")) == (1, 1, 2)

    def test_where_walks_meet_at_barriers_what_meets_nobody_is_none(self) -> None:
        text = walks_of_three(barrier="BAR.SYNC.DEFER_BLOCKING 0x1, 0x80")
        assert self.products(text) == (2, 1 + 1, 2 + 1)


@pytest.mark.parametrize(
    ("opcode", "shared", "moved"),
    [
        ("LDS R0, [R2]", 128, 0),
        ("LDS.128 R0, [R2]", 512, 0),
        ("STS.64 [R2], R4", 256, 0),
        ("LDSM.16.M88 R0, [R2]", 128, 0),
        ("LDSM.16.MT88.2 R0, [R2]", 256, 0),
        ("SHFL.IDX PT, R0, R0, RZ, 0x1f", 128, 0),
        ("LDGSTS.E.BYPASS.128 [R2], [R4.64]", 512, 512),
        ("LDG.E.U16 R0, [R2.64]", 0, 64),
        ("STG.E.128 [R2.64], R4", 0, 512),
        ("MOVM.16.MT88 R0, R0", 0, 0),
        ("FADD R0, R0, R0", 0, 0),
    ],
)
def test_the_bytes_of_an_instruction(opcode: str, shared: int, moved: int) -> None:
    (instruction,) = parse(sass(opcode))
    assert (shared_bytes(instruction), global_bytes(instruction)) == (shared, moved)


def predicted(tile: Tile, arch: Arch = SM86) -> Prediction:
    found = predict(arch, read(WALKS), HELD, tile)
    assert found is not None
    return found


class TestBound:
    def test_of_the_least_counts(self) -> None:
        tile = dataclasses.replace(counted(), dram_bytes=4096)
        found = predicted(tile)
        assert found.tile_seconds is not None
        assert found.tile_seconds == pytest.approx(
            {
                "dram": 4096 * 80 / 600e9,
                "issue": 52 / 4 / 1.71e9,
                "tensor": 16384 / 256 / 1.71e9,
                "shared": 4608 / 128 / 1.71e9,
            }
        )
        assert found.rates == pytest.approx(
            {name: 4096 * 80 / seconds for name, seconds in found.tile_seconds.items()}
        )
        assert found.rates["dram"] == pytest.approx(600e9)
        assert found.bound == "dram"

    @pytest.mark.parametrize(
        ("name", "field"),
        [
            ("issue", "instructions"),
            ("tensor", "matrix_fmas"),
            ("shared", "shared_bytes"),
            ("dram", ""),
        ],
    )
    def test_each_resource_can_be_it(self, name: str, field: str) -> None:
        tile = counted()
        much = dataclasses.replace(tile.least, **({field: 10**9} if field else {}))
        found = predicted(dataclasses.replace(tile, least=much))
        assert found.bound == name
        assert (found.margin < 1) == (name != "dram")

    def test_none_where_no_gpu_stands_for_the_architecture(self) -> None:
        assert predict(Arch.parse("sm80"), read(WALKS), HELD, counted()) is None

    def test_a_loop_that_streams_has_no_tile(self) -> None:
        text = WALKS.replace("LDS.128 R4, [R2]", "LDG.E.NA.128 R4, [R2.64]")
        found = predict(SM90, read(text), HELD)
        assert found is not None
        assert found.tile_seconds is None


def figures(tile: Tile | None) -> Figures:
    return Figures(
        registers=40,
        spills=0,
        stack_bytes=0,
        shared_bytes=0,
        static_shared_bytes=0,
        occupancy=HELD,
        code=read(WALKS),
        tile=tile,
        gpu=A10G.name,
        prediction=predict(SM86, read(WALKS), HELD, tile),
    )


def test_a_budget_asks_for_a_loop_over_tiles() -> None:
    asks = Budget(tile_bytes="2 * width")
    assert breaches(figures(counted()), asks, {"width": 64}) == []
    (broken,) = breaches(figures(None), asks, {"width": 64})
    assert broken.field == "tile_bytes"
    assert breaches(figures(None), asks, {"width": 0}) == []

    def test_one_that_leads_to_another_loop_is_no_alternative_of_one_that_does_not(self) -> None:
        text = walks_of_three().replace("LDGSTS.E.BYPASS.128 [R2], [R4.64]", "NOP")
        # The first two, the third and what is behind it.
        assert self.products(text) == (3, 1 + 1 + 1, 2 + 1 + 1)
