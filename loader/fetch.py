"""Reads the chosen binaries and gives machine code to the driver, several at a time.

Most of that is waiting for the disk, a hash or the GPU, and leaves the GIL to others.
"""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Collection, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor

from ..artifacts.choose import Choice
from ..artifacts.manifest import Binary, Form, Payload
from ..artifacts.store import ArtifactSet
from .library import Loaded

# Threads besides the caller's. With 3 the 156 files for an H200 take 12 to 18 ms, with 2 16 to 18,
# with 1 20, and with none 20 to 26.
_HELPERS = 3
# By place in the result: a device and what is loaded on it.
_Found = dict[int, tuple[int, Loaded]]


def fetch(
    artifacts: ArtifactSet, choices: Mapping[int, Choice], preload: Collection[str]
) -> list[tuple[int, Loaded]]:
    """Each binary that was chosen, with its device: a device after the other, as in the manifest.

    A file is read, hashed and verified once, however many devices take it. Machine code is in the
    driver then, and so is PTX of the kernels named in `preload`.

    Raises:
        IntegrityError: a file is missing, unreadable or not what the manifest says.
        MissingDependency: as for `ArtifactSet.read`.
        DriverError: the driver refused a binary.
        ForkedProcess: in a child of the process that loaded the driver.
    """
    return _Fetch(artifacts, choices, preload).run()


class _Fetch:
    def __init__(
        self, artifacts: ArtifactSet, choices: Mapping[int, Choice], preload: Collection[str]
    ) -> None:
        self._artifacts = artifacts
        self._preload = preload
        self._declarations = {item.name: item for item in artifacts.manifest.kernels}
        # By digest: a file, and each use of it with its place in the result.
        self._files: dict[str, tuple[Payload, list[tuple[int, Binary, int, Form]]]] = {}
        self._failed = False
        place = 0
        for device, choice in choices.items():
            for binary in artifacts.manifest.binaries:
                if binary.arch == choice.arch:
                    payload = binary.payload(choice.form)
                    _, uses = self._files.setdefault(payload.sha256, (payload, []))
                    uses.append((place, binary, device, choice.form))
                    place += 1

    def run(self) -> list[tuple[int, Loaded]]:
        # Each file goes to whoever is free.
        files = iter(list(self._files.values()))
        helpers: list[Future[_Found]] = []
        with ThreadPoolExecutor(_HELPERS, "sonata-aot-load") as pool:
            try:
                with contextlib.suppress(RuntimeError):  # this process may have no more threads
                    for _ in range(_HELPERS):
                        # What the caller allows untrusted, its helpers do.
                        context = contextvars.copy_context()
                        helpers.append(pool.submit(context.run, self._take, files))
                found = self._take(files)
            except BaseException:
                self._failed = True  # so that nobody begins with another file
                raise
        for helper in helpers:
            found |= helper.result()
        return [found[place] for place in range(len(found))]

    def _take(self, files: Iterator[tuple[Payload, list[tuple[int, Binary, int, Form]]]]) -> _Found:
        found: _Found = {}
        try:
            for payload, uses in files:
                if self._failed:
                    break
                image = self._artifacts.read(payload)
                for place, binary, device, form in uses:
                    declaration = self._declarations[binary.kernel]
                    loaded = Loaded(binary, declaration, image, form, device)
                    if form == "cubin" or binary.kernel in self._preload:
                        loaded.kernel()
                    found[place] = device, loaded
        except BaseException:
            self._failed = True  # so that the other threads stop, too
            raise
        return found
