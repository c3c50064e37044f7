"""What warps do together in the PTX machine, where threads go, and what a run is given."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from ptx_blocks import View
from ptx_machine import Machine, Memory, UnknownPtx
from ptx_numbers import to_bf16
from ptx_snippets import kernel, run

U16, U32, F16, F32 = np.uint16, np.uint32, np.float16, np.float32


def lanes(code: str, **options: Any) -> list[int]:
    """The `%r1` that `code` leaves in each lane of a warp, of `%r0`, its number."""
    body = f"{code} mad.wide.u32 %rd0, %r0, 4, %out; st.global.u32 [%rd0], %r1;"
    return run(body, out=np.zeros(32, U32), **options).tolist()


def test_shuffles() -> None:
    shuffle = "add.s32 %r2, %r0, 100; shfl.sync.{} %r1|%p1, %r2, {}, -1;"
    own = [100 + lane for lane in range(32)]
    assert lanes(shuffle.format("bfly.b32", "5, 31")) == [100 + (lane ^ 5) for lane in range(32)]
    assert lanes(shuffle.format("idx.b32", "3, 31")) == [103] * 32
    assert lanes(shuffle.format("up.b32", "2, 0")) == own[:2] + own[:-2]
    assert lanes(shuffle.format("down.b32", "3, 31")) == own[3:] + own[-3:]
    # In segments of eight.
    groups = [own[at : at + 8] for at in range(0, 32, 8)]
    idx = lanes(shuffle.format("idx.b32", f"1, {24 << 8 | 31}"))
    assert idx == [group[1] for group in groups for _ in group]
    down = lanes(shuffle.format("down.b32", f"1, {24 << 8 | 31}"))
    assert down == [value for group in groups for value in (*group[1:], group[-1])]


def test_a_shuffles_predicate_says_whether_it_was_inside() -> None:
    code = "mov.b32 %r2, 1; shfl.sync.down.b32 %r3|%p1, %r2, 30, 31, -1; selp.b32 %r1, 1, 0, %p1;"
    assert lanes(code) == [1, 1] + [0] * 30


def test_votes_matches_and_reductions() -> None:
    third = "and.b32 %r2, %r0, 3; setp.eq.s32 %p1, %r2, 2; "
    assert lanes(third + "vote.sync.ballot.b32 %r1, %p1, -1;") == [0x4444_4444] * 32
    for how, expected in (("any", 1), ("all", 0), ("uni", 0)):
        vote = f"vote.sync.{how}.pred %p2, %p1, -1; selp.b32 %r1, 1, 0, %p2;"
        assert lanes(third + vote) == [expected] * 32
    alike = [sum(1 << other for other in range(lane % 4, 32, 4)) for lane in range(32)]
    assert lanes(third + "match.any.sync.b32 %r1, %r2, -1;") == alike
    assert lanes("redux.sync.add.u32 %r1, %r0, -1;") == [31 * 16] * 32
    assert lanes("sub.s32 %r2, %r0, 9; redux.sync.min.s32 %r1, %r2, -1;") == [2**32 - 9] * 32
    everyone = "match.all.sync.b32 %r1|%p2, {}, -1; @!%p2 mov.b32 %r1, 5;"
    assert lanes("mov.b32 %r2, 4;" + everyone.format("%r2")) == [2**32 - 1] * 32
    assert lanes(everyone.format("%r0")) == [5] * 32
    elect = "elect.sync %r2|%p1, -1; selp.b32 %r1, 1, %r2, %p1;"
    assert lanes(elect) == [1] + [0] * 31
    assert lanes("activemask.b32 %r1;") == [2**32 - 1] * 32


def test_part_of_a_warp_shuffles_by_itself() -> None:
    code = (
        "mov.b32 %r1, 0; setp.ge.u32 %p1, %r0, 16; @%p1 bra $END;"
        "shfl.sync.bfly.b32 %r1, %r0, 1, 31, 0xFFFF;\n$END:\n"
    )
    assert lanes(code) == [lane ^ 1 for lane in range(16)] + [0] * 16


def fragments(kind: str, code: str, **arrays: Any) -> Any:
    """What a warp computes of words by lane: `%r1` to `%r4` of them, `%r5` to `%r8` as result."""
    inputs = {name: np.ascontiguousarray(words) for name, words in arrays.items()}
    loads, register = [], 10
    for name, words in inputs.items():
        for place in range(words.shape[1]):
            size = 4 * words.shape[1]
            loads.append(
                f"mad.wide.u32 %rd0, %r0, {size}, %{name}; "
                f"ld.global.b32 %r{register}, [%rd0+{4 * place}];"
            )
            register += 1
    count = 4 if kind == "f32" else 2
    stores = [
        f"mad.wide.u32 %rd0, %r0, {4 * count}, %out; st.global.b32 [%rd0+{4 * i}], %r{i + 1};"
        for i in range(count)
    ]
    out = np.zeros((32, count), U32)
    return run("\n".join([*loads, code, *stores]), out=out, inputs=inputs)


@pytest.mark.parametrize("brain", [True, False])
@pytest.mark.parametrize("k", [8, 16])
@pytest.mark.parametrize("into", ["f32", "f16"])
def test_matrices_are_multiplied_as_the_instruction_set_says(
    brain: bool, k: int, into: str
) -> None:
    if brain and into == "f16":
        return
    random = np.random.default_rng(1)
    a, b, c = (random.integers(-8, 9, shape) for shape in ((16, k), (k, 8), (16, 8)))
    # Rows and columns of each element that a lane has, by its group of four and place in it.
    group, place = np.arange(32) // 4, np.arange(32) % 4

    def words(matrix: Any, items: list[tuple[Any, Any]]) -> Any:
        values = np.stack([matrix[row, column] for row, column in items], axis=1).astype(F32)
        short = to_bf16(values) if brain else values.astype(F16).view(U16)
        return np.ascontiguousarray(short).view(U32)

    halves = range(k // 8)
    a_words = words(
        a,
        [
            (group + 8 * down, 2 * place + i + 8 * half)
            for half in halves
            for down in (0, 1)
            for i in (0, 1)
        ],
    )
    b_words = words(b, [(2 * place + i + 8 * half, group) for half in halves for i in (0, 1)])
    items = [(group + 8 * down, 2 * place + i) for down in (0, 1) for i in (0, 1)]
    sums = np.stack([c[row, column] for row, column in items], axis=1)
    c_words = sums.astype(F32).view(U32) if into == "f32" else sums.astype(F16).view(U32)
    count, kind = c_words.shape[1], "bf16" if brain else "f16"
    numbers = iter(range(10, 40))

    def braces(many: int) -> str:
        return "{" + ", ".join(f"%r{next(numbers)}" for _ in range(many)) + "}"

    target = "{" + ", ".join(f"%r{i + 1}" for i in range(count)) + "}"
    name = f"mma.sync.aligned.m16n8k{k}.row.col.{into}.{kind}.{kind}.{into}"
    code = f"{name} {target}, {braces(k // 4)}, {braces(k // 8)}, {braces(count)};"
    found = fragments(into, code, a=a_words, b=b_words, c=c_words)
    values = found.view(F32) if into == "f32" else found.view(F16)
    product = a @ b + c
    assert values.tolist() == np.stack([product[r, q] for r, q in items], axis=1).tolist()


def test_sums_of_matrices_may_change_places() -> None:
    # The products are zero, so what is left is C, in other registers.
    zeros = "".join(f"mov.b32 %r{i}, 0; " for i in range(20, 26))
    fill = "".join(f"mov.b32 %r{i + 1}, {i + 5}; " for i in range(4))
    code = (
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%r2, %r1, %r4, %r3}, "
        "{%r20, %r21, %r22, %r23}, {%r24, %r25}, {%r1, %r2, %r3, %r4};"
    )
    assert fragments("f32", zeros + fill + code).tolist() == [[6, 5, 8, 7]] * 32


ROWS = "shl.b32 %r1, %r0, 4; mov.b32 %r2, pool; add.s32 %r2, %r2, %r1;"


@pytest.mark.parametrize("count", [1, 2, 4])
@pytest.mark.parametrize("trans", [False, True])
def test_matrices_are_loaded_and_stored_by_rows(count: int, trans: bool) -> None:
    cells = np.arange(32 * 8, dtype=U16).reshape(4, 8, 8) * 3
    registers = "{" + ", ".join(f"%r{10 + i}" for i in range(count)) + "}"
    suffix = f"m8n8.x{count}{'.trans' if trans else ''}.shared.b16"
    stores = "".join(
        f"mad.wide.u32 %rd1, %r0, {4 * count}, %out; st.global.b32 [%rd1+{4 * i}], %r{10 + i};"
        for i in range(count)
    )
    body = (
        f"{ROWS} mad.wide.u32 %rd0, %r0, 16, %cells;"
        "ld.global.v4.b32 {%r4, %r5, %r6, %r7}, [%rd0];"
        "st.shared.v4.b32 [%r2], {%r4, %r5, %r6, %r7};"
        f"ldmatrix.sync.aligned.{suffix} {registers}, [%r2];"
    )
    given = {"cells": cells}
    out = run(body + stores, out=np.zeros((32, count), U32), inputs=given, shared_bytes=512)
    for lane, words in enumerate(out):
        for matrix, word in enumerate(words):
            at, (row, column) = cells[matrix], (lane // 4, 2 * (lane % 4))
            low, high = at[row, column], at[row, column + 1]
            if trans:
                low, high = at[column, row], at[column + 1, row]
            assert word == int(low) | int(high) << 16
    # And back: what was loaded is stored, elsewhere.
    back = (
        f"stmatrix.sync.aligned.{suffix} [%r2+512], {registers};"
        f"setp.lt.u32 %p1, %r0, {8 * count}; mad.wide.u32 %rd1, %r0, 16, %out;"
        "@%p1 ld.shared.v4.b32 {%r4, %r5, %r6, %r7}, [%r2+512];"
        "@%p1 st.global.v4.b32 [%rd1], {%r4, %r5, %r6, %r7};"
    )
    out = run(body + back, out=np.zeros((count, 8, 8), U16), inputs=given, shared_bytes=1024)
    assert (out == cells[:count]).all()


def test_a_matrix_in_registers_is_transposed() -> None:
    # Of cells that are their own places: lane 4 * g + t has 2t and 2t + 1 of row g.
    code = (
        "shl.b32 %r2, %r0, 1; add.s32 %r3, %r2, 1; shl.b32 %r3, %r3, 16; or.b32 %r2, %r2, %r3;"
        "movmatrix.sync.aligned.m8n8.trans.b16 %r1, %r2;"
    )
    cells = np.arange(64, dtype=U16).reshape(8, 8).T
    assert lanes(code) == np.ascontiguousarray(cells).view(U32).reshape(-1).tolist()


# Memory


def test_one_instruction_may_access_several_buffers() -> None:
    body = (
        "and.b32 %r1, %r0, 1; setp.eq.s32 %p1, %r1, 0; selp.b64 %rd1, %x, %y, %p1;"
        "mad.wide.u32 %rd1, %r0, 4, %rd1; ld.global.u32 %r2, [%rd1];"
        "mad.wide.u32 %rd0, %r0, 4, %out; st.global.u32 [%rd0], %r2;"
    )
    given = {"x": np.arange(32, dtype=U32), "y": np.arange(32, dtype=U32) + 100}
    out = run(body, out=np.zeros(32, U32), inputs=given)
    assert out.tolist() == [i + 100 * (i % 2) for i in range(32)]


def test_hints_change_nothing() -> None:
    body = (
        "griddepcontrol.launch_dependents; griddepcontrol.wait; membar.gl; fence.acq_rel.gpu;"
        "prefetch.global.L2 [%x]; createpolicy.fractional.L2::evict_first.b64 %rd5, 1.0;"
        "mov.b32 %r9, 64; cp.async.bulk.prefetch.L2.global [%x], %r9;"
        "ld.global.nc.L1::no_allocate.L2::128B.v4.b32 {%r1, %r2, %r3, %r4}, [%x];"
        "ld.global.L2::cache_hint.v2.b64 {%rd6, %rd7}, [%x+16], %rd5; ld.volatile.u32 %r5, [%x];"
        "add.s32 %r1, %r1, %r4; cvt.u32.u64 %r6, %rd7; add.s32 %r1, %r1, %r6;"
        "add.s32 %r1, %r1, %r5; st.global.cs.u32 [%out], %r1;"
    )
    given = {"x": np.arange(1, 9, dtype=U32)}
    assert run(body, out=np.zeros(1, U32), inputs=given).tolist() == [1 + 4 + 7 + 1]


def test_loads_of_less_than_a_register_are_extended() -> None:
    body = (
        "ld.global.s8 %r1, [%x]; ld.global.u8 %r2, [%x]; ld.global.s16 %r3, [%x];"
        "st.global.v4.u32 [%out], {%r1, %r2, %r3, %r3}; mov.b32 %r4, 0x1234;"
        "st.global.u8 [%out+12], %r4;"
    )
    given = {"x": np.array([0x80FE], U16)}
    out = run(body, out=np.zeros(4, U32), inputs=given, threads=1, exclusive=False)
    assert out.tolist() == [2**32 - 2, 0xFE, 0xFFFF_80FE, 0xFFFF_8034]


# Control flow


def test_threads_part_and_meet_again() -> None:
    code = (
        "mov.b32 %r1, 0; mov.b32 %r2, 0;\n"
        "$LOOP:\n setp.ge.u32 %p1, %r2, %r0; @%p1 bra $OUT;\n"
        "and.b32 %r3, %r2, 1; setp.eq.s32 %p2, %r3, 0; @%p2 bra $EVEN;\n"
        "add.s32 %r1, %r1, 10; bra.uni $NEXT;\n"
        "$EVEN:\n add.s32 %r1, %r1, 1;\n"
        "$NEXT:\n add.s32 %r2, %r2, 1; bra $LOOP;\n"
        "$OUT:\n shfl.sync.idx.b32 %r1, %r1, %r0, 31, -1;"
    )
    assert lanes(code) == [(lane + 1) // 2 + lane // 2 * 10 for lane in range(32)]


def test_predicated_instructions_keep_what_other_threads_have() -> None:
    code = (
        "mov.b32 %r1, 5; setp.lt.u32 %p1, %r0, 3; @%p1 mov.b32 %r1, 6; @!%p1 add.s32 %r1, %r1, 2;"
    )
    assert lanes(code) == [6] * 3 + [7] * 29


def test_names_between_braces_are_their_own() -> None:
    code = (
        "{ .reg .pred x; .reg .b32 y; setp.gt.u32 x, %r0, 3; selp.b32 y, 2, 1, x; mov.b32 %r2, y; }"
        "{ .reg .b64 x; .reg .pred y; cvt.u64.u32 x, %r2; setp.eq.s64 y, x, 2;"
        "  selp.b32 %r1, 20, 10, y; }"
    )
    assert lanes(code) == [10] * 4 + [20] * 28
    loop = "{ .reg .pred p; $L: add.s32 %r1, %r1, 1; setp.lt.s32 p, %r1, 4; @p bra $L; }"
    assert lanes(f"mov.b32 %r1, 0; {loop} mov.b32 %r1, 1; {loop}") == [4] * 32


def test_a_grid_in_batches_has_the_right_places() -> None:
    body = (
        "mov.u32 %r1, %ctaid.x; mov.u32 %r2, %ntid.x; mad.lo.s32 %r3, %r1, %r2, %r0;"
        "mov.u32 %r4, %nctaid.x; mad.lo.s32 %r5, %r4, 1000, %r3;"
        "mad.wide.u32 %rd0, %r3, 4, %out; st.global.u32 [%rd0], %r5;"
    )
    # 48 threads are one warp and a half.
    out = run(body, out=np.zeros(7 * 48, U32), threads=48, blocks=7, lanes=130)
    assert out.tolist() == [7000 + i for i in range(7 * 48)]


def test_special_registers_of_blocks_in_three_dimensions() -> None:
    body = (
        "mov.u32 %r1, %tid.x; mov.u32 %r2, %tid.y; mov.u32 %r3, %tid.z;"
        "mad.lo.s32 %r4, %r3, 3, %r2; mad.lo.s32 %r4, %r4, 4, %r1;"
        "mov.u32 %r5, %ctaid.y; mad.lo.s32 %r6, %r5, 24, %r4; mov.u32 %r7, %laneid;"
        "mov.u32 %r8, %lanemask_lt;"
        "mad.wide.u32 %rd0, %r6, 8, %out; st.global.v2.u32 [%rd0], {%r7, %r8};"
    )
    machine, memory, out = Machine(kernel(body, ["out"])), Memory(), np.zeros((48, 2), U32)
    buffer = memory.buffer(out, "out", writable=True)
    machine.run(memory, grid=(1, 2), block=(4, 3, 2), arguments=[buffer])
    assert out.tolist() == [[i % 24, (1 << i % 24) - 1] for i in range(48)]


def test_what_is_not_known_is_an_error() -> None:
    for code in (
        "wgmma.fence.sync.aligned;",
        "mov.u32 %r1, %clock;",
        "mov.u32 %r1, nowhere;",
        "add.cc.u32 %r1, %r1, %r1;",
        "ld.global.strange.b32 %r1, [%out];",
        "add.s32 %r1, %r1, %unknown;",
        "mma.sync.aligned.m8n8k4.row.col.f32.f16.f16.f32 {%r1}, {%r1}, {%r1}, {%r1};",
        "cvt.s32.f32 %r1, %f1;",
        "bra $NOWHERE;",
    ):
        with pytest.raises(UnknownPtx):
            Machine(kernel(code, ["out"]))


def test_atomic_operations() -> None:
    body = (
        "red.global.add.u32 [%out], %r0; mov.f32 %f1, 0f3F000000; red.global.add.f32 [%out+4], %f1;"
        "atom.global.max.u32 %r1, [%out+8], %r0; mov.b32 %r5, pool; mov.b32 %r6, 0;"
        "setp.eq.s32 %p1, %r0, 0; @%p1 st.shared.u32 [%r5], %r6; bar.warp.sync -1;"
        "atom.shared.add.u32 %r7, [%r5], 2; mad.wide.u32 %rd0, %r0, 4, %out;"
        "st.global.u32 [%rd0+12], %r7;"
    )
    out = run(body, out=np.zeros(35, U32), shared_bytes=4)
    assert out[:3].tolist() == [31 * 16, int(F32(16).view(U32)), 31]
    assert sorted(out[3:].tolist()) == list(range(0, 64, 2))


def test_kernels_are_run_with_the_block_and_arguments_that_they_have() -> None:
    machine = Machine(kernel("", ["out"]).replace(")\n{", ")\n.reqntid 64, 1, 1\n{"))
    memory = Memory()
    out = memory.buffer(np.zeros(1, U32), "out")
    with pytest.raises(ValueError, match="64"):
        machine.run(memory, grid=(1,), block=(32,), arguments=[out])
    with pytest.raises(ValueError, match="arguments"):
        machine.run(memory, grid=(1,), block=(64,), arguments=[out, 1])
    with pytest.raises(ValueError, match="param_out"):
        machine.run(memory, grid=(1,), block=(64,), arguments=[1 << 64])
    machine.run(memory, grid=(1,), block=(64,), arguments=[out])


def test_a_trace_sees_registers_and_who_is_there() -> None:
    body = "setp.lt.u32 %p1, %r0, 3; mov.b32 %r1, 7; @%p1 mov.b32 %r1, 9; add.s32 %r2, %r1, 1;"
    seen = []

    def trace(view: View) -> None:
        if view.text.startswith("add"):
            seen.append((view.register("%r1"), view.active, view.pc))

    run(body, out=np.zeros(1, U32), threads=40, blocks=2, trace=trace)
    ((values, active, pc),) = seen
    assert values.tolist() == [[9] * 3 + [7] * 37] * 2
    assert active.all()
    assert (active.shape, pc) == ((2, 40), 5)
