"""Conditions at run time, and the errors that a load can find."""

import numpy as np
import pytest

from halimede.core.config.condition import parse_condition
from halimede.core.ensemble.when import MAX_TEXT_BYTES, is_met, kind_problems
from halimede.core.types import DataType, ErrorCode, InferenceError, Tensor
from halimede.core.types.tensor import join_bytes, tensor_from_array
from support.refusals import error_of

TENSORS = {
    "score": tensor_from_array("score", DataType.FP32, np.array([[0.75, 0.1]], np.float32)),
    "half": tensor_from_array("half", DataType.FP16, np.array([0.5], np.float16)),
    # 1.5 as bfloat16: the upper half of its FP32.
    "brain": Tensor("brain", DataType.BF16, (1,), b"\xc0\x3f"),
    "label": tensor_from_array("label", DataType.INT64, np.array([3, 4])),
    "big": tensor_from_array("big", DataType.UINT64, np.array([2**64 - 1], np.uint64)),
    "flag": tensor_from_array("flag", DataType.BOOL, np.array([True])),
    "name": Tensor("name", DataType.BYTES, (2,), join_bytes(["grün", "x"])),
    "nan": tensor_from_array("nan", DataType.FP64, np.array([np.nan])),
    "nothing": Tensor("nothing", DataType.FP32, (0, 4), b""),
    "no text": Tensor("no text", DataType.BYTES, (0,), b""),
    "absent": None,
}
PARAMETERS = {"lang": "de", "top": 3, "go": True, "temperature": 0.5}


def met(text: str) -> bool:
    condition = parse_condition(text)
    return is_met(condition, {name: TENSORS[name] for name in condition.tensors}, PARAMETERS)


@pytest.mark.parametrize(
    "text",
    [
        "score > 0.5",
        "score < 1",
        "half == 0.5",
        "brain == 1.5",
        "label == 3",
        "label >= 3 and label <= 3.0",
        "big == 18446744073709551615",
        "flag",
        "flag == true",
        "not flag == false",
        "name == 'grün'",
        "name < 'h'",
        "score.shape[0] == 1 and score.shape[1] == 2",
        "nothing.shape[0] == 0 and nothing.present",
        "parameters.lang == 'de'",
        "parameters.top >= label",
        "parameters.go",
        "parameters.temperature == half",
        "not absent.present",
        # An absent value equals nothing, like NaN.
        "absent != 1 and not absent == 1 and not absent > 1 and not absent <= 1",
        "nan != nan and not nan == nan and not nan > 0",
        "not absent",
        "not parameters.other and parameters.other != 'x' and not parameters.other == 'x'",
        "absent.shape[7] != 1",
        # Operands that are not needed are not evaluated.
        "flag or name > 3",
        "not (false and name > 3)",
        "not absent == 1 or nothing > 1",
    ],
)
def test_a_condition_is_met(text):
    assert met(text)
    assert not met(f"not ({text})")


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        (
            "name > 3",
            "the first element of tensor 'name' is a text and 3 is a number, which '>' does not compare",
        ),
        ("flag == 1", "the first element of tensor 'flag' is true or false and 1 is a number, which '==' does not"),
        ("flag < true", "the first element of tensor 'flag' and true are true or false, which '<' does not compare"),
        ("label", "the first element of tensor 'label' is a number, neither true nor false; compare it with something"),
        ("score.shape[0] == 'a'", "dimension 0 of tensor 'score' is a number and 'a' is a text"),
        ("score.present == 1", "'score.present' is true or false and 1 is a number"),
    ],
)
def test_kinds_that_differ_are_an_error_before_any_request_and_with_one(text, problem):
    error = error_of(met, text)
    assert error.code is ErrorCode.INVALID_ARG
    assert error.message.startswith(problem)
    datatypes = {name: tensor.datatype for name, tensor in TENSORS.items() if tensor is not None}
    assert kind_problems(parse_condition(text), datatypes) == [error.message]


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("parameters.lang == 3", "parameter 'lang' is a text and 3 is a number, which '==' does not compare"),
        ("parameters.top", "parameter 'top' is a number, neither true nor false; compare it with something"),
        ("nothing > 0", "tensor 'nothing' is empty and has no first element"),
        ("`no text` == ''", "tensor 'no text' is empty and has no first element"),
        ("score.shape[2] > 0", "tensor 'score' has 2 dimensions, none with number 2"),
    ],
)
def test_errors_that_only_a_request_can_show(text, problem):
    datatypes = {name: tensor.datatype for name, tensor in TENSORS.items() if tensor is not None}
    assert kind_problems(parse_condition(text), datatypes) == []
    assert error_of(met, text) == InferenceError(ErrorCode.INVALID_ARG, problem)


def test_a_text_is_compared_up_to_a_length():
    condition = parse_condition("x != 'a'")

    def given(size: int) -> dict[str, Tensor | None]:
        return {"x": Tensor("x", DataType.BYTES, (1,), join_bytes([b"a" * size]))}

    assert is_met(condition, given(MAX_TEXT_BYTES), {})
    with pytest.raises(InferenceError, match=f"has {MAX_TEXT_BYTES + 1} bytes, at most {MAX_TEXT_BYTES} are compared"):
        is_met(condition, given(MAX_TEXT_BYTES + 1), {})


def test_bytes_that_are_not_utf8_equal_no_text():
    tensor = Tensor("x", DataType.BYTES, (1,), join_bytes([b"\xff\xfe"]))
    assert not is_met(parse_condition("x == 'a'"), {"x": tensor}, {})
