"""Flow control in both directions: answers within the client's windows, and credit for its DATA."""

from struct import pack

import pytest
from hypothesis import given
from hypothesis import strategies as st

from halimede.core.wire.http2.codes import H2Code
from halimede.core.wire.http2.limits import Http2Limits
from support.http2 import (
    DATA,
    END_HEADERS,
    END_STREAM,
    HEADERS,
    PADDED,
    SETTINGS,
    WINDOW_UPDATE,
    Frame,
    Wire,
    frame,
    headers,
    padded,
    request,
    rst_stream,
    settings,
    window_update,
)

MAX_WINDOW = 2**31 - 1


def requested(*streams: int, window: int | None = None) -> Wire:
    """A client with complete requests, whose streams have this window."""
    wire = Wire()
    if window is not None:
        wire.receive(settings(s4=window))
    for stream in streams:
        wire.receive(request(stream))
    wire.sent()
    return wire


def head(stream: int, content: bytes = b"h") -> Frame:
    return Frame(HEADERS, END_HEADERS, stream, content)


def trailers(stream: int, content: bytes = b"t") -> Frame:
    return Frame(HEADERS, END_HEADERS | END_STREAM, stream, content)


def data(stream: int, content: bytes) -> Frame:
    return Frame(DATA, 0, stream, content)


def reset(stream: int, code: H2Code) -> Frame:
    return Frame(3, 0, stream, pack(">I", code))


def credited(stream: int, size: int) -> Frame:
    return Frame(WINDOW_UPDATE, 0, stream, pack(">I", size))


# Answers.


def test_a_whole_answer_closes_its_stream() -> None:
    wire = requested(1)
    stream = wire.stream(1)
    assert not wire.out.has_sent
    wire.out.answer(stream, b"h", [b"ab", memoryview(b"c")], 3, b"t")
    assert wire.sent() == [head(1), data(1, b"abc"), trailers(1)]
    assert (stream.is_closed, wire.connection.table.all(), wire.out.has_sent) == (True, [], True)


def test_an_answer_in_parts() -> None:
    wire = requested(1)
    stream = wire.stream(1)
    wire.out.respond(stream, b"h")
    assert wire.out.has_sent
    wire.out.send(stream, [b"ab"], 2)
    wire.out.send(stream, [b"c", b"d"], 2)
    wire.out.finish(stream, b"t")
    assert wire.sent() == [head(1), data(1, b"ab"), data(1, b"cd"), trailers(1)]
    assert stream.is_closed


def test_an_answer_may_be_a_header_block_alone_or_end_without_trailers() -> None:
    wire = requested(1, 3)
    wire.out.respond(wire.stream(1), b"t", is_end=True)
    wire.out.respond(wire.stream(3), b"h")
    wire.out.finish(wire.stream(3))
    assert wire.sent() == [trailers(1), head(3), Frame(DATA, END_STREAM, 3, b"")]


def test_the_rest_of_a_request_that_is_answered_is_not_read() -> None:
    """RFC 9113 section 8.1."""
    for end in ("answer", "respond", "finish"):
        wire = Wire()
        wire.receive(headers(1))
        stream = wire.stream(1)
        match end:
            case "answer":
                wire.out.answer(stream, b"h", [b"a"], 1, b"t")
            case "respond":
                wire.out.respond(stream, b"t", is_end=True)
            case _:
                wire.out.finish(stream)
        assert wire.sent()[-1] == reset(1, H2Code.NO_ERROR)
        assert stream.is_closed
        assert wire.receive(frame(DATA, 0, 1, b"late")) == []
        assert wire.sent() == []


def test_nothing_is_sent_on_a_stream_that_is_closed() -> None:
    wire = requested(1)
    stream = wire.stream(1)
    wire.receive(rst_stream(1))
    wire.out.answer(stream, b"h", [b"a"], 1, b"t")
    wire.out.respond(stream, b"h")
    wire.out.send(stream, [b"a"], 1)
    wire.out.finish(stream)
    wire.out.reset(stream, H2Code.CANCEL)
    assert wire.sent() == []
    assert wire.connection.table.unsent_bytes == 0


def test_data_is_cut_to_the_frame_size_of_the_client() -> None:
    """RFC 9113 section 4.2."""
    content = bytes(range(250)) * 200
    wire = requested(1)
    wire.out.send(wire.stream(1), [content], len(content))
    assert [len(each.payload) for each in wire.sent()] == [16_384, 16_384, 16_384, 50_000 - 3 * 16_384]
    wire = requested(1)
    wire.receive(settings(s5=20_000))
    wire.sent()
    wire.out.send(wire.stream(1), [content], len(content))
    sent = wire.sent()
    assert [len(each.payload) for each in sent] == [20_000, 20_000, 10_000]
    assert b"".join(each.payload for each in sent) == content


@pytest.mark.parametrize("send_at_once", [True, False])
def test_data_waits_for_the_window_of_its_stream(send_at_once: bool) -> None:
    """RFC 9113 section 6.9."""
    wire = requested(1, window=3)
    stream = wire.stream(1)
    if send_at_once:
        wire.out.answer(stream, b"h", [b"ab", b"cdef"], 6, b"t")
    else:
        wire.out.respond(stream, b"h")
        wire.out.send(stream, [b"ab", b"cdef"], 6)
        wire.out.finish(stream, b"t")
    assert wire.sent() == [head(1), data(1, b"abc")]
    assert (stream.unsent_bytes, wire.connection.table.unsent_bytes) == (3, 3)
    assert wire.receive(window_update(1, 2)) == []
    assert wire.sent() == [data(1, b"de")]
    assert wire.receive(window_update(1, 2)) == []
    assert wire.sent() == [data(1, b"f"), trailers(1)]
    assert (stream.sent_bytes, wire.connection.table.unsent_bytes) == (6, 0)


def test_the_application_is_told_when_a_stream_has_room_again() -> None:
    wire = requested(1, window=1)
    stream = wire.stream(1)
    wire.out.send(stream, [b"ab"], 2)
    wire.out.send(stream, [b"c"], 1)
    assert wire.receive(window_update(1, 1)) == []
    assert wire.receive(window_update(1, 1)) == [("room", 1)]
    assert wire.sent() == [data(1, b"a"), data(1, b"b"), data(1, b"c")]
    assert wire.receive(window_update(1, 5)) == []
    wire.out.finish(stream)
    assert wire.sent() == [Frame(DATA, END_STREAM, 1, b"")]


def test_an_empty_message_needs_no_window() -> None:
    wire = requested(1, 3, window=0)
    wire.out.send(wire.stream(1), [b""], 0)
    wire.out.finish(wire.stream(1), b"t")
    wire.out.answer(wire.stream(3), b"h", [], 0, b"t")
    assert wire.sent() == [trailers(1), head(3), data(3, b""), trailers(3)]


def test_the_window_of_the_connection_is_that_of_all_streams() -> None:
    """RFC 9113 section 6.9.1."""
    wire = requested(1, 3, window=100_000)
    wire.out.send(wire.stream(1), [bytes(40_000)], 40_000)
    wire.out.send(wire.stream(3), [bytes(40_000)], 40_000)
    assert sum(len(each.payload) for each in wire.sent()) == 65_535
    assert wire.receive(window_update(0, 10_000)) == []
    assert sum(len(each.payload) for each in wire.sent()) == 10_000
    assert wire.receive(window_update(0, 10_000)) == [("room", 3)]
    assert sum(len(each.payload) for each in wire.sent()) == 4_465


def test_a_short_answer_waits_for_the_window_of_the_connection() -> None:
    wire = requested(1, 3, window=100_000)
    wire.out.send(wire.stream(1), [bytes(65_534)], 65_534)
    wire.sent()
    wire.out.answer(wire.stream(3), b"h", [b"ab"], 2, b"t")
    assert wire.sent() == [head(3), data(3, b"a")]
    assert wire.receive(window_update(0, 1)) == []
    assert wire.sent() == [data(3, b"b"), trailers(3)]


def test_windows_become_negative_when_settings_make_them_smaller() -> None:
    """RFC 9113 section 6.9.2."""
    wire = requested(1, window=10)
    stream = wire.stream(1)
    wire.out.send(stream, [b"12345678"], 8)
    wire.sent()
    wire.receive(settings(s4=3))
    wire.out.send(stream, [b"abcdef"], 6)
    wire.sent()
    assert wire.receive(window_update(1, 5)) == []
    assert wire.sent() == []
    assert wire.receive(window_update(1, 1)) == []
    assert wire.sent() == [data(1, b"a")]
    assert wire.receive(settings(s4=8)) == [("room", 1)]
    assert wire.sent() == [Frame(SETTINGS, 1, 0, b""), data(1, b"bcdef")]
    wire.receive(request(3))
    assert wire.stream(3).send_window == 8


def test_streams_that_wait_take_turns_of_one_frame() -> None:
    wire = requested(1, 3, 5, window=100_000)
    wire.out.room = 0
    for number, size in ((1, 40_000), (3, 20_000), (5, 10_000)):
        wire.out.send(wire.stream(number), [bytes(size)], size)
    assert wire.sent() == []
    assert wire.write(10**6) == [("room", 5), ("room", 3)]
    assert [(each.stream, len(each.payload)) for each in wire.sent()] == [
        (1, 16_384),
        (3, 16_384),
        (5, 10_000),
        (1, 16_384),
        (3, 3_616),
        (1, 65_535 - 62_768),
    ]


def test_streams_without_a_window_let_others_pass() -> None:
    wire = requested(1, 3, window=0)
    wire.out.send(wire.stream(1), [b"a"], 1)
    wire.out.send(wire.stream(3), [b"b"], 1)
    assert wire.receive(window_update(3, 1)) == [("room", 3)]
    assert wire.receive(window_update(1, 1)) == [("room", 1)]
    assert wire.sent() == [data(3, b"b"), data(1, b"a")]


def test_streams_that_have_no_window_keep_their_order() -> None:
    wire = requested(1, 3, window=0)
    for number in (1, 3):
        wire.out.send(wire.stream(number), [b"a"], 1)
    assert wire.receive(window_update(0, 1)) == []
    assert wire.receive(settings(s4=9)) == [("room", 1), ("room", 3)]


def test_a_stream_that_is_reset_waits_no_more() -> None:
    wire = requested(1, 3, window=0)
    for number in (1, 3):
        wire.out.send(wire.stream(number), [b"a"], 1)
    wire.receive(rst_stream(1))
    assert wire.connection.table.unsent_bytes == 1
    assert wire.receive(settings(s4=9)) == [("room", 3)]


def test_streams_that_were_reset_while_they_waited_are_not_kept() -> None:
    wire = requested(window=0)
    for number in range(1, 2_001, 2):
        wire.receive(request(number))
        wire.out.send(wire.stream(number), [b"a"], 1)
        wire.receive(rst_stream(number))
    wire.receive(request(2_001))
    wire.out.send(wire.stream(2_001), [b"a"], 1)
    assert wire.receive(settings(s4=9)) == [("room", 2_001)]


def test_answers_wait_for_room_of_the_transport() -> None:
    wire = requested(1, 3)
    wire.out.room = 3
    wire.out.answer(wire.stream(1), b"h", [b"abcd"], 4, b"t")
    wire.out.answer(wire.stream(3), b"h", [b"xy"], 2, b"t")
    assert wire.sent() == [head(1), data(1, b"abcd"), trailers(1), head(3)]
    assert wire.write(1) == []
    assert wire.sent() == [data(3, b"x")]
    assert wire.write(1) == []
    assert wire.sent() == [data(3, b"y"), trailers(3)]


def test_a_connection_that_has_ended_writes_nothing_that_waited() -> None:
    wire = requested(1, window=0)
    wire.out.send(wire.stream(1), [b"a"], 1)
    assert wire.fault(frame(SETTINGS, 0, 1)) == H2Code.PROTOCOL_ERROR
    assert wire.write(100) == []
    assert wire.sent() == []


def test_an_answer_that_is_cut_short_has_its_end_without_the_data_that_waits() -> None:
    wire = requested(1, 3, window=1)
    for number in (1, 3):
        wire.out.send(wire.stream(number), [b"abc"], 3)
    first, second = wire.stream(1), wire.stream(3)
    wire.sent()
    wire.out.cut_short(first)
    assert wire.sent() == []
    wire.out.finish(first, b"t")
    wire.out.cut_short(first)
    wire.out.cut_short(first)
    assert wire.sent() == [trailers(1)]
    assert (wire.connection.table.all(), wire.connection.table.unsent_bytes) == ([second], 2)
    assert wire.receive(window_update(1, 9) + window_update(3, 9)) == [("room", 3)]


@pytest.mark.parametrize(
    ("raw", "code"),
    [
        (window_update(1, 0), H2Code.PROTOCOL_ERROR),
        (window_update(1, MAX_WINDOW - 65_535 + 1), H2Code.FLOW_CONTROL_ERROR),
    ],
)
def test_a_window_of_a_stream_has_a_largest_size(raw: bytes, code: H2Code) -> None:
    """RFC 9113 sections 6.9 and 6.9.1."""
    wire = requested(1)
    assert wire.receive(window_update(1, MAX_WINDOW - 65_535)) == []
    wire = requested(1)
    ((kind, stream, _),) = wire.receive(raw)
    assert (kind, stream) == ("reset", 1)
    assert wire.sent() == [reset(1, code)]


def test_the_windows_of_the_connection_and_of_settings_have_a_largest_size() -> None:
    """RFC 9113 sections 6.9.1 and 6.9.2."""
    assert requested().receive(window_update(0, MAX_WINDOW - 65_535)) == []
    assert requested().fault(window_update(0, MAX_WINDOW - 65_535 + 1)) == H2Code.FLOW_CONTROL_ERROR
    wire = requested(1)
    wire.receive(window_update(1, 1))
    assert wire.fault(settings(s4=MAX_WINDOW)) == H2Code.FLOW_CONTROL_ERROR


def test_the_reserved_bit_of_a_window_update_is_ignored() -> None:
    """RFC 9113 section 6.9."""
    wire = requested(1, window=0)
    assert wire.receive(window_update(1, 1 << 31 | 5)) == []
    assert wire.stream(1).send_window == 5


@given(
    st.lists(st.tuples(st.integers(0, 2), st.integers(0, 40)), max_size=12),
    st.lists(st.tuples(st.integers(0, 3), st.integers(1, 30)), max_size=12),
)
def test_all_data_is_sent_in_order_when_the_windows_open(
    sent: list[tuple[int, int]], opened: list[tuple[int, int]]
) -> None:
    wire = requested(1, 3, 5, window=5)
    expected = {1: b"", 3: b"", 5: b""}
    for at, (which, size) in enumerate(sent):
        number = 2 * which + 1
        content = bytes((at,)) * size
        expected[number] += content
        wire.out.send(wire.stream(number), [content[: size // 2], content[size // 2 :]], size)
    for which, size in opened:
        wire.receive(settings(s4=size) if which == 3 else window_update(2 * which + 1, size))
    wire.receive(settings(s4=2**20))
    for number in expected:
        wire.out.finish(wire.stream(number))
    got = {1: b"", 3: b"", 5: b""}
    for each in wire.sent():
        if each.kind == DATA:
            got[each.stream] += each.payload
    assert got == expected


# Credit.

LIMITS = Http2Limits(window=100, connection_window=100_000)


def receiving(limits: Http2Limits = LIMITS) -> Wire:
    wire = Wire(limits)
    wire.receive(headers(1))
    return wire


def test_more_data_than_the_window_of_a_stream_ends_it() -> None:
    """RFC 9113 section 6.9.1."""
    wire = receiving()
    assert wire.receive(frame(DATA, 0, 1, bytes(100))) == [("data", 1, bytes(100), 100, False)]
    assert wire.receive(frame(DATA, 0, 1, b"x")) == [("reset", 1, "more DATA than the stream's window")]
    assert wire.sent() == [reset(1, H2Code.FLOW_CONTROL_ERROR)]
    assert receiving().receive(frame(DATA, PADDED, 1, padded(bytes(90), 10))) == [
        ("reset", 1, "more DATA than the stream's window")
    ]


def test_more_data_than_the_window_of_the_connection_ends_it() -> None:
    """RFC 9113 section 6.9.1."""
    for size, is_fault in ((70_000, False), (70_001, True)):
        wire = receiving(Http2Limits(connection_window=70_000))
        wire.connection.credit.expect(wire.stream(1), 70_001)
        assert (wire.receive(frame(DATA, 0, 1, bytes(size)))[0][:2] == ("fails", 3)) is is_fault


def test_the_window_of_the_connection_opens_without_the_application() -> None:
    wire = receiving(Http2Limits(connection_window=70_000))
    for _ in range(4):
        wire.receive(frame(DATA, 0, 1, bytes(16_000)))
        wire.receive(frame(DATA, END_STREAM, 1))
    assert wire.sent() == [reset(1, H2Code.STREAM_CLOSED), credited(0, 48_000)]


def test_credit_is_given_for_half_a_window_at_once() -> None:
    wire = receiving()
    stream = wire.stream(1)
    wire.receive(frame(DATA, 0, 1, bytes(90)))
    wire.connection.credit.use(stream, 49)
    assert wire.sent() == []
    wire.connection.credit.use(stream, 1)
    assert wire.sent() == [credited(1, 50)]
    assert wire.receive(frame(DATA, 0, 1, bytes(60)))[0][0] == "data"
    assert wire.receive(frame(DATA, 0, 1, b"x"))[0][0] == "reset"


def test_no_credit_is_given_when_no_data_is_to_come() -> None:
    wire = receiving()
    stream = wire.stream(1)
    wire.receive(frame(DATA, END_STREAM, 1, bytes(90)))
    wire.connection.credit.use(stream, 90)
    wire.connection.credit.expect(stream, 1000)
    wire.receive(rst_stream(1))
    wire.connection.credit.use(stream, 90)
    wire.connection.credit.expect(stream, 1000)
    assert wire.sent() == []


def test_the_window_opens_for_the_whole_of_an_expected_message() -> None:
    wire = receiving()
    stream = wire.stream(1)
    wire.receive(frame(DATA, 0, 1, bytes(30)))
    wire.connection.credit.use(stream, 30)
    wire.connection.credit.expect(stream, 70)
    assert wire.sent() == []
    wire.connection.credit.expect(stream, 1000)
    assert wire.sent() == [credited(1, 930)]
    wire.receive(frame(DATA, 0, 1, bytes(1000)))
    # The credit for what was expected is given already.
    wire.connection.credit.use(stream, 949)
    assert wire.sent() == []
    wire.connection.credit.use(stream, 1)
    assert wire.sent() == [credited(1, 50)]


def test_a_window_for_an_expected_message_has_a_largest_size() -> None:
    """RFC 9113 section 6.9.1."""
    wire = receiving()
    wire.connection.credit.expect(wire.stream(1), 2**32)
    assert wire.sent()[-1] == credited(1, MAX_WINDOW - 100)


def test_a_large_message_permits_large_frames_from_then_on() -> None:
    """RFC 9113 section 4.2."""
    wire = receiving(Http2Limits(large_frame_bytes=20_000))
    too_large = frame(DATA, 0, 1, bytes(20_001))
    wire.connection.credit.expect(wire.stream(1), 65_536)
    assert wire.sent() == []
    for _ in range(2):
        wire.connection.credit.expect(wire.stream(1), 65_537)
    assert wire.sent() == [Frame(SETTINGS, 0, 0, pack(">HI", 5, 20_000))]
    assert wire.receive(frame(DATA, 0, 1, bytes(20_000)))[0][0] == "data"
    assert wire.fault(too_large) == H2Code.FRAME_SIZE_ERROR
    assert receiving().fault(frame(DATA, 0, 1, bytes(16_385))) == H2Code.FRAME_SIZE_ERROR
