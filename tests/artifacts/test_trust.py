from __future__ import annotations

import contextlib
import grp
import os
import pwd
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from artifact_sets import Made

from sonata_aot.artifacts import open_artifacts, publish
from sonata_aot.artifacts.errors import ArtifactError, IntegrityError, SonataError, UntrustedPath
from sonata_aot.artifacts.trust import overridden, require_trusted, untrusted_allowed

STRANGER = 12345
GROUP_OF_NOBODY_KNOWN = 54321


class User:
    """Makes directories as a user and asks, as that user, whether they are trusted."""

    def __init__(self, uid: int, ask: Callable[[Path], str | None]) -> None:
        self.uid = uid
        self.ask = ask

    def folder(self, path: Path, mode: int = 0o755, owner: int | None = None) -> Path:
        path.mkdir(exist_ok=True)
        if os.geteuid() == 0:
            os.chown(path, self.uid if owner is None else owner, -1)
        path.chmod(mode)
        return path

    def link(self, path: Path, target: Path, owner: int | None = None) -> Path:
        path.symlink_to(target)
        if os.geteuid() == 0:
            os.lchown(path, self.uid if owner is None else owner, -1)
        return path


def _ask_here(path: Path) -> str | None:
    try:
        require_trusted(path)
    except UntrustedPath as error:
        return error.what
    return None


@pytest.fixture(params=["this user", "nobody"])
def user(request: pytest.FixtureRequest) -> User:
    if request.param == "this user":
        return User(os.geteuid(), _ask_here)
    as_nobody = request.getfixturevalue("as_nobody")

    def ask(path: Path) -> str | None:
        answer = as_nobody("\n    require_trusted(arguments[0])", path)
        assert answer is None or answer[0] == "UntrustedPath"
        return answer and answer[1]

    return User(65534, ask)


needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")


@pytest.mark.parametrize("mode", [0o700, 0o755, 0o555, 0o500])
def test_a_directory_that_only_its_owner_writes_is_trusted(
    user: User, open_place: Path, mode: int
) -> None:
    assert user.ask(user.folder(open_place / "a", mode)) is None


@needs_root
def test_a_directory_of_root_is_trusted_by_all(user: User, open_place: Path) -> None:
    assert user.ask(user.folder(open_place / "a", 0o755, owner=0)) is None


@pytest.mark.parametrize("mode", [0o777, 0o757, 0o702, 0o1777])
def test_a_directory_that_everybody_writes_is_refused(
    user: User, open_place: Path, mode: int
) -> None:
    path = user.folder(open_place / "a", mode)
    assert "a is writable by everybody" in str(user.ask(path))


def test_an_ancestor_that_everybody_writes_is_refused(user: User, open_place: Path) -> None:
    user.folder(open_place / "a", 0o777)
    user.folder(open_place / "a" / "b")
    path = user.folder(open_place / "a" / "b" / "c", 0o700)
    assert f"{open_place}/a is writable by everybody" in str(user.ask(path))


def test_a_sticky_ancestor_is_trusted(user: User, open_place: Path) -> None:
    user.folder(open_place / "a", 0o1777)
    assert user.ask(user.folder(open_place / "a" / "b", 0o700)) is None


@needs_root
@pytest.mark.parametrize("level", ["leaf", "ancestor"])
def test_a_directory_of_another_user_is_refused(user: User, open_place: Path, level: str) -> None:
    upper = user.folder(open_place / "a", owner=STRANGER if level == "ancestor" else None)
    lower = user.folder(upper / "b", owner=STRANGER if level == "leaf" else None)
    assert f"belongs to user {STRANGER}" in str(user.ask(lower))


@needs_root
def test_a_group_that_nobody_knows_may_not_write(user: User, open_place: Path) -> None:
    path = user.folder(open_place / "a", 0o770)
    os.chown(path, -1, GROUP_OF_NOBODY_KNOWN)
    path.chmod(0o770)
    assert f"writable by group {GROUP_OF_NOBODY_KNOWN}" in str(user.ask(path))
    path.chmod(0o750)
    assert user.ask(path) is None


@pytest.mark.parametrize(
    ("members", "primary", "trusted"),
    [
        ([], [], True),
        (["root"], [], True),
        (["me"], ["me"], True),
        (["me", "root"], ["me", "root"], True),
        (["me", "other"], [], False),
        ([], ["other"], False),
        (["other"], ["me"], False),
    ],
)
def test_a_group_may_write_if_nobody_else_is_in_it(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    members: list[str],
    primary: list[str],
    trusted: bool,
) -> None:
    group = GROUP_OF_NOBODY_KNOWN if os.geteuid() == 0 else os.getegid()
    os.chown(tmp_path, -1, group)
    tmp_path.chmod(0o770)
    everybody = [SimpleNamespace(pw_name=name, pw_gid=group) for name in primary]
    everybody += [SimpleNamespace(pw_name="another", pw_gid=group + 1)]
    monkeypatch.setattr(grp, "getgrgid", lambda gid: SimpleNamespace(gr_mem=members))
    monkeypatch.setattr(pwd, "getpwall", lambda: everybody)
    monkeypatch.setattr(pwd, "getpwuid", lambda uid: SimpleNamespace(pw_name="me"))
    assert (_ask_here(tmp_path) is None) is trusted


def test_links_to_safe_directories_are_followed(user: User, open_place: Path) -> None:
    real = user.folder(open_place / "real")
    leaf = user.folder(real / "leaf", 0o700)
    user.link(open_place / "leaf-link", leaf)
    user.link(open_place / "ancestor-link", real)
    assert user.ask(open_place / "leaf-link") is None
    assert user.ask(open_place / "ancestor-link" / "leaf") is None


@pytest.mark.parametrize("way", ["leaf", "ancestor", "relative"])
def test_a_link_from_a_safe_directory_into_an_unsafe_one_is_refused(
    user: User, open_place: Path, way: str
) -> None:
    safe = user.folder(open_place / "safe")
    unsafe = user.folder(open_place / "unsafe", 0o777)
    leaf = user.folder(unsafe / "leaf", 0o700)
    asked = {
        "leaf": lambda: user.link(safe / "link", leaf),
        "ancestor": lambda: user.link(safe / "link", unsafe) / "leaf",
        "relative": lambda: user.link(safe / "link", Path("../unsafe/leaf")),
    }[way]()
    assert "unsafe is writable by everybody" in str(user.ask(asked))


@needs_root
def test_a_link_of_another_user_is_refused(user: User, open_place: Path) -> None:
    shared = user.folder(open_place / "tmp", 0o1777, owner=0)
    leaf = user.folder(open_place / "leaf", 0o700)
    link = user.link(shared / "link", leaf, owner=STRANGER)
    assert f"link belongs to user {STRANGER}" in str(user.ask(link))


def test_a_link_on_the_way_that_others_can_replace_is_refused(user: User, open_place: Path) -> None:
    safe = user.folder(open_place / "safe")
    unsafe = user.folder(open_place / "unsafe", 0o777)
    leaf = user.folder(safe / "leaf", 0o700)
    middle = user.link(unsafe / "middle", leaf)
    first = user.link(safe / "first", middle)  # safe, and so is the end, but not between them
    assert "unsafe is writable by everybody" in str(user.ask(first))


def test_dots_after_a_link_mean_what_they_mean_to_the_kernel(user: User, open_place: Path) -> None:
    safe = user.folder(open_place / "safe")
    user.folder(safe / "leaf", 0o700)
    unsafe = user.folder(open_place / "unsafe", 0o777)
    user.folder(unsafe / "leaf", 0o700)
    user.link(safe / "link", user.folder(unsafe / "inner"))
    path = safe / "link" / ".." / "leaf"
    assert os.path.samefile(path, unsafe / "leaf")
    assert "unsafe is writable by everybody" in str(user.ask(path))


def test_a_sticky_directory_that_dots_lead_to_is_refused(user: User, open_place: Path) -> None:
    user.folder(open_place / "a", 0o1777)
    path = user.folder(open_place / "a" / "b", 0o700)
    assert "a is writable by everybody" in str(user.ask(path / ".."))


def test_a_relative_path_is_checked_up_to_the_root(
    open_place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (open_place / "a" / "b").mkdir(parents=True)
    monkeypatch.chdir(open_place / "a")
    require_trusted(Path("b"))
    open_place.chmod(0o777)
    with pytest.raises(UntrustedPath, match=f"{open_place} is writable"):
        require_trusted(Path("b"))


def test_the_remedy_is_a_command_that_works(tmp_path: Path) -> None:
    path = tmp_path / "a"
    path.mkdir()
    path.chmod(0o777)
    with pytest.raises(UntrustedPath) as caught:
        require_trusted(path)
    assert caught.value.remedy == f"chmod o-w {path}"
    path.chmod(0o775 & ~0o020)
    require_trusted(path)


@pytest.mark.parametrize("action", ["open", "publish"])
def test_opening_and_publishing_ask_first(made: Made, directory: Path, action: str) -> None:
    directory.chmod(0o777)
    act = {
        "open": lambda: open_artifacts(directory),
        "publish": lambda: publish(directory, made.manifest, made.objects),
    }[action]
    with pytest.raises(UntrustedPath):
        act()


@pytest.mark.parametrize("mode", [0o666, 0o606])
def test_a_manifest_that_everybody_writes_is_refused(directory: Path, mode: int) -> None:
    (directory / "manifest.json").chmod(mode)
    with pytest.raises(SonataError, match="writable"):
        open_artifacts(directory)


@needs_root
def test_a_manifest_of_another_user_is_refused(directory: Path) -> None:
    os.chown(directory / "manifest.json", STRANGER, -1)
    with pytest.raises(SonataError, match=f"belongs to user {STRANGER}"):
        open_artifacts(directory)


def test_nothing_is_created_in_a_directory_that_is_then_refused(
    made: Made, open_place: Path
) -> None:
    open_place.chmod(0o777)
    with pytest.raises(UntrustedPath):
        publish(open_place / "deep" / "artifacts", made.manifest, made.objects)
    found: list[Any] = list(open_place.iterdir())
    assert found == []


def _objects_linked(objects: Path) -> None:
    objects.rename(objects.parent.parent / "elsewhere")
    objects.symlink_to(objects.parent.parent / "elsewhere")


def _objects_open(objects: Path) -> None:
    objects.chmod(0o777)


def _objects_open_and_sticky(objects: Path) -> None:
    objects.chmod(0o1777)


def _objects_of_a_stranger(objects: Path) -> None:
    os.chown(objects, STRANGER, -1)


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (_objects_linked, "is not a directory of its own"),
        (_objects_open, "is writable by everybody"),
        (_objects_open_and_sticky, "is writable by everybody"),
        pytest.param(_objects_of_a_stranger, f"belongs to user {STRANGER}", marks=needs_root),
    ],
)
def test_the_folder_of_objects_is_examined_too(
    made: Made, tmp_path: Path, spoil: Callable[[Path], None], words: str
) -> None:
    directory = tmp_path / "set"
    publish(directory, made.manifest, made.objects)
    assert open_artifacts(directory).manifest == made.manifest
    spoil(directory / "objects")
    with pytest.raises(ArtifactError, match=words) as caught:
        open_artifacts(directory)
    assert str(directory / "objects") in caught.value.what
    assert caught.value.remedy


class TestWhereItIsAllowed:
    def test_every_fault_is_recorded_once(self, directory: Path) -> None:
        directory.chmod(0o777)
        (directory / "manifest.json").chmod(0o666)
        with untrusted_allowed() as faults:
            for _ in range(2):
                open_artifacts(directory)
        assert faults == [
            f"{directory} is writable by everybody",
            f"{directory / 'manifest.json'} is writable by everybody",
        ]

    def test_it_ends_with_the_block(self, directory: Path) -> None:
        directory.chmod(0o777)
        with contextlib.suppress(RuntimeError), untrusted_allowed() as faults:
            assert overridden() is faults
            raise RuntimeError
        assert overridden() is None
        with pytest.raises(UntrustedPath):
            open_artifacts(directory)

    def test_it_is_for_this_thread_alone(self, directory: Path) -> None:
        directory.chmod(0o777)
        with untrusted_allowed(), ThreadPoolExecutor(1) as pool:
            answer = pool.submit(open_artifacts, directory)
        assert isinstance(answer.exception(), UntrustedPath)

    @pytest.mark.parametrize("name", ["manifest.json", "objects"])
    def test_links_are_refused_all_the_same(
        self, directory: Path, tmp_path: Path, name: str
    ) -> None:
        (directory / name).rename(tmp_path / "elsewhere")
        (directory / name).symlink_to(tmp_path / "elsewhere")
        with untrusted_allowed(), pytest.raises(IntegrityError):
            open_artifacts(directory)
