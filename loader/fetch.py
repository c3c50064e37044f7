"""Reads the chosen binaries and gives machine code to the driver, several at a time.

Most of that is waiting for the disk, a hash or the GPU, and leaves the GIL to others. The driver's
part has two halves of about the same length: it takes a library apart, any number of them at once,
and it brings a kernel to the device, one at a time whoever asks. So helpers read files and load
libraries, and the caller has their kernels brought, and does as they do while there are none.
"""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Collection, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from queue import Empty, SimpleQueue

from ..artifacts.choose import Choice
from ..artifacts.manifest import Binary, Form, Payload
from ..artifacts.store import ArtifactSet
from .library import Loaded

# Threads besides the caller's. In five fresh processes each, in turn, load() of the 156 files for
# an H200 took 22 to 28 ms with 2, 23 to 30 with 3, 23 to 37 with 1, and 25 to 34 with 5.
_HELPERS = 2
# A file, and each use of it with its place in the result.
_File = tuple[Payload, list[tuple[int, Binary, int, Form]]]


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
        # By place in the result: a device and what is loaded on it.
        self._found: dict[int, tuple[int, Loaded]] = {}
        # What the driver has the library of, but not yet the kernel; None from a helper that ends.
        self._halfway: SimpleQueue[Loaded | None] = SimpleQueue()
        # What ended a thread: nobody begins with another file then.
        self._error: BaseException | None = None
        files: dict[str, _File] = {}
        place = 0
        for device, choice in choices.items():
            for binary in artifacts.manifest.binaries:
                if binary.arch == choice.arch:
                    payload = binary.payload(choice.form)
                    _, uses = files.setdefault(payload.sha256, (payload, []))
                    uses.append((place, binary, device, choice.form))
                    place += 1
        self._places = place
        # Each file goes to whoever is free.
        self._files: Iterator[_File] = iter(list(files.values()))

    def run(self) -> list[tuple[int, Loaded]]:
        helpers = 0
        with ThreadPoolExecutor(_HELPERS, "sonata-aot-load") as pool:
            try:
                with contextlib.suppress(RuntimeError):  # this process may have no more threads
                    for _ in range(_HELPERS):
                        # What the caller allows untrusted, its helpers do.
                        pool.submit(contextvars.copy_context().run, self._help)
                        helpers += 1
                self._finish(helpers)
            except BaseException as error:
                self._error = error
                raise
        if self._error is not None:
            raise self._error
        # A helper may have begun though it was said that it could not be started.
        self._finish(0)
        return [self._found[place] for place in range(self._places)]

    def _help(self) -> None:
        try:
            for file in self._files:
                if self._error is not None:
                    break
                self._read(file)
        except BaseException as error:
            self._error = error
        finally:
            self._halfway.put(None)

    def _read(self, file: _File) -> None:
        payload, uses = file
        image = self._artifacts.read(payload)
        for place, binary, device, form in uses:
            declaration = self._declarations[binary.kernel]
            loaded = Loaded(binary, declaration, image, form, device)
            self._found[place] = device, loaded
            if form == "cubin":
                loaded.library()
                self._halfway.put(loaded)
            elif binary.kernel in self._preload:
                loaded.kernel()  # compiled, by as many threads as there are

    def _finish(self, helpers: int) -> None:
        """Resolve kernels as helpers load their libraries; read files as long as there are none."""
        while self._error is None:
            try:
                loaded = self._halfway.get_nowait()
            except Empty:
                file = next(self._files, None)
                if file is not None:
                    self._read(file)
                    continue
                if helpers < 1:  # below 0 where one has ended that was not counted
                    return
                loaded = self._halfway.get()
            if loaded is None:
                helpers -= 1
            else:
                loaded.kernel()
