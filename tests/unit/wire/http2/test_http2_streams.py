"""The states of streams, and the table of one connection."""

import pytest

from halimede.core.wire.http2.streams import (
    CLOSED,
    HALF_CLOSED_LOCAL,
    HALF_CLOSED_REMOTE,
    NEXT,
    OPEN,
    Closed,
    Stream,
    StreamEvent,
    StreamState,
    StreamTable,
)


@pytest.mark.parametrize(
    ("state", "received_end", "sent_end"),
    [
        (OPEN, HALF_CLOSED_REMOTE, HALF_CLOSED_LOCAL),
        (HALF_CLOSED_REMOTE, None, CLOSED),
        (HALF_CLOSED_LOCAL, CLOSED, None),
        (CLOSED, None, None),
    ],
)
def test_the_states_of_rfc_9113_section_5_1(
    state: StreamState, received_end: StreamState | None, sent_end: StreamState | None
) -> None:
    assert NEXT[StreamEvent.RECEIVED_END].get(state) is received_end
    assert NEXT[StreamEvent.SENT_END].get(state) is sent_end
    assert NEXT[StreamEvent.RESET][state] is CLOSED


def opened(table: StreamTable[str], stream_id: int) -> Stream[str]:
    stream: Stream[str] = Stream(stream_id, 10, 20, None)
    table.open[stream_id] = stream
    return stream


def test_a_stream_is_closed_when_both_sides_have_ended() -> None:
    table: StreamTable[str] = StreamTable(4)
    stream = opened(table, 1)
    assert not table.end(stream)
    assert (stream.state, stream.is_closed, table.all()) == (HALF_CLOSED_LOCAL, False, [stream])
    stream = opened(table, 1)
    stream.state = HALF_CLOSED_REMOTE
    assert table.end(stream)
    assert (stream.is_closed, table.all(), table.why_closed(1)) == (True, [], Closed.ENDED)


def test_what_a_closed_stream_has_not_sent_is_dropped() -> None:
    table: StreamTable[str] = StreamTable(4)
    first, second, third = (opened(table, number) for number in (1, 3, 5))
    for stream in (first, second, third):
        stream.unsent_bytes = 10
        table.unsent_bytes += 10
    table.close(second, Closed.RESET_BY_CLIENT)
    assert (table.unsent_bytes, table.all(), table.why_closed(3)) == (20, [first, third], Closed.RESET_BY_CLIENT)
    assert table.close_all() == [first, third]
    assert (table.unsent_bytes, table.all(), table.why_closed(1)) == (0, [], None)
    assert first.is_closed


def test_why_a_stream_closed_is_known_for_the_last_ones() -> None:
    table: StreamTable[str] = StreamTable(2)
    for number in (1, 3, 5):
        table.remember(number, Closed.ENDED)
    table.remember(3, Closed.RESET_BY_SERVER)
    assert [table.why_closed(number) for number in (1, 3, 5, 7)] == [None, Closed.RESET_BY_SERVER, Closed.ENDED, None]


def test_a_stream_shows_its_number_and_state() -> None:
    assert repr(opened(StreamTable(1), 7)) == "<Stream 7 OPEN unsent=0>"
