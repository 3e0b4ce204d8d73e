"""A serving core: what loads models and executes requests, without ports, signals and an end of the process.

`app` gives it front ends; `halimede debug` and tests use it as it is. A process may have several cores, also on one
event loop: what concerns the whole process (the log, signals, limits, malloc) is left to the caller.
"""

import asyncio
import os
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from halimede.core.accounts import UNBOUNDED, MemoryBounds
from halimede.core.inventory import Inventory
from halimede.core.schedule.policy import StartHold
from halimede.log import dropped_lines
from halimede.processes.launcher import Launcher
from halimede.runtime.core_server import CoreServer
from halimede.runtime.devices import read_inventory
from halimede.runtime.lifecycle import CLOSE_TIMEOUT_SECS, ModelLifecycle
from halimede.runtime.prepare import LoadOptions
from halimede.runtime.repository import ModelRepository
from halimede.runtime.requests import RequestTable
from halimede.runtime.sampler import Sampler, make_sampler
from halimede.runtime.threads import run_in_thread
from halimede.settings import ModelControlMode, Settings

FIRST_SAMPLE_SECS = 5.0
"""Time limit for the first read of the devices' memory, before models are loaded without it."""


@dataclass(frozen=True, slots=True)
class ServingCore:
    """One core. `models` are those that `start` loads; None for all."""

    server: CoreServer
    inventory: Inventory
    sampler: Sampler
    launcher: Launcher
    repository: ModelRepository
    models: Sequence[str] | None
    hang_checks: "asyncio.Task[None]"

    async def start(self) -> list[str]:
        """Load the models to begin with; returns the names of those that failed. Ready from then on.

        InferenceError if a repository cannot be read.
        """
        self.sampler.start()
        # The memory of devices is read before the first load, to know later what the models need.
        await run_in_thread("first-sample", partial(self.sampler.wait_first, FIRST_SAMPLE_SECS))
        return await self.server.start(self.models)

    async def close(self, limit_secs: float | None = None) -> None:
        """Wait for every accepted request, free all models, and end everything. At the time limit the remaining
        requests are answered with an error, and what does not end is left behind."""
        self.server.begin_drain()
        self.server.expect_few()
        try:
            async with asyncio.timeout(limit_secs):
                await self.server.close()
        except TimeoutError:
            self.server.abort()
        await self.end()

    def end(self) -> Awaitable[object]:
        """End all parts and all worker processes at once; the threads of models that are not closed continue. Blocks
        for the time that the sampler takes to stop."""
        self.sampler.stop()
        self.hang_checks.cancel()
        return asyncio.gather(
            asyncio.wait((self.hang_checks,)),
            run_in_thread("close-launcher", self.launcher.close),
            run_in_thread("close-repository", self.repository.close),
        )


def make_core(
    settings: Settings,
    memory: MemoryBounds = UNBOUNDED,
    *,
    on_change: Callable[[], None] = lambda: None,
    dropped_log_lines: Callable[[], int] = dropped_lines,
    close_timeout_secs: float = CLOSE_TIMEOUT_SECS,
) -> ServingCore:
    """The core that the settings describe, on the running loop; it begins with `start`.

    `on_change` is called after each change of the models that serve, before a load or an unload is answered, at the end
    of the start, and at the begin of the drain. Instances and model may take `close_timeout_secs` to close after the
    last request. InferenceError for settings that cannot be used, such as a device list that cannot be read.
    """
    inventory = read_inventory(settings.device_list, settings.min_supported_compute_capability)
    sampler = make_sampler(
        settings.metrics_interval_ms, inventory, cpu=settings.allow_cpu_metrics, gpu=settings.allow_gpu_metrics
    )
    launcher = Launcher(settings.hang_timeout_secs, memory)
    options = LoadOptions(
        inventory=inventory,
        backend_config=settings.backend_config,
        process_per_device=settings.process_per_device,
        allow_pickle=settings.allow_pickle,
        autocomplete=not settings.disable_auto_complete_config,
        launcher=launcher,
        backend_directory=settings.backend_directory,
        log_verbose=settings.log_verbose,
        hold=StartHold(settings.delay_scheduler, settings.backlog_delay_scheduler),
    )
    repository = _repository(settings)
    table = RequestTable(
        memory=memory,
        max_state_bytes=settings.max_sequence_state_size,
        max_sequence_id_bytes=settings.max_sequence_id_size,
    )
    make_lifecycle = partial(
        ModelLifecycle,
        *(repository, options, settings.model_load_thread_count),
        retry_count=settings.model_load_retry_count,
        unload_wait_secs=settings.unload_wait_secs,
        close_timeout_secs=close_timeout_secs,
        table=table,
        on_change=on_change,
    )
    server = CoreServer(
        make_lifecycle,
        sampler,
        settings,
        dropped_log_lines=dropped_log_lines,
        inventory=inventory,
        hung_processes=launcher.hangs.ended,
    )
    takes_all = settings.model_control_mode is ModelControlMode.NONE or "*" in settings.load_model
    hang_checks = asyncio.get_running_loop().create_task(launcher.hangs.run())
    models = None if takes_all else settings.load_model
    return ServingCore(server, inventory, sampler, launcher, repository, models, hang_checks)


def _repository(settings: Settings) -> ModelRepository:
    directories = tuple(each for each in settings.model_repository if isinstance(each, Path))
    uris = [each for each in settings.model_repository if isinstance(each, str)]
    if not uris:
        return ModelRepository(directories, settings.model_file, settings.model_config_name)
    # Imported here, because only servers with stores need the libraries of stores.
    from halimede.fetch.store_repository import StoreRepository
    from halimede_spec.uri import parse_uri

    return StoreRepository(directories, tuple(map(parse_uri, uris)), settings.model_config_name, dict(os.environ))
