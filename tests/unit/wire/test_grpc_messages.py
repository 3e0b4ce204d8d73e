"""The messages in the DATA of a call."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from halimede.core.types import ErrorCode, InferenceError
from halimede.core.wire.grpc_messages import Message, MessageReader, MessageTooLarge, pack_prefix, unpack_prefix
from support.refusals import error_of

MAX = 1000


def reader(max_bytes: int = MAX) -> MessageReader:
    return MessageReader(max_bytes, lambda size: MessageTooLarge(size, max_bytes))


def read(messages: MessageReader, *pieces: bytes) -> list[tuple[bytes, bool]]:
    return [
        (bytes(message.content), message.is_compressed)
        for piece in pieces
        for message in messages.read(memoryview(piece))
    ]


def sent(content: bytes, flag: int = 0) -> bytes:
    return bytes((flag,)) + len(content).to_bytes(4, "big") + content


def test_a_prefix_has_a_flag_and_the_size() -> None:
    assert pack_prefix(True, 258) == b"\1\0\0\1\2"
    assert unpack_prefix(b"\0\0\0\0\7rest") == (0, 7)


def test_messages_in_one_piece() -> None:
    messages = reader()
    assert read(messages, sent(b"abc") + sent(b"", 1) + sent(b"d", 1)) == [(b"abc", False), (b"", True), (b"d", True)]
    assert not messages.is_within


@given(
    st.lists(st.tuples(st.binary(max_size=30), st.booleans()), max_size=5),
    st.lists(st.integers(0, 120), max_size=10),
)
def test_messages_do_not_depend_on_how_they_are_cut(contents: list[tuple[bytes, bool]], cuts: list[int]) -> None:
    raw = b"".join(sent(content, flag) for content, flag in contents)
    places = [0, *sorted(min(cut, len(raw)) for cut in cuts), len(raw)]
    messages = reader()
    assert read(messages, *[raw[start:end] for start, end in pairwise(places)]) == contents
    assert (messages.is_within, messages.missing) == (False, 0)


def test_a_large_message_is_received_into_its_own_memory() -> None:
    messages = reader()
    assert len(messages.room()) == 0
    assert read(messages, sent(b"abcdef", 1)[:7]) == []
    assert (messages.missing, messages.filled_bytes, messages.is_within) == (4, 2, True)
    room = messages.room()
    assert len(room) == 4
    room[:3] = b"cde"
    assert messages.received(3) is None
    assert (messages.missing, messages.filled_bytes) == (1, 5)
    messages.room()[:] = b"f"
    message = messages.received(1)
    assert message is not None
    assert (bytes(message.content), message.is_compressed) == (b"abcdef", True)
    assert (messages.missing, messages.filled_bytes, len(messages.room())) == (0, 0, 0)
    assert read(messages, sent(b"next")) == [(b"next", False)]


def test_a_received_message_is_not_changed_by_the_next() -> None:
    messages = reader()
    first: list[Message] = [*messages.read(memoryview(sent(b"abcdef")[:8])), *messages.read(memoryview(b"def"))]
    read(messages, sent(b"xxxxxx")[:8], b"xxx")
    assert [bytes(message.content) for message in first] == [b"abcdef"]


def test_a_part_of_a_prefix_is_a_part_of_a_message() -> None:
    messages = reader()
    assert read(messages, b"\0\0") == []
    assert (messages.is_within, messages.missing, messages.filled_bytes) == (True, 0, 0)


def test_a_message_above_the_limit_is_refused_by_its_prefix() -> None:
    assert len(read(reader(), sent(bytes(MAX)))[0][0]) == MAX
    with pytest.raises(MessageTooLarge) as caught:
        read(reader(), sent(bytes(MAX + 1))[:5])
    assert caught.value == InferenceError(
        ErrorCode.INVALID_ARG,
        "request message size of 1001 bytes exceeds the maximum allowed value of 1000 bytes. Use --grpc-max-input-size"
        " to increase the limit.",
    )


@pytest.mark.parametrize("flag", [2, 255])
def test_the_flag_is_0_or_1(flag: int) -> None:
    assert error_of(read, reader(), sent(b"a") + sent(b"", flag)) == InferenceError(
        ErrorCode.INTERNAL, f"a message begins with the flag {flag}, not 0 or 1"
    )
