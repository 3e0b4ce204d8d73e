"""The requests of one stream and their answers to one client, for any transport.

A session knows no transport and no loop. The transport opens a slot per request, puts the answers of the model, takes
them while the client has room, and notes which were sent:

- Answers of an ordered slot wait for those of all earlier ordered slots; other answers are sent immediately.
- A sent answer is acknowledged to its model when the client has room for more, so that a client that does not read
  stalls only the models of its stream.
- A slot is unanswered until its final answer is queued. With too many unanswered requests or unsent bytes the session
  is full: no further requests are read. Answers beyond a second limit end the stream.
- When the session ends, requests in flight are cancelled.
"""

from collections import deque
from dataclasses import dataclass, field
from math import inf
from typing import Generic, Protocol, TypeVar

from halimede.core.types import ErrorCode, InferenceError

T = TypeVar("T")


class RequestControl(Protocol):
    """The part of the server that a session uses. See `halimede.facade.server.Server`."""

    def acknowledge(self, ticket: int, responses: int = 1) -> None: ...

    def cancel(self, ticket: int) -> None: ...


@dataclass(frozen=True, slots=True)
class StreamLimits:
    """The number of unanswered requests and unsent answers, and of unsent bytes, that make a session full; and the
    unsent bytes above which another answer that is not ordered ends the stream."""

    max_unanswered: float = inf
    max_unsent_bytes: float = inf
    max_streamed_bytes: float = inf


UNLIMITED = StreamLimits()


@dataclass(slots=True, eq=False)
class StreamedRequest(Generic[T]):
    """One request of a stream. `ticket` is 0 until the server has assigned it.

    `ready` are answers that wait for those of earlier slots.
    """

    is_ordered: bool
    ticket: int = 0
    has_ended: bool = False
    ready: "list[StreamAnswer[T]]" = field(default_factory=list)


@dataclass(slots=True)
class StreamAnswer(Generic[T]):
    """One answer in the queue; `size_bytes` is what it counts while it is unsent."""

    slot: StreamedRequest[T]
    content: T
    size_bytes: int
    is_final: bool


class StreamSession(Generic[T]):
    """All state changes in plain calls. When it `is_over`, further answers are dropped.

    `unsent` are the answers in the queue. `unacknowledged` has one entry for each answer that was sent and is not
    acknowledged.
    """

    __slots__ = (
        "_limits",
        "_ordered",
        "_running",
        "_server",
        "_unanswered",
        "is_over",
        "unacknowledged",
        "unsent",
        "unsent_bytes",
    )

    def __init__(self, server: RequestControl, limits: StreamLimits = UNLIMITED) -> None:
        self.is_over = False
        self.unsent: deque[StreamAnswer[T]] = deque()
        self.unsent_bytes = 0
        self.unacknowledged: list[StreamedRequest[T]] = []
        self._server = server
        self._limits = limits
        self._ordered: deque[StreamedRequest[T]] = deque()
        self._running: set[StreamedRequest[T]] = set()
        self._unanswered = 0

    # Requests.

    def open(self, *, is_ordered: bool) -> StreamedRequest[T]:
        """Make a slot for a request that was read."""
        slot: StreamedRequest[T] = StreamedRequest(is_ordered)  # A call of `StreamedRequest[T]` takes microseconds.
        self._unanswered += 1
        if is_ordered:
            self._ordered.append(slot)
        return slot

    def started(self, slot: StreamedRequest[T], ticket: int) -> None:
        """The server has accepted the request. Answers may have arrived before."""
        slot.ticket = ticket
        if not slot.has_ended:
            self._running.add(slot)

    @property
    def is_full(self) -> bool:
        """Whether to stop reading requests for now."""
        limits = self._limits
        return (
            self._unanswered + len(self.unsent) >= limits.max_unanswered or self.unsent_bytes > limits.max_unsent_bytes
        )

    @property
    def is_idle(self) -> bool:
        """Whether all requests are answered and all answers taken."""
        return not self._unanswered and not self.unsent

    # Answers.

    def put(self, slot: StreamedRequest[T], content: T, size_bytes: int, *, is_final: bool) -> None:
        """Queue an answer. CANCELLED when the client has left too much unread: the stream must end."""
        if is_final:
            self.finished(slot)
        if self.is_over:
            return
        answer = StreamAnswer(slot, content, size_bytes, is_final)
        if slot.is_ordered:
            slot.ready.append(answer)
            self._advance()
            return
        if self.unsent_bytes > self._limits.max_streamed_bytes:
            unread = int(self._limits.max_streamed_bytes) >> 20
            raise InferenceError(
                ErrorCode.CANCELLED, f"the client left {unread} MiB of responses unread on this stream"
            )
        self._queue(answer)
        if is_final:
            self._unanswered -= 1

    def put_end(self, slot: StreamedRequest[T]) -> None:
        """The request has all its answers; no message is sent for its end."""
        self.finished(slot)
        if slot.is_ordered:
            self._advance()
        else:
            self._unanswered -= 1

    def finished(self, slot: StreamedRequest[T]) -> None:
        """The final answer has arrived: nothing is left to cancel."""
        slot.has_ended = True
        self._running.discard(slot)

    def _advance(self) -> None:
        """Queue the answers of the first ordered request and, if those are all, of the following ones."""
        while self._ordered:
            first = self._ordered[0]
            for answer in first.ready:
                self._queue(answer)
            first.ready.clear()
            if not first.has_ended:
                break
            self._ordered.popleft()
            self._unanswered -= 1

    def _queue(self, answer: StreamAnswer[T]) -> None:
        self.unsent.append(answer)
        self.unsent_bytes += answer.size_bytes

    def take(self) -> StreamAnswer[T]:
        """Take the next answer to send. There must be one."""
        answer = self.unsent.popleft()
        self.unsent_bytes -= answer.size_bytes
        return answer

    def sent(self, answer: StreamAnswer[T], *, has_room: bool) -> None:
        """An answer was sent; the client has room for more, or not. A final answer is not acknowledged."""
        if answer.is_final:
            return
        ticket = answer.slot.ticket
        if has_room and ticket:
            self._server.acknowledge(ticket)
        else:
            self.unacknowledged.append(answer.slot)

    def acknowledge(self) -> None:
        """The client has room for more: acknowledge the sent answers to their models."""
        slots, self.unacknowledged = self.unacknowledged, []
        for slot in slots:
            if slot.ticket:
                self._server.acknowledge(slot.ticket)
            else:
                self.unacknowledged.append(slot)  # The server has not assigned the ticket yet.

    # The end.

    def end(self) -> None:
        """The client has disconnected, or has got the last answer. A second call has no effect."""
        self.is_over = True
        self.unsent_bytes = 0
        self.unsent.clear()
        self._ordered.clear()
        self.unacknowledged.clear()

    def cancel(self) -> None:
        """Cancel the requests that still run. Not while the server delivers an answer."""
        for slot in tuple(self._running):
            self._server.cancel(slot.ticket)
        self._running.clear()
