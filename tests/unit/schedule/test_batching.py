import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from halimede.core.config.check_request import FRAMED_AT_ONCE
from halimede.core.schedule.batching import check_reply, gather, scatter, wanted_outputs
from halimede.core.types import DataType, ErrorCode, InferenceError, Tensor
from halimede.core.types.tensor import concatenate, join_bytes, tensor_from_array
from support.refusals import error_of

FP32, INT32, BYTES = DataType.FP32, DataType.INT32, DataType.BYTES
FIXED = [datatype for datatype in DataType if datatype.itemsize]
SAMPLES = {"OUT": FP32, "IDS": INT32, "TEXT": BYTES}


def floats(name: str, *rows: list[float]) -> Tensor:
    return tensor_from_array(name, FP32, np.array(rows, dtype=np.float32))


def texts(name: str, *rows: list[bytes]) -> Tensor:
    return tensor_from_array(name, BYTES, np.array(rows, dtype=object))


def lists(arrays):
    return {name: array.tolist() for name, array in arrays.items()}


def address(array) -> int:
    return array.__array_interface__["data"][0]


def raised(work) -> InferenceError:
    error = error_of(work)
    assert error.code is ErrorCode.INTERNAL
    return error


def test_one_request_is_gathered_as_a_view_of_its_own_bytes():
    tensor = floats("x", [1, 2], [3, 4])
    arrays = gather([[tensor]])
    assert arrays["x"].tolist() == [[1, 2], [3, 4]]
    assert address(arrays["x"]) == address(np.frombuffer(tensor.data, np.uint8))


def test_the_rows_of_several_requests_follow_one_another_by_input_name():
    a = [floats("x", [1, 2]), texts("t", [b"a"])]
    b = [texts("t", [b""], [b"c\0"]), floats("x", [3, 4], [5, 6])]
    assert lists(gather([a, b])) == {"x": [[1, 2], [3, 4], [5, 6]], "t": [[b"a"], [b""], [b"c\0"]]}


def test_an_optional_input_that_no_request_has_is_absent():
    assert lists(gather([[floats("x", [1])], [floats("x", [2])]])) == {"x": [[1], [2]]}


@pytest.mark.parametrize(
    ("a", "b", "text"),
    [
        ([floats("x", [1])], [floats("x", [1]), floats("y", [1])], "inputs ['x'] and ['x', 'y'] cannot share a batch"),
        ([floats("x", [1])], [floats("y", [1])], "with and without input 'x' cannot share a batch"),
        ([floats("x", [1])], [floats("x", [1, 2])], "<Tensor x FP32[1, 1]> and <Tensor x FP32[1, 2]> cannot share"),
    ],
)
def test_requests_that_do_not_fit_together_are_refused_by_name(a, b, text):
    assert text in raised(lambda: gather([a, b])).message


def test_a_batch_computes_all_requested_outputs_in_configured_order():
    assert wanted_outputs(SAMPLES, [("TEXT",), ("OUT",)]) == ("OUT", "TEXT")
    assert wanted_outputs(SAMPLES, [("TEXT",), ()]) == ("OUT", "IDS", "TEXT")


def test_each_request_gets_its_own_rows_of_the_outputs_it_wants():
    outputs = {
        "TEXT": np.array([["a"], [b"b"], ["ü"]], dtype=object),
        "OUT": np.array([[1.0], [2.0], [3.0]], dtype=np.float32),
        "IDS": np.array([7, 8, 9], dtype=np.int32),
    }
    assert scatter(outputs, SAMPLES, [2, 1], [("TEXT", "OUT"), ()]) == [
        [floats("OUT", [1], [2]), texts("TEXT", [b"a"], [b"b"])],
        [
            floats("OUT", [3]),
            Tensor("IDS", INT32, (1,), np.array([9], np.int32).data.cast("B")),
            texts("TEXT", ["ü".encode()]),
        ],
    ]


def test_scattered_rows_are_slices_of_the_models_own_array():
    array = np.arange(6, dtype=np.float32).reshape(3, 2)
    (first,), (second,) = scatter({"OUT": array}, {"OUT": FP32}, [1, 2], [(), ()])
    assert [address(np.frombuffer(t.data, np.uint8)) - address(array) for t in (first, second)] == [0, 8]
    assert (first.shape, second.shape) == ((1, 2), (2, 2))


def test_a_model_that_does_not_batch_keeps_the_shape_it_returned():
    scalar = np.array(2.5, dtype=np.float32)
    assert scatter({"OUT": scalar}, {"OUT": FP32}, None, [()]) == [
        [Tensor("OUT", FP32, (), np.float32([2.5]).data.cast("B"))]
    ]


def test_an_output_that_is_not_contiguous_is_sent_right():
    array = np.arange(12, dtype=np.float32).reshape(4, 3)[::2, ::-1]
    (first,), (second,) = scatter({"OUT": array}, {"OUT": FP32}, [1, 1], [(), ()])
    assert (first.array().tolist(), second.array().tolist()) == ([[2, 1, 0]], [[8, 7, 6]])


@pytest.mark.parametrize(
    ("array", "text"),
    [
        (None, "output 'OUT': the model returned nothing, not an array"),
        ([1.0], "output 'OUT': the model returned a list, not an array"),
        (np.zeros((3, 1)), "output 'OUT': the model returned float64, but the configuration says TYPE_FP32 (float32)"),
        (np.zeros((3, 1), dtype=">f4"), "output 'OUT': the model returned >f4, but"),
        (np.array([[1.0]] * 3, dtype=object), "output 'OUT': the model returned object, but"),
        (np.zeros((2, 1), np.float32), "returned shape [2,1] for a batch of 3 rows; its first dimension must be 3"),
        (np.array(1, dtype=np.float32), "output 'OUT': the model returned shape [] for a batch of 3 rows"),
    ],
)
def test_an_output_that_does_not_fit_is_named(array, text):
    outputs = {} if array is None else {"OUT": array}
    assert text in raised(lambda: scatter(outputs, {"OUT": FP32}, [1, 2], [(), ()])).message


@pytest.mark.parametrize(
    ("element", "text"),
    [
        (5, "output 'TEXT': element 1 is a int; a TYPE_STRING output has bytes or str"),
        (None, "output 'TEXT': element 1 is a NoneType; a TYPE_STRING output has bytes or str"),
        ("\ud800", "output 'TEXT': an element is not text that UTF-8 can encode: surrogates not allowed"),
    ],
)
def test_a_string_output_holds_strings_only(element, text):
    outputs = {"TEXT": np.array([b"fine", element], dtype=object)}
    assert raised(lambda: scatter(outputs, {"TEXT": BYTES}, [2], [()])).message == text


def test_a_reply_is_cut_to_the_wanted_outputs_in_the_models_order():
    reply = [texts("TEXT", [b"a"]), floats("OUT", [1])]
    assert check_reply(reply, SAMPLES, (), None) == reply
    assert check_reply(reply, SAMPLES, ("TEXT", "IDS"), None) == [reply[0]]


@pytest.mark.parametrize(
    ("reply", "text"),
    [
        ([floats("NO", [1])], "unexpected inference output 'NO'; the model has OUT, IDS, TEXT"),
        ([floats("OUT", [1]), floats("OUT", [1])], "output 'OUT': the model sent it twice in one answer"),
        ([floats("IDS", [1])], "output 'IDS': the model sent FP32, but the configuration says TYPE_INT32"),
        ([Tensor("OUT", FP32, (2,), b"1234")], "output 'OUT': the model sent 4 bytes; FP32 of shape [2] has 8"),
        ([Tensor("OUT", FP32, (-1, -1), b"1234")], "output 'OUT': shape [-1,-1] has a negative dimension"),
        ([Tensor("TEXT", BYTES, (2,), join_bytes([b"a"]))], "sent 5 bytes that are not the 2 elements of shape [2]"),
        ([Tensor("TEXT", BYTES, (1,), b"\x09\0\0\0a")], "sent 5 bytes that are not the 1 elements of shape [1]"),
    ],
)
def test_a_reply_that_does_not_fit_is_named(reply, text):
    assert text in raised(lambda: check_reply(reply, SAMPLES, (), None)).message


def test_only_the_minimum_length_of_very_many_strings_is_checked():
    """Walking them would block the event loop for seconds."""
    few, many = FRAMED_AT_ONCE, FRAMED_AT_ONCE + 1
    broken = b"\xff" * 4
    assert raised(lambda: check_reply([Tensor("TEXT", BYTES, (few,), broken * few)], SAMPLES, (), None))
    reply = [Tensor("TEXT", BYTES, (many,), broken * many)]
    assert check_reply(reply, SAMPLES, (), None) == reply
    short = [Tensor("TEXT", BYTES, (many,), bytes(4 * many - 1))]
    assert f"not the {many} elements" in raised(lambda: check_reply(short, SAMPLES, (), None)).message


@st.composite
def batches(draw) -> list[Tensor]:
    datatype = draw(st.sampled_from([*FIXED, BYTES]))
    tail = tuple(draw(st.lists(st.integers(0, 3), max_size=2)))
    tensors = []
    for rows in draw(st.lists(st.integers(0, 3), min_size=1, max_size=4)):
        count = int(np.prod((rows, *tail)))
        if datatype is BYTES:
            data = join_bytes(draw(st.lists(st.binary(max_size=3), min_size=count, max_size=count)))
        else:
            size = count * datatype.itemsize
            data = draw(st.binary(min_size=size, max_size=size))
        tensors.append(Tensor("x", datatype, (rows, *tail), data))
    return tensors


@given(batches())
def test_scatter_after_gather_returns_the_bytes_of_each_request(tensors):
    arrays = gather([[tensor] for tensor in tensors])
    rows = [tensor.shape[0] for tensor in tensors]
    replies = scatter(arrays, {"x": tensors[0].datatype}, rows, [()] * len(tensors))
    got = [(t.name, t.datatype, t.shape, bytes(t.data)) for (t,) in replies]
    assert got == [(t.name, t.datatype, t.shape, t.data) for t in tensors]


@given(
    st.sampled_from(["?", "u1", "<i4", "<f4", ">f4", "<f8", "O", "S3", "U2", "c8", "M8[s]"]),
    st.lists(st.integers(0, 4), max_size=3),
    st.sampled_from([*FIXED, BYTES]),
    st.booleans(),
)
def test_any_output_of_a_model_is_answered_or_refused_by_name(dtype, shape, datatype, transposed):
    array = np.zeros(shape, dtype=dtype)
    array = array.T if transposed else array
    try:
        replies = scatter({"y": array}, {"y": datatype}, [1, 2], [(), ()])
    except InferenceError as error:
        refusal = (error.code, error.message.split(":")[0])
    else:
        refusal = None
    if refusal is not None:
        assert refusal == (ErrorCode.INTERNAL, "output 'y'")
        return
    for (tensor,), rows in zip(replies, (1, 2), strict=True):
        assert tensor.shape == (rows, *array.shape[1:])
        assert tensor.array().shape == tensor.shape


def test_long_parts_are_joined_as_short_ones_are():
    for size in (0, 3, 300_000):
        whole = bytes(range(256)) * (size // 256) + bytes(size % 256)
        parts = [whole, memoryview(bytearray(whole)), b""]
        assert bytes(concatenate(parts)) == whole + whole


def test_a_reply_has_as_many_rows_as_its_request() -> None:
    reply = [samples := tensor_from_array("IDS", SAMPLES["IDS"], np.zeros((2, 3), SAMPLES["IDS"].dtype))]
    assert check_reply(reply, SAMPLES, (), 2) == [samples]
    text = raised(lambda: check_reply(reply, SAMPLES, (), 1)).message
    assert text.startswith("output 'IDS': the model sent shape [2,3] for a request of 1 rows")
