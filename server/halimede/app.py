"""The process of a server: makes its core and its services, starts them in order, and stops them.

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
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from typing import NoReturn

import uvloop

from halimede.core.accounts import MemoryBounds
from halimede.core.observe.start_summary import GRPC, HTTP, METRICS
from halimede.core.types import InferenceError, ModelIndexEntry
from halimede.front_processes.pool import FrontProcesses, wanted_processes
from halimede.front_processes.services import LocalService, Service, make_metrics, make_servers
from halimede.log import EXIT_FLUSH_S, configure, dropped_lines, reopen, shutdown
from halimede.memory_group import memory_bounds
from halimede.native_output import divert_cxx_streams
from halimede.processes.output import OutputReader
from halimede.runtime.limits import count_open_files, open_files_limit, raise_open_files
from halimede.runtime.malloc import keep_large_buffers
from halimede.runtime.watcher import watch
from halimede.serving_core import make_core
from halimede.settings import ModelControlMode, Settings
from halimede.start_report import LOADING_INTERVAL_SECS, TerminalStart, begin_on_terminal, log_tables
from halimede.startup import failed_loads, termination_message, unknown_settings_in
from halimede.termination_message import write_message

log = logging.getLogger(__name__)

ANSWER_SECS = 0.5
"""Time for the last errors of an aborted drain to reach their clients."""

CLOSE_SECS = 1.0
"""Time limit for closing the remaining parts, before the process ends without it."""

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
        self._stop = asyncio.Event()
        self._core = make_core(settings, memory, on_change=self._note_change, dropped_log_lines=self._dropped_lines)
        self._server = self._core.server
        self._front_processes = wanted_processes(settings)
        self._services = self._make_services(memory)
        self._native: OutputReader | None = None
        self._addresses: dict[str, str] = {}
        """Address and port of each listening service."""

    def _make_services(self, memory: MemoryBounds) -> list[Service]:
        """In the order in which their ports are bound."""
        settings, server = self._settings, self._server
        services: list[Service]
        if self._front_processes:
            services = [FrontProcesses(self._front_processes, server, settings, self._core.launcher)]
        else:
            services = [
                LocalService(name, settings, each) for name, each in make_servers(settings, server, memory).items()
            ]
        if settings.allow_metrics:
            services.append(LocalService(METRICS, settings, make_metrics(settings, server.render_metrics)))
        return services

    async def _start(self) -> tuple[list[str], Sequence[ModelIndexEntry]]:
        """Listen, load the models and log the start-up tables; returns what could not be loaded, and the index."""
        await self._listen()
        failed = await self._load()
        index = await self._index()
        if self._terminal is None:
            log_tables(self._settings, index, self._server.metadata(), self._core.inventory)
        if self._settings.allow_http or self._settings.allow_grpc:
            _warn_of_few_files(self._front_processes)
        if failed and self._settings.exit_on_error:
            write_message(termination_message(failed_loads(index)))
        return failed, index

    async def _listen(self) -> None:
        """Bind every port and start to answer: live, but not yet ready."""
        if (printed := divert_cxx_streams()) is not None:
            self._native = OutputReader(printed, "native", {}, asyncio.get_running_loop())
        for service in self._services:
            self._addresses |= service.bind()
        # At the same time: front-end processes take long to start.
        await asyncio.gather(*(service.start() for service in self._services))
        for name, address in self._addresses.items():
            log.info("%s listens at %s", name, address)

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
            return await self._drain(self._settings.drain_delay_secs if self._server.is_ready() else 0)
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
        for name in (GRPC, HTTP, METRICS):
            if name in self._addresses:
                log.info("Started %s at %s", name, self._addresses[name])
        if self._terminal is not None:
            self._terminal.end_with_summary(self._addresses, index, self._server.lifecycle.load_secs)
        is_whole = self._settings.model_control_mode is ModelControlMode.NONE
        watching = (
            asyncio.ensure_future(watch(self._server.lifecycle, is_whole=is_whole)) if self._settings.watch else None
        )
        await stopping
        if watching is not None:
            watching.cancel()
            await asyncio.wait((watching,), timeout=CLOSE_SECS)
        return await self._drain(self._settings.drain_delay_secs)

    async def close(self) -> None:
        """Close everything that is still open, within CLOSE_SECS plus the time that the sampler takes to stop."""
        if self._native is not None:
            self._native.close()
        # The services first: a front-end process that the launcher ends is not to be started again.
        closing = [asyncio.ensure_future(service.close()) for service in self._services]
        ending = self._core.end()
        try:
            async with asyncio.timeout(CLOSE_SECS):
                await asyncio.gather(ending, *closing)
        except TimeoutError:
            log.warning("connections did not close within %g s: the process ends anyway", CLOSE_SECS)

    async def _load(self) -> list[str]:
        showing = asyncio.ensure_future(self._show_loading(self._terminal)) if self._terminal is not None else None
        try:
            return await self._core.start()
        finally:
            if showing is not None:
                showing.cancel()

    async def _show_loading(self, terminal: TerminalStart) -> None:
        while True:
            await asyncio.sleep(LOADING_INTERVAL_SECS)
            terminal.show_loading(self._server.lifecycle.loading())

    async def _index(self) -> Sequence[ModelIndexEntry]:
        """The repository index; empty if a repository gives no answer."""
        try:
            return await self._server.repository_index(ready_only=False)
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

    def _note_change(self) -> None:
        for service in self._services:
            service.note_change()

    def _reopen_log(self) -> None:
        reopen()
        for service in self._services:
            service.reopen_log()

    def _dropped_lines(self) -> int:
        return dropped_lines() + sum(service.dropped_lines() for service in self._services)

    def _on_signal(self, number: int) -> None:
        if self._stop.is_set():
            log.warning("signal %d again: stopping at once", number)
            _end(1, FAST_EXIT_SECS)
        if self._terminal is not None:
            self._terminal.end()
        log.info("Signal (%d) received.", number)
        self._stop.set()

    def _requests_in_flight(self) -> str:
        busy, _ = self._server.lifecycle.busy()
        return f"{busy} model versions that have in-flight inferences"

    def _models_alive(self) -> str:
        _, alive = self._server.lifecycle.busy()
        # At this point the front ends are drained.
        return f"{alive} live models and 0 in-flight non-inference requests"

    async def _drain(self, delay_secs: float) -> int:
        """Become not ready, serve for the delay, then drain: at most the delay plus the exit timeout in all."""
        self._server.begin_drain()
        if delay_secs:
            log.info("no longer ready; continuing to serve for %g s", delay_secs)
            for service in self._services:
                service.send_away()
            await asyncio.sleep(delay_secs)
        log.info("Waiting for in-flight requests to complete.")
        self._server.expect_few()
        end = asyncio.get_running_loop().time() + self._settings.exit_timeout_secs
        try:
            async with asyncio.timeout_at(end):
                async with _progress_logged(end, self._requests_in_flight):
                    await asyncio.gather(*(service.drain() for service in self._services))
                log.info("All models are stopped, unloading models")
                async with _progress_logged(end, self._models_alive):
                    await self._server.close()
        except TimeoutError:
            log.error("failed to stop server: Internal - Exit timeout expired. Exiting immediately.")
            self._server.abort()
            await asyncio.sleep(ANSWER_SECS)
            return 1
        return 0


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
