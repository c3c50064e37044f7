"""Which binary of the GEMV runs and how, by the manifest's rules."""

from __future__ import annotations

import json
import textwrap

import pytest

from gemv_launches import Call, binary, expected, launches, rule

HOPPER = {"SONATA_TEST_CUDA_CC": "9.0"}
OPEN = """
k = loader.load(ARTIFACTS, devices=[0])
def operands(rows, n, k_size, dtype=torch.bfloat16):
    x = tensor(rows, k_size, dtype=dtype, address=1 << 40)
    return x, tensor(n, k_size, dtype=dtype, address=1 << 50)
def output(rows, n):
    return tensor(rows, n, address=1 << 36)
"""
OPERANDS = (1 << 40, 1 << 50, 0, 1 << 36)


def run(recorder, artifacts, script, arch="sm90"):
    env = {"SONATA_TEST_CUDA_CC": f"{arch[2]}.{arch[3]}"}
    return recorder.loader(artifacts, OPEN + textwrap.dedent(script), env=env)


def corners(manifest, arch):
    """N and K at every edge of every rule, and beside it."""
    sizes = {"n": {1, 5, 16, 264, 265}, "k": {8, 64, 2048}}
    for each in manifest["rules"]:
        if each["arch"] == arch:
            for name, edges in each["sizes"].items():
                sizes[name] |= {size for edge in edges for size in (edge, edge + 1)}
    n = sorted(size for size in sizes["n"] if size < 2**31)
    k = sorted({size // 8 * 8 for size in sizes["k"]} - {0, 2**31})
    return [(a, b) for a in n for b in k if a * b < 2**61]  # torch has no larger tensors


@pytest.mark.parametrize("arch", ["sm86", "sm90"])
def test_the_rules_decide_by_rows_and_sizes(recorder, artifacts, manifest, arch):
    wanted = [
        Call(rows, n, k, "bf16", arch, bound=bound, pointers=OPERANDS)
        for n, k in corners(manifest, arch)
        for rows in (1, 2, 4, 8)
        for bound in (False, True)
    ]
    sizes = [(each.rows, each.n, each.k, each.bound) for each in wanted]
    outcome = run(
        recorder,
        artifacts,
        f"for rows, n, size, bound in {sizes}:\n"
        "    x, weight = operands(rows, n, size)\n"
        "    call = lambda x, out: k.gemv(x, weight, out=out)\n"
        "    if bound: call = settled(k.gemv.bind(weight))\n"
        "    call(x, output(rows, n))\n"
        "say(0)",
        arch,
    )
    for launch, each in zip(launches(outcome), wanted, strict=True):
        assert launch == expected(manifest, each), each
    used = {(id(rule(manifest, each))) for each in wanted}
    assert len(used) == sum(each["arch"] == arch for each in manifest["rules"])


def test_what_the_shipped_rules_call_for(recorder, artifacts, manifest):
    """The rules for a bound weight on sm90 are of every kind, so the tests above see each."""
    wanted = [
        Call(rows, n, k, bound=True) for n, k in corners(manifest, "sm90") for rows in (1, 2, 4, 8)
    ]
    found = [expected(manifest, each) for each in wanted]
    kinds = {
        (
            binary(manifest, each)["variant"]["persistent"],
            launch["params"]["ahead_rows"] > 0,
            launch["programmatic"],
        )
        for each, launch in zip(wanted, found, strict=True)
    }
    assert {(0, True, True), (1, True, True), (1, False, True)} <= kinds


LAUNCHES = [
    {"blocks_per_sm": blocks, "ahead_kb": ahead, "skip_blocks_per_sm": skip}
    for blocks in (0, 1, 2, 3)
    for ahead in (0, 1, 64, 2**20)
    for skip in (0, 1, 5)
]


@pytest.mark.parametrize("persistent", [0, 1])
def test_launch_values(recorder, artifacts, manifest, persistent):
    """Those that no shipped rule has, too; without `persistent` a block has one tile."""
    variant = next(
        b["variant"]
        for b in manifest["binaries"]
        if (b["kernel"], b["arch"]) == ("gemv", "sm90")
        and b["variant"] == {**b["variant"], "persistent": persistent, "pdl": 1, "m": 2}
    )
    sizes = [(1, 512), (264, 2048), (265, 2048), (6000, 128), (100000, 64)]
    outcome = run(
        recorder,
        artifacts,
        f"for launch in {LAUNCHES}:\n"
        f"    for n, size in {sizes}:\n"
        "        for constant in (False, True):\n"
        f"            call = k.gemv.using({variant}, launch, constant=constant)\n"
        "            x, weight = operands(2, n, size)\n"
        "            call(x, weight, out=output(2, n))\n"
        "say(0)",
    )
    found = iter(launches(outcome))
    own = {name: value for name, value in variant.items() if name != "dtype"}
    seen_ahead, seen_rows = set(), set()
    for launch in LAUNCHES:
        for n, k in sizes:
            for constant in (0, 1):
                rules = [
                    {
                        "kernel": "gemv",
                        "arch": "sm90",
                        "variant": own,
                        "launch": launch,
                        "when": {"m": 2, "constant": constant},
                        "sizes": {"n": [1, 2**31 - 1], "k": [1, 2**31 - 1]},
                    }
                ]
                call = Call(2, n, k, bound=bool(constant), pointers=OPERANDS)
                wanted = expected({**manifest, "rules": rules}, call)
                assert next(found) == wanted, (launch, n, k, constant)
                words = wanted["params"]
                seen_ahead.add((words["ahead_skip"] > 0, words["ahead_rows"] > 0))
                seen_rows.add(words["block_rows"] == variant["rows"])
    assert next(found, None) is None
    assert seen_ahead == {(False, False), (False, True), (True, True)}
    assert seen_rows == ({True, False} if persistent else {True})


def test_batch_invariance_takes_the_binary_for_8_rows(recorder, artifacts, manifest):
    outcome = run(
        recorder,
        artifacts,
        "for rows in range(1, 9):\n"
        "    for n, size in ((512, 2048), (6000, 4096)):\n"
        "        x, weight = operands(rows, n, size)\n"
        "        k.gemv(x, weight, out=output(rows, n), batch_invariant=True)\n"
        "        settled(k.gemv.bind(weight, batch_invariant=True))(x, output(rows, n))\n"
        "k.gemv(tensor(1, 63), tensor(4, 63, address=0x4000), batch_invariant=True)\n"
        "say(0)",
    )
    *aligned, general = launches(outcome)
    assert aligned == [
        expected(manifest, Call(rows, n, k, bound=bound, invariant=True, pointers=OPERANDS))
        for rows in range(1, 9)
        for n, k in ((512, 2048), (6000, 4096))
        for bound in (False, True)
    ]
    assert len({(launch["entry"], *launch["grid"]) for launch in aligned[::4]}) == 1
    assert general["entry"].startswith("gemv_any_dtype_bf16_m_8_")


def test_binary_names_what_a_call_runs(recorder, artifacts):
    outcome = run(
        recorder,
        artifacts,
        """
        for dtype in (torch.bfloat16, torch.float16):
            for rows in (1, 3, 8):
                for n, size in ((16, 64), (1408, 8192), (6000, 4096), (7, 63)):
                    for invariant in (False, True):
                        x, weight = operands(rows, n, size, dtype)
                        options = {"batch_invariant": invariant}
                        say(k.gemv.binary(x, weight, **options).entry)
                        k.gemv(x, weight, **options)
                        say(k.gemv.binary(x, weight, constant=True, **options).entry)
                        settled(k.gemv.bind(weight, **options))(x)
        say([
            failure(lambda: k.gemv.binary(tensor(9, 64), tensor(16, 64))),
            failure(lambda: k.gemv.binary(tensor(1, 64), tensor(16, 64), tensor(17))),
        ])
        """,
    )
    *named, refused = outcome.stdout.splitlines()
    assert [f'"{launch["entry"]}"' for launch in launches(outcome)] == named
    assert len(set(named)) > 8
    assert "9 rows" in refused
    assert "17 elements" in refused


def test_a_set_without_a_binary_for_a_call_says_so(recorder, make_set, gemv):
    """This one has no rules, and no kernel for rows that are not aligned."""
    cases = {
        "k.gemv(tensor(1, 64), tensor(16, 64))": ("bf16", "aligned"),
        "k.gemv(tensor(1, 63), tensor(16, 63))": ("bf16", "any"),
        "k.gemv(tensor(2, 64, address=0x1002), tensor(16, 64))": ("bf16", "2 rows", "wide"),
        "k.gemv.bind(tensor(16, 64))(tensor(1, 64))": ("bf16", "aligned"),
        "k.gemv.binary(tensor(1, 64), tensor(16, 64))": ("bf16", "aligned"),
    }
    recorder.refused(
        make_set(gemv),
        {
            call: ("VariantMissing", "gemv_any", "torch.nn.functional.linear", *words)
            for call, words in cases.items()
        },
        OPEN,
        env=HOPPER,
    )


def test_the_table_of_a_kernel(recorder, artifacts, manifest):
    outcome = run(
        recorder,
        artifacts,
        """
        say({name: [b.binary.entry for b in k.table(name).all().values()]
             for name in ("gemv", "gemv_any")})
        say(failure(lambda: k.table("read")))
        """,
    )
    tables, missing = map(json.loads, outcome.stdout.splitlines())
    for name, entries in tables.items():
        assert sorted(entries) == sorted(
            b["entry"] for b in manifest["binaries"] if (b["kernel"], b["arch"]) == (name, "sm90")
        )
    assert missing["type"] == "VariantMissing"
    assert "--kernel read" in missing["message"]
