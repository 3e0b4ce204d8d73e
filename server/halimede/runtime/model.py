"""One loaded model version: its configuration, its checker, its pump and its workers."""

import asyncio
import logging
from collections.abc import Mapping

from halimede.backends.api import BackendModel
from halimede.core.config.check_request import RequestChecker
from halimede.core.config.model_config import ModelConfig
from halimede.core.observe.stats import ModelStats
from halimede.core.schedule.make import make_scheduler
from halimede.runtime.prepare import PreparedVersion
from halimede.runtime.pump import LiveRequests, Pump
from halimede.runtime.threads import run_in_thread
from halimede.workers.thread import ThreadWorker
from halimede.workers.worker import BatchDone

log = logging.getLogger(__name__)


class ModelVersion:
    """A version with its instances up. Made by `start_version`, ended by `close`."""

    __slots__ = ("_model", "checker", "config", "labels", "load_seconds", "name", "pump", "stats", "version")

    def __init__(
        self,
        name: str,
        version: int,
        config: ModelConfig,
        labels: Mapping[str, tuple[str, ...]],
        model: BackendModel,
        load_seconds: float,
        live: LiveRequests,
        loop: asyncio.AbstractEventLoop,
    ) -> None:
        self.name = name
        self.version = str(version)
        self.config = config
        self.labels = labels
        self.load_seconds = load_seconds
        self.checker = RequestChecker(config)
        self.stats = ModelStats(name, self.version)
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
        self._model = model

    def __repr__(self) -> str:
        return f"<ModelVersion {self.name}:{self.version} {self.pump!r}>"

    async def drained(self) -> None:
        """Wait until every accepted request is answered."""
        await self.pump.drained()

    async def close(self) -> None:
        """Answer what was accepted, stop the instances, free the model."""
        await self.pump.close()
        await run_in_thread(f"close-{self.name}", self._model.close)


async def start_version(
    name: str,
    prepared: PreparedVersion,
    labels: Mapping[str, tuple[str, ...]],
    load_seconds: float,
    live: LiveRequests,
) -> ModelVersion:
    """Start all instances side by side; when one fails the others are stopped and its error is raised."""
    loop = asyncio.get_running_loop()
    version = ModelVersion(name, prepared.version, prepared.config, labels, prepared.model, load_seconds, live, loop)

    def on_event(event: BatchDone) -> None:
        version.pump.on_event(event)

    for placement in prepared.placements:
        log.info(
            "TRITONBACKEND_ModelInstanceInitialize: %s (%s device %d)",
            *(placement.name, placement.kind, placement.device.index if placement.device is not None else 0),
            extra={"model": name, "version": str(prepared.version)},
        )
    started = await asyncio.gather(
        *(
            ThreadWorker.start(placement, prepared.model, prepared.config, on_event, loop)
            for placement in prepared.placements
        ),
        return_exceptions=True,
    )
    failures = [result for result in started if isinstance(result, BaseException)]
    if failures:
        for result in started:
            if not isinstance(result, BaseException):
                await result.stop()
        raise failures[0]
    for placement, worker in zip(prepared.placements, started, strict=True):
        if isinstance(worker, BaseException):  # ruled out above; said again for the type checker
            raise worker
        if placement.passive:
            version.pump.add_passive(worker)
        else:
            version.pump.add_worker(worker)
    return version
