"""What models in worker processes request from the server."""

from collections.abc import Sequence
from typing import Protocol

from halimede.backends.service_calls import ServiceCall, ServiceResult
from halimede.core.types import InferenceRequest
from halimede.core.types.caller import Caller
from halimede.workers.connection.calls import OnResponse


class Models(Protocol):
    """The models that other models call; see `facade.server.Server`."""

    def infer(self, request: InferenceRequest, on_response: OnResponse, caller: Caller | None = None) -> int:
        """Start an inference for the code of an instance; returns its ticket."""

    def cancel(self, ticket: int, *, reads_on: bool = False) -> None:
        """Cancel the inference: its caller no longer needs it, or `reads_on` what a decoupled model still sends."""

    def acknowledge(self, ticket: int, responses: int = 1) -> None:
        """The caller has received `responses` more of its responses."""


class Services(Protocol):
    """What models in worker processes request from the server. `owner` is one load of a model (`m#7`)."""

    @property
    def models(self) -> Models:
        """The models of the server."""

    async def call(self, owner: str, call: ServiceCall[ServiceResult]) -> ServiceResult:
        """See `backends.hosting.Host.call`. InferenceError."""

    def update_metrics(self, owner: str, updates: Sequence[tuple[int, str, float]]) -> None:
        """Metric, operation, value. An update that fails is only logged."""
