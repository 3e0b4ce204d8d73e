"""What models in worker processes ask of the server: inferences and the life cycle of other models, and metrics."""

import logging
from base64 import b64decode
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, Protocol

from halimede.core.observe.custom_metrics import CustomMetrics
from halimede.core.repository.load_waits import LoadWaits
from halimede.core.types import ErrorCode, InferenceError, InferenceRequest, InferenceResponse
from halimede.core.types.caller import Caller
from halimede.core.types.error import clip
from halimede.runtime.server import OnResponse

log = logging.getLogger(__name__)


def model_of(owner: str) -> str:
    """The name of the model that an owner is a load of."""
    return owner.rpartition("#")[0]


class Models(Protocol):
    """The models of the server, as far as a model may ask for them. InferenceError."""

    def infer(self, request: InferenceRequest, on_response: OnResponse, caller: Caller | None = None) -> int:
        """See `runtime.server.Server`, for this and the next two."""

    def cancel(self, ticket: int) -> None:
        """Nobody waits for it any more."""

    def acknowledge(self, ticket: int, responses: int = 1) -> None:
        """So many more of its answers were taken."""

    async def load_model(
        self, name: str, parameters: Mapping[str, bool | int | str | bytes], *, for_model: bool = False
    ) -> None:
        """Load or reload a model; `for_model`: another one waits for it, perhaps in its own load."""

    async def unload_model(self, name: str, unload_dependents: bool = False) -> None:
        """Unload a model."""

    async def is_model_ready(self, name: str, version: str = "") -> bool:
        """Whether a model is ready."""


class ModelServices:
    """Implements `workers.process.services.Services`. `models` is set once the server is made."""

    def __init__(self, metrics: CustomMetrics) -> None:
        self.metrics = metrics
        self.models: Models | None = None
        self.loads = LoadWaits()
        """The models that a model waits for to be loaded, and an ensemble."""
        self._methods: Mapping[str, Callable[[str, Mapping[str, Any]], Awaitable[Any]]] = {
            "load_model": self._load_model,
            "unload_model": self._unload_model,
            "is_model_ready": self._is_model_ready,
            "metric_family_new": self._family_new,
            "metric_family_delete": self._family_delete,
            "metric_new": self._metric_new,
            "metric_delete": self._metric_delete,
            "metric_value": self._metric_value,
        }

    def forget(self, owner: str) -> None:
        """That load of a model is no more: its metrics go with it."""
        self.metrics.forget(owner)

    def infer(self, request: InferenceRequest, on_response: OnResponse, caller: Caller) -> int:
        """See `workers.process.services.Services`."""
        if self.models is None:
            error = InferenceError(ErrorCode.UNAVAILABLE, "the server is not up yet")
            on_response(InferenceResponse(request.model_name, "", request.id, error=error))
            return 0
        return self.models.infer(request, on_response, caller)

    def cancel(self, ticket: int) -> None:
        """See `workers.process.services.Services`."""
        if self.models is not None:
            self.models.cancel(ticket)

    def acknowledge(self, ticket: int, responses: int) -> None:
        """See `workers.process.services.Services`."""
        if self.models is not None:
            self.models.acknowledge(ticket, responses)

    async def call(self, owner: str, method: str, arguments: Mapping[str, Any]) -> Any:
        """See `backends.hosting.Host.call`. InferenceError, also for arguments that no module of ours sends."""
        answer = self._methods.get(method)
        if answer is None:
            raise InferenceError(ErrorCode.UNSUPPORTED, f"there is no call '{clip(method)}'")
        try:
            return await answer(owner, arguments)
        except (KeyError, TypeError, ValueError) as error:
            text = f"call '{method}' with wrong arguments: {clip(str(error))}"
            raise InferenceError(ErrorCode.INVALID_ARG, text) from error

    def update_metrics(self, owner: str, updates: Sequence[tuple[int, str, float]]) -> None:
        """See `workers.process.services.Services`."""
        failures = 0
        first = ""
        for metric, operation, value in updates:
            try:
                self.metrics.update(owner, metric, operation, value)
            except InferenceError as error:
                first = first or error.message
                failures += 1
        if failures:
            # One line for thousands of them: to make a line takes longer than to update a metric.
            model, more = model_of(owner), f" ({failures - 1} more updates failed)" if failures > 1 else ""
            log.warning("model '%s': %s%s", model, first, more, extra={"model": model})

    async def _load_model(self, owner: str, arguments: Mapping[str, Any]) -> None:
        models, name = self._of_others(owner, arguments)
        caller = model_of(owner)
        if self.loads.path(name, caller):
            text = f"model '{clip(name)}' waits for model '{clip(caller)}', which therefore cannot load it"
            raise InferenceError(ErrorCode.UNAVAILABLE, text)
        files = dict(arguments["files"]).items()
        parameters: dict[str, bool | int | str | bytes] = {path: b64decode(content) for path, content in files}
        if arguments["config"]:
            parameters["config"] = str(arguments["config"])
        self.loads.add(caller, (name,))
        try:
            await models.load_model(name, parameters, for_model=True)
        finally:
            self.loads.remove(caller, (name,))

    async def _unload_model(self, owner: str, arguments: Mapping[str, Any]) -> None:
        models, name = self._of_others(owner, arguments)
        await models.unload_model(name, bool(arguments["unload_dependents"]))

    async def _is_model_ready(self, owner: str, arguments: Mapping[str, Any]) -> bool:  # noqa: ARG002
        if self.models is None:
            return False
        try:
            return await self.models.is_model_ready(str(arguments["model_name"]), str(arguments["model_version"]))
        except InferenceError as error:
            if error.code is ErrorCode.NOT_FOUND:
                return False
            raise

    async def _family_new(self, owner: str, arguments: Mapping[str, Any]) -> int:
        return self.metrics.new_family(
            owner, str(arguments["name"]), str(arguments["description"]), str(arguments["kind"])
        )

    async def _family_delete(self, owner: str, arguments: Mapping[str, Any]) -> None:
        self.metrics.delete_family(owner, int(arguments["id"]))

    async def _metric_new(self, owner: str, arguments: Mapping[str, Any]) -> int:
        labels = {str(name): str(value) for name, value in dict(arguments["labels"]).items()}
        return self.metrics.new_metric(owner, int(arguments["family"]), labels, arguments["buckets"])

    async def _metric_delete(self, owner: str, arguments: Mapping[str, Any]) -> None:
        self.metrics.delete_metric(owner, int(arguments["id"]))

    async def _metric_value(self, owner: str, arguments: Mapping[str, Any]) -> float:
        return self.metrics.value(owner, int(arguments["id"]))

    def _of_others(self, owner: str, arguments: Mapping[str, Any]) -> tuple[Models, str]:
        """The models, and the name of one that is not the caller's own, which would wait for itself."""
        name = str(arguments["model_name"])
        if self.models is None:
            raise InferenceError(ErrorCode.UNAVAILABLE, "the server is not up yet")
        if name == model_of(owner):
            raise InferenceError(ErrorCode.INVALID_ARG, f"model '{clip(name)}' cannot load or unload itself")
        return self.models, name
