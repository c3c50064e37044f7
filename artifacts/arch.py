"""GPU architectures: how they are written, which machine code runs where, what drivers they need.

Sources for the rules: the CUDA C++ Programming Guide's sections on binary and PTX compatibility and
on architecture- and family-specific features; the CUDA toolkit release notes for driver versions.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable
from typing import Annotated

from .errors import UsageError
from .record import record
from .schema import Match

# How a manifest writes an architecture.
ArchName = Annotated[str, Match(r"sm[0-9]{2,3}[af]?")]

_FORM = re.compile(
    r"(?:sm_?)?(?:(?P<dotted>[1-9]\d?\.\d)|(?P<plain>[1-9]\d{1,2}))(?P<suffix>[af]?)", re.ASCII
)

# Jetson boards: their machine code and that of desktop GPUs never mix, whatever the numbers say.
_TEGRA = {(8, 7)}

# Shared memory that a block may have, in bytes, by architecture (CUDA C++ Programming Guide,
# "Technical Specifications per Compute Capability"), from 9.0 on with the 1 KB that the system
# takes of it. The figure in the code includes that, if the code has any static shared memory.
_SYSTEM_SHARED = 1024
SHARED_PER_BLOCK = {
    (8, 0): 163 * 1024,
    (8, 6): 99 * 1024,
    (8, 7): 163 * 1024,
    (8, 9): 99 * 1024,
    (9, 0): 228 * 1024,
    (10, 0): 228 * 1024,
    (10, 3): 228 * 1024,
    (12, 0): 100 * 1024,
    (12, 1): 100 * 1024,
}


@record
class Arch:
    """One target, such as sm86, sm90a (this exact GPU) or sm100f (its family)."""

    major: int
    minor: int
    suffix: str = ""

    @classmethod
    def parse(cls, text: str) -> Arch:
        """Read `sm86`, `sm_86`, `8.6` or `86`, with an optional `a` or `f`.

        Raises:
            UsageError: the text is none of these, or names an arch that cannot be built for.
        """
        arch = _read(text)
        if arch is None:
            raise UsageError(
                f"unknown arch {text!r}", remedy="use one of " + " ".join(a.name for a in KNOWN)
            )
        return arch

    @property
    def name(self) -> str:
        """The form stored and printed: sm86."""
        return f"sm{self.major}{self.minor}{self.suffix}"

    @property
    def compiler_name(self) -> str:
        """The form that compilers take: sm_86."""
        return f"sm_{self.major}{self.minor}{self.suffix}"

    @property
    def number(self) -> int:
        """The number in a cubin's ELF flags: 86."""
        return self.major * 10 + self.minor

    @property
    def system_shared_bytes(self) -> int:
        """Shared memory of a block that the system takes."""
        return _SYSTEM_SHARED if self.major >= 9 else 0

    @property
    def dynamic_shared_bytes(self) -> int:
        """The most dynamic shared memory that a block may have, if it has no other."""
        return SHARED_PER_BLOCK[self.major, self.minor] - self.system_shared_bytes

    def cubin_runs_on(self, device: tuple[int, int]) -> bool:
        """Whether machine code for this target runs on a device of that compute capability."""
        own = (self.major, self.minor)
        if self.suffix == "a" or own in _TEGRA or device in _TEGRA:
            return own == device
        return self.major == device[0] and self.minor <= device[1]

    def ptx_runs_on(self, device: tuple[int, int]) -> bool:
        """Whether the driver can compile this target's PTX for a device."""
        own = (self.major, self.minor)
        if self.suffix == "a":
            return own == device
        if self.suffix == "f":
            return self.major == device[0] and self.minor <= device[1]
        return own <= device

    def __lt__(self, other: Arch) -> bool:
        return (self.major, self.minor, self.suffix) < (other.major, other.minor, other.suffix)

    def __str__(self) -> str:
        return self.name


# What the pinned compiler (nvidia-cutlass-dsl 4.8.1, CUDA 12 flavour) was seen to make a cubin for.
KNOWN: tuple[Arch, ...] = tuple(
    Arch(number // 10, number % 10, suffix)
    for number, suffixes in (
        (80, ("",)),
        (86, ("",)),
        (87, ("",)),
        (89, ("",)),
        (90, ("", "a")),
        (100, ("", "a", "f")),
        (103, ("", "a", "f")),
        (120, ("", "a", "f")),
        (121, ("", "a", "f")),
    )
    for suffix in suffixes
)


@functools.lru_cache(maxsize=256)
def _read(text: str) -> Arch | None:
    """The known architecture that `text` names; the same object each time."""
    match = _FORM.fullmatch(text.strip().lower())
    if match is None:
        return None
    if match["dotted"]:
        major, minor = (int(part) for part in match["dotted"].split("."))
    else:
        major, minor = int(match["plain"][:-1]), int(match["plain"][-1])
    arch = Arch(major, minor, match["suffix"])
    return arch if arch in KNOWN else None


# First CUDA release whose driver knows the architecture at all.
_FIRST_CUDA = {
    (8, 0): (11, 0),
    (8, 6): (11, 1),
    (8, 7): (11, 4),
    (8, 9): (11, 8),
    (9, 0): (11, 8),
    (10, 0): (12, 8),
    (10, 3): (12, 9),
    (12, 0): (12, 8),
    (12, 1): (12, 9),
}

# The PTX ISA version that each CUDA release introduced. A driver reads what its own release knows.
_PTX_ISA_CUDA = {
    (7, 0): (11, 0),
    (7, 8): (11, 8),
    (8, 0): (12, 0),
    (8, 1): (12, 1),
    (8, 2): (12, 2),
    (8, 3): (12, 3),
    (8, 4): (12, 4),
    (8, 5): (12, 5),
    (8, 6): (12, 7),
    (8, 7): (12, 8),
    (8, 8): (12, 9),
    (9, 0): (13, 0),
    (9, 1): (13, 1),
    (9, 2): (13, 2),
    (9, 3): (13, 3),
    (9, 4): (13, 4),
}

CudaVersion = tuple[int, int]


def dotted(pair: tuple[int, int]) -> str:
    """A version or a compute capability as people write it: 12.9."""
    return f"{pair[0]}.{pair[1]}"


def cuda_version(number: int) -> CudaVersion:
    """A driver's own number for its version, 12090, as (12, 9)."""
    return number // 1000, number % 1000 // 10


def cubin_min_cuda(arch: Arch, compiler_major: int) -> CudaVersion:
    """Least CUDA version of a driver that loads a cubin for `arch`.

    A driver of the compiler's major version is enough (CUDA minor-version compatibility), if it
    is new enough to know the architecture.
    """
    return max((compiler_major, 0), _FIRST_CUDA[arch.major, arch.minor])


def ptx_min_cuda(isa: tuple[int, int]) -> CudaVersion:
    """Least CUDA version of a driver that compiles PTX of this ISA version."""
    later = [cuda for known, cuda in sorted(_PTX_ISA_CUDA.items()) if known >= isa]
    # An ISA newer than the table came with a toolkit at least as new as the table's last.
    return later[0] if later else max(_PTX_ISA_CUDA.values())


def parse_arch_list(text: str) -> tuple[Arch, ...]:
    """Read a TORCH_CUDA_ARCH_LIST: separated by `;`, `,` or spaces, each with an optional `+PTX`.

    PTX is always embedded beside the machine code, so `+PTX` changes nothing.

    Raises:
        UsageError: an entry that cannot be built for, also one that is only a name (`Hopper`).
    """
    entries = [entry for entry in re.split(r"[;,\s]+", text) if entry]
    return normalise(Arch.parse(re.sub(r"\+ptx$", "", entry, flags=re.I)) for entry in entries)


def normalise(archs: Iterable[Arch]) -> tuple[Arch, ...]:
    """Sorted, each once."""
    return tuple(sorted(set(archs)))
