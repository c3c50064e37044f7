"""Reads the chosen binaries, and then gives machine code to the driver, several at a time.

The caller alone reads: file after file takes less time than several at a time take to wait for one
another's GIL. The driver's part has two halves of about the same length: it takes a library apart,
any number of them at once, and it brings a kernel to the device, one at a time whoever asks. So
helpers load libraries, and the caller has their kernels brought.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from queue import Empty, SimpleQueue

from ..artifacts.choose import Choice
from ..artifacts.store import ArtifactSet
from .library import Loaded

# Threads besides the caller's.
_HELPERS = 2


def fetch(
    artifacts: ArtifactSet, choices: Mapping[int, Choice], preload: Collection[str]
) -> list[tuple[int, Loaded]]:
    """Each binary that was chosen, with its device: a device after the other, as in the manifest.

    A file is read, hashed and verified once, however many devices take it, and the driver gets none
    before all are. Machine code is in the driver then, and so is PTX of the kernels named in
    `preload`.

    Raises:
        IntegrityError: a file is missing, unreadable or not what the manifest says.
        MissingDependency: as for `ArtifactSet.read`.
        DriverError: the driver refused a binary.
        ForkedProcess: in a child of the process that loaded the driver.
    """
    declarations = {item.name: item for item in artifacts.manifest.kernels}
    images: dict[str, bytes] = {}
    found: list[tuple[int, Loaded]] = []
    eager: list[Loaded] = []
    for device, choice in choices.items():
        for binary in artifacts.manifest.binaries:
            if binary.arch != choice.arch:
                continue
            payload = binary.payload(choice.form)
            image = images.get(payload.sha256)
            if image is None:
                image = images[payload.sha256] = artifacts.read(payload)
            declaration = declarations[binary.kernel]
            loaded = Loaded(binary, declaration, image, choice.form, device)
            found.append((device, loaded))
            if choice.form == "cubin" or binary.kernel in preload:
                eager.append(loaded)
    if eager:
        _Bringing(eager).run()
    return found


class _Bringing:
    """Has kernels brought to their devices."""

    def __init__(self, kernels: list[Loaded]) -> None:
        # Each goes to whoever is free.
        self._kernels: Iterator[Loaded] = iter(kernels)
        # What helpers have loaded the library of; None from one that ends.
        self._halfway: SimpleQueue[Loaded | None] = SimpleQueue()
        self._failed = False

    def run(self) -> None:
        helpers: list[Future[None]] = []
        with ThreadPoolExecutor(_HELPERS, "sonata-aot-load") as pool:
            try:
                with contextlib.suppress(RuntimeError):  # this process may have no more threads
                    for _ in range(_HELPERS):
                        helpers.append(pool.submit(self._help))
                self._bring(len(helpers))
            except BaseException:
                self._failed = True  # so that nobody begins with another one
                raise
        for helper in helpers:
            helper.result()

    def _help(self) -> None:
        try:
            for loaded in self._kernels:
                if self._failed:
                    break
                if loaded.form == "cubin":
                    loaded.library()
                else:
                    loaded.kernel()  # compiled, by as many threads as there are
                self._halfway.put(loaded)
        except BaseException:
            self._failed = True  # so that the other threads stop, too
            raise
        finally:
            self._halfway.put(None)

    def _bring(self, helpers: int) -> None:
        """First what helpers have loaded; where there is none of it, what nobody has begun with."""
        while not self._failed:
            try:
                loaded = self._halfway.get_nowait()
            except Empty:
                loaded = next(self._kernels, None)
                if loaded is None:
                    if helpers < 1:  # one that could not be started may still be run by another
                        return
                    loaded = self._halfway.get()
            if loaded is None:
                helpers -= 1
            else:
                loaded.kernel()
