"""What the PTX machine says of kernels that are wrong, and that others run."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest

from ptx_machine import Fault, Machine, Memory
from ptx_snippets import kernel, run

U32 = np.uint32
# `%r2`: a word of shared memory for each thread.
MINE = "mov.b32 %r3, pool; shl.b32 %r4, %r0, 2; add.s32 %r2, %r3, %r4;"
SAVE = "mad.wide.u32 %rd0, %r0, 4, %out; st.global.u32 [%rd0], %r1;"


def out_of(body: str, threads: int = 64, **options: Any) -> list[int]:
    shared = {"shared_bytes": 4096, **options}
    return run(body, out=np.zeros(threads, U32), threads=threads, **shared).tolist()


def fault(body: str, problem: str, **options: Any) -> None:
    with pytest.raises(Fault, match=problem):
        out_of(body, **options)


# Registers and global memory


def test_a_register_that_nobody_wrote() -> None:
    fault("add.s32 %r1, %r2, 1;", r"%r2 is read and was not written, in `add.s32 %r1, %r2, 1`")
    some = "setp.lt.u32 %p1, %r0, 40; @%p1 mov.b32 %r1, 1;"
    fault(f"{some} add.s32 %r2, %r1, 1;", "%r1 is read .* thread 40")
    out_of(f"{some} @%p1 add.s32 %r2, %r1, 1;")


def test_accesses_outside_of_buffers() -> None:
    fault("mov.b32 %r1, 0; st.global.u32 [%out+256], %r1;", "256 bytes from the start of out")
    fault("ld.global.u8 %h1, [%out+-1];", "-1 bytes from the start of out")
    fault("ld.global.b64 %rd1, [%out+252];", "252 bytes .* which has 256")
    far = "mad.wide.u32 %rd0, %r0, 4, %out; ld.global.u32 %r1, [%rd0+4];"
    fault(far, r"block \(0, 0, 0\), thread 63")
    fault("mov.b64 %rd1, 0; ld.global.u32 %r1, [%rd1];", "0x0 lie outside")
    # Also by part of the threads, and by way of a generic address.
    fault(far.replace("; ld", "; setp.eq.s32 %p1, %r0, 63; @%p1 ld"), r"\), thread 63$")
    fault("ld.u32 %r1, [%out+256];", "out")


def test_accesses_that_are_not_aligned() -> None:
    fault("ld.global.u32 %r1, [%out+2];", "2 of 4 bytes")
    fault("ld.global.v2.u32 {%r1, %r2}, [%out+4];", "4 of 8 bytes")
    fault(f"{MINE} ld.shared.v4.u32 {{%r4, %r5, %r6, %r7}}, [%r2];", "16 bytes at 4 ")


def test_writes_to_what_is_only_read() -> None:
    given = {"x": np.zeros(64, U32)}
    with pytest.raises(Fault, match="a write to x"):
        run("st.global.u32 [%x], %r0;", out=np.zeros(1, U32), inputs=given)


def test_threads_that_write_different_values_to_one_place() -> None:
    same = "mov.b32 %r1, 7; st.global.u32 [%out], %r1;"
    assert out_of(same)[0] == 7
    fault("st.global.u32 [%out], %r0;", "different values to byte 0 of out")
    later = "setp.eq.s32 %p1, %r0, 5; @%p1 st.global.u32 [%out], %r0;"
    fault(f"{same} {later}", "different values to byte 0 of out")
    assert out_of(f"{same} {later}", exclusive=False)[0] == 5


def test_a_buffer_says_what_was_written() -> None:
    machine, memory = (
        Machine(kernel("mov.b32 %r1, 0; st.global.u8 [%out+9], %r1;", ["out"])),
        Memory(),
    )
    array = np.full((2, 8), 5, np.uint8)
    buffer = memory.buffer(array, "out", writable=True, offset=3)
    machine.run(memory, grid=(1,), block=(32,), arguments=[buffer])
    assert np.argwhere(array == 0).tolist() == np.argwhere(buffer.written).tolist() == [[1, 1]]


def test_one_launch_may_write_over_what_another_wrote() -> None:
    body = "mov.u32 %r1, %nctaid.x; add.s32 %r1, %r1, %r0; st.global.u32 [%out], %r1;"
    machine, memory, array = Machine(kernel(body, ["out"])), Memory(), np.zeros(1, U32)
    out = memory.buffer(array, "out", writable=True)
    for blocks in (1, 2):
        machine.run(memory, grid=(blocks,), block=(1,), arguments=[out])
        assert array.tolist() == [blocks]
    array[:] = 9
    Machine(kernel("", ["out"])).run(memory, grid=(1,), block=(1,), arguments=[out])
    assert array.tolist() == [9]


def test_buffers_do_not_touch() -> None:
    memory = Memory()
    memory.buffer(np.zeros(64), "x", address=1 << 20)
    with pytest.raises(ValueError, match="too close to x"):
        memory.buffer(np.zeros(64), "y", address=(1 << 20) + 512)


def test_division_by_zero_and_loops_without_end() -> None:
    fault("div.u32 %r1, %r0, %r0;", "divided by zero, in `div.u32")
    fault("$L:\n bra $L;", "more than 100 steps, in `bra", limit=100)
    fault("setp.eq.s32 %p1, %r0, 3; @%p1 trap;", "a trap, .* thread 3$")


# Shared memory


def test_shared_memory_that_nobody_wrote() -> None:
    read = f"{MINE} ld.shared.u32 %r1, [%r2];"
    fault(read, "byte 0 of shared memory is read")
    assert out_of(f"{read} {SAVE}", strict=False) == [0xFFFF_FFFF] * 64
    half = f"{MINE} mov.b16 %h1, 1; st.shared.b16 [%r2], %h1; ld.shared.u32 %r1, [%r2];"
    fault(half, "is read")


def test_accesses_outside_of_shared_memory() -> None:
    fault(
        f"{MINE} st.shared.u32 [%r2+4096], %r0;", "4 bytes at 4096 of shared memory, which has 4096"
    )
    fault(f"{MINE} st.shared.u32 [%r2+-4], %r0;", "4 bytes at -4 .* thread 0$")
    fault("mov.b32 %r1, 0; ld.shared.u32 %r1, [%r1];", "of shared memory")


def test_static_and_generic_shared_memory() -> None:
    body = (
        "{ .shared .align 16 .b8 fixed[64]; mov.u32 %r2, fixed; }"
        "mov.u32 %r3, pool; sub.s32 %r1, %r3, %r2; cvt.u64.u32 %rd1, %r3;"
        "cvta.shared.u64 %rd2, %rd1; mad.wide.u32 %rd2, %r0, 4, %rd2;"
        "st.u32 [%rd2], %r1; ld.u32 %r1, [%rd2];" + SAVE
    )
    assert out_of(body) == [64] * 64


ROTATE = "xor.b32 %r5, %r4, 128; add.s32 %r6, %r3, %r5;"
EXCHANGE = f"{MINE} {ROTATE} st.shared.u32 [%r2], %r0; {{}} ld.shared.u32 %r1, [%r6]; {SAVE}"


def test_what_another_warp_wrote_is_behind_a_barrier() -> None:
    assert out_of(EXCHANGE.format("bar.sync 0;")) == [lane ^ 32 for lane in range(64)]
    fault(EXCHANGE.format(""), "a race: this reads what warp . wrote at byte")
    assert out_of(EXCHANGE.format(""), races=False) == [lane ^ 32 for lane in range(64)]
    # One between threads of one warp has no race.
    assert out_of(EXCHANGE.format("").replace("128", "64")) == [lane ^ 16 for lane in range(64)]
    fault(EXCHANGE.format("bar.warp.sync -1;"), "a race")


def test_what_another_warp_reads_is_not_overwritten() -> None:
    again = EXCHANGE.format("bar.sync 0;") + "{} st.shared.u32 [%r2], %r0;"
    out_of(again.format("bar.sync 0;"))
    fault(again.format(""), "a race: this overwrites what warp . read")
    fault(f"{MINE} st.shared.u32 [%r3], %r3;", "a race: this overwrites what warp . wrote")
    write = "st.shared.u32 [%r3], %r3;"
    later = f"setp.lt.u32 %p1, %r0, 32; @%p1 {write} {{}} @!%p1 {write}"
    fault(
        MINE + later.format(""), "a race: this overwrites what warp 0 wrote at byte 0 .* thread 32"
    )
    out_of(MINE + later.format("bar.sync 0;"))


def test_halves_of_a_word_are_different_places() -> None:
    body = (
        "mov.b32 %r3, pool; shr.u32 %r4, %r0, 5; shl.b32 %r4, %r4, 1; and.b32 %r5, %r0, 31;"
        "shl.b32 %r5, %r5, 2; add.s32 %r3, %r3, %r4; add.s32 %r3, %r3, %r5; cvt.u16.u32 %h1, %r0;"
    )
    out_of(body + "st.shared.b16 [%r3], %h1;")


def test_named_barriers_join_those_who_come_to_them() -> None:
    # Two pairs of warps, each with a barrier of its own.
    body = (
        f"{MINE} xor.b32 %r5, %r4, 128; add.s32 %r6, %r3, %r5; shr.u32 %r7, %r0, 6;"
        f"add.s32 %r7, %r7, 1; st.shared.u32 [%r2], %r0; bar.sync %r7, 64;"
        f"ld.shared.u32 %r1, [%r6]; {SAVE}"
    )
    assert out_of(body, threads=128) == [lane ^ 32 for lane in range(128)]
    # Between the pairs they order nothing.
    fault(body.replace("%r4, 128", "%r4, 256"), "a race", threads=128)


RING = """
mov.b32 %r3, pool; mov.b32 %r9, 0; and.b32 %r10, %r0, 31; shl.b32 %r11, %r10, 2;
add.s32 %r3, %r3, %r11; mov.b32 %r1, 0;
setp.lt.u32 %p1, %r0, 32;
@%p1 bra $PRODUCER;
$CONSUMER:
and.b32 %r12, %r9, 1; add.s32 %r13, %r12, 1; add.s32 %r14, %r12, 3;
mad.lo.s32 %r15, %r12, 128, %r3;
bar.sync %r13, 64;
ld.shared.u32 %r16, [%r15]; add.s32 %r1, %r1, %r16;
bar.arrive %r14, 64;
add.s32 %r9, %r9, 1; setp.lt.u32 %p2, %r9, 6; @%p2 bra $CONSUMER;
bra $END;
$PRODUCER:
and.b32 %r12, %r9, 1; add.s32 %r13, %r12, 1; add.s32 %r14, %r12, 3;
mad.lo.s32 %r15, %r12, 128, %r3;
setp.ge.u32 %p3, %r9, 2; @%p3 bar.sync %r14, 64;
mad.lo.s32 %r16, %r9, 1000, %r10;
st.shared.u32 [%r15], %r16;
bar.arrive %r13, 64;
add.s32 %r9, %r9, 1; setp.lt.u32 %p2, %r9, 6; @%p2 bra $PRODUCER;
$END:
"""


def test_a_ring_between_a_warp_that_fills_and_one_that_empties() -> None:
    expected = [0] * 32 + [15000 + 6 * lane for lane in range(32)]
    assert out_of(RING + SAVE) == expected
    # Nobody waits until a place is empty.
    fault(RING.replace("@%p3 bar.sync %r14, 64;", "").replace("bar.arrive %r14, 64;", ""), "a race")
    # Nobody waits until it is full.
    eager = RING.replace("bar.sync %r13, 64;", "").replace("bar.arrive %r13, 64;", "")
    fault(eager, "race|nothing was written")


def test_barriers_that_never_fill() -> None:
    some = "setp.lt.u32 %p1, %r0, 32; @%p1 bra $END; {} $END:\n"
    fault(
        some.format("bar.sync 3, 64;"), r"a deadlock: block 0, barrier 3: 32 of 64 .* warps \[1\]"
    )
    # Threads that have ended need not come where no number is given.
    out_of(some.format("bar.sync 3;"))
    both = "setp.lt.u32 %p1, %r0, 32; @%p1 bar.sync 1; @!%p1 bar.sync 2;"
    fault(both, r"barrier 1: 32 of 64 .* warps \[0\] .* barrier 2: 32 of 64 .* warps \[1\]")


def test_barriers_that_are_used_wrongly() -> None:
    fault("bar.sync 1, 32;", "64 threads arrive at barrier 1 for 32")
    fault("bar.sync 1, 40;", "barrier 1 for 40 threads")
    part = "setp.lt.u32 %p1, %r0, 40; @%p1 bra $END; bar.sync 0; $END:\n bar.sync 0;"
    fault(part, "not all threads of the warp are at this barrier")
    counts = "setp.lt.u32 %p1, %r0, 32; @%p1 bar.sync 1, 64; @!%p1 bar.sync 1, 96;"
    fault(counts, "barrier 1 is for 96 threads .* for 64")


def test_warps_that_are_not_whole() -> None:
    split = "setp.lt.u32 %p1, %r0, 8; @%p1 bra $END; {} $END:\n"
    fault(split.format("shfl.sync.bfly.b32 %r1, %r0, 1, 31, -1;"), "the mask 0xffffffff names")
    fault(split.format("bar.warp.sync -1;"), "the mask 0xffffffff names")
    out_of(split.format("bar.warp.sync 0xFFFFFF00;"), threads=32)
    matrix = "ldmatrix.sync.aligned.m8n8.x1.shared.b16 {%r1}, [%r2];"
    fault(MINE + split.format(matrix), "not all threads of the warp are here, .* thread 8$")


# Asynchronous copies

COPY = f"""
{MINE}
shl.b32 %r5, %r0, 4; mad.wide.u32 %rd1, %r0, 16, %x; mov.b32 %r6, pool; add.s32 %r6, %r6, %r5;
"""
X = np.arange(64 * 4, dtype=U32).reshape(64, 4) + 1
TAKE = "ld.shared.u32 %r1, [%r6+12];" + SAVE


def copied(body: str, **options: Any) -> list[int]:
    out = np.zeros(64, U32)
    given = {"x": options.pop("x", X)}
    return run(
        COPY + body, out=out, inputs=given, threads=64, shared_bytes=4096, **options
    ).tolist()


def copy_fault(body: str, problem: str, **options: Any) -> None:
    with pytest.raises(Fault, match=problem):
        copied(body, **options)


def test_copies_are_there_once_their_thread_has_waited() -> None:
    copy = "cp.async.cg.shared.global [%r6], [%rd1], 16;"
    for wait in ("cp.async.commit_group; cp.async.wait_group 0;", "cp.async.wait_all;"):
        assert copied(copy + wait + TAKE) == X[:, 3].tolist()
    for wait in ("", "cp.async.commit_group;", "cp.async.wait_group 0;", "bar.sync 0;"):
        copy_fault(copy + wait + TAKE, "a copy to it is still under way")
    copy_fault(copy + "cp.async.commit_group; cp.async.wait_group 1;" + TAKE, "under way")
    other = TAKE.replace("%r6", "%r7")
    neighbour = "xor.b32 %r7, %r6, 512; cp.async.commit_group; cp.async.wait_group 0; {}" + other
    turned = [int(X[i ^ 32, 3]) for i in range(64)]
    assert copied(copy + neighbour.format("bar.sync 0;")) == turned
    copy_fault(copy + neighbour.format(""), "a race: this reads what warp . wrote")
    early = (
        copy + "cp.async.commit_group; bar.sync 0; cp.async.wait_group 0; xor.b32 %r7, %r6, 512;"
    )
    copy_fault(early + other, "a race: this reads what warp . wrote")


def test_waiting_for_all_but_the_last_groups() -> None:
    body = (
        "cp.async.ca.shared.global [%r6], [%rd1], 16; cp.async.commit_group;"
        "cp.async.ca.shared.global [%r6+1024], [%rd1], 16; cp.async.commit_group;"
        "cp.async.wait_group 1;"
    )
    assert copied(body + TAKE) == X[:, 3].tolist()
    copy_fault(body + TAKE.replace("%r6+12", "%r6+1036"), "under way")


def test_copies_of_less_are_filled_with_zeros() -> None:
    sizes = "min.u32 %r7, %r0, 16; and.b32 %r7, %r7, 28; "
    wait = "cp.async.wait_all; ld.shared.u32 %r1, [%r6+4];" + SAVE
    found = copied(sizes + "cp.async.cg.shared.global [%r6], [%rd1], 16, %r7;" + wait)
    assert found == [int(X[i, 1]) if i >= 8 else 0 for i in range(64)]
    # Where nothing is copied the source may be anywhere.
    nowhere = "mov.b64 %rd1, 48; mov.b32 %r7, 0; cp.async.cg.shared.global [%r6], [%rd1], 16, %r7;"
    assert copied(nowhere + wait) == [0] * 64
    copy_fault(nowhere.replace("%r7, 0", "%r7, 4"), "outside")
    copy_fault(nowhere.replace("%r7, 0", "%r7, 20"), "from more")
    # And the rest of a row that ends may not be there.
    last = sizes + "cp.async.cg.shared.global [%r6], [%rd1], 16, %r7;"
    assert copied(last.replace("and.b32 %r7, %r7, 28", "min.u32 %r7, %r7, 8") + wait, x=X)
    copy_fault("cp.async.cg.shared.global [%r6], [%rd1+8], 16;", "8 of 16 bytes")


def test_copies_of_four_and_eight_bytes() -> None:
    body = (
        "cp.async.ca.shared.global [%r6], [%rd1], 4;"
        "cp.async.ca.shared.global [%r6+8], [%rd1+8], 8;"
        "cp.async.wait_all; ld.shared.u32 %r1, [%r6]; ld.shared.u32 %r7, [%r6+12];"
        "mad.lo.s32 %r1, %r7, 1000, %r1;" + SAVE
    )
    assert copied(body) == (X[:, 3] * 1000 + X[:, 0]).tolist()


def test_a_copy_does_not_overwrite_what_others_read() -> None:
    body = (
        "st.shared.v4.u32 [%r6], {%r0, %r0, %r0, %r0}; bar.sync 0; xor.b32 %r7, %r6, 512;"
        "ld.shared.u32 %r1, [%r7]; {} cp.async.cg.shared.global [%r6], [%rd1], 16;"
    )
    copied(body.replace("{}", "bar.sync 0;"))
    copy_fault(body.replace("{}", ""), "a race: this overwrites what warp . read")


def test_a_fault_names_the_block() -> None:
    body = "mov.u32 %r1, %ctaid.x; setp.eq.s32 %p1, %r1, 5; @%p1 st.global.u32 [%out+4], %r0;"
    with pytest.raises(Fault, match=re.escape("block (5, 0, 0), thread 0")):
        run(body, out=np.zeros(1, U32), blocks=9, lanes=64)
