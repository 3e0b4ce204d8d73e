"""The calls that models' code makes of other models: ends those that would wait for ever.

A call that closes a circle of calls is refused when it is made. A call that is queued for longer than its caller's
`BLS_TIMEOUT_MS` is ended by the one timer that all calls share. Both answer the call with an error, so that its caller
goes on and frees its instance.
"""

import asyncio
import logging
from collections.abc import Iterator

from halimede.core.schedule.call_timeouts import CallTimeouts
from halimede.core.types import ErrorCode, InferenceError
from halimede.core.types.caller import Caller
from halimede.runtime.acceptor import Acceptor
from halimede.runtime.clock import monotonic_ns
from halimede.runtime.live import LiveRequests

log = logging.getLogger(__name__)

DEADLOCK = (
    "model '%s' is not called: all its instances wait for the answer, directly or through other models; "
    "more instances would serve the call"
)
QUEUED_TOO_LONG = (
    "model '%s' is not called: the call of model '%s' was queued for %d ms (its BLS_TIMEOUT_MS is %d); if the called "
    "model waits for its caller, more instances would serve the call; if it is only busy, raise BLS_TIMEOUT_MS"
)

NS_PER_MS = 1_000_000
LONGEST_SLEEP_MS = 3_600_000
"""The timer looks again after this time at the latest."""


class ModelCalls:
    """All methods run on the event loop's thread."""

    def __init__(self, live: LiveRequests) -> None:
        self._live = live
        self._timeouts = CallTimeouts()
        self._timer: asyncio.TimerHandle | None = None

    def __repr__(self) -> str:
        return f"<ModelCalls under_way={len(self._live.waits)} {self._timeouts!r}>"

    def close(self) -> None:
        """End no more calls."""
        if self._timer is not None:
            self._timer.cancel()

    def made(self, ticket: int, caller: Caller, received_ns: int, pump: Acceptor) -> None:
        """A model's code has made a call, directly or through an ensemble, and `pump` has taken it."""
        if pump.is_busy() and self._live.waits.is_stuck(ticket):
            flight = self._live.by_ticket[ticket]
            pump.try_refuse(ticket, InferenceError(ErrorCode.UNAVAILABLE, DEADLOCK % flight.request.model_name))
        elif caller.queue_timeout_ns and self._timeouts.begin(received_ns + caller.queue_timeout_ns):
            self._arm()

    def _arm(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        wake_at = self._timeouts.wake_at
        if wake_at is not None:
            # The loop's timers count whole milliseconds; one that fires early would look in vain.
            sleep_ms = min((wake_at - monotonic_ns()) // NS_PER_MS + 1, LONGEST_SLEEP_MS)
            self._timer = asyncio.get_running_loop().call_later(max(0, sleep_ms) / 1000, self._look)

    def _look(self) -> None:
        """End the calls that are queued for too long."""
        self._timer = None
        now = monotonic_ns()
        due = self._timeouts.due(self._deadlines(), now)
        # First: whoever is answered may call again at once.
        self._arm()
        for ticket in due:
            self._end(ticket, now)

    def _deadlines(self) -> Iterator[tuple[int, int]]:
        """Of all calls under way, also of those that execute: their ticket, and until when they may be queued."""
        by_ticket = self._live.by_ticket
        for ticket in self._live.waits.tickets():
            flight = by_ticket[ticket]
            if flight.caller is not None and flight.caller.queue_timeout_ns:
                yield ticket, flight.queued_ns + flight.caller.queue_timeout_ns

    def _end(self, ticket: int, now_ns: int) -> None:
        """Answer a call with an error, unless it executes or is over."""
        flight = self._live.by_ticket.get(ticket)
        if flight is None or flight.caller is None:
            return
        called, caller = flight.request.model_name, flight.caller.model
        waited_ms = (now_ns - flight.queued_ns) // NS_PER_MS
        text = QUEUED_TOO_LONG % (called, caller, waited_ms, flight.caller.queue_timeout_ns // NS_PER_MS)
        if flight.pump.try_refuse(ticket, InferenceError(ErrorCode.UNAVAILABLE, text)):
            log.warning(
                "model '%s': its call of model '%s' was ended after %d ms in the queue (BLS_TIMEOUT_MS)",
                *(caller, called, waited_ms),
                extra={"model": caller},
            )
