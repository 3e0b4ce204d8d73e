"""CUDA's runtime without a GPU, under the names and with the arguments of `cuda.bindings.runtime`.

It is strict where a real GPU fails silently or by chance. Work of a stream is done only when something waits for it, so a
result that is read too early is wrong, and so is a pinned input that changes too early. Device addresses cannot be read
by the host. New memory is full of 0xA5. Every handle and address is checked, and everything that was made and not freed
is counted in `live`.
"""

import os
import threading
from collections.abc import Callable
from enum import IntEnum
from itertools import count

import numpy as np


class cudaError_t(IntEnum):
    cudaSuccess = 0
    cudaErrorInvalidValue = 1
    cudaErrorMemoryAllocation = 2
    cudaErrorInsufficientDriver = 35
    cudaErrorNoDevice = 100
    cudaErrorInvalidDevice = 101
    cudaErrorInvalidResourceHandle = 400
    cudaErrorIllegalAddress = 700
    cudaErrorStreamCaptureInvalidated = 901


class cudaMemcpyKind(IntEnum):
    cudaMemcpyHostToHost = 0
    cudaMemcpyHostToDevice = 1
    cudaMemcpyDeviceToHost = 2


class cudaStreamCaptureMode(IntEnum):
    cudaStreamCaptureModeGlobal = 0
    cudaStreamCaptureModeThreadLocal = 1
    cudaStreamCaptureModeRelaxed = 2


cudaStreamNonBlocking = 1
cudaEventBlockingSync = 1
cudaEventDisableTiming = 2

OK = cudaError_t.cudaSuccess
INVALID = cudaError_t.cudaErrorInvalidValue
BAD_HANDLE = cudaError_t.cudaErrorInvalidResourceHandle
LEAST_PRIORITY, GREATEST_PRIORITY = 0, -5


class Fault(Exception):
    """A failure on the device, after which every call of the process fails."""


class Handle:
    """What `cuda.bindings` returns for a stream, an event or a graph: an object with a number."""

    def __init__(self, number: int) -> None:
        self.number = number

    def __int__(self) -> int:
        return self.number


class Stream:
    def __init__(self, device: int, priority: int) -> None:
        self.device = device
        self.priority = priority
        self.work: list[Callable[[], None]] = []
        self.recording: list[Callable[[], None]] | None = None
        self.done = 0

    def add(self, work: Callable[[], None]) -> None:
        (self.work if self.recording is None else self.recording).append(work)

    def run(self, until: int) -> None:
        while self.done < until:
            self.done += 1
            self.work[self.done - 1]()


class Machine:
    """The devices, and everything that lives on them."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.numbers = count(0x7100_0000_0000, 1 << 32)
        self.thread = threading.local()
        self.memory: dict[int, tuple[int, np.ndarray]] = {}
        self.pinned: dict[int, np.ndarray] = {}
        self.streams: dict[int, Stream] = {}
        self.events: dict[int, tuple[int, tuple[Stream, int] | None]] = {}
        self.graphs: dict[int, list[Callable[[], None]]] = {}
        self.limit_bytes = 1 << 30
        self.error = OK
        self.event_flags: list[int] = []

    @property
    def devices(self) -> int:
        return int(os.environ.get("PLAYED_GPUS", "1"))

    @property
    def device(self) -> int:
        return getattr(self.thread, "device", 0)

    @property
    def physical_device(self) -> int:
        """The number of the GPU without CUDA_VISIBLE_DEVICES, which has UUIDs like GPU-1."""
        visible = os.environ.get("CUDA_VISIBLE_DEVICES", "")
        return int(visible.split(",")[self.device].rpartition("-")[2]) if visible else self.device

    def live(self) -> dict[str, int]:
        """How many of each kind have not been freed."""
        kinds = {
            "device memory": self.memory,
            "pinned memory": self.pinned,
            "streams": self.streams,
            "events": self.events,
            "graphs": self.graphs,
        }
        return {name: len(each) for name, each in kinds.items() if each}

    def on_device(self, address: int, size: int) -> np.ndarray:
        """The bytes of device memory; Fault if they are not in one block."""
        for start, (_, block) in self.memory.items():
            if start <= address and address + size <= start + len(block):
                return block[address - start : address - start + size]
        raise Fault(f"illegal address {address:#x}, {size} bytes")

    def host(self, address: int, size: int) -> tuple[np.ndarray, bool]:
        """The bytes of host memory, and whether they are pinned."""
        import ctypes

        for start, block in self.pinned.items():
            if start <= address and address + size <= start + len(block):
                return block[address - start : address - start + size], True
        return np.frombuffer((ctypes.c_uint8 * size).from_address(address), np.uint8), False


MACHINE = Machine()


def _finish(stream: Stream, until: int) -> cudaError_t:
    try:
        stream.run(until)
    except Fault:
        MACHINE.error = cudaError_t.cudaErrorIllegalAddress
    return MACHINE.error


def cudaGetDeviceCount():
    if MACHINE.devices == 0:
        return cudaError_t.cudaErrorNoDevice, None
    return OK, MACHINE.devices


def cudaSetDevice(device):
    if MACHINE.devices == 0:
        return (cudaError_t.cudaErrorNoDevice,)
    if not 0 <= device < MACHINE.devices:
        return (cudaError_t.cudaErrorInvalidDevice,)
    MACHINE.thread.device = device
    return (MACHINE.error,)


def cudaGetLastError():
    return (OK,)


def cudaGetErrorName(error):
    return OK, error.name.encode()


def cudaGetErrorString(error):
    return OK, f"played {error.name}".encode()


def cudaMalloc(size):
    with MACHINE.lock:
        used = sum(len(block) for _, block in MACHINE.memory.values())
        if used + size > MACHINE.limit_bytes:
            return cudaError_t.cudaErrorMemoryAllocation, None
        address = next(MACHINE.numbers)
        MACHINE.memory[address] = (MACHINE.device, np.full(size, 0xA5, np.uint8))
        return OK, address


def cudaFree(devPtr):
    with MACHINE.lock:
        return (OK if MACHINE.memory.pop(devPtr, None) is not None else INVALID,)


def cudaMallocHost(size):
    with MACHINE.lock:
        block = np.full(size, 0xA5, np.uint8)
        MACHINE.pinned[block.ctypes.data] = block
        return OK, block.ctypes.data


def cudaFreeHost(ptr):
    with MACHINE.lock:
        return (OK if MACHINE.pinned.pop(ptr, None) is not None else INVALID,)


def cudaDeviceGetStreamPriorityRange():
    return OK, LEAST_PRIORITY, GREATEST_PRIORITY


def cudaStreamCreateWithPriority(flags, priority):
    assert flags == cudaStreamNonBlocking
    assert GREATEST_PRIORITY <= priority <= LEAST_PRIORITY
    with MACHINE.lock:
        number = next(MACHINE.numbers)
        MACHINE.streams[number] = Stream(MACHINE.device, priority)
        return MACHINE.error, Handle(number)


def stream_of(handle) -> Stream:
    """The stream that was made on the device of this thread."""
    stream = MACHINE.streams[int(handle)]
    assert stream.device == MACHINE.device, "the stream belongs to another device"
    return stream


def cudaStreamDestroy(stream):
    return (OK if MACHINE.streams.pop(int(stream), None) is not None else BAD_HANDLE,)


def cudaStreamSynchronize(stream):
    each = stream_of(stream)
    if each.recording is not None:
        return (cudaError_t.cudaErrorStreamCaptureInvalidated,)
    return (_finish(each, len(each.work)),)


def cudaMemcpyAsync(dst, src, count, kind, stream):
    each = stream_of(stream)
    if kind == cudaMemcpyKind.cudaMemcpyHostToDevice:
        data, is_pinned = MACHINE.host(src, count)
        # Other memory than pinned is read before the call returns.
        data = data if is_pinned else data.copy()

        def copy() -> None:
            MACHINE.on_device(dst, count)[...] = data

        each.add(copy)
        return (MACHINE.error,)
    assert kind == cudaMemcpyKind.cudaMemcpyDeviceToHost
    target, is_pinned = MACHINE.host(dst, count)

    def fetch() -> None:
        target[...] = MACHINE.on_device(src, count)

    each.add(fetch)
    return (MACHINE.error if is_pinned else _finish(each, len(each.work)),)


def cudaMemsetAsync(devPtr, value, count, stream):
    def fill() -> None:
        MACHINE.on_device(devPtr, count)[...] = value

    stream_of(stream).add(fill)
    return (MACHINE.error,)


def cudaEventCreateWithFlags(flags):
    number = next(MACHINE.numbers)
    MACHINE.events[number] = (flags, None)
    MACHINE.event_flags.append(flags)
    return MACHINE.error, Handle(number)


def cudaEventRecord(event, stream):
    flags, _ = MACHINE.events[int(event)]
    each = stream_of(stream)
    MACHINE.events[int(event)] = (flags, (each, len(each.work)))
    return (MACHINE.error,)


def cudaEventSynchronize(event):
    _, recorded = MACHINE.events[int(event)]
    return (MACHINE.error if recorded is None else _finish(*recorded),)


def cudaEventDestroy(event):
    return (OK if MACHINE.events.pop(int(event), None) is not None else BAD_HANDLE,)


def cudaStreamBeginCapture(stream, mode):
    assert isinstance(mode, cudaStreamCaptureMode)
    stream_of(stream).recording = []
    return (MACHINE.error,)


def cudaStreamEndCapture(stream):
    each = stream_of(stream)
    recorded, each.recording = each.recording, None
    if recorded is None:
        return INVALID, None
    number = next(MACHINE.numbers)
    MACHINE.graphs[number] = recorded
    return MACHINE.error, Handle(number)


def cudaGraphInstantiate(graph, flags):
    assert flags == 0
    number = next(MACHINE.numbers)
    MACHINE.graphs[number] = MACHINE.graphs[int(graph)]
    return MACHINE.error, Handle(number)


def cudaGraphLaunch(graphExec, stream):
    each = stream_of(stream)
    for work in MACHINE.graphs[int(graphExec)]:
        each.add(work)
    launches.append(int(graphExec))
    return (MACHINE.error,)


def cudaGraphDestroy(graph):
    return (OK if MACHINE.graphs.pop(int(graph), None) is not None else BAD_HANDLE,)


def cudaGraphExecDestroy(graphExec):
    return (OK if MACHINE.graphs.pop(int(graphExec), None) is not None else BAD_HANDLE,)


launches: list[int] = []
"""The graphs that were launched."""
