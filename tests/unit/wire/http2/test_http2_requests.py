"""Frames of requests: what begins, goes on and ends, and which faults end a stream or the connection."""

from struct import pack

import pytest

from halimede.core.wire.http2.codes import H2Code
from halimede.core.wire.http2.limits import MAX_BLOCK_BYTES, MAX_CONTINUATIONS, RECENTLY_CLOSED, Http2Limits
from support.http2 import (
    CONTINUATION,
    DATA,
    END_HEADERS,
    END_STREAM,
    HEADERS,
    PADDED,
    PING,
    PRIORITY_FIELDS,
    PUSH_PROMISE,
    REQUEST,
    Frame,
    Wire,
    block,
    frame,
    headers,
    padded,
    request,
    rst_stream,
)

BLOCK = block(REQUEST)
LENGTH_3 = (*REQUEST, (b"content-length", b"3"))


def data(stream: int, content: bytes, *, is_end: bool = False) -> bytes:
    return frame(DATA, END_STREAM if is_end else 0, stream, content)


def reset(stream: int, code: H2Code) -> Frame:
    return Frame(3, 0, stream, pack(">I", code))


def opened(*streams: int, limits: Http2Limits | None = None) -> Wire:
    """A connection with these requests, whose DATA is to come."""
    wire = Wire(limits)
    for stream in streams:
        assert wire.receive(headers(stream)) == [("begins", stream, "/a", False)]
    return wire


def test_a_request_without_data() -> None:
    assert Wire().receive(request(1)) == [("begins", 1, "/a", True)]


def test_a_request_with_data() -> None:
    wire = opened(1)
    assert wire.receive(data(1, b"ab") + data(1, b"c", is_end=True)) == [
        ("data", 1, b"ab", 2, False),
        ("data", 1, b"c", 1, True),
    ]


def test_a_request_may_end_by_trailers() -> None:
    wire = opened(1)
    trailers = headers(1, [(b"checksum", b"1")], END_HEADERS | END_STREAM)
    assert wire.receive(data(1, b"ab") + trailers) == [("data", 1, b"ab", 2, False), ("ends", 1)]


def test_padding_counts_for_flow_control_alone() -> None:
    wire = opened(1)
    assert wire.receive(frame(DATA, PADDED, 1, padded(b"ab", 3))) == [("data", 1, b"ab", 6, False)]


def test_nothing_depends_on_how_the_bytes_of_a_request_are_cut() -> None:
    raw = headers(1) + data(1, b"abc", is_end=True)
    for cut in range(len(raw)):
        events = Wire().receive(raw[:cut], raw[cut:])
        assert events[0] == ("begins", 1, "/a", False)
        assert b"".join(event[2] for event in events[1:]) == b"abc"  # type: ignore[misc]  # bytes of DATA
        assert [event[4] for event in events[1:]] == [False] * (len(events) - 2) + [True]


def test_data_that_is_received_directly_is_told_as_other_data() -> None:
    wire = opened(1)
    assert wire.receive(data(1, b"abcd", is_end=True)[:10]) == [("data", 1, b"a", 4, False)]
    directly = [wire.connection.received_directly(memoryview(piece), 0) for piece in (b"bc", b"d")]
    assert [(bytes(event.data), event.size, event.is_end) for (event,) in directly] == [  # type: ignore[union-attr]
        (b"bc", 0, False),
        (b"d", 0, True),
    ]


# Numbers of streams.


@pytest.mark.parametrize("stream", [0, 2])
def test_a_request_has_an_odd_number(stream: int) -> None:
    """RFC 9113 section 5.1.1."""
    assert Wire().fault(request(stream)) == H2Code.PROTOCOL_ERROR


def test_numbers_of_streams_grow() -> None:
    """RFC 9113 section 5.1.1."""
    wire = Wire()
    assert wire.receive(request(5)) == [("begins", 5, "/a", True)]
    assert wire.fault(request(3)) == H2Code.PROTOCOL_ERROR


def test_requests_above_the_limit_are_refused_and_their_blocks_decoded() -> None:
    """RFC 9113 section 5.1.2."""
    wire = opened(1, limits=Http2Limits(max_streams=1))
    adding = frame(HEADERS, END_HEADERS, 3, BLOCK + b"\x40\1x\x011")
    assert wire.receive(adding + data(3, b"ignored")) == []
    assert wire.sent() == [reset(3, H2Code.REFUSED_STREAM)]
    assert wire.receive(rst_stream(1)) == [("reset", 1, "")]
    assert wire.receive(frame(HEADERS, END_HEADERS, 5, BLOCK + b"\xbe")) == [("begins", 5, "/a", False)]


# Frames of streams that are idle or closed.


@pytest.mark.parametrize(
    "raw", [data(1, b""), rst_stream(1), frame(8, 0, 1, pack(">I", 1)), data(0, b"x"), rst_stream(0)]
)
def test_other_frames_than_headers_open_no_stream(raw: bytes) -> None:
    """RFC 9113 sections 5.1, 6.1 and 6.4."""
    assert Wire().fault(raw) == H2Code.PROTOCOL_ERROR


@pytest.mark.parametrize("raw", [data(2, b""), rst_stream(2), frame(8, 0, 2, pack(">I", 1))])
def test_streams_of_the_server_are_idle(raw: bytes) -> None:
    """RFC 9113 section 5.1.1: the server has opened none."""
    assert opened(3).fault(raw) == H2Code.PROTOCOL_ERROR


def test_data_after_the_end_of_a_request_ends_the_stream() -> None:
    """RFC 9113 section 5.1, half-closed (remote)."""
    wire = Wire()
    wire.receive(request(1))
    assert wire.receive(data(1, b"x")) == [("reset", 1, "DATA after END_STREAM")]
    assert wire.sent() == [reset(1, H2Code.STREAM_CLOSED)]


def test_headers_after_the_end_of_a_request_end_the_stream() -> None:
    """RFC 9113 section 5.1, half-closed (remote)."""
    wire = Wire()
    wire.receive(request(1))
    assert wire.receive(headers(1, [], END_HEADERS | END_STREAM)) == [("reset", 1, "HEADERS after END_STREAM")]
    assert wire.sent() == [reset(1, H2Code.STREAM_CLOSED)]


def ended(wire: Wire, stream: int) -> None:
    """A request that is answered."""
    wire.receive(request(stream))
    wire.out.respond(wire.stream(stream), b"", is_end=True)
    wire.sent()


def test_data_of_a_closed_stream_is_answered_once() -> None:
    """RFC 9113 section 5.1, closed."""
    wire = Wire()
    ended(wire, 1)
    assert wire.receive(data(1, b"x") + data(1, b"y")) == []
    assert wire.sent() == [reset(1, H2Code.STREAM_CLOSED)]
    wire = opened(1)
    assert wire.receive(rst_stream(1) + data(1, b"x")) == [("reset", 1, "")]
    assert wire.sent() == [reset(1, H2Code.STREAM_CLOSED)]


def test_headers_of_a_closed_stream_end_the_connection() -> None:
    """RFC 9113 section 5.1, closed."""
    wire = Wire()
    ended(wire, 1)
    assert wire.fault(headers(1)) == H2Code.STREAM_CLOSED


def test_frames_of_a_stream_that_the_server_has_reset_are_ignored() -> None:
    """RFC 9113 section 5.1, closed: the client may not know yet."""
    wire = opened(1)
    wire.out.reset(wire.stream(1), H2Code.CANCEL)
    assert wire.sent() == [reset(1, H2Code.CANCEL)]
    late = data(1, b"x") + frame(8, 0, 1, pack(">I", 1)) + rst_stream(1) + headers(1, [], END_HEADERS | END_STREAM)
    assert wire.receive(late) == []
    assert wire.sent() == []


def test_why_a_stream_is_closed_is_forgotten_after_others() -> None:
    wire = opened(1)
    wire.out.reset(wire.stream(1), H2Code.CANCEL)
    for number in range(RECENTLY_CLOSED - 1):
        ended(wire, 3 + 2 * number)
    assert wire.receive(data(1, b"x")) == []
    assert wire.sent() == []
    ended(wire, 1001)
    assert wire.receive(data(1, b"x")) == []
    assert wire.sent() == [reset(1, H2Code.STREAM_CLOSED)]


@pytest.mark.parametrize("size", [0, 3, 5])
def test_rst_stream_has_a_size(size: int) -> None:
    """RFC 9113 section 6.4."""
    assert opened(1).fault(frame(3, 0, 1, bytes(size))) == H2Code.FRAME_SIZE_ERROR


def test_a_client_cancels_a_request() -> None:
    wire = opened(1)
    assert wire.receive(rst_stream(1) + rst_stream(1)) == [("reset", 1, "")]
    assert (wire.sent(), wire.connection.table.all()) == ([], [])


# Content-length and fields.


@pytest.mark.parametrize(
    ("raw", "what"),
    [
        (data(1, b"ab", is_end=True), [("reset", 1, "content-length is not the size")]),
        (data(1, b"abcd"), [("reset", 1, "content-length is not the size")]),
        (data(1, b"abc", is_end=True), [("data", 1, b"abc", 3, True)]),
        (frame(DATA, PADDED | END_STREAM, 1, padded(b"abc", 1)), [("data", 1, b"abc", 5, True)]),
        (headers(1, [], END_HEADERS | END_STREAM), [("reset", 1, "content-length is not the size")]),
    ],
)
def test_the_data_has_the_size_of_content_length(raw: bytes, what: list[tuple[object, ...]]) -> None:
    """RFC 9113 section 8.1.1."""
    wire = Wire()
    wire.receive(headers(1, LENGTH_3))
    assert wire.receive(raw) == what
    assert wire.sent() == ([reset(1, H2Code.PROTOCOL_ERROR)] if what[0][0] == "reset" else [])


def test_a_request_without_data_has_no_content_length_but_0() -> None:
    """RFC 9113 section 8.1.1."""
    wire = Wire()
    assert wire.receive(headers(1, LENGTH_3, END_HEADERS | END_STREAM)) == []
    assert wire.sent() == [reset(1, H2Code.PROTOCOL_ERROR)]
    assert wire.receive(request(3, (b"content-length", b"0"))) == [("begins", 3, "/a", True)]
    assert wire.receive(data(1, b"abc")) == []


def test_a_malformed_request_ends_its_stream_alone() -> None:
    """RFC 9113 section 8.1.1."""
    wire = Wire()
    assert wire.receive(headers(1, REQUEST[1:]) + request(3)) == [("begins", 3, "/a", True)]
    assert wire.sent() == [reset(1, H2Code.PROTOCOL_ERROR)]


@pytest.mark.parametrize(
    ("raw", "fault"),
    [
        (headers(1, [(b":path", b"/")], END_HEADERS | END_STREAM), "a pseudo-header field in trailers"),
        (headers(1, [(b"a", b"1")]), "trailers without END_STREAM"),
    ],
)
def test_malformed_trailers_end_the_stream(raw: bytes, fault: str) -> None:
    """RFC 9113 section 8.1."""
    wire = opened(1)
    assert wire.receive(raw) == [("reset", 1, fault)]
    assert wire.sent() == [reset(1, H2Code.PROTOCOL_ERROR)]


def test_a_block_that_is_no_hpack_ends_the_connection() -> None:
    """RFC 9113 section 4.3."""
    assert opened(1).fault(frame(HEADERS, END_HEADERS, 3, b"\xff")) == H2Code.COMPRESSION_ERROR


# Header blocks.


def test_a_header_block_may_come_in_several_frames() -> None:
    wire = Wire()
    first = frame(HEADERS, END_STREAM, 1, BLOCK[:5])
    assert wire.receive(first + frame(CONTINUATION, 0, 1, BLOCK[5:9])) == []
    assert wire.receive(frame(CONTINUATION, END_HEADERS, 1, BLOCK[9:])) == [("begins", 1, "/a", True)]
    assert wire.receive(headers(3)) == [("begins", 3, "/a", False)]


@pytest.mark.parametrize("between", [frame(PING, 0, 0, bytes(8)), request(3), frame(99), data(0, b"")])
def test_no_other_frame_comes_within_a_header_block(between: bytes) -> None:
    """RFC 9113 section 6.10."""
    assert Wire().fault(frame(HEADERS, 0, 1, BLOCK) + between) == H2Code.PROTOCOL_ERROR


@pytest.mark.parametrize("before", [b"", request(1), frame(HEADERS, 0, 3, BLOCK)])
def test_a_continuation_follows_a_header_block_of_its_stream(before: bytes) -> None:
    """RFC 9113 section 6.10."""
    assert Wire().fault(before + frame(CONTINUATION, END_HEADERS, 1)) == H2Code.PROTOCOL_ERROR


def test_a_header_block_has_a_size_limit_in_all_its_frames() -> None:
    piece = bytes(16_384)
    first = frame(HEADERS, 0, 1, piece)
    assert Wire().receive(first + frame(CONTINUATION, 0, 1, piece)) == []
    assert Wire().fault(first + frame(CONTINUATION, 0, 1, piece) + frame(CONTINUATION, 0, 1, b"x")) == (
        H2Code.ENHANCE_YOUR_CALM
    )


def test_a_header_block_in_one_large_frame_has_the_same_limit() -> None:
    for size, code in ((MAX_BLOCK_BYTES, H2Code.COMPRESSION_ERROR), (MAX_BLOCK_BYTES + 1, H2Code.ENHANCE_YOUR_CALM)):
        wire = opened(1)
        wire.connection.credit.expect(wire.stream(1), 1 << 20)
        assert wire.fault(frame(HEADERS, END_HEADERS, 3, b"\x80" * size)) == code


def test_the_number_of_continuations_has_a_limit() -> None:
    empty = frame(CONTINUATION, 0, 1)
    wire = Wire()
    assert wire.receive(frame(HEADERS, END_STREAM, 1, BLOCK) + empty * (MAX_CONTINUATIONS - 1)) == []
    assert wire.receive(frame(CONTINUATION, END_HEADERS, 1)) == [("begins", 1, "/a", True)]
    assert Wire().fault(frame(HEADERS, 0, 1, BLOCK) + empty * (MAX_CONTINUATIONS + 1)) == H2Code.ENHANCE_YOUR_CALM


PRIORITY_OF_0 = bytes(5)


@pytest.mark.parametrize(
    ("flags", "payload"),
    [
        (PADDED, padded(BLOCK, 7)),
        (PRIORITY_FIELDS, PRIORITY_OF_0 + BLOCK),
        (PADDED | PRIORITY_FIELDS, padded(PRIORITY_OF_0 + BLOCK, 1)),
    ],
)
def test_headers_may_have_padding_and_a_priority(flags: int, payload: bytes) -> None:
    """RFC 9113 section 6.2."""
    assert Wire().receive(frame(HEADERS, END_HEADERS | flags, 1, payload)) == [("begins", 1, "/a", False)]
    cut = frame(HEADERS, flags, 1, payload) + frame(CONTINUATION, END_HEADERS, 1)
    assert Wire().receive(cut) == [("begins", 1, "/a", False)]


@pytest.mark.parametrize(
    ("flags", "payload", "code"),
    [
        (PADDED, b"", H2Code.FRAME_SIZE_ERROR),
        (PADDED, b"\2x", H2Code.PROTOCOL_ERROR),
        (PRIORITY_FIELDS, bytes(4), H2Code.FRAME_SIZE_ERROR),
        (PADDED | PRIORITY_FIELDS, padded(bytes(4), 3), H2Code.FRAME_SIZE_ERROR),
    ],
)
def test_headers_have_room_for_their_padding_and_priority(flags: int, payload: bytes, code: H2Code) -> None:
    """RFC 9113 sections 4.2 and 6.2."""
    assert Wire().fault(frame(HEADERS, END_HEADERS | flags, 1, payload)) == code
    assert Wire().receive(frame(HEADERS, PADDED, 1, b"\1x")) == []


@pytest.mark.parametrize("rest", [b"", frame(CONTINUATION, END_HEADERS, 1)])
def test_a_request_that_depends_on_itself_is_malformed(rest: bytes) -> None:
    """RFC 7540 section 5.3.1."""
    wire = Wire()
    flags = PRIORITY_FIELDS | (0 if rest else END_HEADERS)
    assert wire.receive(frame(HEADERS, flags, 1, b"\x80\0\0\1\0" + BLOCK) + rest) == []
    assert wire.sent() == [reset(1, H2Code.PROTOCOL_ERROR)]


def test_a_client_pushes_nothing() -> None:
    """RFC 9113 section 8.4."""
    assert opened(1).fault(frame(PUSH_PROMISE, END_HEADERS, 1, bytes(4))) == H2Code.PROTOCOL_ERROR
