"""The contract between the pump and whatever runs an instance (a thread here, a process elsewhere).

A worker takes one batch at a time and reports through one callback, always on the event loop's thread. The pump gathers
nothing and scatters nothing: that is the worker's, off the loop.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from halimede.core.types import InferenceError, InferenceRequest, Tensor


@dataclass(slots=True)
class BatchItem:
    """One request of a batch, and its own cancel flag. `rows` is its batch size."""

    key: int
    request: InferenceRequest
    rows: int
    cancelled: bool


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
    """The batch is over and the worker is free.

    `replies` are in the order of `items`, in the model's shapes. `failed` is set when the execution itself failed, so
    that statistics count no execution.
    """

    worker: "Worker"
    items: list[BatchItem]
    replies: list[Outputs | InferenceError]
    times: BatchTimes
    failed: bool = False


OnEvent = Callable[[BatchDone], None]


class Worker(Protocol):
    """One model instance, running. `ordinal` is the instance number that the scheduler knows."""

    ordinal: int
    name: str

    def execute(self, items: list[BatchItem]) -> None:
        """Start a batch; called on the loop, returns at once, never while a batch is running."""

    async def stop(self) -> None:
        """Wait for the running batch, close the instance, end the thread or process. Called once."""
