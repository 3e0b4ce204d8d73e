"""The executor of a model version, as its owner sees it: state, readiness, and the stop."""

from collections.abc import Callable
from typing import Protocol

from halimede.core.observe.load import Load
from halimede.core.types import InferenceError
from halimede.core.types.server import WorkerHealth
from halimede.runtime.requests import Executor, VersionRequests

MakeRequests = Callable[[Executor], VersionRequests]
"""Makes the requests of a version for their executor."""


class VersionExecutor(Executor, Protocol):
    """The pump of a model's instances, or an ensemble."""

    @property
    def requests(self) -> VersionRequests:
        """The requests that it executes."""

    @property
    def queued(self) -> int:
        """How many requests wait to be executed."""

    @property
    def refusal(self) -> InferenceError | None:
        """Why new requests are refused, because no instance will come up; None otherwise."""

    def worker_health(self) -> WorkerHealth:
        """The state of the instances' processes."""

    def load(self) -> Load:
        """What it does now, for metrics."""

    def is_available(self) -> bool:
        """Whether a request would be executed."""

    async def is_ready(self) -> bool:
        """Whether it is available, and the model reports that it is ready if it implements readiness."""

    def abort(self) -> None:
        """Finish all requests with an error at once: the server stops."""

    def expect_few(self) -> None:
        """Only requests in flight cause more, because the server stops: no batch waits for its delay from now on."""

    def expect_no_more(self) -> None:
        """The version gets no more requests: the queued ones do not wait for others."""

    async def close(self) -> None:
        """Wait until every request is finished, then stop the instances."""
