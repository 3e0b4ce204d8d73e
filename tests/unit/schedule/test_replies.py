"""Answers of worker processes that differ from the configuration: sent with one warning, or refused."""

import pytest

from halimede.core.config.read import read_config
from halimede.core.schedule.replies import ReplyChecker
from halimede.core.types import DataType, ErrorCode, InferenceError, Tensor
from halimede.core.types.tensor import join_bytes
from support.refusals import error_of

CONFIG = """
max_batch_size: {rows}
output [
  {{ name: "OUT" data_type: TYPE_INT32 dims: [ -1, 2 ] }},
  {{ name: "TEXT" data_type: TYPE_STRING dims: [ 1 ] }},
  {{ name: "FLAT" data_type: TYPE_INT32 dims: [ 4 ] reshape {{ shape: [ 2, 2 ] }} }}
]
"""


def checker(*, strict: bool = False, rows: int = 8) -> ReplyChecker:
    return ReplyChecker(read_config("config.pbtxt", CONFIG.format(rows=rows)).config, is_strict=strict)


def ints(*shape: int, name: str = "OUT", datatype: DataType = DataType.INT32) -> Tensor:
    count = 1
    for dim in shape:
        count *= dim
    return Tensor(name, datatype, shape, bytes(count * datatype.itemsize))


FITTING = [
    ints(1, 3, 2),
    ints(1, 0, 2),
    ints(1, 2, 2, name="FLAT"),
    Tensor("TEXT", DataType.BYTES, (1, 1), join_bytes([b"a"])),
]

DIFFERING = [
    (
        ints(1, 3, 2, datatype=DataType.INT64),
        "output 'OUT': the model sent INT64, but the configuration says TYPE_INT32",
    ),
    (ints(1, 3, 3), "output 'OUT': the model sent shape [1,3,3], but the configuration says [-1,-1,2]"),
    (ints(3, 2), "output 'OUT': the model sent shape [3,2], but the configuration says [-1,-1,2]"),
    (ints(), "output 'OUT': the model sent shape [], but the configuration says [-1,-1,2]"),
    (ints(1, 4, name="FLAT"), "output 'FLAT': the model sent shape [1,4], but the configuration says [-1,2,2]"),
    (
        ints(2, 3, 2),
        "output 'OUT': the model sent shape [2,3,2] for a request of 1 rows; its first dimension must be 1",
    ),
    (ints(1, 1, name="TEXT"), "output 'TEXT': the model sent INT32, but the configuration says TYPE_STRING"),
]


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("tensor", FITTING)
def test_fitting_output_passes_without_a_warning(tensor, strict):
    of = checker(strict=strict)
    for _ in range(2):
        assert of.check([tensor], (), 1) == [tensor]
    assert of.warnings == []


@pytest.mark.parametrize(("tensor", "text"), DIFFERING)
def test_differing_output_is_sent_and_warned_of_once(tensor, text):
    of = checker()
    for _ in range(3):
        assert of.check([tensor], (), 1) == [tensor]
    assert of.warnings == [f"{text}; it is sent unchanged"]


@pytest.mark.parametrize(("tensor", "text"), DIFFERING)
def test_strict_checker_refuses_a_differing_output_each_time(tensor, text):
    of = checker(strict=True)
    for _ in range(2):
        error = error_of(of.check, [tensor], (), 1)
        assert (error.code, error.message) == (ErrorCode.INTERNAL, text)
    assert of.warnings == []


def test_each_difference_of_an_output_has_its_own_warning():
    of = checker()
    of.check([ints(1, 3, 3, datatype=DataType.INT64)], (), 1)
    of.check([ints(1, 3, 4, datatype=DataType.INT16)], (), 1)
    of.check([ints(1, 4, name="FLAT")], (), 1)
    assert [text.split(", but")[0] for text in of.warnings] == [
        "output 'OUT': the model sent INT64",
        "output 'OUT': the model sent shape [1,3,3]",
        "output 'FLAT': the model sent shape [1,4]",
    ]


def test_a_cached_check_is_repeated_for_other_bytes_rows_and_outputs():
    of = checker(strict=True)
    tensor = ints(1, 3, 2)
    assert of.check([tensor], (), 1) == [tensor]
    assert of.check([tensor], ("TEXT",), 1) == []
    with pytest.raises(InferenceError, match="for a request of 2 rows"):
        of.check([tensor], (), 2)
    with pytest.raises(InferenceError, match="the model sent 3 bytes"):
        of.check([Tensor("OUT", DataType.INT32, (1, 3, 2), b"abc")], (), 1)


def test_rows_of_a_decoupled_model_and_shapes_without_batching_are_free():
    assert checker(strict=True).check([ints(5, 3, 2)], (), None) == [ints(5, 3, 2)]
    assert checker(strict=True, rows=0).check([ints(3, 2)], (), None) == [ints(3, 2)]


@pytest.mark.parametrize(
    ("tensors", "text"),
    [
        ([ints(1, 3, 2)] * 2, "output 'OUT': the model sent it twice in one answer"),
        ([ints(1, name="NO")], "unexpected inference output 'NO'; the model has OUT, TEXT, FLAT"),
        (
            [Tensor("OUT", DataType.INT64, (1,), b"1234")],
            "output 'OUT': the model sent 4 bytes; INT64 of shape [1] has 8",
        ),
        (
            [Tensor("OUT", DataType.BYTES, (1,), b"1234")],
            "output 'OUT': the model sent 4 bytes that are not the 1 elements of shape [1]",
        ),
        ([Tensor("OUT", DataType.INT32, (-1, -1), b"1234")], "output 'OUT': shape [-1,-1] has a negative dimension"),
    ],
)
def test_answer_that_no_client_could_read_is_always_refused(tensors, text):
    of = checker()
    for _ in range(2):
        assert error_of(of.check, tensors, (), 1).message == text
