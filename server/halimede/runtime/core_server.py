"""The façade's implementation in one process: models, their pumps, statistics and the repository."""

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Coroutine, Generator, Mapping, Sequence

from halimede.core.config.model_view import ModelView
from halimede.core.hangs import ProcessKind
from halimede.core.inventory import Inventory
from halimede.core.observe import kv_cache, metrics_page
from halimede.core.observe.samples import InstanceSample, ModelSample
from halimede.core.repository.layout import load_name_problem, no_name_problem
from halimede.core.types import (
    DeviceReport,
    DeviceState,
    ErrorCode,
    InferenceError,
    InferenceRequest,
    ModelIndexEntry,
    PlacedInstances,
    ServerMetadata,
)
from halimede.core.types.caller import Caller
from halimede.core.types.error import clip, invalid, unavailable, unsupported
from halimede.core.types.kv_cache import KvCache
from halimede.core.types.statistics import ModelStatistics
from halimede.facade.server import LoadParameter, OnResponse
from halimede.runtime.admission import Admission
from halimede.runtime.lifecycle import ModelLifecycle, Serving
from halimede.runtime.model import ModelVersion
from halimede.runtime.sampler import Sampler
from halimede.runtime.services import LoadableModels
from halimede.settings import ModelControlMode, Settings

log = logging.getLogger(__name__)

STOPPING = unavailable("Server is stopping, models are no longer loaded or unloaded")

EXTENSIONS = (
    "classification",
    "sequence",
    "model_repository",
    "model_repository(unload_dependents)",
    "schedule_policy",
    "model_configuration",
    "binary_tensor_data",
    "parameters",
    "statistics",
)


class CoreServer:
    """Implements `facade.server.Server`. All methods run on the event loop's thread."""

    def __init__(
        self,
        make_lifecycle: Callable[[LoadableModels], ModelLifecycle],
        sampler: Sampler,
        settings: Settings,
        *,
        dropped_log_lines: Callable[[], int],
        inventory: Inventory,
        hung_processes: Mapping[ProcessKind, int],
    ) -> None:
        """Models call others, and the steps of ensembles are run, by this server: `make_lifecycle` gets it."""
        lifecycle = self.lifecycle = make_lifecycle(self)
        self._sampler = sampler
        self._metadata = ServerMetadata(settings.id, settings.server_version, EXTENSIONS)
        self._settings = settings
        self._dropped_log_lines = dropped_log_lines
        self._custom_metrics = lifecycle.services.metrics
        self._inventory = inventory
        self._hung_processes = hung_processes
        self._started = False
        self._draining = False
        self._admission = Admission(self._find_version, lifecycle.table)
        self._control: set[asyncio.Task[None]] = set()

    def __repr__(self) -> str:
        return f"<CoreServer models={len(self.lifecycle.records)} in_flight={len(self.lifecycle.table.by_ticket)}>"

    async def start(self, names: Sequence[str] | None) -> list[str]:
        """Load the models to begin with (None: all); returns the names of those that failed. Ready from then on.

        InferenceError if a repository cannot be read.
        """
        failed = await self.lifecycle.load_all(names)
        self._sampler.sample_soon()
        self._started = True
        self.lifecycle.records.on_change()
        return failed

    def begin_drain(self) -> None:
        """Not ready from now on; requests that still arrive are answered, so that none is lost in transit."""
        self._draining = True
        self.lifecycle.records.on_change()
        for task in self._control:
            task.cancel()

    def expect_few(self) -> None:
        """No client sends new requests from now on: batches do not wait for more."""
        self.lifecycle.expect_few()

    async def close(self) -> None:
        """Wait for every accepted request, then free all models."""
        await self.lifecycle.close()
        self._admission.close()

    def abort(self) -> None:
        """Answer all queued requests with an error, because the exit timeout has expired."""
        self.lifecycle.abort()

    def metadata(self) -> ServerMetadata:
        return self._metadata

    def is_live(self) -> bool:
        return True

    def is_ready(self) -> bool:
        if self._draining or not self._started:
            return False
        return not self._settings.strict_readiness or self.lifecycle.all_ready()

    def is_draining(self) -> bool:
        return self._draining

    def model(self, name: str, version: str = "") -> ModelView:
        return self._find(name, version).view

    async def is_model_ready(self, name: str, version: str = "") -> bool:
        record = self.lifecycle.records.get(name)
        if record is None or record.is_unknown():
            raise InferenceError(ErrorCode.NOT_FOUND, f"Request for unknown model: '{clip(name)}' is not found")
        serving = record.serving.get(version and str(_version_number(version)))
        return serving is not None and await serving.version.executor.is_ready()

    def infer(self, request: InferenceRequest, on_response: OnResponse, caller: Caller | None = None) -> int:
        return self._admission.infer(request, on_response, caller)

    def cancel(self, ticket: int, *, reads_on: bool = False) -> None:
        """See `facade.server.Server`. `reads_on`: a model's code reads what a decoupled model still sends."""
        self._admission.cancel(ticket, reads_on=reads_on)

    def acknowledge(self, ticket: int, responses: int = 1) -> None:
        self._admission.acknowledge(ticket, responses)

    async def kv_cache(self, model: str) -> KvCache | None:
        return kv_cache.find_kv_cache(self._custom_metrics.series(kv_cache.FAMILY), model)

    async def statistics(self, name: str = "", version: str = "") -> Sequence[ModelStatistics]:
        records = self.lifecycle.records
        if not name:
            return [v.stats.snapshot() for _, r in sorted(records.items()) for v in r.versions.values()]
        record = records.get(name)
        if record is None or not record.serving:
            raise invalid(f"requested model '{clip(name)}' is not available")
        if not version:
            return [v.stats.snapshot() for v in record.versions.values()]
        serving = record.serving.get(str(_version_number(version)))
        if serving is None:
            raise invalid(f"requested model version is not available for model '{clip(name)}'")
        return [serving.version.stats.snapshot()]

    async def repository_index(self, ready_only: bool) -> Sequence[ModelIndexEntry]:
        return await self.lifecycle.index(ready_only)

    async def devices(self) -> DeviceReport:
        placed: dict[int, Counter[tuple[str, str]]] = {}
        for name, record in sorted(self.lifecycle.records.items()):
            for version in record.versions.values():
                for placement in version.placements:
                    if placement.device is not None:
                        placed.setdefault(placement.device.index, Counter())[name, version.version] += 1
        memory = self._sampler.device_memory
        return DeviceReport(
            tuple(
                DeviceState(
                    device,
                    memory.get(device.uuid),
                    tuple(
                        PlacedInstances(name, version, count)
                        for (name, version), count in placed.get(device.index, Counter()).items()
                    ),
                )
                for device in self._inventory.devices
            ),
            self._sampler.host_peak_bytes,
        )

    async def load_model(self, name: str, parameters: Mapping[str, LoadParameter], *, for_model: bool = False) -> None:
        self._require_control(load_name_problem(name))
        if parameters:
            key = clip(next(iter(parameters)))
            raise unsupported(f"load parameter '{key}' is not supported yet: models are loaded from the repository")
        await self._finish(self.lifecycle.load(name, for_model=for_model))
        self._sampler.sample_soon()

    async def unload_model(self, name: str, unload_dependents: bool = False) -> None:
        # As in Triton, any other name is that of an unknown model, whose unload succeeds.
        self._require_control(no_name_problem(name))
        await self._finish(self.lifecycle.unload(name, with_steps=unload_dependents))

    def render_metrics(self) -> Generator[int, None, list[bytes]]:
        """The metrics page in Prometheus' text format, in steps as `core.observe.metrics_page.render` makes it."""
        versions = [v for _, record in sorted(self.lifecycle.records.items()) for v in record.versions.values()]
        sample = self._sampler.latest
        return metrics_page.render(
            map(_sample_of, versions),
            sample.system,
            sample.gpus,
            states=self.lifecycle.states(),
            dropped_log_lines=self._dropped_log_lines(),
            hung_processes=self._hung_processes,
            latencies=self._settings.metrics_config.counter_latencies,
            first_responses=self._settings.metrics_config.histogram_latencies,
            custom=self._custom_metrics.render(),
        )

    async def _finish(self, work: Coroutine[None, None, None]) -> None:
        """Continue if the client disconnects, so that a load always ends as loaded or failed."""
        task = asyncio.get_running_loop().create_task(work)
        self._control.add(task)
        task.add_done_callback(self._control.discard)
        try:
            await asyncio.shield(task)
        except asyncio.CancelledError:
            if task.cancelled():
                raise STOPPING from None
            raise

    def _require_control(self, name_problem: str | None) -> None:
        if self._settings.model_control_mode is not ModelControlMode.EXPLICIT:
            # Scripts search for the first part, which is Triton's text in every mode but explicit.
            raise unavailable(
                "explicit model load / unload is not allowed if polling is enabled or --model-control-mode is none; "
                "start with --model-control-mode=explicit"
            )
        if name_problem:
            raise invalid(name_problem)
        if self._draining:
            raise STOPPING

    def _find_version(self, name: str, version: str, *, is_inside: bool) -> ModelVersion:
        return self._find(name, version, is_inside=is_inside).version

    def _find(self, name: str, version: str, *, is_inside: bool = False) -> Serving:
        """The version that serves. Calls from inside the server also find versions that are being unloaded."""
        record = self.lifecycle.records.get(name)
        if record is not None:
            serving = record.serving.get(version)
            if serving is not None:
                return serving
        return self._find_slow(name, version, is_inside)

    def _find_slow(self, name: str, version: str, is_inside: bool) -> Serving:
        """All other cases than the canonical version of a ready model: other spellings of a number, and errors."""
        text = str(_version_number(version)) if version else ""
        record = self.lifecycle.records.get(name)
        shown = clip(name)
        if record is None or record.is_unknown():
            raise InferenceError(ErrorCode.NOT_FOUND, f"Request for unknown model: '{shown}' is not found")
        if text in record.serving:
            return record.serving[text]
        if is_inside and text in record.leaving:
            return record.leaving[text]
        if text and int(text) in record.status:
            raise unavailable(f"Request for unknown model: '{shown}' version {text} is not at ready state")
        if record.loading and not record.serving:
            raise unavailable(f"Request for unknown model: '{shown}' is loading")
        if not text:
            raise InferenceError(ErrorCode.NOT_FOUND, f"Request for unknown model: '{shown}' has no available versions")
        raise InferenceError(
            ErrorCode.NOT_FOUND, f"Request for unknown model: '{shown}' version {clip(text)} is not found"
        )


def _sample_of(version: ModelVersion) -> ModelSample:
    load = version.executor.load()
    placed = {each.ordinal: each for each in version.placements}
    instances = [
        InstanceSample(placed[busy.ordinal].name, placed[busy.ordinal].device_name, busy) for busy in load.busy
    ]
    devices = {each.device.uuid if each.device is not None else "" for each in version.placements if not each.passive}
    gpu_uuid = devices.pop() if len(devices) == 1 else ""
    tags = version.config.metric_tags
    return ModelSample(version.stats, tags, load, version.load_seconds, instances, gpu_uuid)


def _version_number(text: str) -> int:
    """A version as a client may spell it: decimal digits of a 64-bit number."""
    if text.isascii() and text.isdigit() and len(text) < 20:
        return int(text)
    problem = f"failed to get model version from specified version string '{clip(text)}' (details: stol)"
    if text[:1] == "-" and text[1:].isascii() and text[1:].isdigit() and len(text) < 20:
        problem = f"invalid model version specified '{text}' "
    raise invalid(f"{problem}, version should be an integral value > 0")
