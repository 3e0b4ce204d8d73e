"""CUDA's runtime: calls that raise errors, and memory, streams, events and graphs that are freed once.

`cuda.bindings.runtime` returns a status and values from every call. All calls of an instance are on its own thread,
which has selected its device.
"""

import ctypes
from typing import Any

import numpy as np
from numpy.typing import NDArray

from halimede.core.config.model_config import ModelPriority
from halimede.core.types import ErrorCode, InferenceError, unsupported

_LEAST_BYTES = 256
"""Blocks have at least this size, because TensorRT wants an address for an empty tensor too."""


# Errors after which CUDA refuses every further call of the process.
_FATAL = (
    "cudaErrorECCUncorrectable",
    "cudaErrorIllegalAddress",
    "cudaErrorLaunchTimeout",
    "cudaErrorAssert",
    "cudaErrorHardwareStackError",
    "cudaErrorIllegalInstruction",
    "cudaErrorMisalignedAddress",
    "cudaErrorInvalidAddressSpace",
    "cudaErrorInvalidPc",
    "cudaErrorLaunchFailure",
)


class Cuda:
    """The runtime on one device.

    `lost` is the error after which CUDA refuses all further calls, "" while there is none.
    """

    def __init__(self, cudart: Any) -> None:  # Any: cuda.bindings has no types
        self.rt = cudart
        self.lost = ""
        self._to_device = cudart.cudaMemcpyKind.cudaMemcpyHostToDevice
        self._to_host = cudart.cudaMemcpyKind.cudaMemcpyDeviceToHost

    def use(self, device: int) -> None:
        """Make this thread use the device with this CUDA number."""
        self.check(self.rt.cudaSetDevice(device), f"device {device} cannot be opened")

    def copy_in(self, device: int, host: int, size: int, stream: "Stream") -> None:
        """Begin to copy `size` bytes to the device. Pinned memory must not change before the stream is done."""
        self.check(self.rt.cudaMemcpyAsync(device, host, size, self._to_device, stream.handle), "an input")

    def copy_out(self, host: int, device: int, size: int, stream: "Stream") -> None:
        """Begin to copy `size` bytes from the device, which are there once the stream is done."""
        self.check(self.rt.cudaMemcpyAsync(host, device, size, self._to_host, stream.handle), "an output")

    def clear(self, device: int, size: int, stream: "Stream") -> None:
        """Begin to set bytes on the device to zero."""
        self.check(self.rt.cudaMemsetAsync(device, 0, size, stream.handle), "an input")

    def allocate(self, size: int, what: str) -> int:
        """The address of new device memory. UNAVAILABLE if there is not enough."""
        return int(self.check(self.rt.cudaMalloc(size), f"{size} bytes of device memory for {what}"))

    def free(self, address: int) -> None:
        self.rt.cudaFree(address)

    def allocate_pinned(self, size: int, what: str) -> int:
        """The address of new page-locked host memory, from which the device copies without the CPU."""
        return int(self.check(self.rt.cudaMallocHost(size), f"{size} bytes of pinned memory for {what}"))

    def free_pinned(self, address: int) -> None:
        self.rt.cudaFreeHost(address)

    def stream(self, priority: ModelPriority = ModelPriority.PRIORITY_DEFAULT) -> "Stream":
        least, greatest = self.check(self.rt.cudaDeviceGetStreamPriorityRange(), "the priorities of streams")
        levels = {ModelPriority.PRIORITY_MAX: greatest, ModelPriority.PRIORITY_MIN: least}
        flags = self.rt.cudaStreamNonBlocking
        made = self.check(self.rt.cudaStreamCreateWithPriority(flags, levels.get(priority, 0)), "a stream")
        return Stream(self, made)

    def event(self, *, spin: bool) -> "Event":
        """An event whose `wait` blocks the thread, or with `spin` keeps its processor busy, which is quicker."""
        flags = self.rt.cudaEventDisableTiming | (0 if spin else self.rt.cudaEventBlockingSync)
        return Event(self, self.check(self.rt.cudaEventCreateWithFlags(flags), "an event"))

    def check(self, result: tuple[Any, ...], what: str) -> Any:
        """The value of a call: its result without the status, a tuple for several. Raises with what it was for."""
        status = result[0]
        if status:
            raise self._error(status, what)
        values = result[1:]
        return values[0] if len(values) == 1 else values

    def _error(self, status: Any, what: str) -> InferenceError:
        rt = self.rt
        # Without this, the error would be returned again by a later call.
        rt.cudaGetLastError()
        is_memory = status == rt.cudaError_t.cudaErrorMemoryAllocation
        is_absent = status in (rt.cudaError_t.cudaErrorNoDevice, rt.cudaError_t.cudaErrorInsufficientDriver)
        name, text = (_decoded(get(status)) for get in (rt.cudaGetErrorName, rt.cudaGetErrorString))
        reason = f"CUDA: {what}: {text} ({name})"
        if name in _FATAL:
            self.lost = reason
        if is_absent:
            return unsupported(f"TensorRT backend supports only GPU device; {reason}")
        return InferenceError(ErrorCode.UNAVAILABLE if is_memory else ErrorCode.INTERNAL, reason)


class Stream:
    """Work of one instance, in order. `handle` is CUDA's pointer."""

    def __init__(self, cuda: Cuda, made: Any) -> None:
        self._cuda = cuda
        self._made = made
        self.handle = int(made)

    def wait(self) -> None:
        """Block until all work is done."""
        self._cuda.check(self._cuda.rt.cudaStreamSynchronize(self.handle), "the execution failed")

    def begin_recording(self) -> None:
        """Record the following work of this thread into a graph instead of doing it."""
        rt = self._cuda.rt
        mode = rt.cudaStreamCaptureMode.cudaStreamCaptureModeThreadLocal
        self._cuda.check(rt.cudaStreamBeginCapture(self.handle, mode), "a graph")

    def end_recording(self) -> "Graph":
        rt = self._cuda.rt
        recorded = self._cuda.check(rt.cudaStreamEndCapture(self.handle), "the execution cannot be recorded as a graph")
        try:
            return Graph(self._cuda, self._cuda.check(rt.cudaGraphInstantiate(recorded, 0), "a graph"))
        finally:
            rt.cudaGraphDestroy(recorded)

    def close(self) -> None:
        self._cuda.rt.cudaStreamDestroy(self.handle)


class Event:
    """A point in a stream's work."""

    def __init__(self, cuda: Cuda, made: Any) -> None:
        self._cuda = cuda
        self._made = made

    def record(self, stream: Stream) -> None:
        self._cuda.check(self._cuda.rt.cudaEventRecord(self._made, stream.handle), "an event")

    def wait(self) -> None:
        """Wait until the work before it is done. Raises what went wrong in it."""
        self._cuda.check(self._cuda.rt.cudaEventSynchronize(self._made), "the execution failed")

    def close(self) -> None:
        self._cuda.rt.cudaEventDestroy(self._made)


class Graph:
    """A recorded execution."""

    def __init__(self, cuda: Cuda, made: Any) -> None:
        self._cuda = cuda
        self._made = made

    def launch(self, stream: Stream) -> None:
        self._cuda.check(self._cuda.rt.cudaGraphLaunch(self._made, stream.handle), "a graph cannot be launched")

    def close(self) -> None:
        self._cuda.rt.cudaGraphExecDestroy(self._made)


class DeviceBlock:
    """Device memory that grows and never shrinks."""

    def __init__(self, cuda: Cuda, what: str) -> None:
        self._cuda = cuda
        self._what = what
        self.address = 0
        self.size = 0

    def fit(self, size: int) -> None:
        """Make room for `size` bytes. A larger block has a new address, and the contents are lost."""
        if self.address and size <= self.size:
            return
        self.close()
        size = max(size, _LEAST_BYTES)
        self.address = self._cuda.allocate(size, self._what)
        self.size = size

    def close(self) -> None:
        if self.address:
            self._cuda.free(self.address)
        self.address = self.size = 0


class PinnedBlock:
    """Page-locked host memory that grows and never shrinks."""

    def __init__(self, cuda: Cuda, what: str) -> None:
        self._cuda = cuda
        self._what = what
        self._bytes = np.empty(0, np.uint8)
        self.address = 0
        self.size = 0

    def fit(self, size: int) -> None:
        if self.address and size <= self.size:
            return
        self.close()
        size = max(size, _LEAST_BYTES)
        self.address = self._cuda.allocate_pinned(size, self._what)
        self.size = size
        self._bytes = np.frombuffer(memoryview((ctypes.c_uint8 * size).from_address(self.address)), np.uint8)

    def array(self, shape: tuple[int, ...], dtype: "np.dtype[Any]") -> NDArray[Any]:
        """A view of the beginning of the block, valid until it grows or is closed."""
        return np.ndarray(shape, dtype, self._bytes)

    def close(self) -> None:
        self._bytes = np.empty(0, np.uint8)
        if self.address:
            self._cuda.free_pinned(self.address)
        self.address = self.size = 0


def _decoded(result: tuple[Any, ...]) -> str:
    text = result[-1]
    return text.decode() if isinstance(text, bytes) else str(text)
