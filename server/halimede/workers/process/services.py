"""What models in worker processes ask of the server."""

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from halimede.core.types import InferenceRequest
from halimede.core.types.caller import Caller
from halimede.workers.server.calls import OnResponse


class Services(Protocol):
    """What models in worker processes ask of the server. `owner` is one load of a model (`m#7`)."""

    async def call(self, owner: str, method: str, arguments: Mapping[str, Any]) -> Any:
        """See `backends.hosting.Host.call`. InferenceError."""

    def update_metrics(self, owner: str, updates: Sequence[tuple[int, str, float]]) -> None:
        """Metric, operation, value. What is wrong with one is the log's."""

    def infer(self, request: InferenceRequest, on_response: OnResponse, caller: Caller) -> int:
        """Start an inference for the code of an instance; returns its ticket, see `runtime.server.Server.infer`."""

    def cancel(self, ticket: int) -> None:
        """See `runtime.server.Server.cancel`."""

    def acknowledge(self, ticket: int, responses: int) -> None:
        """See `runtime.server.Server.acknowledge`."""
