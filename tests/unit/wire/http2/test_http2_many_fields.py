"""Header blocks of many fields, which are small on the wire and dear to decode."""

from halimede.core.wire.http2 import frames
from halimede.core.wire.http2.codes import END_HEADERS, END_STREAM, FrameType, H2Code
from halimede.core.wire.http2.connection import Http2Connection
from halimede.core.wire.http2.events import ConnectionFails, RequestBegins
from halimede.core.wire.http2.fields import RequestFields, literal
from halimede.core.wire.http2.floods import BURST
from halimede.core.wire.http2.limits import USUAL_FIELDS, Http2Limits

REQUEST = literal(b":method", b"POST") + literal(b":scheme", b"http") + literal(b":path", b"/")
FIELD = literal(b"x", b"")
LIMITS = Http2Limits(max_streams=1 << 20)


def begun(fields: int, most: int) -> tuple[int, H2Code | None]:
    """How many requests with so many fields begin on one connection, of at most so many; and why it ends."""
    connection: Http2Connection[RequestFields, None] = Http2Connection(lambda request: request, LIMITS, 0.0)
    connection.receive(memoryview(frames.PREFACE + frames.settings({})), 0.0)
    block = REQUEST + FIELD * (fields - 3)
    for count in range(most):
        head = frames.frame(FrameType.HEADERS, END_HEADERS | END_STREAM, 2 * count + 1, block)
        match connection.receive(memoryview(head), 0.0):
            case [RequestBegins()]:
                pass
            case [RequestBegins(), ConnectionFails(fault)]:
                return count, fault.code
            case events:
                raise AssertionError(events)
    return most, None


def test_fields_that_are_usual_cost_nothing() -> None:
    assert begun(USUAL_FIELDS, 2000) == (2000, None)


def test_more_fields_use_up_the_allowance_of_floods() -> None:
    assert begun(USUAL_FIELDS + 600, 100) == (BURST // 600, H2Code.ENHANCE_YOUR_CALM)
