"""The native launcher: loads compiled kernels through the CUDA driver and launches them.

The driver (`libcuda.so.1`) is opened and initialised at the first call, never at import. Every
function releases the GIL around the driver and may be called from any thread. A device's primary
context, which torch uses as well, is retained once and kept for the life of the process; the
calling thread's current context is the same after a call as before.

Errors are those of `sonata_aot.artifacts.errors`: `DriverUnavailable`, `DriverError` (with `code`,
`name` and `text`), `ArgumentError`, and `ForkedProcess` in a child that was forked after its parent
had used any function here.
"""

from typing import TypedDict, final

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
