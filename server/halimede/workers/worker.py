"""The contract between the pump and workers. A worker runs one instance, on a thread of the server or in a process.

A worker runs one batch per slot at a time and reports through one callback, always on the event loop's thread. The
worker gathers and scatters tensors, off the loop; the pump does neither.
"""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Protocol

from halimede.core.types import InferenceError, InferenceRequest, ParameterValue, Tensor
from halimede.core.types.caller import Caller

Parameters = Mapping[str, ParameterValue]
NO_PARAMETERS: Parameters = {}


@dataclass(slots=True)
class BatchItem:
    """One request of a batch, and its own cancel flag. `rows` is its batch size.

    `caller` is set for requests from inside the server, None for those of clients. `sequence_slot` is as in
    `core.schedule.actions.Execute`.
    """

    key: int
    request: InferenceRequest
    rows: int
    cancelled: bool
    caller: Caller | None = field(default=None, kw_only=True)
    sequence_slot: int = field(default=0, kw_only=True)


@dataclass(slots=True)
class BatchTimes:
    """Monotonic nanoseconds: gather from start to input_end, compute to output_start, scatter to end."""

    start: int
    input_end: int
    output_start: int
    end: int


Outputs = list[Tensor]


@dataclass(slots=True)
class BatchDone:
    """The batch is over and the worker's slot is free.

    `replies` are in the order of `items`, in the model's shapes. None is a request that `ResponseSent` events answer,
    before or after this one: it is open until one of them has `final`. `parameters` are response parameters by
    position. `failed` is set if the execution itself failed, so that statistics count no execution. `again` are the
    positions of requests that the model wants to execute again: their replies are None. Only workers of iterative
    models have them.
    """

    worker: "Worker"
    items: list[BatchItem]
    replies: list[Outputs | InferenceError | None]
    times: BatchTimes
    failed: bool = False
    slot: int = 0
    parameters: Mapping[int, Parameters] = field(default_factory=dict)
    again: Collection[int] = ()


@dataclass(slots=True)
class ResponseSent:
    """One answer outside of `BatchDone`: from a decoupled model, or sent before the batch ended.

    `reply` None, allowed only with `final`, ends the request without another answer. Keys that are not open are
    ignored: the request may have been cancelled. `times` are those of this answer: `input_end` is when the execution of
    the request began, `output_start` when the model sent the answer.
    """

    worker: "Worker"
    key: int
    reply: Outputs | InferenceError | None
    final: bool
    times: BatchTimes
    parameters: Parameters = field(default_factory=dict)


@dataclass(slots=True)
class WorkerDown:
    """The worker's process has ended. The worker gets no batches until `WorkerUp`.

    `unread` are the keys of batches that the process has certainly not begun: the pump owns them again and delivers or
    fails them. Events that follow fail all other requests that the process had. `parked` is set if the process has died
    too often and is not started again for minutes, `is_unstartable` if the machine has prevented its starts for some
    time. After a failed start that changes these or the reason, the event is sent again, without keys. `reason` is for
    people (`worker exited 5 times (last: signal 11)`).
    """

    worker: "Worker"
    reason: str
    parked: bool
    unread: Collection[int] = ()
    is_unstartable: bool = False


@dataclass(slots=True)
class WorkerUp:
    """The worker runs again, with all slots free."""

    worker: "Worker"


WorkerEvent = BatchDone | ResponseSent | WorkerDown | WorkerUp
OnEvent = Callable[[WorkerEvent], None]


class Worker(Protocol):
    """One model instance, running.

    `ordinal` is the instance's number in its model. `concurrency` is how many batches it takes at a time: slots 0 to
    concurrency - 1.
    """

    ordinal: int
    name: str
    concurrency: int

    def execute(self, items: list[BatchItem], slot: int = 0) -> None:
        """Start a batch; called on the loop, returns at once. A slot runs its batches in order of arrival.

        Must not be called between WorkerDown and WorkerUp.
        """

    def take_back(self, slot: int) -> bool:
        """Take back the last batch of the slot if it got it while another one ran, and has not begun it. No event will
        end that batch. Must not be called between WorkerDown and WorkerUp."""

    def cancel(self, key: int) -> None:
        """Cancel a request that is executing: its client has disconnected. Its item's `cancelled` is already set."""

    def ask_cancel(self, key: int) -> None:
        """Let a decoupled model see that a request is cancelled, and send what it still answers."""

    def forget(self, sequence_slot: int) -> None:
        """Drop the state of a sequence slot: its sequence has ended, and none of its requests is executing. No effect
        between WorkerDown and WorkerUp."""

    def acknowledge(self, key: int, responses: int) -> None:
        """The client has received `responses` more answers of the request; a model that waits for this may continue."""

    async def is_ready(self) -> bool:
        """Whether the worker runs and, if its model implements `is_ready`, the model reports ready.

        UNAVAILABLE if the model does not report it within 5 s.
        """

    async def stop(self) -> None:
        """Wait for the running batches, close the instance, end the thread or process. Called once."""
