"""Tensors of models: accepted arrays, sent bytes, properties, and helper functions."""

import ml_dtypes
import numpy as np
import pytest

from halimede.backends.python.utils import module
from halimede.backends.python.utils.datatypes import (
    deserialize_bytes_tensor,
    numpy_to_triton_type,
    serialize_byte_tensor,
    triton_string_to_numpy,
    triton_to_numpy_type,
)
from halimede.backends.python.utils.errors import TritonError, TritonModelException
from halimede.backends.python.utils.response import InferenceResponse, get_output_tensor_by_name
from halimede.backends.python.utils.session import Session
from halimede.backends.python.utils.tensor import Tensor, tensor_of
from halimede.core.types import DataType
from halimede.core.types import Tensor as CoreTensor
from support.python_models import FakeHost

NUMERIC = ["?", "u1", "u2", "u4", "u8", "i1", "i2", "i4", "i8", "f2", "f4", "f8"]


def sent(array) -> CoreTensor:
    return Tensor("OUT", array)._core


@pytest.mark.parametrize("dtype", NUMERIC)
@pytest.mark.parametrize("shape", [(), (0,), (2, 0), (3,), (2, 3)])
def test_contiguous_array_is_sent_without_a_copy(dtype, shape):
    array = (np.arange(np.prod(shape, dtype=int)) % 2).astype(dtype).reshape(shape)
    core = sent(array)
    assert core.shape == shape
    assert bytes(core.data) == array.tobytes()
    assert core.array().dtype == array.dtype
    assert Tensor("OUT", array).as_numpy() is array


@pytest.mark.parametrize("number", ["longlong", "ulonglong", "long", "ulong", "intc"])
def test_all_integer_dtypes_are_supported(number):
    array = np.arange(3, dtype=number)
    assert sent(array).array().tolist() == [0, 1, 2]


@pytest.mark.parametrize(
    "array",
    [
        np.arange(6, dtype=np.int32).reshape(2, 3).T,
        np.arange(12, dtype=np.int32)[::2],
        np.arange(6, dtype=np.int32)[::-1],
        np.arange(6, dtype=">i4"),
        np.broadcast_to(np.int32(3), (2, 2)),
        np.asfortranarray(np.arange(6, dtype=np.int32).reshape(2, 3)),
        np.array(5, dtype=">i4"),
        np.arange(6, dtype=">i4")[:0],
    ],
)
def test_non_contiguous_array_is_copied_with_equal_elements(array):
    core = sent(array)
    assert core.shape == array.shape
    assert core.array().tolist() == array.tolist()


def test_memory_is_shared_and_kept_alive():
    array = np.zeros(2, np.float32)
    core = sent(array)
    array[:] = 3
    del array
    assert core.array().tolist() == [3.0, 3.0]


@pytest.mark.parametrize(
    ("array", "elements"),
    [
        (np.array([b"a\0", "é", 5, None, 1.5, bytearray(b"x"), np.bytes_(b"zz"), ""], object), [b"a\0", "é".encode(), b"5", b"None", b"1.5", b"x", b"zz", b""]),
        (np.array([[b"ab\0\0"], [b""]], "S4"), [b"ab", b""]),
        (np.array(["é", "ab"]), ["é".encode(), b"ab"]),
        (np.array([["a", "b"], ["c", "d"]], object).T, [b"a", b"c", b"b", b"d"]),
        (np.array(b"x", object), [b"x"]),
        (np.empty((0, 2), object), []),
    ],
)  # fmt: skip
def test_objects_and_strings_are_sent_as_bytes(array, elements):
    core = sent(array)
    assert (core.datatype, core.shape) == (DataType.BYTES, array.shape)
    assert core.array().reshape(-1).tolist() == elements


@pytest.mark.parametrize(
    "array",
    [
        np.zeros(1, np.complex64),
        np.zeros(1, np.longdouble),
        np.zeros(1, "M8[s]"),
        np.zeros(1, "i4,f4"),
        np.zeros(1, ml_dtypes.bfloat16),
    ],
)
def test_unsupported_dtype_is_refused_by_name(array):
    with pytest.raises(TritonModelException, match=r"^NumPy dtype is not supported. Tensor 'OUT' has "):
        Tensor("OUT", array)


def test_text_that_is_not_utf8_is_refused_by_name():
    with pytest.raises(TritonModelException, match="Tensor 'OUT' has text that UTF-8 cannot hold"):
        Tensor("OUT", np.array(["\udce9"], object))


@pytest.mark.parametrize("wrong", [[1.0], 1, None, "x", np.float32(1), np.ma.masked_array([1.0], [True])])
def test_non_array_is_a_type_error(wrong):
    # The name's value would be refused, too, but types are checked before values.
    for name in ("OUT", ""):
        with pytest.raises(TypeError):
            Tensor(name, wrong)


def test_a_tensors_name_is_a_text_and_not_empty():
    with pytest.raises(TritonModelException, match=r"^Tensor name cannot be an empty string.$"):
        Tensor("", np.zeros(1))
    with pytest.raises(TypeError, match="'name' must be str, not int"):
        Tensor(3, np.zeros(1))
    with pytest.raises(TypeError):
        Tensor(name="x", numpy_array=np.zeros(1))
    assert Tensor(b"x", np.zeros(1)).name() == "x"


def test_input_is_a_view_and_writable_if_its_memory_is():
    memory = bytearray(8)
    tensor = tensor_of(CoreTensor("IN", DataType.FP32, (2, 1), memoryview(memory)))
    array = tensor.as_numpy()
    array[0] = 1
    assert memory[:4] == np.float32(1).tobytes()
    assert tensor.as_numpy() is array
    assert not tensor_of(CoreTensor("IN", DataType.FP32, (1,), b"1234")).as_numpy().flags.writeable
    assert tensor_of(CoreTensor("IN", DataType.FP32, (2, 0), b"")).as_numpy().shape == (2, 0)
    assert (tensor.shape(), tensor.is_cpu(), tensor.triton_dtype()) == ([2, 1], True, 11)


def test_an_input_of_bytes_is_an_array_of_bytes_objects():
    array = tensor_of(CoreTensor("IN", DataType.BYTES, (2, 1), b"\1\0\0\0a\0\0\0\0")).as_numpy()
    assert array.dtype == np.object_
    assert array.tolist() == [[b"a"], [b""]]


def test_bfloat16_input_has_no_numpy_array():
    tensor = tensor_of(CoreTensor("IN", DataType.BF16, (1,), b"12"))
    with pytest.raises(TritonModelException, match="BF16 and cannot be converted to NumPy"):
        tensor.as_numpy()


def test_a_response_holds_tensors_or_an_error():
    tensor = Tensor("A", np.zeros(1))
    response = InferenceResponse((tensor, Tensor("B", np.zeros(1))))
    assert response.output_tensors()[0] is tensor
    assert (response.has_error(), response.error(), response.parameters()) == (False, None, "{}")
    assert get_output_tensor_by_name(response, "A") is tensor
    assert get_output_tensor_by_name(response, "C") is None
    error = TritonError("no", TritonError.NOT_FOUND)
    failed = InferenceResponse(error=error)
    assert (failed.has_error(), failed.error()) == (True, error)
    assert (error.message(), error.code(), TritonError("x").code()) == (
        "no",
        TritonError.NOT_FOUND,
        TritonError.INTERNAL,
    )
    assert InferenceResponse([], parameters={"a": 1, "b": "é"}).parameters() == '{"a":1,"b":"é"}'


def test_a_response_keeps_its_outputs_when_the_list_is_used_again():
    outputs = [Tensor("A", np.zeros(1))]
    response = InferenceResponse(outputs)
    outputs.clear()
    assert len(response.output_tensors()) == 1


@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        (([None],), TritonModelException, "Output tensor for inference response should not be empty."),
        ((None,), TypeError, "'output_tensors' must be a list of Tensor, not NoneType"),
        (("x",), TypeError, "'output_tensors' must be a list of Tensor, not str"),
        (([np.zeros(1)],), TypeError, r"'output_tensors\[0\]' must be Tensor, not ndarray"),
        (([], "no"), TypeError, "'error' must be TritonError, not str"),
        (([], None, 5), TypeError, "'parameters' must be dict, not int"),
        (([None], "no"), TypeError, "'error' must be TritonError, not str"),
        (([None], None, 5), TypeError, "'parameters' must be dict, not int"),
        (([None, 5],), TypeError, r"'output_tensors\[0\]' must be Tensor, not NoneType"),
        (([], None, {"a": 0.5}), TritonModelException, "Expect parameters values to have type bool/int/str, found type <class 'float'>"),
        (([], None, {1: 2}), TritonModelException, "Expect parameters keys to have type str, found type <class 'int'>"),
        (([], None, {"a": None}), TritonModelException, "Expect parameters values to have type bool/int/str, found"),
    ],
)  # fmt: skip
def test_response_refuses_invalid_arguments(arguments, error, text):
    with pytest.raises(error, match=text):
        InferenceResponse(*arguments)


@pytest.mark.parametrize("arguments", [(3,), ("m", 3), ("m", "INTERNAL"), ()])
def test_an_errors_arguments_are_checked(arguments):
    with pytest.raises(TypeError):
        TritonError(*arguments)


def test_numpy_types_have_triton_numbers_and_back():
    numbers = [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13]
    types = [triton_to_numpy_type(number) for number in numbers]
    assert types == [np.bool_, np.uint8, np.uint16, np.uint32, np.uint64, np.int8, np.int16, np.int32, np.int64, np.float16, np.float32, np.float64, np.object_]  # fmt: skip
    assert [numpy_to_triton_type(kind) for kind in types] == numbers
    assert numpy_to_triton_type(np.bytes_) == 13
    assert numpy_to_triton_type(np.dtype("int32")) == 8
    for other in (np.str_, np.complex64, bool, float, object, None, "f4", np.dtype(">i4"), 3):
        assert numpy_to_triton_type(other) is None
    assert triton_to_numpy_type(14) is None
    assert triton_string_to_numpy("TYPE_FP32") is np.float32
    assert triton_string_to_numpy("TYPE_BOOL") is bool
    assert triton_string_to_numpy("TYPE_STRING") is np.object_
    with pytest.raises(KeyError):
        triton_string_to_numpy("TYPE_BF16")


def test_bytes_elements_are_serialized_and_read_back():
    array = np.array([[b"a", "é"], [5, b""]], object)
    encoded = serialize_byte_tensor(array)
    assert encoded == b"\1\0\0\0a\2\0\0\0\xc3\xa9\1\0\0\x005\0\0\0\0"
    assert deserialize_bytes_tensor(encoded).tolist() == [b"a", "é".encode(), b"5", b""]
    assert deserialize_bytes_tensor(np.frombuffer(encoded, np.uint8)).dtype == np.object_
    assert serialize_byte_tensor(np.array([b"xy"])) == b"\2\0\0\0xy"
    assert serialize_byte_tensor(np.empty(0, object)) == ()
    assert serialize_byte_tensor(np.zeros(1)) is None
    assert deserialize_bytes_tensor(b"").tolist() == []
    with pytest.raises(ValueError, match="element 0 ends at byte 9 of 5"):
        deserialize_bytes_tensor(b"\5\0\0\0x")


def test_numbers_of_the_protocol_show_their_names():
    import sys

    module.install(Session(FakeHost(), "", False, ()))
    pb = sys.modules["triton_python_backend_utils"]
    assert [str(pb.Logger.INFO), repr(pb.MetricFamily.GAUGE)] == ["LogLevel.INFO", "<MetricKind.GAUGE: 1>"]
    assert str(pb.TRITONSERVER_MEMORY_CPU) == "MemoryType.TRITONSERVER_MEMORY_CPU"
    assert (pb.TritonError.CANCELLED, pb.TRITONSERVER_MEMORY_GPU, pb.TRITONSERVER_REQUEST_FLAG_SEQUENCE_END) == (
        7,
        0,
        2,
    )
    assert repr(pb.Tensor("x", np.zeros(1))).startswith("<c_python_backend_utils.Tensor object at ")
    with pytest.raises(TypeError):
        pb.PreferredMemory(0)
