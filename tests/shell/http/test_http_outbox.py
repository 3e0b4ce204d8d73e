"""The sending half alone: answers, the bytes to write, and the end of the connection."""

import pytest

from halimede.frontends.http.deadlines import SendDeadline
from halimede.frontends.http.framing import CLOSE, KEEP_ALIVE, Head, Limits
from halimede.frontends.http.outbox import NEXT, Outbox, OutboxEvent, OutboxState
from halimede.frontends.http.shared import Shared


def head(connection: bytes = b"", *, method: bytes = b"GET", takes_chunks: bool = True) -> Head:
    return Head(method, b"/", {}, connection, 0, takes_chunks=takes_chunks)


def make(limits: Limits | None = None) -> tuple[Outbox, Shared]:
    shared = Shared(limits or Limits(), 1 << 20)
    return Outbox(shared), shared


@pytest.mark.parametrize(
    ("asked", "is_leaving", "line", "state"),
    [
        (b"", False, b"", OutboxState.OPEN),
        (KEEP_ALIVE, False, KEEP_ALIVE, OutboxState.OPEN),
        (CLOSE, False, CLOSE, OutboxState.ENDED),
        (b"", True, CLOSE, OutboxState.ENDED),
        (KEEP_ALIVE, True, CLOSE, OutboxState.ENDED),
    ],
)
def test_answer_closes_if_client_or_listener_requests_it(
    asked: bytes, is_leaving: bool, line: bytes, state: OutboxState
) -> None:
    outbox, shared = make()
    shared.is_leaving = is_leaving
    answer = b"HTTP/1.1 200 OK\r\nA: b\r\nContent-Length: 3\r\n%b\r\nxyz" % line
    assert outbox.answer(head(asked), 200, b"A: b\r\n", (b"x", b"yz")) == (answer,)
    assert outbox.state is state


@pytest.mark.parametrize(
    ("asked", "takes_chunks", "leaves", "drains", "state"),
    [
        (b"", True, False, False, OutboxState.OPEN),
        (b"", True, False, True, OutboxState.ENDED),
        (CLOSE, True, False, False, OutboxState.ENDED),
        (b"", True, True, False, OutboxState.ENDED),
        (b"", False, False, False, OutboxState.ENDED),
    ],
)
def test_answer_in_parts_closes_the_connection_if_needed(
    asked: bytes, takes_chunks: bool, leaves: bool, drains: bool, state: OutboxState
) -> None:
    outbox, shared = make()
    shared.is_leaving = leaves
    asking = head(asked, takes_chunks=takes_chunks)
    opening = outbox.open_parts(asking, 200, b"")
    shared.is_leaving = True
    shared.is_draining = drains
    written = b"".join([*outbox.part(asking, opening, (b"a",), is_last=False)])
    assert (CLOSE in written) == (asked == CLOSE or leaves or not takes_chunks)
    assert outbox.state is (OutboxState.LAST if CLOSE in written else OutboxState.PARTS)
    written = b"".join([*outbox.part(asking, b"", (b"b",), is_last=True)])
    assert written == (b"1\r\nb\r\n0\r\n\r\n" if takes_chunks else b"b")
    assert outbox.state is state


def test_a_refusal_is_the_last_answer_and_has_retry_after() -> None:
    outbox, shared = make(Limits(linger_s=5.0))
    (answer,) = outbox.refusal(None, 503, "no room")
    assert b"\r\nRetry-After: 1\r\n" in bytes(answer)
    assert bytes(answer).endswith(CLOSE + b"\r\n" + b'{"error":"no room"}')
    assert (outbox.state, outbox.linger_s()) == (OutboxState.ENDED, 5.0)
    shared.is_draining = True
    assert outbox.linger_s() == 0.5


def test_unsent_bytes_of_all_connections_are_counted_together() -> None:
    first, shared = make()
    second = Outbox(shared)
    first.count_unsent(100)
    second.count_unsent(30)
    assert first.hold(7, 100)
    assert not first.hold(7, 100)
    assert (first.unsent_bytes, shared.unsent_bytes) == (107, 137)
    first.lose()
    second.count_unsent(0)
    assert (first.state, shared.unsent_bytes) == (OutboxState.ENDED, 0)


def test_every_state_of_the_table_is_reachable_and_the_end_is_final() -> None:
    assert {target for row in NEXT.values() for target in row.values()} == set(OutboxState)
    assert set(NEXT) == set(OutboxEvent)
    assert {event for event, row in NEXT.items() if OutboxState.ENDED in row} == {OutboxEvent.LOST}


def test_only_a_client_that_reads_nothing_is_disconnected() -> None:
    _, shared = make(Limits(write_timeout_s=60.0))
    stalled, slow = SendDeadline(shared), SendDeadline(shared)
    for now in range(60):
        # A stream adds three bytes each second; one client reads one byte of them.
        assert not stalled.is_over(1000 + 3 * now, 3 * now, float(now))
        assert not slow.is_over(1000 + 2 * now, 3 * now, float(now))
    assert stalled.is_over(1180, 180, 60.0)
    assert not slow.is_over(1120, 180, 60.0)
    assert sorted([slow, stalled], key=SendDeadline.order) == [stalled, slow]
