"""DLPack import and export: with numpy, with our own tensors, and with torch if it is installed."""

import gc
import sys
import weakref

import ml_dtypes
import numpy as np
import pytest

from halimede.backends.python.utils.errors import TritonModelException
from halimede.backends.python.utils.tensor import Tensor, tensor_of
from halimede.core.types import DataType
from halimede.core.types import Tensor as CoreTensor

BF16 = np.array([[1.0, -2.5, 3e38]], ml_dtypes.bfloat16)


def bf16_input(data: object = None) -> Tensor:
    return tensor_of(CoreTensor("IN", DataType.BF16, (1, 3), bytearray(BF16.tobytes()) if data is None else data))


@pytest.mark.parametrize("dtype", ["?", "u1", "u2", "u4", "u8", "i1", "i2", "i4", "i8", "f2", "f4", "f8"])
@pytest.mark.parametrize("shape", [(), (3,), (2, 3), (0, 2)])
def test_tensors_are_exchanged_with_numpy(dtype, shape):
    array = np.ones(shape, dtype)
    tensor = Tensor("T", array)
    assert tensor.__dlpack_device__() == (1, 0)
    read = np.from_dlpack(tensor)
    assert (read.dtype, read.tolist()) == (array.dtype, array.tolist())
    taken = Tensor.from_dlpack("U", array)
    assert (taken.name(), taken.as_numpy().dtype, taken.as_numpy().tolist()) == ("U", array.dtype, array.tolist())
    assert Tensor.from_dlpack("V", tensor.to_dlpack()).as_numpy().tolist() == array.tolist()


def test_memory_is_shared_in_both_directions():
    array = np.zeros(3, np.float32)
    tensor = Tensor.from_dlpack("U", Tensor("T", array))
    array[1] = 5
    assert tensor.as_numpy().tolist() == [0.0, 5.0, 0.0]
    assert tensor._core.array().tolist() == [0.0, 5.0, 0.0]


class Memory(bytearray):
    """Plain memory that can be watched."""


def test_memory_lives_as_long_as_the_last_tensor_over_it():
    memory = Memory(b"12345678" * 100)
    alive = weakref.ref(memory)
    taken = Tensor.from_dlpack("T", Tensor("T", np.frombuffer(memory, np.int64)))
    core = taken._core
    del memory, taken
    gc.collect()
    assert alive() is not None
    assert bytes(core.data) == b"12345678" * 100
    del core
    gc.collect()
    assert alive() is None


def test_unconsumed_capsule_frees_its_memory():
    memory = Memory(8)
    alive = weakref.ref(memory)
    capsule = Tensor("T", np.frombuffer(memory)).to_dlpack()
    del memory
    gc.collect()
    assert alive() is not None
    del capsule
    gc.collect()
    assert alive() is None


def test_bfloat16_keeps_its_bits_from_capsule_to_output():
    tensor = Tensor.from_dlpack("OUT", bf16_input().to_dlpack())
    assert (tensor._core.datatype, tensor._core.shape) == (DataType.BF16, (1, 3))
    assert np.frombuffer(tensor._core.data, ml_dtypes.bfloat16).tolist() == BF16[0].tolist()
    with pytest.raises(TritonModelException, match="BF16"):
        tensor.as_numpy()


def test_consumer_sees_bfloat16_as_bfloat16():
    # numpy knows no bfloat16 and says so, which it would not of 16-bit integers.
    with pytest.raises((BufferError, RuntimeError)):
        np.from_dlpack(bf16_input())


def test_read_only_memory_is_copied_for_the_consumer():
    data = b"12345678"
    read = np.from_dlpack(tensor_of(CoreTensor("IN", DataType.FP32, (2,), data)))
    assert read.tobytes() == data
    assert not np.shares_memory(read, np.frombuffer(data, np.float32))


def test_a_copy_is_made_on_request():
    array = np.zeros(3)
    copied = Tensor.from_dlpack("C", Tensor("T", array).__dlpack__(copy=True))
    array[:] = 1
    assert copied.as_numpy().tolist() == [0.0, 0.0, 0.0]
    with pytest.raises(BufferError, match=r"not on the device \(2, 0\)"):
        Tensor("T", array).__dlpack__(dl_device=(2, 0))


def test_capsules_are_used_once():
    capsule = Tensor("T", np.zeros(3)).to_dlpack()
    Tensor.from_dlpack("A", capsule)
    with pytest.raises(TritonModelException, match="DLPack capsule was used before"):
        Tensor.from_dlpack("B", capsule)


class Elsewhere:
    """A tensor on a device that nobody has."""

    def __init__(self, device_type: int) -> None:
        self.device_type = device_type

    def __dlpack_device__(self) -> tuple[int, int]:
        return (self.device_type, 0)

    def __dlpack__(self, stream: int | None = None) -> object:
        import ctypes

        capsule = np.zeros(3).__dlpack__()
        get = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.py_object, ctypes.c_char_p)(
            ("PyCapsule_GetPointer", ctypes.pythonapi)
        )
        ctypes.c_int32.from_address(get(capsule, b"dltensor") + 8).value = self.device_type
        return capsule


@pytest.mark.parametrize(
    ("source", "text"),
    [
        (5, "Provided tensor is not supported. Tensor must be a DLPack capsule or have `__dlpack__`"),
        (np.zeros((2, 3)).T, "Only contiguous DLPack tensors that are stored in C-Order are supported."),
        (np.zeros(3, np.complex64), "DLPack dtype code 5 with 64 bits and 1 lanes is not supported."),
        (Elsewhere(8), "DLPack tensor is on a device of type 8; only CPU and CUDA are supported."),
    ],
)
def test_unsupported_sources_are_refused_with_a_reason(source, text):
    with pytest.raises(TritonModelException) as caught:
        Tensor.from_dlpack("T", source)
    assert text in str(caught.value)


def test_bytes_tensor_has_no_dlpack_and_a_name_is_required():
    with pytest.raises(TritonModelException, match="DLPack does not have support for string tensors"):
        Tensor("T", np.array([b"x"], object)).to_dlpack()
    with pytest.raises(TritonModelException, match="Tensor name cannot be an empty string"):
        Tensor.from_dlpack("", np.zeros(1))
    with pytest.raises(TypeError):
        Tensor.from_dlpack(3, np.zeros(1))


def test_dimensions_of_one_may_have_any_stride():
    array = np.zeros((4, 1, 3), np.float32)[::4]
    assert Tensor.from_dlpack("T", array).shape() == [1, 1, 3]


def test_tensors_are_exchanged_with_torch():
    torch = pytest.importorskip("torch")
    for dtype in ("bool", "uint8", "int8", "int16", "int32", "int64", "float16", "float32", "float64", "bfloat16"):
        source = torch.ones((2, 3), dtype=getattr(torch, dtype))
        tensor = Tensor.from_dlpack("OUT", source)
        assert tensor.shape() == [2, 3]
        assert bytes(tensor._core.data) == source.view(torch.uint8).numpy().tobytes()
        for capsule_or_object in (tensor, tensor.to_dlpack()):
            back = torch.from_dlpack(capsule_or_object)
            assert back.dtype == source.dtype
            assert torch.equal(back, source)


def test_torch_reads_a_bfloat16_input_in_place():
    torch = pytest.importorskip("torch")
    memory = bytearray(BF16.tobytes())
    read = torch.from_dlpack(bf16_input(memory))
    assert read.dtype == torch.bfloat16
    read[0, 0] = 4
    assert np.frombuffer(memory, ml_dtypes.bfloat16)[0] == 4
    with pytest.raises(TritonModelException, match="not contiguous"):
        Tensor.from_dlpack("T", torch.zeros((2, 3), dtype=torch.bfloat16).T)


@pytest.mark.parametrize("writable", [True, False])
def test_capsule_keeps_its_tensor_alive_until_its_consumer_goes(writable):
    data = bytearray(8) if writable else bytes(8)
    tensor = tensor_of(CoreTensor("IN", DataType.FP32, (2,), data))
    before = sys.getrefcount(tensor)
    capsule = tensor.to_dlpack()
    assert sys.getrefcount(tensor) == before + 1
    taken = Tensor.from_dlpack("U", capsule)
    del capsule
    assert sys.getrefcount(tensor) == before + 1
    del taken
    assert sys.getrefcount(tensor) == before
    unused = tensor.to_dlpack()
    assert sys.getrefcount(tensor) == before + 1
    del unused
    assert sys.getrefcount(tensor) == before
