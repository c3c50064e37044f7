"""Signatures of a manifest, made and checked by OpenSSH's `ssh-keygen`, with no network.

The manifest holds the digest of every file beside it, so a signature of it is one of all of them.
"""

from __future__ import annotations

import subprocess
from pathlib import Path

from .errors import IntegrityError, MissingDependency, SonataError, StoreError
from .files import read_bounded
from .manifest import FILE_NAME, MAX_MANIFEST_BYTES
from .verify import Failed, Outcome, Passed

# A signature made for another purpose with the same key is not one of artifacts.
NAMESPACE = "sonata-aot"
_MAX_SIGNATURE = 2**20
# Seconds; a key in an agent may ask its owner.
_PATIENCE = 300


def sign(path: Path, key: Path) -> bytes:
    """The signature of a manifest; `key` is a private key, or a public one whose agent signs.

    Raises:
        MissingDependency: there is no `ssh-keygen`.
        StoreError: it failed; the message carries its own words.
    """
    done = _ssh_keygen("sign", "-f", str(key), "-n", NAMESPACE, data=path.read_bytes())
    if done.returncode != 0:
        raise StoreError(
            f"{key}: cannot sign with it: {_said(done)}",
            remedy="give an SSH key whose passphrase an agent knows, such as ssh-keygen makes",
        )
    return done.stdout


def signer(directory: Path, signature: Path, allowed_signers: Path) -> str:
    """Who signed the manifest of a directory, by the name that stands in `allowed_signers`.

    Raises:
        MissingDependency: there is no `ssh-keygen`.
        IntegrityError: the signature is of other bytes, by nobody allowed, or no signature.
        SonataError: a file cannot be read.
    """
    manifest = _read(directory / FILE_NAME, MAX_MANIFEST_BYTES)
    _read(signature, _MAX_SIGNATURE)
    _read(allowed_signers, _MAX_SIGNATURE)
    names = ("-s", str(signature), "-f", str(allowed_signers))
    found = _ssh_keygen("find-principals", *names, data=b"")
    principals = found.stdout.decode(errors="replace").splitlines()
    if found.returncode != 0 or not principals:
        raise IntegrityError(
            f"{signature} is by nobody in {allowed_signers}: {_said(found)}",
            remedy="get the signer's line of allowed_signers from a place that you trust",
        )
    # One key may stand under several names; each line's own conditions decide.
    said = ""
    for principal in principals:
        done = _ssh_keygen("verify", *names, "-I", principal, "-n", NAMESPACE, data=manifest)
        if done.returncode == 0:
            return principal
        said = _said(done)
    raise IntegrityError(
        f"{signature} is no signature of {directory / FILE_NAME}: {said}",
        remedy="get both again from whoever signed them",
    )


def check_signature(directory: Path, signature: Path, allowed_signers: Path) -> Outcome:
    """The outcome of `signer`, for `verify` to show; a signature that is wrong fails.

    Raises:
        MissingDependency: there is no `ssh-keygen`.
    """
    try:
        return Passed(f"signature by {signer(directory, signature, allowed_signers)}")
    except MissingDependency:
        raise
    except SonataError as error:
        return Failed("signature", error.what, error.remedy)


def _read(path: Path, most: int) -> bytes:
    try:
        return read_bounded(path, most)
    except OSError as error:
        raise SonataError(
            f"{path} cannot be read: {error.strerror}", remedy="name a file that is there"
        ) from None


def _ssh_keygen(action: str, *arguments: str, data: bytes) -> subprocess.CompletedProcess[bytes]:
    command = ["ssh-keygen", "-Y", action, *arguments]
    try:
        return subprocess.run(
            command, input=data, capture_output=True, check=False, timeout=_PATIENCE
        )
    except FileNotFoundError:
        raise MissingDependency(
            "ssh-keygen is not installed, which makes and checks signatures",
            remedy="install OpenSSH's client, 8.2 or newer",
        ) from None
    except (OSError, subprocess.TimeoutExpired) as error:
        raise StoreError(f"ssh-keygen failed: {error}", remedy="try it by hand") from None


def _said(done: subprocess.CompletedProcess[bytes]) -> str:
    lines = (done.stderr or done.stdout).decode(errors="replace").strip().splitlines()
    return lines[-1].strip() if lines else f"exit status {done.returncode}"
