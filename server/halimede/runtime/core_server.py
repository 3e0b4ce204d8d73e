"""The façade's implementation in one process: models, their pumps, statistics and the repository."""

import asyncio
import logging
from collections.abc import Callable, Coroutine, Generator, Mapping, Sequence

from halimede import __version__
from halimede.core.config.check_request import Checked
from halimede.core.config.model_view import ModelView
from halimede.core.observe import kv_cache, metrics, metrics_page
from halimede.core.observe.custom_metrics import CustomMetrics
from halimede.core.repository.layout import asked_name_problem
from halimede.core.types import (
    ErrorCode,
    InferenceError,
    InferenceRequest,
    InferenceResponse,
    ModelIndexEntry,
    ServerMetadata,
)
from halimede.core.types.caller import MAX_DEPTH, Caller
from halimede.core.types.error import clip
from halimede.core.types.kv_cache import KvCache
from halimede.core.types.statistics import ModelStatistics
from halimede.runtime.clock import monotonic_ns
from halimede.runtime.lifecycle import ModelLifecycle, Serving
from halimede.runtime.model import ModelVersion
from halimede.runtime.model_calls import ModelCalls
from halimede.runtime.pump import CANCELLED
from halimede.runtime.sampler import Sampler
from halimede.runtime.server import LoadParameter, OnResponse
from halimede.runtime.threads import run_in_thread
from halimede.settings import MetricsConfig, ModelControlMode

log = logging.getLogger(__name__)

STOPPING = InferenceError(ErrorCode.UNAVAILABLE, "Server is stopping, models are not loaded or unloaded any more")

FRAMING_THREADS = 2

TOO_DEEP = f"model '%s' is not called: calls within one another are at most {MAX_DEPTH} deep"
NOT_ONE = (
    "Model %s is using the decoupled. The current BLS request call doesn't support models using the decoupled"
    " transaction policy. Please use 'decoupled=True' argument to the 'exec' or 'async_exec' calls for decoupled"
    " models.'"
)
EXTENSIONS = (
    "classification",
    "model_repository",
    "model_repository(unload_dependents)",
    "model_configuration",
    "binary_tensor_data",
    "parameters",
    "statistics",
)


class CoreServer:
    """Implements `runtime.server.Server`. All methods run on the event loop's thread."""

    def __init__(
        self,
        lifecycle: ModelLifecycle,
        sampler: Sampler,
        *,
        server_id: str,
        control_mode: ModelControlMode,
        strict_readiness: bool,
        metrics_config: MetricsConfig,
        dropped_log_lines: Callable[[], int],
        custom_metrics: CustomMetrics,
        server_version: str = __version__,
    ) -> None:
        self._lifecycle = lifecycle
        self._sampler = sampler
        self._metadata = ServerMetadata(server_id, server_version, EXTENSIONS)
        self._control_mode = control_mode
        self._strict_readiness = strict_readiness
        self._metrics_config = metrics_config
        self._dropped_log_lines = dropped_log_lines
        self._custom_metrics = custom_metrics
        self._started = False
        self._draining = False
        self._next_ticket = 1
        lifecycle.inferences = self
        self._calls = ModelCalls(lifecycle.live)
        self._control: set[asyncio.Task[None]] = set()
        self._framing: dict[int, asyncio.Task[None]] = {}
        self._framing_slots = asyncio.Semaphore(FRAMING_THREADS)

    def __repr__(self) -> str:
        return f"<CoreServer models={len(self._lifecycle.records)} in_flight={len(self._lifecycle.live.by_ticket)}>"

    async def start(self, names: Sequence[str] | None) -> list[str]:
        """Load the models to begin with (None: all); returns the names of those that failed. Ready from then on."""
        failed = await self._lifecycle.load_all(names)
        self._started = True
        return failed

    def begin_drain(self) -> None:
        """Not ready from now on; requests that still arrive are answered, so that none is lost on its way."""
        self._draining = True
        for task in self._control:
            task.cancel()

    async def close(self) -> None:
        """Wait for every accepted request, then free all models."""
        await self._lifecycle.close()
        self._calls.close()

    def abort(self) -> None:
        """Answer everything that is queued with an error: the time to drain is over."""
        self._lifecycle.abort()

    def metadata(self) -> ServerMetadata:
        return self._metadata

    def is_live(self) -> bool:
        return True

    def is_ready(self) -> bool:
        if self._draining or not self._started or self._lifecycle.has_unreadable_repository:
            return False
        return not self._strict_readiness or self._lifecycle.all_ready()

    def is_draining(self) -> bool:
        return self._draining

    def model(self, name: str, version: str = "") -> ModelView:
        return self._find(name, version).view

    async def is_model_ready(self, name: str, version: str = "") -> bool:
        record = self._lifecycle.records.get(name)
        if record is None:
            raise InferenceError(ErrorCode.NOT_FOUND, f"Request for unknown model: '{clip(name)}' is not found")
        serving = record.serving.get(version and str(_version_number(version)))
        return serving is not None and await serving.version.pump.is_ready()

    def infer(self, request: InferenceRequest, on_response: OnResponse, caller: Caller | None = None) -> int:
        received_ns = monotonic_ns()
        ticket = self._next_ticket
        self._next_ticket = ticket + 1
        if caller is not None and caller.depth > MAX_DEPTH:
            error = InferenceError(ErrorCode.INVALID_ARG, TOO_DEEP % clip(request.model_name))
            on_response(InferenceResponse(request.model_name, "", request.id, error=error))
            return ticket
        try:
            model = self._find(request.model_name, request.model_version, is_inside=caller is not None).version
            if request.wants_one and model.stats.decoupled:
                raise InferenceError(ErrorCode.INTERNAL, NOT_ONE % model.name)
            checked = model.checker.check(request)
        except InferenceError as error:
            on_response(InferenceResponse(request.model_name, "", request.id, error=error))
            return ticket
        if checked.needs_framing:
            self._frame_first(ticket, model, request, checked, on_response, received_ns, caller)
        else:
            model.pump.submit(ticket, request, checked, on_response, received_ns, caller)
            if caller is not None and caller.waiter is not None:
                self._calls.made(ticket, caller, received_ns, model.pump)
        return ticket

    def _frame_first(
        self,
        ticket: int,
        model: ModelVersion,
        request: InferenceRequest,
        checked: Checked,
        on_response: OnResponse,
        received_ns: int,
        caller: Caller | None,
    ) -> None:
        """Check the many elements of a BYTES tensor on a thread: a second of work must not stop the event loop."""

        def answer(error: InferenceError) -> None:
            on_response(InferenceResponse(request.model_name, "", request.id, error=error))

        async def check_then_submit() -> None:
            try:
                async with self._framing_slots:
                    await run_in_thread(f"frame-{model.name}", lambda: model.checker.check_framing(request))
            except InferenceError as error:
                model.pump.release(checked.size_bytes)
                answer(error)
            except asyncio.CancelledError:
                model.pump.release(checked.size_bytes)
                answer(CANCELLED)
            except Exception:
                # No thread could be had, or no memory: the one request fails.
                log.exception("model '%s': a request could not be checked", model.name, extra={"model": model.name})
                model.pump.release(checked.size_bytes)
                answer(InferenceError(ErrorCode.INTERNAL, f"request for model '{model.name}' could not be checked"))
            else:
                # Submitted first: a pump that is held by nobody may close.
                model.pump.submit(ticket, request, checked, on_response, received_ns, caller)
                model.pump.release(checked.size_bytes)
                if caller is not None and caller.waiter is not None:
                    self._calls.made(ticket, caller, received_ns, model.pump)

        try:
            model.pump.hold(checked.size_bytes)
        except InferenceError as error:
            answer(error)
            return
        task = asyncio.get_running_loop().create_task(check_then_submit())
        self._framing[ticket] = task
        task.add_done_callback(lambda _: self._framing.pop(ticket))

    def cancel(self, ticket: int) -> None:
        flight = self._lifecycle.live.by_ticket.get(ticket)
        if flight is not None:
            flight.pump.cancel(ticket)
        elif ticket in self._framing:
            self._framing[ticket].cancel()

    def acknowledge(self, ticket: int, responses: int = 1) -> None:
        flight = self._lifecycle.live.by_ticket.get(ticket)
        if flight is not None:
            flight.pump.acknowledge(ticket, responses)

    def kv_cache(self, model: str) -> KvCache | None:
        return kv_cache.find_kv_cache(self._custom_metrics.series(kv_cache.FAMILY), model)

    def statistics(self, name: str = "", version: str = "") -> Sequence[ModelStatistics]:
        records = self._lifecycle.records
        if not name:
            return [v.stats.snapshot() for _, r in sorted(records.items()) for v in r.versions.values()]
        record = records.get(name)
        if record is None or not record.serving:
            raise InferenceError(ErrorCode.INVALID_ARG, f"requested model '{clip(name)}' is not available")
        if not version:
            return [v.stats.snapshot() for v in record.versions.values()]
        serving = record.serving.get(str(_version_number(version)))
        if serving is None:
            text = f"requested model version is not available for model '{clip(name)}'"
            raise InferenceError(ErrorCode.INVALID_ARG, text)
        return [serving.version.stats.snapshot()]

    async def repository_index(self, ready_only: bool) -> Sequence[ModelIndexEntry]:
        return await self._lifecycle.index(ready_only)

    async def load_model(self, name: str, parameters: Mapping[str, LoadParameter], *, for_model: bool = False) -> None:
        self._require_control(name)
        if parameters:
            text = (
                f"load parameter '{clip(next(iter(parameters)))}' is not supported yet: a model loads as it is on disk"
            )
            raise InferenceError(ErrorCode.UNSUPPORTED, text)
        await self._finish(self._lifecycle.load(name, for_model=for_model))

    async def unload_model(self, name: str, unload_dependents: bool = False) -> None:
        self._require_control(name)
        await self._finish(self._lifecycle.unload(name, with_steps=unload_dependents))

    def render_metrics(self) -> Generator[None, None, list[bytes]]:
        """The metrics page in Prometheus' text format, in steps as `core.observe.metrics_page.render` makes it."""
        versions = [v for _, record in sorted(self._lifecycle.records.items()) for v in record.versions.values()]
        sample = self._sampler.latest
        return metrics_page.render(
            map(_sample_of, versions),
            sample.system,
            sample.gpus,
            states=self._lifecycle.states(),
            dropped_log_lines=self._dropped_log_lines(),
            latencies=self._metrics_config.counter_latencies,
            first_responses=self._metrics_config.histogram_latencies,
            custom=self._custom_metrics.render(),
        )

    async def _finish(self, work: Coroutine[None, None, None]) -> None:
        """Carry on when the client that asked goes away: a load that was begun ends as loaded or failed."""
        task = asyncio.get_running_loop().create_task(work)
        self._control.add(task)
        task.add_done_callback(self._control.discard)
        try:
            await asyncio.shield(task)
        except asyncio.CancelledError:
            if task.cancelled():
                raise STOPPING from None
            raise

    def _require_control(self, name: str) -> None:
        if self._control_mode is not ModelControlMode.EXPLICIT:
            # Scripts look for the first part, which is Triton's text in every mode but explicit.
            text = (
                "explicit model load / unload is not allowed if polling is enabled or --model-control-mode is none; "
                "start with --model-control-mode=explicit"
            )
            raise InferenceError(ErrorCode.UNAVAILABLE, text)
        if problem := asked_name_problem(name):
            raise InferenceError(ErrorCode.INVALID_ARG, problem)
        if self._draining:
            raise STOPPING

    def _find(self, name: str, version: str, *, is_inside: bool = False) -> Serving:
        """What serves the model; a call from inside the server also finds what is leaving, and still needed."""
        record = self._lifecycle.records.get(name)
        if record is not None:
            serving = record.serving.get(version)
            if serving is not None:
                return serving
        return self._find_slow(name, version, is_inside)

    def _find_slow(self, name: str, version: str, is_inside: bool) -> Serving:
        """Everything but a canonical version of a ready model: other spellings of a number, and all errors."""
        text = str(_version_number(version)) if version else ""
        record = self._lifecycle.records.get(name)
        shown = clip(name)
        if record is None:
            raise InferenceError(ErrorCode.NOT_FOUND, f"Request for unknown model: '{shown}' is not found")
        if text in record.serving:
            return record.serving[text]
        if is_inside and text in record.leaving:
            return record.leaving[text]
        if text and int(text) in record.status:
            reason = f"Request for unknown model: '{shown}' version {text} is not at ready state"
            raise InferenceError(ErrorCode.UNAVAILABLE, reason)
        if record.loading and not record.serving:
            raise InferenceError(ErrorCode.UNAVAILABLE, f"Request for unknown model: '{shown}' is loading")
        if not text:
            raise InferenceError(ErrorCode.NOT_FOUND, f"Request for unknown model: '{shown}' has no available versions")
        raise InferenceError(
            ErrorCode.NOT_FOUND, f"Request for unknown model: '{shown}' version {clip(text)} is not found"
        )


def _sample_of(version: ModelVersion) -> metrics.ModelSample:
    pump = version.pump
    return metrics.ModelSample(
        version.stats,
        version.config.metric_tags,
        pending=pump.queued,
        executing=pump.executing,
        oldest_wait_ns=pump.oldest_wait_ns(),
        load_seconds=version.load_seconds,
        parked=pump.parked,
    )


def _version_number(text: str) -> int:
    """A version as a client may spell it: decimal digits of a 64-bit number."""
    if text.isascii() and text.isdigit() and len(text) < 20:
        return int(text)
    problem = f"failed to get model version from specified version string '{clip(text)}' (details: stol)"
    if text[:1] == "-" and text[1:].isascii() and text[1:].isdigit() and len(text) < 20:
        problem = f"invalid model version specified '{text}' "
    raise InferenceError(ErrorCode.INVALID_ARG, f"{problem}, version should be an integral value > 0")
