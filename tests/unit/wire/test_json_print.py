"""Tensors are printed as JSON arrays, in steps."""

import json
import math
from typing import Any

import numpy as np
import pytest

from halimede.core.types import DataType, ErrorCode, InferenceError, Tensor
from halimede.core.types.tensor import join_bytes, tensor_from_array
from halimede.core.wire.json_print import LONG_STRING_BYTES, PRINT_ELEMENTS, print_steps
from halimede.core.wire.steps import run
from support.refusals import error_of


def invalid(text: str) -> InferenceError:
    return InferenceError(ErrorCode.INVALID_ARG, text)


def printed(datatype: DataType, values: Any) -> str:
    tensor = tensor_from_array("y", datatype, np.array(values, datatype.dtype))
    return b"".join(run(print_steps(tensor))).decode()


def test_floats_are_printed_as_doubles() -> None:
    assert printed(DataType.FP32, [[0.1, 1], [-0.0, 16777216]]) == "[0.10000000149011612,1.0,-0.0,16777216.0]"
    assert printed(DataType.FP64, [0.1, -2]) == "[0.1,-2.0]"


def test_nan_and_infinity_are_printed_as_triton_prints_them() -> None:
    assert printed(DataType.FP32, [math.inf, math.nan, 0, -math.inf]) == "[Infinity,NaN,0.0,-Infinity]"
    assert printed(DataType.FP64, [math.nan]) == "[NaN]"


def test_integers_booleans_and_nothing() -> None:
    assert printed(DataType.UINT64, [2**64 - 1, 0]) == "[18446744073709551615,0]"
    assert printed(DataType.INT8, [[-128], [127]]) == "[-128,127]"
    assert printed(DataType.BOOL, [True, False]) == "[true,false]"
    assert printed(DataType.FP32, np.zeros((0, 4))) == "[]"
    assert printed(DataType.BYTES, np.zeros(0)) == "[]"
    assert printed(DataType.INT32, 5) == "[5]"


def test_a_tensor_at_any_offset_is_printed() -> None:
    data = memoryview(b"xyz" + np.array([1, -2], "<i4").tobytes())[3:]
    assert run(print_steps(Tensor("y", DataType.INT32, (2,), data))) == [b"[1,-2]"]


def test_strings_are_escaped_and_nul_is_kept() -> None:
    tensor = Tensor("y", DataType.BYTES, (4,), join_bytes(["a\0b", 'q"\\', "é", ""]))
    assert b"".join(run(print_steps(tensor))).decode() == '["a\\u0000b","q\\"\\\\","é",""]'


@pytest.mark.parametrize("element", [b"\xff", b"x" * (LONG_STRING_BYTES * 2) + b"\xc3", b"\xed\xa0\x80"])
def test_strings_that_are_not_utf8_must_be_requested_as_binary(element: bytes) -> None:
    assert error_of(run, print_steps(Tensor("y", DataType.BYTES, (2,), join_bytes([b"ok", element])))) == invalid(
        "output 'y' has an element that is not UTF-8 and cannot be sent via JSON, ask for it as binary data"
    )


def test_strings_of_a_broken_layout_are_the_models_fault() -> None:
    error = error_of(run, print_steps(Tensor("y", DataType.BYTES, (2,), join_bytes(["ok"]) + b"\x09\0\0\0a")))
    assert error.code is ErrorCode.INTERNAL
    assert error.message == "output 'y' is broken: an element at byte 6 ends at byte 19 of 11"


def test_large_outputs_are_printed_in_steps() -> None:
    values = np.arange(PRINT_ELEMENTS * 2 + 1, dtype="<i4")
    steps = print_steps(tensor_from_array("y", DataType.INT32, values))
    assert sum(1 for _ in steps) >= 2
    chunks = run(print_steps(tensor_from_array("y", DataType.INT32, values)))
    assert json.loads(b"".join(chunks)) == values.tolist()


@pytest.mark.parametrize(
    "values",
    [
        ["a" * 10] * 20_000,
        ["€" * LONG_STRING_BYTES],
        ["€" * LONG_STRING_BYTES, "b"],
        ["b", "x€" * LONG_STRING_BYTES, "", "😀" * LONG_STRING_BYTES, "c"],
    ],
)
def test_large_strings_are_printed_in_steps(values: list[str]) -> None:
    tensor = Tensor("y", DataType.BYTES, (len(values),), join_bytes(values))
    assert sum(1 for _ in print_steps(tensor)) >= 2
    chunks = run(print_steps(tensor))
    assert json.loads(b"".join(chunks)) == values
    assert max(map(len, chunks)) <= 4 * LONG_STRING_BYTES
