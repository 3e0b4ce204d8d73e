"""The session of a stream: order, capacity, acknowledgements and ends, without a transport."""

from hypothesis import given
from hypothesis import strategies as st

from halimede.core.types import ErrorCode
from halimede.frontends.stream_session import StreamedRequest, StreamLimits, StreamSession
from support.refusals import error_of


class Tickets:
    """A server that records its calls."""

    def __init__(self) -> None:
        self.acknowledged: list[int] = []
        self.cancelled: list[int] = []

    def acknowledge(self, ticket: int, responses: int = 1) -> None:
        self.acknowledged += [ticket] * responses

    def cancel(self, ticket: int) -> None:
        self.cancelled.append(ticket)


def make(limits: StreamLimits | None = None) -> tuple[StreamSession[str], Tickets]:
    server = Tickets()
    return StreamSession(server, limits or StreamLimits()), server


def begin(session: StreamSession[str], ticket: int, *, is_ordered: bool = False) -> StreamedRequest[str]:
    slot = session.open(is_ordered=is_ordered)
    session.started(slot, ticket)
    return slot


def take_all(session: StreamSession[str]) -> list[str]:
    taken = []
    while session.unsent:
        taken.append(session.take().content)
    return taken


def test_ordered_answers_wait_for_earlier_requests_and_others_do_not() -> None:
    session, _ = make()
    first, second = (begin(session, ticket, is_ordered=True) for ticket in (1, 2))
    free = begin(session, 3)
    session.put(second, "second", 1, is_final=True)
    session.put(free, "free", 1, is_final=False)
    assert take_all(session) == ["free"]
    session.put(first, "first", 1, is_final=True)
    assert take_all(session) == ["first", "second"]
    session.put_end(free)
    assert session.is_idle
    silent = begin(session, 4, is_ordered=True)
    assert not session.is_idle
    session.put_end(silent)
    assert session.is_idle


@given(
    slots=st.lists(st.booleans(), min_size=1, max_size=6),
    choices=st.lists(st.tuples(st.integers(0, 5), st.booleans()), max_size=40),
)
def test_every_answer_leaves_once_and_in_order(slots: list[bool], choices: list[tuple[int, bool]]) -> None:
    session, server = make()
    opened = [begin(session, ticket, is_ordered=ordered) for ticket, ordered in enumerate(slots, start=1)]
    given_to: dict[int, list[str]] = {slot.ticket: [] for slot in opened}
    for index, is_final in [*choices, *((index, True) for index in range(len(opened)))]:
        slot = opened[index % len(opened)]
        if not slot.has_ended:
            content = f"{slot.ticket}.{len(given_to[slot.ticket])}"
            given_to[slot.ticket].append(content)
            session.put(slot, content, 1, is_final=is_final)
    taken = take_all(session)
    assert sorted(taken) == sorted(content for contents in given_to.values() for content in contents)
    ordered = [content for slot in opened if slot.is_ordered for content in given_to[slot.ticket]]
    assert [content for content in taken if content in ordered] == ordered
    for slot in opened:
        assert [content for content in taken if content in given_to[slot.ticket]] == given_to[slot.ticket]
    assert (session.is_idle, session.unsent_bytes) == (True, 0)
    session.cancel()
    assert server.cancelled == []


def test_answers_are_acknowledged_once_they_are_sent_and_there_is_room() -> None:
    session, server = make()
    slot = begin(session, 7)
    for is_final in (False, False, True):
        session.put(slot, "x", 10, is_final=is_final)
    assert session.unsent_bytes == 30
    session.acknowledge()
    assert server.acknowledged == []
    while session.unsent:
        session.sent(session.take(), has_room=False)
    assert server.acknowledged == []
    session.acknowledge()
    session.acknowledge()
    assert (server.acknowledged, session.unsent_bytes) == ([7, 7], 0)
    other = begin(session, 8)
    session.put(other, "x", 10, is_final=False)
    session.sent(session.take(), has_room=True)
    assert server.acknowledged == [7, 7, 8]


def test_answer_that_comes_before_the_ticket_is_acknowledged_after_it() -> None:
    session, server = make()
    slot = session.open(is_ordered=False)
    session.put(slot, "early", 1, is_final=False)
    session.sent(session.take(), has_room=True)
    session.acknowledge()
    session.started(slot, 7)
    session.acknowledge()
    assert server.acknowledged == [7]


def test_session_is_full_of_unanswered_requests_and_unsent_answers() -> None:
    session, _ = make(StreamLimits(max_unanswered=2))
    first, second = begin(session, 1), begin(session, 2)
    assert session.is_full
    session.put(first, "first", 1, is_final=True)
    assert session.is_full
    session.take()
    assert not session.is_full
    session.put_end(second)
    assert session.is_idle


def test_session_is_full_of_unsent_bytes() -> None:
    session, _ = make(StreamLimits(max_unsent_bytes=10))
    slot = begin(session, 1)
    session.put(slot, "x", 10, is_final=False)
    assert not session.is_full
    session.put(slot, "x", 1, is_final=False)
    assert session.is_full


def test_client_that_leaves_too_much_unread_ends_the_stream() -> None:
    session, _ = make(StreamLimits(max_streamed_bytes=1 << 20))
    slot = begin(session, 1)
    session.put(slot, "x", (1 << 20) + 1, is_final=False)
    error = error_of(session.put, slot, "x", 1, is_final=False)
    assert (error.code, error.message) == (
        ErrorCode.CANCELLED,
        "the client left 1 MiB of responses unread on this stream",
    )


def test_end_drops_unsent_answers_and_cancels_running_requests() -> None:
    session, server = make()
    running, answered = begin(session, 1), begin(session, 2)
    session.put(running, "x", 5, is_final=False)
    session.put(answered, "y", 5, is_final=True)
    session.end()
    assert (session.is_over, len(session.unsent), session.unsent_bytes) == (True, 0, 0)
    session.cancel()
    session.cancel()
    assert server.cancelled == [1]
    session.put(running, "late", 5, is_final=True)
    assert (len(session.unsent), session.unsent_bytes) == (0, 0)


def test_a_session_that_ends_cancels_a_starting_but_no_answered_request() -> None:
    session, server = make()
    slow, quick = session.open(is_ordered=False), session.open(is_ordered=False)
    session.put(quick, "x", 1, is_final=True)
    session.end()
    session.started(slow, 1)
    session.started(quick, 2)
    session.cancel()
    assert server.cancelled == [1]
