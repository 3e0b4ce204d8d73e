"""Frames of the connection: greeting, settings, pings, priorities, floods, and the end by GOAWAY."""

from struct import pack

import pytest

from halimede.core.wire.http2.codes import ConnectionFault, H2Code
from halimede.core.wire.http2.fields import USUAL_FIELDS
from halimede.core.wire.http2.floods import BURST, CHEAP, RESET
from halimede.core.wire.http2.limits import Http2Limits
from support.http2 import (
    ACK,
    CONTINUATION,
    DATA,
    END_HEADERS,
    END_STREAM,
    GOAWAY,
    HEADERS,
    PING,
    PREFACE,
    PRIORITY,
    REQUEST,
    SETTINGS,
    Frame,
    Wire,
    block,
    frame,
    frames_of,
    goaway,
    headers,
    request,
    rst_stream,
    settings,
    window_update,
)

PINGED = frame(PING, 0, 0, b"12345678")


def reset(stream: int, code: H2Code) -> Frame:
    return Frame(3, 0, stream, pack(">I", code))


def test_the_server_greets_with_its_limits() -> None:
    """RFC 9113 section 3.4."""
    wire = Wire(Http2Limits(max_streams=7, window=1000, connection_window=100_000, max_header_list_bytes=5), b"")
    assert not wire.connection.is_greeted
    assert wire.sent() == frames_of(settings(s3=7, s4=1000, s6=5) + window_update(0, 100_000 - 65_535))


def test_settings_are_acknowledged() -> None:
    """RFC 9113 section 6.5.3."""
    wire = Wire(greeting=b"")
    wire.sent()
    assert wire.receive(PREFACE + settings(s1=0, s2=0, s3=1, s5=16_384, s6=1, s99=5)) == []
    assert wire.sent() == [Frame(SETTINGS, ACK, 0, b"")]
    assert wire.connection.is_greeted
    assert wire.receive(frame(SETTINGS, ACK)) == []
    assert wire.sent() == []


@pytest.mark.parametrize("raw", [frame(SETTINGS, ACK), PINGED, request(1), frame(99)])
def test_the_first_frame_is_settings(raw: bytes) -> None:
    """RFC 9113 section 3.4."""
    assert Wire(greeting=b"").fault(PREFACE + raw) == H2Code.PROTOCOL_ERROR


@pytest.mark.parametrize(
    ("raw", "code"),
    [
        (frame(SETTINGS, 0, 1), H2Code.PROTOCOL_ERROR),
        (frame(SETTINGS, 0, 0, bytes(5)), H2Code.FRAME_SIZE_ERROR),
        (frame(SETTINGS, ACK, 0, bytes(6)), H2Code.FRAME_SIZE_ERROR),
        (settings(s2=2), H2Code.PROTOCOL_ERROR),
        (settings(s4=2**31), H2Code.FLOW_CONTROL_ERROR),
        (settings(s5=16_383), H2Code.PROTOCOL_ERROR),
        (settings(s5=2**24), H2Code.PROTOCOL_ERROR),
    ],
)
def test_settings_that_are_invalid_end_the_connection(raw: bytes, code: H2Code) -> None:
    """RFC 9113 sections 6.5 and 6.5.2."""
    assert Wire().fault(raw) == code
    assert Wire().receive(settings(s2=1, s4=2**31 - 1, s5=2**24 - 1)) == []


def test_a_ping_is_answered_with_its_content() -> None:
    """RFC 9113 section 6.7."""
    wire = Wire()
    assert wire.receive(PINGED) == [("pinged",)]
    assert wire.sent() == [Frame(PING, ACK, 0, b"12345678")]
    assert wire.receive(frame(PING, ACK, 0, b"12345678")) == []
    assert wire.sent() == []
    wire.out.ping()
    assert wire.sent() == [Frame(PING, 0, 0, b"keepaliv")]


@pytest.mark.parametrize(
    ("raw", "code"),
    [
        (frame(PING, 0, 1, bytes(8)), H2Code.PROTOCOL_ERROR),
        (frame(PING, 0, 0, bytes(7)), H2Code.FRAME_SIZE_ERROR),
        (frame(PING, ACK, 0, bytes(9)), H2Code.FRAME_SIZE_ERROR),
        (frame(GOAWAY, 0, 1, bytes(8)), H2Code.PROTOCOL_ERROR),
        (frame(GOAWAY, 0, 0, bytes(7)), H2Code.FRAME_SIZE_ERROR),
        (frame(PRIORITY, 0, 0, bytes(5)), H2Code.PROTOCOL_ERROR),
        (frame(8, 0, 0, bytes(3)), H2Code.FRAME_SIZE_ERROR),
        (window_update(0, 0), H2Code.PROTOCOL_ERROR),
    ],
)
def test_frames_of_the_connection_have_stream_0_and_a_size(raw: bytes, code: H2Code) -> None:
    """RFC 9113 sections 6.3, 6.7, 6.8 and 6.9."""
    assert Wire().fault(raw) == code


def test_frames_of_unknown_types_are_ignored() -> None:
    """RFC 9113 section 5.5."""
    wire = Wire()
    assert wire.receive(frame(99, 255, 1, b"anything") + frame(10, 0, 0, bytes(16_384)) + request(1)) == [
        ("begins", 1, "/a", True)
    ]


def test_priorities_are_ignored() -> None:
    """RFC 9113 section 5.3.2."""
    wire = Wire()
    assert wire.receive(frame(PRIORITY, 0, 1, bytes(5)) + headers(1) + frame(PRIORITY, 0, 1, bytes(5))) == [
        ("begins", 1, "/a", False)
    ]
    assert wire.sent() == []


@pytest.mark.parametrize(
    ("payload", "code", "fault"),
    [
        (bytes(4), H2Code.FRAME_SIZE_ERROR, "PRIORITY whose size is not 5"),
        (b"\0\0\0\1\0", H2Code.PROTOCOL_ERROR, "a stream that depends on itself"),
        (b"\x80\0\0\1\0", H2Code.PROTOCOL_ERROR, "a stream that depends on itself"),
    ],
)
def test_a_malformed_priority_ends_its_stream(payload: bytes, code: H2Code, fault: str) -> None:
    """RFC 9113 section 6.3, RFC 7540 section 5.3.1; an idle stream cannot be reset (section 6.4)."""
    raw = frame(PRIORITY, 0, 1, payload)
    assert Wire().fault(raw) == code
    wire = Wire()
    wire.receive(headers(1))
    assert wire.receive(raw) == [("reset", 1, fault)]
    assert wire.sent() == [reset(1, code)]
    assert wire.receive(raw) == []
    assert wire.sent() == [reset(1, code)]


def test_after_a_fault_nothing_more_is_read() -> None:
    """RFC 9113 section 5.4.1."""
    wire = Wire()
    wire.receive(headers(1) + headers(3))
    assert wire.receive(frame(SETTINGS, 0, 1) + request(5)) == [("fails", H2Code.PROTOCOL_ERROR, [1, 3])]
    assert wire.sent() == frames_of(goaway(3, 1, b"SETTINGS on stream 1"))
    assert wire.receive(request(7)) == []
    assert (wire.connection.is_failed, wire.connection.is_over) == (True, True)
    wire.connection.send_away()
    wire.connection.shut_down()
    wire.connection.send_final_goaway()
    assert wire.sent() == []


def test_a_client_that_leaves_is_served_to_the_end_of_its_requests() -> None:
    """RFC 9113 section 6.8."""
    wire = Wire()
    wire.receive(headers(1))
    assert not wire.connection.is_left
    assert wire.receive(goaway(0, 0, b"bye")) == []
    assert (wire.connection.is_left, wire.connection.is_over) == (True, False)
    wire.receive(rst_stream(1))
    assert wire.connection.is_over


# The server's GOAWAY.

FIRST = Frame(GOAWAY, 0, 0, pack(">II", 2**31 - 1, 0) + b"drain")
LAST_PING, SECOND_PING = b"shutdown", b"lastcall"


def last(stream: int, code: int = 0, text: bytes = b"") -> Frame:
    return Frame(GOAWAY, 0, 0, pack(">II", stream, code) + text)


def test_a_client_that_is_sent_away_is_still_served() -> None:
    wire = Wire()
    wire.connection.send_away("drain")
    wire.connection.send_away("again")
    assert wire.sent() == [FIRST]
    assert wire.receive(request(1)) == [("begins", 1, "/a", True)]
    assert not wire.connection.is_over


def test_a_shutdown_waits_for_requests_on_their_way() -> None:
    """RFC 9113 section 6.8."""
    wire = Wire()
    wire.receive(headers(1))
    wire.connection.shut_down("drain")
    assert wire.sent() == [FIRST, Frame(PING, 0, 0, LAST_PING)]
    assert wire.receive(headers(3)) == [("begins", 3, "/a", False)]
    assert wire.receive(frame(PING, ACK, 0, LAST_PING)) == []
    assert wire.sent() == [Frame(PING, 0, 0, SECOND_PING)]
    # gRPC's clients answer the ping first, and then send what they had begun.
    assert wire.receive(headers(5)) == [("begins", 5, "/a", False)]
    assert wire.receive(frame(PING, ACK, 0, SECOND_PING)) == []
    assert wire.sent() == [last(5)]
    wire.connection.shut_down()
    wire.connection.send_final_goaway()
    assert wire.receive(frame(PING, ACK, 0, LAST_PING)) == []
    assert wire.sent() == []


def test_another_answer_to_a_ping_is_not_the_last_one() -> None:
    wire = Wire()
    for each in (LAST_PING, SECOND_PING):
        assert wire.receive(frame(PING, ACK, 0, each)) == []
    assert wire.sent() == []
    wire.connection.shut_down("drain")
    wire.sent()
    assert wire.receive(frame(PING, ACK, 0, b"keepaliv")) == []
    assert wire.sent() == []


def test_requests_after_the_last_one_are_ignored_but_decoded() -> None:
    """RFC 9113 section 6.8."""
    wire = Wire()
    wire.receive(headers(1))
    wire.connection.send_final_goaway()
    assert wire.sent() == [last(1)]
    unserved = headers(3) + frame(DATA, 0, 3, b"x") + headers(3, [], END_HEADERS | END_STREAM)
    assert wire.receive(unserved + window_update(3, 1) + rst_stream(3)) == []
    assert wire.receive(frame(HEADERS, END_HEADERS, 5, b"\x40\1x\x011")) == []
    assert wire.sent() == []
    # The table is that of the client: its newest field is in the trailers of the request that is served.
    assert wire.receive(frame(HEADERS, END_HEADERS | END_STREAM, 1, b"\xbe")) == [("ends", 1)]


def test_data_of_requests_that_are_not_served_is_credited_to_the_connection() -> None:
    wire = Wire(Http2Limits(connection_window=70_000))
    wire.connection.send_final_goaway()
    wire.sent()
    wire.receive(headers(1))
    for _ in range(3):
        wire.receive(frame(DATA, 0, 1, bytes(16_000)))
    assert wire.sent() == frames_of(window_update(0, 48_000))


def test_the_connection_is_over_when_the_last_request_is() -> None:
    wire = Wire()
    wire.receive(headers(1))
    wire.connection.send_final_goaway()
    assert not wire.connection.is_over
    wire.receive(rst_stream(1))
    assert wire.connection.is_over


def test_the_number_of_goaway_never_grows() -> None:
    """RFC 9113 section 6.8."""
    wire = Wire()
    wire.receive(headers(1))
    wire.connection.send_final_goaway()
    wire.receive(headers(3))
    assert wire.connection.fail(ConnectionFault(H2Code.ENHANCE_YOUR_CALM, "calm"))[0].id == 1
    assert wire.sent() == [last(1), last(1, 11, b"calm")]


# Floods (RFC 9113 section 10.5).

TRAILERS = frame(HEADERS, END_HEADERS | END_STREAM, 1)
REQUESTS = [headers(number) + rst_stream(number) for number in range(3, 10_001, 2)]
MALFORMED = [headers(number, REQUEST[1:]) for number in range(3, 10_001, 2)]
UNSERVED = [headers(number) for number in range(3, 40_001, 2)]


def ended() -> Wire:
    """A connection with a request that the server has reset, and one that is open."""
    wire = Wire()
    wire.receive(headers(1))
    wire.out.reset(wire.stream(1), H2Code.CANCEL)
    wire.sent()
    return wire


def opened() -> Wire:
    wire = Wire()
    wire.receive(headers(1))
    return wire


def refusing() -> Wire:
    wire = Wire(Http2Limits(max_streams=0))
    wire.sent()
    return wire


def leaving() -> Wire:
    wire = Wire()
    wire.connection.send_final_goaway()
    wire.sent()
    return wire


SPENT_BY_GREETING = CHEAP


@pytest.mark.parametrize(
    ("wire", "sent", "cost", "what"),
    [
        (Wire, [PINGED], CHEAP, "PING frames"),
        (Wire, [frame(PING, ACK, 0, bytes(8))], CHEAP, "PING frames"),
        (Wire, [frame(SETTINGS)], CHEAP, "SETTINGS frames"),
        (Wire, [frame(SETTINGS, ACK)], CHEAP, "SETTINGS frames"),
        (Wire, [frame(PRIORITY, 0, 1, bytes(5))], CHEAP, "PRIORITY frames"),
        (Wire, [goaway(0, 0)], CHEAP, "GOAWAY frames"),
        (Wire, [frame(99)], CHEAP, "frames of unknown types"),
        (opened, [window_update(1, 1)], CHEAP, "WINDOW_UPDATE frames"),
        (Wire, [window_update(0, 1)], CHEAP, "WINDOW_UPDATE frames"),
        (opened, [frame(DATA, 0, 1)], CHEAP, "empty DATA frames"),
        (ended, [frame(DATA, 0, 1)], CHEAP, "frames of closed streams"),
        (ended, [TRAILERS], CHEAP, "frames of closed streams"),
        (ended, [rst_stream(1)], CHEAP, "RST_STREAM frames"),
        (Wire, REQUESTS, RESET, "requests that are reset"),
        (Wire, MALFORMED, RESET, "malformed requests"),
        (refusing, MALFORMED, RESET, "requests above the limit of concurrent ones"),
        (leaving, UNSERVED, CHEAP, "requests after the last one that is served"),
    ],
)
def test_frames_that_bring_nothing_forward_are_limited(wire, sent: list[bytes], cost: float, what: str) -> None:  # type: ignore[no-untyped-def]
    flooded: Wire = wire()
    allowed = int((BURST - SPENT_BY_GREETING) / cost)
    many = sent * (allowed + 1) if len(sent) == 1 else sent
    assert not any(event[0] == "fails" for event in flooded.receive(*many[:allowed]))
    assert flooded.fault(many[allowed]) == H2Code.ENHANCE_YOUR_CALM
    flooded = wire()
    flooded.receive(*many[:allowed])
    flooded.sent()
    flooded.receive(many[allowed])
    assert flooded.sent()[-1].payload[8:] == b"too many " + what.encode()


def test_streams_that_end_by_their_clients_faults_are_limited() -> None:
    wire = Wire()
    faults = [headers(number) + window_update(number, 0) for number in range(1, 6_001, 2)]
    # Each costs a WINDOW_UPDATE besides.
    allowed = int((BURST - SPENT_BY_GREETING) / (RESET + CHEAP))
    assert not any(event[0] == "fails" for event in wire.receive(*faults[:allowed]))
    assert wire.fault(faults[allowed]) == H2Code.ENHANCE_YOUR_CALM


def test_the_rate_of_a_flood_is_measured_in_time() -> None:
    wire = Wire()
    for second in range(5):
        wire.now = float(second)
        assert wire.receive(PINGED * 5_000) == [("pinged",)] * 5_000


@pytest.mark.parametrize("is_cut", [False, True])
def test_many_fields_of_a_request_cost_as_much_as_frames(is_cut: bool) -> None:
    wire = Wire()
    content = block([*REQUEST, *[(b"x", b"")] * 1_000])
    allowed = (BURST - SPENT_BY_GREETING) // (1_004 - USUAL_FIELDS)
    sent = []
    for number in range(1, 100, 2):
        first = frame(HEADERS, END_STREAM | (0 if is_cut else END_HEADERS), number, content)
        sent.append(first + (frame(CONTINUATION, END_HEADERS, number) if is_cut else b""))
    events = wire.receive(*sent)
    assert [event[0] for event in events] == ["begins"] * (int(allowed) + 1) + ["fails"]
    assert wire.sent()[-1].payload[8:] == b"too many header fields"


def test_a_frame_or_a_block_that_is_incomplete_is_known() -> None:
    wire = Wire()
    assert not wire.connection.is_within
    wire.receive(PINGED[:5])
    assert wire.connection.is_within
    wire.receive(PINGED[5:] + frame(HEADERS, 0, 1))
    assert wire.connection.is_within
    wire.receive(frame(CONTINUATION, END_HEADERS, 1, block(REQUEST)))
    assert not wire.connection.is_within
    wire.receive(frame(DATA, 0, 1, b"abc")[:10])
    assert not wire.connection.is_within


def test_empty_continuations_are_limited_by_their_block() -> None:
    assert Wire().fault(frame(HEADERS, 0, 1) + frame(CONTINUATION, 0, 1) * 17) == H2Code.ENHANCE_YOUR_CALM


def test_a_flood_that_ends_in_data_received_directly_ends_the_connection() -> None:
    wire = Wire()
    wire.receive(headers(1, (*REQUEST, (b"content-length", b"1"))))
    wire.receive(PINGED * int(BURST - SPENT_BY_GREETING))
    assert wire.receive(frame(DATA, 0, 1, b"xyz")[:9]) == [("data", 1, b"", 3, False)]
    (event,) = wire.connection.received_directly(memoryview(b"xyz"), wire.now)
    assert type(event).__name__ == "ConnectionFails"
    assert wire.connection.is_failed
