"""The native launcher: loads compiled kernels through the CUDA driver and launches them.

The driver (`libcuda.so.1`) is opened and initialised at the first call, never at import. Every
function releases the GIL around the driver and may be called from any thread. A device's primary
context, which torch uses as well, is retained once and kept for the life of the process; the
calling thread's current context is the same after a call as before.

Errors are those of `sonata_aot.artifacts.errors`: `DriverUnavailable`, `DriverError` (with `code`,
`name` and `text`), `ArgumentError`, and `ForkedProcess` in a child that was forked after its parent
had used any function here.
"""

from collections.abc import Callable
from typing import TypedDict, final

from torch import Tensor

from .direct import Allocation

class DriverState(TypedDict):
    available: bool
    reason: str | None
    """Why the driver is not available."""
    version: int | None
    """The newest CUDA that the driver supports: 13000 is 13.0."""
    library: str | None
    """The path that `libcuda.so.1` was loaded from."""

class Device(TypedDict):
    index: int
    name: str
    major: int
    minor: int
    multiprocessors: int
    shared_per_block_optin: int
    """The most shared memory, in bytes, that a block can have."""

class Attributes(TypedDict):
    registers: int
    local_bytes: int
    static_shared_bytes: int
    max_threads: int

def driver_state() -> DriverState:
    """Whether the driver is usable, and if not, why; never raises.

    It initialises the driver, so a process that forks workers must not call it before.
    """

def devices() -> list[Device]:
    """The devices that this process sees."""

def load(image: bytes, label: str, device: int, *, ptx: bool = False) -> Library:
    """Give the bytes of a cubin, or of PTX, to the driver of one device.

    The bytes are the caller's, neither copied nor changed on the way. `label` stands for them in
    messages. With `ptx` the error of a failed compilation holds the compiler's log.

    Libraries are never unloaded, not even when the `Library` is gone: a CUDA graph may still
    replay their kernels. Load each image once.
    """

@final
class Library:
    """An image loaded on one device."""

    def kernel(self, entry: str, shared_bytes: int = 0) -> Kernel:
        """Resolve an entry and load its code now, so that a captured launch needs no lazy load.

        `shared_bytes` is the dynamic shared memory of each of its launches.
        """

@final
class Kernel:
    """An entry of a library, with its dynamic shared memory."""

    def attributes(self) -> Attributes:
        """What the driver says about the machine code."""

    def launch(
        self,
        grid: tuple[int, int, int],
        block: tuple[int, int, int],
        stream: int,
        params: bytes,
        programmatic: bool = False,
    ) -> None:
        """Enqueue the kernel on a stream and return, without waiting for anything.

        `stream` is a handle of the library's device (`torch.cuda.Stream.cuda_stream`; 0 is the
        default stream) and `params` the packed parameter block, which is copied. With
        `programmatic` the kernel may begin before what precedes it on the stream has ended
        (programmatic dependent launch, compute capability 9.0 on): its code must wait by itself.
        """

    def is_capturing(self, stream: int) -> bool:
        """Whether a stream of the library's device is being captured into a graph."""

@final
class TensorReader:
    """Reads tensors without a call of Python for each of their properties."""

    def __init__(self, api: object, classes: tuple[type, ...]) -> None:
        """Read tensors of exactly these classes, the first of which is torch's own.

        `api` is the first one's `__dlpack_c_exchange_api__`; ValueError if it is of a version that
        is not known.
        """

    def describe(self, tensors: tuple[object, ...], gradients: bool) -> bytes | None:
        """Bytes that are the same for the same layouts, and for no others.

        A layout is shape, strides, dtype, device, and the address modulo 16 or that there is none.
        Up to 16 items, each a tensor or None. The answer is None where one is of another class, has
        no such layout or more than 8 dimensions, is a negated view, or, with `gradients`, requires
        grad.
        """

    def overlaps(self, tensors: tuple[object, ...]) -> bool:
        """Whether the last tensor overlaps another one in memory; items may be None.

        Memory counts from a tensor's first element to its last, with what strides leave out.
        """

@final
class Sequence:
    """Launches that follow one another on a stream, prepared once and issued by one call."""

    def __init__(
        self,
        launches: list[
            tuple[
                Kernel,
                tuple[int, int, int],
                tuple[int, int, int],
                bytes,
                tuple[tuple[int, int, int], ...],
                bool,
            ]
        ],
        operands: int,
    ) -> None:
        """Prepare launches of kernels of one device.

        Each is a kernel, grid, block, parameter block, patches and whether it is programmatic, as
        for `Kernel.launch`. A patch `(offset, operand, added)` puts the address of an operand, plus
        `added`, at that byte of the block.
        """

    def launch(self, stream: int, addresses: tuple[int, ...]) -> None:
        """Enqueue all of them on a stream, given an address for each operand; waits for nothing.

        A failure names the kernel; what was enqueued before it stays so.
        """

    def launch_tensors(
        self, reader: TensorReader, stream: int, tensors: tuple[object, ...]
    ) -> None:
        """The same, given operands: tensors of the reader's classes or None, of address 0."""

@final
class Torch:
    """What native calls ask of torch."""

    def __init__(
        self,
        is_grad_enabled: Callable[[], bool],
        current_stream: Callable[[int], int],
        increment_version: Callable[[tuple[Tensor, ...]], object],
        samples: tuple[object, ...] = (),
    ) -> None:
        """Ask C functions of the torch that is loaded, and these where it lacks them.

        `samples` are tensors of each plain class, by which it is found out where objects hold what
        those functions ask about; without them it is not used. Writes to them are counted.
        """

    has_handles: bool
    """Whether tensors that were seen before are compared by C functions."""

    def current_stream(self, device: int) -> int:
        """Handle of torch's current stream on a device."""

    def is_grad_enabled(self) -> bool:
        """Whether gradients are asked for on this thread."""

Planned = tuple[Sequence, Sequence, Allocation | None]
"""In order; with a first launch that may start early; and what an output is allocated as."""

_Make = Callable[[int, Allocation], Tensor | None]
_Ranges = tuple[Callable[[str], object], Callable[[], object], str]

class GemvCall:
    """Launches a GEMV: natively where plain tensors are laid out as in a call that was remembered.

    Others go to the method `_call` of the class that derives from this.
    """

    def __call__(
        self,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None = None,
        out: Tensor | None = None,
        *,
        batch_invariant: bool = False,
    ) -> Tensor: ...
    def _set_up(
        self, reader: TensorReader | None, torch: Torch, make: _Make, ranges: _Ranges | None, /
    ) -> None:
        """Have calls read, launched and allocated by these, in a profiler's ranges if given.

        `ranges` is what begins one of a name, what ends it, and the name.
        """

    def _remember(
        self,
        tensors: tuple[Tensor, Tensor, Tensor | None, Tensor | None],
        batch_invariant: bool,
        device: int,
        plan: Callable[[], Planned],
        /,
    ) -> None:
        """Launch plain tensors of such layouts so from now on; `plan` is asked if that is new."""

class BoundCall:
    """Launches a GEMV with a bound weight, as `GemvCall` does."""

    def __call__(self, x: Tensor, out: Tensor | None = None) -> Tensor: ...
    @property
    def constant(self) -> bool:
        """Whether the weight still counts as constant; once False, it stays so.

        As it ends, the method `_ended` of the class that derives from this is called.
        """

    @property
    def weight(self) -> Tensor: ...
    @property
    def bias(self) -> Tensor | None: ...
    @property
    def out(self) -> Tensor | None: ...
    @property
    def upcoming(self) -> Tensor | None: ...
    def _set_up(
        self,
        reader: TensorReader | None,
        torch: Torch,
        make: _Make,
        ranges: _Ranges | None,
        weight: Tensor,
        bias: Tensor | None,
        out: Tensor | None,
        upcoming: Tensor | None,
        constant: bool,
        /,
    ) -> None:
        """Bind these; the rest is as for `GemvCall`."""

    def _remember(
        self, x: Tensor, out: Tensor | None, device: int, plan: Callable[[], Planned], /
    ) -> None:
        """Launch plain tensors of such layouts so from now on; `plan` is asked if that is new."""

    def _may_start_early(self, stream: int, kernel: Kernel, /) -> bool:
        """Whether the kernel before on the stream cannot be writing the weight."""
