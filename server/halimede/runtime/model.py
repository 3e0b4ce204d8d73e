"""One loaded model version: its configuration, its checker, its pump and its workers."""

import asyncio
import logging
from collections.abc import Coroutine, Mapping
from itertools import count
from typing import Any

from halimede.core.config.check_request import RequestChecker
from halimede.core.observe.stats import ModelStats
from halimede.core.schedule.make import make_scheduler
from halimede.runtime.prepare import PreparedVersion
from halimede.runtime.pump import LiveRequests, Pump
from halimede.runtime.services import ModelServices
from halimede.runtime.threads import run_in_thread
from halimede.workers.launcher import Launcher
from halimede.workers.process import ProcessWorker
from halimede.workers.thread import ThreadWorker
from halimede.workers.worker import OnEvent, Worker, WorkerEvent

log = logging.getLogger(__name__)


class ModelVersion:
    """A version with its instances up. Made by `start_version`, ended by `close`."""

    __slots__ = (
        "_prepared",
        "_services",
        "checker",
        "config",
        "labels",
        "load_seconds",
        "name",
        "owner",
        "pump",
        "stats",
        "version",
    )

    def __init__(
        self,
        name: str,
        prepared: PreparedVersion,
        labels: Mapping[str, tuple[str, ...]],
        load_seconds: float,
        live: LiveRequests,
        services: ModelServices,
        loop: asyncio.AbstractEventLoop,
    ) -> None:
        self.name = name
        # A reload is another owner of metrics than what it replaces, although their series may be the same.
        self.owner = f"{name}#{next(_loads)}"
        self.version = str(prepared.version)
        self.config = config = prepared.config
        self.labels = labels
        self.load_seconds = load_seconds
        self.checker = RequestChecker(config)
        policy = config.model_transaction_policy
        self.stats = ModelStats(name, self.version, decoupled=policy is not None and policy.decoupled)
        batching = config.dynamic_batching
        self.pump = Pump(
            name,
            self.version,
            make_scheduler(config, instances=0),
            self.stats,
            self.checker,
            live,
            loop,
            preserve_ordering=batching is not None and batching.preserve_ordering,
        )
        self._prepared = prepared
        self._services = services

    def __repr__(self) -> str:
        return f"<ModelVersion {self.name}:{self.version} {self.pump!r}>"

    async def drained(self) -> None:
        """Wait until every accepted request is answered."""
        await self.pump.drained()

    async def close(self) -> None:
        """Answer what was accepted, stop the instances, free the model."""
        try:
            await self.pump.close()
        finally:
            self._services.metrics.forget(self.owner)
        await run_in_thread(f"close-{self.name}", self._prepared.close)


_loads = count(1)


async def start_version(
    name: str,
    prepared: PreparedVersion,
    labels: Mapping[str, tuple[str, ...]],
    load_seconds: float,
    live: LiveRequests,
    launcher: Launcher,
    services: ModelServices,
) -> ModelVersion:
    """Start all instances side by side; when one fails, or this is cancelled, the others are stopped."""
    loop = asyncio.get_running_loop()
    version = ModelVersion(name, prepared, labels, load_seconds, live, services, loop)

    def on_event(event: WorkerEvent) -> None:
        version.pump.on_event(event)

    for placement in prepared.placements:
        log.info(
            "TRITONBACKEND_ModelInstanceInitialize: %s (%s device %d)",
            *(placement.name, placement.kind, placement.device.index if placement.device is not None else 0),
            extra={"model": name, "version": str(prepared.version)},
        )
    starting = [
        loop.create_task(start) for start in _starts(prepared, version.owner, launcher, services, on_event, loop)
    ]
    try:
        await asyncio.wait(starting)
    except asyncio.CancelledError:
        for task in starting:
            task.cancel()
        await asyncio.wait(starting)
        await _stop_started(starting)
        services.metrics.forget(version.owner)
        raise
    failures = [error for task in starting if (error := task.exception()) is not None]
    if failures:
        await _stop_started(starting)
        services.metrics.forget(version.owner)
        raise failures[0]
    for placement, task in zip(prepared.placements, starting, strict=True):
        if placement.passive:
            version.pump.add_passive(task.result())
        else:
            version.pump.add_worker(task.result())
    return version


def _starts(
    prepared: PreparedVersion,
    owner: str,
    launcher: Launcher,
    services: ModelServices,
    on_event: OnEvent,
    loop: asyncio.AbstractEventLoop,
) -> list[Coroutine[Any, Any, Worker]]:
    """The start of each instance, where its version runs."""
    config = prepared.config
    isolated, model = prepared.isolated, prepared.model
    if isolated is not None:
        return [
            ProcessWorker.start(
                isolated.spec(placement),
                config,
                isolated.program,
                launcher,
                services,
                owner,
                on_event,
                loop,
            )
            for placement in prepared.placements
        ]
    if model is None:
        raise RuntimeError(f"model '{config.name}' was neither loaded nor isolated")
    return [ThreadWorker.start(placement, model, config, on_event, loop) for placement in prepared.placements]


async def _stop_started(starting: list[asyncio.Task[Worker]]) -> None:
    # Side by side, as `Pump.close` stops them: each may take long.
    started = [task.result() for task in starting if not task.cancelled() and task.exception() is None]
    await asyncio.gather(*(worker.stop() for worker in started))
