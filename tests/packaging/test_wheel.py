"""The wheel itself: what is in it, that it can be made again, and what it may not need."""

from __future__ import annotations

import json
import lzma
import os
import re
import sys
import tarfile
import zipfile
from importlib.metadata import distribution
from pathlib import Path

import pytest

from packaging_runs import (
    PACKAGES,
    ROOT,
    STRAY,
    Environment,
    Install,
    Once,
    compiler_path,
    copy_tree,
    pip_wheel,
    run,
)
from sonata_aot.aot.wheel_base import BUNDLED, DISTRIBUTION
from sonata_aot.aot.wheel_file import Wheel, read_wheel
from sonata_aot.aot.wheel_platform import require_platform
from sonata_aot.artifacts import __version__
from sonata_aot.artifacts.errors import BuildError
from sonata_aot.artifacts.pack import PACK

# Bytes, for one architecture, with launcher, loader and tool.
MOST_BYTES = 3_000_000
SYSTEM_LIBRARIES = re.compile(
    r"(libc|libm|libdl|libpthread|librt|libgcc_s|libstdc\+\+|ld-linux-[\w-]+)\.so\.\d+"
)


def test_the_same_sources_give_the_same_wheel(
    once: Once, builder: Environment, compile_cache: Path, wheel_311: Path
) -> None:
    """One out of the sdist, one out of the tree; in different folders.

    The launcher of the second is the one that this environment was installed with: it was compiled
    out of the tree in a folder of its own. If it is another one, of another compiler or of sources
    that have changed since, the tree's is compiled as well.
    """
    ours = read_wheel(wheel_311)
    launcher = installed_launcher(ours)

    def make(folder: Path) -> None:
        tree = copy_tree(folder / "a tree elsewhere")
        bare = ("wheel.cmake=false", "wheel.py-api=py3") if launcher else ()
        settings = ("arch=sm86", *bare)
        pip_wheel(builder, tree, folder, *settings, cache=compile_cache)

    (path,) = once("again", make).glob("*.whl")
    again = read_wheel(path)
    if launcher:
        # Without a launcher it has the tags of a wheel for every machine.
        tags = f"{again.dist_info}/WHEEL"
        again = Wheel(again.name, again.version, ours.tags, {**again.files, **launcher})
        again.files[tags] = ours.files[tags]  # that of the tree: test_backend.py
    else:
        assert path.name == wheel_311.name
        assert path.read_bytes() == wheel_311.read_bytes()
    theirs = again.files
    assert {
        name for name in {*ours.files, *theirs} if ours.files.get(name) != theirs.get(name)
    } == (set())
    assert again.file_name == wheel_311.name
    assert again.to_bytes() == wheel_311.read_bytes()


def installed_launcher(wheel: Wheel) -> dict[str, bytes]:
    """This environment's launcher and its bill of materials, if both are those of the wheel."""
    installed = distribution(DISTRIBUTION)
    files = {
        name: Path(str(installed.locate_file(name))).read_bytes()
        for name in wheel.files
        if name.endswith((".so", "/launcher.cdx.json"))
        and Path(str(installed.locate_file(name))).exists()
    }
    same = len(files) == 2 and all(wheel.files[name] == data for name, data in files.items())
    return files if same else {}


def test_an_installed_tool_packs_the_same_wheel_again(
    install: Install, wheel_311: Path, compile_cache: Path, tmp_path: Path
) -> None:
    environment = install("3.11", wheel_311, purpose="compiler", path=compiler_path())
    said = environment.run(
        *("sonata-aot", "wheel", "--arch=sm86", "--out", tmp_path, "--json"),
        SONATA_AOT_CACHE_DIR=str(compile_cache),
    )
    assert json.loads(said)["launcher"] == "the installed tool, packed again"
    assert (tmp_path / wheel_311.name).read_bytes() == wheel_311.read_bytes()
    assert run("sha256sum", "--check", "SHA256SUMS", cwd=tmp_path) == f"{wheel_311.name}: OK\n"


def test_it_is_small(wheel_311: Path) -> None:
    assert wheel_311.stat().st_size < MOST_BYTES


def test_one_for_sm90_is_small_too(base_312: Path, compile_cache: Path, tmp_path: Path) -> None:
    script = Path(sys.executable).with_name("sonata-aot")
    environ = {**os.environ, "SONATA_AOT_CACHE_DIR": str(compile_cache)}
    command = (script, "wheel", "--quiet", "--arch=sm90", "--base", base_312, "--out", tmp_path)
    run(*command, env=environ)
    (wheel,) = tmp_path.glob("*.whl")
    manifest = json.loads(read_wheel(wheel).files[f"{BUNDLED}/manifest.json"])
    assert manifest["selection"]["archs"] == ["sm90"]
    assert wheel.stat().st_size < MOST_BYTES


def test_it_holds_what_it_must(wheel_311: Path) -> None:
    wheel = read_wheel(wheel_311)
    for name in (
        f"{BUNDLED}/manifest.json",
        f"{BUNDLED}/ptx.xz",
        "sonata_aot/aot/template/NOTICE.artifacts",
        "sonata_aot/loader/py.typed",
        *(f"{wheel.dist_info}/licenses/{x}" for x in ("LICENSE", "NOTICE", "NOTICE.artifacts")),
        *(f"{wheel.dist_info}/sboms/{x}.cdx.json" for x in ("artifacts", "launcher")),
    ):
        assert name in wheel.files, name
    odd = [name for name in wheel.files if re.search(r"native/|backend/|\.cpp|\.pyc", name)]
    assert odd == []
    tops = {name.partition("/")[0] for name in wheel.files}
    assert tops == {"sonata_aot", wheel.dist_info}


def test_every_licence_that_its_metadata_name_is_there(wheel_311: Path) -> None:
    wheel = read_wheel(wheel_311)
    named = re.findall(rb"^License-File: (.+)$", wheel.files[f"{wheel.dist_info}/METADATA"], re.M)
    held = {x.rpartition("/")[2] for x in wheel.files if x.startswith(f"{wheel.dist_info}/lic")}
    assert sorted(held) == sorted(name.decode() for name in named)


def test_it_requires_only_click_and_platformdirs(wheel_311: Path) -> None:
    wheel = read_wheel(wheel_311)
    metadata = wheel.files[f"{wheel.dist_info}/METADATA"].decode()
    needs = re.findall(r"^Requires-Dist: ([\w.-]+)(.*)$", metadata, re.M)
    assert {name for name, rest in needs if "extra ==" not in rest} == {"click", "platformdirs"}


def test_its_launcher_links_neither_cuda_nor_torch(
    wheel_311: Path, base_312: Path, tmp_path: Path
) -> None:
    for wheel in (wheel_311, base_312):
        with zipfile.ZipFile(wheel) as archive:
            (name,) = (name for name in archive.namelist() if name.endswith(".so"))
            launcher = archive.extract(name, tmp_path / wheel.stem)
        said = run("readelf", "--dynamic", launcher)
        needed = re.findall(r"\(NEEDED\).*\[(.+)\]", said)
        assert needed
        assert [library for library in needed if not SYSTEM_LIBRARIES.fullmatch(library)] == []
        assert "PATH)" not in said  # RPATH or RUNPATH: folders of the machine that built it


def test_no_path_of_the_machine_that_built_is_in_them(
    wheel_311: Path, base_312: Path, data_wheel: Path, shared_directory: Path
) -> None:
    # Sources, what builds, where it was built, and the home of whoever did.
    places = [ROOT, PACKAGES, shared_directory, Path.home()]
    forbidden = [f"{place}/".encode() for place in places if place != Path("/")]
    for path in (wheel_311, base_312, data_wheel):
        for name, data in read_wheel(path).files.items():
            content = lzma.decompress(data) if name.endswith(PACK) else data
            assert [place for place in forbidden if place in content] == [], name


def test_its_tags(wheel_311: Path, base_312: Path) -> None:
    ours, stable = read_wheel(wheel_311), read_wheel(base_312)
    assert [tag.split("-")[:2] for tag in ours.tags] == [["cp311", "cp311"]]
    assert [tag.split("-")[:2] for tag in stable.tags] == [["cp312", "abi3"]]
    assert any(name.endswith("_native.abi3.so") for name in stable.files)


def test_a_platform_is_what_auditwheel_says(wheel_311: Path) -> None:
    wheel = read_wheel(wheel_311)
    (machine,) = {tag.split("-")[2].removeprefix("linux_") for tag in wheel.tags}
    require_platform(wheel, f"manylinux_2_99_{machine}")
    with pytest.raises(BuildError, match=r"and not manylinux_2_5.* it needs .*libc\.so"):
        require_platform(wheel, f"manylinux_2_5_{machine}")
    with pytest.raises(BuildError, match="and not manylinux_2_99_s390x"):
        require_platform(wheel, "manylinux_2_99_s390x")


def test_without_an_arch_no_kernels_are_built(base_312: Path) -> None:
    # And no compiler of kernels was needed: there was none.
    assert not [name for name in read_wheel(base_312).files if name.startswith(BUNDLED)]


def listed(kind: str) -> list[str]:
    """Files of the repository that are there, by name."""
    said = run("git", "-C", ROOT, "ls-files", "-z", kind, "--exclude-standard")
    return [name for name in said.split("\0") if (ROOT / name).exists() and name]


def test_the_sdist_holds_what_git_has_and_no_more(sdist: Path) -> None:
    with tarfile.open(sdist) as archive:
        files = [item.name.partition("/")[2] for item in archive if not item.isdir()]
    tracked, others = (set(listed(kind)) for kind in ("--cached", "--others"))
    # typings consists of links to the rooms, for the type checker.
    needed = {name for name in tracked if not name.startswith("typings/")}
    assert needed | {"PKG-INFO"} <= set(files) <= needed | others | {"PKG-INFO"}
    assert len(files) == len(set(files))
    assert not set(STRAY) & set(files)


def test_all_versions_agree(install: Install, wheel_311: Path) -> None:
    environment = install("3.11", wheel_311, purpose="compiler", path=compiler_path())
    wheel = read_wheel(wheel_311)
    assert wheel.version == __version__
    assert environment.run("sonata-aot", "--version").split()[-1] == __version__
    script = "from sonata_aot import loader; print(loader.__version__)"
    assert environment.run("python", "-c", script).strip() == __version__
    assert json.loads(wheel.files[f"{BUNDLED}/manifest.json"])["tool"] == __version__
    for name in ("artifacts", "launcher"):
        sbom = json.loads(wheel.files[f"{wheel.dist_info}/sboms/{name}.cdx.json"])
        assert sbom["metadata"]["component"]["version"] == __version__


def test_its_sboms_name_what_it_was_made_with(wheel_311: Path) -> None:
    wheel = read_wheel(wheel_311)
    compiler = json.loads(wheel.files[f"{BUNDLED}/manifest.json"])["compiler"]
    texts = {
        name: wheel.files[f"{wheel.dist_info}/sboms/{name}.cdx.json"].decode()
        for name in ("artifacts", "launcher")
    }
    found = {x["name"]: x.get("version") for x in json.loads(texts["artifacts"])["components"]}
    assert compiler.items() <= found.items()
    built = {x["name"]: x.get("version") for x in json.loads(texts["launcher"])["components"]}
    assert {"nanobind", "scikit-build-core", "cmake", "CPython headers"} < set(built)
    for text in texts.values():
        refs = {x["bom-ref"] for x in json.loads(text)["components"]}
        assert set(json.loads(text)["dependencies"][0]["dependsOn"]) == refs
        assert not re.search(r"@\w+@|@\"", text)  # what CMake should have filled in
        assert "timestamp" not in text
        assert "serialNumber" not in text


def test_a_broken_build_says_why(builder: Environment, tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="-C kernel needs -C arch"):
        pip_wheel(builder, copy_tree(tmp_path / "tree"), tmp_path, "kernel=gemv")
