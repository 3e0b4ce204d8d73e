"""Where an instance keeps its inputs and outputs, and how they get to the device and back.

Tensors go through page-locked (pinned) host memory, which the device copies by itself, unless the configuration forbids
it or the tensor is very large. TensorRT reads and writes the values of shape tensors on the CPU: they have no device
memory at all.
"""

from math import prod
from typing import Any

import numpy as np
from numpy.typing import NDArray

from halimede.backends.tensorrt.cuda import Cuda, DeviceBlock, PinnedBlock, Stream
from halimede.backends.tensorrt.engine import Execution
from halimede.backends.tensorrt.profiles import Shape
from halimede.backends.tensorrt.signature import EngineTensor
from halimede.core.types import InferenceError

MOST_PINNED_BYTES = 64 << 20
"""Tensors above this size are copied without pinned memory, which the whole machine is short of."""


class Input:
    """One input of an instance."""

    def __init__(self, cuda: Cuda, tensor: EngineTensor, *, pinned: bool) -> None:
        self.tensor = tensor
        self._cuda = cuda
        self._dtype = tensor.datatype.dtype
        self._block = DeviceBlock(cuda, f"input '{tensor.name}'")
        self._pinned = PinnedBlock(cuda, f"input '{tensor.name}'") if pinned else None
        self._held: NDArray[Any] | None = None

    @property
    def address(self) -> int:
        return self._block.address

    def reserve(self, shape: Shape) -> None:
        """Make room for arrays of this shape."""
        size = prod(shape) * self._dtype.itemsize
        if self.tensor.on_host:
            return
        self._block.fit(size)
        if self._pinned is not None and size <= MOST_PINNED_BYTES:
            self._pinned.fit(size)

    def send(self, array: NDArray[Any], execution: Execution, stream: Stream) -> None:
        """Give the array to an execution. It must not change before the stream is done."""
        execution.shape(self.tensor.name, array.shape)
        if self.tensor.on_host:
            self._held = values = np.array(array, order="C", ndmin=1)
            execution.bind_values(self.tensor.name, _address(values))
            return
        self.copy(array, stream)
        execution.bind(self.tensor.name, self._block.address)

    def copy(self, array: NDArray[Any], stream: Stream) -> None:
        """Begin to copy the array to the device."""
        size = array.nbytes
        self._block.fit(size)
        if not size:
            return
        if self._pinned is not None and size <= MOST_PINNED_BYTES:
            self._pinned.fit(size)
            # The array may be a view at any offset of a message.
            self._pinned.array(array.shape, self._dtype)[...] = array
            host = self._pinned.address
        else:
            self._held = np.ascontiguousarray(array)
            host = _address(self._held)
        self._cuda.copy_in(self._block.address, host, size, stream)

    def clear_after(self, used: int, size: int, stream: Stream) -> None:
        """Set the bytes from `used` to `size` on the device to zero."""
        if used < size:
            self._cuda.clear(self._block.address + used, size - used, stream)

    def close(self) -> None:
        self._held = None
        self._block.close()
        if self._pinned is not None:
            self._pinned.close()


class Output:
    """One output of an instance."""

    def __init__(self, cuda: Cuda, tensor: EngineTensor, trt: Any, *, pinned: bool) -> None:
        self.tensor = tensor
        self._cuda = cuda
        self._trt = trt
        self._dtype = tensor.datatype.dtype
        self._block = DeviceBlock(cuda, f"output '{tensor.name}'")
        self._pinned = PinnedBlock(cuda, f"output '{tensor.name}'") if pinned else None
        self._allocator: Any = None
        self._held: NDArray[Any] = np.empty(0, self._dtype)
        self._is_staged = False

    @property
    def has_open_size(self) -> bool:
        """Whether the output's size is known only after its computation."""
        return self._allocator is not None

    def prepare(self, execution: Execution) -> bool:
        """Make room for the output of an execution whose inputs are set. Returns whether its memory has moved."""
        name = self.tensor.name
        shape = execution.output_shape(name)
        if self.tensor.on_host:
            self._held = np.empty(shape, self._dtype) if shape else np.empty(1, self._dtype)
            execution.bind_values(name, _address(self._held))
            return False
        if -1 in shape:
            if self._allocator is None:
                self._allocator = make_allocator(self._trt, self._block)
            self._allocator.error = None
            execution.allocate_by(name, self._allocator)
            return False
        before = self._block.address
        self.reserve(shape)
        execution.bind(name, self._block.address)
        return before not in (0, self._block.address)

    def reserve(self, shape: Shape) -> None:
        size = prod(shape) * self._dtype.itemsize
        self._block.fit(size)
        if self._pinned is not None and size <= MOST_PINNED_BYTES:
            self._pinned.fit(size)

    def fetch(self, shape: Shape, stream: Stream) -> None:
        """Begin to copy the beginning of the output, which has this shape, to the host."""
        if self.tensor.on_host:
            return
        size = prod(shape) * self._dtype.itemsize
        self._is_staged = self._pinned is not None and size <= MOST_PINNED_BYTES
        if self._pinned is not None and self._is_staged:
            self._pinned.fit(size)
            self._held = self._pinned.array(shape, self._dtype)
            host = self._pinned.address
        else:
            self._held = np.empty(shape, self._dtype)
            host = _address(self._held)
        if size:
            self._cuda.copy_out(host, self._block.address, size, stream)

    def take(self, shape: Shape) -> NDArray[Any]:
        """The output, once the stream is done; the instance keeps no reference to its memory."""
        held, self._held = self._held, np.empty(0, self._dtype)
        return held.copy() if self._is_staged else held.reshape(shape)

    def computed_shape(self, execution: Execution) -> Shape:
        """The shape after the execution has started."""
        if self._allocator is None:
            return execution.output_shape(self.tensor.name)
        if self._allocator.error is not None:
            raise self._allocator.error
        shape: Shape = self._allocator.shape
        return shape

    def close(self) -> None:
        self._held = np.empty(0, self._dtype)
        self._block.close()
        if self._pinned is not None:
            self._pinned.close()


def make_allocator(trt: Any, block: DeviceBlock) -> Any:
    """An output allocator of TensorRT over the block. After an execution it has the output's `shape`, or an `error`."""

    class Allocator(trt.IOutputAllocator):  # type: ignore[misc,name-defined,unused-ignore]  # no types
        def __init__(self) -> None:
            trt.IOutputAllocator.__init__(self)
            self.shape: Shape = ()
            self.error: InferenceError | None = None

        def reallocate_output(self, tensor_name: str, memory: int, size: int, alignment: int) -> int:  # noqa: ARG002
            self.error = None
            try:
                block.fit(size)
            except InferenceError as error:
                # An exception cannot pass through TensorRT; the address 0 makes it fail.
                self.error = error
                return 0
            return block.address

        def reallocate_output_async(
            self, tensor_name: str, memory: int, size: int, alignment: int, stream: int  # noqa: ARG002
        ) -> int:  # fmt: skip
            return self.reallocate_output(tensor_name, memory, size, alignment)

        def notify_shape(self, tensor_name: str, shape: Any) -> None:  # noqa: ARG002
            self.shape = tuple(shape)

    return Allocator()


def _address(array: NDArray[Any]) -> int:
    address: int = array.__array_interface__["data"][0]
    return address
