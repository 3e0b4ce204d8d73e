"""The composition root: makes the parts, starts them in order, and stops them. Only this module may import all others.

Start: bind all ports (a busy one fails before any model is loaded), listen, load the models, become ready, log it. A
signal ends the start, whatever it waits for.
Stop: become not ready; continue to serve for the drain delay, in which load balancers notice and clients are asked to
connect elsewhere; then drain the front ends, so that requests in flight are answered, then stop the models; at the time
limit all remaining requests are answered with an error. The exit timeout begins when the delay ends. A second signal
ends the process at once.
"""

import asyncio
import logging
import os
import signal
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

import uvloop

from halimede.core.accounts import MemoryBounds
from halimede.core.observe.access_lines import AccessLog
from halimede.core.schedule.policy import StartHold
from halimede.core.types import InferenceError, ModelIndexEntry
from halimede.front_processes.pool import FrontProcesses, wanted_processes
from halimede.front_processes.services import Service, access_log_of, make_grpc, make_http, make_turns
from halimede.frontends.metrics import MetricsServer
from halimede.frontends.unix_socket import UNIX
from halimede.log import (
    EXIT_FLUSH_S,
    admits_access,
    configure,
    dropped_lines,
    log_access,
    reopen,
    shutdown,
)
from halimede.native_output import divert_cxx_streams
from halimede.runtime.core_server import CoreServer
from halimede.runtime.devices import read_inventory
from halimede.runtime.lifecycle import ModelLifecycle
from halimede.runtime.limits import count_open_files, open_files_limit, raise_open_files
from halimede.runtime.malloc import keep_large_buffers
from halimede.runtime.prepare import LoadOptions
from halimede.runtime.repository import ModelRepository
from halimede.runtime.requests import RequestTable
from halimede.runtime.sampler import make_sampler
from halimede.runtime.threads import run_in_thread
from halimede.runtime.watcher import watch
from halimede.settings import ModelControlMode, Settings
from halimede.start_report import (
    GRPC,
    HTTP,
    LOADING_INTERVAL_SECS,
    METRICS,
    TerminalStart,
    begin_on_terminal,
    log_tables,
)
from halimede.startup import failed_loads, termination_message, unknown_settings_in
from halimede.termination import write_message
from halimede.workers.launcher import Launcher
from halimede.workers.memory_group import memory_bounds
from halimede.workers.output import OutputReader

if TYPE_CHECKING:
    from halimede.fetch.store_repository import StoreRepository

log = logging.getLogger(__name__)

ANSWER_SECS = 0.5
"""Time for the last errors of an aborted drain to reach their clients."""

CLOSE_SECS = 1.0
"""Time limit for closing the remaining parts, before the process ends without it."""

FIRST_SAMPLE_SECS = 5.0
"""Time limit for the first read of the devices' memory, before models are loaded without it."""

FAST_EXIT_SECS = 0.2
"""Time for writing the log in a process that must end at once."""


FEW_CONNECTIONS = 4096
"""A server that can have fewer connections logs a warning: a fleet of clients may need more."""

FRONT_END_FILES = 32
"""About as many files a front-end process has open without connections."""


def run(settings: Settings) -> NoReturn:
    """Serve until a signal, and end the process: exit code 0 after a complete stop, else 1."""
    # CUDA orders devices by speed by default, the inventory by bus, like nvidia-smi. Set this before CUDA is opened.
    os.environ.setdefault("CUDA_DEVICE_ORDER", "PCI_BUS_ID")
    terminal = None
    try:
        configure(settings)
        terminal = begin_on_terminal(settings)
        for notice in (*settings.notices, *unknown_settings_in(settings)):
            log.warning("%s", notice)
        memory = memory_bounds()
        keep_large_buffers(memory)
        raise_open_files()
        code = asyncio.Runner(loop_factory=uvloop.new_event_loop).run(_serve(settings, memory, terminal))
    except (InferenceError, OSError) as error:
        log.error("%s", error)
        code = 1
    except Exception:
        log.exception("the server failed")
        code = 1
    if terminal is not None:
        terminal.end()
    _end(code)


def _end(code: int, log_secs: float = EXIT_FLUSH_S) -> NoReturn:
    # Not through the interpreter's shutdown: that waits for threads that models and drivers left behind, and may crash
    # while libraries are unloaded. Models' prints are flushed first, unless they go to a pipe that is not read.
    flushing = threading.Thread(target=_flush_prints, daemon=True)
    flushing.start()
    flushing.join(log_secs)
    shutdown(log_secs)
    os._exit(code)


def _flush_prints() -> None:
    with suppress(OSError, ValueError):
        print(end="", flush=True)


def _warn_of_few_files(front_ends: int) -> None:
    """Warn if few file descriptors are left once the models are loaded: connections need them."""
    allowed, in_use = open_files_limit(), count_open_files()
    if front_ends:
        connections = front_ends * max(0, allowed - FRONT_END_FILES)
        if connections < FEW_CONNECTIONS:
            log.warning(
                "each of %d front-end processes may open %d files: connections beyond %d are turned away; raise the "
                "limit with `ulimit -n`",
                *(front_ends, allowed, connections),
            )
    elif allowed - in_use < FEW_CONNECTIONS:
        log.warning(
            "this process may open %d files and has %d open with its models loaded: connections beyond %d are turned "
            "away; raise the limit with `ulimit -n`",
            *(allowed, in_use, max(0, allowed - in_use)),
        )


async def _serve(settings: Settings, memory: MemoryBounds, terminal: TerminalStart | None) -> int:
    app = App(settings, memory, terminal)
    try:
        return await app.serve()
    finally:
        await app.close()


class App:
    """One server process: its front ends and one core."""

    def __init__(self, settings: Settings, memory: MemoryBounds, terminal: TerminalStart | None = None) -> None:
        self._settings = settings
        self._terminal = terminal
        self._memory = memory
        self._stop = asyncio.Event()
        self._inventory = read_inventory(settings.device_list, settings.min_supported_compute_capability)
        self._sampler = make_sampler(
            settings.metrics_interval_ms,
            self._inventory,
            cpu=settings.allow_cpu_metrics,
            gpu=settings.allow_gpu_metrics,
        )
        self._launcher = Launcher(settings.hang_timeout_secs, memory)
        self._hangs: asyncio.Task[None] | None = None
        options = LoadOptions(
            inventory=self._inventory,
            backend_config=settings.backend_config,
            process_per_device=settings.process_per_device,
            allow_pickle=settings.allow_pickle,
            autocomplete=not settings.disable_auto_complete_config,
            launcher=self._launcher,
            backend_directory=settings.backend_directory,
            log_verbose=settings.log_verbose,
            hold=StartHold(settings.delay_scheduler, settings.backlog_delay_scheduler),
        )
        self._stores = _stores(settings)
        repository = self._stores or ModelRepository(
            _directories(settings), settings.model_file, settings.model_config_name
        )
        self._lifecycle = ModelLifecycle(
            repository,
            options,
            settings.model_load_thread_count,
            retry_count=settings.model_load_retry_count,
            unload_wait_secs=settings.unload_wait_secs,
            table=RequestTable(
                memory=memory,
                max_state_bytes=settings.max_sequence_state_size,
                max_sequence_id_bytes=settings.max_sequence_id_size,
            ),
        )
        self._core = CoreServer(
            self._lifecycle,
            self._sampler,
            server_id=settings.id,
            server_version=settings.server_version,
            control_mode=settings.model_control_mode,
            strict_readiness=settings.strict_readiness,
            metrics_config=settings.metrics_config,
            dropped_log_lines=self._dropped_lines,
            inventory=self._inventory,
            hung_processes=self._launcher.hangs.ended,
        )
        self._fronts: FrontProcesses | None = None
        processes = wanted_processes(settings)
        if processes > 1 and (settings.allow_http or settings.allow_grpc):
            self._fronts = FrontProcesses(processes, self._core, settings, self._launcher)
            self._core.on_change(self._fronts.note_change)
        self._services: list[Service] = [] if self._fronts is None else [self._fronts]
        """HTTP and gRPC."""
        self._metrics: MetricsServer | None = None
        self._native: OutputReader | None = None
        self._places: dict[str, str] = {}
        """Address and port of each listening service."""

    async def _start(self) -> tuple[list[str], Sequence[ModelIndexEntry]]:
        """Listen, load the models and log the start-up tables; returns what could not be loaded, and the index."""
        await self._listen()
        failed = await self._load()
        index = await self._index()
        if self._terminal is None:
            log_tables(self._settings, index, self._core.metadata(), self._inventory)
        if self._settings.allow_http or self._settings.allow_grpc:
            _warn_of_few_files(self._fronts.count if self._fronts is not None else 0)
        if failed and self._settings.exit_on_error:
            write_message(termination_message(failed_loads(index)))
        return failed, index

    async def _listen(self) -> None:
        """Bind every port and start to answer: live, but not yet ready."""
        self._hangs = asyncio.ensure_future(self._launcher.hangs.run())
        if (printed := divert_cxx_streams()) is not None:
            self._native = OutputReader(printed, "native", {}, asyncio.get_running_loop())
        settings = self._settings
        access_log = access_log_of(settings)
        if self._fronts is not None:
            if settings.allow_http:
                self._places[HTTP] = _place(settings.http_address, self._fronts.bind_http())
            if settings.allow_grpc:
                self._places[GRPC] = _place(settings.grpc_address, self._fronts.bind_grpc())
        else:
            await self._listen_here(access_log)
        if settings.allow_metrics:
            self._metrics = MetricsServer(self._core.render_metrics, log=log.error)
            if settings.log_verbose:
                self._metrics.log_requests(log.debug)
            if access_log is not None:
                # Successful scrapes are not logged.
                self._metrics.log_access(AccessLog(admits_access, log_access))
            port = await self._metrics.start(settings.metrics_address, settings.metrics_port)
            self._places[METRICS] = _place(settings.metrics_address, port)
        if self._fronts is not None:
            await self._fronts.start()
        for service, place in self._places.items():
            log.info("%s listens at %s", service, place)
        self._sampler.start()

    async def _listen_here(self, access_log: AccessLog | None) -> None:
        """Serve HTTP and gRPC in this process."""
        settings, turns = self._settings, make_turns(self._settings)
        if settings.allow_http:
            http = make_http(settings, self._core, turns, access_log, self._memory)
            self._services.append(http)
            port = await http.start(settings.http_address, settings.http_port, settings.reuse_http_port)
            self._places[HTTP] = _place(settings.http_address, port)
        if settings.allow_grpc:
            grpc = make_grpc(settings, self._core, turns, access_log, self._memory)
            self._services.append(grpc)
            port = grpc.bind(settings.grpc_address, settings.grpc_port)
            grpc.start()
            self._places[GRPC] = _place(settings.grpc_address, port)

    async def serve(self) -> int:
        """Start, serve until a signal, drain; 1 if a model failed under `--exit-on-error` or time ran out. OSError and
        InferenceError if the server cannot start."""
        self._handle_signals()
        # A stop ends every wait of the start: for processes that start, models, and a repository that gives no answer.
        starting = asyncio.ensure_future(self._start())
        stopping = asyncio.ensure_future(self._stop.wait())
        await asyncio.wait((starting, stopping), return_when=asyncio.FIRST_COMPLETED)
        if not starting.done():
            starting.cancel()
            await asyncio.wait((starting,), timeout=CLOSE_SECS)
            # No delay before the server was ever ready: no client was sent here.
            return await self._drain(self._settings.drain_delay_secs if self._core.is_ready() else 0)
        failed, index = starting.result()
        if failed and self._settings.exit_on_error:
            stopping.cancel()
            await self._drain(delay_secs=0)
            # The last line says why, because that is where people look.
            causes = "; ".join(failed_loads(index)) or ", ".join(failed)
            log.error("creating server: Internal - failed to load all models: %s", causes)
            return 1
        if failed:
            log.error("Internal: failed to load all models")
        # Scripts wait for these lines before they send requests.
        for service in (GRPC, HTTP, METRICS):
            if service in self._places:
                log.info("Started %s at %s", service, self._places[service])
        if self._terminal is not None:
            self._terminal.end_with_summary(self._places, index, self._lifecycle.load_secs)
        is_whole = self._settings.model_control_mode is ModelControlMode.NONE
        watching = asyncio.ensure_future(watch(self._lifecycle, is_whole=is_whole)) if self._settings.watch else None
        await stopping
        if watching is not None:
            watching.cancel()
            await asyncio.wait((watching,), timeout=CLOSE_SECS)
        return await self._drain(self._settings.drain_delay_secs)

    async def close(self) -> None:
        """Close everything that is still open, within CLOSE_SECS plus the time that the sampler takes to stop."""
        self._sampler.stop()
        if self._hangs is not None:
            self._hangs.cancel()
        if self._native is not None:
            self._native.close()
        closing: list[Awaitable[None]] = [service.close() for service in self._services]
        if self._metrics is not None:
            closing.append(self._metrics.close())
        # No need to wait for its end: the processes that it started end with this process.
        closing.append(run_in_thread("close-launcher", self._launcher.close))
        if self._stores is not None:
            closing.append(run_in_thread("remove-fetched", self._stores.close))
        try:
            async with asyncio.timeout(CLOSE_SECS):
                await asyncio.gather(*closing)
        except TimeoutError:
            log.warning("connections did not close within %g s: the process ends anyway", CLOSE_SECS)

    async def _load(self) -> list[str]:
        # The memory of devices is read before the first load, to know later what the models need.
        await run_in_thread("first-sample", partial(self._sampler.wait_first, FIRST_SAMPLE_SECS))
        showing = asyncio.ensure_future(self._show_loading(self._terminal)) if self._terminal is not None else None
        try:
            return await self._core.start(self._startup_models())
        finally:
            if showing is not None:
                showing.cancel()

    async def _show_loading(self, terminal: TerminalStart) -> None:
        while True:
            await asyncio.sleep(LOADING_INTERVAL_SECS)
            terminal.show_loading(self._lifecycle.loading())

    def _startup_models(self) -> Sequence[str] | None:
        names = self._settings.load_model
        if self._settings.model_control_mode is ModelControlMode.NONE or "*" in names:
            return None
        return names

    async def _index(self) -> Sequence[ModelIndexEntry]:
        """The repository index; empty if a repository gives no answer."""
        try:
            return await self._core.repository_index(ready_only=False)
        except InferenceError as error:
            log.error("the repository index is not known: %s", error)
            return ()

    def _handle_signals(self) -> None:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._on_signal, number)
        if self._settings.log_file is None and os.isatty(2):
            # Its terminal is closed.
            loop.add_signal_handler(signal.SIGHUP, self._on_signal, signal.SIGHUP)
        else:
            # Sent by log rotation.
            loop.add_signal_handler(signal.SIGHUP, self._reopen_log)
        for number in (signal.SIGUSR1, signal.SIGUSR2):
            # By default these signals end the process. A handler and not SIG_IGN, which child processes would inherit.
            loop.add_signal_handler(number, _ignore)

    def _reopen_log(self) -> None:
        reopen()
        if self._fronts is not None:
            self._fronts.reopen_log()

    def _dropped_lines(self) -> int:
        return dropped_lines() + (self._fronts.dropped_lines() if self._fronts is not None else 0)

    def _on_signal(self, number: int) -> None:
        if self._stop.is_set():
            log.warning("signal %d again: stopping at once", number)
            _end(1, FAST_EXIT_SECS)
        if self._terminal is not None:
            self._terminal.end()
        log.info("Signal (%d) received.", number)
        self._stop.set()

    def _requests_in_flight(self) -> str:
        busy, _ = self._lifecycle.busy()
        return f"{busy} model versions that have in-flight inferences"

    def _models_alive(self) -> str:
        _, alive = self._lifecycle.busy()
        # At this point the front ends are drained.
        return f"{alive} live models and 0 in-flight non-inference requests"

    async def _serve_on(self, delay_secs: float) -> None:
        """Continue to serve for the delay, while clients are asked to connect elsewhere."""
        for service in self._services:
            service.send_away()
        await asyncio.sleep(delay_secs)

    async def _drain(self, delay_secs: float) -> int:
        """Become not ready, serve for the delay, then drain: at most the delay plus the exit timeout in all."""
        self._core.begin_drain()
        if delay_secs:
            log.info("no longer ready; continuing to serve for %g s", delay_secs)
            await self._serve_on(delay_secs)
        log.info("Waiting for in-flight requests to complete.")
        self._core.expect_few()
        end = asyncio.get_running_loop().time() + self._settings.exit_timeout_secs
        try:
            async with asyncio.timeout_at(end):
                async with _progress_logged(end, self._requests_in_flight):
                    await asyncio.gather(*(service.drain() for service in self._services))
                log.info("All models are stopped, unloading models")
                async with _progress_logged(end, self._models_alive):
                    await self._core.close()
        except TimeoutError:
            log.error("failed to stop server: Internal - Exit timeout expired. Exiting immediately.")
            self._core.abort()
            await asyncio.sleep(ANSWER_SECS)
            return 1
        return 0


def _directories(settings: Settings) -> tuple[Path, ...]:
    return tuple(each for each in settings.model_repository if isinstance(each, Path))


def _stores(settings: Settings) -> "StoreRepository | None":
    """The repository if parts of it are in stores, else None."""
    uris = [each for each in settings.model_repository if isinstance(each, str)]
    if not uris:
        return None
    # Imported here, because only servers with stores need the libraries of stores.
    from halimede.fetch.store_repository import StoreRepository
    from halimede_spec.uri import parse_uri

    stores = tuple(map(parse_uri, uris))
    return StoreRepository(_directories(settings), stores, settings.model_config_name, dict(os.environ))


@asynccontextmanager
async def _progress_logged(end: float, what: Callable[[], str]) -> AsyncIterator[None]:
    """Log each second what a stop still waits for, in Triton's words, and how many seconds are left until `end`."""
    loop = asyncio.get_running_loop()

    async def log_each_second() -> None:
        while True:
            log.info("Timeout %d: Found %s", round(end - loop.time()), what())
            await asyncio.sleep(1)

    logging_task = loop.create_task(log_each_second())
    try:
        yield
    finally:
        logging_task.cancel()


def _ignore() -> None:
    """Ignore a signal."""


def _place(address: str, port: int) -> str:
    return address if address.startswith(UNIX) else f"{address}:{port}"
