"""The contract between a scheduler and the pump that performs its decisions.

A scheduler is synchronous and pure but for its own state: it is told what happened and when, and says what to do. It
holds keys and sizes, never tensors. The pump calls `poll` after every event that can free capacity or form a batch
(`enqueue`, `try_cancel`, `completed`, `add_instance`) and when `wake_at` has come; it performs the actions in order.

What is to come needs no other call: priorities are queues inside a scheduler; a sequence scheduler keeps the instance
of a `correlation` between polls, and for the direct strategy its Execute gets the slots beside the requests; a rate
limiter is asked inside `poll` which free instances may start, and who frees a resource polls those that wait for it.
"""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Protocol

from halimede.core.schedule.actions import Action


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


class Scheduler(Protocol):
    """Every key that was enqueued without an error leaves by exactly one of: an Execute, a Fail, or a true `cancel`."""

    max_batch_size: int
    """Of how many rows an execution is at most, but for a request that has more by itself."""

    may_expire: bool
    """Whether requests may run out of time in the queue. If not, `enqueue` changes `wake_at` only while an instance is
    free."""

    def enqueue(self, pending: Pending, now_ns: int) -> None:
        """Accept the request, or raise InferenceError (UNAVAILABLE when the queue is full) and forget it."""

    def try_start(self, batch_size: int) -> int | None:
        """The instance that a request of so many rows is given at once, without being queued; busy until `completed`.

        Where `enqueue` and `poll` would have executed it alone; None where they would not, and nothing has happened.
        """

    def poll(self, now_ns: int) -> Sequence[Action]:
        """All that is due at `now_ns`. A second call at the same time without an event between returns nothing."""

    def wake_at(self) -> int | None:
        """The next time at which `poll` has something to do without another event, in ns; None for never."""

    def try_cancel(self, key: int) -> bool:
        """Remove a queued request; False when it is not queued (already executing, or unknown)."""

    def completed(self, instance: int) -> bool:
        """The instance finished what it was given last; whether requests are queued, which a `poll` may give it."""

    def add_instance(self, instance: int) -> None:
        """A new or restarted instance is free."""

    def remove_instance(self, instance: int) -> None:
        """The instance is gone; nothing more is given to it."""

    def drain(self) -> Sequence[int]:
        """Empty the queue and return its keys in order: the model is going away."""

    @property
    def queued(self) -> int:
        """Requests accepted and not executing."""

    def oldest_enqueued_at(self) -> int | None:
        """When the oldest queued request was enqueued, in ns; None when nothing is queued."""
