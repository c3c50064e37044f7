"""All PTX of a directory in one compressed file, as wheels hold it.

PTX is text of which one kernel's is much like the next one's: apart they compress to a seventh,
together to a twentieth. A loader reads PTX only where no machine code fits. The file is the PTX in
the order of the manifest, each once, as an xz stream; where each begins follows from the sizes in
the manifest, and each is checked against its own digest there.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from .errors import IntegrityError, MissingDependency
from .files import read_bounded
from .manifest import MAX_OBJECT_BYTES, Manifest, Payload

PACK = "ptx.xz"
_REMEDY = "reinstall the wheel that it came with"


def pack_ptx(manifest: Manifest, read: Callable[[Payload], bytes]) -> bytes:
    """The file for the PTX of a directory; `read` gives the bytes of each."""
    import lzma

    content = b"".join(read(payload) for payload in _payloads(manifest))
    return lzma.compress(content, preset=6, check=lzma.CHECK_CRC32)


def unpack_ptx(path: Path, manifest: Manifest) -> dict[str, bytes]:
    """What is in the file, by the file names of payloads, unverified; nothing if there is none.

    Raises:
        IntegrityError: it is damaged, or not as long as the manifest's PTX.
        MissingDependency: this Python was built without lzma.
    """
    payloads = _payloads(manifest)
    size = sum(payload.size for payload in payloads)
    try:
        packed = read_bounded(path, MAX_OBJECT_BYTES)
    except FileNotFoundError:
        return {}
    except OSError as error:
        raise IntegrityError(
            f"{path} cannot be read: {error.strerror}", remedy="correct its permissions"
        ) from None
    try:
        import lzma
    except ImportError:
        raise MissingDependency(
            f"{path} cannot be read: this Python has no lzma",
            remedy="use a Python that has it, or artifacts that are not from a wheel",
        ) from None
    try:
        reader = lzma.LZMADecompressor(format=lzma.FORMAT_XZ)
        # One byte more than there may be, so that more than that is noticed.
        content = reader.decompress(packed, size + 1)
        whole = reader.eof and not reader.unused_data and len(content) == size
    except lzma.LZMAError:
        whole, content = False, b""
    if not whole:
        raise IntegrityError(f"{path} is not the PTX of the manifest beside it", remedy=_REMEDY)
    found, at = {}, 0
    for payload in payloads:
        found[payload.file_name] = content[at : at + payload.size]
        at += payload.size
    return found


def _payloads(manifest: Manifest) -> tuple[Payload, ...]:
    return tuple(dict.fromkeys(binary.ptx for binary in manifest.binaries))
