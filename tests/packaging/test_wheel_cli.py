"""The commands' options; what they do is tested beside this."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from click.testing import CliRunner

from sonata_aot.aot import wheel
from sonata_aot.aot.cli import main


def invoke(*arguments: str | Path) -> tuple[int, str]:
    result = CliRunner().invoke(main, [str(argument) for argument in arguments])
    return result.exit_code, result.output


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--name=x"], "--name and --version need --only-artifacts"),
        (["--version=1"], "--name and --version need --only-artifacts"),
        (["--only-artifacts", "--base=x"], "--only-artifacts has no launcher"),
        (["--only-artifacts", "--no-isolation"], "--only-artifacts has no launcher"),
        (["--only-artifacts", "--platform=x"], "--only-artifacts has no launcher"),
    ],
)
def test_options_that_exclude_each_other(options: list[str], says: str) -> None:
    code, output = invoke("wheel", "--arch=sm86", *options)
    assert (code, says in output) == (2, True), output


def test_errors_of_making_are_one_message(tmp_path: Path) -> None:
    base = tmp_path / "sonata_aot-1-cp312-abi3-linux_x86_64.whl"
    code, output = invoke("wheel", "--arch=sm86", "--base", base, "--out", tmp_path / "out")
    assert code == 1
    assert output.startswith(f"sonata-aot: {base} is no wheel: ")


def test_a_place_that_cannot_be_written_is_found_before_the_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def build(*arguments: object, **options: object) -> None:
        raise AssertionError("compiled for nothing")

    monkeypatch.setattr(wheel, "build", build)
    monkeypatch.setattr(wheel, "find_base", build)
    (tmp_path / "file").write_text("")
    for place in (tmp_path / "file", tmp_path / "file" / "below", Path("/proc/sonata-aot")):
        code, output = invoke("wheel", "--arch=sm86", "--out", place)
        assert (code, output.count("\n")) == (1, 1), output
        assert output.startswith("sonata-aot: cannot write into ")
        assert str(place.parent) in output


def test_verify_needs_both_of_a_signatures_options(built: Path) -> None:
    for option in ("--signature", "--allowed-signers"):
        code, output = invoke("verify", built, option, "file")
        assert (code, "need each other" in output) == (2, True)


def test_verify_checks_a_signature(built: Path, tmp_path: Path) -> None:
    key, signature, allowed = tmp_path / "key", tmp_path / "signature", tmp_path / "allowed"
    command = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", "", "-f", str(key)]
    subprocess.run(command, check=True)
    sign = ["ssh-keygen", "-q", "-Y", "sign", "-n", "sonata-aot", "-f", str(key)]
    with open(built / "manifest.json", "rb") as manifest:
        done = subprocess.run(sign, stdin=manifest, capture_output=True, check=True)
    signature.write_bytes(done.stdout)
    allowed.write_text(f"me@example.com {key.with_suffix('.pub').read_text()}")
    options = ("--signature", signature, "--allowed-signers", allowed)
    code, output = invoke("verify", built, *options)
    assert (code, "ok    signature by me@example.com\n" in output) == (0, True)
    allowed.write_text(f'me@example.com namespaces="file" {key.with_suffix(".pub").read_text()}')
    code, output = invoke("verify", built, *options)
    assert (code, "FAIL  signature: " in output) == (1, True)
