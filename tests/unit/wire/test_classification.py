"""The top classes of an output."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from halimede.core.types import DataType, ErrorCode, InferenceError, Tensor
from halimede.core.types.tensor import tensor_from_array
from halimede.core.wire.classification import check_classifiable, classify
from support.refusals import error_of


def scores(values: Any, datatype: DataType = DataType.FP32) -> Tensor:
    return tensor_from_array("y", datatype, np.array(values, datatype.dtype))


def classes(tensor: Tensor, k: int, *labels: str, batched: bool = True) -> list[Any]:
    result = classify(tensor, k, labels, batched)
    assert (result.name, result.datatype) == ("y", DataType.BYTES)
    texts: list[Any] = np.vectorize(bytes.decode, otypes=[object])(result.array()).tolist() if result.data else []
    return texts


def test_the_best_classes_with_their_labels() -> None:
    assert classes(scores([[0.25, 0.5, -1.0, 1e10]]), 3, "a", "b", "c", "d") == [
        ["10000000000.000000:3:d", "0.500000:1:b", "0.250000:0:a"]
    ]


def test_every_row_of_a_batch_has_its_own() -> None:
    assert classes(scores([[1, 2], [4, 3]]), 1) == [["2.000000:1"], ["4.000000:0"]]


def test_without_a_batch_all_dimensions_are_one_row() -> None:
    assert classes(scores([[1, 2], [4, 3]]), 2, batched=False) == ["4.000000:2", "3.000000:3"]
    assert classes(scores(7.0), 5, batched=False) == ["7.000000:0"]


def test_all_dimensions_behind_the_batch_are_one_row() -> None:
    assert classes(scores([[[1, 2], [4, 3]]]), 2) == [["4.000000:2", "3.000000:3"]]


def test_number_of_classes_is_bounded_by_the_elements() -> None:
    result = classify(scores([[1, 2]]), 10**18, (), batched=True)
    assert result.shape == (1, 2)


def test_missing_or_empty_labels_are_omitted() -> None:
    assert classes(scores([[3, 2, 1]]), 3, "a", "") == [["3.000000:0:a", "2.000000:1", "1.000000:2"]]


@pytest.mark.parametrize(
    "datatype", [t for t in DataType if t.name.startswith(("INT", "UINT"))], ids=lambda datatype: datatype.name
)
def test_integers_print_as_integers_and_sort_at_their_limits(datatype: DataType) -> None:
    limits = np.iinfo(datatype.dtype)
    assert classes(scores([[limits.min, limits.max, 1]], datatype), 3) == [
        [f"{limits.max}:1", "1:2", f"{limits.min}:0"]
    ]


def test_doubles_keep_their_digits() -> None:
    assert classes(scores([[0.1234567, 1e300]], DataType.FP64), 2) == [[f"{1e300:f}:1", "0.123457:0"]]


def test_equal_values_keep_their_order_and_nan_is_last() -> None:
    values = [[1, np.nan, np.inf, 1, -np.inf]]
    assert classes(scores(values), 5) == [["inf:2", "1.000000:0", "1.000000:3", "-inf:4", "nan:1"]]
    assert classes(scores(values), 2) == [["inf:2", "1.000000:0"]]
    assert classes(scores([[np.nan, np.nan, 1]]), 2) == [["1.000000:2", "nan:0"]]


@settings(deadline=None)
@given(st.lists(st.integers(-3, 3), max_size=30), st.integers(0, 35))
def test_top_classes_of_many_equal_the_full_sort(values: list[int], k: int) -> None:
    best = sorted(range(len(values)), key=lambda index: (-values[index], index))[:k]
    assert classes(scores(values, DataType.INT8), k, batched=False) == [f"{values[index]}:{index}" for index in best]


def test_an_output_that_is_too_large_is_not_classified() -> None:
    largest = scores(np.zeros((2, 500_000)), DataType.INT8)
    assert classes(largest, 1) == [["0:0"], ["0:0"]]
    assert error_of(classify, scores(np.zeros((1, 1_000_001)), DataType.INT8), 1, (), batched=True) == InferenceError(
        ErrorCode.INVALID_ARG, "classification output tensor too large"
    )


def test_empty_tensors_have_no_classes() -> None:
    assert classify(scores(np.zeros((0, 4))), 2, (), batched=True) == Tensor("y", DataType.BYTES, (0, 0), b"")
    assert classify(scores(np.zeros((2, 0))), 2, (), batched=True) == Tensor("y", DataType.BYTES, (2, 0), b"")


@pytest.mark.parametrize("name", ["FP16", "BF16", "BOOL", "BYTES"])
def test_datatypes_without_classes(name: str) -> None:
    error = InferenceError(
        ErrorCode.INVALID_ARG, f"class result not available for output due to unsupported type '{name}', output 'y'"
    )
    assert error_of(classify, Tensor("y", DataType[name], (1, 0), b""), 1, (), batched=True) == error
    assert error_of(check_classifiable, "y", DataType[name]) == error
