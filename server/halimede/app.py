"""The composition root: makes the parts, starts them in order, and takes them down again. Alone may import everything.

Start: bind all ports (a busy one fails before any model is loaded), listen, load the models, be ready. Stop: not ready,
front ends drain while requests in flight are answered, then the models; at the limit what is left is answered with an
error. A second signal ends the process at once.
"""

import asyncio
import logging
import os
import signal
from collections.abc import Sequence

import uvloop

from halimede.core.types import InferenceError, ModelReadyState
from halimede.frontends.grpc.server import GrpcServer
from halimede.frontends.http.server import HttpServer
from halimede.frontends.metrics import MetricsServer
from halimede.log import configure, log_table
from halimede.runtime.core_server import CoreServer
from halimede.runtime.devices import read_inventory
from halimede.runtime.lifecycle import ModelLifecycle
from halimede.runtime.malloc import keep_large_buffers
from halimede.runtime.prepare import LoadOptions
from halimede.runtime.repository import ModelRepository
from halimede.runtime.sampler import make_sampler
from halimede.settings import ModelControlMode, Settings

log = logging.getLogger(__name__)

ANSWER_SECS = 0.5
"""How long the last errors of an aborted drain may take to reach their clients."""


def run(settings: Settings) -> int:
    """Serve until a signal; the process's exit code."""
    configure(settings)
    keep_large_buffers()
    # CUDA's own order is by speed; the inventory's, like nvidia-smi's, is by bus. Set before anything opens CUDA.
    os.environ.setdefault("CUDA_DEVICE_ORDER", "PCI_BUS_ID")
    try:
        return uvloop.run(_serve(settings))
    except (InferenceError, OSError) as error:
        log.error("%s", error)
        return 1


async def _serve(settings: Settings) -> int:
    app = App(settings)
    try:
        await app.listen()
        return await app.serve()
    finally:
        await app.close()


class App:
    """One server process: its front ends before one core."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._stop = asyncio.Event()
        self._sampler = make_sampler(
            settings.metrics_interval_ms, cpu=settings.allow_cpu_metrics, gpu=settings.allow_gpu_metrics
        )
        options = LoadOptions(
            inventory=read_inventory(settings.device_list),
            backend_config=settings.backend_config,
            autocomplete=not settings.disable_auto_complete_config,
        )
        repository = ModelRepository(settings.model_repository, settings.model_file)
        self._lifecycle = ModelLifecycle(repository, options, settings.model_load_thread_count)
        self._core = CoreServer(
            self._lifecycle,
            self._sampler,
            server_id=settings.id,
            control_mode=settings.model_control_mode,
            strict_readiness=settings.strict_readiness,
        )
        self._http: HttpServer | None = None
        self._grpc: GrpcServer | None = None
        self._metrics: MetricsServer | None = None

    async def listen(self) -> None:
        """Bind every port and answer on it: not ready yet, but live."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._on_signal, number)
        settings = self._settings
        started: list[str] = []
        if settings.allow_http:
            self._http = HttpServer(self._core, max_input_size=settings.http_max_input_size, log=log.error)
            port = await self._http.start(settings.http_address, settings.http_port)
            started.append(f"Started HTTPService at {settings.http_address}:{port}")
        if settings.allow_grpc:
            self._grpc = GrpcServer(self._core, max_message_bytes=settings.grpc_max_input_size)
            port = self._grpc.bind(settings.grpc_address, settings.grpc_port)
            started.append(f"Started GRPCInferenceService at {settings.grpc_address}:{port}")
        if settings.allow_metrics:
            self._metrics = MetricsServer(self._core.render_metrics, log=log.error)
            port = await self._metrics.start(settings.metrics_address, settings.metrics_port)
            started.append(f"Started Metrics Service at {settings.metrics_address}:{port}")
        if self._grpc is not None:
            await self._grpc.start()
        for line in started:
            log.info(line)
        self._sampler.start()

    async def serve(self) -> int:
        """Load the models, serve until a signal, drain; 1 if a model failed under `--exit-on-error` or time ran out."""
        loading = asyncio.ensure_future(self._core.start(self._startup_models()))
        stopping = asyncio.ensure_future(self._stop.wait())
        await asyncio.wait((loading, stopping), return_when=asyncio.FIRST_COMPLETED)
        if not loading.done():
            loading.cancel()
        else:
            await self._log_models()
            if loading.result() and self._settings.exit_on_error:
                log.error("creating server: Internal - failed to load all models: %s", ", ".join(loading.result()))
                stopping.cancel()
                await self._drain()
                return 1
            await stopping
        return await self._drain()

    async def close(self) -> None:
        """Close what is still open, whatever it is doing."""
        self._sampler.stop()
        if self._http is not None:
            await self._http.close()
        if self._grpc is not None:
            await self._grpc.stop(0)
        if self._metrics is not None:
            await self._metrics.close()

    def _startup_models(self) -> Sequence[str] | None:
        names = self._settings.load_model
        if self._settings.model_control_mode is ModelControlMode.NONE or "*" in names:
            return None
        return names

    async def _log_models(self) -> None:
        rows: list[tuple[str, ...]] = []
        for entry in await self._core.repository_index(ready_only=False):
            state = entry.state or ModelReadyState.UNKNOWN
            rows.append((entry.name, entry.version, f"{state.value}: {entry.reason}" if entry.reason else state.value))
        log_table(log, ("Model", "Version", "Status"), rows)

    def _on_signal(self, number: int) -> None:
        if self._stop.is_set():
            log.warning("signal %d again: stopping at once", number)
            os._exit(1)
        log.info("signal %d received, stopping: requests in flight are answered first", number)
        self._stop.set()

    async def _drain(self) -> int:
        self._core.begin_drain()
        try:
            async with asyncio.timeout(self._settings.exit_timeout_secs):
                await asyncio.gather(*(front.drain() for front in (self._http, self._grpc) if front is not None))
                await self._core.close()
        except TimeoutError:
            log.error("failed to stop server: Internal - Exit timeout expired. Exiting immediately.")
            self._core.abort()
            await asyncio.sleep(ANSWER_SECS)
            return 1
        return 0
