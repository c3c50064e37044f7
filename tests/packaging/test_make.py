"""Making wheels of a few real binaries: layouts, names, signatures, what is verified."""

from __future__ import annotations

import dataclasses
import json
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from sonata_aot.aot import wheel as module
from sonata_aot.aot.build import build
from sonata_aot.aot.plan import Selection
from sonata_aot.aot.sbom import artifacts_sbom
from sonata_aot.aot.wheel import DataWheel, Written, make, verify_wheel
from sonata_aot.aot.wheel_base import BUNDLED
from sonata_aot.aot.wheel_file import Wheel, read_wheel
from sonata_aot.artifacts import Arch, __version__, open_artifacts
from sonata_aot.artifacts.errors import BuildError, IntegrityError, SonataError, UsageError
from sonata_aot.artifacts.pack import PACK
from sonata_aot.artifacts.signature import check_signature
from sonata_aot.artifacts.verify import Failed, Passed, verify
from sonata_aot.kernels import KernelSpec, builtin

Make = Callable[..., Written]


@pytest.fixture
def base(tmp_path: Path) -> Path:
    """A wheel of the tool with next to nothing in it."""
    info = f"sonata_aot-{__version__}.dist-info"
    files = {
        "sonata_aot/loader/__init__.py": b"",
        f"{BUNDLED}/manifest.json": b"old",
        f"{info}/METADATA": f"Name: sonata-aot\nVersion: {__version__}\n\nText.\n".encode(),
        f"{info}/WHEEL": b"Tag: cp312-abi3-linux_x86_64\n",
    }
    wheel = Wheel("sonata-aot", __version__, ("cp312-abi3-linux_x86_64",), files)
    (tmp_path / wheel.file_name).write_bytes(wheel.to_bytes())
    return tmp_path / wheel.file_name


@pytest.fixture
def selection() -> Selection:
    return Selection((builtin()["ssd_state_passing"],), (Arch.parse("sm86"),), False, None)


@pytest.fixture
def make_one(
    compile_cache: Path,
    base: Path,
    selection: Selection,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> Make:
    monkeypatch.setenv("SONATA_AOT_CACHE_DIR", str(compile_cache))

    def run(**options: object) -> Written:
        options = {"base": base, "out": tmp_path / "out", **options}
        return make(selection, **options)  # pyright: ignore[reportArgumentType]

    return run


def extract(path: Path, where: str, target: Path) -> Path:
    for name, data in read_wheel(path).files.items():
        if name.startswith(f"{where}/"):
            file = target / name.removeprefix(f"{where}/")
            file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            file.write_bytes(data)
    return target


def test_artifacts_are_put_into_the_tools_wheel(make_one: Make, tmp_path: Path) -> None:
    written = make_one()
    wheel = read_wheel(written.path)
    assert written.origin is not None
    assert (
        written.path == tmp_path / "out" / f"sonata_aot-{__version__}-cp312-abi3-linux_x86_64.whl"
    )
    assert written.size == written.path.stat().st_size
    directory = extract(written.path, BUNDLED, tmp_path / "set")
    assert {type(outcome) for outcome in verify(directory)} == {Passed}
    assert open_artifacts(directory).manifest == written.manifest  # and what was there is gone
    metadata = wheel.files[f"{wheel.dist_info}/METADATA"].decode()
    assert metadata.endswith("\nLicense-File: NOTICE.artifacts\n\nText.\n")
    names = sorted(path.name for path in (tmp_path / "out").iterdir())
    assert names == ["SHA256SUMS", written.path.name]
    assert (tmp_path / "out/SHA256SUMS").read_text() == f"{written.sha256}  {written.path.name}\n"


def test_a_wheel_of_artifacts_alone(make_one: Make, tmp_path: Path) -> None:
    written = make_one(data=DataWheel())
    assert written.path.name == f"sonata_aot_kernels_sm86-{__version__}-py3-none-any.whl"
    wheel = read_wheel(written.path)
    entry = wheel.files[f"{wheel.dist_info}/entry_points.txt"].decode()
    assert entry == "[sonata_aot.artifacts]\nsonata-aot-kernels-sm86 = sonata_aot_kernels_sm86\n"
    where = "sonata_aot_kernels_sm86/artifacts"
    assert {type(x) for x in verify(extract(written.path, where, tmp_path / "set"))} == {Passed}
    assert b"License-Expression: Apache-2.0\n" in wheel.files[f"{wheel.dist_info}/METADATA"]


def test_kernels_of_ones_own_are_nobodys_default(
    make_one: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_own", lambda specs: [])
    with pytest.raises(UsageError, match="name the wheel with --name"):
        make_one(data=DataWheel())
    written = make_one(data=DataWheel("Mine.Kernels", "2.1rc1"))
    assert written.path.name == "mine_kernels-2.1rc1-py3-none-any.whl"
    wheel = read_wheel(written.path)
    assert not any("entry_points" in name for name in wheel.files)
    assert b"License-Expression" not in wheel.files[f"{wheel.dist_info}/METADATA"]
    assert f"{wheel.dist_info}/licenses/NOTICE.artifacts" in wheel.files
    assert f"{wheel.dist_info}/licenses/LICENSE" not in wheel.files


def test_whose_kernels_are_the_products(selection: Selection) -> None:
    (spec,) = selection.specs
    changed = dataclasses.replace(spec, device="mine.device:kernel")
    own: Callable[[tuple[KernelSpec, ...]], list[KernelSpec]] = module._own
    assert own((spec, changed)) == [spec]
    assert own((changed,)) == []


def test_of_kernels_of_others_among_ours_no_licence_is_claimed(
    make_one: Make, selection: Selection, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (spec,) = selection.specs
    other = dataclasses.replace(spec, device="mine.device:kernel")
    path = make_one(data=DataWheel()).path
    ours = read_wheel(path)
    monkeypatch.setattr(module, "_own", lambda specs: [spec] if other in specs else [])
    mixed = dataclasses.replace(selection, specs=(spec, other))
    # What is built is the same: only whose kernels they are counts here.
    monkeypatch.setattr(module, "build", lambda specs, *rest, **more: build((spec,), *rest, **more))
    wheel = read_wheel(make(mixed, out=tmp_path / "mixed", data=DataWheel()).path)
    names = [f"{wheel.dist_info}/{name}" for name in ("entry_points.txt", "licenses/LICENSE")]
    assert set(names) <= set(wheel.files)
    metadata = f"{wheel.dist_info}/METADATA"
    assert b"License-Expression" not in wheel.files[metadata]
    assert ours.files[metadata] == wheel.files[metadata].replace(
        b"License-File: LICENSE\n", b"License-Expression: Apache-2.0\nLicense-File: LICENSE\n"
    )


@pytest.mark.parametrize(
    ("name", "version", "says"),
    [
        ("a b", "1", "is no name"),
        ("-a", "1", "is no name"),
        ("a/../b", "1", "is no name"),
        ("a", "one", "is no name"),
        ("a", "1\nx", "is no name"),
        ("a", "1+.", "is no name"),
        ("a", "1.0+a..b", "is no name"),
        ("a", "1.01", "is no name"),
        ("a", "١", "is no name"),
        ("sonata.aot", "1", "import package sonata_aot is that of"),
        ("Torch", "1", "import package torch is that of"),
        ("json", "1", "import package json is that of"),
        ("class", "1", "import package class is a word of Python's"),
    ],
)
def test_names_that_will_not_do(selection: Selection, name: str, version: str, says: str) -> None:
    with pytest.raises(UsageError, match=says):
        DataWheel(name, version).named(selection)


@pytest.mark.parametrize(
    "version", ["0", "1.2", "1.0rc1", "2.0.post1.dev3", "1.10+cu12.g0abc1d2.7", "2026.12.1"]
)
def test_versions_that_will_do(selection: Selection, version: str) -> None:
    assert DataWheel("a", version).named(selection) == ("a", version)


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ("out", "cannot write into .*SHA256SUMS"),
        ("key", "cannot sign with it: there is no such file"),
        ("time", "SOURCE_DATE_EPOCH='soon'"),
    ],
)
def test_what_is_wrong_is_told_before_anything_is_built(
    make_one: Make, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, wrong: str, says: str
) -> None:
    def never(*arguments: object, **options: object) -> None:
        raise AssertionError("built")

    monkeypatch.setattr(module, "find_base", never)
    monkeypatch.setattr(module, "build", never)
    options: dict[str, object] = {}
    if wrong == "out":
        options["out"] = tmp_path / "SHA256SUMS"
        (tmp_path / "SHA256SUMS").touch()
    elif wrong == "key":
        options["signing_key"] = tmp_path / "missing"
    else:
        monkeypatch.setenv("SOURCE_DATE_EPOCH", "soon")
    with pytest.raises(SonataError, match=says):
        make_one(**options)


def test_a_damaged_artifact_is_never_shipped(
    make_one: Make, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    packed = module._packed

    def damaged(directory: Path) -> dict[str, bytes]:
        files = packed(directory)
        cubin = next(name for name in files if name.endswith(".cubin"))
        return {**files, cubin: files[cubin][:-1] + b"x"}

    monkeypatch.setattr(module, "_packed", damaged)
    with pytest.raises(BuildError, match="SHA-256"):
        make_one()
    assert list((tmp_path / "out").iterdir()) == []


def test_a_wheel_with_a_file_too_many(make_one: Make) -> None:
    path = make_one().path
    wheel = read_wheel(path)
    wheel.files[f"{BUNDLED}/more"] = b""
    path.write_bytes(wheel.to_bytes())
    with pytest.raises(BuildError, match="more is not named by the manifest"):
        verify_wheel(path, BUNDLED)
    path.write_bytes(path.read_bytes()[:-5000])
    with pytest.raises(IntegrityError):
        verify_wheel(path, BUNDLED)


def test_a_base_of_another_version_is_refused(
    make_one: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "__version__", "9.9")
    with pytest.raises(BuildError, match=f"is version {__version__}, and this tool 9.9"):
        make_one()


@pytest.mark.parametrize("problem", ["damaged", "cut short", "longer", "another's"])
def test_packed_ptx_that_is_wrong(make_one: Make, tmp_path: Path, problem: str) -> None:
    import lzma

    directory = extract(make_one().path, BUNDLED, tmp_path / "set")
    data = (directory / PACK).read_bytes()
    content = lzma.decompress(data)
    wrong = {
        "damaged": data[:100] + bytes([data[100] ^ 1]) + data[101:],
        "cut short": data[:-20],
        "longer": lzma.compress(content + b" "),
        "another's": lzma.compress(content.replace(b"sm_86", b"sm_90")),
    }
    (directory / PACK).write_bytes(wrong[problem])
    (failed,) = (outcome for outcome in verify(directory) if not isinstance(outcome, Passed))
    assert isinstance(failed, Failed)
    assert PACK in failed.problem or "SHA-256" in failed.problem
    (directory / PACK).unlink()
    assert "missing" in str(next(x for x in verify(directory) if isinstance(x, Failed)))


def test_an_sbom_is_the_same_for_the_same_artifacts(make_one: Make) -> None:
    manifest = make_one().manifest
    first = artifacts_sbom(manifest, "a", "1")
    assert artifacts_sbom(manifest, "a", "1") == first
    content = json.loads(first)
    assert (content["bomFormat"], content["specVersion"]) == ("CycloneDX", "1.6")
    names = {item["name"] for item in content["components"]}
    assert names == {*manifest.compiler, "sonata-aot", "kernel sources"}


def test_an_sbom_names_the_commit_where_one_is_known(built: Path) -> None:
    manifest = open_artifacts(built).manifest
    for commit, dirty, expected in (("a" * 40, True, ["a" * 40, "true"]), (None, None, [])):
        source = dataclasses.replace(manifest.source, commit=commit, dirty=dirty)
        content = artifacts_sbom(dataclasses.replace(manifest, source=source), "a", "1")
        (kernels,) = (x for x in json.loads(content)["components"] if x["name"] == "kernel sources")
        found = {x["name"]: x["value"] for x in kernels["properties"]}
        assert found.pop("sonata-aot:archs") == "sm86 sm90"
        assert list(found.values()) == expected
        assert set(found) <= {"sonata-aot:commit", "sonata-aot:dirty"}
        assert kernels["hashes"] == [{"alg": "SHA-256", "content": manifest.source.digest}]


def test_an_sboms_urls_are_of_packages(make_one: Make) -> None:
    content = json.loads(artifacts_sbom(make_one().manifest, "My.Kernels_x", "1.0+cu12"))
    component = content["metadata"]["component"]
    assert (component["name"], component["version"]) == ("My.Kernels_x", "1.0+cu12")
    assert component["purl"] == "pkg:pypi/my-kernels-x@1.0%2Bcu12"


class TestSignature:
    """A manifest that somebody signed."""

    @pytest.fixture
    def key(self, tmp_path: Path) -> Path:
        key = tmp_path / "key"
        command = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", "", "-f", str(key)]
        subprocess.run(command, check=True)
        return key

    @pytest.fixture
    def allowed(self, key: Path, tmp_path: Path) -> Path:
        allowed = tmp_path / "allowed"
        allowed.write_text(f"release@example.com {key.with_suffix('.pub').read_text()}")
        return allowed

    @pytest.fixture
    def directory(self, make_one: Make, key: Path, tmp_path: Path) -> Path:
        written = make_one(signing_key=key)
        return extract(written.path, BUNDLED, tmp_path / "signed")

    def check(self, directory: Path, allowed: Path) -> str:
        match check_signature(directory, directory / "manifest.json.sig", allowed):
            case Passed(subject=subject):
                return subject
            case Failed(problem=problem):
                return problem
            case other:
                raise AssertionError(other)

    def test_it_is_in_the_wheel_and_verifies(self, directory: Path, allowed: Path) -> None:
        assert {type(outcome) for outcome in verify(directory)} == {Passed}
        assert self.check(directory, allowed) == "signature by release@example.com"

    def test_it_is_of_these_bytes(self, directory: Path, allowed: Path) -> None:
        manifest = directory / "manifest.json"
        manifest.write_bytes(manifest.read_bytes().replace(b"sm86", b"sm89"))
        assert "is no signature of" in self.check(directory, allowed)

    def test_it_is_by_somebody_else(self, directory: Path, allowed: Path, tmp_path: Path) -> None:
        allowed.write_text("")
        assert "is by nobody in" in self.check(directory, allowed)

    def test_it_is_of_another_purpose(self, directory: Path, allowed: Path, key: Path) -> None:
        (directory / "manifest.json.sig").unlink()
        command = ["ssh-keygen", "-q", "-Y", "sign", "-n", "file", "-f", str(key)]
        subprocess.run([*command, str(directory / "manifest.json")], check=True)
        assert "is no signature of" in self.check(directory, allowed)

    def test_it_is_not_there(self, directory: Path, allowed: Path) -> None:
        (directory / "manifest.json.sig").unlink()
        assert "cannot be read" in self.check(directory, allowed)

    def test_without_openssh(
        self, directory: Path, allowed: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("PATH", "/nonexistent")
        with pytest.raises(SonataError, match="ssh-keygen is not installed"):
            self.check(directory, allowed)

    def test_a_key_that_is_none(self, make_one: Make, tmp_path: Path) -> None:
        with pytest.raises(SonataError, match="cannot sign with it"):
            make_one(signing_key=tmp_path / "no key")
