"""The contract between a scheduler and the pump that performs its decisions.

A scheduler is synchronous, and pure except for its own state: it gets events with their time, and decides what to do.
It holds keys and sizes, never tensors. The pump calls `poll` after every event that can free capacity or form a batch
(`enqueue`, `try_cancel`, `completed`, `add_slot`, `remove_slot`) and when `wake_at` has come; it performs the actions
in order.

`enqueue` and `completed` return when the pump is to poll, in turns of the event loop, so that requests that arrive in
one turn can share a batch: 0 is at once, 1 is the end of this turn, 2 is the end of the next turn. None means that a
poll would have nothing to do.

A scheduler that gets a `TakeBack` from the pump may execute a batch in a slot that runs one, and undo that until the
batch begins. So its requests stay queued until `completed` of the batch before it.

A scheduler asks for a resource that it shares with others inside `poll`. When the resource is given back, it calls
`Pump.wake` of those that were refused.

docs/decisions/003 describes how each kind of scheduler uses the contract.
`tests/support/toy_schedulers.py` has a small one of each kind that does not exist yet.
"""

from collections.abc import Collection, Hashable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Protocol

from halimede.core.schedule.actions import Action, Slot
from halimede.core.types import InferenceRequest
from halimede.core.types.statistics import SequenceCount


@dataclass(slots=True)
class Pending:
    """A request as a scheduler sees it.

    `key` is unique while the request lives. `batch_size` is its number of rows, at least 1. `size_bytes` counts against
    the queue's byte bound. `compatible` is equal for requests that may share a batch (input names and the dimensions
    that vary). `timeout_us` 0 means the timeout of the policy. `request` is for batching strategies; schedulers do not
    read it.
    """

    key: int
    batch_size: int
    size_bytes: int
    compatible: Hashable = ()
    priority: int = 0
    timeout_us: int = 0
    correlation: int | str = 0
    sequence_start: bool = False
    sequence_end: bool = False
    request: InferenceRequest | None = None


class Outcome(Enum):
    """The outcome of a request whose batch has ended."""

    DONE = "done"
    """It was executed. Its responses may follow, separately from the end of its batch."""
    AGAIN = "again"
    """Its model requests another execution. The request is queued again, and leaves the scheduler again."""
    GONE = "gone"
    """It was cancelled: whether the state of its sequence has it is unknown.

    A request that the model answers with an error is DONE: its sequence continues."""
    ENDED = "ended"
    """Its sequence has ended, because its new state could not be kept."""


class Scheduler(Protocol):
    """Every key that is queued leaves by exactly one of: an Execute, a Fail, a true `try_cancel`, or `drain`.

    A key is queued by an `enqueue` that raises nothing, by an outcome of AGAIN, and by a `remove_slot` that returns it.
    """

    max_batch_size: int
    """Maximum number of rows of an execution. A single request may have more."""

    may_expire: bool
    """Whether queued requests have deadlines: then the pump reads `wake_at` also after an `enqueue` without a poll."""

    follows_outcomes: bool
    """Whether `completed` gets outcomes. To make them, the pump must look at each reply."""

    is_iterative: bool
    """Whether each request is a sequence of its own, which its model may execute again (AGAIN)."""

    has_null_rows: bool
    """Whether a batch has a row for each sequence slot up to the highest one: those without a request are null rows."""

    def enqueue(self, pending: Pending, now_ns: int) -> int | None:
        """Accept the request, or raise InferenceError and forget it.

        UNAVAILABLE when the queue is full, INVALID_ARG for a request that the scheduler cannot place.

        Returns when to poll, in turns.
        """

    def try_start(self, batch_size: int, timeout_us: int = 0) -> Slot | None:
        """Take a slot for a request of `batch_size` rows that is not queued; the slot is busy until `completed`.

        `timeout_us` is the request's own timeout; 0 for none.

        A slot is returned if `enqueue` and an immediate `poll` would execute the request alone and no other request
        is expected to join it. None changes nothing.
        """

    def poll(self, now_ns: int) -> Sequence[Action]:
        """All actions due at `now_ns`. A second call at the same time without an event in between returns nothing."""

    def wake_at(self) -> int | None:
        """The next time in ns at which `poll` has something to do without another event; None for never.

        That is an action, or it moves `wake_at` forward (an idle sequence ends, and nothing waits for its sequence
        slot).
        """

    def try_cancel(self, key: int) -> bool:
        """Remove a queued request; False when it is not queued (already executing, or unknown).

        The poll that follows may fail other requests: those that need the cancelled one, executing or not.
        """

    def awaited_slot(self, key: int) -> Slot | None:
        """The only slot that can execute this queued request; None if several can, or if it is not queued."""

    def completed(self, slot: Slot, took_ns: int, outcomes: Sequence[Outcome] = ()) -> int | None:
        """The oldest batch of the slot has ended after `took_ns`. Returns when to poll, in turns.

        `outcomes` are in the order of the batch's requests; () means that all are DONE, or that the scheduler does not
        follow outcomes. A timeout that begins with the end of a batch is counted from the poll that follows.
        """

    def add_slot(self, slot: Slot) -> None:
        """Add a free slot of a new or restarted instance. It has no state of earlier batches."""

    def remove_slot(self, slot: Slot, unread: Sequence[Sequence[Pending]], now_ns: int) -> Collection[int]:
        """Remove a slot and all state in it. Its batches are not `completed`.

        `unread` are the batches of the slot that its worker has certainly not begun, without cancelled requests and
        without `compatible`. Returns the keys of the requests that are queued again. The pump fails all others.
        """

    def expect_few(self, now_ns: int) -> None:
        """Only requests in flight cause more, because the server stops: no batch waits for its delay from now on."""

    def expect_no_more(self) -> None:
        """No request follows, because the model is unloaded: stop all waiting for one, also delays."""

    def drain(self) -> Sequence[int]:
        """Empty the queue and return its keys in order: the model is unloaded, or no worker will be restarted."""

    @property
    def queued(self) -> int:
        """Requests accepted and not executing."""

    def sequences(self) -> SequenceCount | None:
        """The clients' sequences; None if requests belong to no sequence of a client."""

    def oldest_enqueued_at(self) -> int | None:
        """When the oldest queued request was enqueued, in ns; None when nothing is queued."""
