"""Compressed gRPC messages: how they are recognized, and the limit for inflation."""

import gzip
import zlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from halimede.core.types import ErrorCode, InferenceError
from halimede.core.wire.grpc_inflate import Inflating, is_compressed
from halimede.core.wire.protocol import ModelInferRequest

PACK = {"gzip": gzip.compress, "deflate": zlib.compress}
MIB = 1 << 20


def inflated(raw: bytes, most: int) -> bytes | None:
    inflating = Inflating(raw)
    return bytes(inflating.content) if inflating.advance(most) else None


@pytest.mark.parametrize("coding", PACK)
@given(content=st.binary(max_size=2000), spare=st.integers(0, 3))
def test_compressed_message_is_restored_within_the_limit(coding: str, content: bytes, spare: int) -> None:
    raw = PACK[coding](content)
    assert is_compressed(raw)
    assert inflated(raw, len(content) + spare) == content
    if content:
        assert inflated(raw, len(content) - 1) is None


@pytest.mark.parametrize("coding", PACK)
def test_inflation_resumes_and_stays_near_the_limit(coding: str) -> None:
    content = bytes(3 * MIB) + b"end"
    inflating = Inflating(PACK[coding](content))
    for most in (0, 1000, MIB, 2 * MIB):
        assert not inflating.advance(most)
        assert len(inflating.content) == most + 1
    assert inflating.advance(len(content))
    assert inflating.content == content


@pytest.mark.parametrize("coding", PACK)
@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda raw: raw[:-1], "it ends before its data does"),
        (lambda raw: raw + b"xyz", "3 bytes follow its end"),
        (lambda raw: raw[:-1] + bytes([raw[-1] ^ 1]), "incorrect"),
        (lambda raw: raw[:2] + b"\xff\xff\xff", "Error -3"),
    ],
)
def test_broken_data_is_an_error(coding: str, change, reason: str) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(InferenceError, match=reason) as caught:
        inflated(change(PACK[coding](b"0123456789" * 100)), 10_000)
    assert caught.value.code is ErrorCode.INTERNAL
    assert caught.value.message.startswith("the compressed message cannot be inflated: ")


@given(st.text(), st.text(), st.lists(st.binary(max_size=10), max_size=3))
def test_uncompressed_request_is_never_taken_for_compressed(model: str, version: str, tensors: list[bytes]) -> None:
    raw = ModelInferRequest(model_name=model, model_version=version, raw_input_contents=tensors).SerializeToString()
    assert not is_compressed(raw)
