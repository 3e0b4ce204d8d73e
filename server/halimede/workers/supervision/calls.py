"""Passes requests of one instance's model to the server: inferences, metrics and service calls (`Services`)."""

import logging
from collections.abc import Sequence

from halimede.backends.hosting import WorkerSpec
from halimede.backends.service_calls import ServiceCall, ServiceResult
from halimede.core.types import InferenceResponse, internal, shortage_of
from halimede.inference_frames.calls import Infer
from halimede.workers.callers import Callers
from halimede.workers.connection.calls import OnResponse
from halimede.workers.supervision.readiness import Readiness
from halimede.workers.supervision.requests import Requests
from halimede.workers.supervision.services import Services
from halimede.workers.supervision.spinner import Spinner
from halimede.workers.worker import BatchItem

log = logging.getLogger(__name__)


class WorkerCalls:
    """Implements `connection.calls.CallOwner` and `connection.worker_connection.ModelOwner`. `owner` is one load of a
    model."""

    def __init__(
        self,
        spec: WorkerSpec,
        services: Services,
        owner: str,
        callers: Callers,
        requests: Requests,
        spinner: Spinner,
        readiness: Readiness,
    ) -> None:
        self._spec = spec
        self._services = services
        self._owner = owner
        self._callers = callers
        self._requests = requests
        self._spinner = spinner
        self._models = services.models
        self.on_cancel_call = services.models.cancel
        self.on_taken = services.models.acknowledge
        self.on_answered = spinner.on_answered
        self.on_ready = readiness.on_ready

    def on_infer(self, infer: Infer, items: Sequence[BatchItem] | None, on_response: OnResponse) -> int:
        """See `connection.calls.CallOwner`."""
        request = infer.request
        self._spinner.on_call()
        if items is not None:
            caller = self._callers.of_batch(items)
        else:
            # The server cannot see for which open request code outside of a batch calls.
            caller = self._callers.beside(self._requests.awaited_of(infer.batch))
        try:
            return self._models.infer(request, on_response, caller)
        except Exception as error:
            about = {"model": self._spec.model, "version": str(self._spec.version)}
            log.error("instance '%s': a call failed", self._spec.instance, exc_info=error, extra=about)
            text = f"the server failed to call model '{request.model_name}'"
            failure = shortage_of(error) or internal(text)
            on_response(InferenceResponse(request.model_name, "", request.id, error=failure))
            return 0

    def on_metrics(self, updates: Sequence[tuple[int, str, float]]) -> None:
        """See `connection.worker_connection.ModelOwner`."""
        self._services.update_metrics(self._owner, updates)

    async def on_call(self, call: ServiceCall[ServiceResult]) -> ServiceResult:
        """See `connection.services.ServiceOwner`."""
        return await self._services.call(self._owner, call)
