"""Which source files enter a cache key, found without importing any of them."""

from __future__ import annotations

import sys
from collections.abc import Callable
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from sonata_aot.aot.sources import source_digest, source_files
from sonata_aot.artifacts.errors import BuildError

if TYPE_CHECKING:
    Package = Callable[[dict[str, str]], Path]

# Importing any of these fails: nothing here may be imported.
_BOMB = "raise SystemExit('imported')\n"
_TREE = {
    "outer/__init__.py": "VALUE = 1\n",
    "outer/near.py": "",
    "outer/other/__init__.py": "from .deep import thing\n",
    "outer/other/deep.py": "thing = 1\n",
    "outer/inner/__init__.py": "",
    "outer/inner/leaf.py": "",
    "outer/inner/chain.py": "from . import leaf\n",
    "bare/part.py": "",
    "single.py": "",
}


# An import in every kind of block that has statements.
NESTED = (
    "def f():\n    if a:\n        pass\n    else:\n        import single",
    "async def f():\n    async with a:\n        import single",
    "class A:\n    for a in b:\n        pass\n    else:\n        import single",
    "while a:\n    import single",
    "try:\n    pass\nexcept A:\n    import single",
    "try:\n    pass\nexcept* A:\n    import single",
    "try:\n    pass\nexcept A:\n    pass\nelse:\n    import single",
    "try:\n    pass\nfinally:\n    import single",
    "match a:\n    case 1:\n        import single",
)


@pytest.mark.parametrize(
    ("statement", "found"),
    [
        ("import single", {"single"}),
        ("import single as renamed", {"single"}),
        ("from single import *", {"single"}),
        ("import outer", {"outer"}),
        ("import outer.near", {"outer", "outer.near"}),
        ("from outer import near", {"outer.near"}),
        ("from outer import VALUE", {"outer"}),
        ("from outer import near, VALUE", {"outer", "outer.near"}),
        ("from outer import *", {"outer"}),
        ("from outer.near import x", {"outer.near"}),
        ("from outer.other import thing", {"outer.other", "outer.other.deep"}),
        ("from . import leaf", {"outer.inner.leaf"}),
        ("from . import leaf, absent", {"outer.inner", "outer.inner.leaf"}),
        ("from . import chain", {"outer.inner.chain", "outer.inner.leaf"}),
        ("from .leaf import x", {"outer.inner.leaf"}),
        ("from .. import near", {"outer.near"}),
        ("from .. import VALUE", {"outer"}),
        ("from ..near import x", {"outer.near"}),
        ("from ..other import deep", {"outer.other.deep"}),
        ("from ..other.deep import thing", {"outer.other.deep"}),
        ("import bare.part", {"bare.part"}),
        ("from bare import part", {"bare.part"}),
        ("def f():\n    from . import leaf", {"outer.inner.leaf"}),
        ("try:\n    import single\nexcept ImportError:\n    pass", {"single"}),
        ("try:\n    import absent_module\nexcept ImportError:\n    pass", set()),
        *((text, {"single"}) for text in NESTED),
        ("from absent_module.part import x", set()),
        ("from .absent import x", set()),
        ("import os, json.decoder, sys\nfrom collections import abc", set()),
        ("import cutlass\nfrom cutlass import cute\nfrom cutlass.cute import runtime", set()),
        ("import cuda.bindings\nimport nvidia_cutlass_dsl", set()),
    ],
)
def test_import_forms(package: Package, statement: str, found: set[str]) -> None:
    package({**_TREE, "outer/inner/device.py": _BOMB + statement + "\n"})
    files = source_files("outer.inner.device")
    assert set(files) == {"outer.inner.device"} | found
    assert list(files) == sorted(files)
    for name, path in files.items():
        assert path.as_posix().endswith(
            (f"{name.replace('.', '/')}.py", f"{name.replace('.', '/')}/__init__.py")
        )


@pytest.mark.parametrize(
    ("dots", "found"), [(".", "w.x.y.same"), ("..", "w.x.same"), ("...", "w.same")]
)
@pytest.mark.parametrize("form", ["from {dots} import same", "from {dots}same import x"])
def test_relative_imports_from_deep_down(
    package: Package, dots: str, found: str, form: str
) -> None:
    folders = ("w", "w/x", "w/x/y")
    package({f"{folder}/{name}.py": "" for folder in folders for name in ("__init__", "same")})
    package({"w/x/y/device.py": form.format(dots=dots)})
    assert set(source_files("w.x.y.device")) == {"w.x.y.device", found}


def test_a_package_can_be_the_device_module(package: Package) -> None:
    package({**_TREE, "outer/inner/__init__.py": "from . import leaf\nfrom .. import near\n"})
    assert set(source_files("outer.inner")) == {"outer.inner", "outer.inner.leaf", "outer.near"}


def test_imports_in_a_circle(package: Package) -> None:
    package({"one.py": "import two\n", "two.py": "import three\n", "three.py": "import one\n"})
    assert set(source_files("one")) == {"one", "two", "three"}


def test_a_compiled_extension_counts(package: Package) -> None:
    suffix = EXTENSION_SUFFIXES[0]
    root = package({"device.py": "import fast\n", f"fast{suffix}": "machine code"})
    assert source_files("device")["fast"] == root / f"fast{suffix}"
    before = source_digest("device")
    package({f"fast{suffix}": "other machine code"})
    assert source_digest("device") != before


def test_nothing_is_imported(package: Package) -> None:
    package(
        {
            "pack/__init__.py": _BOMB,
            "pack/device.py": _BOMB + "from . import helper\n",
            "pack/helper.py": _BOMB,
        }
    )
    before = set(sys.modules)
    source_files("pack.device")
    source_files("sonata_aot.kernels.gemv.device")
    assert set(sys.modules) == before


@pytest.mark.parametrize("name", ["absent", "absent.device", "pack.absent", "pack", "pack.a.b"])
def test_a_missing_device_module(package: Package, name: str) -> None:
    package({"pack/a.py": ""})
    with pytest.raises(BuildError, match=f"'{name}' not found; .*`device`"):
        source_files(name)


@pytest.mark.parametrize("broken", ["device", "helper"])
@pytest.mark.parametrize(("text", "line"), [("x = 1\ndef f(:\n", 2), ("\n\nx = 1\n  y = 1\n", 4)])
def test_a_syntax_error_names_the_line(package: Package, broken: str, text: str, line: int) -> None:
    root = package({"device.py": "import helper\n", "helper.py": "", f"{broken}.py": text})
    with pytest.raises(BuildError) as raised:
        source_files("device")
    assert f"{root / broken}.py:{line}: " in str(raised.value)


@pytest.mark.parametrize("content", [b"\x00", b"# coding: nonsense\n", b"x = '\xff'\n"])
def test_a_file_that_is_no_python(package: Package, content: bytes) -> None:
    root = package({"device.py": ""})
    (root / "device.py").write_bytes(content)
    with pytest.raises(BuildError, match=r"device\.py"):
        source_files("device")


class TestDigest:
    @pytest.fixture
    def digest_after(self, package: Package) -> Callable[[dict[str, str]], str]:
        package({**_TREE, "outer/inner/device.py": "from . import chain\nimport single\n"})

        def change(files: dict[str, str]) -> str:
            package(files)
            return source_digest("outer.inner.device")

        return change

    @pytest.mark.parametrize(
        "name",
        ["outer/inner/device.py", "outer/inner/chain.py", "outer/inner/leaf.py", "single.py"],
    )
    def test_changes_with_every_file(
        self, digest_after: Callable[[dict[str, str]], str], package: Package, name: str
    ) -> None:
        before = digest_after({})
        text = (package({}) / name).read_text()
        assert digest_after({name: text + "# a comment\n"}) != before
        assert digest_after({name: text}) == before

    @pytest.mark.parametrize(
        "name", ["outer/near.py", "outer/__init__.py", "new.py", "bare/part.py"]
    )
    def test_does_not_change_with_others(
        self, digest_after: Callable[[dict[str, str]], str], name: str
    ) -> None:
        before = digest_after({})
        assert digest_after({name: "# a comment\n"}) == before

    def test_changes_when_code_moves_between_modules(
        self, digest_after: Callable[[dict[str, str]], str]
    ) -> None:
        before = digest_after({"single.py": "a\n", "outer/inner/leaf.py": "b\n"})
        assert digest_after({"single.py": "b\n", "outer/inner/leaf.py": "a\n"}) != before
