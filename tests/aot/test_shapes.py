"""`sonata-aot shapes` and `build --select`: a model's shapes, and a build of what they need."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from sonata_aot.aot.needed import needed
from sonata_aot.aot.shapes import GemvShape, ScanShape, Shapes, read_config
from sonata_aot.artifacts import Arch, open_artifacts
from sonata_aot.artifacts.rules import first_match
from sonata_aot.artifacts.verify import Passed, verify
from sonata_aot.kernels import builtin
from sonata_aot.kernels.tables import rules

if TYPE_CHECKING:
    from tests.aot.conftest import Invoke

# By model: its configuration, (headdim, dstate, heads, groups) and some layers' (n, k).
CONFIGS: dict[str, tuple[dict[str, Any], tuple[int, ...], dict[str, tuple[int, int]]]] = {
    "mamba2": (
        {
            "model_type": "mamba2",
            "hidden_size": 2560,
            "expand": 2,
            "head_dim": 64,
            "num_heads": 80,
            "state_size": 128,
            "n_groups": 1,
            "vocab_size": 50288,
            "time_step_limit": [0.0, float("inf")],
            "layer_norm_epsilon": 1e-5,
        },
        (64, 128, 80, 1),
        {"in_proj": (10576, 2560), "out_proj": (2560, 5120), "lm_head": (50288, 2560)},
    ),
    "bamba": (
        {
            "model_type": "bamba",
            "hidden_size": 4096,
            "mamba_expand": 2,
            "mamba_n_heads": 128,
            "mamba_d_head": "auto",
            "mamba_d_state": 128,
            "mamba_n_groups": 1,
            "intermediate_size": 14336,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "vocab_size": 128256,
        },
        (64, 128, 128, 1),
        {
            "in_proj": (16768, 4096),
            "out_proj": (4096, 8192),
            "k_proj": (1024, 4096),
            "gate_proj": (14336, 4096),
            "down_proj": (4096, 14336),
        },
    ),
    "zamba2": (
        {
            "model_type": "zamba2",
            "hidden_size": 2560,
            "mamba_expand": 2,
            "n_mamba_heads": 80,
            "mamba_d_state": 64,
            "mamba_ngroups": 1,
            "num_attention_heads": 32,
            "intermediate_size": 10240,
            "vocab_size": 32000,
        },
        (64, 64, 80, 1),
        {
            "in_proj": (10448, 2560),
            "q_proj": (5120, 5120),
            "out_proj": (2560, 5120),
            "gate_up_proj": (20480, 2560),
            "linear": (2560, 2560),
        },
    ),
    "nemotron_h": (
        {
            "model_type": "nemotron_h",
            "hidden_size": 4480,
            "mamba_num_heads": 128,
            "mamba_head_dim": 80,
            "ssm_state_size": 128,
            "n_groups": 8,
            "num_attention_heads": 40,
            "head_dim": 128,
            "num_key_value_heads": 8,
            "intermediate_size": 15680,
            "vocab_size": 131072,
        },
        (80, 128, 128, 8),
        {
            "in_proj": (22656, 4480),
            "out_proj": (4480, 10240),
            "q_proj": (5120, 4480),
            "k_proj": (1024, 4480),
            "up_proj": (15680, 4480),
        },
    ),
    "falcon_h1": (
        {
            "model_type": "falcon_h1",
            "hidden_size": 5120,
            "mamba_d_ssm": 4096,
            "mamba_n_heads": 32,
            "mamba_d_head": 128,
            "mamba_d_state": 256,
            "mamba_n_groups": 2,
            "intermediate_size": 21504,
            "num_attention_heads": 20,
            "num_key_value_heads": 4,
            "head_dim": 128,
            "vocab_size": 261120,
        },
        (128, 256, 32, 2),
        {"in_proj": (9248, 5120), "out_proj": (5120, 4096), "q_proj": (2560, 5120)},
    ),
    "mamba_ssm": (
        {"d_model": 2560, "n_layer": 64, "ssm_cfg": {"layer": "Mamba2"}, "vocab_size": 50277}
        | {"pad_vocab_size_multiple": 16, "attn_layer_idx": [], "attn_cfg": {}},
        (64, 128, 80, 1),
        {"in_proj": (10576, 2560), "lm_head": (50288, 2560)},
    ),
    "zonos": (
        {
            "backbone": {
                "d_model": 2048,
                "d_intermediate": 0,
                "n_layer": 46,
                "attn_layer_idx": [6, 12],
                "ssm_cfg": {"layer": "Mamba2"},
                "attn_cfg": {"num_heads": 16, "num_heads_kv": 4, "rotary_emb_dim": 128},
                "norm_epsilon": 1e-5,
                "attn_mlp_d_intermediate": 8192,
            },
            "prefix_conditioner": {},
        },
        (64, 128, 64, 1),
        {
            "in_proj": (8512, 2048),
            "out_proj": (2048, 4096),
            "attn.in_proj": (3072, 2048),
            "mlp.fc1": (16384, 2048),
            "mlp.fc2": (2048, 8192),
            "head": (1032, 2048),
        },
    ),
}


def write(folder: Path, config: Any) -> Path:
    path = folder / "config.json"
    path.write_text(json.dumps(config))
    return path


@pytest.mark.parametrize("model", CONFIGS)
def test_the_shapes_of_a_model(tmp_path: Path, model: str) -> None:
    config, scan, layers = CONFIGS[model]
    shapes = read_config(write(tmp_path, config), dtype=None, rows=(1, 2))
    assert (shapes.model, shapes.dtype, shapes.rows) == (model, "bf16", (1, 2))
    assert shapes.scans == (ScanShape(*scan),)
    found = {shape.name: (shape.n, shape.k) for shape in shapes.gemv}
    assert found.items() >= layers.items()
    # Those of equal shape stand once.
    assert len(set(found.values())) == len(shapes.gemv)


@pytest.mark.parametrize(
    ("stated", "asked", "dtype"),
    [
        ({"torch_dtype": "float16"}, None, "f16"),
        ({"dtype": "float16", "torch_dtype": "bfloat16"}, None, "f16"),
        ({"torch_dtype": "float32"}, None, "bf16"),
        ({"torch_dtype": "float16"}, "bf16", "bf16"),
        ({}, "f16", "f16"),
    ],
)
def test_the_dtype(tmp_path: Path, stated: dict[str, str], asked: str | None, dtype: str) -> None:
    config = write(tmp_path, {**CONFIGS["mamba2"][0], **stated})
    assert read_config(config, dtype=asked, rows=(1,)).dtype == dtype


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"model_type": "llama"}, ["'llama'", "bamba", "mamba_ssm"]),
        ({"model_type": None}, ["None"]),
        ({"hidden_size": None}, ["no hidden_size"]),
        ({"hidden_size": "4096"}, ["hidden_size is '4096'"]),
        ({"state_size": 0}, ["state_size is 0"]),
        ({"vocab_size": True}, ["vocab_size is True"]),
        ({"expand": 1 << 31}, ["expand is"]),
        ({"hidden_size": [1] * 9999}, ["hidden_size is [1, 1,", " 1,..."]),
        ({"hidden_size": 10**4000}, ["hidden_size is 1000", "0..."]),
        ({"head_dim": 1 << 20, "num_heads": None}, ["make heads of scan 0"]),
        ({"hidden_size": 1 << 30, "expand": 4}, ["make n of in_proj"]),
    ],
)
def test_a_configuration_that_cannot_be_used(
    invoke: Invoke, tmp_path: Path, change: dict[str, Any], words: list[str]
) -> None:
    path = write(tmp_path, {**CONFIGS["mamba2"][0], **change})
    result = invoke("shapes", path, "--arch=sm86")
    assert (result.exit_code, result.stdout) == (1, "")
    for word in (str(path), *words):
        assert word in result.stderr
    assert len(result.stderr) < 300 + len(str(path))


def test_a_configuration_that_is_a_link(invoke: Invoke, tmp_path: Path) -> None:
    """As all files are in the cache of Hugging Face."""
    path = write(tmp_path, CONFIGS["mamba2"][0])
    link = tmp_path / "snapshot.json"
    link.symlink_to(path.name)
    result = invoke("shapes", link, "--arch=sm86", "--json")
    assert result.exit_code == 0, result.stderr
    assert result.stdout == invoke("shapes", path, "--arch=sm86", "--json").stdout
    path.unlink()
    assert f"{link}: No such file" in invoke("shapes", link, "--arch=sm86").stderr


TWICE = '{"model_type": "mamba2", "model_type": "bamba"}'


@pytest.mark.parametrize("text", ["", "[1]", "{", TWICE, "\xff", "[" * 100_000])
def test_a_file_that_is_no_configuration(invoke: Invoke, tmp_path: Path, text: str) -> None:
    path = tmp_path / "config.json"
    path.write_bytes(text.encode("latin-1"))
    for command in (("shapes", path), ("build", "--select", path)):
        result = invoke(*command, "--arch=sm86")
        assert (result.exit_code, result.stdout) == (1, "")
        assert str(path) in result.stderr
        assert ("'model_type' stands twice" in result.stderr) is (text is TWICE)
    path.unlink()
    assert "No such file" in invoke("shapes", path, "--arch=sm86").stderr


class TestWhatEachGets:
    shapes = Shapes(
        "mine", "f16", (1, 3), (GemvShape("a", 2048, 4096), GemvShape("b", 100, 61)), ()
    )

    def test_by_the_rules(self) -> None:
        arch = Arch.parse("sm90")
        uses = needed(self.shapes, [arch]).uses
        for use in uses:
            assert use.variant in builtin()[use.kernel].variants
            assert (use.variant or {})["dtype"] == "f16"
        called = {use.call: use for use in uses}
        for rows, m in ((1, 1), (3, 4)):
            for constant, how in ((0, ""), (1, " bound")):
                when, sizes = {"m": m, "constant": constant}, {"n": 2048, "k": 4096}
                rule = first_match(rules(builtin()["gemv"], arch), when, sizes)
                assert rule is not None
                assert called[f"a m={rows}{how}"].rule == rule
            assert called[f"b m={rows}"].kernel == "gemv_any"

    def test_scans(self) -> None:
        def found(headdim: int, dstate: int) -> set[tuple[str, bool, bool]]:
            shapes = Shapes("mine", "bf16", (1,), (), (ScanShape(headdim, dstate, 8, 1),))
            uses = needed(shapes, [Arch.parse("sm86")]).uses
            return {(use.kernel, use.variant is None, use.default) for use in uses}

        every = {"ssd_scan", "ssd_prepare", "ssd_pass", "ssd_copy"}
        assert found(64, 128) == {(name, False, True) for name in every}
        # Declared, and built on request alone.
        assert ("ssd_scan", False, False) in found(96, 128)
        assert found(48, 128) == {("ssd_scan", True, False)}


def test_one_that_has_none(invoke: Invoke, tmp_path: Path) -> None:
    config = {**CONFIGS["nemotron_h"][0], "mamba_head_dim": 48}
    path = write(tmp_path, config)
    result = invoke("shapes", path, "--arch=sm86")
    assert result.exit_code == 1
    assert "no variant is declared for scan 48x128 on sm86" in result.stdout
    listed = tmp_path / "list.json"
    listed.write_text(invoke("shapes", path, "--arch=sm86", "--json").stdout)
    result = invoke("build", "--arch=sm86", "--select", listed, "--out", tmp_path / "out")
    assert result.exit_code == 1
    assert "scan 48x128 (sm86)" in result.stderr
    assert not (tmp_path / "out").exists()


def test_what_is_printed(invoke: Invoke, tmp_path: Path) -> None:
    path = write(tmp_path, CONFIGS["zonos"][0])
    result = invoke("shapes", path, "--arch=sm86", "--arch=sm90", "--m=2")
    assert result.exit_code == 0, result.stderr
    lines = [line.split() for line in result.stdout.splitlines()]
    assert lines[0] == ["zonos,", "bf16"]
    assert ["in_proj", "8512", "2048"] in lines
    assert ["64", "128", "64", "1"] in lines
    assert ["in_proj", "m=2", "sm86", "gemv"] in [line[:4] for line in lines]
    assert ["in_proj", "m=2", "bound", "sm90", "gemv"] in [line[:5] for line in lines]


def test_a_build_of_these_alone(
    invoke: Invoke, tmp_path: Path, warm_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SONATA_AOT_CACHE_DIR", str(warm_cache))
    path = write(tmp_path, CONFIGS["zonos"][0])
    listed, out = tmp_path / "list.json", tmp_path / "out"
    listed.write_text(invoke("shapes", path, "--arch=sm90", "--m=2", "--json").stdout)
    archs = ("--arch=sm86", "--arch=sm90")
    result = invoke("build", *archs, "--select", listed, "--out", out)
    assert result.exit_code == 0, result.stderr
    assert "everything was cached" in result.stdout
    assert all(isinstance(outcome, Passed) for outcome in verify(out))
    manifest = open_artifacts(out).manifest
    kernels = ("gemv", "ssd_copy", "ssd_pass", "ssd_prepare", "ssd_scan")
    assert manifest.selection.kernels == kernels
    assert {b.variant.get("dtype", "bf16") for b in manifest.binaries} == {"bf16"}
    assert {b.variant["m"] for b in manifest.binaries if b.kernel == "gemv"} == {2}
    scans = [b.variant for b in manifest.binaries if b.kernel == "ssd_scan"]
    assert {(v["headdim"], v["dstate"]) for v in scans} == {(64, 128)}
    assert len(scans) == 8
    # Calls of the model get what they get from the default set; those of other sizes something.
    gemv = builtin()["gemv"]
    for arch in ("sm86", "sm90"):
        whole, part = rules(gemv, Arch.parse(arch)), manifest.rules_for("gemv", arch)
        for shape in read_config(path, dtype=None, rows=(2,)).gemv:
            for constant in (0, 1):
                when, sizes = {"m": 2, "constant": constant}, {"n": shape.n, "k": shape.k}
                assert first_match(part, when, sizes) == first_match(whole, when, sizes)
        assert first_match(part, {"m": 2, "constant": 0}, {"n": 7, "k": 8}) is not None
        assert first_match(part, {"m": 1, "constant": 0}, {"n": 7, "k": 8}) is None
    for other in ("--all", "--kernel=gemv", "--from=sonata_aot.kernels"):
        assert invoke("build", *archs, "--select", listed, other).exit_code == 2
    planned = json.loads(invoke("plan", *archs, "--select", listed, "--json").stdout)
    assert len(planned["binaries"]) == len(manifest.binaries)


def test_a_list_that_was_edited(invoke: Invoke, tmp_path: Path) -> None:
    path = write(tmp_path, CONFIGS["zonos"][0])
    good = json.loads(invoke("shapes", path, "--arch=sm90", "--m=2", "--json").stdout)
    listed = tmp_path / "list.json"
    for change in ({"rows": [9]}, {"dtype": "f64"}, {"gemv": [{"name": "a", "n": 0, "k": 8}]}, {}):
        shapes = {**good["shapes"], **change} if change else None
        listed.write_text(json.dumps({**good, "shapes": shapes}))
        result = invoke("build", "--arch=sm86", "--select", listed)
        assert (result.exit_code, result.stdout) == (1, "")
        assert f"{listed}: shapes" in result.stderr
        assert "sonata-aot shapes" in result.stderr
