"""The calls of models' code to other models: ends calls that would wait forever.

A call that completes a circle of calls is refused when it is made. A call that is queued for longer than its caller's
`BLS_TIMEOUT_MS` is ended by one timer that all calls share. Both answer the call with an error, so that its caller
continues and frees its instance.
"""

import asyncio
import logging
from collections.abc import Iterator

from halimede.core.schedule.call_timeouts import CallTimeouts
from halimede.core.types import unavailable
from halimede.core.types.caller import Caller
from halimede.runtime.alarm import Alarm
from halimede.runtime.clock import monotonic_ns
from halimede.runtime.requests import Executor, InFlight, RequestTable

log = logging.getLogger(__name__)

DEADLOCK = "model '%s' is not called: %s for the answer, directly or through other models; %s"
QUEUED_TOO_LONG = (
    "model '%s' is not called: the call of model '%s' was queued for %d ms (its BLS_TIMEOUT_MS is %d); if the called "
    "model waits for its caller, %s; if it is only busy, raise BLS_TIMEOUT_MS"
)
ALL_WAIT, MORE_INSTANCES = "all its instances wait", "more instances would serve the call"
ONE_WAITS, OTHER_SEQUENCE = (
    "the instance that has the call's sequence waits",
    "a sequence at another instance would be served",
)
"""For a call in a sequence that is at an instance: no other instance can serve it."""

NS_PER_MS = 1_000_000


class ModelCalls:
    """All methods run on the event loop's thread."""

    def __init__(self, table: RequestTable) -> None:
        self._table = table
        self._timeouts = CallTimeouts()
        self._alarm = Alarm(asyncio.get_running_loop(), self._end_expired)

    def __repr__(self) -> str:
        return f"<ModelCalls under_way={len(self._table.waits)} {self._timeouts!r}>"

    def close(self) -> None:
        """Stop the timer."""
        self._alarm.set(None)

    def made(self, ticket: int, caller: Caller, received_ns: int, executor: Executor) -> None:
        """A model's code has made a call, directly or through an ensemble, and `executor` has taken it."""
        if executor.is_busy() and self._table.waits.is_stuck(ticket):
            flight = self._table.by_ticket[ticket]
            cause = (ONE_WAITS, OTHER_SEQUENCE) if _is_in_sequence(flight) else (ALL_WAIT, MORE_INSTANCES)
            text = DEADLOCK % (flight.request.model_name, *cause)
            executor.try_refuse(ticket, unavailable(text))
        elif caller.queue_timeout_ns and self._timeouts.begin(received_ns + caller.queue_timeout_ns):
            self._alarm.set(self._timeouts.wake_at)

    def _end_expired(self) -> None:
        """End the calls that were queued for too long."""
        now = monotonic_ns()
        due = self._timeouts.due(self._deadlines(), now)
        # Before the calls are ended: a model that is answered may call again at once.
        self._alarm.set(self._timeouts.wake_at)
        for ticket in due:
            self._end(ticket, now)

    def _deadlines(self) -> Iterator[tuple[int, int]]:
        """The ticket and the deadline of each call under way, also of those that execute."""
        by_ticket = self._table.by_ticket
        for ticket in self._table.waits.tickets():
            flight = by_ticket[ticket]
            if flight.caller is not None and flight.caller.queue_timeout_ns:
                yield ticket, flight.queued_ns + flight.caller.queue_timeout_ns

    def _end(self, ticket: int, now_ns: int) -> None:
        """Answer a call with an error, unless it executes or is finished."""
        flight = self._table.by_ticket.get(ticket)
        if flight is None or flight.caller is None:
            return
        called, caller = flight.request.model_name, flight.caller.model
        waited_ms = (now_ns - flight.queued_ns) // NS_PER_MS
        limit_ms = flight.caller.queue_timeout_ns // NS_PER_MS
        remedy = OTHER_SEQUENCE if _is_in_sequence(flight) else MORE_INSTANCES
        text = QUEUED_TOO_LONG % (called, caller, waited_ms, limit_ms, remedy)
        if flight.requests.executor.try_refuse(ticket, unavailable(text)):
            log.warning(
                "model '%s': its call of model '%s' was ended after %d ms in the queue (BLS_TIMEOUT_MS)",
                *(caller, called, waited_ms),
                extra={"model": caller},
            )


def _is_in_sequence(flight: InFlight) -> bool:
    return flight.requests.executor.dependencies_of(flight.key).in_sequence
