"""Batching strategies: installed classes that decide which requests share a batch.

A strategy can only make batches smaller. The rules of `core.schedule.front` hold for every batch: order, maximum size,
compatible inputs, preferred sizes and delay. It runs on the event loop between two requests, so it must return quickly
and must not wait.
"""

from collections.abc import Mapping
from typing import Protocol

from halimede.core.config.model_config import ModelConfig
from halimede.core.schedule.scheduler import Pending
from halimede.core.types.request import ParameterValue


class BatchedRequest:
    """A request as a strategy sees it. Valid during `include`."""

    __slots__ = ("_pending",)

    def __init__(self, pending: Pending) -> None:
        self._pending = pending

    def __repr__(self) -> str:
        return f"<BatchedRequest {self.id!r} rows={self.rows} shapes={self.shapes}>"

    @property
    def id(self) -> str:
        """The request's id, "" if its client sent none."""
        return self._pending.request.id if self._pending.request is not None else ""

    @property
    def rows(self) -> int:
        """How many rows it adds to the batch, at least 1."""
        return self._pending.batch_size

    @property
    def size_bytes(self) -> int:
        """The total size of its inputs."""
        return self._pending.size_bytes

    @property
    def priority(self) -> int:
        """As its client sent it; 0 for the model's default."""
        return self._pending.priority

    @property
    def parameters(self) -> Mapping[str, ParameterValue]:
        """The parameters of the request. Must not be changed."""
        return self._pending.request.parameters if self._pending.request is not None else {}

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The shape of each input by its name, with the dimension of the batch."""
        request = self._pending.request
        return {} if request is None else {tensor.name: tuple(tensor.shape) for tensor in request.inputs}


class StrategyBatch(Protocol):
    """One batch while it is formed. Dropped without `end` when its requests do not run as one batch.

    That happens when a request of a higher priority arrives, or one of its requests is cancelled, expires or moves to
    another level: the batch is then formed again from its first request.
    """

    def include(self, request: BatchedRequest) -> bool:
        """Whether the request may join. False closes the batch, and the request begins the next one.

        The first request of a batch runs in any case. Of the requests that were included, a batch of a preferred size
        may run the first ones only.
        """

    def end(self) -> None:
        """The batch is complete and runs now."""


class BatchingStrategy(Protocol):
    """Made once for each version of a model. An exception of it fails the requests of the batch: INTERNAL."""

    def __init__(self, config: ModelConfig) -> None:
        """`config` is the model's complete configuration."""

    def begin(self) -> StrategyBatch:
        """A new batch without requests."""
