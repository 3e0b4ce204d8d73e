"""One loaded model version: its configuration, request checker, requests and executor."""

import asyncio
import logging
from collections.abc import Callable, Coroutine, Sequence
from functools import partial
from itertools import count
from typing import Any

from halimede.core.config.check_request import RequestChecker
from halimede.core.config.model_config import ModelConfig
from halimede.core.config.process_options import strict_outputs
from halimede.core.observe.stats import ModelStats
from halimede.core.repository.plan import Design, Labels, Parts
from halimede.core.schedule.make import make_scheduler
from halimede.core.schedule.replies import ReplyChecker
from halimede.core.types import Placement
from halimede.core.types.server import WorkerHealth
from halimede.processes.launcher import Launcher
from halimede.runtime.clock import monotonic_ns
from halimede.runtime.ensemble import Ensemble
from halimede.runtime.executor import VersionExecutor
from halimede.runtime.prepare import PreparedVersion
from halimede.runtime.pump import Pump
from halimede.runtime.requests import RequestTable, VersionRequests
from halimede.runtime.services import ModelServices
from halimede.runtime.threads import run_in_thread
from halimede.workers.states import HeldStates
from halimede.workers.supervision.worker import ProcessWorker
from halimede.workers.thread import ThreadWorker
from halimede.workers.worker import OnEvent, Worker

log = logging.getLogger(__name__)


class ModelVersion:
    """A version with its instances up. Made by `start_version` or `make_ensemble`, ended by `close`.

    `requests` takes its requests, `executor` executes them. `parts` is set for an ensemble; `steps` are the names of
    its steps' models.
    """

    def __init__(
        self,
        name: str,
        prepared: PreparedVersion,
        config: ModelConfig,
        labels: Labels,
        load_seconds: float,
        checker: RequestChecker,
        executor: VersionExecutor,
        services: ModelServices,
        *,
        parts: Parts | None = None,
    ) -> None:
        self.name = name
        # A reload is a new owner of metrics, although its series may be the same as those of the load that it replaces.
        self.owner = f"{name}#{next(_loads)}"
        self.version = str(prepared.version)
        self.config = config
        self.labels = labels
        self.load_seconds = load_seconds
        self.checker = checker
        self.executor = executor
        self.requests = executor.requests
        self.stats = self.requests.stats
        self.parts = parts
        ensemble = config.ensemble_scheduling
        self.steps = frozenset(step.model_name for step in ensemble.step) if ensemble is not None else frozenset()
        self._prepared = prepared
        self._services = services

    def __repr__(self) -> str:
        return f"<ModelVersion {self.name}:{self.version} {self.executor!r}>"

    @property
    def workers(self) -> WorkerHealth | None:
        """The state of its worker processes; None if the instances are threads."""
        return None if self._prepared.isolated is None else self.executor.worker_health()

    @property
    def placements(self) -> Sequence[Placement]:
        """The instances and their devices; none for an ensemble."""
        return self._prepared.placements

    async def drained(self) -> None:
        """Wait until every accepted request is answered."""
        await self.requests.drained()

    async def close(self) -> None:
        """Answer what was accepted, stop the instances, free the model."""
        try:
            await self.executor.close()
        finally:
            self._services.forget(self.owner)
        if self.parts is None:
            await run_in_thread(f"close-{self.name}", self._prepared.close)


_loads = count(1)


async def start_version(
    name: str,
    prepared: PreparedVersion,
    labels: Labels,
    load_seconds: float,
    table: RequestTable,
    launcher: Launcher,
    services: ModelServices,
) -> ModelVersion:
    """Start all instances in parallel; if one fails, or this is cancelled, the others are stopped.

    `load_seconds` passed before.
    """
    begun_ns = monotonic_ns()
    loop = asyncio.get_running_loop()
    config = prepared.config
    stats = ModelStats(name, str(prepared.version), decoupled=config.is_decoupled)
    checker = RequestChecker(config)
    batching = config.dynamic_batching
    in_order = batching is not None and batching.preserve_ordering
    pump = Pump(
        partial(make_scheduler, config, strategy=prepared.strategy, hold=prepared.hold, ids=table.ids),
        partial(VersionRequests, table, stats, preserve_ordering=in_order),
        checker,
        loop,
    )
    version = ModelVersion(name, prepared, config, labels, load_seconds, checker, pump, services)

    for placement in prepared.placements:
        log.info(
            "TRITONBACKEND_ModelInstanceInitialize: %s (%s device %d)",
            *(placement.name, placement.kind, placement.device.index if placement.device is not None else 0),
            extra={"model": name, "version": str(prepared.version)},
        )
    starting = [
        loop.create_task(start)
        for start in _starts(prepared, version.owner, launcher, services, pump.on_event, loop, table.states)
    ]
    try:
        await asyncio.wait(starting)
    except asyncio.CancelledError:
        for task in starting:
            task.cancel()
        await asyncio.wait(starting)
        await _stop_started(starting)
        services.forget(version.owner)
        raise
    failures = [error for task in starting if (error := task.exception()) is not None]
    if failures:
        await _stop_started(starting)
        services.forget(version.owner)
        raise failures[0]
    for placement, task in zip(prepared.placements, starting, strict=True):
        if placement.passive:
            pump.add_passive(task.result())
        else:
            pump.add_worker(task.result())
    version.load_seconds += (monotonic_ns() - begun_ns) / 1e9
    return version


def make_ensemble(
    prepared: PreparedVersion,
    design: Design,
    load_seconds: float,
    table: RequestTable,
    services: ModelServices,
    members: Callable[[], Sequence[VersionExecutor | None]],
) -> ModelVersion:
    """A version of an ensemble, which serves at once.

    `members` gives the executors of the steps' models, now and later.
    """
    config, graph = design.config, design.graph
    name, number = config.name, str(prepared.version)
    stats = ModelStats(name, number, decoupled=graph.decoupled, has_queue=False)
    checker = RequestChecker(config)
    requests = partial(VersionRequests, table, stats)
    ensemble = Ensemble(graph, requests, services.models, members, checker, asyncio.get_running_loop())
    return ModelVersion(
        *(name, prepared, config, design.labels, load_seconds, checker, ensemble, services), parts=design.parts
    )


def _starts(
    prepared: PreparedVersion,
    owner: str,
    launcher: Launcher,
    services: ModelServices,
    on_event: OnEvent,
    loop: asyncio.AbstractEventLoop,
    states: HeldStates,
) -> list[Coroutine[Any, Any, Worker]]:
    """A coroutine for each instance that starts its process or thread."""
    config = prepared.config
    isolated, model = prepared.isolated, prepared.model
    if isolated is not None:
        replies = ReplyChecker(config, is_strict=strict_outputs(config))
        return [
            ProcessWorker(
                isolated.spec(placement),
                config,
                replies,
                isolated.program,
                launcher,
                services,
                owner,
                on_event,
                loop,
                states,
            ).start()
            for placement in prepared.placements
        ]
    if model is None:
        raise RuntimeError(f"model '{config.name}' was neither loaded nor isolated")
    return [
        ThreadWorker(placement, model, config, on_event, loop, prepared.state_files, states=states).start()
        for placement in prepared.placements
    ]


async def _stop_started(starting: list[asyncio.Task[Worker]]) -> None:
    # In parallel, as in `Pump.close`: each may take long.
    started = [task.result() for task in starting if not task.cancelled() and task.exception() is None]
    await asyncio.gather(*(worker.stop() for worker in started))
