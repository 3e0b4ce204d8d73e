"""One process of a worker, from its start to its end."""

import asyncio
import logging
import signal
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import asdict
from typing import Any, TypeVar

from halimede.backends.hosting import WorkerSpec
from halimede.core.accounts import UNBOUNDED, MemoryBounds
from halimede.core.restarts import BRIEF_FAULT_PAUSES_SECS, StartFaultError, describe_exit, is_brief_fault
from halimede.core.types import ErrorCode, internal
from halimede.processes.launcher import Launcher, WorkerProcess
from halimede.processes.output import OutputReader
from halimede.workers.connection.worker_connection import Owners, WorkerConnection
from halimede.workers.supervision.program import Program

log = logging.getLogger(__name__)

T = TypeVar("T")

ENTRY = "halimede.workers.host.main:main"

EXIT_REPORT_SECS = 0.25
"""How long an error is delayed after the channel has closed, so that the zygote can report how the process ended."""


class Life:
    """One process of a worker, from its start to its end, and the connection to it."""

    def __init__(
        self,
        process: WorkerProcess,
        spec: WorkerSpec,
        outputs: Sequence[str],
        owners: Owners,
        loop: asyncio.AbstractEventLoop,
        memory: MemoryBounds = UNBOUNDED,
    ) -> None:
        """Takes over the process. StartFaultError, after its end, if the system has no descriptor left."""
        self.process = process
        self.killed_for = ""
        """Why the server killed it; "" if it did not."""
        self._spec = spec
        self._outputs = outputs
        self._lost: asyncio.Future[str] = loop.create_future()
        try:
            self.connection = WorkerConnection(
                process.channel, spec, outputs, owners, self._on_lost, loop, memory=memory
            )
        except OSError as error:
            _kill(process)
            text = f"the process of instance '{spec.instance}' cannot be used: {error.strerror or error}"
            raise StartFaultError(ErrorCode.UNAVAILABLE, text, is_brief=is_brief_fault(error)) from error
        about = {"model": spec.model, "version": str(spec.version)}
        self._output = OutputReader(process.output, spec.model, about, loop)
        self._exit = loop.create_task(process.wait())

    def _on_lost(self, reason: str) -> None:
        """The channel is closed: the process can no longer be used."""
        self.process.kill(signal.SIGKILL)
        if not self._lost.done():
            self._lost.set_result(reason)

    async def start(self, work: Mapping[str, Any]) -> Any:
        """The answer of the process to START. InferenceError if the process fails or dies, StartFaultError if the
        machine prevented its start."""
        order = {**work, "spec": asdict(self._spec), "outputs": self._outputs}
        starting = asyncio.ensure_future(self.connection.start(order))
        try:
            await asyncio.wait((starting, self._exit, self._lost), return_when=asyncio.FIRST_COMPLETED)
            if starting.done() and not starting.cancelled():
                return starting.result()
            why = await self.wait_end()
            if self._exit.done() and (exit_ := self._exit.result()).error:
                text = f"cannot start a process for '{self._spec.instance}': {exit_.error}"
                raise StartFaultError(ErrorCode.UNAVAILABLE, text, is_brief=exit_.is_brief)
            raise internal(f"Stub process '{self._spec.instance}' is not healthy: {describe_end(why)} while it started")
        finally:
            starting.cancel()

    async def wait_end(self) -> str:
        """Wait until the process has ended or its channel is closed; returns the reason."""
        await asyncio.wait((self._exit, self._lost), return_when=asyncio.FIRST_COMPLETED)
        if not self._exit.done():
            # The channel closes before the zygote reports how the process ended.
            await asyncio.wait((self._exit,), timeout=EXIT_REPORT_SECS)
        elif not self._lost.done():
            # What the process sent before its end may not be read yet.
            await asyncio.wait((self._lost,), timeout=EXIT_REPORT_SECS)
        if self._lost.done() and self._lost.result().startswith(("it sent garbage", "it left more")):
            return self._lost.result()
        if self._exit.done():
            return describe_exit(self._exit.result())
        return self._lost.result() if self._lost.done() else "an unknown cause"

    async def finish(self) -> None:
        """Let the model finalize and wait for the process to end."""
        finishing = asyncio.ensure_future(self.connection.stop())
        await asyncio.wait((finishing, self._exit), return_when=asyncio.FIRST_COMPLETED)
        finishing.cancel()
        await asyncio.shield(self._exit)

    def kill_for_timeout(self) -> None:
        """Kill the process: its batch took too long, and there is no other way to stop it."""
        self.process.kill(signal.SIGKILL)
        if not self._lost.done():
            self._lost.set_result("it was killed, because an execution took too long")

    async def end(self) -> None:
        """Kill the process if it still runs, and free its resources. Called once, as the last method."""
        self.connection.close()
        self.process.kill(signal.SIGKILL)
        # A reference cycle: without this, the shared memory would stay until the garbage collector runs.
        del self.connection
        await self._exit
        self._output.close()
        self.process.close()


def describe_end(why: str) -> str:
    """The clause of an error message for a reason of `Life.wait_end`, such as `it ended by exit code 3`."""
    return why if why.startswith("it ") else f"it ended by {why}"


async def start_first(spec: WorkerSpec, start: Callable[[], Awaitable[T]]) -> T:
    """What `start` returns. While it raises brief faults of the machine, it is repeated a few times within 2 s."""
    for pause_secs in BRIEF_FAULT_PAUSES_SECS:
        try:
            return await start()
        except StartFaultError as error:
            if not error.is_brief:
                raise
            about = {"model": spec.model, "version": str(spec.version)}
            log.warning("%s; the next try in %g s", error.message, pause_secs, extra=about)
        await asyncio.sleep(pause_secs)
    return await start()


async def spawn(spec: WorkerSpec, program: Program, launcher: Launcher) -> WorkerProcess:
    """Start a process of the program. StartFaultError if the system refuses, InferenceError if the server stops."""
    environment = dict(program.environment)
    if spec.device_uuid:
        environment["CUDA_VISIBLE_DEVICES"] = spec.device_uuid
    work = asyncio.to_thread(
        launcher.spawn,
        spec.instance,
        entry=ENTRY,
        python=program.python,
        module=spec.runner.partition(":")[0],
        preload=program.preload,
        environment=environment,
    )
    task = asyncio.ensure_future(work)
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        task.add_done_callback(_discard)
        raise
    except RuntimeError as error:  # no thread
        text = f"cannot start a process for '{spec.instance}': {error}"
        raise StartFaultError(ErrorCode.UNAVAILABLE, text, is_brief=True) from error


def _discard(spawned: "asyncio.Task[WorkerProcess]") -> None:
    """End a process that started after its start was cancelled."""
    if not spawned.cancelled() and spawned.exception() is None:
        _kill(spawned.result())


def _kill(process: WorkerProcess) -> None:
    process.kill(signal.SIGKILL)
    process.close()
