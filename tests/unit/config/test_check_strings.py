"""The check of tensors of strings in a request."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from halimede.core.config.check_request import COMPARED_AT_ONCE, Checked, RequestChecker
from halimede.core.config.model_config import ModelConfig, ModelInput, ModelOutput
from halimede.core.types import DataType, InferenceError, InferenceRequest, Tensor
from halimede.core.types.tensor import join_bytes, split_bytes
from support.request_checks import BAD_PREFIX, BYTES, model, refusal, request, strings

STRINGS = model(ModelInput("IN", BYTES, dims=(-1,)), max_batch_size=4)


@pytest.mark.parametrize("elements", [[b"", b""], [b"a\0b", b"\xff" * 300]])
def test_strings_are_counted_without_looking_into_them(elements: list[bytes]):
    data = join_bytes(elements)
    for buffer in (data, bytearray(data), memoryview(data)):
        assert STRINGS.check(request(strings("IN", (1, 2), buffer))) == Checked(1, len(data), ((2,),))  # type: ignore[arg-type]


@pytest.mark.parametrize("count", [1, 15, 16, 1000, 100_000])
def test_many_strings_of_equal_and_of_different_length(count: int):
    for elements in ([b"abc"] * count, [b"", *([b"abcdef"] * (count - 1))], [b"x" * (i % 9) for i in range(count)]):
        data = join_bytes(elements)
        assert STRINGS.check(request(strings("IN", (1, count), data))).size_bytes == len(data)


@pytest.mark.parametrize(
    ("count", "data", "message"),
    [
        (2, join_bytes([b"one"]), "expected 2 string elements for inference input 'IN' for model 'm', got 1"),
        (1, b"", "expected 1 string elements for inference input 'IN' for model 'm', got 0"),
        (
            1,
            join_bytes([b"a", b"b", b"c"]),
            "unexpected number of string elements 2 for inference input 'IN' for model 'm', expecting 1",
        ),
        (
            0,
            join_bytes([b""]),
            "unexpected number of string elements 1 for inference input 'IN' for model 'm', expecting 0",
        ),
        (
            1,
            b"\x00\x00",
            "incomplete string length indicator for inference input 'IN' for model 'm', expecting 4 bytes but only 2 "
            "bytes available. Please make sure the string length indicator is in one buffer.",
        ),
        (
            1,
            join_bytes([b"ab"]) + b"\x01",
            "incomplete string length indicator for inference input 'IN' for model 'm', expecting 4 bytes but only 1 "
            "bytes available. Please make sure the string length indicator is in one buffer.",
        ),
        (
            1,
            b"\xff\x00\x00\x00a",
            "incomplete string data for inference input 'IN', expecting string of length 255 but only 1 bytes "
            "available",
        ),
        (
            1,
            b"\xff\xff\xff\xffabcd",
            "incomplete string data for inference input 'IN', expecting string of length 4294967295 but only 4 bytes "
            "available",
        ),
        (2**40, b"", f"expected {2**40} string elements for inference input 'IN' for model 'm', got 0"),
    ],
)
def test_broken_strings_are_explained(count: int, data: bytes, message: str):
    assert refusal(STRINGS, request(strings("IN", (1, count), data))) == BAD_PREFIX + message


def test_one_wrong_length_among_equal_ones_is_found():
    data = bytearray(join_bytes([b"abcd"] * 32))
    data[8 * 20] = 5

    assert refusal(STRINGS, request(strings("IN", (1, 32), bytes(data)))).startswith(
        f"{BAD_PREFIX}incomplete string data for inference input 'IN', expecting string of length"
    )


@given(st.lists(st.binary(max_size=6), max_size=40), st.data())
def test_strings_pass_exactly_when_they_can_be_split(elements: list[bytes], data: st.DataObject):
    raw = bytearray(join_bytes(elements))
    for _ in range(data.draw(st.integers(0, 2))):
        if raw:
            raw[data.draw(st.integers(0, len(raw) - 1))] = data.draw(st.sampled_from([0, 1, 2, 4, 255]))
    raw = raw[: len(raw) - data.draw(st.integers(0, 3))]
    count = data.draw(st.sampled_from([len(elements), max(0, len(elements) - 1), len(elements) + 1]))
    try:
        fits = len(split_bytes(bytes(raw))) == count
    except ValueError:
        fits = False

    asked = request(strings("IN", (1, count), bytes(raw)))
    if fits:
        assert STRINGS.check(asked).size_bytes == len(raw)
    else:
        assert "string" in refusal(STRINGS, asked)


def test_very_many_strings_are_left_to_check_framing():
    config = ModelConfig(
        name="m",
        max_batch_size=4,
        input=(ModelInput(name="IN", data_type=DataType.BYTES, dims=(-1,)),),
        output=(ModelOutput(name="OUT", data_type=DataType.BYTES, dims=(-1,)),),
    )
    checker = RequestChecker(config)

    def request(data: bytes, elements: int) -> InferenceRequest:
        return InferenceRequest("m", inputs=[Tensor("IN", DataType.BYTES, (1, elements), data)])

    equal = request(join_bytes([b"ab"] * 100_000), 100_000)
    mixed = request(join_bytes([b"a", b"bc"] * 50_000), 100_000)
    short = request(join_bytes([b"a", b"bc"] * 49_999), 100_000)
    assert not checker.check(equal).needs_framing
    assert checker.check(mixed).needs_framing
    checker.check_framing(mixed)
    assert checker.check(short).needs_framing
    with pytest.raises(InferenceError, match=r"expected 100000 string elements for inference input 'IN' .* got 99998"):
        checker.check_framing(short)
    with pytest.raises(InferenceError, match="expected 100000 string elements"):
        checker.check(request(b"\0\0\0\0" * 10, 100_000))
    assert not checker.check(request(join_bytes([b"a", b"bc"] * 100), 200)).needs_framing


def test_too_many_equal_strings_are_left_to_a_thread() -> None:
    checker = RequestChecker(ModelConfig(name="m", input=(ModelInput("s", DataType.BYTES, dims=(-1,)),)))

    def checked(count: int) -> tuple[int, bool]:
        request = InferenceRequest("m", inputs=[Tensor("s", DataType.BYTES, (count,), bytes(4 * count))])
        made = checker.check(request)
        checker.check_framing(request)
        return made.size_bytes, made.needs_framing

    assert checked(COMPARED_AT_ONCE) == (4 * COMPARED_AT_ONCE, False)
    assert checked(COMPARED_AT_ONCE + 1) == (4 * COMPARED_AT_ONCE + 4, True)
