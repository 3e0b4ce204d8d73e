"""The receiving half alone: lists of bytes and events, cut at every position, without a loop or a transport."""

from collections.abc import Iterator

import pytest

from halimede.frontends.http.deadlines import ReceiveDeadlines
from halimede.frontends.http.framing import Limits, Refusal
from halimede.frontends.http.receiver import NEXT, Receiver, ReceiverEvent, ReceiverState
from halimede.frontends.http.shared import Shared

GET = b"GET /a HTTP/1.1\r\nHost: x\r\n\r\n"
POST = b"POST /b HTTP/1.1\r\nHost: x\r\nContent-Length: 5\r\n\r\nhello"
CHUNKS = b"POST /c HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nhe\r\n3\r\nllo\r\n0\r\n\r\n"
REFUSED = b"POST /d HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n"


def make(limits: Limits | None = None, max_body: int = 1 << 20) -> Receiver:
    return Receiver(Shared(limits or Limits(), max_body))


def feed(receiver: Receiver, data: bytes, now: float = 0.0) -> Iterator[ReceiverEvent | None]:
    """Receive as a transport does; yields an event for each buffer."""
    while data:
        room = receiver.room()
        size = min(len(room), len(data))
        room[:size] = data[:size]
        data = data[size:]
        yield receiver.received(size, now)


@pytest.mark.parametrize(
    ("data", "events"),
    [
        (GET, [ReceiverEvent.REQUEST]),
        (POST, [ReceiverEvent.REQUEST]),
        (CHUNKS, [ReceiverEvent.REQUEST]),
        (GET[:-1], [None]),
        (POST[:-1], [ReceiverEvent.BODY_BEGINS]),
        (CHUNKS[:-1], [ReceiverEvent.CHUNKS_BEGIN]),
    ],
)
def test_events_of_received_bytes(data: bytes, events: list[ReceiverEvent | None]) -> None:
    assert list(feed(make(), data)) == events


def test_no_request_begins_while_the_receiver_is_paused() -> None:
    receiver = make()
    receiver.is_held_back = True
    assert list(feed(receiver, GET)) == [None]
    assert (receiver.is_full, receiver.can_go_on) == (True, False)
    receiver.is_held_back = False
    assert (receiver.is_full, receiver.can_go_on) == (False, True)
    assert receiver.go_on(0.0) is ReceiverEvent.REQUEST


def test_after_a_refusal_input_is_discarded_up_to_the_limit() -> None:
    receiver = make(Limits(linger_bytes=100))
    with pytest.raises(Refusal):
        list(feed(receiver, REFUSED))
    receiver.refuse()
    assert list(feed(receiver, b"x" * 100)) == [None]
    assert list(feed(receiver, b"x")) == [ReceiverEvent.ENDED]
    assert receiver.state is ReceiverState.CLOSED
    assert list(feed(receiver, GET)) == [None]


def test_the_rest_of_a_refused_body_is_discarded_too() -> None:
    """Clients send all of a body before they read: without this, a reset connection would hide the answer."""
    shared = Shared(Limits(linger_bytes=100, max_held_bytes=1000), 1 << 20)
    shared.wire.take(600)
    receiver = Receiver(shared)
    list(feed(receiver, b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 1000\r\n\r\n"))
    with pytest.raises(Refusal) as refused:
        list(feed(receiver, b"x" * 500))
    receiver.refuse()
    assert refused.value.status == 503
    assert set(feed(receiver, b"x" * (1000 - 500 + 100))) == {None}
    assert list(feed(receiver, b"x")) == [ReceiverEvent.ENDED]


def test_a_body_that_can_never_be_held_is_refused_before_it_arrives() -> None:
    receiver = make(Limits(max_held_bytes=600))
    with pytest.raises(Refusal) as refused:
        list(feed(receiver, b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 601\r\n\r\n"))
    text = "a body of 601 bytes does not fit into the 600 that the server may hold"
    assert (refused.value.status, refused.value.message) == (503, text)


def test_held_bytes_are_released_by_answer_refusal_and_end() -> None:
    shared = Shared(Limits(), 1 << 20)
    head = b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 1000\r\n\r\n"
    for end in (Receiver.refuse, Receiver.end):
        receiver = Receiver(shared)
        list(feed(receiver, head + b"x" * 400))
        assert shared.wire.held_bytes == 400
        end(receiver)
        assert shared.wire.held_bytes == 0
    receiver = Receiver(shared)
    list(feed(receiver, head))
    list(feed(receiver, b"x" * 1000))
    assert shared.wire.held_bytes == 1000
    receiver.answered()
    assert shared.wire.held_bytes == 0


def test_every_state_of_the_table_is_reachable_and_the_end_is_final() -> None:
    reached = {target for row in NEXT.values() for target in row.values()}
    assert reached == set(ReceiverState)
    assert set(NEXT) == set(ReceiverEvent)
    assert {event for event, row in NEXT.items() if ReceiverState.CLOSED in row} == {ReceiverEvent.ENDED}
    assert set(NEXT[ReceiverEvent.ENDED]) == set(ReceiverState)


def test_event_outside_the_table_is_a_fault() -> None:
    with pytest.raises(KeyError):
        make().answered()


def test_deadlines_depend_on_what_is_received() -> None:
    shared = Shared(Limits(head_timeout_s=10, body_progress_s=5, body_progress_bytes=100), 1 << 20)
    receiver, deadlines = Receiver(shared), ReceiveDeadlines(shared)
    for now in (0.0, 1000.0):
        deadlines.check(receiver, now)
    assert deadlines.is_idle_since(0.0, receiver.requests)
    list(feed(receiver, POST[:20]))
    deadlines.check(receiver, 1001.0)
    deadlines.check(receiver, 1010.9)
    with pytest.raises(Refusal, match="headers were not complete after 10 s"):
        deadlines.check(receiver, 1011.0)
    list(feed(receiver, POST[20:-1]))
    deadlines.check(receiver, 1012.0)
    assert not deadlines.is_idle_since(1000.0, receiver.requests)
    with pytest.raises(Refusal, match="brought less than 100 bytes in 5 s"):
        deadlines.check(receiver, 1017.0)
    list(feed(receiver, POST[-1:]))
    deadlines.check(receiver, 9000.0)
