"""The one error hierarchy: every failure a user can cause or meet is a `SonataError`."""

from __future__ import annotations


class SonataError(Exception):
    """What happened and to what, followed by what to do about it.

    `what` names the file or argument and what is wrong with it; `remedy` is one instruction.
    The command line prints the message without a traceback and exits with `exit_code`.
    """

    exit_code = 1

    def __init__(self, what: str, *, remedy: str) -> None:
        """Keep both parts; `str` joins them."""
        super().__init__(what)
        self.what = what
        self.remedy = remedy

    def __str__(self) -> str:
        return f"{self.what}; {self.remedy}"

    def __reduce__(self) -> tuple[object, ...]:
        # The default would call the class without its keyword; worker processes send errors home.
        return (_rebuild, (type(self), self.what, self.remedy, self.__dict__))


def _rebuild(
    cls: type[SonataError], what: str, remedy: str, state: dict[str, object]
) -> SonataError:
    error = cls(what, remedy=remedy)
    error.__dict__.update(state)
    return error


class ArgumentError(SonataError, ValueError):
    """An argument of a call: wrong type, shape, dtype, device, stride, alignment or value."""


class UsageError(SonataError):
    """A command-line value that names nothing known (an arch, a kernel)."""

    exit_code = 2


class MissingDependency(SonataError):
    """An optional package that this call needs is not installed."""


class ArtifactsNotFound(SonataError):
    """No artifact directory where one was looked for."""


class VariantMissing(SonataError):
    """The artifacts at hand lack the kernel, the variant or the architecture that was asked for."""


class ArtifactError(SonataError):
    """An artifact directory, or a file in it, is not what it must be."""


class ManifestError(ArtifactError):
    """The manifest cannot be read, breaks its schema, or contradicts itself."""


class IntegrityError(ArtifactError):
    """A file's bytes are not those that the manifest names."""


class UntrustedPath(ArtifactError):
    """A directory that somebody other than root and the current user could have changed."""


class StoreError(SonataError):
    """Writing artifacts failed: no permission, no space, not a directory."""


class BuildError(SonataError):
    """Compiling a kernel failed, or the result broke its declaration or its budget."""


class DriverUnavailable(SonataError):
    """No usable NVIDIA driver or device on this machine."""


class DriverError(SonataError):
    """A driver call failed.

    `code` is the CUresult, `name` its symbol (CUDA_ERROR_INVALID_IMAGE) and `text` the driver's
    own sentence.
    """

    code: int = 0
    name: str = ""
    text: str = ""


class ForkedProcess(SonataError):
    """A CUDA object made before a fork was used in the child."""
