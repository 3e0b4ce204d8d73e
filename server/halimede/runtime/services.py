"""The server's services for models in worker processes: inferences, the life cycle of other models, and metrics."""

import logging
from collections.abc import Mapping, Sequence
from typing import Protocol

from halimede.backends.service_calls import (
    DeleteMetricFamily,
    IsModelReady,
    LoadModel,
    MetricValue,
    NewMetric,
    NewMetricFamily,
    ServiceCall,
    ServiceResult,
    UnloadModel,
)
from halimede.core.observe.custom_metrics import CustomMetrics
from halimede.core.repository.load_waits import LoadWaits
from halimede.core.types import ErrorCode, InferenceError
from halimede.core.types.error import clip, invalid, unavailable
from halimede.workers.supervision import services

log = logging.getLogger(__name__)


def model_of(owner: str) -> str:
    """The name of the model of which the owner is one load."""
    return owner.rpartition("#")[0]


class LoadableModels(services.Models, Protocol):
    """The part of `facade.server.Server` that models use. InferenceError."""

    async def load_model(
        self, name: str, parameters: Mapping[str, bool | int | str | bytes], *, for_model: bool = False
    ) -> None:
        """Load or reload a model; `for_model`: another model waits for it, perhaps in its own load."""

    async def unload_model(self, name: str, unload_dependents: bool = False) -> None:
        """Unload a model."""

    async def is_model_ready(self, name: str, version: str = "") -> bool:
        """Whether a model is ready."""


class ModelServices:
    """Implements `workers.supervision.services.Services`."""

    def __init__(self, metrics: CustomMetrics, models: LoadableModels) -> None:
        self.metrics = metrics
        self.models = models
        self.loads = LoadWaits()
        """The loads that models and ensembles wait for."""

    def forget(self, owner: str) -> None:
        """Remove the metrics of a load that has ended."""
        self.metrics.forget(owner)

    async def call(self, owner: str, call: ServiceCall[ServiceResult]) -> ServiceResult:
        """Perform a call of a model's code. InferenceError."""
        metrics = self.metrics
        match call:
            case LoadModel():
                await self._load_model(owner, call)
            case UnloadModel(model_name, unload_dependents):
                _check_other(owner, model_name)
                await self.models.unload_model(model_name, unload_dependents)
            case IsModelReady(model_name, model_version):
                return await self._is_model_ready(model_name, model_version)
            case NewMetricFamily(name, description, kind):
                return metrics.new_family(owner, name, description, kind)
            case DeleteMetricFamily(family):
                metrics.delete_family(owner, family)
            case NewMetric(family, labels, buckets):
                return metrics.new_metric(owner, family, labels, buckets)
            case MetricValue(metric):
                return metrics.value(owner, metric)
        return None

    def update_metrics(self, owner: str, updates: Sequence[tuple[int, str, float]]) -> None:
        """See `workers.supervision.services.Services`."""
        failures = 0
        first = ""
        for metric, operation, value in updates:
            try:
                self.metrics.update(owner, metric, operation, value)
            except InferenceError as error:
                first = first or error.message
                failures += 1
        if failures:
            # One line for thousands of failures: making a line takes longer than updating a metric.
            model, more = model_of(owner), f" ({failures - 1} more updates failed)" if failures > 1 else ""
            log.warning("model '%s': %s%s", model, first, more, extra={"model": model})

    async def _load_model(self, owner: str, call: LoadModel) -> None:
        name, caller = call.model_name, model_of(owner)
        _check_other(owner, name)
        if self.loads.path(name, caller):
            raise unavailable(f"model '{clip(name)}' waits for model '{clip(caller)}', which therefore cannot load it")
        parameters: dict[str, bool | int | str | bytes] = dict(call.files)
        if call.config:
            parameters["config"] = call.config
        self.loads.add(caller, (name,))
        try:
            await self.models.load_model(name, parameters, for_model=True)
        finally:
            self.loads.remove(caller, (name,))

    async def _is_model_ready(self, name: str, version: str) -> bool:
        try:
            return await self.models.is_model_ready(name, version)
        except InferenceError as error:
            if error.code is ErrorCode.NOT_FOUND:
                return False
            raise


def _check_other(owner: str, name: str) -> None:
    """Refuse a load or unload of the caller itself, which would wait for itself. InferenceError."""
    if name == model_of(owner):
        raise invalid(f"model '{clip(name)}' cannot load or unload itself")
