"""The requests in flight: one record of each, all of them together, and what an acceptor counts of its own."""

import asyncio
from dataclasses import dataclass

from halimede.core.schedule.waits import Place, WaitGraph
from halimede.core.types import ErrorCode, InferenceError
from halimede.runtime.acceptor import Acceptor
from halimede.runtime.server import OnResponse
from halimede.workers.worker import BatchItem

MAX_IN_FLIGHT_BYTES = 1 << 30


@dataclass(slots=True)
class InFlight(BatchItem):
    """One accepted request: what the worker gets, and who waits for it. Times are monotonic nanoseconds.

    One object for both, because one of each per request would cost more than all else that the pump does.
    """

    pump: Acceptor
    on_response: OnResponse
    received_ns: int
    queued_ns: int
    size_bytes: int


class LiveRequests:
    """Every request in flight, of all models, by ticket, and the bytes of input that they hold together.

    The queue of each model is bounded; this bounds their sum and what executes. One request alone may be larger.
    """

    __slots__ = ("by_ticket", "limit_bytes", "size_bytes", "waits")

    def __init__(self, limit_bytes: int = MAX_IN_FLIGHT_BYTES) -> None:
        self.by_ticket: dict[int, InFlight] = {}
        self.size_bytes = 0
        self.limit_bytes = limit_bytes
        self.waits = WaitGraph(self._place_of)
        """Those that something waits for inside the server."""

    def check_room(self, size_bytes: int) -> None:
        """UNAVAILABLE when a request of this size would go over the bound."""
        if self.size_bytes and self.size_bytes + size_bytes > self.limit_bytes:
            raise InferenceError(
                ErrorCode.UNAVAILABLE,
                f"Exceeds maximum queue size: requests in flight hold {self.size_bytes} bytes, "
                f"and with {size_bytes} more would go over {self.limit_bytes}",
            )

    def take(self, ticket: int) -> InFlight | None:
        """The request's record, for its one final answer; None when it has been answered already."""
        flight = self.by_ticket.pop(ticket, None)
        if flight is None:
            return None
        self.size_bytes -= flight.size_bytes
        caller = flight.caller
        if caller is not None and caller.waiter is not None:
            self.waits.remove(ticket)
        return flight

    def _place_of(self, ticket: int) -> Place:
        flight = self.by_ticket.get(ticket)
        return None if flight is None else flight.pump.place_of(ticket)


class Account:
    """The requests that one acceptor has, of those that all have together."""

    def __init__(self, live: LiveRequests) -> None:
        self._live = live
        self._live_count = 0
        self._idle: asyncio.Event | None = None
        """Set when nothing is in flight; there while somebody waits for that."""

    def hold(self, size_bytes: int) -> None:
        """See `acceptor.Acceptor`."""
        self._live.check_room(size_bytes)
        self._live.size_bytes += size_bytes
        self._live_count += 1

    def release(self, size_bytes: int) -> None:
        """See `acceptor.Acceptor`."""
        self._live.size_bytes -= size_bytes
        self._live_count -= 1
        self._rest()

    async def drained(self) -> None:
        """See `acceptor.Acceptor`."""
        if self._live_count:
            self._idle = self._idle or asyncio.Event()
            await self._idle.wait()

    def _accept(self, key: int, flight: InFlight) -> None:
        """Its answer is owed from now on."""
        live = self._live
        live.by_ticket[key] = flight
        live.size_bytes += flight.size_bytes
        self._live_count += 1
        caller = flight.caller
        if caller is not None and caller.waiter is not None:
            live.waits.add(key, caller.waiter)

    def _rest(self) -> None:
        """Say that nothing is in flight, once the answers are out."""
        if self._idle is not None and not self._live_count:
            self._idle.set()
            self._idle = None
