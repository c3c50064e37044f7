"""Wheels with artifacts: the tool's own with artifacts inside, or one of artifacts alone."""

from __future__ import annotations

import contextlib
import hashlib
import keyword
import os
import re
import sys
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from ..artifacts import __version__, environment
from ..artifacts.errors import BuildError, StoreError, UsageError
from ..artifacts.files import explained
from ..artifacts.manifest import FILE_NAME, OBJECTS, SIGNATURE, Manifest
from ..artifacts.pack import PACK, pack_ptx
from ..artifacts.places import DATA_FOLDER, ENTRY_POINTS
from ..artifacts.signature import sign
from ..artifacts.store import open_artifacts
from ..artifacts.verify import Failed, Passed, Unexpected, verify
from ..kernels import KernelSpec, builtin
from .build import Progress, build
from .plan import Selection
from .sbom import FILE_NAME as SBOM
from .sbom import artifacts_sbom
from .wheel_base import BUNDLED, DISTRIBUTION, find_base, licence_text
from .wheel_file import Wheel, normalised, read_wheel
from .wheel_platform import require_platform
from .wheel_publish import publish, require_writable

_NAME = re.compile(r"[a-z](?:[a-z0-9._-]*[a-z0-9])?", re.I | re.ASCII)
# A version in the form that PEP 440 calls normal: installers show and compare no other.
_N, _LOCAL = "(0|[1-9][0-9]*)", "(0|[1-9][0-9]*|[0-9]*[a-z][a-z0-9]*)"
_VERSION = re.compile(
    rf"{_N}(\.{_N})*((a|b|rc){_N})?(\.post{_N})?(\.dev{_N})?(\+{_LOCAL}(\.{_LOCAL})*)?"
)
# Import packages that a wheel of artifacts must not shadow: of the tool, and of what it runs with.
_TAKEN = {"sonata_aot", "torch", "click", "platformdirs", "numpy"}
# What an artifact's compiler's licence asks to be said with it; beside this file.
_NOTICE = Path(__file__).with_name("template") / "NOTICE.artifacts"
_INIT = '''"""Compiled kernels: `sonata_aot.loader.load(ARTIFACTS)` loads them."""

from pathlib import Path

ARTIFACTS = Path(__file__).parent / "{folder}"
'''


@dataclass(frozen=True)
class Written:
    """A finished wheel; `origin` says where its launcher is from, None if it has none."""

    path: Path
    origin: str | None
    size: int
    sha256: str
    manifest: Manifest


@dataclass(frozen=True)
class DataWheel:
    """What a wheel of artifacts alone shall be called; None: after the architectures."""

    name: str | None = None
    version: str | None = None

    def named(self, selection: Selection) -> tuple[str, str]:
        """Name and version, checked.

        Raises:
            UsageError: one cannot be had, or collides with the kernels' own package.
        """
        name, version = self.name, self.version or __version__
        if name is None:
            if not _own(selection.specs):
                raise UsageError(
                    "--only-artifacts: kernels of your own", remedy="name the wheel with --name"
                )
            archs = (arch.name for arch in sorted(set(selection.archs)))
            name = f"{DISTRIBUTION}-kernels-{'-'.join(archs)}"
        if not _NAME.fullmatch(name) or not _VERSION.fullmatch(version):
            raise UsageError(
                f"{name!r} {version!r} is no name and version of a distribution",
                remedy="use letters, digits, `-`, and a version such as 1.2",
            )
        package = normalised(name)
        taken = {spec.module.partition(".")[0] for spec in selection.specs} | _TAKEN
        if package in taken or package in sys.stdlib_module_names:
            whose = "that of the kernels or of what they run with"
        elif keyword.iskeyword(package):
            whose = "a word of Python's"
        else:
            return name, version
        raise UsageError(
            f"--name {name}: its import package {package} is {whose}",
            remedy=f"choose another, such as {name}-artifacts",
        )


def make(
    selection: Selection,
    *,
    out: Path,
    data: DataWheel | None = None,
    base: Path | None = None,
    isolation: bool = True,
    platform: str | None = None,
    signing_key: Path | None = None,
    progress: Progress = lambda done, total, what: None,
) -> Written:
    """Build a selection and write it into `out` as a wheel, beside which SHA256SUMS is kept.

    The wheel is `base`, or what `find_base` finds, with the artifacts inside; with `data` one of
    artifacts alone. It is read again and verified before it gets its name. With `platform`, such
    as manylinux_2_28_x86_64, it bears that tag, if auditwheel finds that it may.

    Raises:
        UsageError: `data` has no good name.
        BuildError, IntegrityError: as for `build` and `find_base`; or what was written is wrong.
        MissingDependency: a compiler, auditwheel or ssh-keygen is not installed.
        ArgumentError: SOURCE_DATE_EPOCH is no time.
        StoreError, UntrustedPath: `out`, the key or the cache cannot be used.
    """
    # What can be wrong is found before minutes are spent on compiling.
    name = data.named(selection) if data else None
    environment.SOURCE_DATE_EPOCH.get()
    require_writable(out)
    if signing_key is not None and not os.path.exists(signing_key):
        raise StoreError(
            f"{signing_key}: cannot sign with it: there is no such file",
            remedy="name an SSH key, such as `ssh-keygen -t ed25519 -f FILE` makes",
        )
    origin = None
    if name is None:
        origin, wheel = find_base(base, isolation=isolation)
        if wheel.version != __version__:
            raise BuildError(
                f"{origin} is version {wheel.version}, and this tool {__version__}",
                remedy="use the tool of that version",
            )
        if platform is not None:
            require_platform(wheel, platform)
            wheel.retag(platform)
    else:
        own = _own(selection.specs)
        wheel = _data_wheel(*name, own=bool(own), alone=len(own) == len(selection.specs))
    with _scratch() as folder:
        directory = folder / "artifacts"
        manifest = build(
            selection.specs,
            selection.archs,
            everything=selection.everything,
            only=selection.only,
            out=directory,
            progress=progress,
        ).manifest
        if signing_key is not None:
            index = directory / FILE_NAME
            with explained(directory, "write into"):
                index.with_name(SIGNATURE).write_bytes(sign(index, signing_key))
        where = _embed(wheel, manifest, _packed(directory))
    content = wheel.to_bytes()
    path = publish(wheel.file_name, content, out, check=lambda staged: verify_wheel(staged, where))
    return Written(path, origin, len(content), hashlib.sha256(content).hexdigest(), manifest)


@contextlib.contextmanager
def _scratch() -> Iterator[Path]:
    """A folder for the time being."""
    with explained(Path(tempfile.gettempdir()), "write into"):
        made = tempfile.TemporaryDirectory(prefix="sonata-aot-")
    with made as folder:
        yield Path(folder)


def _own(specs: Iterable[KernelSpec]) -> list[KernelSpec]:
    """Those of these kernels that are the product's, for which `load()` may look."""
    return [spec for spec in specs if builtin().get(spec.name) == spec]


def _packed(directory: Path) -> dict[str, bytes]:
    """An artifact directory's files by path, its PTX in one of them."""
    artifacts = open_artifacts(directory)
    names = [FILE_NAME, SIGNATURE] if (directory / SIGNATURE).exists() else [FILE_NAME]
    files = {name: (directory / name).read_bytes() for name in names}
    for binary in artifacts.manifest.binaries:
        files[f"{OBJECTS}/{binary.cubin.file_name}"] = artifacts.read(binary.cubin)
    files[PACK] = pack_ptx(artifacts.manifest, artifacts.read)
    return files


def _data_wheel(name: str, version: str, *, own: bool, alone: bool) -> Wheel:
    """A wheel without its artifacts; only with the product's `own` kernels is it to be found.

    Where these are not `alone` in it, nothing is said of the licence of all.
    """
    package, dist_info = normalised(name), f"{normalised(name)}-{version}.dist-info"
    tag = "py3-none-any"  # bytes for a GPU: the same for every machine that it is in
    head = ["Metadata-Version: 2.4", f"Name: {name}", f"Version: {version}"]
    head.append("Summary: Kernels that sonata-aot compiled ahead of time")
    files = {
        f"{package}/__init__.py": _INIT.format(folder=DATA_FOLDER).encode(),
        f"{dist_info}/WHEEL": f"Wheel-Version: 1.0\nGenerator: {DISTRIBUTION} {__version__}\n"
        f"Root-Is-Purelib: true\nTag: {tag}\n".encode(),
    }
    if alone:
        head.append("License-Expression: Apache-2.0")
    if own:
        head.append("License-File: LICENSE")
        files[f"{dist_info}/licenses/LICENSE"] = licence_text()
        entry = f"[{ENTRY_POINTS}]\n{name} = {package}\n"
        files[f"{dist_info}/entry_points.txt"] = entry.encode()
    files[f"{dist_info}/METADATA"] = "".join(f"{line}\n" for line in head).encode()
    return Wheel(name, version, (tag,), files)


def _embed(wheel: Wheel, manifest: Manifest, artifacts: Mapping[str, bytes]) -> str:
    """Add artifacts with what goes with them; returns the folder that holds them."""
    is_data = wheel.name != DISTRIBUTION
    where = f"{normalised(wheel.name)}/{DATA_FOLDER}" if is_data else BUNDLED
    wheel.files |= {f"{where}/{name}": data for name, data in artifacts.items()}
    metadata, notice = f"{wheel.dist_info}/METADATA", _NOTICE.name
    head, _, body = wheel.files[metadata].partition(b"\n\n")
    line = f"\nLicense-File: {notice}".encode()
    if line not in head:
        head = head.rstrip(b"\n") + line
    wheel.files[metadata] = head + b"\n\n" + body
    wheel.files[f"{wheel.dist_info}/licenses/{notice}"] = _NOTICE.read_bytes()
    sbom = artifacts_sbom(manifest, wheel.name, wheel.version)
    wheel.files[f"{wheel.dist_info}/sboms/{SBOM}"] = sbom
    return where


def verify_wheel(path: Path, where: str) -> None:
    """Check a wheel's RECORD, and every byte of the artifacts in it as `verify` does.

    Raises:
        IntegrityError: the wheel is damaged.
        BuildError: its artifacts are.
    """
    files = read_wheel(path).files
    with _scratch() as folder:
        for name, data in files.items():
            if name.startswith(f"{where}/"):
                target = folder / name.removeprefix(f"{where}/")
                target.parent.mkdir(exist_ok=True)
                target.write_bytes(data)
        for outcome in verify(folder):
            match outcome:
                case Failed(subject=subject, problem=problem):
                    wrong = f"{subject}: {problem}"
                case Unexpected(subject=subject):
                    wrong = f"{subject} is not named by the manifest"
                case Passed():
                    continue
            raise BuildError(f"{path.name}: {wrong}", remedy="build the wheel again")
