"""The contract between a scheduler and the pump that performs its decisions.

A scheduler is synchronous and pure but for its own state: it is told what happened and when, and says what to do. It
holds keys and sizes, never tensors. The pump calls `poll` after every event that can free capacity or form a batch
(`enqueue`, `try_cancel`, `completed`, `add_slot`, `remove_slot`) and when `wake_at` has come; it performs the actions
in order.

`enqueue` and `completed` return in how many turns of the event loop the pump polls for them, so that requests that come
in one turn can share a batch: 0 is at once, 1 as this turn ends, 2 as the next one ends; None where a poll would have
nothing to do.

A resource that several schedulers share is asked inside `poll`. Whoever gives it back calls the `Pump.wake` of those
that were refused.

server/DESIGN.md ("Schedulers") says how each kind of scheduler uses the contract, and `tests/unit/schedule` has a toy
of each.
"""

from collections.abc import Collection, Hashable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Protocol

from halimede.core.schedule.actions import Action, Slot


@dataclass(slots=True)
class Pending:
    """A request as a scheduler sees it.

    `key` is unique while the request lives. `batch_size` is its number of rows, at least 1. `size_bytes` counts against
    the queue's byte bound. `compatible` is equal for requests that may share a batch (input names and the dimensions
    that vary). `timeout_us` 0 means the policy's own.
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


class Outcome(Enum):
    """What became of a request of a batch that has ended."""

    DONE = "done"
    """It was executed. Its answers may still come, beside its batch."""
    AGAIN = "again"
    """Its model asks for another execution. The request is queued again, and leaves the scheduler once more."""
    GONE = "gone"
    """It failed, or its client has gone. What it would have done to its sequence's state is not done."""


class Scheduler(Protocol):
    """Every key that is queued leaves by exactly one of: an Execute, a Fail, a true `try_cancel`, or `drain`.

    A key is queued by an `enqueue` that raises nothing, by an outcome of AGAIN, and by a `remove_slot` that returns it.
    """

    max_batch_size: int
    """Of how many rows an execution is at most, but for a request that has more by itself."""

    may_expire: bool
    """Whether requests may run out of time in the queue. If not, `enqueue` changes `wake_at` only while a slot is
    free."""

    follows_outcomes: bool
    """Whether `completed` is told outcomes. They cost the pump a look at every reply, which most schedulers spare."""

    def enqueue(self, pending: Pending, now_ns: int) -> int | None:
        """Accept the request, or raise InferenceError (UNAVAILABLE when the queue is full) and forget it.

        Returns in how many turns to poll.
        """

    def try_start(self, batch_size: int) -> Slot | None:
        """The slot that a request of so many rows is given at once, without being queued; busy until `completed`.

        Where `enqueue` and an immediate `poll` would have executed it alone, and no others are expected to join it. If
        None, nothing has happened.
        """

    def poll(self, now_ns: int) -> Sequence[Action]:
        """All that is due at `now_ns`. A second call at the same time without an event between returns nothing."""

    def wake_at(self) -> int | None:
        """The next time at which `poll` has something to do without another event, in ns; None for never."""

    def try_cancel(self, key: int) -> bool:
        """Remove a queued request; False when it is not queued (already executing, or unknown)."""

    def completed(self, slot: Slot, took_ns: int, outcomes: Sequence[Outcome] = ()) -> int | None:
        """The oldest batch of the slot has ended, and took so long. Returns in how many turns to poll.

        `outcomes` are in the order of the batch's requests; () says that all are DONE, or that nobody follows them.
        """

    def add_slot(self, slot: Slot) -> None:
        """A slot of a new or restarted instance: it is free, and knows nothing of what ran in it before."""

    def remove_slot(self, slot: Slot, unread: Sequence[Sequence[Pending]], now_ns: int) -> Collection[int]:
        """The slot is gone, and all state in it; nothing more is given to it, and what it had is not `completed`.

        `unread` are those of its batches that its worker has certainly not begun, without their cancelled requests and
        without `compatible`. Returns the keys of those that are queued again, to be delivered once more. The pump fails
        all others.
        """

    def drain(self) -> Sequence[int]:
        """Empty the queue and return its keys in order: the model is going away."""

    @property
    def queued(self) -> int:
        """Requests accepted and not executing."""

    def oldest_enqueued_at(self) -> int | None:
        """When the oldest queued request was enqueued, in ns; None when nothing is queued."""
