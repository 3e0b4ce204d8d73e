"""Compressed gRPC messages are inflated in steps, up to a limit."""

import gzip
import zlib
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from halimede.core.types import Buffer, ErrorCode, InferenceError
from halimede.core.wire.grpc_coding import decode_steps
from halimede.core.wire.grpc_messages import MessageTooLarge
from halimede.core.wire.steps import Steps, run

PACK = {b"gzip": gzip.compress, b"deflate": zlib.compress}
PIECE = 256 << 10


def steps(raw: bytes, encoding: bytes, most: int) -> Steps[Buffer]:
    return decode_steps(raw, encoding, most, lambda size: MessageTooLarge(size, most))


@pytest.mark.parametrize("encoding", PACK)
@given(content=st.binary(max_size=2000), spare=st.integers(0, 3))
def test_a_message_is_restored_within_the_limit(encoding: bytes, content: bytes, spare: int) -> None:
    raw = PACK[encoding](content)
    assert run(steps(raw, encoding, len(content) + spare)) == content
    if content:
        with pytest.raises(MessageTooLarge) as caught:
            run(steps(raw, encoding, len(content) - 1))
        assert caught.value.message.startswith(f"request message size of more than {len(content) - 1} bytes exceeds")


@pytest.mark.parametrize("encoding", PACK)
def test_a_small_message_takes_no_step_and_a_large_one_many(encoding: bytes) -> None:
    assert list(steps(PACK[encoding](bytes(PIECE)), encoding, PIECE)) in ([], [PIECE])
    content = bytes(3 * PIECE) + b"end"
    sizes = list(steps(PACK[encoding](content), encoding, len(content)))
    assert sizes[:3] == [PIECE] * 3
    assert sum(sizes) <= len(content)
    assert run(steps(PACK[encoding](content), encoding, len(content))) == content


def test_input_of_many_pieces_is_read_piece_by_piece() -> None:
    content = b"".join(zlib.crc32(number.to_bytes(4, "big")).to_bytes(4, "big") for number in range(PIECE // 2))
    raw = zlib.compress(content, 0)
    assert len(raw) > 2 * PIECE
    assert run(steps(raw, b"deflate", len(content))) == content


@pytest.mark.parametrize("encoding", PACK)
def test_no_more_than_the_limit_is_inflated(encoding: bytes) -> None:
    held: list[int] = []
    with pytest.raises(MessageTooLarge):
        held.extend(steps(PACK[encoding](bytes(20 * PIECE)), encoding, PIECE + 10))
    assert sum(held) == PIECE


@pytest.mark.parametrize("encoding", PACK)
@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda raw: raw[:-1], "it ends before its data does"),
        (lambda _: b"", "it ends before its data does"),
        (lambda raw: raw + b"xyz", "3 bytes follow its end"),
        (lambda raw: raw[:-1] + bytes([raw[-1] ^ 1]), "incorrect"),
        (lambda raw: raw[:2] + b"\xff\xff\xff", "Error -3"),
    ],
)
def test_broken_data_is_an_error(encoding: bytes, change: Callable[[bytes], bytes], reason: str) -> None:
    with pytest.raises(InferenceError, match=reason) as caught:
        run(steps(change(PACK[encoding](b"0123456789" * 100)), encoding, 10_000))
    assert caught.value.code is ErrorCode.INTERNAL
    assert caught.value.message.startswith("the compressed message cannot be inflated: ")


def test_deflate_is_zlibs_format() -> None:
    with pytest.raises(InferenceError):
        run(steps(zlib.compress(b"text", wbits=-15), b"deflate", 100))
    with pytest.raises(InferenceError):
        run(steps(gzip.compress(b"text"), b"deflate", 100))
