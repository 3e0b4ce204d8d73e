"""Frames of a client that has ended its stream already."""

import pytest

from halimede.core.wire.http2 import frames
from halimede.core.wire.http2.codes import END_HEADERS, END_STREAM, FrameType, H2Code
from halimede.core.wire.http2.connection import Http2Connection
from halimede.core.wire.http2.events import RequestBegins, StreamIsReset
from halimede.core.wire.http2.fields import RequestFields, literal
from halimede.core.wire.http2.limits import Http2Limits

REQUEST = literal(b":method", b"POST") + literal(b":scheme", b"http") + literal(b":path", b"/")
GREETING = frames.PREFACE + frames.settings({})


def headers(block: bytes) -> bytes:
    return frames.frame(FrameType.HEADERS, END_HEADERS | END_STREAM, 1, block)


@pytest.mark.parametrize(
    "late",
    [headers(REQUEST), headers(literal(b"x", b"y")), frames.frame(FrameType.DATA, 0, 1, b"x")],
    ids=["request", "trailers", "data"],
)
def test_frames_after_the_end_of_a_stream_reset_it_as_closed(late: bytes) -> None:
    connection: Http2Connection[RequestFields, None] = Http2Connection(lambda fields: fields, Http2Limits(), 0.0)
    events = connection.receive(memoryview(GREETING + headers(REQUEST)), 0.0)
    assert [type(event) for event in events] == [RequestBegins]
    connection.out.take()
    events = connection.receive(memoryview(late), 0.0)
    assert [type(event) for event in events] == [StreamIsReset]
    assert connection.out.take() == [frames.rst_stream(1, H2Code.STREAM_CLOSED)]
