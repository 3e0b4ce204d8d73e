"""The contract between the pump and whatever runs an instance: a thread of the server, or a process of its own.

A worker runs one batch per slot at a time and reports through one callback, always on the event loop's thread. The
pump gathers nothing and scatters nothing: that is the worker's, off the loop.
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

    `caller` is who asks for it from inside the server, None for a client.
    """

    key: int
    request: InferenceRequest
    rows: int
    cancelled: bool
    caller: Caller | None = field(default=None, kw_only=True)


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

    `replies` are in the order of `items`, in the model's shapes. None is a request that `ResponseSent` answers, before
    or after: it is open until one with `final` has come. `parameters` are those of replies that have some, by position.
    `failed` is set when the execution itself failed, so that statistics count no execution. `again` are the positions
    of requests that the model wants executed once more, which takes a scheduler that `follows_outcomes`: their replies
    are None.
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
    """One answer of a request beside its batch's end: a decoupled model's, or one that was sent early.

    `reply` None, only with `final`, says that there are no more answers. Keys that are not open are ignored: a request
    may have been cancelled meanwhile. `times` are those of this answer: `input_end` its request's start of compute,
    `output_start` when the model sent it.
    """

    worker: "Worker"
    key: int
    reply: Outputs | InferenceError | None
    final: bool
    times: BatchTimes
    parameters: Parameters = field(default_factory=dict)


@dataclass(slots=True)
class WorkerDown:
    """The worker's process is gone. It gets nothing until `WorkerUp`.

    `unread` are the keys of the batches that it has certainly not begun: they are the pump's again, which delivers them
    once more or fails them. All else that it held is failed by events that follow. `parked` says that it is not started
    again: too many deaths. `reason` is for people (`worker exited 5 times (last: signal 11)`).
    """

    worker: "Worker"
    reason: str
    parked: bool
    unread: Collection[int] = ()


@dataclass(slots=True)
class WorkerUp:
    """The worker runs again, all slots free."""

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
        """Start a batch; called on the loop, returns at once. A slot runs its batches in the order in which they came.

        Nothing is executed after WorkerDown and before WorkerUp.
        """

    def cancel(self, key: int) -> None:
        """The request's client is gone; its item's `cancelled` is set already. For a request that is executing."""

    def acknowledge(self, key: int, responses: int) -> None:
        """The client took so many more of the request's answers: a model that waits for it may go on sending."""

    async def is_ready(self) -> bool:
        """Whether it is up and, if the model has something to say of it, says that it is ready; within 5 s."""

    async def stop(self) -> None:
        """Wait for the running batches, close the instance, end the thread or process. Called once."""
