"""Sizes of tensors, and their bytes in a body."""

from math import prod

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from halimede.core.types import DataType, ErrorCode, InferenceError
from halimede.core.types.tensor import join_bytes
from halimede.core.wire.raw_tensor import byte_size, element_count, elements, shape_text, take
from support.refusals import error_of


def refusal(name: str, datatype: DataType, shape: tuple[int, ...]) -> InferenceError:
    return error_of(element_count, name, datatype, shape, "m")


def test_elements_are_counted() -> None:
    assert element_count("x", DataType.FP32, (), "m") == 1
    assert element_count("x", DataType.FP32, (2, 3), "m") == 6
    assert element_count("x", DataType.UINT8, (2**63 - 1,), "m") == 2**63 - 1
    assert element_count("x", DataType.FP64, (5, 0, 7), "m") == 0


def test_unaddressable_tensor_is_refused_even_if_empty() -> None:
    text = "a tensor has at most 9223372036854775807 bytes"
    assert refusal("x", DataType.FP32, (2**32, 2**32)) == InferenceError(
        ErrorCode.INVALID_ARG,
        f"input 'x' has too many elements for model 'm', got shape [4294967296,4294967296], {text}",
    )
    assert refusal("x", DataType.FP32, (0, 2**62, 4)) == InferenceError(
        ErrorCode.INVALID_ARG,
        f"input 'x' has too many elements for model 'm', got shape [0,4611686018427387904,4], {text}",
    )


dims = st.integers(0, 5) | st.sampled_from([2**n + d for n in (8, 16, 31, 32, 61, 62, 63) for d in (-1, 0, 1)])


@settings(deadline=None)
@given(st.sampled_from(DataType), st.lists(dims, max_size=12))
def test_counts_are_exact_or_refused(datatype: DataType, shape: list[int]) -> None:
    addressed = prod(dim or 1 for dim in shape) * (datatype.itemsize or 8)
    if addressed > 2**63 - 1:
        assert refusal("x", datatype, tuple(shape)).code is ErrorCode.INVALID_ARG
    else:
        assert element_count("x", datatype, tuple(shape), "m") == prod(shape)


def test_hostile_shape_is_refused_quickly_with_a_short_text() -> None:
    error = refusal("n" * 1_000_000, DataType.UINT8, (2**62,) * 100_000)
    assert len(error.message) < 1024


def test_byte_sizes_are_exact_and_for_bytes_the_least() -> None:
    assert byte_size(DataType.FP16, (3, 2)) == 12
    assert byte_size(DataType.FP64, ()) == 8
    assert byte_size(DataType.BYTES, (3,)) == 12
    assert byte_size(DataType.INT64, (2**40, 2**40)) == 2**83


def test_shapes_are_printed_and_cut() -> None:
    assert shape_text((1, -1, 16)) == "[1,-1,16]"
    assert shape_text((1,) * 100_000) == "[" + "1," * 127 + "1..."


def test_the_binary_part_is_handed_out_as_views() -> None:
    body = bytearray(b"abcdef")
    tail = memoryview(body)[1:]
    piece = take(tail, 1, 3, "x", "m")
    body[2:5] = b"XYZ"
    assert bytes(piece) == b"XYZ"
    assert bytes(take(tail, 5, 0, "x", "m")) == b""


def test_tensor_longer_than_the_body_is_refused() -> None:
    assert error_of(take, memoryview(bytes(64)), 0, 1059, "IN", "ident") == InferenceError(
        ErrorCode.INVALID_ARG, "unexpected size for input 'IN', expecting 995 additional bytes for model 'ident'"
    )


@settings(deadline=None)
@given(st.lists(st.binary(max_size=20), max_size=20))
def test_the_elements_of_a_bytes_tensor_one_by_one(values: list[bytes]) -> None:
    assert [bytes(element) for element in elements(join_bytes(values))] == values


@pytest.mark.parametrize("data", [b"\5\0\0\0abcd", b"\xff\xff\xff\xffabcd"])
def test_a_broken_bytes_tensor_ends_in_an_error(data: bytes) -> None:
    with pytest.raises(ValueError, match="an element at byte 0 ends at byte"):
        list(elements(data))
